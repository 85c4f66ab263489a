"""Waiting for messages: it ends with the connection, even where Gloo reports nothing."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched_ranks import first_says
from rank_pool import RankPool

from torch_commhook.collectives.gloo_groups import exchanges_of, finish_messages
from torch_commhook.step.step_end import StepEnd

#: Rank 1 is killed while a large message fills the connection and a small one waits behind it.
KILLED_RECEIVER = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch_commhook.collectives.gloo_groups import finish_messages

rank, waits_for = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(sys.argv[3], 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
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
try:
    finish_messages(group, sends if waits_for == "both" else sends[1:])
except RuntimeError as error:
    assert "exchange: with rank 1: " in str(error) and "gloo" in str(error), error
    print("it ended", flush=True)
os._exit(0)  # with connections that are lost
"""


@pytest.mark.parametrize("waits_for", ["both", "the second"])
def test_a_killed_receiver_ends_the_wait(tmp_path: Path, waits_for: str) -> None:
    assert first_says(KILLED_RECEIVER, tmp_path, waits_for) == "it ended\n"


#: Rank 1 is killed when rank 0 has received a part of a large message.
KILLED_SENDER = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch_commhook.collectives.gloo_groups import finish_messages

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[3], 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
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
try:
    finish_messages(group, [(1, work)])
except RuntimeError as error:
    assert "exchange: with rank 1: " in str(error) and "gloo" in str(error), error
    print("it ended", flush=True)
os._exit(0)  # with connections that are lost
"""


def test_a_killed_sender_ends_the_wait(tmp_path: Path) -> None:
    assert first_says(KILLED_SENDER, tmp_path, "") == "it ended\n"


def _receiver_leaves(rank: int) -> bool:
    group, value = dist.new_group(), torch.full((3,), float(rank))
    if rank == 1:
        group.recv([value], 0, 1).wait()
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        return bool((value == 0).all())
    sends = [(1, group.send([value], 1, 1))]
    dist.barrier()
    with pytest.raises(RuntimeError, match="gloo"):
        while True:  # until the end of the connection arrives
            finish_messages(group, [(1, group.send([value], 1, 1))])
    finish_messages(group, sends)
    dist.destroy_process_group(group)
    return True


def test_a_message_counts_whose_receiver_has_left(two_ranks: RankPool) -> None:
    assert two_ranks.run(_receiver_leaves, timeout=60) == [True, True]


def _works_in(error: BaseException) -> list[object]:
    """The Works that an error's traceback keeps, in variables and in lists of pairs."""
    found: list[object] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            values = value if isinstance(value, list) else [value]
            parts = [part for each in values for part in (each if type(each) is tuple else [each])]
            found += [part for part in parts if isinstance(part, dist.Work)]
    return found


def _held_error(rank: int, early: bool) -> bool:
    group = dist.new_group()
    step_end = StepEnd(group)
    dist.barrier()
    if rank == 1:
        if not early:  # rank 0 gets the flag, and waits for its own to be sent
            step_end.any_rank()
        dist.destroy_process_group(group)
        del group, step_end
        dist.barrier()
        return True
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
    return True


@pytest.mark.parametrize("early", [True, False])
def test_an_error_keeps_no_work(two_ranks: RankPool, early: bool) -> None:
    """A Work in use, as by a traceback, would keep the connection open."""
    assert two_ranks.run(_held_error, early, timeout=60) == [True, True]


def _after_the_end(rank: int) -> bool:
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
    return True


def test_a_closed_group_sends_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(_after_the_end, timeout=60) == [True, True]


def test_what_is_refused(one_rank: None) -> None:
    exchanges = exchanges_of(dist.group.WORLD)
    with pytest.raises(ValueError, match="must have the same length, got 1 and 0"):
        exchanges.finish_messages([0], [])
    for rank in (-1, 0, 1):
        with pytest.raises(ValueError, match=f"must be other ranks of 1, got {rank}"):
            exchanges.finish_messages([rank], [dist.Work()])
    finish_messages(dist.group.WORLD, [])
