"""Backends of Gloo that end, whatever their connections hold."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_threads import MOST_SECONDS, TIMEOUT, LibraryRanks

from torch_commhook.collectives.gloo_backend import connect
from torch_commhook.collectives.lost_hosts import cut


def two_ranks(timeout: timedelta = TIMEOUT) -> LibraryRanks:
    return LibraryRanks([dist.HashStore()] * 2, timeout=timeout, threads=2)


@pytest.fixture
def ranks() -> Iterator[LibraryRanks]:
    made = two_ranks()
    yield made
    assert made.close(0) and made.close(1)


def _leave_message(ranks: LibraryRanks, nbytes: int) -> None:
    """Rank 0 sends rank 1 a message, for which rank 1 has asked, and has given it up."""
    asked = ranks.groups[1].recv([torch.zeros(nbytes, dtype=torch.uint8)], 0, 5)
    del asked
    gc.collect()
    sent = ranks.groups[0].send([torch.ones(nbytes, dtype=torch.uint8)], 1, 5)
    time.sleep(0.1)  # it arrives
    del sent


@pytest.mark.real_time
@pytest.mark.parametrize("nbytes", [1, 1 << 26], ids=["small", "large"])
@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "when-sent"])
def test_messages_that_were_given_up(ranks: LibraryRanks, nbytes: int, is_connected: bool) -> None:
    if is_connected:
        ranks.connect()
        _leave_message(ranks, nbytes)
    else:  # whoever asks is connected once the other one sends
        received = torch.zeros(1)
        other = threading.Thread(target=lambda: ranks.groups[1].recv([received], 0, 4).wait())
        other.start()
        ranks.groups[0].send([torch.ones(1)], 1, 4).wait()
        other.join()
        _leave_message(ranks, nbytes)
    begun = time.monotonic()
    assert ranks.close(1)
    assert ranks.close(0)
    assert time.monotonic() - begun < MOST_SECONDS / 2


def test_the_end_of_a_backend_leaves_the_others_alone() -> None:
    """Their loops stay level-triggered, and their connections open."""
    first, second = two_ranks(), two_ranks()
    for each in (first, second):
        each.connect()
    _leave_message(first, 1)
    assert first.close(1) and first.close(0)
    assert _edge_triggered() == 0
    tensors = [torch.full((1000,), float(rank)) for rank in range(2)]
    works = [
        group.allreduce([tensor]) for group, tensor in zip(second.groups, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    assert all(tensor.eq(1).all() for tensor in tensors)
    del works
    assert second.close(0) and second.close(1)


def _edge_triggered() -> int:
    """Descriptors that an epoll of this process waits for in that way."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            text = Path(f"/proc/self/fdinfo/{name}").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            words = line.split()
            if words[0] == "tfd:":
                found += int(words[3], 16) >> 31 & 1
    return found


def test_no_file_stays_open(ranks: LibraryRanks) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        more = two_ranks()
        more.connect()
        _leave_message(more, 1)
        assert more.close(0) and more.close(1)
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > len(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_connections_of_a_backend(ranks: LibraryRanks) -> None:
    assert [backend.addresses.sockets() for backend in ranks.backends] == [[], []]
    ranks.connect()
    assert [len(backend.addresses.sockets()) for backend in ranks.backends] == [1, 1]
    waiting = ranks.groups[1].recv([torch.zeros(1)], 0, 5)
    cut(ranks.backends[0].addresses)
    with pytest.raises(RuntimeError, match="closed by peer"):
        waiting.wait()


def test_a_rank_that_ends_while_ranks_connect() -> None:
    """Its backend is gone when the other one has read its address."""
    two = two_ranks(timedelta(milliseconds=400))
    assert two.close(1)
    with pytest.raises(RuntimeError):
        connect(two.groups[0], two.backends[0], timedelta(milliseconds=400))
    assert two.close(0)
