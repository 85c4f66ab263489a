"""How many messages of a step, and of attaching, wait for one another on a far link.

``make bench-attach`` measures attaching over links with delays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import attach, codecs, hooks
from torch_commhook.collectives import exchange
from torch_commhook.collectives.gloo_backend import MOST_IN_FULL_MESH, neighbours
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.planning import measure, plan
from torch_commhook.process_group.gloo_messages import Traffic, messages_of
from torch_commhook.step import step_end, step_group
from torch_commhook.step.step_end import rounds_of

BUCKETS = 25
#: Of a layer without biases, which fills a bucket: 64 KiB.
WIDTH = 128
#: Exchanges one after another in a step, by the number of ranks. The ranks then agree in one more.
#: Ranks have asked for the messages of all but the first, which take half a round trip.
STAGES: dict[str, dict[int, int]] = {
    "allreduce()": {2: 1, 3: 2, 4: 2, 8: 2},
    "cast()": {2: 1, 3: 1, 4: 2, 8: 2},
    "randomk(0.1)": {2: 1, 3: 1, 4: 1, 8: 1},
    "blockwise()": {2: 2, 3: 2, 4: 2, 8: 2},
    "error_feedback(blockwise(bits=4))": {2: 2, 3: 2, 4: 2, 8: 2},
    "topk(0.01)": {2: 1, 3: 1, 4: 1, 8: 1},
    "chunk_topk()": {2: 1, 3: 1, 4: 1, 8: 1},
    "powersgd(rank=2)": {2: 2, 3: 2, 4: 2, 8: 2},
}


class RoundTrips:
    """Holds back what arrives until all buckets' messages are under way, and counts round trips.

    Without that they would not be under way at once: a message between processes of one machine
    arrives before the next one is sent.

    Args:
        stages: of each bucket. What is sent after those of all buckets is held back no more.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._lock = threading.Lock()
        self._arrived: list[tuple[torch.futures.Future[Any], torch.futures.Future[Any]]] = []
        self._waves = 0
        self.count = 0.0

    def follow(
        self, sent: torch.futures.Future[Any], is_expected: bool
    ) -> torch.futures.Future[Any]:
        """A Future that is complete when the messages of ``sent`` are let through."""
        let_through: torch.futures.Future[Any] = torch.futures.Future()

        def arrived(done: torch.futures.Future[Any]) -> None:
            with self._lock:
                self._arrived.append((done, let_through))
                if len(self._arrived) < BUCKETS and self._waves < self._stages:
                    return
                ready, self._arrived = self._arrived, []
                self._waves += 1
                self.count += 0.5 if is_expected else 1
            for found, future in ready:
                future.set_result(found.value())

        sent.add_done_callback(arrived)
        return let_through


@contextmanager
def counted(stages: int) -> Iterator[RoundTrips]:
    """Count the round trips of a step on this rank."""
    trips = RoundTrips(stages)
    issued, asked, ends = exchange.Place.exchange, exchange.Place.expect, step_end.StepEnd
    agreed, expected, early = ends.any_rank, set(), set()

    def expect(place: exchange.Place, stage: int, outputs: Sequence[Tensor]) -> None:
        asked(place, stage, outputs)
        expected.add((place, stage))

    def follow(place: exchange.Place, stage: int, *arguments: Any) -> torch.futures.Future[Any]:
        return trips.follow(issued(place, stage, *arguments), (place, stage) in expected)

    class StepEnd(ends):
        def __init__(self, group: dist.ProcessGroup) -> None:
            super().__init__(group)
            if trips.count == 0:
                early.add(self)

        def any_rank(self, flag: bool = True) -> bool:
            rounds = len(step_end.rounds_of(self.group.size()))
            trips.count += 0.5 * rounds if self in early else rounds
            return agreed(self, flag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.Place, "expect", expect)
        patch.setattr(exchange.Place, "exchange", follow)
        patch.setattr(step_group, "StepEnd", StepEnd)
        yield trips


class _WithUnused(nn.Sequential):
    """Uses all layers but the first."""

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self[1:]:
            inputs = layer(inputs)
        return inputs


def _nodes_of_two() -> hooks.Hook:
    """Of four ranks."""
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    places = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    node, place = divmod(dist.get_rank(), 2)
    return hooks.hierarchical(
        codecs.blockwise(), intra_group=nodes[node], inter_group=places[place]
    )


