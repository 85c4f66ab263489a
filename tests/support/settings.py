"""Settings of the process, for a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


@contextlib.contextmanager
def _changed(get: Callable[[], T], put: Callable[[T], object], value: T) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def threads(count: int) -> contextlib.AbstractContextManager[None]:
    """Runs with ``count`` intra-op threads."""
    return _changed(torch.get_num_threads, torch.set_num_threads, count)


def default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Runs with ``dtype`` as the dtype of new tensors."""
    return _changed(torch.get_default_dtype, torch.set_default_dtype, dtype)
