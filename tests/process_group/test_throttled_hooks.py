"""Hooks over a ThrottledProcessGroup issue what they issue over the Gloo group that it wraps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import backward_step, equal, small_model
from rank_pool import RankPool
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_commhook
from torch_commhook.collectives.exchange import exchange
from torch_commhook.collectives.gloo_groups import second_group
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.process_group import ThrottledProcessGroup, register, throttled
from torch_commhook.process_group.gloo_messages import EXCHANGE, EXPECTED, Traffic
from torch_commhook.process_group.slow_link import GlooGroup

STEPS = 3


class _Noting(throttled._ClockedLink):
    """Notes what is issued, and on which group."""

    def __init__(self) -> None:
        super().__init__(1e12, 1e-5, 0.0)
        self.issued: list[tuple[GlooGroup, Traffic]] = []

    def issue(
        self, group: GlooGroup, when: float, traffic: Traffic, done: Callable[[], object]
    ) -> None:
        self.issued.append((group, traffic))
        super().issue(group, when, traffic, done)


def _throttled(parent: Any) -> tuple[ThrottledProcessGroup, _Noting]:
    group = ThrottledProcessGroup(parent, bandwidth=1e12, latency=1e-5)
    link = _Noting()
    group._use(link)
    register(group, "throttled")
    return group, link


def _step(rank: int, text: str) -> dict[str, Any]:
    parent = dist.new_group()
    group, link = _throttled(parent)
    found: dict[str, Any] = {"gradients": [], "issued": []}
    for process_group in (group, parent):
        model = small_model(process_group=process_group)
        handle = torch_commhook.attach(model, parse_hook(text))
        for _ in range(STEPS):
            begun = len(link.issued)
            gradients = backward_step(model, rank)
        found["gradients"].append(gradients)
        if process_group is group:
            found["issued"] = [
                (traffic.operation, where is not group._model)
                for where, traffic in link.issued[begun:]
            ]
            second = second_group(group)
            found["shares"] = second is not None and second._link is link
            found["threads"] = group._model.threads
        handle.remove()
    return found


@pytest.mark.parametrize(
    ("text", "has_seconds"),
    [
        ("allreduce()", False),
        ("topk(0.1)", False),
        ("blockwise()", True),
        ("error_feedback(blockwise(bits=4))", True),
        ("powersgd(rank=1)", True),
    ],
)
def test_stages_have_groups_of_their_own_on_one_link(
    text: str, has_seconds: bool, two_ranks: RankPool
) -> None:
    """Ranks exchange messages as over Gloo, which has a thread for none of them."""
    for found in two_ranks.run(_step, text):
        assert equal(*found["gradients"])
        assert found["shares"]
        assert found["threads"] == 2  # as PyTorch's groups have
        issued = found["issued"]
        assert issued.pop() == (EXPECTED, False)  # last the ranks agree
        firsts = [each for each in issued if each == (EXCHANGE, False)]
        assert len(firsts) > 1
        seconds = [each for each in issued if each == (EXPECTED, True)]
        assert len(seconds) == (len(firsts) if has_seconds else 0)
        assert len(issued) == len(firsts) + len(seconds)


def _large_step(rank: int) -> tuple[bool, list[str]]:
    parent = dist.new_group()
    group, link = _throttled(parent)
    gradients = []
    for process_group in (group, parent):
        torch.manual_seed(0)
        layer = torch.nn.Linear(600, 600, bias=False)
        model = DDP(layer, process_group=process_group)
        handle = torch_commhook.attach(model, parse_hook("blockwise()"))
        model(torch.randn(4, 600, generator=torch.Generator().manual_seed(rank))).sum().backward()
        gradients.append(layer.weight.grad)
        handle.remove()
    return torch.equal(*gradients), [traffic.operation for _, traffic in link.issued[-3:]]


def test_large_messages_are_exchanged(two_ranks: RankPool) -> None:
    for same, issued in two_ranks.run(_large_step):
        assert same
        assert issued == [EXCHANGE, EXPECTED, EXPECTED]


def _uneven_exchange(rank: int) -> tuple[float, float, float]:
    """Rank 0 sends 10 bytes and gets 1000."""
    group, link = _throttled(dist.new_group())
    sizes = (10, 1000) if rank == 0 else (1000, 10)
    sent, received = (torch.zeros(size, dtype=torch.uint8) for size in sizes)
    kept = torch.zeros(5, dtype=torch.uint8)
    inputs, outputs = [sent, sent], [received, received]
    inputs[rank] = outputs[rank] = kept
    exchange(inputs, outputs, received, group).wait()
    ((_, traffic),) = link.issued
    return traffic.ranks, traffic.nbytes, traffic.carried


def test_an_uneven_exchange_takes_its_longer_direction(two_ranks: RankPool) -> None:
    assert two_ranks.run(_uneven_exchange) == [(2, 15, 1000), (2, 1005, 1000)]


def _no_cycle(rank: int) -> bool:
    gc.collect()
    group = ThrottledProcessGroup(dist.new_group(), bandwidth=1e12)
    register(group, "dropped")
    second_group(group)
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return gone() is None


def test_the_second_group_does_not_hold_the_first(two_ranks: RankPool) -> None:
    assert two_ranks.run(_no_cycle) == [True, True]
