"""What streams of the library use is kept from others, and no longer than it has to be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_on_host import DeviceOnHost, StreamOnHost
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_commhook import GradBucket, attach, hooks
from torch_commhook.collectives import compressed_all_reduce
from torch_commhook.collectives.futures import StreamNumber, UsedTensors, keeping, on_side_stream
from torch_commhook.step.attached_hook import HookCall

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What goes, goes without it: there are no cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _use(used: UsedTensors, tensors: Any) -> None:
    with keeping(used), on_side_stream(CPU, StreamNumber(), tensors):
        pass


def test_tensors_are_kept_until_the_result_is_waited_for(device_on_host: DeviceOnHost) -> None:
    one, several = torch.ones(3), [torch.ones(2), torch.ones(4)]
    watched = [weakref.ref(tensor) for tensor in (one, *several)]
    used = UsedTensors()
    _use(used, (one, several, None))
    del one, several
    assert all(reference() is not None for reference in watched)
    used.waited_for()
    assert all(reference() is None for reference in watched)
    assert device_on_host.recorded == []


@pytest.mark.parametrize("how", ["nobody waits", "another stream waits"])
def test_the_allocator_is_told_where_references_are_not_enough(
    device_on_host: DeviceOnHost, how: str
) -> None:
    bucket = torch.ones(8)
    views = [bucket[:3], bucket[3:]]
    used = UsedTensors()
    _use(used, (views, None))
    if how == "another stream waits":
        with device_on_host.on(StreamOnHost()):
            used.waited_for()
    del used
    ((tensor, stream),) = device_on_host.recorded  # once for each memory
    assert tensor.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()
    assert stream.waited_for == [device_on_host.current]


def test_without_a_keeper_the_allocator_is_told(device_on_host: DeviceOnHost) -> None:
    x = torch.ones(8)
    compressed_all_reduce([x], hooks.blockwise().codec).wait()
    assert any(tensor is x for tensor, _ in device_on_host.recorded)


def test_the_cost_does_not_depend_on_the_tensors(device_on_host: DeviceOnHost) -> None:
    counts = []
    for number in (1, 200):
        tensors = [torch.ones(2) for _ in range(number)]
        used = UsedTensors()
        with Calls() as calls:
            _use(used, (tensors, tensors))
            used.waited_for()
        counts.append(calls.count)
    assert counts == [0, 0]


# ---- in a step -----------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


@pytest.mark.parametrize("name", ["blockwise()", "topk(0.5)", "powersgd(1)", "randomk(0.5)"])
def test_gradients_go_as_soon_as_the_step_has_waited(
    device_on_host: DeviceOnHost, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A user may take gradients away while the hook is on its way."""
    model = _model()
    watched: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []
    wait = HookCall.wait

    def taking(self: HookCall, *args: Any) -> Tensor:
        if not watched:
            watched.extend(weakref.ref(p.grad) for p in model.parameters())
            for parameter in model.parameters():
                parameter.grad = None
        before = [reference() is not None for reference in watched]
        value = wait(self, *args)
        assert self.used is not None
        alive.append(before)
        assert len(self.used) == 0
        return value

    handle = attach(model, eval(f"hooks.{name}", {"hooks": hooks}))
    model(torch.ones(2, 6)).sum().backward()
    model.zero_grad()
    monkeypatch.setattr(HookCall, "wait", taking)
    model(torch.ones(2, 6)).sum().backward()
    assert alive == [[True] * 4]
    assert device_on_host.recorded == []
    assert [reference() for reference in watched] == [None] * 4
    handle.remove()


def test_a_step_that_fails_tells_the_allocator(device_on_host: DeviceOnHost) -> None:
    class Fails(hooks.compressed):
        def average(self, bucket: GradBucket) -> Any:
            found = super().average(bucket)
            if bucket.index() == 1:
                raise ValueError("boo")
            return found

    model = _model()
    handle = attach(model, Fails(hooks.blockwise().codec), bucket_cap_mb=0.0001)
    gradients = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad))
    with pytest.raises(ValueError, match="boo"):
        model(torch.ones(2, 6)).sum().backward()
    gc.collect()  # what the exception holds
    recorded = {id(tensor) for tensor, _ in device_on_host.recorded}
    assert {id(gradient) for gradient in gradients} <= recorded
    handle.remove()
