"""Parameters that get no gradient on some ranks, in every mode that our reducer runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from mode_cases import TRACED_MODES, Mode, OwnError, compiled_backward
from on_ranks import of_all_ranks, on_processes, on_ranks
from rank_pool import RankPool
from torch import Tensor, nn
from torch._dynamo.utils import counters

from torch_commhook import GradBucket, HookHandle, PeerError, attach, hooks
from torch_commhook.process_group import WrapperProcessGroup
from torch_commhook.testing import run_ranks

WIDTH = 24

#: The layers that each rank leaves out, step by step.
SKIPPED: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((2,), ()),
    ((), (2, 3)),
    ((1, 3), (2, 3)),
    ((1, 3), (1, 3)),
    ((), ()),
]


class Skipping(nn.Module):
    """Layers of which some are left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.skip: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skip:
                x = layer(x).relu()
        return x


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _mean(step: int) -> list[Tensor | None]:
    """The ranks' own gradients on average; None where no rank has one."""
    total: list[Tensor | None] = [None] * 5
    for rank, skip in enumerate(SKIPPED[step]):
        model = Skipping()
        model.skip = skip
        model(batch(rank, step)).square().sum().backward()
        for number, parameter in enumerate(model.parameters()):
            if parameter.grad is not None:
                own, so_far = parameter.grad / 2, total[number]
                total[number] = own if so_far is None else so_far + own
    return total


def _against_the_mean(rank: int, mode: Mode, set_to_none: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    inner = Skipping()
    model = mode.wrap(inner)
    attach(model, hooks.allreduce(), **mode.attach_options)
    with mode.step_function(model) as step:
        for number, skips in enumerate(SKIPPED):
            inner.skip = skips[rank]
            model.zero_grad(set_to_none=set_to_none)
            step(batch(rank, number))
            for parameter, want in zip(inner.parameters(), _mean(number), strict=True):
                if want is None and set_to_none:
                    assert parameter.grad is None, number
                else:
                    want = torch.zeros(WIDTH, WIDTH) if want is None else want
                    torch.testing.assert_close(parameter.grad, want, rtol=1e-5, atol=1e-6)
    if mode.compiles_backward:
        # Calling backward in a compiled function is one, of the forward.
        breaks = counters["graph_break"]
        assert [reason for reason in breaks if "Tensor.backward()" not in reason] == []


OURS = [mode for mode in TRACED_MODES if mode.model != "ddp"]


@pytest.mark.parametrize(
    ("mode", "set_to_none"),
    [
        pytest.param(mode, set_to_none, id=f"{mode}-{'none' if set_to_none else 'zero'}")
        for mode in OURS
        for set_to_none in (True, False)
        # One is enough of what takes long to compile.
        if not mode.compiles_backward or set_to_none == (mode.runner == "context")
    ],
)
@on_processes
def test_gradients_are_the_mean_of_the_ranks_that_have_one(
    rank: int, mode: Mode, set_to_none: bool
) -> None:
    _against_the_mean(rank, mode, set_to_none)


#: Micro-batches of one step, in which no rank uses layer 4, and only rank 1 layer 3.
ACCUMULATED: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((3, 4), (2, 4)),
    ((2, 3, 4), (2, 3, 4)),
]


@pytest.mark.parametrize(
    ("mode", "views", "eager_steps"),
    [
        *((Mode(model, "eager"), views, 0) for model in ("module", "ddp") for views in (0, 1)),
        (Mode("python_reducer", "eager"), False, 0),
        (Mode("module", "context", fullgraph=True, backend="aot_eager"), False, 0),
        (Mode("ddp", "context", backend="aot_eager"), True, 0),
        # Our reducer takes over from DDP's in the middle of a step.
        (Mode("ddp", "context", backend="aot_eager"), False, 2),
    ],
    ids=str,
)
@on_processes
def test_what_no_micro_batch_has_used_is_left_alone(
    rank: int, mode: Mode, views: bool, eager_steps: int
) -> None:
    """And nothing else is: a parameter that a rank used under ``no_sync()`` gets the mean."""
    torch._dynamo.reset()
    inner = Skipping()
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    model = mode.wrap(inner, **options)
    attach_options = dict(mode.attach_options)
    if mode.model == "module":
        attach_options["gradient_as_bucket_view"] = views
    handle = attach(model, hooks.error_feedback(hooks.sign()), **attach_options)
    last = inner.layers[4].weight
    before = torch.empty(0)
    with mode.step_function(model) as step:
        for number, skips in enumerate([((), ()), *ACCUMULATED]):
            inner.skip = skips[rank]
            with handle.no_sync() if number == 1 else nullcontext():
                if number < eager_steps:
                    model(batch(rank, number)).square().sum().backward()
                else:
                    step(batch(rank, number))
            if number == 0:
                before = last.grad.clone()
    handle.remove()
    assert torch.equal(last.grad, before)
    for layer in inner.layers[:4]:
        assert torch.equal(*of_all_ranks(layer.weight.grad))


