"""How many messages of a step, and of attaching, wait for one another on a far link.

``make bench-attach`` measures attaching over links with delays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import attach, codecs, hooks
from torch_commhook.collectives import issuing
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.planning import measure, plan

BUCKETS = 25
#: Of a layer without biases, which fills a bucket: 64 KiB.
WIDTH = 128
#: Exchanges one after another in a step, by the number of ranks. The ranks then agree in one more.
#: Nobody asks for messages, so each takes half a round trip.
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

    Attributes:
        count: the round trips.
        exchanges: the exchanges of messages; a sum is none.
        surprises: those for whose messages there was no memory before.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._lock = threading.Lock()
        self._arrived: list[tuple[torch.futures.Future[Any], torch.futures.Future[Any]]] = []
        self._waves = 0
        self.count = 0.0
        self.exchanges = self.surprises = 0

    def follow(self, sent: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """A Future that is complete when the messages of ``sent`` are let through."""
        let_through: torch.futures.Future[Any] = torch.futures.Future()

        def arrived(done: torch.futures.Future[Any]) -> None:
            with self._lock:
                self._arrived.append((done, let_through))
                if len(self._arrived) < BUCKETS and self._waves < self._stages:
                    return
                ready, self._arrived = self._arrived, []
                self._waves += 1
                self.count += 0.5
            for found, future in ready:
                future.set_result(found.value())

        sent.add_done_callback(arrived)
        return let_through


@contextmanager
def counted(stages: int) -> Iterator[RoundTrips]:
    """Count the round trips of a step on this rank."""
    trips = RoundTrips(stages)
    issued, expected, known = issuing.Place.exchange, issuing.Place.expect, set[Any]()
    reduced = issuing.Place.reduce

    def expect(place: issuing.Place, stage: int, *arguments: Any) -> None:
        known.add((place, stage))
        expected(place, stage, *arguments)

    def follow(place: issuing.Place, stage: int, *arguments: Any) -> torch.futures.Future[Any]:
        trips.exchanges += 1
        trips.surprises += (place, stage) not in known
        return trips.follow(issued(place, stage, *arguments))

    def follow_sum(
        place: issuing.Place, tensor: Tensor, **options: bool
    ) -> torch.futures.Future[Any]:
        future = reduced(place, tensor, **options)
        nbytes = tensor.numel() * tensor.element_size()
        for _ in range(1 if issuing.is_gathered(nbytes, dist.get_world_size()) else 2):
            future = trips.follow(future)
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(issuing.Place, "expect", expect)
        patch.setattr(issuing.Place, "exchange", follow)
        patch.setattr(issuing.Place, "reduce", follow_sum)
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
    if text != "hierarchical":
        assert trips.surprises == min(BUCKETS, trips.exchanges), "those of the first stages"
    return trips.count


def round_trips(stages: int) -> float:
    """Of so many exchanges one after another, and the agreement."""
    return 0.5 * (stages + 1)


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
        (3, ["blockwise()"], "unused", 0.5),  # the maps of unused parameters
    ],
)
def test_messages_that_wait_for_others(
    ranks: RankPool, world_size: int, texts: list[str], kind: str, more: float
) -> None:
    for text in texts:
        stages = STAGES[text][world_size]
        wanted = round_trips(stages) + more
        assert ranks.run(_step, text, stages, kind) == [wanted] * world_size, text


def test_messages_of_two_nodes(four_ranks: RankPool) -> None:
    """Inside of a node, twice between nodes; inside again."""
    assert four_ranks.run(_step, "hierarchical", 4, "module") == [round_trips(4)] * 4


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_plan_says_the_same(world_size: int) -> None:
    found = measure(list(STAGES), elements=BUCKETS * WIDTH * WIDTH, world_size=world_size)
    costs = plan(found, bits_per_second=1e12, buckets=[1] * BUCKETS)
    assert {cost.hook: cost.round_trips for cost in costs} == {
        text: round_trips(stages[world_size]) for text, stages in STAGES.items()
    }
