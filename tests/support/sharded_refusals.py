"""Shared by the tests of errors on sharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sharded_models import gradients_of_step, sharded
from torch import Tensor, nn

from torch_commhook import attach, hooks


def error_of(function: Callable[[], Any]) -> str:
    """The error that a function raises, with its kind."""
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def still_plain(model: nn.Module, rank: int) -> bool:
    """Whether a model that has refused a hook is unchanged, and accepts another hook."""
    expected = gradients_of_step(sharded("fsdp-2"), rank)
    first = gradients_of_step(model, rank)
    handle = attach(model, hooks.allreduce())
    second = gradients_of_step(model, rank)
    handle.remove()
    return all(a.equal(b) and b.equal(c) for a, b, c in zip(first, second, expected, strict=True))


class Custom:
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> None:
        raise AssertionError("it is not called")


def own_hook(state: object, bucket: Any) -> Tensor:
    return bucket.buffer()