# ---- gradients of a rank's own, and a step after them in which no rank uses the parameter -------


def _raises(*_: object) -> None:
    raise OwnError("boo")


@contextlib.contextmanager
def _fails_on_rank_0(handle: HookHandle, rank: int, stage: str) -> Iterator[None]:
    """A hook of a stage raises on rank 0, and all ranks get an error."""
    raising = getattr(handle, f"register_{stage}")(_raises) if rank == 0 else None
    with pytest.raises(OwnError if rank == 0 else PeerError):
        yield
    if raising is not None:
        raising.remove()


def _failed_step(model: Skipping, handle: HookHandle, rank: int) -> HookHandle:
    """A step after the micro-batch fails on rank 0."""
    with handle.no_sync():
        model(batch(rank, 0)).square().sum().backward()
    getattr(model, "module", model).skip = (4,)
    with _fails_on_rank_0(handle, rank, "buffer_prehook"):
        model(batch(rank, 0)).square().sum().backward()
    return handle


def _failed_in_its_end(
    model: Skipping, handle: HookHandle, rank: int, stage: str = "buffer_prehook"
) -> HookHandle:
    """The step that has given the gradients fails on rank 0."""
    with _fails_on_rank_0(handle, rank, stage):
        model(batch(rank, 0)).square().sum().backward()
    return handle


def _left_by_an_exception(model: Skipping, handle: HookHandle, rank: int) -> HookHandle:
    """The step that has given the gradients is left by an exception on rank 0."""
    if rank == 0:
        raising = model.layers[0].weight.register_hook(_raises)
    with pytest.raises(OwnError if rank == 0 else PeerError):
        if rank == 1:
            model(batch(rank, 0)).square().sum().backward()
        else:
            try:
                model(batch(rank, 0)).square().sum().backward()
            finally:
                # The next backward tells rank 1.
                raising.remove()
                model.skip = (4,)
                with handle.no_sync():
                    model(batch(rank, 1)).square().sum().backward()
    return handle


def _own_hook_raises(model: Skipping, handle: HookHandle, rank: int) -> HookHandle:
    """What a micro-batch has accumulated is not counted: the user's hook comes before."""
    raising = model.layers[4].weight.register_post_accumulate_grad_hook(_raises)
    with handle.no_sync(), pytest.raises(OwnError):
        model(batch(rank, 0)).square().sum().backward()
    raising.remove()
    return handle


def _compiled_left(model: Skipping, handle: HookHandle, rank: int) -> HookHandle:
    """A compiled micro-batch is left in the middle."""
    for parameter in model.parameters():  # so that the compiler adds in place
        parameter.grad = torch.zeros_like(parameter)
    raising = model.layers[1].weight.register_hook(_raises)
    with handle.no_sync():
        loss = model(batch(rank, 0)).square().sum()
        with compiled_backward(backend="eager"), pytest.raises(OwnError):
            loss.backward()
    raising.remove()
    return handle


def _attached_again(model: Skipping, handle: HookHandle, rank: int) -> HookHandle:
    """The hook is taken off, and attached again."""
    with handle.no_sync():
        model(batch(rank, 0)).square().sum().backward()
    handle.remove()
    return attach(model, hooks.allreduce(), init_sync=False)


