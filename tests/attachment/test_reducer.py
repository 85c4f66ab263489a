"""A hook on a plain module: what people do around a step gives DDP's gradients, bit for bit."""

from __future__ import annotations

import gc
import os
import re
import time
import unittest.mock
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import BUCKET_CAP_MB, Net, batch, differing, gradients_of
from mode_cases import compiled_backward
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import Elastic, GradBucket, attach, hooks
from torch_commhook.attachment import reducer_road
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.collectives.gloo_groups import state_of
from torch_commhook.process_group import WrapperProcessGroup

NoSync = Callable[[], AbstractContextManager[Any]]
Scenario = Callable[[nn.Module, NoSync, int], None]


# ---- what is done around a step ------------------------------------------------------------------


def steps(count: int, set_to_none: bool | None = True, **options: Any) -> Scenario:
    """Steps with options of the forward. If ``set_to_none`` is None, gradients add up."""

    def run(model: nn.Module, no_sync: NoSync, rank: int) -> None:
        for number in range(count):
            if set_to_none is not None:
                model.zero_grad(set_to_none)
            inputs = batch(rank, number).requires_grad_(options.get("way") == "reentrant")
            model(inputs, **options).sum().backward()

    return run


def three_steps(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        model(batch(rank, number)).sum().backward()
        optimizer.step()


def accumulated(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    with no_sync():
        for number in range(3):
            model(batch(rank, number)).sum().backward()
    model(batch(rank, 3)).sum().backward()


def accumulated_afterwards(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    model(batch(rank, 0)).sum().backward()
    with no_sync():
        model(batch(rank, 1)).sum().backward()


def accumulated_twice(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    accumulated_afterwards(model, no_sync, rank)
    model(batch(rank, 2)).sum().backward()


def forward_without_sync(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    with no_sync():
        loss = model(batch(rank)).sum()
    loss.backward()


def backward_without_sync(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    loss = model(batch(rank)).sum()
    with no_sync():
        loss.backward()


def accumulated_without_a_layer(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    """A layer that only the steps without synchronisation use."""
    with no_sync():
        model(batch(rank, 0)).sum().backward()
    model(batch(rank, 1), skip=(2,)).sum().backward()


def past_the_forward_after_no_sync(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    """What an earlier forward decided does not last."""
    with no_sync():
        model(batch(rank, 0)).sum().backward()
    model.zero_grad()
    module = model.module if isinstance(model, DDP) else model
    if isinstance(model, DDP):
        model(batch(rank, 1)).sum().backward()
    else:
        x = batch(rank, 1)
        for layer in module.layers:
            x = layer(x).relu()
        x.sum().backward()


def unused_somewhere(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    for number in range(4):
        model.zero_grad(set_to_none=number != 2)
        model(batch(rank, number), skip=((number + rank) % 6, 5)).sum().backward()


def autocast(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch(rank)).sum()
    loss.backward()


def in_half_precision(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    model(batch(rank).bfloat16()).sum().backward()


def clipped(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    model(batch(rank)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def scaled(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(3):
        optimizer.zero_grad()
        loss = model(batch(rank, number)).sum()
        scaler.scale(loss * (float("inf") if number == 1 and rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9  # all ranks have seen the infinity of one


SCENARIOS: dict[str, Scenario] = {
    "plain": steps(1),
    "zeroed_in_place": steps(3, set_to_none=False),
    "no_zero_between_steps": steps(3, set_to_none=None),
    "unused_everywhere": steps(3, set_to_none=None, skip=(1, 4)),
    "checkpointed": steps(2, way="not reentrant"),
    "checkpointed_reentrant": steps(2, way="reentrant"),
    **{
        function.__name__: function
        for function in (
            three_steps, accumulated, accumulated_afterwards, accumulated_twice,
            forward_without_sync, backward_without_sync, accumulated_without_a_layer,
            past_the_forward_after_no_sync, unused_somewhere, autocast, in_half_precision,
            clipped, scaled,
        )
    },
}  # fmt: skip
UNUSED = ("accumulated_without_a_layer", "unused_everywhere", "unused_somewhere")


def _net(scenario: str = "plain") -> Net:
    torch.manual_seed(0)
    net = Net()
    return net.bfloat16() if scenario == "in_half_precision" else net


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("scenario", SCENARIOS)
@on_ranks(2)
def test_gradients_of_ddp(rank: int, scenario: str, view: bool) -> None:
    run = SCENARIOS[scenario]
    ddp = DDP(
        _net(scenario), bucket_cap_mb=BUCKET_CAP_MB, find_unused_parameters=scenario in UNUSED
    )
    run(ddp, ddp.no_sync, rank)
    model = _net(scenario)
    options = {"bucket_cap_mb": BUCKET_CAP_MB, "gradient_as_bucket_view": view}
    with attach(model, hooks.allreduce(), **options) as handle:
        run(model, handle.no_sync, rank)
    assert differing(gradients_of(model), gradients_of(ddp)) == []
    assert len(handle.stats().buckets) > 1 or scenario == "forward_without_sync"


# ---- models --------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A weight of two layers, one layer used twice, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.second.weight = self.first.weight
        self.third.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.first(self.second(self.first(x).relu())))


class Images(nn.Module):
    """Convolutions in channels_last, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(4, 4, 8, 8))


class Words(nn.Module):
    """A sparse embedding, of which most rows get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding((x.abs() * 30).long() % 100)).square()


class Mixed(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.in_double = nn.Linear(16, 16).double()
        self.in_half = nn.Linear(16, 16).bfloat16()
        self.phases = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_half(self.in_double(x.double()).bfloat16()).float()
        return (x * self.phases).abs()


SIZES = {Shared: 16, Images: 256, Words: 6, Mixed: 16}


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("kind", SIZES, ids=lambda kind: kind.__name__)
@on_processes
def test_models(rank: int, kind: Callable[[], nn.Module], view: bool) -> None:

    def run(model: nn.Module, no_sync: NoSync) -> None:
        for number in range(3):
            model.zero_grad()
            with no_sync():
                model(batch(rank, 10 + number, SIZES[kind])).sum().backward()
            model(batch(rank, number, SIZES[kind])).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad

    torch.manual_seed(rank)  # rank 0's parameters and buffers are to win
    ddp = DDP(kind(), bucket_cap_mb=0.0005)
    run(ddp, ddp.no_sync)
    torch.manual_seed(rank)
    model = kind()
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=0.0005, gradient_as_bucket_view=view)
    run(model, handle.no_sync)
    handle.remove()
    gradients = [
        [None if p.grad is None else p.grad.to_dense() for p in m.parameters()]
        for m in (model, ddp)
    ]
    assert differing(*gradients) == []
    assert differing(list(model.buffers()), list(ddp.buffers())) == []


# ---- beyond DDP ----------------------------------------------------------------------------------


def twice_through_one_graph(model: nn.Module, rank: int) -> None:
    loss = model(batch(rank)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards_two_backwards(model: nn.Module, rank: int) -> None:
    losses = [model(batch(rank, number)).sum() for number in range(2)]
    for loss in losses:
        loss.backward()


def through_a_functional_call(model: nn.Module, rank: int) -> None:
    out = torch.func.functional_call(model, dict(model.named_parameters()), (batch(rank),))
    out.sum().backward()


def of_a_part(model: nn.Module, rank: int) -> None:
    """Past the model's own forward."""
    x = batch(rank)
    for layer in model.layers:
        x = layer(x)
    x.sum().backward()


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize(
    "run",
    [
        twice_through_one_graph,
        two_forwards_two_backwards,
        through_a_functional_call,
        of_a_part,
    ],
)
@on_ranks(2)
def test_gradients_are_the_mean(
    rank: int, run: Callable[[nn.Module, int], None], view: bool
) -> None:
    model, alone = _net(), _net()
    options = {"bucket_cap_mb": BUCKET_CAP_MB, "gradient_as_bucket_view": view}
    with attach(model, hooks.allreduce(), **options):
        run(model, rank)
    for other in range(2):
        run(alone, other)  # gradients add up
    for parameter, total in zip(model.parameters(), alone.parameters(), strict=True):
        want = total.grad / 2
        assert float((parameter.grad - want).abs().max() / want.abs().max()) < 1e-6


@on_ranks(2)
def test_join(rank: int) -> None:
    """Rank 1 has three inputs more."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 24))
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with handle.join():
        for number in range(2 + 3 * rank):
            optimizer.zero_grad()
            model(batch(rank, number)).sum().backward()
            optimizer.step()
            assert model[0].weight.grad.any()
    for first, *others in zip(*of_all_ranks([p.detach() for p in model.parameters()]), strict=True):
        assert all(torch.equal(first, other) for other in others)
    model.zero_grad()
    model(batch(rank)).sum().backward()  # goes on as ever afterwards
    handle.remove()


@on_processes
def test_join_in_compiled_autograd(rank: int) -> None:
    """Rank 1 has three inputs more."""
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(24, 24)
        found.append([])
        with attach(model, hooks.allreduce()) as handle, handle.join():
            for number in range(1 + 3 * rank):
                model.zero_grad()
                with compiled_backward(compiled, fullgraph=True):
                    model(batch(rank, number)).sum().backward()
                found[-1] += gradients_of(model)
    assert differing(*found) == []


@on_processes
def test_a_ddp_does_not_give_way_inside_its_join(rank: int) -> None:
    torch._dynamo.reset()
    ddp = DDP(nn.Linear(24, 24))
    attach(ddp, hooks.allreduce())
    loss = ddp(batch(rank)).sum()
    ddp._join_config = ddp._join_config._replace(enable=True)  # as inside its join()
    message = r"compiled autograd must not run the first backward\(\)"
    with pytest.raises(RuntimeError, match=message), compiled_backward(fullgraph=True):
        loss.backward()


def _on_road(model: nn.Module, road: str) -> tuple[nn.Module, HookHandle]:
    if road in ("module", "views"):
        return model, attach(model, hooks.allreduce(), gradient_as_bucket_view=road == "views")
    with torch._dynamo.config.patch(optimize_ddp=road == "ddp" or "python_reducer"):
        model = DDP(model)
    return model, attach(model, hooks.allreduce())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("road", ["module", "views", "ddp", "python reducer", "compiled"])
@pytest.mark.usefixtures("one_rank")
def test_no_optimizer_steps_before_gradients_are_averaged(road: str, when: str) -> None:
    torch._dynamo.reset()
    inner = _net()
    optimizers = {each: torch.optim.SGD([each], 0.1) for each in inner.parameters()}

    def step_in_backward() -> None:
        for each in inner.parameters():
            each.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())

    if when == "before":
        step_in_backward()
    model, handle = _on_road(inner, "module" if road == "compiled" else road)
    if when == "after":
        step_in_backward()
    unnamed = WrapperProcessGroup(dist.group.WORLD)  # no compiler can trace one
    state_of(unnamed)
    before = [each.detach().clone() for each in inner.parameters()]
    message = r"steps inside backward\(\).*HookHandle.register_post_accumulate_hook"
    with pytest.raises(RuntimeError, match=message), compiled_backward(road == "compiled"):
        model(batch(0)).sum().backward()
    assert all(map(torch.equal, inner.parameters(), before))
    handle.remove()


@pytest.mark.parametrize("road", ["module", "views", "ddp", "compiled"])
@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_may_step_inside_backward_after_the_average(road: str) -> None:
    torch._dynamo.reset()
    inner, wanted = _net(), _net()
    optimizers = {each: torch.optim.SGD([each], 0.1) for each in inner.parameters()}
    model, handle = _on_road(inner, "module" if road == "compiled" else road)

    def step(bucket: GradBucket) -> None:
        for each in bucket.parameters():
            optimizers[each].step()

    handle.register_post_accumulate_hook(step)
    with compiled_backward(road == "compiled"):
        model(batch(0)).sum().backward()
    wanted(batch(0)).sum().backward()
    torch.optim.SGD(wanted.parameters(), 0.1).step()
    assert all(map(torch.equal, inner.parameters(), wanted.parameters()))
    handle.remove()


@on_ranks(2)
def test_buckets_follow_the_order_of_arrival_on_rank_0(rank: int) -> None:
    model = _net()
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=0.005)
    reducer = handle._road.reducer
    before = reducer.buckets()
    assert before[0][0] == "layers.5.bias"
    x = batch(rank)
    layers = list(model.layers) if rank else list(model.layers)[::-1]
    for _ in range(2):
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        x = x.detach()
    first, second = of_all_ranks(reducer.buckets())
    assert first == second
    assert first[0][0].startswith("layers.0.")  # which rank 0 used last


DIFFERENT = {
    "model": "rank 0 has 'weight' of shape (4, 3) and torch.float32 in place 0, rank 1 has",
    "hook": "the hook must be the same on all ranks: rank 0 has allreduce(), rank 1 has cast(bflo",
    "capacity": "bucket_cap_mb must be the same on all ranks: rank 0 has 1, rank 1 has 2",
    "buffers": "broadcast_buffers must be the same on all ranks: rank 0 has False, rank 1 has True",
    "init": "init_sync must be the same on all ranks: rank 0 has True, rank 1 has False",
    "ddp": "bucket_cap_mb must be the same on all ranks: rank 0 has 1.0, rank 1 has 2.0",
}


@pytest.mark.parametrize("what", DIFFERENT)
@on_processes
def test_ranks_that_differ(rank: int, what: str) -> None:
    model: nn.Module = nn.Linear(3 + (what == "model") * rank, 4)
    hook: Any = hooks.cast() if what == "hook" and rank else hooks.allreduce()
    options: dict[str, Any] = {
        "capacity": {"bucket_cap_mb": 1 + rank},
        "buffers": {"broadcast_buffers": bool(rank)},
        "init": {"init_sync": not rank},
    }.get(what, {})
    if what == "ddp":
        model = DDP(model, bucket_cap_mb=1 + rank)
    with pytest.raises(RuntimeError, match=re.escape(DIFFERENT[what])):
        attach(model, hook, **options)


class _PartlyOwn(nn.Module):
    """A model of which each rank has a part for itself."""

    IGNORED = ("own.weight", "own.bias", "part")

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("part", torch.full((4,), float(rank)))
        self.register_buffer("common", torch.full((4,), float(rank)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(rank + 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x)) + self.part + self.common


@pytest.mark.parametrize("road", ["module", "large module", "python reducer"])
@on_processes
def test_ignored_parameters_and_buffers_stay_each_ranks_own(rank: int, road: str) -> None:
    model: nn.Module = _PartlyOwn(rank)
    inner: Any = model
    DDP._set_params_and_buffers_to_ignore_for_model(model, _PartlyOwn.IGNORED)
    most = 0 if road == "large module" else reducer_road._MOST_COPIED_BYTES
    if road == "python reducer":
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            model = DDP(model)
    with unittest.mock.patch.object(reducer_road, "_MOST_COPIED_BYTES", most):
        handle = attach(model, hooks.allreduce())
    for number in range(3):
        model.zero_grad()
        model(batch(rank, number)[:, :4]).square().sum().backward()
        assert all((each == rank + 1.0).all() for each in inner.own.parameters())
        assert (inner.part == rank).all() and (inner.common == 0.0).all()
        with torch.no_grad():
            inner.common.fill_(float(rank))  # the next forward sends rank 0's
    own, shared = of_all_ranks([inner.own.weight.grad, inner.shared.weight.grad])[0]
    assert torch.equal(inner.own.weight.grad, own) == (rank == 0)
    assert torch.equal(inner.shared.weight.grad, shared)
    assert (inner.shared.weight == 1.0).all()  # rank 0's
    handle.remove()


@on_ranks(2)
def test_ranks_ignore_the_same(rank: int) -> None:
    model = _PartlyOwn(rank)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["part"] if rank else [])
    message = "the ignored parameters and buffers must be the same on all ranks"
    with pytest.raises(RuntimeError, match=message):
        attach(model, hooks.allreduce())


@pytest.mark.usefixtures("one_rank")
def test_elastic_ranks_have_nothing_for_themselves() -> None:
    model = _PartlyOwn(0)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["part"])
    with pytest.raises(ValueError, match=r"_to_ignore must be empty, got \['part'\]"):
        attach(model, hooks.allreduce(), elastic=Elastic(min_ranks=1, name="own"))


@on_processes
def test_groups_go_with_their_models(rank: int) -> None:
    """Groups and threads after many models with hooks have gone, with remove() and without."""
    gc.collect()  # what earlier tests have left
    gc.freeze()  # what they keep, which takes seconds to look through

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    before = 0
    for number in range(6):
        model = nn.Linear(4, 4)
        handle = attach(model, hooks.allreduce())
        model(torch.ones(2, 4)).sum().backward()
        if number % 2:
            handle.remove()
        del model, handle
        gc.collect()
        if number == 1:
            before = threads()
    gc.unfreeze()
    assert len(torch.distributed.distributed_c10d._world.pg_map) == groups
    deadline = time.monotonic() + 20
    while threads() > before and time.monotonic() < deadline:  # they end when they have no work
        time.sleep(0.05)
    assert threads() <= before


class Own(hooks.allreduce):
    """A hook whose printed form has an address in it."""

    __repr__ = object.__repr__


@on_processes
def test_own_subclasses_of_hook_agree(rank: int) -> None:
    kept = [object() for _ in range(rank)]  # so that addresses differ
    attach(nn.Linear(2, 2), Own()).remove()
    del kept


# ---- gradients of another dtype than their parameters' -------------------------------------------


def _wide(dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """A model of bfloat16 whose gradients have another dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).bfloat16()
    model.append(nn.Linear(2, 2))  # in buckets with the others' gradients
    model[3].to(torch.float32)
    for parameter in model.parameters():
        parameter.grad_dtype = dtype
    return model


_TOLERANCE = {
    "allreduce()": 1e-5,
    "cast()": 1e-2,
    "error_feedback(blockwise(bits=8))": 5e-2,
    "clip(1e9, allreduce())": 1e-5,
    "cpp('allreduce')": 1e-5,
}


def _wide_backward(model: nn.Module, rank: int, number: int) -> None:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    model[3](model[:3](inputs.bfloat16()).float()).square().mean().backward()


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("hook", _TOLERANCE)
@on_ranks(2)
def test_gradients_of_grad_dtype(rank: int, hook: str, view: bool) -> None:
    """They add up in their own dtype: in bfloat16 most of 12 small ones would be lost."""
    model, alone = _wide(), [_wide(), _wide()]
    handle = attach(model, hook, gradient_as_bucket_view=view)
    for number in range(12):
        _wide_backward(model, rank, number)
        for each in range(2):
            _wide_backward(alone[each], each, number)
    assert len(handle.stats().buckets) == 1
    for got, *own in zip(*(each.parameters() for each in (model, *alone)), strict=True):
        assert got.grad.dtype is torch.float32
        expected = (own[0].grad + own[1].grad) / 2
        assert torch.allclose(got.grad, expected, atol=_TOLERANCE[hook] * expected.abs().max())


@on_ranks(2)
def test_a_missing_gradient_of_grad_dtype(rank: int) -> None:
    model = _wide()
    attach(model, "allreduce()")
    unused = rank == 1
    loss = model[:3](torch.ones(1, 4).bfloat16()).float()
    (loss if unused else model[3](loss)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype is torch.float32 and parameter.grad.any()


def test_grad_dtypes_that_are_refused(one_rank: None) -> None:
    with pytest.raises(ValueError, match=r"parameter '0.weight' .* has grad_dtype None, so its"):
        attach(_wide(None), "allreduce()")
    with pytest.raises(ValueError, match=r"'module.0.weight' of torch.bfloat16 has grad_dtype to"):
        attach(DDP(_wide()), "allreduce()")
    model = _wide()
    attach(model, "allreduce()")
    model[0].weight.grad_dtype = torch.bfloat16
    with pytest.raises(RuntimeError, match=r"'0.weight' had grad_dtype torch.float32, and has"):
        model(torch.ones(1, 4).bfloat16())


# ---- complex gradients ---------------------------------------------------------------------------


class _Conjugated(nn.Module):
    """PyTorch leaves the gradients of ``weight`` and ``imaginary`` lazy."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.ones(1))
        self.imaginary = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.cfloat))

    def forward(self, inputs: Tensor) -> Tensor:
        number = torch.complex(self.real, self.imaginary).conj()
        return (number * inputs * self.weight.conj()).sum() * (1 + 2j)


def _complex_loss(model: nn.Module, rank: int) -> Tensor:
    return model(torch.tensor([1 + 2j, 3 - 1j, rank + 0.5j])).abs()


@pytest.mark.parametrize("kind", ["copies", "views", "ddp"])
@pytest.mark.parametrize("hook", ["allreduce()", "cpp('allreduce')", "clip(1e9, allreduce())"])
@on_ranks(2)
def test_lazy_conjugates(rank: int, hook: str, kind: str) -> None:
    alone = [_Conjugated(), _Conjugated()]
    for each in range(2):
        _complex_loss(alone[each], each).backward()
    assert alone[0].weight.grad.is_conj() and alone[0].imaginary.grad.is_neg()
    module: nn.Module = _Conjugated()
    if kind == "ddp":
        model: nn.Module = DDP(module)
        attach(model, hook)
    else:
        model = module
        attach(model, hook, gradient_as_bucket_view=kind == "views")
    for _ in range(2):
        model.zero_grad()
        _complex_loss(model, rank).backward()
        for got, *own in zip(*(each.parameters() for each in (module, *alone)), strict=True):
            assert torch.allclose(got.grad, (own[0].grad + own[1].grad) / 2)


@pytest.mark.parametrize("hook", ["cast()", "blockwise()"])
def test_hooks_that_take_no_complex_gradients_name_one(one_rank: None, hook: str) -> None:
    model = _Conjugated()
    attach(model, hook)
    message = r"on bucket \d of 2: gradients must be real, .*complex64; allreduce\(\) takes complex"
    with pytest.raises(TypeError, match=message):
        _complex_loss(model, 0).backward()


# ---- buffers -------------------------------------------------------------------------------------


class _Keeps(nn.Module):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("kept", torch.tensor(values))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


@on_ranks(2)
def test_buffers_get_all_bits_of_the_first_rank(rank: int) -> None:
    model = _Keeps([-0.0, 1.0] if rank else [0.0, 1.0])
    with attach(model, hooks.allreduce(), init_sync=False):
        model(torch.ones(4))
    assert not model.kept.signbit().any()


# ---- several forwards before a backward ----------------------------------------------------------


class _Scaled(nn.Module):
    """Autograd saves its buffer, which each forward replaces by values of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        self.scale = self.scale + inputs.detach().abs().mean()
        return self.linear(inputs) * self.scale


TWICE: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    "own buffer": _Scaled,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)),
}


@pytest.mark.parametrize("kind", TWICE)
@on_ranks(2)
def test_two_forwards_before_a_backward(rank: int, kind: str) -> None:
    _two_forwards(rank, kind, compiled=False)


@pytest.mark.parametrize("kind", TWICE)
@on_processes
def test_two_forwards_before_a_compiled_backward(rank: int, kind: str) -> None:
    _two_forwards(rank, kind, compiled=True)


def _two_forwards(rank: int, kind: str, compiled: bool) -> None:
    """The gradients are those of the values that each forward used; then rank 0's buffers count."""

    def backward(model: nn.Module, rank: int, number: int) -> None:
        inputs = [batch(rank, number + each, width=6) for each in range(2)]
        loss = model(inputs[0]).square().mean() - model(inputs[1]).mean()
        with compiled_backward(compiled and model is attached, backend="eager"):
            loss.backward()

    def made() -> nn.Module:
        torch.manual_seed(0)
        return TWICE[kind]()

    attached = made()
    attach(attached, "allreduce()")
    alone = [made(), made()]
    for number in range(2):
        for each in (attached, *alone):
            each.zero_grad()
        backward(attached, rank, 2 * number)
        for each in range(2):
            backward(alone[each], each, 2 * number)
        for got, *own in zip(*(each.parameters() for each in (attached, *alone)), strict=True):
            assert torch.allclose(got.grad, (own[0].grad + own[1].grad) / 2, atol=1e-6)
        alone[1].load_state_dict(alone[0].state_dict())  # as the next forward does


class _Rotated(nn.Module):
    """Autograd saves its constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("angles", torch.full((4,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * self.angles


@pytest.mark.parametrize("made", [TWICE["batch norm"], _Rotated], ids=["batch norm", "constant"])
@on_ranks(2)
def test_a_forward_before_a_graph_is_used_again(rank: int, made: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    models = [made() for _ in range(3)]
    for each in models[1:]:
        each.load_state_dict(models[0].state_dict())
    attach(models[0], "allreduce()")
    for model, number in zip(models, (rank, 0, 1), strict=True):
        loss = model(batch(number, width=6)).square().mean()
        loss.backward(retain_graph=True)
        model(batch(number, 1, width=6))
        loss.backward()
    for got, *own in zip(*(each.parameters() for each in models), strict=True):
        assert torch.allclose(got.grad, (own[0].grad + own[1].grad) / 2, atol=1e-6)
