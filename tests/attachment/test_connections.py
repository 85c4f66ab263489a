"""Several connections between two ranks: the same gradients, and what happens when one is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from on_ranks import on_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import HookHandle, PeerError, attach, hooks
from torch_commhook.collectives import gloo_groups, wire
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.step import link as links
from torch_commhook.step.link import MANY, measure_briefly
from torch_commhook.testing import run_ranks

WIDTH = 600  # 1.4 MiB of gradients
HOOKS = (
    "allreduce()",
    "error_feedback(blockwise(bits=8))",
    "error_feedback(topk(0.2))",
    "powersgd(rank=8)",
    "local_sgd(2, hook=blockwise())",
)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def _step(model: nn.Module, rank: int, number: int = 0) -> list[Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * number + rank)
    model(torch.randn(4, WIDTH, generator=generator)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def _rails(handle: HookHandle) -> list[int]:
    """The number of connections of each of a model's groups."""
    return [own._rails for own in handle._road._group._own]


def _run(rank: int, hook: str, count: int | None, kind: str) -> tuple[list[Any], list[int]]:
    """Gradients and parameters of two steps, and the numbers of connections."""
    torch._dynamo.reset()
    model: nn.Module = _net()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    handle = attach(model, parse_hook(hook), connections=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
    found = []
    for number in range(2):
        found += [grad.clone() for grad in _step(forward, rank, number)]
        optimizer.step()
    made = _rails(handle)
    handle.remove()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())], made


@pytest.mark.parametrize(
    ("hook", "kind", "count"),
    [
        *((hook, "module", 3) for hook in HOOKS),
        ("blockwise()", "ddp", 2),
        ("blockwise()", "compiled", 2),
    ],
)
@on_processes
def test_the_same_gradients(rank: int, hook: str, kind: str, count: int) -> None:
    wanted, one = _run(rank, hook, 1, kind)
    found, made = _run(rank, hook, count, kind)
    assert one == [1] and made == [count]
    assert all(map(torch.equal, found, wanted))


@on_processes
def test_ranks_of_one_machine_have_one(rank: int) -> None:
    _, made = _run(rank, "blockwise()", None, "module")
    assert made == [1]


@on_processes
def test_each_attachment_has_its_own(rank: int) -> None:
    model = _net()
    for count, made in ((2, [2]), (None, [1]), (3, [3])):
        handle = attach(model, hooks.allreduce(), connections=count)
        _step(model, rank)
        assert _rails(handle) == made
        handle.replace(hooks.blockwise())
        _step(model, rank)
        assert _rails(handle) == made
        handle.remove()


@pytest.mark.parametrize("count", [1, 3])
@on_processes
def test_connections_that_break_fail_no_step(rank: int, count: int) -> None:
    """They are made again, and what was on its way is sent again."""
    wanted, _ = _run(rank, "error_feedback(blockwise(bits=8))", 1, "module")
    every = [wire.endpoint(rails=rails) for rails in {1, count}]
    is_over = threading.Event()

    def cut() -> None:
        for _ in range(20):
            if is_over.wait(0.02):
                return
            for each in every:
                each.cut()

    thread = threading.Thread(target=cut)
    if rank == 0:
        thread.start()
    try:
        for _ in range(3):
            found, _ = _run(rank, "error_feedback(blockwise(bits=8))", count, "module")
            assert all(map(torch.equal, found, wanted))
    finally:
        is_over.set()
    if rank == 0:
        thread.join()
    assert sum(each.counts()["broken"] for each in every) > 0


@on_processes
def test_a_rank_that_leaves_ends_the_step_of_all(rank: int) -> None:
    """Rank 1 leaves before the second of three steps."""
    model, found = _net(), []
    handle = attach(model, hooks.allreduce(), connections=2)
    for number in range(3):
        if rank == 1 and number == 1:
            gloo_groups.backend_of(handle._road._group.group).close("it has had enough")
        try:
            found.append(_step(model, rank)[0].clone())
        except (PeerError, RuntimeError) as error:
            found.append(type(error).__name__)
    first, second, third = found
    assert isinstance(second, str)
    assert torch.equal(first, third)