def _apart(model: Skipping, handle: HookHandle, rank: int) -> HookHandle:
    """The hook before has kept the ranks apart, with a hook of the user's around it."""
    handle.replace(hooks.local_sgd(100))
    looking = handle.register_buffer_prehook(lambda bucket: None)
    model(batch(rank, 0)).square().sum().backward()
    looking.remove()
    handle.replace(hooks.allreduce())
    return handle


OWN_GRADIENTS = {
    "a failed step after a micro-batch": _failed_step,
    "a step that fails": _failed_in_its_end,
    # The other rank has its averages then, and finds out when the ranks agree.
    "a step that fails after its collectives": partial(_failed_in_its_end, stage="posthook"),
    "a step that is left": _left_by_an_exception,
    "a hook of the user's": _own_hook_raises,
    "a compiled micro-batch that is left": _compiled_left,
    "attached again": _attached_again,
    "ranks that were apart": _apart,
}


@pytest.mark.parametrize("case", OWN_GRADIENTS)
@on_processes
def test_a_gradient_of_a_ranks_own_is_averaged_by_the_next_step(rank: int, case: str) -> None:
    torch._dynamo.reset()
    model = Skipping()
    handle = OWN_GRADIENTS[case](model, attach(model, hooks.allreduce()), rank)
    last = model.layers[4].weight
    own, other = of_all_ranks(last.grad)
    assert not torch.equal(own, other)
    model.skip = (4,)
    model(batch(rank, 2)).square().sum().backward()
    handle.remove()
    torch.testing.assert_close(last.grad, (own + other) / 2)
    assert torch.equal(*of_all_ranks(last.grad))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
@pytest.mark.parametrize(
    "case",
    [
        "a failed step after a micro-batch",
        "a step that fails",
        "a step that fails after its collectives",
    ],
)
@on_processes
def test_so_it_is_over_the_reducer_of_ddp(
    rank: int, case: str, views: bool, compiled: bool
) -> None:
    torch._dynamo.reset()
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    inner = Skipping()
    model = Mode("ddp", "eager").wrap(inner, **options)
    handle = attach(model, hooks.allreduce())
    OWN_GRADIENTS[case](model, handle, rank)
    last = inner.layers[4].weight
    own, other = of_all_ranks(last.grad)
    assert views or not torch.equal(own, other)
    inner.skip = (4,)
    found = []
    for number in range(2):
        loss = model(batch(rank, 2 + number)).square().sum()
        with compiled_backward(compiled, "eager"):
            loss.backward()
        found.append(last.grad.clone())
    handle.remove()
    torch.testing.assert_close(found[0], (own + other) / 2)
    assert torch.equal(*of_all_ranks(found[0]))
    assert torch.equal(found[1], found[0])  # the second step leaves the gradients alone


@on_processes
def test_a_step_after_a_compiled_backward_that_was_left(rank: int) -> None:
    """A compiled micro-batch is left in the middle; the step after it uses other layers."""
    torch._dynamo.reset()
    model = Skipping()
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=0.002)
    model.skip = (0, 1)
    raising = model.layers[2].weight.register_hook(_raises)
    with handle.no_sync():
        loss = model(batch(rank, 0)).square().sum()
        with compiled_backward(backend="eager"), pytest.raises(OwnError):
            loss.backward()
    raising.remove()
    model.skip = (3, 4)
    loss = model(batch(rank, 1)).square().sum()
    with compiled_backward(backend="eager"):
        loss.backward()
    handle.remove()
    for layer in model.layers[:3]:
        assert torch.equal(*of_all_ranks(layer.weight.grad))


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_over_a_simulated_group(rank: int, set_to_none: bool) -> None:
    _against_the_mean(rank, Mode("module", "eager"), set_to_none)


def _joined(rank: int) -> list[list[float]]:
    """Rank 1 has fewer inputs, and neither rank uses the last layer then."""
    model = Skipping()
    handle = attach(model, hooks.allreduce())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with handle.join():
        for number in range(3 - rank):
            optimizer.zero_grad()
            model.skip = (4,) if number else ()
            model(batch(rank, number)).square().sum().backward()
            optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_uneven_inputs_over_a_simulated_group(two_ranks: RankPool) -> None:
    assert run_ranks(_joined, 2) == two_ranks.run(_joined)


