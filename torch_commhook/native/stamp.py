"""Reads the torch version that the operator library was built for from its file.

Imports no torch, so it works even if torch does not load.
"""

from __future__ import annotations

from pathlib import Path

HOW_TO_BUILD = "python setup.py develop   (or: pip install --no-build-isolation .)"

#: The folder of the package torch_commhook.
PACKAGE = Path(__file__).parent.parent

LIBRARY_FOLDER = PACKAGE / "lib"

_MARK = b"commhook built for torch "


def operator_library(folder: Path = LIBRARY_FOLDER) -> Path | None:
    """The operator library's file, or None if the package has not been built."""
    return next(iter(sorted(folder.glob("_ops*.so"))), None)


def read_built_for(library: Path) -> str | None:
    """The torch version that a library was built for.

    Args:
        library: the file of ``_ops``.

    Returns:
        A version such as ``"2.13.0+cpu"``, or None if the file contains none.

    Raises:
        OSError: the file cannot be read.
    """
    data = library.read_bytes()
    start = data.find(_MARK)
    if start < 0:
        return None
    start += len(_MARK)
    return data[start : data.index(b"\0", start)].decode()


def release(version: str) -> str:
    """``2.13`` for ``2.13.0+cpu``: the C++ interfaces are stable within one minor release."""
    return ".".join(version.split("+")[0].split(".")[:2])
