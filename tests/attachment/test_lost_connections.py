"""What a connection that was lost tells of the rank at its other end."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from rank_pool import RankPool

from torch_commhook.step.peer_error import PeerError
from torch_commhook.step.step_group import StepGroup


def _told(rank: int, said: str) -> tuple[str, bool] | None:
    """The reason that rank 0 gives for a step in which Gloo has said this, and whether it ended."""
    group = StepGroup()
    found = None
    if rank == 0:
        error = group.fail_with(RuntimeError(f"[gloo/transport/tcp/pair.cc:1] {said}"))
        assert isinstance(error, PeerError) and error._reason is not None
        assert error.rank == 1
        found = error._reason.text, error._reason.has_ended
    dist.barrier()
    group.close()
    return found


@pytest.mark.parametrize(
    "said", ["Connection closed by peer", "Read error: Connection reset by peer", "Broken pipe"]
)
def test_the_process_has_ended_that_closed_a_connection(two_ranks: RankPool, said: str) -> None:
    text, has_ended = two_ranks.run(_told, said)[0]
    assert has_ended and "the process of rank 1 ended" in text


@pytest.mark.parametrize(
    "said", ["Read error: Connection timed out", "No route to host", "Network is unreachable"]
)
def test_a_process_may_live_whose_host_does_not_answer(two_ranks: RankPool, said: str) -> None:
    text, has_ended = two_ranks.run(_told, said)[0]
    assert not has_ended and "the host of rank 1 did not answer" in text
