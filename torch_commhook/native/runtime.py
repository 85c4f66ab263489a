"""The runtime's functions: calling a communication hook and taking its result.

Implemented in ``csrc/runtime``. They keep the semantics of PyTorch's ``PythonCommHook`` and turn
what ends the process or fails unnamed there into exceptions that name hook and bucket.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.native.libraries import HOW_TO_BUILD, NativeLibraryError, check_built_for

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
    """Call ``hook(state, bucket)`` and return what it gives as a Future.

    Args:
        hook: any callable that :func:`check_hook` accepts.
        state: passed to the hook as it is.
        bucket: a :class:`torch_commhook.GradBucket` or a ``torch.distributed.GradBucket``.

    Returns:
        The hook's Future; a tensor that it returned is put into a completed one. The Future's
        value is not checked here: :func:`parse_hook_result` does that.

    Raises:
        TypeError: the hook returned neither a Future nor a tensor. Names hook, bucket and what
            came back.
        Exception: whatever the hook raised, with its type and traceback; a note names hook and
            bucket (Python 3.11 and newer).

    Example:
        >>> def hook(state, bucket):
        ...     return bucket.buffer() * state
        >>> bucket = GradBucket([torch.zeros(3)], gradients=[torch.ones(3)])
        >>> run_hook(hook, 2.0, bucket).wait()
        tensor([2., 2., 2.])
    """
    return _C.run_hook(hook, state, bucket)


def parse_hook_result(value: object, bucket: Any) -> Tensor:
    """The tensor in a hook's completed Future, checked against the bucket.

    Args:
        value: what ``future.wait()`` gave: a tensor, a list or tuple of one tensor (what
            ``Work.get_future()`` holds), or an exception (what ``Future.set_exception`` stores).
        bucket: a :class:`torch_commhook.GradBucket` or a ``torch.distributed.GradBucket``.

    Returns:
        The tensor, contiguous, in the shape of ``bucket.buffer()``.

    Raises:
        TypeError: no tensor, or one of another dtype or layout than the buffer.
        ValueError: another number of elements, another device, or several tensors.
        Exception: the exception that the Future held.

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
    """Raise what a user must know about a hook before training starts.

    Partials, bound methods, callable objects and any argument names are fine. Annotations may be
    missing, strings, or of PyTorch's classes or ours.

    Args:
        hook: any object.

    Raises:
        TypeError: not callable, a class instead of an instance, not callable as
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


def hook_name(hook: object) -> str:
    """The name that errors give a hook, such as ``package.module.function``."""
    return _C.hook_name(hook)


def hook_on_bucket(hook: str, index: int, count: int) -> str:
    """How errors name a hook and its bucket."""
    # A compiler of dynamic shapes makes variables of numbers, of which there is no text.
    return f"hook '{hook}' on bucket {operator.index(index)} of {operator.index(count)}"
