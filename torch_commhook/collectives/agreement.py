"""Compares what ranks attach, to report differences before collectives fail because of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.layout import gradient_dtype
from torch_commhook.collectives.gloo_groups import group_ranks, is_known
from torch_commhook.collectives.packed import gather_values
from torch_commhook.thread_values import ThreadValue, setting

_of_step: ThreadValue[dist.ProcessGroup] = ThreadValue()

#: Whether all ranks have the same bytes. All of them call it at the same point.
AllAlike = Callable[[bytes], bool]


def agree(
    group: dist.ProcessGroup,
    what: str,
    error: Exception | None,
    settings: dict[str, object],
    all_alike: AllAlike | None = None,
) -> None:
    """Raise on all ranks if one fails or settings differ. All ranks of the group must call this.

    Args:
        group: the group of the ranks. Does nothing for one that ``torch.distributed`` does not
            know: it may support little.
        what: the subject of errors.
        error: this rank's error, or None.
        settings: names and values that must be the same. Any if this rank has an error.
        all_alike: called first, with :func:`digest_of` both. None to send everything at once.

    Raises:
        Exception: ``error``.
        RuntimeError: another rank failed, or settings differ. The message names ranks and values.
    """
    if can_agree(group):
        if all_alike is None or not all_alike(digest_of(error, settings)):
            every: list[Any] = gather_values((_text(error), settings), group) or []
            if error is None:
                _check_same(what, dist.get_process_group_ranks(group), every)
    if error is not None:
        raise error


def can_agree(group: dist.ProcessGroup) -> bool:
    """Whether :func:`agree` asks other ranks."""
    return group.size() > 1 and is_known(group)


def _check_same(
    what: str, ranks: Sequence[int], every: Sequence[tuple[str | None, dict[str, object]]]
) -> None:
    """Refuse errors of other ranks, and settings that differ."""
    for rank, (failed, _) in zip(ranks, every, strict=True):
        if failed is not None:
            raise RuntimeError(f"{what}: it failed on rank {rank}: {failed}")
    first = every[0][1]
    for rank, (_, others) in zip(ranks, every, strict=True):
        for name, value in first.items():
            if others.get(name) != value:
                own, other = _first_difference(value, others.get(name))
                raise RuntimeError(
                    f"{what}: {name} must be the same on all ranks: rank {ranks[0]} has {own}, "
                    f"rank {rank} has {other}"
                )


def agree_across(
    groups: Sequence[dist.ProcessGroup],
    what: str,
    error: Exception | None,
    settings: dict[str, object],
    some: dict[str, object] | None = None,
) -> None:
    """Raise on all ranks of a mesh if one fails or settings differ; as :func:`agree`.

    Args:
        groups: this rank's groups along the mesh's dimensions.
        what, error, settings: as for :func:`agree`.
        some: names and values that must be the same on the ranks that have these names.

    Raises:
        Exception: ``error``.
        RuntimeError: another rank failed, or settings differ. The message says which.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = gather_along(groups, (rank, _text(error), settings, some or {}))
    if error is not None:
        raise error
    first: dict[str, tuple[int, object]] = {}  # values that only some ranks have
    for rank, other, other_settings, others_own in found:
        if other is not None:
            raise RuntimeError(f"{what}: it failed on rank {rank}: {other}")
        for name, value in settings.items():
            if other_settings.get(name) != value:
                own, others = _first_difference(value, other_settings.get(name))
                raise RuntimeError(
                    f"{what}: {name} must be the same on all ranks: this one has {own}, "
                    f"rank {rank} has {others}"
                )
        for name, value in others_own.items():
            before, known = first.setdefault(name, (rank, value))
            if known != value:
                raise RuntimeError(
                    f"{what}: {name} must be the same on all of its ranks: rank {before} has "
                    f"{known}, rank {rank} has {value}"
                )


def gather(group: dist.ProcessGroup, value: object) -> list[Any] | None:
    """Gather a plain value of each rank of a group. All of them must call this.

    Returns:
        The values in rank order; None for a group that ``torch.distributed`` does not know.

    Raises:
        ValueError: as :func:`gather_values`.
    """
    if not is_known(group):
        return None
    return gather_values(value, group)


def gather_in_step(group: dist.ProcessGroup, value: object) -> list[Any] | None:
    """Gather as :func:`gather`, but fail at once if the step of an attached hook fails.

    A failed rank closes the step's own group. Over ``group`` the others would wait until its
    timeout. So the step's group is used if it has the same ranks.
    """
    of_step = _of_step.value
    if of_step is not None and group_ranks(of_step) == group_ranks(group) is not None:
        group = of_step
    return gather(group, value)


def gathering_through(group: dist.ProcessGroup) -> setting[dist.ProcessGroup]:
    """Let :func:`gather_in_step` use a step's own group, on this thread inside the block."""
    return setting(_of_step, group)


def gather_along(groups: Sequence[dist.ProcessGroup], value: object) -> list[Any]:
    """Gather a value of each rank of a mesh. All of them must call this.

    Args:
        groups: this rank's groups along the mesh's dimensions.
        value: this rank's value.

    Returns:
        The values in the same order on all ranks; only this rank's if ``torch.distributed`` knows
        none of the groups.
    """
    found: list[Any] = [value]
    for group in groups:
        every = gather(group, found)
        if every is not None:
            found = [each for values in every for each in values]
    return found


def _first_difference(own: object, other: object) -> tuple[object, object]:
    """Two different values; for lists, the first entries that differ."""
    if not (isinstance(own, list) and isinstance(other, list)):
        return own, other
    for number, (mine, theirs) in enumerate(zip(own, other, strict=False)):
        if mine != theirs:
            return f"{mine} in place {number}", theirs
    return f"{len(own)} of them", len(other)


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def digest_of(error: Exception | None, settings: dict[str, object]) -> bytes:
    """The digest that :func:`agree` compares first: 32 bytes.

    Args:
        error, settings: as there. Settings have the same order on all ranks.
    """
    return hashlib.sha256(repr((_text(error), settings)).encode()).digest()


def described(parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Each parameter's name, shape and dtype, and its gradient's dtype if that is another one."""
    found = []
    for name, parameter in parameters:
        text = f"'{name}' of shape {tuple(parameter.shape)} and {parameter.dtype}"
        dtype = gradient_dtype(parameter)
        found.append(text if dtype == parameter.dtype else f"{text} with gradients of {dtype}")
    return found
