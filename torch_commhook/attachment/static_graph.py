"""Detects a static graph of DDP whose first backward has not ended.

In the first backward DDP notes once that it must average all gradients at the end. If an exception
ends that backward, or it uses no parameter, DDP takes each later backward for the first one too.
It then averages no gradients, and reports no error.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C

#: Autograd's error outside of backward.
NO_BACKWARD = -1


def is_lost(model: DistributedDataParallel) -> bool:
    """Whether DDP would average nothing from now on. Unknown, and False, inside a backward."""
    return (
        model.static_graph
        and getattr(model, "_static_graph_delay_allreduce_enqueued", False)
        and torch._C._current_graph_task_id() == NO_BACKWARD
        and _C.first_backward_is_open(model.reducer)
    )


#: The error in this case.
LOST = (
    "torch_commhook: an exception ended the first backward() of this DistributedDataParallel with "
    "static_graph=True, or that backward used no parameter. DDP would silently average no "
    "gradients "
    "from now on. Make a new one on all ranks, over a new process group if only some of them "
    "failed"
)
