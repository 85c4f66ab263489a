"""Tests of sharded models, each of which runs on every rank of a mesh."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from torch_commhook.testing import run_ranks

#: The beginning of the name of a mesh whose ranks are processes with connections.
GLOO = "gloo-"
_POOLS = {2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}


def run_on(
    request: pytest.FixtureRequest, place: str, function: Callable[..., Any], *args: Any
) -> None:
    """Calls ``function(rank, mesh's name, *args)`` on all ranks; it returns what is wrong.

    The ranks are threads of this process. For the name ``gloo-fsdp-3`` they are three processes,
    and the function gets ``fsdp-3``. It must then be at the top level of a module.
    """
    name = place.removeprefix(GLOO)
    number = int(name.rpartition("-")[2])
    if place == name:
        found = run_ranks(function, number, name, *args)
    else:
        found = request.getfixturevalue(_POOLS[number]).run(function, name, *args)
    assert not any(found), found


def _call_test(rank: int, place: str, module: str, name: str, arguments: dict[str, Any]) -> Any:
    test = getattr(importlib.import_module(module), name)
    return test.on_a_rank(rank, place, **arguments)


def on_ranks(*places: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a test of a function of a rank, a mesh's name, and parameters or fixtures.

    It runs on each of the meshes as :func:`run_on` says.
    """
    return partial(_as_test, places)


def on_processes(*places: str) -> Callable[[Callable[..., Any]], Any]:
    """Like :func:`on_ranks`, on processes: for what compiles, recovers, or patches the library."""
    return partial(_as_test, [pytest.param(f"{GLOO}{place}", id=place) for place in places])


def _as_test(places: Any, function: Callable[..., Any]) -> Any:
    names = list(inspect.signature(function).parameters)[2:]

    def test(request: pytest.FixtureRequest, place: str, **arguments: Any) -> None:
        run_on(request, place, _call_test, function.__module__, function.__name__, arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in ("request", "place", *names)]
    )
    for name in ("__name__", "__doc__", "__module__", "__qualname__"):
        setattr(test, name, getattr(function, name))
    test.on_a_rank = function  # type: ignore[attr-defined]
    return pytest.mark.parametrize("place", places)(test)
