"""Memory that the ranks of one machine share, for compressed sums over NVLink.

PyTorch's symmetric memory (``torch.distributed._symmetric_memory``) lets the kernels of one GPU
read the memory of others. A compressed sum then needs no collective: each rank encodes its values
where the others see them, adds up its shard of all messages and encodes the sum in one kernel, and
reads the encoded sums of all ranks. Two barriers order these steps (:func:`symmetric_barrier`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
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
from torch_commhook.collectives.agreement import gather
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.collectives.symmetric_ops import (
    control_words,
    symmetric_barrier,
    symmetric_gather,
)

#: "0" keeps compressed sums off symmetric memory.
VARIABLE = "COMMHOOK_SYMMETRIC_MEMORY"

_ALIGNMENT = 256  # of each region, in bytes: two sectors of 128


def _filled_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SymmetricBuffers:
    """One bucket's memory on every rank: controls of barriers, a message, a message of a sum.

    A rank writes to its own memory, and to its signals in the controls of the others. It writes its
    message anew only after the second barrier, when all ranks have read the last one, and its sum
    after the first, when all have read the last sum. So a call needs no third barrier.

    Args:
        memories: of each rank, in order: flat, uint8, :meth:`bytes_for` of them, zeros before any
            rank uses them, at addresses that are multiples of 16.
        rank: this one.
        message_bytes, sum_bytes: the largest message, and the largest message of a sum.
        kept: what the memories depend on.
    """

    def __init__(
        self,
        memories: Sequence[Tensor],
        rank: int,
        message_bytes: int,
        sum_bytes: int,
        kept: object = None,
    ) -> None:
        ranks = len(memories)
        words = control_words(ranks)
        self.rank = rank
        self.capacity = message_bytes, sum_bytes
        self._kept = kept
        self._memories = list(memories)
        self._message_start = _filled_up(8 * words)
        self._sum_start = self._message_start + _filled_up(message_bytes)
        self._controls = [memory[: 8 * words].view(torch.int64) for memory in memories]
        #: 0, or 1 plus the rank that this one has missed at a barrier.
        self.failed = self._controls[rank][words - 1 :]
        # What the device has said of that last: read without waiting for it.
        self._seen = self.failed
        if self.failed.is_cuda:
            self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._sizes: list[int] | None = None
        self._views: _Views

    @staticmethod
    def bytes_for(ranks: int, message_bytes: int, sum_bytes: int) -> int:
        """The bytes of one rank's memory."""
        start = _filled_up(8 * control_words(ranks)) + _filled_up(message_bytes)
        return start + _filled_up(sum_bytes)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether there is room for messages with shards of so many bytes."""
        message_bytes, sum_bytes = self.capacity
        return sum(sizes) <= message_bytes and max(sizes) <= sum_bytes

    def views(self, sizes: Sequence[int]) -> _Views:
        """The tensors of a call whose messages have shards of so many bytes, one for each rank."""
        if self._sizes != list(sizes):
            own = self._memories[self.rank]
            begin = self._message_start + sum(sizes[: self.rank])
            end = begin + sizes[self.rank]
            self._views = _Views(
                own[self._message_start :][: sum(sizes)],
                [memory[begin:end] for memory in self._memories],
                own[self._sum_start :][: sizes[self.rank]],
                [
                    memory[self._sum_start :][:size]
                    for memory, size in zip(self._memories, sizes, strict=True)
                ],
            )
            self._sizes = list(sizes)
        return self._views

    def barrier(self, timeout: timedelta) -> None:
        """:func:`symmetric_barrier` of the group's ranks."""
        symmetric_barrier(self._controls, self.rank, timeout=timeout.total_seconds())

    def gather(self, shards: Sequence[Tensor], message: Tensor) -> None:
        """:func:`symmetric_gather`, of NaNs where a barrier has failed."""
        symmetric_gather(shards, message, failed=self.failed)
        if self._seen is not self.failed:
            self._seen.copy_(self.failed, non_blocking=True)

    def check(self) -> None:
        """Refuse to go on after a failure that the device has told of.

        Raises:
            RuntimeError: an earlier barrier has failed.
        """
        missed = int(self._seen)
        if missed:
            raise RuntimeError(
                f"compressed_all_reduce: rank {missed - 1} of the group has not come to an earlier "
                "sum over symmetric memory in time, or had given up; the results of that sum "
                "are NaN. The group cannot go on: make a new one, from a checkpoint"
            )

    def give_up(self) -> None:
        """Tell the other ranks that this one comes to no barrier any more; they then fail, too.

        On CUDA in the order of the current stream.
        """
        self.failed.fill_(1 + self.rank)
        if self._seen is not self.failed:
            self._seen.fill_(1 + self.rank)
        self.barrier(timedelta(seconds=1))  # sends the signal, and does not wait


