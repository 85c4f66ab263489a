"""Tests that run on ranks: on threads of one process, or on processes."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from rank_pool import RankPool

from torch_commhook.testing import run_ranks


def on_ranks(
    world_size: int, *, seeds: int = 1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate ``test(rank, ...)`` to run on all ranks, in ``seeds`` orders of the ranks."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            for seed in range(seeds):
                found = run_ranks(lambda rank: test(rank, **arguments), world_size, seed=seed)
                assert not any(found), found

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


def of_all_ranks(value: Any) -> list[Any]:
    """Each rank's value, in order of rank. All ranks must call it."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def on_pool(fixture: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate ``test(rank, ...)`` to run on the processes of a fixture, a :class:`RankPool`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            pool: RankPool = arguments.pop(fixture)
            found = pool.run(_undecorated, test.__module__, test.__name__, arguments)
            assert not any(found), found

        _, *others = inspect.signature(test).parameters.values()
        pool = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([pool, *others])  # type: ignore[attr-defined]
        return run

    return decorate


on_processes = on_pool("two_ranks")


def _undecorated(rank: int, module: str, name: str, arguments: dict[str, Any]) -> Any:
    test = getattr(importlib.import_module(module), name).__wrapped__
    return test(rank, **arguments)
