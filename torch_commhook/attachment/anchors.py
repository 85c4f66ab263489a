"""Gives all ranks the same anchors after users have written to parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook import collectives
from torch_commhook.hooks.local_sgd import local_sgd
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.step.step_group import StepGroup

#: The bytes of a digest.
_BYTES = 16


def agree_on_anchors(
    hook: local_sgd,
    memories: Sequence[BucketMemory],
    before: Mapping[int, Sequence[Tensor]],
    group: StepGroup,
    *,
    waits: bool,
) -> None:
    """Give all ranks the same anchor of each parameter. All ranks must call this.

    If a user has written the same values on all ranks, this is a load: the anchor has these values.
    If the values differ, the write is training: the anchor is that from before the write.

    Args:
        hook: the hook that keeps the ranks apart.
        memories: the hook's memory of each bucket.
        before: by the ids of the parameters that a user of this rank has written, what
            :meth:`local_sgd.anchor_and_error` had before. Empty for a parameter whose anchor other
            ranks may not have.
        group: the group of the ranks.
        waits: whether anchors may differ. Otherwise this rank only sends its flag: ranks that
            disagree on this still send the same messages.
    """
    parameters = [parameter for memory in memories for parameter in memory.parameters]
    device = parameters[0].device
    communicates = group.group_for(device)
    has_written = torch.tensor([float(bool(before))], dtype=torch.float32, device=device)
    any_has = collectives.all_reduce(has_written, group=communicates)
    if not waits or not any_has.wait().item():
        return
    rows = [
        [float(bool(before.get(id(each)))) for each in parameters],
        [float(id(each) in before) for each in parameters],
    ]
    sums = collectives.all_reduce(
        torch.tensor(rows, dtype=torch.float32, device=device), group=communicates
    ).wait()
    is_written, is_open = (sums != 0).tolist()
    numbers = [number for number, flag in enumerate(is_open) if flag]
    places: list[list[Any]] = []  # the value at the round's start, the anchor and its error
    for memory in memories:
        kept = hook.anchor_and_error(memory)
        for parameter, start in zip(memory.parameters, hook.starts(memory), strict=True):
            places.append([start, *kept[id(parameter)]])

    def differing(numbers: Sequence[int], value: Callable[[int], Tensor]) -> list[int]:
        if not numbers:
            return []
        own = b"".join(map(_digest, map(value, numbers)))
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).view(len(numbers), _BYTES)
        every = collectives.all_gather(sent.to(device), group=communicates).wait()
        is_other = (every != every[0]).any(dim=2).any(dim=0)
        return [number for number, other in zip(numbers, is_other.tolist(), strict=True) if other]

    written = [number for number in numbers if is_written[number]]
    trained = set(differing(written, lambda number: places[number][0]))
    for number in written:
        start, anchor, *errors = places[number]
        if number not in trained:
            anchor.copy_(start)
            for error in errors:
                error.zero_()
        elif old := before.get(id(parameters[number])):
            torch._foreach_copy_([anchor, *errors], list(old))
    for number in differing(numbers, lambda number: places[number][1]):
        # A rank that continues from a state, or a new rank, does not have the old anchor.
        anchor = places[number][1]
        first = anchor.clone(memory_format=torch.contiguous_format)
        sender = group.group_for(anchor.device)
        anchor.copy_(collectives.broadcast(first, group=sender).wait())


def _digest(tensor: Tensor) -> bytes:
    """A digest of a tensor's elements in order, whatever its strides and device."""
    data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=_BYTES).digest()
