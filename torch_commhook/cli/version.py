"""``--version``: prints the version of the package, and of the torch that it was built for."""

from __future__ import annotations

import sys

from torch_commhook.native.stamp import operator_library, read_built_for


def version_text() -> str:
    """Return ``torch_commhook 0.1.0, built for torch 2.13.0+cpu``, without importing torch."""
    import torch_commhook

    library = operator_library()
    built_for = None if library is None else read_built_for(library)
    build = "not built" if library is None else f"built for torch {built_for or 'unknown'}"
    return f"torch_commhook {torch_commhook.__version__}, {build}"


def end_after_version() -> None:
    """If ``--version`` is the only argument, print the version and end, before torch loads."""
    if sys.argv[1:] == ["--version"]:
        print(version_text())
        sys.exit()
