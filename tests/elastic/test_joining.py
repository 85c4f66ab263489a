"""What a donor and a new rank send each other: how large pieces are, and what fails."""

from __future__ import annotations

import queue
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_commhook.elastic import joining, transfer
from torch_commhook.elastic.joining import Donor, InBackground, NewRank
from torch_commhook.elastic.pieces import Pieces

DONOR, NEW = 0, 1


class _Done:
    def wait(self) -> None:
        """It is."""


class _Connection:
    """Two ranks of a process: a message is sent once it is received, as large ones are."""

    def __init__(self) -> None:
        self.messages: dict[int, queue.Queue[Tensor]] = defaultdict(queue.Queue)

    def at(self, own: int) -> Any:
        connection = self

        class Group:
            def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
                connection.messages[rank].put(tensors[0].clone())
                connection.messages[rank].join()
                return _Done()

            def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
                tensors[0].copy_(connection.messages[own].get(timeout=20))
                connection.messages[own].task_done()
                return _Done()

        return Group()


def _pieces() -> Pieces:
    model = nn.Linear(100, 100)
    return Pieces(list(model.parameters()), [torch.optim.SGD(model.parameters())])


@pytest.mark.parametrize(
    ("first", "least", "late", "receiving", "sizes"),
    [
        # So long the new rank loads data, and its pieces grow all the same.
        (200, 1, 0.1, 1e-4, [50, 100, 200, 400, 800, 1600, 3200]),
        # Each message takes long, and the pieces shrink to the least size.
        (800, 400, 0.0, 0.02, [200, 240, 192, 154, 123, 100, 100]),
    ],
    ids=["a late rank", "slow messages"],
)
def test_sizes_of_pieces(
    first: int,
    least: int,
    late: float,
    receiving: float,
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def receive_number(group: Any, rank: int) -> int:
        nonlocal now
        came = number(group, rank)
        if rank == NEW:  # on the donor's thread, while no other changes the time
            now += receiving
        return came

    number = transfer.receive_number
    monkeypatch.setattr(joining, "_FIRST_BYTES", first)
    monkeypatch.setattr(joining, "_LEAST_BYTES", least)
    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(joining.transfer, "receive_number", receive_number)
    connection = _Connection()
    donor = Donor(_pieces(), connection.at(DONOR), NEW, transfer.packed({}))
    new = NewRank(_pieces())
    came = []
    for step in range(len(sizes)):
        donor.begin_step()
        now += late
        new.begin_step(connection.at(NEW), DONOR, is_first=step == 0)
        new.receive()
        donor.wait()
        before = new.at
        new.write()
        came.append(new.at - before)
    assert came == sizes


@pytest.mark.parametrize("wanted", [[2], [-1], [0] * 5])
def test_a_donor_does_not_serve_senseless_requests(
    wanted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    connection = _Connection()
    donor = Donor(_pieces(), connection.at(DONOR), NEW, transfer.packed({}))
    donor.end(transfer.packed({}))
    for _ in range(2):
        transfer.receive(connection.at(NEW), DONOR, own=0)
    if len(wanted) > 2:  # the donor has two parameters
        transfer.send_number(len(wanted), connection.at(NEW), DONOR)
    else:
        transfer.send_numbers(wanted, connection.at(NEW), DONOR)
    donor.wait()
    assert "a new rank does not get the last part of its state" in caplog.text


def test_a_new_rank_allocates_no_impossible_length() -> None:
    connection = _Connection()
    sends = InBackground(lambda: transfer.send_number(1 << 50, connection.at(DONOR), NEW))
    with pytest.raises(ValueError, match=f"announces a message of {1 << 50} bytes"):
        transfer.receive(connection.at(NEW), DONOR, own=1 << 20)
    sends.result()


def test_any_error_of_a_call_in_the_background_is_raised() -> None:
    background: InBackground[None] = InBackground(lambda: {}["no such name"])
    with pytest.raises(KeyError, match="no such name"):
        background.result()
