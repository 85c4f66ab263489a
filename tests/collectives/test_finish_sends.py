"""Waiting for messages to be sent: it ends with the connection, even where Gloo reports nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from torch_commhook.collectives.gloo_groups import exchanges_of, finish_sends

#: Rank 1 is killed while a large message fills the connection and a small one waits behind it.
KILLED_RECEIVER = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch_commhook.collectives.gloo_groups import finish_sends

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
while " (python" in (stat := open(f"/proc/{pid}/stat").read()) and ") T " not in stat:
    time.sleep(0.01)
sends = [(1, group.send([large], 1, 1)), (1, group.send([small], 1, 2))]
os.kill(pid, signal.SIGKILL)
try:
    finish_sends(group, sends if waits_for == "both" else sends[1:])
except RuntimeError as error:
    assert "exchange: with rank 1: " in str(error) and "gloo" in str(error), error
    print("it ended", flush=True)
os._exit(0)  # with connections that are lost
"""


@pytest.mark.parametrize("waits_for", ["both", "the second"])
def test_a_killed_receiver_ends_the_wait(tmp_path: Path, waits_for: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED_RECEIVER, str(rank), waits_for, tmp_path / "store"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert said == "it ended\n"
    assert ranks[1].returncode == -signal.SIGKILL


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
    time.sleep(0.2)  # the connection's end arrives
    finish_sends(group, sends)
    with pytest.raises(RuntimeError, match="gloo"):
        finish_sends(group, [(1, group.send([value], 1, 1))])
    dist.destroy_process_group(group)
    return True


def test_a_message_counts_whose_receiver_has_left(two_ranks: RankPool) -> None:
    assert two_ranks.run(_receiver_leaves, timeout=60) == [True, True]


def _after_the_end(rank: int) -> bool:
    group, value = dist.new_group(), torch.ones(1)
    if rank == 1:
        group.recv([value], 0, 1).wait()
    else:
        send = group.send([value], 1, 1)
        exchanges = exchanges_of(group)
        finish_sends(group, [(1, send)])
        exchanges.stop()
        with pytest.raises(RuntimeError, match="closed"):
            finish_sends(group, [(1, send)])
    dist.barrier()
    dist.destroy_process_group(group)
    return True


def test_a_closed_group_sends_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(_after_the_end, timeout=60) == [True, True]


def test_what_is_refused(one_rank: None) -> None:
    exchanges = exchanges_of(dist.group.WORLD)
    with pytest.raises(ValueError, match="must have the same length, got 1 and 0"):
        exchanges.finish_sends([0], [])
    for rank in (-1, 0, 1):
        with pytest.raises(ValueError, match=f"must be other ranks of 1, got {rank}"):
            exchanges.finish_sends([rank], [dist.Work()])
    finish_sends(dist.group.WORLD, [])
