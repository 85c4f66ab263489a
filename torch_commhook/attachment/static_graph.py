"""A static graph of DDP whose first backward has not come to its end.

DDP notes once, in the first backward, that all gradients are to be averaged at its end. Where an
exception ends that backward, or it uses no parameter, DDP takes each later one for the first, too:
it averages nothing from there on, and says nothing.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C

#: What autograd says outside of backward.
NO_BACKWARD = -1


def is_lost(model: DistributedDataParallel) -> bool:
    """Whether DDP would average nothing from here on. Not known, and False, inside of backward."""
    return (
        model.static_graph
        and getattr(model, "_static_graph_delay_allreduce_enqueued", False)
        and torch._C._current_graph_task_id() == NO_BACKWARD
        and _C.first_backward_is_open(model.reducer)
    )


#: What to say then.
LOST = (
    "torch_commhook: the first backward() of this DistributedDataParallel with static_graph=True "
    "was left by an exception, or used no parameter. It would average no gradients from here on, "
    "and say nothing. Make a new one on all ranks, over a new process group if only some of them "
    "failed"
)
