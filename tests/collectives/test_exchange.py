"""Exchanges of messages: of any lengths, in any order of stages, and what ends them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_threads import in_threads
from launched_ranks import first_says
from on_ranks import on_processes
from torch import Tensor
from wire_ranks import WireRanks

from torch_commhook import _C
from torch_commhook.collectives import gloo_groups
from torch_commhook.collectives.issuing import place_in

SECONDS = timedelta(seconds=30)


def message(source: int, destination: int, length: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10000 * number + 100 * source + destination)
    return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)


def messages(rank: int, length: int, number: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Those of a rank to both ranks, and the memory for those to this rank."""
    inputs = [message(rank, to, length, number) for to in range(2)]
    return inputs, [torch.zeros(length, dtype=torch.uint8) for _ in range(2)]


def have_come(rank: int, outputs: list[Tensor], number: int = 0) -> bool:
    other = 1 - rank
    return torch.equal(outputs[other], message(other, rank, len(outputs[other]), number))


@pytest.fixture
def ranks() -> Iterator[Callable[..., WireRanks]]:
    """Makes ranks that are threads."""
    made: list[WireRanks] = []

    def make(size: int, **options: Any) -> WireRanks:
        made.append(WireRanks(size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def start(
    world: WireRanks, rank: int, *arguments: Any, place: int | None = None, stage: int = 0
) -> torch.futures.Future[Any]:
    """Start an exchange of a rank, at the next place by default."""
    found = world.backends[rank].exchanges()
    place = found.reserve() if place is None else place
    future: torch.futures.Future[Any] = found.start(*arguments, place, stage, SECONDS)
    return future


LENGTHS = ([5, 30, 0], [10, 10, 21], [1, 0, 20])


@pytest.mark.parametrize("is_expected", [False, True])
@pytest.mark.parametrize("rails", [1, 3])
@pytest.mark.parametrize("factor", [1, 6_553, 100_000, 1_200_000])  # the last is above the credit
def test_messages_of_all_lengths(
    ranks: Callable[..., WireRanks], factor: int, rails: int, is_expected: bool
) -> None:
    """``lengths[a][b]`` bytes go from rank a to rank b."""
    world = ranks(3, rails=rails)
    lengths = [[factor * n for n in row] for row in LENGTHS]
    result = torch.ones(3)

    def run(rank: int) -> list[Tensor]:
        inputs = [message(rank, to, lengths[rank][to]) for to in range(3)]
        outputs = [torch.zeros(lengths[source][rank], dtype=torch.uint8) for source in range(3)]
        place = world.backends[rank].exchanges().reserve()
        if is_expected:
            world.backends[rank].exchanges().expect(outputs, place, 0, SECONDS)
        found = start(world, rank, inputs, outputs, result, place=place).wait()
        assert found.data_ptr() == result.data_ptr()
        return outputs

    for rank, outputs in enumerate(world.each(run)):
        for source, got in enumerate(outputs):
            if source == rank:
                assert not got.any()  # its own is the caller's to copy
            else:
                assert torch.equal(got, message(source, rank, lengths[source][rank]))


def test_stages_in_another_order_on_each_rank(ranks: Callable[..., WireRanks]) -> None:
    world = ranks(2)

    def run(rank: int) -> None:
        waiting = {}
        found = world.backends[rank].exchanges()
        places = [found.reserve() for _ in range(4)]
        order = [(place, stage) for place in range(4) for stage in (0, 1)]
        for place, stage in order if rank == 0 else reversed(order):
            seed = 2 * place + stage
            inputs, outputs = messages(rank, 300_000, seed)
            result = torch.tensor(seed)
            future = start(world, rank, inputs, outputs, result, place=places[place], stage=stage)
            waiting[seed] = future, outputs
        for seed, (future, outputs) in waiting.items():
            assert int(future.wait()) == seed and have_come(rank, outputs, seed)

    world.each(run)


@pytest.mark.parametrize("size", [2, 5, 17])
def test_sums_and_gathers_in_any_order(ranks: Callable[..., WireRanks], size: int) -> None:
    """Also of lengths that differ, and of few and many bytes; a maximum among them."""
    world = ranks(size)
    sums = [(torch.float32, 3), (torch.bfloat16, 1000), (torch.float64, 60_001)]
    sums += [(torch.int32, 200_003), (torch.float16, 300_000)]
    lengths = [[10 * factor * (1 + rank % 3) for rank in range(size)] for factor in (1, 4000)]
    lengths += [[each] * size for each in (0, 7, 100_000)]

    def drawn(rank: int, dtype: torch.dtype, numel: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return (8 * torch.randn(numel, generator=generator)).to(dtype)

    def run(rank: int) -> list[Tensor]:
        found = world.backends[rank].exchanges()
        places = [found.reserve() for _ in range(len(sums) + len(lengths) + 1)]
        starts, kept = list[Callable[[int], Any]](), list[Tensor]()

        def add(tensor: Tensor, takes_maximum: bool) -> None:
            kept.append(tensor)
            starts.append(lambda at: found.reduce(tensor, takes_maximum, tensor, at, SECONDS))

        for dtype, numel in sums:
            add(drawn(rank, dtype, numel), False)
        add(message(rank, 0, 50), True)
        for each in lengths:
            kept.append(every := torch.zeros(sum(each), dtype=torch.uint8))
            parts = list(every.split(each))
            parts[rank].copy_(message(rank, 1, each[rank]))
            starts.append(lambda at, p=parts, e=every: found.gather(p, e, at, SECONDS))
        order = random.Random(rank).sample(range(len(places)), len(places))
        waiting = {number: starts[number](places[number]) for number in order}
        for number, tensor in enumerate(kept):
            assert waiting[number].wait().data_ptr() == tensor.data_ptr()
        return kept

    every = world.each(run)
    for got in every:
        assert all(map(torch.equal, got, every[0]))
    for got, (dtype, numel) in zip(every[0], sums, strict=False):
        rows = torch.stack([drawn(rank, dtype, numel) for rank in range(size)])
        want = rows.double().sum(0)
        bound = 0 if dtype == torch.int32 else size * torch.finfo(dtype).eps
        assert (got.double() - want).abs().le(bound * rows.double().abs().sum(0)).all(), dtype
    assert torch.equal(
        every[0][len(sums)], torch.stack([message(r, 0, 50) for r in range(size)]).amax(0)
    )
    for got, each in zip(every[0][len(sums) + 1 :], lengths, strict=True):
        assert torch.equal(got, torch.cat([message(r, 1, each[r]) for r in range(size)]))


def test_sums_that_do_not_fit(ranks: Callable[..., WireRanks]) -> None:
    world = ranks(2)

    def run(rank: int) -> None:
        found = world.backends[rank].exchanges()
        for wrong in (torch.ones(2, 2), torch.ones(4)[::2]):
            with pytest.raises(ValueError, match="must be flat"):
                found.reduce(wrong, False, wrong, 0, SECONDS)
        tensor = torch.ones(3 + rank)
        with pytest.raises(dist.DistBackendError, match=r"sum 0 of order 0 of \d float32: rank"):
            found.reduce(tensor, False, tensor, found.reserve(), SECONDS).wait()

    world.each(run)


def test_a_rank_that_leaves_ends_them(ranks: Callable[..., WireRanks]) -> None:
    world = ranks(2)
    inputs, outputs = messages(0, 10)
    future = start(world, 0, inputs, outputs, torch.ones(1))
    world.backends[1].close("it has had enough")
    for each in (future, start(world, 0, inputs, outputs, torch.ones(1))):
        with pytest.raises(dist.DistBackendError, match=r"rank 1 has left .*: it has had enough"):
            each.wait()
    with pytest.raises(dist.DistBackendError, match="it has had enough"):
        start(world, 1, inputs, outputs, torch.ones(1)).wait()


@pytest.mark.parametrize("rails", [1, 3])
def test_a_message_counts_whose_sender_has_left(
    ranks: Callable[..., WireRanks], rails: int
) -> None:
    """Also one that the other side has not asked for yet, among others that are under way."""
    world = ranks(2, rails=rails)
    for number in range(20):
        inputs, outputs = messages(0, 100, number)
        large, sent = torch.zeros(8 << 20, dtype=torch.uint8), []
        for rank in range(2):
            group = world.groups[rank]
            sent.append(group.send([large], 1 - rank, number))
        first = start(world, 1, *messages(1, 100, number), torch.ones(1))
        start(world, 0, inputs, outputs, torch.ones(1)).wait()
        assert have_come(0, outputs, number)
        world.backends[0].close()
        first.wait()
        world.renew()


def test_what_has_failed_begins_anew(ranks: Callable[..., WireRanks]) -> None:
    """A place of before fails, wherever it is used; nothing of before reaches what is new."""
    world = ranks(2)
    old = [each.exchanges().reserve() for each in world.backends]
    lost = start(world, 0, *messages(0, 50, 7), torch.ones(1))
    world.backends[1].close()
    with pytest.raises(dist.DistBackendError):
        lost.wait()
    connections = world.endpoints[0].counts()["connections"]
    world.renew()

    def run(rank: int) -> None:
        inputs, outputs = messages(rank, 50, 8)
        start(world, rank, inputs, outputs, torch.ones(1)).wait()
        assert have_come(rank, outputs, 8)
        with pytest.raises(dist.DistBackendError, match="its step has failed"):
            start(world, rank, inputs, outputs, torch.ones(1), place=old[rank]).wait()
        assert world.backends[rank].failure() is None

    world.each(run)
    assert world.endpoints[0].counts()["connections"] == connections


def test_a_rank_that_is_late(ranks: Callable[..., WireRanks]) -> None:
    """The other ranks learn of it when the rank that has waited leaves."""
    world = ranks(2, is_held=True)
    world.each(lambda rank: world.groups[rank].barrier().wait())  # connects them
    inputs, outputs = messages(0, 10)
    found = world.backends[0].exchanges()
    late = found.start(
        inputs, outputs, torch.ones(1), found.reserve(), 0, timedelta(milliseconds=50)
    )
    with pytest.raises(dist.DistBackendError, match=r"timeout after 0\.05 s .* rank 1"):
        late.wait()
    assert world.backends[0].failure()[0] == _C.WireFailure.TIMEOUT
    future = start(world, 1, *messages(1, 10), torch.ones(1))
    future.wait()  # the message was sent
    world.backends[0].close("it has waited")
    with pytest.raises(dist.DistBackendError, match="it has waited"):
        start(world, 1, *messages(1, 10), torch.ones(1)).wait()


LOST_HALFWAY = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch_commhook.collectives.issuing import place_in

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[3], 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
nothing = torch.empty(0, dtype=torch.uint8)
sent, received = [nothing] * 2, [nothing] * 2
sent[1 - rank] = torch.ones(300_000_000, dtype=torch.uint8)
received[1 - rank] = torch.zeros(300_000_000, dtype=torch.uint8)
future = place_in(dist.group.WORLD).exchange(0, sent, received, torch.ones(1))
if rank == 1:
    while not received[0].view(-1, 1_000_000).any():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    future.wait()
except RuntimeError as error:
    assert "rank 1: its process has ended" in str(error), error
    print("it is told", flush=True)
os._exit(0)
"""


def test_a_rank_that_is_killed_halfway(tmp_path: Path) -> None:
    assert first_says(LOST_HALFWAY, tmp_path) == "it is told\n"


@on_processes
def test_those_of_a_group_of_gloo(rank: int) -> None:
    """Issued by a thread of the group's; then the group goes."""
    for number in range(3):
        group = dist.new_group()
        place, waiting = place_in(group), torch.futures.Future()
        inputs, outputs = messages(rank, 200_000, number)

        def issue(done: object, args: tuple = (inputs, outputs, place, waiting)) -> None:
            inputs, outputs, place, waiting = args
            place.exchange(0, inputs, outputs, torch.ones(1)).add_done_callback(waiting.set_result)

        work = group.allreduce([torch.ones(1)], dist.AllreduceOptions())
        work.get_future().add_done_callback(issue)
        waiting.wait().wait()
        assert have_come(rank, outputs, number)
        inputs, outputs = messages(rank, 30, number)
        place_in(group).exchange(0, inputs, outputs, torch.ones(1)).wait()
        assert have_come(rank, outputs, number)
        del work, issue, place
        dist.barrier()
        dist.destroy_process_group(group)
        del group


def test_two_threads_that_use_a_group_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them joins, and the other has what it has made."""
    made = []

    def backend(*_: Any, **__: Any) -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(gloo_groups, "_C", SimpleNamespace(WireBackend=backend))
    group, found = dist.ProcessGroup(dist.HashStore(), 0, 1), list[object]()
    monkeypatch.setattr(gloo_groups, "group_store", lambda _: dist.HashStore())
    assert in_threads([lambda: found.append(gloo_groups.backend_of(group))] * 2) == []
    assert found == [made[0]] * 2


def test_one_rank_and_nothing_to_send(ranks: Callable[..., WireRanks]) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    assert start(ranks(1), 0, [nothing], [nothing], torch.ones(2)).wait().sum() == 2


def test_what_is_refused(ranks: Callable[..., WireRanks]) -> None:
    """What is expected and never comes keeps no group open."""
    world = ranks(2)
    byte, result = torch.zeros(1, dtype=torch.uint8), torch.ones(1)
    wrong = ([], [byte.view(1, 1)] * 2, [torch.zeros(1)] * 2, [byte])
    for each in wrong:
        with pytest.raises(ValueError, match="inputs must hold a flat uint8 tensor for each rank"):
            start(world, 0, each, [byte, byte], result)
        with pytest.raises(ValueError, match="outputs must hold a flat uint8 tensor"):
            start(world, 0, [byte, byte], each, result)
    found = world.backends[0].exchanges()
    place = found.reserve()
    found.expect([byte, byte], place, 0, SECONDS)
    with pytest.raises(ValueError, match=r"stage 0 of place \d+ was expected before"):
        found.expect([byte, byte], place, 0, SECONDS)
    with pytest.raises(ValueError, match=r"outputs must be .* that of rank 1 differs"):
        start(world, 0, [byte, byte], [byte, byte.clone()], result, place=place)
    for place, stage in ((-1, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match="place must be one that reserve"):
            found.expect([byte, byte], place, stage, SECONDS)
