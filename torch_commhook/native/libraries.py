"""Loads the operator library, and says what to do where that fails."""

from __future__ import annotations

from pathlib import Path

import torch

HOW_TO_BUILD = "python setup.py develop   (or: pip install --no-build-isolation .)"

_LIBRARY_FOLDER = Path(__file__).parent.parent / "lib"


class NativeLibraryError(ImportError):
    """A native library of torch_commhook is missing, or was built for another torch or Python.

    Example:
        >>> with tempfile.NamedTemporaryFile(suffix=".so") as file:
        ...     load_cpp_hooks(file.name)
        Traceback (most recent call last):
            ...
        torch_commhook.native.libraries.NativeLibraryError: load_cpp_hooks: ... does not load...
    """


def _release(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``: the C++ interfaces are stable within one minor release."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_built_for(built_for: str) -> None:
    """Raise NativeLibraryError unless the running torch is of the release ``built_for``."""
    if _release(built_for) != _release(torch.__version__):
        raise NativeLibraryError(
            f"torch_commhook was built for torch {built_for}, but torch {torch.__version__} is "
            f"installed. Build it again: {HOW_TO_BUILD}"
        )


def load_ops() -> None:
    """Register ``torch.ops.commhook``.

    Raises:
        NativeLibraryError: the library is not there, does not load, or is of another torch.
    """
    libraries = sorted(_LIBRARY_FOLDER.glob("_ops*.so"))
    if not libraries:
        raise NativeLibraryError(
            f"torch_commhook's operator library is not in {_LIBRARY_FOLDER}. "
            f"Build it for the installed torch {torch.__version__}: {HOW_TO_BUILD}"
        )
    built_for = _read_built_for(libraries[0])
    if built_for is not None:  # before loading: another torch's symbols may not even resolve
        check_built_for(built_for)
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        raise NativeLibraryError(
            f"{libraries[0].name} of torch_commhook does not load: {error}. It was built for torch "
            f"{built_for or 'unknown'}, and torch {torch.__version__} is installed. "
            f"Build it again: {HOW_TO_BUILD}"
        ) from error


def _read_built_for(library: Path) -> str | None:
    """The torch version that a library was built for, from the mark that it carries."""
    mark = b"commhook built for torch "
    data = library.read_bytes()
    start = data.find(mark)
    if start < 0:
        return None
    start += len(mark)
    return data[start : data.index(b"\0", start)].decode()
