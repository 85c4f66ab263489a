"""Exchanges of messages: of any lengths, in any order of stages, and what ends them.

Waiting for messages ends with the connection, even where Gloo reports nothing.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched_ranks import first_says
from on_ranks import on_processes
from rank_pool import RankPool
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.exchange import exchange
from torch_commhook.collectives.gloo_groups import exchanges_of, finish_messages, second_group
from torch_commhook.step.step_end import StepEnd


def message(source: int, destination: int, length: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10000 * number + 100 * source + destination)
    return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)


def messages(rank: int, length: int, number: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Those of a rank to both ranks, and the memory for those to this rank."""
    inputs = [message(rank, to, length, number) for to in range(2)]
    return inputs, [torch.zeros(length, dtype=torch.uint8) for _ in range(2)]


def have_come(rank: int, outputs: list[Tensor], number: int = 0) -> bool:
    every = enumerate(outputs)
    return all(torch.equal(got, message(to, rank, len(got), number)) for to, got in every)


#: Whether there is a second group, whether the stage is the second one, how many more pairs of
#: connections there are, and whether messages are expected before they are sent.
Way = tuple[bool, bool, int, bool]
WAYS: list[Way] = [
    (False, False, 0, False),
    (True, False, 0, False),
    (True, True, 0, False),
    *((True, False, more, expected) for more in (1, 3) for expected in (False, True)),
]


def _exchange(rank: int, lengths: list[list[int]], way: Way) -> list[Tensor]:
    """``lengths[a][b]`` bytes go from rank a to rank b."""
    two_groups, is_second, more, expected = way
    size = dist.get_world_size()
    inputs = [message(rank, to, lengths[rank][to]) for to in range(size)]
    outputs = [torch.zeros(lengths[source][rank], dtype=torch.uint8) for source in range(size)]
    result = torch.ones(3)
    up = dist.group.WORLD
    down = dist.new_group() if two_groups else up
    exchanges = _C.Exchanges(up, down, is_second)
    others = [dist.new_group() for _ in range(2 * more)]
    exchanges.use_more(others[::2], others[1::2])
    place = exchanges.reserve()
    if expected:
        exchanges.expect(outputs, place)
        dist.barrier()
    found = exchanges.start(inputs, outputs, result, place).wait()
    exchanges.stop()
    assert found.data_ptr() == result.data_ptr()
    dist.barrier()
    for group in [*others, *([down] if two_groups else [])]:
        dist.destroy_process_group(group)
    return outputs


LENGTHS = ([5, 30, 0], [10, 10, 21], [1, 0, 20])


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("factor", [1, 6_553, 100_000])
def test_messages_of_all_lengths(three_ranks: RankPool, factor: int, way: Way) -> None:
    lengths = [[factor * n for n in row] for row in LENGTHS]
    ranks = three_ranks.run(_exchange, lengths, way)
    for rank, outputs in enumerate(ranks):
        for source, got in enumerate(outputs):
            if source == rank:
                assert not got.any()  # its own is the caller's to copy
            else:
                assert torch.equal(got, message(source, rank, lengths[source][rank]))


@on_processes
def test_stages_in_another_order_on_each_rank(rank: int) -> None:
    first = dist.new_group()
    stages = [first, second_group(first)]
    waiting = {}
    for number in range(4):
        # The stages of one rank are not in step with the other's; those of each stage are.
        for stage in (0, 1) if rank == 0 else (1, 0):
            seed = 2 * number + stage
            inputs, outputs = messages(rank, 300_000, seed)
            result = torch.tensor(seed)
            waiting[seed] = exchange(inputs, outputs, result, stages[stage]), outputs
    for seed, (future, outputs) in waiting.items():
        assert int(future.wait()) == seed and have_come(rank, outputs, seed)
    dist.barrier()
    dist.destroy_process_group(first)


