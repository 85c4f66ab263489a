"""How many round trips of a far link attaching takes, by the messages that follow one another.

``make bench-attach`` measures it over links with delays.
"""

from __future__ import annotations

import pytest

from torch_commhook.collectives.gloo_backend import MOST_IN_FULL_MESH, neighbours
from torch_commhook.process_group.gloo_messages import Traffic, messages_of
from torch_commhook.step.step_end import rounds_of

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


def round_trips(size: int, has_second_stage: bool) -> float:
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
    assert round_trips(size, has_second_stage) <= MOST


def test_round_trips_of_few_ranks() -> None:
    assert [round_trips(size, False) for size in (2, 4, 8, 16)] == [4.5, 5, 5.5, 6]
    assert [round_trips(size, True) for size in (2, 4, 8, 16)] == [7.5] * 4


@pytest.mark.parametrize("size", [17, 32, 100, 1000])
def test_connections_grow_as_the_logarithm(size: int) -> None:
    rounds = len(rounds_of(size))
    assert len(neighbours(0, size)) <= min(6 * rounds, size - 1)
    assert size > MOST_IN_FULL_MESH
