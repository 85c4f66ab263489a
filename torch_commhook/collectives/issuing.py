"""Issues collectives in eager code: unchecked, uncounted, on any thread.

Over Gloo, collectives of tensors on the CPU have places (``exchange.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from torch_commhook import _C
from torch_commhook.collectives.exchange import (
    Place,
    exchanges,
    place_in,
    sums_in_place,
)
from torch_commhook.collectives.group_place import gathers_flat, is_alone
from torch_commhook.collectives.works import issued, issued_on_device, when_good

# Its name changes with torch; the old one warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ALL_GATHER, _ALL_TO_ALL = (
    new if hasattr(dist.ProcessGroup, new) else old
    for new, old in (
        ("all_gather_single", "_allgather_base"),
        ("all_to_all_single", "alltoall_base"),
    )
)


def is_exchanged(tensor: Tensor, group: dist.ProcessGroup, timeout: timedelta | None) -> bool:
    """Whether collectives exchange a tensor's values; the same on all ranks."""
    # Exchanges have the group's timeout.
    return timeout is None and tensor.device.type == "cpu" and exchanges(group)


def issue_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    *,
    place: Place | None = None,
) -> torch.futures.Future[Tensor]:
    """Sum a tensor over all ranks, in place.

    Args:
        tensor: contiguous.
        group: the process group.
        timeout: the operation's timeout; None for the group's.
        place: its place; None for the next one, if it needs one.

    Returns:
        A Future of the same tensor.
    """
    if is_alone(group):
        return _C.as_future(tensor, "all_reduce")
    if place is not None or (timeout is None and sums_in_place(tensor, group)):
        return (place or place_in(group)).reduce(tensor)
    # Sums by default.
    options = _with_timeout(dist.AllreduceOptions(), timeout)
    return issued(lambda: group.allreduce([tensor], options), group, "allreduce", tensor)


def issue_all_gather(
    tensor: Tensor,
    out: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    *,
    place: Place | None = None,
) -> torch.futures.Future[Tensor]:
    """Gather the tensors of all ranks on every rank.

    Args:
        tensor: contiguous, with the same shape on all ranks.
        out: contiguous, of shape ``(ranks, *tensor.shape)``. Written.
        group: the process group.
        timeout: the operation's timeout; None for the group's.
        place: as for :func:`issue_all_reduce`.

    Returns:
        A Future of ``out``.
    """
    ranks = group.size()
    if ranks == 1:
        return _C.as_future(out.copy_(tensor.unsqueeze(0)), "all_gather")
    if is_exchanged(tensor, group, timeout):
        outputs = [as_bytes(each) for each in out.unbind()]
        place = place or place_in(group)
        place.form = str(tensor.dtype)
        return place.gather(as_bytes(tensor), outputs, out)
    flat = tensor.reshape(-1)
    options = _with_timeout(AllgatherOptions(), timeout)

    def issue() -> Any:
        if not gathers_flat(group, (_ALL_GATHER, "_allgather_base")):
            return group.allgather([list(out.flatten(1).unbind())], [flat], options)
        if timeout is None:
            return _all_gather(out.view(-1), flat, group=group, async_op=True)
        return getattr(group, _ALL_GATHER)(out.view(-1), flat, options)

    # The value of its Future differs between backends: one tensor, or one for each rank.
    done = issued_on_device(issue, group, "all_gather", out)
    return done.then(lambda done: when_good(done, out))


def issue_gather_of_sizes(
    message: Tensor,
    sizes: Sequence[int],
    out: Tensor,
    place: Place,
) -> torch.futures.Future[Tensor]:
    """Gather messages of different lengths on every rank.

    Args:
        message: flat bytes; the first ones are sent.
        sizes: the size of each rank's message in bytes, the same on all ranks.
        out: flat, ``sum(sizes)`` bytes. Written.
        place: its place.

    Returns:
        A Future of ``out``.
    """
    outputs = out.split(list(sizes))
    return place.gather(message[: sizes[place.rank]], outputs, out)


def issue_all_to_all(
    tensor: Tensor,
    sends: Sequence[int],
    gets: Sequence[int],
    out: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    *,
    place: Place | None = None,
    form: str = "",
) -> torch.futures.Future[Tensor]:
    """Send a piece of a tensor to each rank, and receive one from each.

    Args:
        tensor: contiguous; split along its first dimension.
        sends: the number of rows for each rank.
        gets: the number of rows from each rank.
        out: contiguous, ``sum(gets)`` rows. Written.
        group: the process group.
        timeout: the operation's timeout; None for the group's.
        place: as for :func:`issue_all_reduce`.
        form: what the messages are, if they have a place; by default of the tensor's dtype.

    Returns:
        A Future of ``out``.
    """
    if group.size() == 1:
        return _C.as_future(out.copy_(tensor), "all_to_all")
    if is_exchanged(tensor, group, timeout):
        inputs = [as_bytes(piece) for piece in tensor.split(list(sends))]
        outputs = [as_bytes(piece) for piece in out.split(list(gets))]
        place = place or place_in(group)
        place.form = form or str(tensor.dtype)
        return place.exchange(0, inputs, outputs, out)

    def issue() -> Any:
        tensors = as_real(out), as_real(tensor)
        if timeout is None:
            return dist.all_to_all_single(
                *tensors, list(gets), list(sends), group=group, async_op=True
            )
        options = _with_timeout(AllToAllOptions(), timeout)
        return getattr(group, _ALL_TO_ALL)(*tensors, list(gets), list(sends), options)

    return issued(issue, group, "all_to_all_single", out)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat bytes."""
    return as_real(tensor.detach()).reshape(-1).view(torch.uint8)


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs: not all backends support them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _with_timeout(options: Any, timeout: timedelta | None) -> Any:
    if timeout is not None:
        options.timeout = timeout
    return options
