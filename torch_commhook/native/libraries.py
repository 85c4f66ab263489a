"""Loads the operator library, and explains failures."""

from __future__ import annotations

import torch

from torch_commhook.native.stamp import (
    HOW_TO_BUILD,
    LIBRARY_FOLDER,
    operator_library,
    read_built_for,
    release,
)


class NativeLibraryError(ImportError):
    """A native library of torch_commhook is missing, or was built for another torch or Python.

    Example:
        >>> with tempfile.NamedTemporaryFile(suffix=".so") as file:
        ...     load_cpp_hooks(file.name)
        Traceback (most recent call last):
            ...
        torch_commhook.native.libraries.NativeLibraryError: load_cpp_hooks: ... does not load...
    """


def check_built_for(built_for: str) -> None:
    """Raise NativeLibraryError unless the running torch is of the release ``built_for``."""
    if release(built_for) != release(torch.__version__):
        raise NativeLibraryError(
            f"torch_commhook was built for torch {built_for}, but torch {torch.__version__} is "
            f"installed. Build it again: {HOW_TO_BUILD}"
        )


def load_ops() -> None:
    """Register ``torch.ops.commhook``.

    Raises:
        NativeLibraryError: the library is not there, does not load, or is of another torch.
    """
    library = operator_library(LIBRARY_FOLDER)
    if library is None:
        raise NativeLibraryError(
            f"torch_commhook's operator library is not in {LIBRARY_FOLDER}. "
            f"Build it for the installed torch {torch.__version__}: {HOW_TO_BUILD}"
        )
    built_for = read_built_for(library)
    if built_for is not None:  # before loading: another torch's symbols may be missing
        check_built_for(built_for)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise NativeLibraryError(
            f"{library.name} of torch_commhook does not load: {error}. It was built for torch "
            f"{built_for or 'unknown'}, and torch {torch.__version__} is installed. "
            f"Build it again: {HOW_TO_BUILD}"
        ) from error
