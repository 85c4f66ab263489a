"""Several connections between two ranks: the same gradients, and what happens when one is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import HookHandle, PeerError, attach, hooks
from torch_commhook.collectives import gloo_groups, wire
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.step import link as links
from torch_commhook.step.link import MANY, measure_link
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
        "attach: connections=4 has no effect: it applies to ranks over Gloo with "
        "tensors on the CPU, and not to simulated ranks"
    }


# ---- how many ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("several", "connections"), [(0.04, MANY), (0.06, 1)])
@on_processes
def test_the_rates_of_a_long_link(rank: int, several: float, connections: int) -> None:
    """A link of 10 ms and 1 Gbit/s, on which connections have so many seconds for a message."""
    made: list[bool] = []

    def seconds_of(group: dist.ProcessGroup, nbytes: int) -> float:
        return several if made else 0.0175 * nbytes / (1 << 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_is_local", lambda group: False)
        patch.setattr(links, "_echo", lambda group: 0.01)
        patch.setattr(links, "_seconds_of", seconds_of)
        link = measure_link(dist.group.WORLD, lambda: made.append(True))
    assert link.connections == connections
    if connections == MANY:  # 4 MiB take 60 ms and more, which is six round trips
        assert len(made) == 1
        assert link.round_trip == pytest.approx(0.01)
        assert link.rate == pytest.approx(8 * (4 << 20) / 0.06)
        assert link.rate_of_many == pytest.approx(8 * (4 << 20) / 0.03)


@on_processes
def test_no_rate_is_measured_of_a_near_link(rank: int) -> None:
    made: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_is_local", lambda group: False)
        patch.setattr(links, "_FAR_SECONDS", 3600.0)
        link = measure_link(dist.group.WORLD, lambda: made.append(True))
    assert 0 < link.round_trip < 60
    assert (link.rate, link.connections) == (None, 1)