@on_processes
def test_those_that_are_stopped_fail(rank: int) -> None:
    up, down = dist.new_group(), dist.new_group()
    if rank == 0:  # nobody answers
        exchanges = _C.Exchanges(up, down, False)
        messages = [torch.zeros(10, dtype=torch.uint8) for _ in range(2)]
        futures = [exchanges.start(messages, messages, torch.ones(1)) for _ in range(3)]
        ended: list[bool] = []
        futures[2].add_done_callback(lambda future: ended.append(True))
        exchanges.stop()
        assert ended  # what waits for them has run
        for future in futures:
            with pytest.raises(RuntimeError, match="the process group was closed"):
                future.wait()
        with pytest.raises(RuntimeError, match="the process group was closed"):
            exchanges.start(messages, messages, torch.ones(1))
        exchanges.stop()
    dist.barrier()
    dist.destroy_process_group(up)
    dist.destroy_process_group(down)


@on_processes
def test_a_rank_that_leaves_ends_them(rank: int) -> None:
    up, down = dist.new_group(), dist.new_group()
    if rank == 0:
        messages = [torch.zeros(10, dtype=torch.uint8) for _ in range(2)]
        exchanges = _C.Exchanges(up, down, False)
        future = exchanges.start(messages, messages, torch.ones(1))
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(up)
        dist.destroy_process_group(down)
    else:
        with pytest.raises(RuntimeError, match="gloo"):
            future.wait()
        later = exchanges.start(messages, messages, torch.ones(1))
        with pytest.raises(RuntimeError, match="gloo"):
            later.wait()
        exchanges.stop()
        dist.destroy_process_group(up)
        dist.destroy_process_group(down)


#: How each rank of the following programs begins.
BEGIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import finish_messages

