"""Memory that the ranks of one machine share, for compressed sums over NVLink.

With PyTorch's symmetric memory (``torch.distributed._symmetric_memory``) the kernels of one GPU
read the memory of others. A compressed sum then needs no collective: each rank encodes its values
in shared memory, sums its segment of all messages and encodes the sum in one kernel, and reads the
encoded sums of all ranks. Two barriers order these steps (``symmetric_barrier``). Ranks test new
memory first; if its bits differ from the collectives', they use collectives.
"""

from __future__ import annotations

import logging
import os
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

from torch_commhook import _C
from torch_commhook.codecs.base import MOST_RANKS, Codec, Segment
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives.agreement import gather_in_step
from torch_commhook.collectives.compressed_call import MessageBuffers
from torch_commhook.collectives.futures import is_capturing
from torch_commhook.collectives.gloo_groups import group_name, group_timeout, is_known, state_of
from torch_commhook.collectives.symmetric_memory import (
    TRIAL_TIMEOUT,
    MissedRankError,
    SymmetricBuffers,
    trial_segments,
    try_out,
)

#: "0" disables symmetric memory for compressed sums.
VARIABLE = "COMMHOOK_SYMMETRIC_MEMORY"
#: The types of devices whose memory ranks can share.
SHARING_DEVICES = ("cuda",)

_log = logging.getLogger(__name__)


def symmetric_buffers(
    buffers: MessageBuffers | None,
    codec: Codec,
    segments: Sequence[Segment],
    device: torch.device,
    group: dist.ProcessGroup,
) -> SymmetricBuffers | None:
    """The shared memory for a compressed sum; None if the group, codec or device has none.

    All ranks must call it alike. The first call for a group compares the ranks' abilities. The
    first call for ``buffers`` makes their memory, which the ranks test. They also test a group's
    first use of a codec, in separate memory. All of these wait for the other ranks and the device;
    in a step of an attached hook they end if the step fails on a rank. Later calls do not wait.
    Memory is made again if a message outgrows it, and freed with ``buffers``. During the capture of
    a CUDA graph no memory is made or tested.

    Args:
        buffers: the caller's buffers, which stay from call to call; None for none.
        segments: the segments of a message, one for each rank.

    Raises:
        RuntimeError: an earlier sum in these buffers has failed.
    """
    if buffers is None or not _may_share(codec, device, group):
        return None
    assert isinstance(codec, BlockCodec)
    sizes = [segment.nbytes for segment in segments]
    state = state_of(group)
    known: SymmetricBuffers | None = state.shared_memory.get(buffers)
    has_room = False
    if known is not None:
        known.check()
        has_room = known.fits(sizes)
    if state.obstacle:
        return None
    if has_room and repr(codec) in state.proven_codecs:
        return known
    if is_capturing(device):
        return None
    if state.obstacle is None:
        state.obstacle = _obstacle(group, device)
        if state.obstacle:
            return None
    if has_room:  # a CUDA graph may use it, and a failed test must not free it
        return None if _make(sizes, None, codec, device, group) is None else known
    made = _make(sizes, None if known is None else known.capacity, codec, device, group)
    if made is not None:
        state.shared_memory[buffers] = made
    return made


def obstacle_of(group: dist.ProcessGroup) -> str | None:
    """Why compressed sums of a group share no memory; "" if they do, None if unknown so far."""
    return state_of(group).obstacle


def give_up(group: dist.ProcessGroup) -> None:
    """End all sums over shared memory of a group, because a step has failed on this rank.

    Ranks that wait for this one now or later fail. Otherwise they would pair its next sum with the
    one that they wait for.
    """
    for memory in list(state_of(group).shared_memory.values()):
        with suppress(RuntimeError):  # from a device that cannot continue
            memory.give_up()


def _may_share(codec: Codec, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Conditions that are the same on all ranks, and need no communication."""
    return (
        device.type == "cuda"
        and isinstance(codec, BlockCodec)
        and 2 <= group.size() <= MOST_RANKS
        and is_known(group)
        and _C.has_compiled_backend(group, device)  # others must see their collectives
        and not _sends_through_host(group, device)
    )


def _sends_through_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a device's tensors travel over Gloo."""
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL it is within another one.
    wrapped = getattr(backend, "wrapped_pg", backend)
    return dist.is_gloo_available() and isinstance(wrapped, dist.ProcessGroupGloo)


class _Place(NamedTuple):
    """A rank's location, as it sends it to the others."""

    obstacle: str
    machine: str
    gpu: str
    torch: str


def _obstacle(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks do not share memory, the same on all of them. All ranks must call it."""
    told = gather_in_step(group, tuple(_own_place(device)))
    if told is None:
        return "torch.distributed does not know the group"
    places = [_Place(*each) for each in told]
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
    """Why this rank's GPU cannot access one of the others; "" if it can, or if this is unknown."""
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
    """The number of NVLinks between each two visible GPUs; None if this torch cannot tell."""
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
    """Make new memory on all ranks, and test it with a codec. All ranks must call it.

    Returns None if a rank cannot have it or has got wrong bits; no rank then keeps its memory.
    """
    ranks, rank = group.size(), dist.get_rank(group)
    tried = [segment.nbytes for segment in trial_segments(codec, ranks)]
    least = (0, 0) if old is None else old
    message_bytes = max(sum(sizes), sum(tried), least[0])
    sum_bytes = max(*sizes, *tried, least[1])
    nbytes = SymmetricBuffers.bytes_for(ranks, message_bytes, sum_bytes)
    with torch.inference_mode(False), torch.no_grad():
        share: Any = _together(group, lambda: _allocate(nbytes, device, group))
        if share is None:
            return None
        shared: Any = _together(group, share)
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
        state_of(group).proven_codecs.add(repr(codec))
    elif rank == 0:
        # No Python warning: where warnings are errors, this rank alone would raise.
        _log.warning(
            "torch_commhook: compressed sums of process group %r use its collectives, not memory "
            "that its GPUs share: a test of that memory failed on %s",
            group_name(group),
            state_of(group).obstacle,
        )
    return memory


def _together(group: dist.ProcessGroup, step: Callable[[], Any]) -> Any:
    """A step's result; if it fails on a rank, None, and the group's obstacle is set."""
    result, text, has_missed = None, "", False
    try:
        result = step()
    except Exception as error:  # whatever the driver raises
        has_missed = isinstance(error, MissedRankError)
        text = str(error) if has_missed else f"{type(error).__name__}: {error}"
    told: list[tuple[str, bool]] | None = gather_in_step(group, (text, has_missed))
    if told is None:
        told = [("torch.distributed does not know the group", False)]
    failed = [f"rank {rank}: {each}" for rank, (each, _) in enumerate(told) if each]
    # Other ranks report a failed rank as missing, without its reason.
    first = [
        f"rank {rank}: {each}" for rank, (each, missed) in enumerate(told) if each and not missed
    ]
    if failed:
        state_of(group).obstacle = first[0] if first else "; ".join(failed)
        return None
    return result


def _allocate(
    nbytes: int, device: torch.device, group: dist.ProcessGroup
) -> Callable[[], tuple[list[Tensor], object]]:
    """Allocate a rank's memory; returns the function that lets others see it, and holds it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)  # before others can see it

    def share() -> tuple[list[Tensor], object]:
        handle = symmetric_memory.rendezvous(memory, group)
        memories = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
        return memories, (memory, handle)

    return share
