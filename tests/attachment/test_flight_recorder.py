"""What PyTorch's flight recorder calls the library's process groups."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched_ranks import launched
from staged_steps import point_to_point
from torch import nn
from torch.distributed import distributed_c10d

from torch_commhook import GradBucket, PeerError, attach, collectives, hooks

BLOCKWISE = hooks.blockwise()


def recorded(rank: int) -> tuple[set[tuple[str, str]], set[str]]:
    """The groups of all collectives of two steps, between which one has failed.

    Returns:
        Those that the recorder has, by name and description; and the descriptions of all groups.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
    dist.init_process_group("gloo")
    own = dist.new_group(group_desc="a group of mine")
    # Of exchanges the recorder takes no note.
    with point_to_point(False):
        collectives.compressed_all_reduce(torch.ones(500), BLOCKWISE.codec, group=own).wait()
    fails = False

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if fails and rank == 0:
            raise ValueError("on purpose")
        return BLOCKWISE(None, bucket)

    model = nn.Linear(20, 20)
    handle = attach(model, hook)
    for fails in (False, True, False):
        if fails:
            with pytest.raises(ValueError if rank == 0 else PeerError):
                model(torch.ones(2, 20)).sum().backward()
        else:
            model(torch.ones(2, 20)).sum().backward()
    known = {group.group_desc for group in distributed_c10d._world.pg_map}
    dump: Any = torch._C._distributed_c10d._dump_fr_trace
    entries = pickle.loads(dump())["entries"]
    handle.remove()
    dist.barrier()
    dist.destroy_process_group()
    return {entry["process_group"] for entry in entries}, known


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="no flight recorder of Gloo's"
)
def test_groups_have_descriptions() -> None:
    own = {
        "commhook: gradients over default_pg",
        "commhook: gradients over default_pg, second stages",
        "commhook: collectives of a group of mine, second stages",
    }
    for groups, known in launched(recorded):
        assert {each for each in known if each.startswith("commhook")} == own
        described = {description for name, description in groups if "commhook" in name}
        # The model's second stages send messages, of which the recorder takes no note.
        assert described == own - {"commhook: gradients over default_pg, second stages"}
