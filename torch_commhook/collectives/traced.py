"""Collectives in code that a compiler traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _create_work_from_future,
    _register_work,
)
from torch.distributed import distributed_c10d

from torch_commhook.collectives.futures import TracedFuture, traced
from torch_commhook.collectives.gloo_groups import exchanges, is_alone
from torch_commhook.collectives.issuing import (
    SECOND,
    Place,
    issue_all_gather,
    issue_all_reduce,
    issue_all_to_all,
    place_in,
)

# ---- collectives on the CPU as operators, which compiled code calls by the name of a group -------
#
# They do the same as the collectives in eager code. So ranks with compiled code and ranks without
# can take the same step. An operator copies the data that it sends, because a compiler reuses
# memory as soon as the last operator that reads it has returned. Its result is complete after
# ``_c10d_functional.wait_tensor``, as with PyTorch's own functional collectives.


_functional = torch.ops._c10d_functional


def _group(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _group_and_place(
    name: str, is_second: bool, device: torch.device
) -> tuple[dist.ProcessGroup, Place | None]:
    """A group, and for a second stage the next place in their order, if any."""
    group = _group(name)
    return group, place_in(group, SECOND) if is_second and exchanges(group, device) else None


def _started(future: torch.futures.Future[Tensor], result: Tensor) -> Tensor:
    _register_work(result, _create_work_from_future(future))
    return result


@torch.library.custom_op("commhook::start_all_reduce", mutates_args=())
def start_all_reduce(tensor: Tensor, group_name: str, is_second: bool) -> Tensor:
    """Start the sum of a tensor over all ranks.

    Args:
        tensor: dense, of a dtype that the group's backend supports.
        group_name: the process group's name.
        is_second: whether it has a place among second stages.

    Returns:
        A tensor of the same shape and dtype, for ``wait_tensor``.
    """
    result = tensor.clone(memory_format=torch.contiguous_format)
    group, place = _group_and_place(group_name, is_second, tensor.device)
    return _started(issue_all_reduce(result, group, place=place), result)


@torch.library.custom_op("commhook::start_all_gather", mutates_args=())
def start_all_gather(
    tensor: Tensor, sizes: Sequence[int] | None, group_name: str, is_second: bool, form: str
) -> Tensor:
    """Start to gather the tensors of all ranks on every rank.

    Args:
        tensor: dense, with the same shape on all ranks.
        sizes: None, or the number of bytes of each rank's message, for messages of their own
            lengths; ``tensor`` is then flat bytes.
        group_name, is_second: as for :func:`start_all_reduce`.
        form: what messages of their own lengths are; see :class:`Place`.

    Returns:
        A tensor for ``wait_tensor``: of shape ``(ranks, *tensor.shape)``, or flat with
        ``sum(sizes)`` bytes.
    """
    group, place = _group_and_place(group_name, is_second, tensor.device)
    sent = tensor.clone(memory_format=torch.contiguous_format)
    if sizes is None:
        result = tensor.new_empty((group.size(), *tensor.shape))
        return _started(issue_all_gather(sent, result, group, place=place), result)
    result = tensor.new_empty(sum(sizes))
    place = place or place_in(group)
    place.form = form
    own = sent[: sizes[place.rank]]
    return _started(place.gather(own, result.split(list(sizes)), result), result)


@torch.library.custom_op("commhook::start_all_to_all", mutates_args=())
def start_all_to_all(
    tensor: Tensor, sends: Sequence[int], gets: Sequence[int], group_name: str, form: str
) -> Tensor:
    """Start to send a piece of a tensor to each rank, and to receive one from each.

    Args:
        tensor: split along its first dimension.
        sends: the number of rows for each rank.
        gets: the number of rows from each rank.
        group_name: the process group's name.
        form: what the messages are; see :class:`Place`. Empty: the dtype.

    Returns:
        A tensor of ``sum(gets)`` rows, for ``wait_tensor``.
    """
    group = _group(group_name)
    result = tensor.new_empty((sum(gets), *tensor.shape[1:]))
    sent = tensor.clone(memory_format=torch.contiguous_format)
    issued = issue_all_to_all(sent, list(sends), list(gets), result, group, form=form)
    return _started(issued, result)


start_all_reduce.register_fake(
    lambda tensor, *_: torch.empty_like(tensor, memory_format=torch.contiguous_format)
)
start_all_to_all.register_fake(
    lambda tensor, sends, gets, *_: tensor.new_empty((sum(gets), *tensor.shape[1:]))
)


@start_all_gather.register_fake
def _start_all_gather_fake(
    tensor: Tensor, sizes: Sequence[int] | None, group_name: str, is_second: bool, form: str
) -> Tensor:
    if sizes is None:
        return tensor.new_empty((_group(group_name).size(), *tensor.shape))
    return tensor.new_empty(sum(sizes))


# ---- traced functions ----------------------------------------------------------------------------


def traced_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, is_second: bool = False
) -> TracedFuture:
    """Trace the sum of a tensor over all ranks.

    By the group's name: a compiler cannot cache a graph that contains the group itself.
    """
    if is_alone(group):
        return TracedFuture(lambda: tensor)
    if _is_started(tensor, group):
        return traced(start_all_reduce(tensor, group.group_name, is_second))
    return traced(_functional.all_reduce(tensor, "sum", group.group_name))


def traced_all_gather(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    sizes: Sequence[int] | None = None,
    is_second: bool = False,
    form: str = "",
) -> TracedFuture:
    """Trace a gather of the tensors of all ranks: :func:`start_all_gather`."""
    if _is_started(tensor, group):
        return traced(start_all_gather(tensor, sizes, group.group_name, is_second, form))
    ranks = group.size()
    shape = (ranks, *tensor.shape)
    gathered = _functional.all_gather_into_tensor(tensor.reshape(-1), ranks, group.group_name)
    return traced(gathered).then(lambda done: done.value().view(shape))


def traced_all_to_all(
    tensor: Tensor,
    sends: Sequence[int],
    gets: Sequence[int],
    group: dist.ProcessGroup,
    form: str = "",
) -> TracedFuture:
    """Trace an exchange of pieces of a tensor: :func:`start_all_to_all`."""
    if _is_started(tensor, group):
        return traced(start_all_to_all(tensor, sends, gets, group.group_name, form))
    return traced_real(
        tensor,
        lambda real: _functional.all_to_all_single(real, gets, sends, group.group_name),
    )


def traced_real(tensor: Tensor, collective: Callable[[Tensor], Tensor]) -> TracedFuture:
    """Trace one of PyTorch's collectives that not all backends support for complex numbers."""
    if not tensor.is_complex():
        return traced(collective(tensor))
    done = traced(collective(torch.view_as_real(tensor)))
    return done.then(lambda future: torch.view_as_complex(future.value()))


def _is_started(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the operators above are used: on the CPU, and for what passes through its memory."""
    is_there = tensor.device.type == "cpu" or exchanges(group, tensor.device)
    return is_there and tensor.layout == torch.strided