@on_ranks(2)
def test_a_group_over_which_ranks_do_not_tell(rank: int) -> None:
    model = Skipping()
    attach(model, hooks.allreduce(), process_group=WrapperProcessGroup(dist.group.WORLD))
    model.skip = (4,)
    with pytest.raises(RuntimeError, match=r"\['layers\.4\.weight'\] got no gradient, and over"):
        model(batch(rank, 0)).square().sum().backward()


@on_processes
def test_other_layers_in_each_step(rank: int) -> None:
    """Other layers in each step and on each rank, over as many steps as Dynamo compiles anew."""
    torch._dynamo.reset()
    counters.clear()
    model = Skipping()
    attach(model, hooks.allreduce(), bucket_cap_mb=0.004)
    for number in range(7):
        model.zero_grad(set_to_none=number % 3 != 2)
        skips = [((number + other) % 5, 4) for other in range(2)]
        model.skip = skips[rank]
        loss = model(batch(rank, number)).square().sum()
        with compiled_backward(fullgraph=True):
            loss.backward()
        for layer, parameter in enumerate(model.parameters()):
            used = any(layer not in skip for skip in skips)
            has_gradient = parameter.grad is not None and bool(parameter.grad.any())
            assert has_gradient == used, (number, layer)
    assert not counters["graph_break"]


@on_processes
def test_what_micro_batches_have_used_needs_no_other_graph(rank: int) -> None:
    """The micro-batch before the last backward uses other layers each time."""
    torch._dynamo.reset()
    graphs = 0

    def compiler(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    model = Skipping()
    handle = attach(model, hooks.allreduce())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for number in range(4):
        model.zero_grad(set_to_none=False)
        model.skip = ((1, 2, 3), (2, 4), (3,), ())[number]
        with handle.no_sync():
            model(batch(rank, number)).square().sum().backward()
        model.skip = (2, 3, 4)
        loss = model(batch(rank, number)).square().sum()
        with compiled_backward(backend=compiler):
            loss.backward()
    handle.remove()
    assert graphs == 1


def _doubled(rank: int, mode: Mode) -> list[Tensor]:
    """Gradients that a hook after each bucket doubles; rank 0 does not compute all of them."""
    torch._dynamo.reset()
    inner = Skipping()
    model = mode.wrap(inner)
    handle = attach(model, hooks.allreduce(), **mode.attach_options)

    def double(bucket: GradBucket) -> None:
        for parameter in bucket.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    handle.register_post_accumulate_hook(double)
    with mode.step_function(model) as step:
        inner.skip = (2,) if rank == 0 else ()
        step(batch(rank, 0))
    return [parameter.grad for parameter in inner.parameters()]


@pytest.mark.parametrize("mode", [mode for mode in OURS if not mode.fullgraph], ids=str)
@on_processes
def test_post_accumulate_hooks_see_them(rank: int, mode: Mode) -> None:
    """The gradients that only the other rank has computed."""
    found = [float(gradient.norm()) for gradient in _doubled(rank, mode)]
    assert of_all_ranks(found)[0] == pytest.approx(found)
    eager = [float(gradient.norm()) for gradient in _doubled(rank, Mode("module", "eager"))]
    assert found == pytest.approx(eager)


class Complex(nn.Module):
    """Two complex weights, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(3, dtype=torch.complex64) for _ in range(2))
        self.used = 2

    def forward(self, x: Tensor) -> Tensor:
        return sum((x * weight).abs().sum() for weight in self.weights[: self.used])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("hook", [hooks.allreduce(), hooks.clip(0.1)], ids=str)
@on_processes
def test_complex_parameters(rank: int, hook: hooks.Hook, compiled: bool) -> None:
    torch._dynamo.reset()
    model = Complex()
    attach(model, hook)
    model.used = 2 - rank
    loss = model(torch.ones(3))
    with compiled_backward(compiled):
        loss.backward()
    assert all(weight.grad.real.gt(0).all() for weight in model.weights)
