"""What a donor and a new rank send each other: how large pieces are, and what fails."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
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


def test_pieces_for_a_late_rank_do_not_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_FIRST_BYTES", 200), ("_LEAST_BYTES", 1)):
        monkeypatch.setattr(joining, name, value)
    connection = _Connection()
    donor = Donor(_pieces(), connection.at(DONOR), NEW, transfer.packed({}))
    new = NewRank(_pieces())
    came = []
    for step in range(8):
        donor.begin_step()
        time.sleep(0.1)  # so long it loads data
        new.begin_step(connection.at(NEW), DONOR, is_first=step == 0)
        new.receive()
        donor.wait()
        before = new.at
        new.write()
        came.append(new.at - before)
    assert came[0] == 50 and came[-1] > 8 * came[0], came


def test_pieces_have_a_least_size_where_each_message_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("_FIRST_BYTES", 800), ("_LEAST_BYTES", 400)):
        monkeypatch.setattr(joining, name, value)
    receive = transfer.receive

    def receive_late(group: Any, rank: int) -> Tensor:
        time.sleep(0.02)
        return receive(group, rank)

    monkeypatch.setattr(joining.transfer, "receive", receive_late)
    connection = _Connection()
    donor = Donor(_pieces(), connection.at(DONOR), NEW, transfer.packed({}))
    new = NewRank(_pieces())
    came = []
    for step in range(6):
        donor.begin_step()
        new.begin_step(connection.at(NEW), DONOR, is_first=step == 0)
        new.receive()
        donor.wait()
        before = new.at
        new.write()
        came.append(new.at - before)
    assert came[0] == 200 and came[-1] == 100, came


def test_any_error_of_a_call_in_the_background_is_raised() -> None:
    background: InBackground[None] = InBackground(lambda: {}["no such name"])
    with pytest.raises(KeyError, match="no such name"):
        background.result()
