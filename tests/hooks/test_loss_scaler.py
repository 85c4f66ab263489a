"""Scalers that ``attach`` is given, or that a hook was not told of."""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from mode_cases import compiled_backward
from on_ranks import on_processes
from scaled_training import Counted, Steps, attached, backward_of, batch, gradients
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks
from torch_commhook.attachment import road
from torch_commhook.attachment.elastic import ElasticStep
from torch_commhook.collectives import gloo_groups
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory.watches import ScaleJumpDetector

pytestmark = pytest.mark.usefixtures("one_rank")


def _counted(road: str, scale: float) -> tuple[Counted, nn.Module, Any]:
    torch._dynamo.reset()
    scaler = Counted(scale)
    return scaler, *attached(road, parse_hook("error_feedback(sign())"), scaler=scaler)


@pytest.mark.parametrize("road", ["module", "ddp", "compiled"])
def test_it_is_asked_once_in_each_backward(road: str) -> None:
    scaler, model, handle = _counted(road, 4.0)
    found = []
    for number in range(3):
        scaler.asked = 0
        with backward_of(road):
            model(batch(0, number)).sum().backward()
        found.append(scaler.asked)
    handle.remove()
    assert found == [1, 1, 1]


def test_it_is_not_asked_for_hooks_that_remember_nothing() -> None:
    scaler = Counted(4.0)
    model, handle = attached("module", hooks.cast(), scaler=scaler)
    scaler.asked = 0
    model(batch(0, 0)).sum().backward()
    handle.remove()
    assert scaler.asked == 0


@pytest.mark.parametrize("road", ["module", "ddp", "compiled"])
def test_a_scale_that_is_none_ends_the_backward(road: str) -> None:
    scaler, model, handle = _counted(road, 1.0)
    for scale in (math.nan, 4.0):
        scaler.scale = scale
        refused = pytest.raises(
            ValueError, match=r"hook '.*: scaler must have a positive, .* got nan"
        )
        with refused if scale != scale else nullcontext(), backward_of(road):
            model(batch(0, 0)).sum().backward()
    handle.remove()


@pytest.mark.parametrize(
    ("scaler", "error", "said"),
    [
        (2.0, TypeError, r"scaler must be a torch.amp.GradScaler, .*, got float"),
        (torch.amp.GradScaler, TypeError, r"scaler must be a torch.amp.GradScaler, .*, got type"),
        (Counted("x"), TypeError, r"scaler must give a number as its scale, got str"),
        (Counted(0.0), ValueError, r"scaler must have a positive, finite scale, got 0.0"),
        (Counted(-1.0), ValueError, r"scaler must have a positive, finite scale, got -1.0"),
        (Counted(math.inf), ValueError, r"scaler must have a positive, finite scale, got inf"),
        (Counted(1e300), ValueError, r"scaler must have a positive, finite scale, got 1e\+300"),
    ],
    ids=["number", "class", "text", "zero", "negative", "infinite", "beyond float32"],
)
def test_what_is_no_scaler_is_refused(scaler: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attached("module", hooks.allreduce(), scaler=scaler)


@pytest.mark.parametrize("scales", [(4.0, 2.0), (4.0, None)], ids=str)
@on_processes
def test_ranks_must_have_one_scale(rank: int, scales: tuple[float, float | None]) -> None:
    scaler = None if scales[rank] is None else Counted(scales[rank])
    said = r"the scaler's scale must be the same on all ranks: rank 0 has 4\.0, rank 1 has"
    with pytest.raises(RuntimeError, match=said):
        attached("module", hooks.allreduce(), scaler=scaler)


@pytest.mark.parametrize("road", ["module", "ddp", "compiled"])
@on_processes
def test_a_scale_that_is_none_on_one_rank_ends_the_step_on_all(rank: int, road: str) -> None:
    scaler, model, handle = _counted(road, 1.0)
    scaler.scale = math.inf if rank == 1 else 1.0
    said = "positive, finite scale, got inf" if rank == 1 else None
    with pytest.raises((RuntimeError, ValueError), match=said), backward_of(road):
        model(batch(rank, 0)).sum().backward()
    scaler.scale = 1.0
    with backward_of(road):
        model(batch(rank, 0)).sum().backward()
    handle.remove()


def test_errors_of_an_elastic_step_that_is_undone_have_its_scale() -> None:
    scaler, model, handle = _counted("module", 1.0)
    model(batch(0, 0)).sum().backward()
    own, memory = handle._attached, handle._attached.memory
    before = [tensor.clone() for tensor in memory.changing_tensors()]
    assert any(tensor.any() for tensor in before)
    scaler.scale = 4.0
    step = ElasticStep(own, handle._road.reducer)
    step.train_with(SimpleNamespace())  # the ranks, which no call below asks
    own.look_at_scale(in_join=False)
    step.choose()
    for tensor in memory.changing_tensors():
        tensor.zero_()
    step.undo()
    after = list(memory.changing_tensors())
    handle.remove()
    for tensor, old in zip(after, before, strict=True):
        torch.testing.assert_close(tensor, 4.0 * old, rtol=0, atol=0)


class Halved(hooks.Hook):
    """One of a user's own, which knows nothing of scalers."""

    scales_steps = True

    def average(self, bucket: Any) -> Any:
        return hooks.allreduce().average(bucket)

    def step_scale(self, results: Any, past: Any) -> Tensor:
        return torch.tensor(0.5)


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "in clip"])
def test_a_hook_of_ones_own_need_not_take_the_scale(inside: bool) -> None:
    hook = hooks.clip(1e9, Halved()) if inside else Halved()
    model, handle = attached("module", hook, scaler=Counted(4.0))
    model(batch(0, 0)).sum().backward()
    halved = gradients(model, 1.0)
    handle.remove()
    model.zero_grad()
    model(batch(0, 0)).sum().backward()
    torch.testing.assert_close(halved, gradients(model, 2.0))


