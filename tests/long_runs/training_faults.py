"""Faults that random histories of training must find: repairs of the library, undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from torch_commhook.attachment import attaching, buffers, local_steps, reducer_road
from torch_commhook.autograd import finite_check, registration
from torch_commhook.buckets import assignment
from torch_commhook.elastic import door, settings
from torch_commhook.hooks.local_sgd import local_sgd
from torch_commhook.memory import optimizer_watch
from torch_commhook.reducer import buckets as reducer_buckets


@contextlib.contextmanager
def _each(*places: tuple[object, str], new: object) -> Iterator[None]:
    """One value in several places."""
    with contextlib.ExitStack() as stack:
        for place, name in places:
            stack.enter_context(mock.patch.object(place, name, new))
        yield


def _any_optimizer(self: Any, optimizer: Any, parameters: frozenset[int]) -> None:
    if not self._ids().isdisjoint(parameters):
        optimizer_watch.check_not_in_backward(self._attached.name)
        self._in_step = True


_send_buffers = reducer_road.ReducerRoad._send_buffers


def _send_buffers_always(self: Any, *args: Any, **kwargs: Any) -> None:
    _send_buffers(self, *args, **kwargs)
    self._buffers_changed = True


def _take_lazy_gradients(self: Any, others: list[Tensor] | None) -> None:
    if others is None and self.pending and not self.in_own_dtype:
        others = self.gradients()
    self.native.take_gradients(others, self.is_apart)


def _host_and_port(store: str) -> tuple[str, int]:
    host, _, port = store.rpartition(":")
    return host, int(port)


def _raise_own(group: Any, what: str, error: Exception | None, *_: Any) -> None:
    if error is not None:
        raise error


#: What is undone, and how. The number is that of the report's item.
FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "1 each rank takes its own write for a load": partial(
        _each, (local_steps, "agree_on_anchors"), new=lambda *_, **__: None
    ),
    "1 no write is a load": partial(_each, (local_sgd, "anchor_here"), new=lambda *_: {}),
    "2 local steps take any optimizer": partial(
        _each, (local_steps.LocalSteps, "before_optimizer_step"), new=_any_optimizer
    ),
    "3 hooks on sharded parameters are never called": partial(
        _each,
        (finite_check, "is_fully_sharded"),
        (registration, "is_fully_sharded"),
        new=lambda _: False,
    ),
    "4 rank 0's values replace what is ignored": partial(
        _each, (buffers, "ignored_names"), new=lambda _: ()
    ),
    "5 buckets have the parameters' dtype": partial(
        _each,
        (reducer_buckets, "gradient_dtype"),
        (assignment, "gradient_dtype"),
        new=lambda parameter: parameter.dtype,
    ),
    "6 optimizers step inside backward": partial(
        _each, (optimizer_watch, "_is_in_backward"), new=lambda: False
    ),
    "7 each forward writes the buffers": partial(
        _each, (reducer_road.ReducerRoad, "_send_buffers"), new=_send_buffers_always
    ),
    "8 gradients stay lazy": partial(
        _each, (reducer_buckets.BucketState, "take_gradients"), new=_take_lazy_gradients
    ),
    "9 brackets belong to the host": partial(
        _each, (settings, "host_and_port"), new=_host_and_port
    ),
    "9 each host has an IPv4 address": partial(
        _each, (door, "own_address"), new=lambda _: "127.0.0.1"
    ),
    "10 each rank checks alone": partial(_each, (attaching, "agree"), new=_raise_own),
}