rank, choice = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(sys.argv[3], 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
"""

LOST_HALFWAY = """
up, down = dist.new_group(), dist.new_group()
exchanges = _C.Exchanges(up, down, choice == "second")
nothing = torch.empty(0, dtype=torch.uint8)
messages = [[nothing] * 2, [nothing] * 2]
for many in messages:
    many[1 - rank] = torch.zeros(300_000_000, dtype=torch.uint8)
dist.barrier()
future = exchanges.start(*messages, torch.ones(1))
if rank == 1:
    time.sleep(0.03)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    future.wait()
except RuntimeError as error:
    assert "gloo" in str(error), error
    print("it is told", flush=True)
os._exit(0)  # with connections that are lost
"""


@pytest.mark.parametrize("stage", ["first", "second"])
def test_a_rank_that_is_killed_halfway(tmp_path: Path, stage: str) -> None:
    """Gloo tells nothing of a message of which a part is there; its timeout is half an hour."""
    assert first_says(BEGIN + LOST_HALFWAY, tmp_path, stage) == "it is told\n"


@on_processes
def test_issued_by_a_thread_of_gloo(rank: int) -> None:
    """A thread of the first group's issues a second stage; then the group goes."""
    for number in range(20):
        first = dist.new_group()
        second = second_group(first)
        exchanges_of(second)
        waiting = torch.futures.Future()
        inputs, outputs = messages(rank, 200_000, number)

        def issue(done: object, args: tuple = (inputs, outputs, second, waiting)) -> None:
            inputs, outputs, second, waiting = args
            exchange(inputs, outputs, torch.ones(1), second).add_done_callback(waiting.set_result)

        work = first.allreduce([torch.ones(1)], dist.AllreduceOptions())
        work.get_future().add_done_callback(issue)
        waiting.wait().wait()
        assert have_come(rank, outputs, number)
        del work, issue, second
        dist.barrier()
        dist.destroy_process_group(first)
        del first


def test_one_rank_and_nothing_to_send(one_rank: None) -> None:
    nothing, result = torch.empty(0, dtype=torch.uint8), torch.ones(2)
    group = dist.group.WORLD
    for is_second in (False, True):
        exchanges = _C.Exchanges(group, group, is_second)
        assert exchanges.start([nothing], [nothing], result).wait().sum() == 2
        exchanges.stop()


def test_what_is_refused(one_rank: None) -> None:
    byte, group, result = torch.zeros(1, dtype=torch.uint8), dist.group.WORLD, torch.ones(1)
    for groups in ((None, group), (group, None)):
        with pytest.raises(ValueError, match="a process group must be given, got None"):
            _C.Exchanges(*groups, False)
    for inputs, outputs in (([], []), ([byte], [byte.view(1, 1)]), ([torch.zeros(1)], [byte])):
        with pytest.raises(ValueError, match="hold a flat uint8 tensor on the CPU for each rank"):
            _C.Exchanges(group, group, False).start(inputs, outputs, result)


@on_processes
def test_a_message_counts_whose_sender_has_left(rank: int) -> None:
    """Rank 1 stands still while rank 0 sends its message and closes its connections.

    Then the message and the end of the connection reach rank 1 at the same time.
    """
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    has_begun = torch.zeros(1)
    for _ in range(20):
        group = dist.new_group()
        exchanges = _C.Exchanges(group, group, False)
        inputs, outputs = messages(rank, 100)
        place = exchanges.reserve()
        exchanges.expect(outputs, place)  # so that messages need no answer
        dist.barrier()
        if rank == 1:
            future = exchanges.start(inputs, outputs, torch.ones(1), place)
            dist.send(has_begun, 0)
            future.wait()
            exchanges.stop()
            dist.destroy_process_group(group)
        else:
            dist.recv(has_begun, 1)
            while not outputs[1].equal(message(1, 0, 100)):  # rank 1 may still need to run for it
                time.sleep(0.001)
            os.kill(int(pids[1]), signal.SIGSTOP)
            try:
                exchanges.start(inputs, outputs, torch.ones(1), place).wait()
                exchanges.stop()
                dist.destroy_process_group(group)
                del exchanges, group  # which closes the connections
            finally:
                os.kill(int(pids[1]), signal.SIGCONT)
        assert outputs[1 - rank].equal(message(1 - rank, rank, 100))
        dist.barrier()


# ---- what is expected ----------------------------------------------------------------------------


@on_processes
def test_what_is_expected_comes_there(rank: int) -> None:
    """Two places, whose messages rank 0 expects in one order and starts in the other."""
    exchanges = _C.Exchanges(dist.group.WORLD, dist.group.WORLD, False)
    places = [exchanges.reserve(), exchanges.reserve()]
    outputs = [[torch.zeros(40 + place, dtype=torch.uint8) for _ in range(2)] for place in places]
    for place in places if rank == 0 else places[:1]:
        exchanges.expect(outputs[place], place)
    futures = []
    for place in reversed(places) if rank == 0 else places:
        inputs = [message(rank, to, 40 + place, place) for to in range(2)]
        futures.append(exchanges.start(inputs, outputs[place], outputs[place][0], place))
    for future in futures:
        future.wait()
    exchanges.stop()
    other = 1 - rank
    for place in places:
        assert outputs[place][other].equal(message(other, rank, 40 + place, place))


@on_processes
def test_what_is_refused_of_expected_messages(rank: int) -> None:
    """What is expected and never comes keeps no group open."""
    group = dist.new_group()
    exchanges = exchanges_of(group)
    outputs = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    place = exchanges.reserve()
    exchanges.expect(outputs, place)
    said = []
    for call in (
        lambda: exchanges.expect(outputs, place),
        lambda: exchanges.start(
            outputs, [torch.zeros_like(each) for each in outputs], outputs[0], place
        ).wait(),
        lambda: exchanges.expect(outputs[:1], place),
        lambda: exchanges.expect(outputs, -1),
        lambda: exchanges.use_more([group], []),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            said.append(str(error).splitlines()[0])
    exchanges.stop()
    exchanges.expect(outputs, exchanges.reserve())  # start() tells
    dist.barrier()
    dist.destroy_process_group(group)
    again, elsewhere, few, wrong_place, uneven = said
    assert again == "exchange: stage 0 of place 0 was expected before"
    assert elsewhere == (
        "exchange: outputs must be the tensors that expect() was given for this place; that of "
        f"rank {1 - rank} differs"
    )
    assert few == "exchange: outputs must hold a flat uint8 tensor on the CPU for each rank"
    assert wrong_place.startswith("exchange: place must be one that reserve() gave")
    assert uneven == "exchange: ups and downs must have the same length, got 1 and 0"


# ---- waiting for messages of a group -------------------------------------------------------------

#: How rank 0 ends.
ENDED = """
try:
    finish_messages(group, works)
except RuntimeError as error:
    assert "exchange: with rank 1: " in str(error) and "gloo" in str(error), error
    print("it ended", flush=True)
os._exit(0)  # with connections that are lost
"""

#: Rank 1 is killed while a large message fills the connection and a small one waits behind it.
KILLED_RECEIVER = """
group = dist.new_group()
large, small = torch.zeros(50_000_000), torch.zeros(1)
if rank == 1:
    works = [group.recv([large], 0, 1), group.recv([small], 0, 2)]
    store.set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
pid = int(store.get("pid"))
while ") T " not in open(f"/proc/{pid}/stat").read():  # stopped
    time.sleep(0.01)
sends = [(1, group.send([large], 1, 1)), (1, group.send([small], 1, 2))]
os.kill(pid, signal.SIGKILL)
works = sends if choice == "both" else sends[1:]
"""


@pytest.mark.parametrize("waits_for", ["both", "the second"])
def test_a_killed_receiver_ends_the_wait(tmp_path: Path, waits_for: str) -> None:
    assert first_says(BEGIN + KILLED_RECEIVER + ENDED, tmp_path, waits_for) == "it ended\n"


#: Rank 1 is killed when rank 0 has received a part of a large message.
KILLED_SENDER = """
if rank == 1:
    store.set("pid", str(os.getpid()))
group = dist.new_group()
large = torch.zeros(100_000_000)
if rank == 1:
    work = group.send([large + 1], 0, 1)
    while True:
        time.sleep(1)
work = group.recv([large], 1, 1)
while not large[0]:
    time.sleep(0.001)
os.kill(int(store.get("pid")), signal.SIGKILL)
assert not large[-1]
works = [(1, work)]
"""


def test_a_killed_sender_ends_the_wait(tmp_path: Path) -> None:
    assert first_says(BEGIN + KILLED_SENDER + ENDED, tmp_path, "") == "it ended\n"


@on_processes
def test_a_message_counts_whose_receiver_has_left(rank: int) -> None:
    group, value = dist.new_group(), torch.full((3,), float(rank))
    if rank == 1:
        group.recv([value], 0, 1).wait()
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        assert (value == 0).all()
        return
    sends = [(1, group.send([value], 1, 1))]
    dist.barrier()
    with pytest.raises(RuntimeError, match="gloo"):
        while True:  # until the end of the connection arrives
            finish_messages(group, [(1, group.send([value], 1, 1))])
    finish_messages(group, sends)
    dist.destroy_process_group(group)


def _works_in(error: BaseException) -> list[object]:
    """The Works that an error's traceback keeps, in variables and in lists of pairs."""
    found: list[object] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            values = value if isinstance(value, list) else [value]
            parts = [part for each in values for part in (each if type(each) is tuple else [each])]
            found += [part for part in parts if isinstance(part, dist.Work)]
    return found


@on_processes
@pytest.mark.parametrize("early", [True, False])
def test_an_error_keeps_no_work(rank: int, early: bool) -> None:
    """A Work in use, as by a traceback, would keep the connection open."""
    group = dist.new_group()
    step_end = StepEnd(group)
    dist.barrier()
    if rank == 1:
        if not early:  # rank 0 gets the flag, and waits for its own to be sent
            step_end.any_rank()
        dist.destroy_process_group(group)
        del group, step_end
        dist.barrier()
        return
    if not early:
        exchanges_of(group).stop()
    try:
        step_end.any_rank()
    except RuntimeError as error:
        held = error
    assert _works_in(held) == []
    assert step_end._sends == [] and not any(step_end._works)
    dist.barrier()
    dist.destroy_process_group(group)


@on_processes
def test_a_closed_group_sends_nothing(rank: int) -> None:
    group, value = dist.new_group(), torch.ones(1)
    if rank == 1:
        group.recv([value], 0, 1).wait()
    else:
        send = group.send([value], 1, 1)
        exchanges = exchanges_of(group)
        finish_messages(group, [(1, send)])
        exchanges.stop()
        with pytest.raises(RuntimeError, match="closed"):
            finish_messages(group, [(1, send)])
    dist.barrier()
    dist.destroy_process_group(group)


def test_which_messages_are_refused(one_rank: None) -> None:
    exchanges = exchanges_of(dist.group.WORLD)
    with pytest.raises(ValueError, match="must have the same length, got 1 and 0"):
        exchanges.finish_messages([0], [])
    for rank in (-1, 0, 1):
        with pytest.raises(ValueError, match=f"must be other ranks of 1, got {rank}"):
            exchanges.finish_messages([rank], [dist.Work()])
    finish_messages(dist.group.WORLD, [])