# ---- a scaler that a hook was not told of --------------------------------------------------------


def trained(road: str, hook: str, *, scaled: bool, told: bool, steps: int = 3) -> None:
    """Training, with a schedule, which wraps the optimizer's step."""
    run = Steps(road, parse_hook(hook), 0, scaled=scaled, told=told)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(steps):
        optimizer.zero_grad()
        run.scaler.scale(run.model(batch(0, number)).square().sum()).backward()
        run.scaler.step(optimizer)
        run.scaler.update()
        schedule.step()
    run.handle.remove()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "attach(model, hook, scaler=scaler)" in r.message]


@pytest.mark.parametrize("road", ["module", "ddp"])
@pytest.mark.parametrize("hook", ["error_feedback(sign())", "clip(0.5)"])
def test_a_scaler_that_nobody_told_of_is_said_once(
    caplog: pytest.LogCaptureFixture, hook: str, road: str
) -> None:
    trained(road, hook, scaled=True, told=False)
    (said,) = warnings(caplog)
    assert f"'{hook}' was not told of the GradScaler" in said


@pytest.mark.parametrize(
    ("hook", "scaled", "told", "steps"),
    [
        ("error_feedback(sign())", True, True, 3),
        ("error_feedback(sign())", False, False, 100),  # whose sizes vary as they will
        ("blockwise()", True, False, 3),
    ],
    ids=["told", "no scaler", "nothing to follow"],
)
def test_else_nothing_is_said(
    caplog: pytest.LogCaptureFixture, hook: str, scaled: bool, told: bool, steps: int
) -> None:
    trained("module", hook, scaled=scaled, told=told, steps=steps)
    assert warnings(caplog) == []


def test_nothing_is_said_of_another_models_scaler(caplog: pytest.LogCaptureFixture) -> None:
    _model, handle = attached("module", parse_hook("error_feedback(sign())"))
    trained("module", "allreduce()", scaled=True, told=False)
    handle.remove()
    assert warnings(caplog) == []


def test_nobody_looks_for_scalers_once_hooks_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without other tests' hooks.
    monkeypatch.setattr(gloo_groups, "_states", WeakKeyDictionary())
    monkeypatch.setattr(road, "_handles", [])
    _, handle = attached("module", parse_hook("error_feedback(sign())"))
    assert road._handles
    handle.remove()
    assert not road._handles


