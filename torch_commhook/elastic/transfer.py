"""Sends the state of a training to a new rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.packed import check_length, packed, unpacked

__all__ = [
    "groups_of",
    "load_groups",
    "load_states",
    "packed",
    "receive",
    "receive_number",
    "receive_numbers",
    "send",
    "send_number",
    "send_numbers",
    "states_of",
    "unpacked",
]

#: Bytes of a message.
_PIECE = 4 << 20
# The tags of a step's end and of exchanges are above.
_TAG = (1 << 30) - 64


def send(data: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    """Send bytes to a rank of a group, in pieces. Returns when they are sent.

    Raises:
        RuntimeError: the connection was closed.
    """
    send_number(data.numel(), group, rank)
    for piece in data.split(_PIECE):
        _send(piece, group, rank)


def receive(group: dist.ProcessGroup, rank: int, own: int) -> Tensor:
    """Receive the bytes that a rank of a group sends by :func:`send`.

    Args:
        group: the group.
        rank: the sender's place in it.
        own: the bytes of this rank's parameters and buffers, for :func:`check_length`.

    Raises:
        RuntimeError: the connection was closed.
        ValueError: the announced length is impossible.
    """
    length = receive_number(group, rank)
    check_length(length, own)
    data = torch.empty(length, dtype=torch.uint8, device="cpu")
    for piece in data.split(_PIECE):
        _receive(piece, group, rank)
    return data


def send_number(number: int, group: dist.ProcessGroup, rank: int) -> None:
    """Send an int to a rank of a group.

    Raises:
        RuntimeError: the connection was closed.
    """
    _send(torch.tensor([number], dtype=torch.int64, device="cpu"), group, rank)


def receive_number(group: dist.ProcessGroup, rank: int) -> int:
    """Receive the number that a rank of a group sends by :func:`send_number`.

    Raises:
        RuntimeError: the connection was closed.
    """
    number = torch.zeros(1, dtype=torch.int64, device="cpu")
    _receive(number, group, rank)
    return int(number)


def send_numbers(numbers: Sequence[int], group: dist.ProcessGroup, rank: int) -> None:
    """Send ints to a rank of a group.

    Raises:
        RuntimeError: the connection was closed.
    """
    send_number(len(numbers), group, rank)
    if numbers:
        _send(torch.tensor(numbers, dtype=torch.int64, device="cpu"), group, rank)


def receive_numbers(group: dist.ProcessGroup, rank: int, most: int) -> list[int]:
    """Receive the numbers that a rank of a group sends by :func:`send_numbers`.

    Args:
        group: the group.
        rank: the sender's place in it.
        most: the largest number of numbers.

    Raises:
        RuntimeError: the connection was closed.
        ValueError: the rank announces more numbers.
    """
    length = receive_number(group, rank)
    if not 0 <= length <= most:
        raise ValueError(
            f"torch_commhook: rank {rank} of the group must send from 0 to {most} numbers, "
            f"got {length}"
        )
    numbers = torch.zeros(length, dtype=torch.int64, device="cpu")
    if length:
        _receive(numbers, group, rank)
    return numbers.tolist()


def _send(message: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    group.send([message], rank, _TAG).wait()


def _receive(message: Tensor, group: dist.ProcessGroup, rank: int) -> None:
    group.recv([message], rank, _TAG).wait()


def states_of(objects: Sequence[Any]) -> list[Any]:
    """Return the state of each object."""
    return [each.state_dict() for each in objects]


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimizer's parameter groups, without the parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def load_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Load the settings that :func:`groups_of` returned.

    Raises:
        ValueError: the optimizers have different numbers of groups.
    """
    if len(optimizer.param_groups) != len(groups):
        raise ValueError(
            f"Elastic: optimizers must be the same on all ranks: another rank's has {len(groups)} "
            f"groups of parameters, this one's {len(optimizer.param_groups)}"
        )
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        own.update(given)


def load_states(objects: Sequence[Any], states: Sequence[Any]) -> None:
    """Load the states that :func:`states_of` returned.

    Raises:
        ValueError: the ranks have different numbers of objects.
    """
    if len(objects) != len(states):
        raise ValueError(
            f"Elastic: state must be the same on all ranks: another rank has {len(states)} "
            f"objects, this one {len(objects)}"
        )
    for each, state in zip(objects, states, strict=True):
        each.load_state_dict(state)
