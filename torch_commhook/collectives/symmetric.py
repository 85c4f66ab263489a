"""Memory that the ranks of one machine share, for compressed sums over NVLink.

PyTorch's symmetric memory (``torch.distributed._symmetric_memory``) lets the kernels of one GPU
read the memory of others. A compressed sum then needs no collective: each rank encodes its values
where the others see them, adds up its shard of all messages and encodes the sum in one kernel, and
reads the encoded sums of all ranks. Two barriers order these steps (``symmetric_barrier``). Ranks
that try new memory out and get other bits than the collectives' stay with the collectives.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._autograd import DeviceType
from torch.distributed import distributed_c10d

from torch_commhook.codecs.base import Codec, Shard
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.codecs.checks import MOST_RANKS
from torch_commhook.collectives.agreement import gather_in_step
from torch_commhook.collectives.gloo_groups import group_name, group_timeout
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.collectives.streams import is_capturing
from torch_commhook.collectives.symmetric_memory import SymmetricBuffers
from torch_commhook.collectives.symmetric_trial import (
    TRIAL_TIMEOUT,
    MissedRankError,
    trial_shards,
    try_out,
)

#: "0" keeps compressed sums off symmetric memory.
VARIABLE = "COMMHOOK_SYMMETRIC_MEMORY"

_log = logging.getLogger(__name__)


class _Allocation(NamedTuple):
    """A rank's memory before the others see it, and what lets them."""

    memory: Tensor
    share: Callable[[], tuple[list[Tensor], object]]


#: Why a group's ranks do not share memory; "" where they do.
_obstacles: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_memories: weakref.WeakKeyDictionary[
    MessageBuffers, tuple[weakref.ref[dist.ProcessGroup], SymmetricBuffers]
] = weakref.WeakKeyDictionary()
#: The codecs, as they print, with which a group's ranks have tried shared memory out.
_proven: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def symmetric_buffers(
    buffers: MessageBuffers | None,
    codec: Codec,
    shards: Sequence[Shard],
    device: torch.device,
    group: dist.ProcessGroup,
) -> SymmetricBuffers | None:
    """The shared memory for a compressed sum; None where the group, codec or device has none.

    All ranks must call it alike. The first call for a group compares what the ranks can, and the
    first call for ``buffers`` makes their memory, which the ranks try out. So do they, in memory of
    its own, when a group has a codec for the first time. All of these wait for the other ranks and
    the device; in a step of an attached hook no longer than until it fails on a rank. Later calls
    wait for nothing. Memory is made anew if a message outgrows it, and freed with ``buffers``.
    While a CUDA graph is captured, none is made or tried out.

    Args:
        buffers: the caller's, which stay from call to call; None for none.
        codec: of the messages.
        shards: of a message, one for each rank.
        device: of the tensors.
        group: the process group.

    Raises:
        RuntimeError: an earlier sum in these buffers has failed.
    """
    if buffers is None or not _may_share(codec, device, group):
        return None
    assert isinstance(codec, BlockCodec)
    sizes = [shard.nbytes for shard in shards]
    of_group, known = _memories.get(buffers, (None, None))
    has_room = False
    if known is not None and of_group is not None and of_group() is group:
        known.check()
        has_room = known.fits(sizes)
    if _obstacles.get(group):
        return None
    if has_room and repr(codec) in _proven.get(group, ()):
        return known
    if is_capturing(device):
        return None
    if group not in _obstacles:
        _obstacles[group] = _obstacle(group, device)
        if _obstacles[group]:
            return None
    if has_room:  # a CUDA graph may use it, which a trial that fails must not end
        return None if _make(sizes, None, codec, device, group) is None else known
    made = _make(sizes, None if known is None else known.capacity, codec, device, group)
    if made is not None:
        _memories[buffers] = weakref.ref(group), made
    return made


def obstacle_of(group: dist.ProcessGroup) -> str | None:
    """Why compressed sums of a group share no memory; "" where they do, None if not known yet."""
    return _obstacles.get(group)


def give_up(group: dist.ProcessGroup) -> None:
    """End all sums over memory that this rank shares in a group, since a step has failed here.

    Ranks that wait for this one, or meet it later, fail. Without this, they would pair its next
    sum with the one that they wait for.
    """
    for of_group, memory in list(_memories.values()):
        if of_group() is group:
            with suppress(RuntimeError):  # of a device that can do no more
                memory.give_up()


def _may_share(codec: Codec, device: torch.device, group: dist.ProcessGroup) -> bool:
    """What is the same on all ranks, and needs none of them to be asked."""
    return (
        device.type == "cuda"
        and isinstance(codec, BlockCodec)
        and 2 <= group.size() <= MOST_RANKS
        and type(group) is dist.ProcessGroup  # others must see their collectives
        and group in distributed_c10d._world.pg_map
        and _backend_name(group, device) == "nccl"
    )


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # none for it
        return ""


class _Place(NamedTuple):
    """Where a rank is, as it tells the others."""

    obstacle: str
    machine: str
    gpu: str
    torch: str


