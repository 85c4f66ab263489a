"""Exchanges over Gloo that use both directions of a link at once.

Gloo says that it is ready for a message on the connection on which it sends its own, behind that.
So the two directions of an all-to-all of few large messages take turns, and a link carries half of
what it could. Here messages to higher ranks have connections of their own, and their receivers ask
for them at once. Among many ranks other connections fill the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.gloo_groups import exchanges_of, is_gloo
from torch_commhook.spans import sent

_LEAST_BYTES = 128 * 1024
_MOST_RANKS = 4


def pays(group: dist.ProcessGroup, longest: int) -> bool:
    """Whether :func:`exchange` is faster for messages of up to so many bytes.

    The same on all ranks if they all ask for the same.
    """
    return suits(group.size(), longest) and (is_gloo(group) or _has_own(group))


def suits(ranks: int, longest: float) -> bool:
    """Whether :func:`exchange` is faster among so many ranks, over Gloo."""
    return longest > _LEAST_BYTES and 1 < ranks <= _MOST_RANKS


def _has_own(group: dist.ProcessGroup) -> bool:
    """Whether a group around one of Gloo's has exchanges of its own."""
    return getattr(group, "_commhook_exchanges", False)


def exchange(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], result: Tensor, group: dist.ProcessGroup
) -> torch.futures.Future[Tensor]:
    """Send a message to each rank, and get one from each.

    Args:
        inputs: for each rank what goes there, flat bytes.
        outputs: for each rank where comes what comes from there, flat bytes.
        result: what the Future is to hold.
        group: the process group. All ranks issue the same exchanges on it, in the same order.
    """
    if _has_own(group):
        own: Any = group
        future: torch.futures.Future[Tensor] = own._commhook_exchange(inputs, outputs, result)
        return future
    rank = group.rank()
    outputs[rank].copy_(inputs[rank])
    return sent(lambda: exchanges_of(group).start(list(inputs), list(outputs), result))
