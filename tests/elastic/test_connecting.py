"""Ranks that come and go connect within a time, and can say so in the store meanwhile."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_processes

from torch_commhook.collectives.gloo_groups import destroy_group, make_group
from torch_commhook.step.peer_error import PeerError
from torch_commhook.step.rendezvous import Reason
from torch_commhook.step.step_group import StepGroup

#: The pool gives up sooner.
_COLLECTIVES_MAY_TAKE = timedelta(minutes=10)


def _error_of_a_closed(group: dist.ProcessGroup) -> RuntimeError:
    """The error for a message over a group that another thread is closing."""
    while True:
        try:
            group.send([torch.zeros(1)], 1, 0).wait()
        except RuntimeError as error:
            if "Could not retrieve or create the backend" in str(error):
                return error


@on_processes
def test_a_rank_that_waits_for_another_can_say_why_it_stops(rank: int) -> None:
    """Rank 1 does not make the second group of connections."""
    port = torch.zeros(1, dtype=torch.int64, device="cpu")
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    dist.broadcast(port, 0)
    own = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    within = timedelta(seconds=0.5)
    own.set_timeout(within)
    name = f"training {os.getppid()}"
    base = make_group(
        dist.PrefixStore("base", own), rank, [0, 1], name, _COLLECTIVES_MAY_TAKE, description=name
    )
    group = StepGroup(base, meets_again=False, connect_within=within)
    if rank == 0:
        with pytest.raises(RuntimeError, match="ranks did not connect within"):
            group.prepare_second_stage()
        group.lose(None, "since ranks could not connect")
        assert group._rendezvous is not None
        reason = Reason("since ranks could not connect", None, has_ended=False)
        assert group._rendezvous.reason() == reason
        assert isinstance(group.fail_with(_error_of_a_closed(group.group)), PeerError)
    dist.barrier()
    group.close()
    destroy_group(base)
