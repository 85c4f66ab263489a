"""Loads the native libraries, the library's own and those with a user's hooks."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import torch

from torch_commhook import _C
from torch_commhook.native.stamp import (
    HOW_TO_BUILD,
    LIBRARY_FOLDER,
    operator_library,
    read_built_for,
    release,
)

# ---- loads the operator library, and explains failures -------------------------------------------


_LIBRARY_FOLDER = LIBRARY_FOLDER


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
    library = operator_library(_LIBRARY_FOLDER)
    if library is None:
        raise NativeLibraryError(
            f"torch_commhook's operator library is not in {_LIBRARY_FOLDER}. "
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


# ---- libraries of C++ hooks: the headers to build them with, and their loading -------------------


#: Digests of the files that this process has loaded.
_loaded: dict[str, bytes] = {}


def include_paths() -> list[str]:
    """Return the folders of the headers, for ``#include <commhook/comm_hook.h>``.

    Pass them to ``torch.utils.cpp_extension`` as ``include_dirs``.

    Example:
        >>> [path.rpartition("/")[2] for path in include_paths()]
        ['include']
    """
    package = Path(__file__).parent.parent
    # Installed with the package; in a working tree beside it.
    folders = (package / "include", package.parent / "csrc" / "include")
    return [str(folder) for folder in folders if (folder / "commhook").is_dir()][:1]


def load_cpp_hooks(path: str | os.PathLike[str]) -> list[str]:
    """Load the hooks of a library that was built against ``commhook/comm_hook.h``.

    The library stays loaded until the process ends. Loading it again does nothing; if it was
    rebuilt meanwhile, loading raises an error.

    Args:
        path: the path of the shared library, a file on this machine.

    Returns:
        The names of its hooks: those for :class:`hooks.cpp`, then those for :class:`autograd.cpp`.

    Raises:
        FileNotFoundError: there is no such file.
        NativeLibraryError: it does not load, was built for another torch or torch_commhook, or has
            changed since this process loaded it.
        ValueError: it registers no hooks, or one with a name that is taken, or incorrectly; or the
            path cannot be encoded in UTF-8.

    Example:
        >>> load_cpp_hooks("no_such_library.so")
        Traceback (most recent call last):
            ...
        FileNotFoundError: load_cpp_hooks: there is no file ...
    """
    file = os.path.abspath(os.fsdecode(path))
    try:
        file.encode()
    except UnicodeEncodeError:
        raise ValueError(f"load_cpp_hooks: path must be encodable in UTF-8, got {file!a}") from None
    if not os.path.isfile(file):
        raise FileNotFoundError(f"load_cpp_hooks: there is no file '{file}'")
    if _is_cut_short(file):
        raise NativeLibraryError(f"load_cpp_hooks: '{file}' does not load: it is cut short")
    contents = hashlib.sha256(Path(file).read_bytes()).digest()
    if _loaded.get(file, contents) != contents:
        raise NativeLibraryError(
            f"load_cpp_hooks: '{file}' has been rebuilt since this process loaded it; restart the "
            "process"
        )
    try:
        _C.open_hook_library(file)
        _loaded[file] = contents  # from now on, whatever the file contains
        return _C.take_hook_library(file)
    except ImportError as error:
        raise NativeLibraryError(str(error)) from None


def _is_cut_short(file: str) -> bool:
    """Whether an ELF file ends before its segments do; loading it would end the process."""
    size = os.path.getsize(file)
    with open(file, "rb") as library:
        header = library.read(64)
        # 64 bits, little-endian: the platforms of torch.
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            return False  # the loader reports what it is
        offset, entry_size, count = struct.unpack_from("<Q14xHH", header, 32)
        library.seek(offset)
        segments = library.read(entry_size * count)
    if entry_size < 56 or len(segments) < entry_size * count:
        return True
    for start in range(0, len(segments), entry_size):
        in_file, _, _, in_file_size = struct.unpack_from("<8xQQQQ", segments, start)
        if in_file + in_file_size > size:
            return True
    return False
