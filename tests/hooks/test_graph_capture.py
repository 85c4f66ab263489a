"""A whole step in a CUDA graph, played on the host: bits and states after replays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_training import CAPTURED, Training
from graph_on_host import DeviceOnHost, GraphOnHost, no_waiting

from torch_commhook import hooks

pytestmark = pytest.mark.usefixtures("one_rank")

#: Before the capture, and after it.
WARM, REPLAYED = 3, 3


ROADS = pytest.mark.parametrize("road", ["module", "ddp"])


def warm(road: str, hook: Any, **options: Any) -> Training:
    """A training after its first steps."""
    training = Training(road, hook, **options)
    training.run(0, WARM, training.step)
    return training


def captured(training: Training, device: DeviceOnHost) -> GraphOnHost:
    """A graph of a step."""
    graph = GraphOnHost(device)
    with graph.capture(len(training.parameters)):
        training.step()
    return graph


@ROADS
@pytest.mark.parametrize("name", CAPTURED)
def test_replays_do_what_eager_steps_do(device_on_host: DeviceOnHost, name: str, road: str) -> None:
    eager = Training(road, CAPTURED[name]())
    eager.run(0, WARM + REPLAYED + 1, eager.step)

    own = warm(road, CAPTURED[name]())
    before = own.found()
    graph = captured(own, device_on_host)
    assert all(map(torch.equal, own.found(), before))
    own.run(WARM, REPLAYED, graph.replay)
    own.run(WARM + REPLAYED, 1, own.step)  # and eager goes on

    own.assert_ends_as(eager)


@ROADS
def test_a_capture_that_fails_changes_nothing(device_on_host: DeviceOnHost, road: str) -> None:
    """Replays of the graph before are counted as they were, and it can be captured anew."""
    eager = Training(road, CAPTURED["blockwise"]())
    eager.run(0, WARM + REPLAYED, eager.step)
    own = warm(road, CAPTURED["blockwise"]())
    graph = captured(own, device_on_host)
    codec = own.handle.hook.hook.codec
    encode, calls = codec.encode, []

    def fails(*args: Any, **keywords: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("boo")
        encode(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(codec), "encode", fails)
        with pytest.raises(ValueError, match="boo"):
            captured(own, device_on_host)
    own.run(WARM, REPLAYED, graph.replay)
    counted = own.handle.stats()
    assert counted.steps == WARM + REPLAYED
    sizes = [each.numel for each in counted.buckets]
    assert sizes == [each.numel for each in eager.handle.stats().buckets]
    again = captured(own, device_on_host)
    own.run(WARM + REPLAYED, REPLAYED, again.replay)
    eager.run(WARM + REPLAYED, REPLAYED, eager.step)
    own.assert_ends_as(eager)


@pytest.mark.parametrize("name", ["blockwise", "powersgd"])
def test_replays_measure_no_errors(device_on_host: DeviceOnHost, name: str) -> None:
    """A graph would measure them in each step, and not in each hundredth."""
    own = warm("module", CAPTURED[name]())
    meters = [memory.meter for memory in own.handle._attached.memory.bucket_memories()]
    calls = [meter._calls for meter in meters]
    assert any(calls)
    captured(own, device_on_host)
    assert [meter._calls for meter in meters] == calls
    own.handle.remove()


# ---- what a graph cannot hold --------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "after": (lambda: hooks.after(9, hooks.blockwise(8)), {}, "step 9, after which another hook"),
    "adaptive": (lambda: hooks.adaptive(4000), {}, "the host chooses bits"),
    "inside": (
        lambda: hooks.clip(1.0, hooks.error_feedback(hooks.after(9, hooks.sign()))),
        {},
        "step 9, after which another hook",
    ),
    "local_sgd": (lambda: hooks.local_sgd(2), {}, "the host counts the optimizer's steps"),
    "scaler": (
        lambda: hooks.error_feedback(hooks.sign()),
        {"scaler": torch.amp.GradScaler("cpu", init_scale=1.0)},
        "attach the hook without scaler=",
    ),
}


@ROADS
@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_on_the_host_is_refused(
    device_on_host: DeviceOnHost, name: str, road: str
) -> None:
    make, options, said = REFUSED[name]
    own = warm(road, make(), **options)
    with pytest.raises(RuntimeError, match=said):
        captured(own, device_on_host)
    own.run(WARM, 1, own.step)
    own.handle.remove()


def test_the_first_step_is_refused(device_on_host: DeviceOnHost) -> None:
    """After it buckets are formed anew."""
    own = Training("module", hooks.allreduce())
    with pytest.raises(RuntimeError, match="run a few steps before the capture"):
        captured(own, device_on_host)
    own.handle.remove()


@ROADS
def test_a_graph_does_not_outlive_what_it_captured(device_on_host: DeviceOnHost, road: str) -> None:
    """A loaded state lies in other tensors, which the graph knows nothing of."""
    own = warm(road, hooks.error_feedback(hooks.randomk(0.5)))
    graph = captured(own, device_on_host)
    own.run(WARM, 2, graph.replay)
    state = own.handle.state_dict()
    assert state["steps"] == WARM + 2

    own.handle.load_state_dict(state)
    own.run(0, 1, own.step)
    assert own.handle.state_dict()["steps"] == WARM + 3
    assert own.handle.stats().steps == WARM + 3
    again = captured(own, device_on_host)
    own.run(1, 2, again.replay)
    assert own.handle.state_dict()["steps"] == own.handle.stats().steps == WARM + 5

    graph.replay()
    for ask in (own.handle.state_dict, own.handle.stats):
        with pytest.raises(RuntimeError, match="Capture the graph again"):
            ask()
    own.handle.load_state_dict(state)
    assert own.handle.state_dict()["steps"] == WARM + 2
    assert own.handle.stats().steps == WARM + 5
    own.handle.remove()


@pytest.mark.parametrize("name", ["blockwise", "stochastic", "powersgd"])
def test_what_a_graph_writes_stays(device_on_host: DeviceOnHost, name: str) -> None:
    """A replay after a load would otherwise write to memory that others may have by then."""
    own = warm("module", CAPTURED[name]())
    memories = own.handle._attached.memory.bucket_memories()
    written = [
        weakref.ref(tensor)
        for memory in memories
        for tensor in (*memory.tensors.values(), *memory.roundings.values())
    ]
    assert written
    captured(own, device_on_host)
    del memories
    own.handle.load_state_dict(own.handle.state_dict())
    own.run(0, 1, own.step)
    gc.collect()
    assert all(tensor() is not None for tensor in written)
    own.handle.remove()


# ---- eager steps ---------------------------------------------------------------------------------

EAGER = {
    **CAPTURED,
    "adaptive": lambda: hooks.adaptive(4000),
    "not yet": lambda: hooks.after(9, hooks.error_feedback(hooks.sign())),
    "local_sgd": lambda: hooks.local_sgd(9),
}


@ROADS
@pytest.mark.parametrize("name", EAGER)
def test_no_step_waits_for_the_device(device_on_host: DeviceOnHost, name: str, road: str) -> None:
    own = Training(road, EAGER[name]())
    own.run(0, 2, own.step)  # buckets are formed anew, and adaptive settles
    # On CUDA it reads what has come to the host; on the CPU it reads at once.
    own.handle._attached.memory.jump_detector = None
    with no_waiting(len(own.parameters)):
        own.run(2, 2, own.step)
    own.handle.remove()