def _obstacle(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks do not share memory, the same on all of them. All ranks must call it."""
    places: list[_Place] | None = gather_in_step(group, _own_place(device))
    if places is None:
        return "torch.distributed does not know the group"
    for rank, place in enumerate(places):
        if place.obstacle:
            return f"rank {rank}: {place.obstacle}"
    if len({place.machine for place in places}) > 1:
        return "the ranks are on several machines"
    if len({place.gpu for place in places}) < len(places):
        return "several ranks have one GPU"
    if len({place.torch for place in places}) > 1:
        return "the ranks have different releases of torch"
    own = _missing_link(device, [place.gpu for place in places])
    found: list[str] = gather_in_step(group, own) or []
    return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text), "")


def _own_place(device: torch.device) -> _Place:
    machine = Path("/proc/sys/kernel/random/boot_id")
    booted = machine.read_text().strip() if machine.exists() else ""
    place = _Place("", f"{os.uname().nodename} {booted}", "", torch.__version__)
    if os.environ.get(VARIABLE, "1") == "0":
        return place._replace(obstacle=f"{VARIABLE} is 0")
    if not torch.ops.commhook.has_cuda_kernels():
        return place._replace(obstacle="torch_commhook was built without CUDA kernels")
    if find_spec("torch.distributed._symmetric_memory") is None:
        return place._replace(obstacle="this torch has no symmetric memory")
    return place._replace(gpu=str(torch.cuda.get_device_properties(device).uuid))


def _missing_link(device: torch.device, gpus: Sequence[str]) -> str:
    """Why this rank's GPU does not reach one of the others; "" where it does, or cannot tell."""
    visible = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    own = torch.cuda.current_device() if device.index is None else device.index
    links = _nvlinks()
    for gpu in gpus:
        other = visible.get(gpu, own)
        if other == own:
            continue
        if not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} cannot read the memory of GPU {other}"
        if links is not None and not links[own][other]:
            return f"there is no NVLink between GPU {own} and GPU {other}"
    return ""


def _nvlinks() -> list[list[int]] | None:
    """NVLinks between each two visible GPUs; None where this torch cannot tell."""
    detect = getattr(_distributed_c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return None
    try:
        links: list[list[int]] = detect(DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:
        return None
    return links


def _make(
    sizes: Sequence[int],
    old: tuple[int, int] | None,
    codec: BlockCodec,
    device: torch.device,
    group: dist.ProcessGroup,
) -> SymmetricBuffers | None:
    """New memory of all ranks, tried out with a codec. All ranks must call it.

    None where one of them cannot have it, or has got wrong bits; no rank keeps its memory then.
    """
    ranks, rank = group.size(), dist.get_rank(group)
    tried = [shard.nbytes for shard in trial_shards(codec, ranks)]
    least = (0, 0) if old is None else old
    message_bytes = max(sum(sizes), sum(tried), least[0])
    sum_bytes = max(*sizes, *tried, least[1])
    nbytes = SymmetricBuffers.bytes_for(ranks, message_bytes, sum_bytes)
    with torch.inference_mode(False), torch.no_grad():
        made: Any = _together(group, lambda: _allocate(nbytes, device, group))
        if made is None:
            return None
        shared: Any = _together(group, made.share)
        if shared is None:
            return None

        def tried_out() -> SymmetricBuffers:
            memories, kept = shared
            memory = SymmetricBuffers(memories, rank, message_bytes, sum_bytes, kept)
            timeout = min(TRIAL_TIMEOUT, group_timeout(group, device))
            try_out(memory, codec, ranks, device, timeout=timeout)
            return memory

        memory: SymmetricBuffers | None = _together(group, tried_out)
    if memory is not None:
        _proven.setdefault(group, set()).add(repr(codec))
    elif rank == 0:
        # Not a warning of Python's: where that is an error, this rank alone would raise.
        _log.warning(
            "torch_commhook: compressed sums of process group %r use its collectives, not memory "
            "that its GPUs share: a trial of that failed on %s",
            group_name(group),
            _obstacles[group],
        )
    return memory


def _together(group: dist.ProcessGroup, step: Callable[[], Any]) -> Any:
    """What a step gives; None, and the group's obstacle is known, where it fails on one rank."""
    result, text, has_missed = None, "", False
    try:
        result = step()
    except Exception as error:  # whatever the driver says
        has_missed = isinstance(error, MissedRankError)
        text = str(error) if has_missed else f"{type(error).__name__}: {error}"
    told: list[tuple[str, bool]] | None = gather_in_step(group, (text, has_missed))
    if told is None:
        told = [("torch.distributed does not know the group", False)]
    failed = [f"rank {rank}: {each}" for rank, (each, _) in enumerate(told) if each]
    # A rank that has failed is missed by others, which say nothing of the reason.
    first = [
        f"rank {rank}: {each}" for rank, (each, missed) in enumerate(told) if each and not missed
    ]
    if failed:
        _obstacles[group] = first[0] if first else "; ".join(failed)
        return None
    return result


def _allocate(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> _Allocation:
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)  # before others can see it

    def share() -> tuple[list[Tensor], object]:
        handle = symmetric_memory.rendezvous(memory, group)
        memories = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
        return memories, (memory, handle)

    return _Allocation(memory, share)