class _Views(NamedTuple):
    message: Tensor  # this rank's
    shards: list[Tensor]  # this rank's shard in the message of each rank
    sum: Tensor  # this rank's
    sums: list[Tensor]  # of each rank


# ---- groups that have it -------------------------------------------------------------------------


class _Allocation(NamedTuple):
    """A rank's memory before the others see it, and what lets them."""

    memory: Tensor
    share: Callable[[], tuple[list[Tensor], object]]


#: Why a group's ranks do not share memory; "" where they do.
_obstacles: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_memories: weakref.WeakKeyDictionary[
    MessageBuffers, tuple[weakref.ref[dist.ProcessGroup], SymmetricBuffers]
] = weakref.WeakKeyDictionary()


def symmetric_buffers(
    buffers: MessageBuffers | None,
    codec: Codec,
    shards: Sequence[Shard],
    device: torch.device,
    group: dist.ProcessGroup,
) -> SymmetricBuffers | None:
    """The shared memory for a compressed sum; None where the group, codec or device has none.

    All ranks must call it alike. The first call for a group compares what the ranks can, and the
    first call for ``buffers`` makes their memory: both wait for the other ranks. Later calls wait
    for nothing. Memory is made anew if a message outgrows it, and freed with ``buffers``.

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
    sizes = [shard.nbytes for shard in shards]
    known = _memories.get(buffers)
    if known is not None and known[0]() is group:
        known[1].check()
        if known[1].fits(sizes):
            return known[1]
    if _obstacles.get(group) or _is_capturing(device):
        return None
    if group not in _obstacles:
        _obstacles[group] = _obstacle(group, device)
        if _obstacles[group]:
            return None
    old = None if known is None else known[1].capacity
    made = _make(sizes, old, device, group)
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


def shared_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a barrier waits: as long as the group's collectives may take."""
    try:
        return group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):
        return distributed_c10d.default_pg_timeout


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
    places: list[_Place] | None = gather(group, _own_place(device))
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
    found: list[str] = gather(group, own) or []
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
    device: torch.device,
    group: dist.ProcessGroup,
) -> SymmetricBuffers | None:
    """New memory of all ranks; None where one of them cannot have it. All ranks must call it."""
    least = (0, 0) if old is None else old
    message_bytes, sum_bytes = max(sum(sizes), least[0]), max(max(sizes), least[1])
    nbytes = SymmetricBuffers.bytes_for(group.size(), message_bytes, sum_bytes)
    with torch.inference_mode(False), torch.no_grad():
        made: Any = _together(group, lambda: _allocate(nbytes, device, group))
        if made is None:
            return None
        shared: Any = _together(group, made.share)
        if shared is None:
            return None
        memories, kept = shared
        return SymmetricBuffers(memories, dist.get_rank(group), message_bytes, sum_bytes, kept)


def _together(group: dist.ProcessGroup, step: Callable[[], Any]) -> Any:
    """What a step gives; None, and the group's obstacle is known, where it fails on one rank."""
    result, text = None, ""
    try:
        result = step()
    except Exception as error:  # whatever the driver says
        text = f"{type(error).__name__}: {error}"
    told: list[str] = gather(group, text) or ["torch.distributed does not know the group"]
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(told) if each]
    if failed:
        _obstacles[group] = failed[0]
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
