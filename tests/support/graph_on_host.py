"""Simulates CUDA graphs and streams with tensors on the CPU.

A graph is the list of the operators that a step calls, with their tensors. A replay calls these
again on the same tensors, and runs no Python of the step: values that the step has read on the host
during the capture do not change. The capture itself changes no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_commhook.collectives import futures

_aten = torch.ops.aten

#: Operators that wait for a device in order to return a value to the host.
_WAITING = {
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
}


class WaitsError(AssertionError):
    """A step has waited for the device."""


class StreamOnHost:
    """A stream. Its work is done when it is issued."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.waited_for: list[StreamOnHost] = []

    def wait_stream(self, other: StreamOnHost) -> None:
        self.waited_for.append(other)


class DeviceOnHost:
    """The interface of a device with streams that the library uses."""

    def __init__(self) -> None:
        self.is_capturing = False  # whether a graph captures the current stream
        self.current = StreamOnHost()  # the current stream
        # the streams reported to the allocator, with the tensors that they use
        self.recorded: list[tuple[Tensor, StreamOnHost]] = []

    @contextmanager
    def on(self, stream: StreamOnHost) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def device_on_host(monkeypatch: pytest.MonkeyPatch) -> DeviceOnHost:
    """Makes the library treat the CPU as a device with streams."""
    device = DeviceOnHost()
    monkeypatch.setattr(futures, "_WITH_STREAMS", {"cpu"})
    monkeypatch.setattr(futures, "_of_device", {})
    monkeypatch.setattr(torch.cuda, "Stream", StreamOnHost)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda at=None: device.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: device.on(stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.is_capturing)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: device.recorded.append((tensor, stream))
    )
    return device


class NoWaiting(TorchFunctionMode):
    """Refuses ``tolist()``, which calls no operator, on tensors that may be on a device.

    Flags of the parameters, and the order of these, are tensors of the host.
    """

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.tolist:
            (tensor,) = args
            if tensor.dtype != torch.uint8 or tensor.numel() != self._parameters:
                raise WaitsError(f"tolist() of {tensor.dtype}, {list(tensor.shape)}")
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Sees the operators, and refuses those that wait."""

    def __init__(self, see: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WAITING:
            raise WaitsError(str(func))
        return func(*args, **kwargs) if self._see is None else self._see(func, args, kwargs)


@contextmanager
def no_waiting(parameters: int) -> Iterator[None]:
    """Within this block nothing may wait for the device; the model has so many parameters."""
    with NoWaiting(parameters), _Operators():
        yield


class GraphOnHost:
    """Does the work of a CUDA graph, whose steps run on the device."""

    def __init__(self, device: DeviceOnHost) -> None:
        self._device = device
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: bytes, and a copy

    @contextmanager
    def capture(self, parameters: int) -> Iterator[None]:
        """Captures the calls inside; these leave no changes."""
        self._device.is_capturing = True
        try:
            with NoWaiting(parameters), _Operators(self._note):
                yield
        finally:
            self._device.is_capturing = False
            for now, before in self._before.values():
                now.copy_(before)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, returned in self._calls:
                inputs = {_place(t) for t in _tensors((args, kwargs))}
                again = func(*args, **kwargs)
                for before, now in zip(_tensors(returned), _tensors(again), strict=True):
                    if _place(before) not in inputs:  # neither a view nor written in place
                        before.copy_(now)

    def _note(self, func: Any, args: Any, kwargs: Any) -> Any:
        for argument, value in _named(func, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    self._keep(tensor)
        returned = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, returned))
        return returned

    def _keep(self, tensor: Tensor) -> None:
        if _place(tensor) not in self._before:
            bytes_ = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[_place(tensor)] = bytes_, bytes_.clone()


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
