"""Tests that run on ranks which are threads of one process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torch_commhook.testing import run_ranks


def on_ranks(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate ``test(rank, ...)`` to run on all ranks; pytest provides its other arguments."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            run_ranks(lambda rank: test(rank, **arguments), world_size)

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


def of_all_ranks(value: Any) -> list[Any]:
    """Each rank's value, in order of rank. All ranks must call it."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