def _graphs_of_step(hook: str) -> int:
    """How many graphs an optimizer's step becomes."""
    torch._dynamo.reset()
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        found.append(graph)
        return graph

    model, handle = attached("module", parse_hook(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(batch(0, 0)).sum().backward()
    torch.compile(optimizer.step, backend=backend)()
    handle.remove()
    return len(found)


def test_who_looks_for_scalers_breaks_no_graph() -> None:
    assert _graphs_of_step("error_feedback(sign())") == _graphs_of_step("sign()") > 0


@pytest.mark.usefixtures("no_hook_on_optimizers_left")
def test_a_model_that_goes_away_leaves_no_hook_on_optimizers() -> None:
    model = nn.Linear(2, 2)
    handle = attach(model, parse_hook("error_feedback(sign())"))
    model(torch.ones(1, 2)).sum().backward()
    del model, handle


# ---- scales that a hook was not told of ----------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())


def inputs_of(number: int) -> Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(number))


class Unused(nn.Linear):
    """A part of a model that no loss depends on."""

    def __init__(self) -> None:
        super().__init__(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x


def scaled_by_hand(
    road: str,
    hook: str,
    scales: list[float],
    *,
    unused: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train, with each step's loss multiplied by its scale."""
    model = net().to(dtype)
    if unused:
        model.insert(2, Unused())
    if road in ("ddp", "registered"):
        model = DDP(model, bucket_cap_mb=0.01, find_unused_parameters=unused)
    with ExitStack() as stack:
        if road == "registered":
            model.register_comm_hook(None, parse_hook(hook))
        else:
            stack.enter_context(compiled_backward(road == "compiled"))
            options = {} if road == "ddp" else {"gradient_as_bucket_view": road == "views"}
            stack.callback(attach(model, parse_hook(hook), **options).remove)
        for number, scale in enumerate(scales):
            model.zero_grad()
            (scale * model(inputs_of(number).to(dtype)).square().sum()).backward()


def jumps(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "from one step to the next" in r.message]


@pytest.mark.parametrize("jump", [-4, 1], ids=lambda jump: f"2**{jump}")
@pytest.mark.parametrize(
    ("road", "hook"),
    [
        *(
            (road, "error_feedback(sign())")
            for road in ("module", "views", "ddp", "registered", "compiled")
        ),
        ("module", "error_feedback(topk(density=0.05))"),
        ("module", "clip(0.5)"),
        ("ddp", "clip(0.5)"),
    ],
)
def test_gradients_that_jump_are_said_once(
    caplog: pytest.LogCaptureFixture, road: str, hook: str, jump: int
) -> None:
    scaled_by_hand(road, hook, [1.0] * 10 + [2.0**jump] * 12 + [2.0 ** (2 * jump)] * 12)
    (said,) = jumps(caplog)
    assert f"'{hook}': gradients have become 2**{jump} times" in said


@pytest.mark.parametrize(
    ("road", "scales", "options"),
    [
        *(
            (road, [1.0] * 10 + [0.25] * 9, {"dtype": dtype})
            for road in ("module", "ddp", "registered")
            for dtype in (torch.float64, torch.bfloat16)
        ),
        *((road, [1.0] * 8 + [0.25] * 9, {"unused": True}) for road in ("module", "views", "ddp")),
        ("registered", [1.0] * 9 + [math.nan, 0.0, math.inf] + [0.25] * 8, {}),
    ],
)
def test_also_in_other_dtypes_beside_unused_parameters_and_after_steps_without_gradients(
    caplog: pytest.LogCaptureFixture, road: str, scales: list[float], options: dict[str, Any]
) -> None:
    scaled_by_hand(road, "error_feedback(sign())", scales, **options)
    assert len(jumps(caplog)) == 1


@pytest.mark.parametrize(
    ("hook", "scales"),
    [
        ("error_feedback(sign())", [1.0] * 30),
        ("error_feedback(sign())", [1.0] * 8 + [3.0] * 12),
        ("error_feedback(sign())", [1.0] * 8 + [4.0, 4.0, 4.0] + [1.0] * 12),
        ("error_feedback(sign())", [1.05**step for step in range(60)]),
        ("error_feedback(sign())", [1.0, 4.0] * 20),
        ("blockwise()", [1.0] * 8 + [4.0] * 12),
        ("local_sgd(2)", [1.0] * 8 + [4.0] * 12),
    ],
    ids=["no", "by no power", "for three steps", "slow", "in turns", "no matter", "local"],
)
def test_other_jumps_are_not(
    caplog: pytest.LogCaptureFixture, hook: str, scales: list[float]
) -> None:
    scaled_by_hand("module", hook, scales)
    assert jumps(caplog) == []


class Event:
    """An event of a device, which is done when two more have been recorded."""

    now = 0

    def __init__(self) -> None:
        Event.now += 1
        self.recorded = Event.now

    def query(self) -> bool:
        return Event.now >= self.recorded + 2


def test_a_norm_is_read_when_it_has_come() -> None:
    watch = ScaleJumpDetector("hook", keeps_error=True)
    norms = [torch.tensor(float(step + 1)) for step in range(6)]
    found = [watch.read_when_come(norm, Event().query) for norm in norms]
    assert found == [[], [], [1.0], [2.0], [3.0], [4.0]]  # each two steps late
