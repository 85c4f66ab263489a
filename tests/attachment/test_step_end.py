"""How ranks agree at a step's end: which parameters were used, and who waits."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_processes
from rank_pool import RankPool

from torch_commhook._C import WireFailure
from torch_commhook.collectives import issuing
from torch_commhook.collectives.issuing import StepEnd, agree_on_used
from torch_commhook.step.connected_group import Failure, reason_of_loss
from torch_commhook.step.step_group import StepGroup


def _agree(rank: int, used: list[list[int]]) -> list[int]:
    for _ in range(2):
        own = torch.tensor(used[rank], dtype=torch.uint8)
        agree_on_used(StepEnd(dist.group.WORLD), own)
        assert StepEnd(dist.group.WORLD).any_rank()
    return own.tolist()


@pytest.mark.parametrize(
    ("used", "want"),
    [
        ([[1, 1, 1]] * 3, [1, 1, 1]),
        ([[1, 0, 0], [1, 1, 1], [0, 0, 0]], [1, 1, 1]),
        ([[1, 0, 0], [0, 0, 0], [0, 0, 1]], [1, 0, 1]),
        ([[0, 0, 0]] * 3, [0, 0, 0]),
    ],
)
def test_the_maximum(three_ranks: RankPool, used: list[list[int]], want: list[int]) -> None:
    assert three_ranks.run(_agree, used) == [want] * 3


@pytest.mark.parametrize(("used", "count"), [([1, 1], 1), ([1, 0], 2)])
@on_processes
def test_maps_travel_only_where_each_rank_left_some_unused(
    rank: int, used: list[int], count: int
) -> None:
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        sent, begin = [], issuing.begin_maximum
        patch.setattr(issuing, "begin_maximum", lambda *args: sent.append(args) or begin(*args))
        agree_on_used(StepEnd(group), torch.tensor(used, dtype=torch.uint8))
    dist.barrier()
    dist.destroy_process_group(group)
    assert len(sent) == count


@on_processes
def test_a_rank_that_is_given_up_meanwhile_still_ends_the_step(rank: int) -> None:
    group = StepGroup(dist.group.WORLD)
    group.begin()
    thread = None
    if rank == 0:
        rendezvous, is_telling = group._rendezvous, threading.Event()
        assert rendezvous is not None
        tell = rendezvous.tell

        def tell_slowly(reason: object) -> None:
            is_telling.set()
            time.sleep(0.5)
            tell(reason)  # type: ignore[arg-type]

        rendezvous.tell = tell_slowly  # type: ignore[method-assign]
        thread = threading.Thread(target=group.lose, args=(1, "since rank 1 is silent"))
        thread.start()
        is_telling.wait()
    group.end()  # the flags of both ranks come
    if thread is not None:
        thread.join()
    group.close()


@pytest.mark.parametrize("of_rank_1", [b"a", b"b"])
@on_processes
def test_a_greeting_compares(rank: int, of_rank_1: bytes) -> None:
    group = StepGroup(dist.group.WORLD, greeting=of_rank_1 if rank else b"a")
    own = group._own[0]
    assert own.is_alike(b"another") is None
    dist.barrier()
    group.close()
    group = StepGroup(dist.group.WORLD, greeting=of_rank_1 if rank else b"a")
    own = group._own[0]
    assert own.is_alike(of_rank_1 if rank else b"a") is (of_rank_1 == b"a")
    assert own.is_alike(b"a") is None  # it is told once
    dist.barrier()
    group.close()


@pytest.mark.parametrize(
    ("kind", "text", "has_ended"),
    [
        ("ENDED", "since the process of rank 5 ended, or left the others", True),
        ("LEFT", "since the process of rank 5 ended, or left the others", True),
        ("LOST", "since the host of rank 5 did not answer", False),
        ("TOLD", "on rank 5: t", True),
    ],
)
def test_the_reason_of_a_loss(kind: str, text: str, has_ended: bool) -> None:
    failure = Failure(getattr(WireFailure, kind), 5, "t")
    reason = reason_of_loss(failure, RuntimeError("t"), 0)
    assert reason.text.startswith(text) and reason.rank == 5 and reason.has_ended == has_ended