@on_processes
def test_ranks_must_have_the_same(rank: int) -> None:
    message = "attach: connections must be the same on all ranks: rank 0 has 1, rank 1 has 2"
    with pytest.raises(RuntimeError, match=f"^{message}$" if rank == 0 else None):
        attach(_net(), hooks.allreduce(), connections=1 + rank)


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (0, ValueError, "attach: connections must be 1 to 16, got 0"),
        (17, ValueError, "attach: connections must be 1 to 16, got 17"),
        (2.0, TypeError, "attach: connections must be an int or None, got float"),
        (True, TypeError, "attach: connections must be an int or None, got bool"),
    ],
)
def test_what_is_refused(one_rank: None, count: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        attach(nn.Linear(2, 2), hooks.allreduce(), connections=count)


def test_a_gpu_or_another_group_has_its_own(one_rank: None) -> None:
    model = nn.Linear(2, 2)
    handle = attach(model, hooks.allreduce(), connections=4)
    model(torch.ones(1, 2)).sum().backward()
    assert _rails(handle) == []


def test_a_number_without_an_effect_is_a_warning() -> None:
    def counts(rank: int) -> None:
        for count in (None, 1, 4):
            attach(nn.Linear(2, 2), hooks.allreduce(), connections=count).remove()

    with pytest.warns(UserWarning) as caught:
        run_ranks(counts, 2)
    texts = {str(each.message) for each in caught}
    assert texts == {
        "attach: connections=4 has no effect: it applies to tensors that go over the library's "
        "transport, and not to simulated ranks"
    }


# ---- how many ------------------------------------------------------------------------------------


class MadeUpWire(links.Wire):
    """A link of 10 ms whose connections carry so many bytes per second each, and in all."""

    def __init__(self, of_each: float, in_all: float, ranks: int = 2) -> None:
        self.ranks, self.device = ranks, torch.device("cpu")
        self.distances = range(1, ranks)
        self.of_each, self.in_all = of_each, in_all
        self.connections = 1
        self.flows: list[float] = []

    def connect(self) -> None:
        self.connections = MANY

    def trip(self, first: int, others: Sequence[int], quiet_seconds: float) -> float:
        return 0.01

    def arrivals(self, nbytes: int, count: int) -> list[float]:
        assert count % (self.ranks - 1) == 0  # equally many to each
        rate = min(self.connections * (self.ranks - 1) * self.of_each, self.in_all)
        self.flows.append(nbytes * count / rate)
        return [0.005 + nbytes * (number + 1) / rate for number in range(count)]

    def shared(self, *values: float) -> Tensor:
        return torch.tensor([values] * self.ranks, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [2, 5, 16])
@pytest.mark.parametrize(("in_all", "connections"), [(1.2, 1), (1.4, MANY), (100.0, MANY)])
def test_the_rates_of_a_long_link(
    in_all: float, connections: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_is_local", lambda wire: False)
    of_each = 1e6
    carried = [(ranks - 1) * of_each * share for share in (1, min(in_all, MANY))]
    wire = MadeUpWire(of_each, in_all * carried[0], ranks)
    link = measure_briefly(wire, wire.connect)
    assert (link.connections, wire.connections) == (connections, MANY)
    assert link.round_trip == 0.01
    assert [link.rates[count] * links.PAYLOAD / 8 for count in (1, MANY)] == pytest.approx(carried)
    assert max(wire.flows) < 0.5


@on_processes
def test_no_rate_is_measured_of_a_near_link(rank: int) -> None:
    made: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_is_local", lambda wire: False)
        patch.setattr(links, "_FAR_SECONDS", 3600.0)
        link = measure_briefly(links.Wire(to_all=True), lambda: made.append(True))
    assert 0 < link.round_trip < 60
    assert (link.rates, link.connections, made) == ({}, 1, [])


@on_processes
def test_nothing_is_measured_on_one_machine(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "measure_round_trip", None)
        assert measure_briefly(links.Wire(), lambda: None) == links.Link(0.0)


@on_processes
def test_rates_of_real_ranks(rank: int) -> None:
    """The group that attach makes has more connections from then on, and sums as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_is_local", lambda wire: False)
        patch.setattr(links, "_FAR_SECONDS", 0.0)
        patch.setattr(links, "_LEAST_GAIN", 0.0)
        model = _net()
        handle = attach(model, hooks.allreduce())
        grads = _step(model, rank)
    group = handle._road._group
    link = group.connections.link(group.group)
    assert link is not None and set(link.rates) == {1, MANY}
    assert _rails(handle) == [MANY]
    means = [sum(of_ranks) / 2 for of_ranks in zip(_step(_net(), 0), _step(_net(), 1), strict=True)]
    torch.testing.assert_close(grads, means)
