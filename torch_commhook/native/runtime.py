"""The runtime's functions: they call a hook and check its result. Also hooks in C++, and Dynamo.

Implemented in ``csrc/runtime``. They keep the semantics of PyTorch's ``PythonCommHook``. Where that
ends the process or raises an unclear error, they raise exceptions that name hook and bucket.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from torch_commhook.native.libraries import NativeLibraryError, check_built_for
from torch_commhook.native.stamp import HOW_TO_BUILD

# ---- excludes functions from torch's compiler, without importing it ------------------------------


_Function = TypeVar("_Function", bound=Callable[..., Any])


def skip_dynamo(function: _Function, *, with_callees: bool = True) -> _Function:
    """Let Python run a function and all that it calls, wherever it is called.

    For functions that C++ (autograd, the garbage collector) calls while compiled code runs. The
    compiler would compile them separately, without benefit. They can still be traced as part of
    their caller.

    Args:
        function: a Python function.
        with_callees: whether this also applies to the functions that it calls.
    """
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    strategy = _FrameExecStrategy(_FrameAction.SKIP, callees)
    set_code_exec_strategy(function.__code__, strategy)
    return function


# ---- the runtime's functions: they call a communication hook and check its result ----------------


if not dist.is_available():
    raise ImportError("torch_commhook needs a torch that was built with torch.distributed")

try:
    from torch_commhook import _C
except ImportError as error:
    raise NativeLibraryError(
        f"torch_commhook's runtime _C does not load: {error}. torch {torch.__version__} is "
        f"installed. Build it again: {HOW_TO_BUILD}"
    ) from error
check_built_for(_C.built_for_torch())


def run_hook(hook: Callable[..., Any], state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """Call ``hook(state, bucket)`` and return its result as a Future.

    Args:
        hook: any callable that :func:`check_hook` accepts.
        state: the hook's first argument.
        bucket: a :class:`torch_commhook.GradBucket` or a ``torch.distributed.GradBucket``.

    Returns:
        The hook's Future; a completed one if the hook returned a tensor. This does not check its
        value; :func:`parse_hook_result` does.

    Raises:
        TypeError: the hook returned neither a Future nor a tensor. The message names hook, bucket
            and the result.
        Exception: the hook raised it, with its type and traceback; a note names hook and bucket
            (Python 3.11 and newer).

    Example:
        >>> def hook(state, bucket):
        ...     return bucket.buffer() * state
        >>> bucket = GradBucket([torch.zeros(3)], gradients=[torch.ones(3)])
        >>> run_hook(hook, 2.0, bucket).wait()
        tensor([2., 2., 2.])
    """
    return _C.run_hook(hook, state, bucket)


def parse_hook_result(value: object, bucket: Any) -> Tensor:
    """Return the tensor in a hook's completed Future, checked against the bucket.

    Args:
        value: the result of ``future.wait()``: a tensor, a list or tuple of one tensor (the value
            of ``Work.get_future()``), or an exception (as ``Future.set_exception`` stores it).
        bucket: a :class:`torch_commhook.GradBucket` or a ``torch.distributed.GradBucket``.

    Returns:
        The tensor, contiguous, in the shape of ``bucket.buffer()``.

    Raises:
        TypeError: it is not a tensor, or has another dtype or layout than the buffer.
        ValueError: it has another number of elements or device, or there are several tensors.
        Exception: ``value``, if it is an exception.

    Example:
        >>> bucket = GradBucket([torch.zeros(3)], gradients=[torch.ones(3)])
        >>> parse_hook_result([torch.ones(3)], bucket)
        tensor([1., 1., 1.])
        >>> parse_hook_result(torch.ones(2), bucket)
        Traceback (most recent call last):
            ...
        ValueError: bucket 0 of 1: the result must have 3 elements, one for each of the...
    """
    return _C.parse_hook_result(value, bucket)


def check_hook(hook: object) -> None:
    """Raise an error if a hook cannot work, before training starts.

    Partials, bound methods, callable objects and any argument names are allowed. Annotations may be
    missing, strings, or of PyTorch's classes or ours.

    Args:
        hook: any object.

    Raises:
        TypeError: it is not callable, a class instead of an instance, not callable as
            ``hook(state, bucket)``, a coroutine or a generator function.
        ValueError: an annotation says that it takes no GradBucket or returns no tensor.

    Example:
        >>> check_hook(hooks.allreduce())
        >>> check_hook(lambda bucket: bucket)
        Traceback (most recent call last):
            ...
        TypeError: check_hook: hook ... must be callable as hook(state, bucket), got the...
    """
    _C.check_hook(hook)


def check_hook_of(op: str, hook: object) -> None:
    """As :func:`check_hook`; errors begin with the name of the function that the user called."""
    try:
        check_hook(hook)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{op}: {str(error).removeprefix('check_hook: ')}") from None


def hook_name(hook: object) -> str:
    """Return a hook's name in errors, such as ``package.module.function``."""
    return _C.hook_name(hook)


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
