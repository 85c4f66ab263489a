"""A hook on a plain module: what people do around a step gives DDP's gradients, bit for bit."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from layered_net import BUCKET_CAP_MB, Net, batch, differing, gradients_of
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks

NoSync = Callable[[], AbstractContextManager[Any]]


# ---- what is done around a step ------------------------------------------------------------------


def plain(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    model(batch(rank)).sum().backward()


def three_steps(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        model(batch(rank, number)).sum().backward()
        optimizer.step()


def zeroed_in_place(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    for number in range(3):
        model.zero_grad(set_to_none=False)
        model(batch(rank, number)).sum().backward()


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


def no_zero_between_steps(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    for number in range(3):
        model(batch(rank, number)).sum().backward()


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


def unused_everywhere(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    for number in range(3):
        model(batch(rank, number), skip=(1, 4)).sum().backward()


def unused_somewhere(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    for number in range(4):
        model.zero_grad(set_to_none=number != 2)
        model(batch(rank, number), skip=((number + rank) % 6, 5)).sum().backward()


def checkpointed(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    for number in range(2):
        model.zero_grad()
        model(batch(rank, number), way="not reentrant").sum().backward()


def checkpointed_reentrant(model: nn.Module, no_sync: NoSync, rank: int) -> None:
    for number in range(2):
        model.zero_grad()
        model(batch(rank, number).requires_grad_(), way="reentrant").sum().backward()


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


SCENARIOS: dict[str, Callable[[nn.Module, NoSync, int], None]] = {
    function.__name__: function
    for function in (
        plain, three_steps, zeroed_in_place, accumulated, accumulated_afterwards,
        accumulated_twice, forward_without_sync, backward_without_sync,
        accumulated_without_a_layer, past_the_forward_after_no_sync, no_zero_between_steps,
        unused_everywhere, unused_somewhere,
        checkpointed, checkpointed_reentrant, autocast, in_half_precision, clipped, scaled,
    )
}  # fmt: skip
UNUSED = ("accumulated_without_a_layer", "unused_everywhere", "unused_somewhere")


def _net(scenario: str) -> Net:
    torch.manual_seed(0)
    net = Net()
    return net.bfloat16() if scenario == "in_half_precision" else net


def _against_ddp(rank: int, scenario: str, view: bool) -> tuple[list[int], int]:
    run = SCENARIOS[scenario]
    ddp = DDP(
        _net(scenario), bucket_cap_mb=BUCKET_CAP_MB, find_unused_parameters=scenario in UNUSED
    )
    run(ddp, ddp.no_sync, rank)
    model = _net(scenario)
    handle = attach(
        model, hooks.allreduce(), bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=view
    )
    run(model, handle.no_sync, rank)
    buckets = len(handle.stats().buckets)
    handle.remove()
    return differing(gradients_of(model), gradients_of(ddp)), buckets


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_of_ddp(two_ranks: RankPool, scenario: str, view: bool) -> None:
    for wrong, buckets in two_ranks.run(_against_ddp, scenario, view):
        assert wrong == []
        assert buckets > 1 or scenario == "forward_without_sync"


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


def _model_against_ddp(rank: int, name: str, view: bool) -> tuple[list[int], list[int]]:
    kind = next(kind for kind in SIZES if kind.__name__ == name)

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
    return differing(*gradients), differing(list(model.buffers()), list(ddp.buffers()))


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", [kind.__name__ for kind in SIZES])
def test_models(two_ranks: RankPool, name: str, view: bool) -> None:
    assert two_ranks.run(_model_against_ddp, name, view) == [([], [])] * 2


# ---- beyond DDP ----------------------------------------------------------------------------------


def _mean(rank: int, run: Callable[[nn.Module, int], None]) -> list[Tensor]:
    """What the ranks' own gradients of a run are on average."""
    total: list[Tensor] = []
    for other in range(2):
        torch.manual_seed(0)
        model = Net()
        run(model, other)
        own = [p.grad / 2 for p in model.parameters()]
        total = own if not total else [a + b for a, b in zip(total, own, strict=True)]
    return total


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


RUNS = {
    run.__name__: run
    for run in (
        twice_through_one_graph,
        two_forwards_two_backwards,
        through_a_functional_call,
        of_a_part,
    )
}


def _against_the_mean(rank: int, name: str, view: bool) -> float:
    torch.manual_seed(0)
    model = Net()
    handle = attach(
        model, hooks.allreduce(), bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=view
    )
    RUNS[name](model, rank)
    handle.remove()
    return max(
        float((p.grad - want).abs().max() / want.abs().max())
        for p, want in zip(model.parameters(), _mean(rank, RUNS[name]), strict=True)
    )


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_the_mean(two_ranks: RankPool, name: str, view: bool) -> None:
    assert max(two_ranks.run(_against_the_mean, name, view)) < 1e-6


