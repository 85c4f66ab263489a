"""Tests that run on ranks which are processes."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from rank_pool import RankPool


def on_processes(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``test(rank, ...)`` to run on two processes; pytest provides its other arguments."""

    @functools.wraps(test)
    def run(two_ranks: RankPool, **arguments: Any) -> None:
        two_ranks.run(_undecorated, test.__module__, test.__name__, arguments)

    _, *others = inspect.signature(test).parameters.values()
    pool = inspect.Parameter("two_ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([pool, *others])  # type: ignore[attr-defined]
    return run


def _undecorated(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name).__wrapped__
    try:
        test(rank, **arguments)
    except pytest.fail.Exception as error:  # it is no Exception, and would end the process
        raise AssertionError(str(error)) from error