def _step(rank: int, text: str, stages: int, kind: str) -> float:
    torch.manual_seed(0)
    hook = _nodes_of_two() if text == "hierarchical" else parse_hook(text)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)]
    model: nn.Module = _WithUnused(*layers) if kind == "unused" else nn.Sequential(*layers)
    capacity = WIDTH * WIDTH * 4 / (1 << 20)
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=capacity)
        handle = attach(model, hook)
    else:
        handle = attach(model, hook, bucket_cap_mb=capacity)
    inputs = torch.randn(2, WIDTH)
    for _ in range(2):  # buckets are formed anew after the first
        model(inputs).sum().backward()
    with counted(stages) as trips:
        model(inputs).sum().backward()
    assert len(handle.stats().buckets) == BUCKETS
    handle.remove()
    return trips.count


def round_trips(stages: int) -> float:
    """Of so many exchanges one after another, and the agreement."""
    return 1 + 0.5 * stages


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world_size: int) -> Iterator[RankPool]:
    if world_size < 8:
        yield request.getfixturevalue(
            {2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[world_size]
        )
        return
    eight = RankPool(8)
    yield eight
    eight.stop()


@pytest.mark.parametrize(
    ("world_size", "texts", "kind", "more"),
    [
        *((size, list(STAGES), "module", 0) for size in (2, 3, 4, 8)),
        (2, ["allreduce()", "blockwise()"], "ddp", 0),
        (3, ["blockwise()"], "unused", 1),  # the maps of unused parameters
    ],
)
def test_messages_that_wait_for_others(
    ranks: RankPool, world_size: int, texts: list[str], kind: str, more: int
) -> None:
    for text in texts:
        stages = STAGES[text][world_size]
        wanted = round_trips(stages) + more
        assert ranks.run(_step, text, stages, kind) == [wanted] * world_size, text


def test_messages_of_two_nodes(four_ranks: RankPool) -> None:
    """Inside of a node, twice between nodes, of which the first is asked for late; inside again."""
    assert four_ranks.run(_step, "hierarchical", 4, "module") == [round_trips(4) + 0.5] * 4


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_plan_says_the_same(world_size: int) -> None:
    found = measure(list(STAGES), elements=BUCKETS * WIDTH * WIDTH, world_size=world_size)
    costs = plan(found, bits_per_second=1e12, buckets=[1] * BUCKETS)
    assert {cost.hook: cost.round_trips for cost in costs} == {
        text: round_trips(stages[world_size]) for text, stages in STAGES.items()
    }


# ---- attaching -----------------------------------------------------------------------------------

#: The target, among any number of ranks.
MOST = 12
#: A rank leaves its address in a store, and reads those of the others.
ADDRESSES = 1
#: TCP connects in one. The rank that has connected then asks for the other's message, which takes
#: half of one; the message and the other's request come in another half, and its own in the last.
CONNECT = 2.5


def broadcast(size: int) -> float:
    """Of the parameters, down a tree of ranks that have asked."""
    parts = messages_of(Traffic("broadcast", size, 1, 1))
    return sum(part.count * (1 if part.is_requested else 0.5) for part in parts)


def attach_round_trips(size: int, has_second_stage: bool) -> float:
    """Of ``attach`` of a module, with one connection for large messages."""
    rounds = len(rounds_of(size))
    # Partners have told the first round when they connected. A rank asks for all others at once.
    compare = (rounds - 1) / 2 + (0.5 if rounds > 1 else 0)
    second = ADDRESSES + CONNECT if has_second_stage else 0
    # It has asked for these before the second group connects.
    agree = rounds / 2 + (0 if has_second_stage else 0.5)
    return ADDRESSES + CONNECT + compare + max(broadcast(size), second + agree)


@pytest.mark.parametrize("has_second_stage", [False, True], ids=["one-stage", "two-stages"])
@pytest.mark.parametrize("size", [2, 3, 4, 8, 16, 17, 32, 64, 100, 256, 257, 512, 1000, 1024])
def test_attaching_takes_few_round_trips(size: int, has_second_stage: bool) -> None:
    assert attach_round_trips(size, has_second_stage) <= MOST


def test_round_trips_of_few_ranks() -> None:
    assert [attach_round_trips(size, False) for size in (2, 4, 8, 16)] == [4.5, 5, 5.5, 6]
    assert [attach_round_trips(size, True) for size in (2, 4, 8, 16)] == [7.5] * 4


@pytest.mark.parametrize("size", [17, 32, 100, 1000])
def test_connections_grow_as_the_logarithm(size: int) -> None:
    rounds = len(rounds_of(size))
    assert len(neighbours(0, size)) <= min(6 * rounds, size - 1)
    assert size > MOST_IN_FULL_MESH