def _join(rank: int) -> list[bool]:
    """Rank 1 has three inputs more."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 24))
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with handle.join():
        for number in range(2 + 3 * rank):
            optimizer.zero_grad()
            model(batch(rank, number)).sum().backward()
            optimizer.step()
            counts.append(float(model[0].weight.grad.abs().sum()))
    joined = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    model(batch(rank)).sum().backward()  # goes on as ever afterwards
    handle.remove()
    return [torch.equal(a, b) for a, b in _pairs(joined)] + [min(counts) > 0]


def _pairs(own: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for tensor in own:
        both = [torch.empty_like(tensor) for _ in range(2)]
        torch.distributed.all_gather(both, tensor)
        pairs.append((both[0], both[1]))
    return pairs


def test_join(two_ranks: RankPool) -> None:
    assert two_ranks.run(_join) == [[True] * 7] * 2


def _compiling() -> Any:
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    return torch._dynamo.compiled_autograd._enable(compiler)


def _joined_gradients(rank: int, compiled: bool) -> list[Tensor]:
    """Those of each step. Rank 1 has three inputs more."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(24, 24)
    handle = attach(model, hooks.allreduce())
    found = []
    with handle.join():
        for number in range(1 + 3 * rank):
            model.zero_grad()
            with _compiling() if compiled else nullcontext():
                model(batch(rank, number)).sum().backward()
            found += [p.grad.clone() for p in model.parameters()]
    handle.remove()
    return found


def test_join_in_compiled_autograd(two_ranks: RankPool) -> None:
    eager = two_ranks.run(_joined_gradients, False)
    compiled = two_ranks.run(_joined_gradients, True)
    for one, other in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _compiled_in_join_of_ddp(rank: int) -> str:
    torch._dynamo.reset()
    ddp = DDP(nn.Linear(24, 24))
    attach(ddp, hooks.allreduce())
    loss = ddp(batch(rank)).sum()
    ddp._join_config = ddp._join_config._replace(enable=True)  # as inside its join()
    with pytest.raises(RuntimeError) as raised, _compiling():
        loss.backward()
    return str(raised.value)


def test_a_ddp_does_not_give_way_inside_its_join(two_ranks: RankPool) -> None:
    assert all(
        "compiled autograd must not run the first backward()" in said
        for said in two_ranks.run(_compiled_in_join_of_ddp)
    )


def _order(rank: int) -> tuple[list[list[str]], list[list[str]]]:
    """The ranks' gradients arrive in different orders."""
    torch.manual_seed(0)
    model = Net()
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=0.005)
    reducer = handle._road.reducer
    before = reducer.buckets()
    x = batch(rank)
    layers = list(model.layers) if rank else list(model.layers)[::-1]
    for _ in range(2):
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        x = x.detach()
    return before, reducer.buckets()


def test_buckets_follow_the_order_of_arrival_on_rank_0(two_ranks: RankPool) -> None:
    (before, first), (_, second) = two_ranks.run(_order)
    assert before[0][0] == "layers.5.bias"
    assert first == second
    assert [name for bucket in first for name in bucket] != [
        name for bucket in before for name in bucket
    ]
    assert first[0][0].startswith("layers.0.")  # which rank 0 used last


def _different(rank: int, what: str) -> str:
    model: nn.Module = nn.Linear(3 + (what == "model") * rank, 4)
    hook: Any = hooks.cast() if what == "hook" and rank else hooks.allreduce()
    options: dict[str, Any] = {
        "capacity": {"bucket_cap_mb": 1 + rank},
        "buffers": {"broadcast_buffers": bool(rank)},
        "init": {"init_sync": not rank},
    }.get(what, {})
    if what == "ddp":
        model = DDP(model, bucket_cap_mb=1 + rank)
    try:
        attach(model, hook, **options)
    except RuntimeError as error:
        return str(error)
    return ""


DIFFERENT = {
    "model": "rank 0 has parameter 'weight' of shape (4, 3) and torch.float32, rank 1 has 'weight'",
    "hook": "the hook must be the same on all ranks: rank 0 has allreduce(), rank 1 has cast(bflo",
    "capacity": "bucket_cap_mb must be the same on all ranks: rank 0 has 1, rank 1 has 2",
    "buffers": "broadcast_buffers must be the same on all ranks: rank 0 has False, rank 1 has True",
    "init": "init_sync must be the same on all ranks: rank 0 has True, rank 1 has False",
    "ddp": "bucket_cap_mb must be the same on all ranks: rank 0 has 1.0, rank 1 has 2.0",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ(two_ranks: RankPool, what: str) -> None:
    for message in two_ranks.run(_different, what):
        assert DIFFERENT[what] in message


def _many_handles(rank: int) -> tuple[int, int]:
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
    return len(torch.distributed.distributed_c10d._world.pg_map) - groups, threads() - before


def test_groups_go_with_their_models(two_ranks: RankPool) -> None:
    assert two_ranks.run(_many_handles) == [(0, 0), (0, 0)]


class Own(hooks.allreduce):
    """A hook whose printed form has an address in it."""

    __repr__ = object.__repr__


def _attaches_own(rank: int) -> bool:
    kept = [object() for _ in range(rank)]  # so that addresses differ
    handle = attach(nn.Linear(2, 2), Own())
    handle.remove()
    return len(kept) == rank


def test_own_subclasses_of_hook_agree(two_ranks: RankPool) -> None:
    assert two_ranks.run(_attaches_own) == [True, True]
