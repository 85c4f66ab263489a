"""Hooks around the communication hook, and the agreement of ranks at the end of a step.

The hooks come in stages:

    buffer pre-hooks, pre-hooks, the communication hook, post-hooks, gradients written,
    post-accumulate hooks

Each stage checks its hooks' results as autograd checks its own, in every mode.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.hooks import RemovableHandle

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives.gloo_groups import exchanges
from torch_commhook.collectives.issuing import STEP_END, Place, place_in
from torch_commhook.memory.hook_memory import change_final_stages
from torch_commhook.native.runtime import hook_name

# ---- the stages of hooks around the communication hook -------------------------------------------


_Hooks = OrderedDict[int, tuple[Callable[..., Any], str]]


class BucketStages:
    """The hooks of each stage, in order of registration."""

    def __init__(self) -> None:
        self.buffer_prehooks: _Hooks = OrderedDict()
        self.prehooks: _Hooks = OrderedDict()
        self.posthooks: _Hooks = OrderedDict()
        self.post_accumulate_hooks: _Hooks = OrderedDict()

    def register(self, stage: str, hook: Callable[..., Any]) -> RemovableHandle:
        """Add a hook to a stage.

        Raises:
            TypeError: it is not callable.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be callable, got {_C.type_name(hook)}")
        hooks: _Hooks = getattr(self, stage)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook, hook_name(hook)
        return handle

    @property
    def is_empty(self) -> bool:
        """Whether no stage has hooks."""
        return not (
            self.buffer_prehooks or self.prehooks or self.posthooks or self.post_accumulate_hooks
        )

    @property
    def has_post_accumulate_hooks(self) -> bool:
        """Whether :meth:`done` has work to do."""
        return bool(_hooks(self.post_accumulate_hooks))

    def before(self, bucket: GradBucket, where: str) -> tuple[Tensor, ...] | None:
        """Run the stages before the communication hook.

        Returns:
            The gradients after these stages, if post-hooks need them.
        """
        with torch.no_grad():
            for hook, name in _hooks(self.buffer_prehooks):
                result = hook(bucket)
                buffer = bucket.buffer()
                if result is None or result is buffer:
                    continue
                _check_value(result, buffer, f"{where}: buffer pre-hook '{name}'")
                bucket.set_buffer(result)
            if _hooks(self.prehooks):
                values = list(bucket.gradients())
                _write(bucket, values, self._run_all(self.prehooks, values, (), where, "pre-hook"))
            if not _hooks(self.posthooks):
                return None
            return tuple(gradient.clone() for gradient in bucket.gradients())

    def after(
        self, bucket: GradBucket, result: Tensor, local: tuple[Tensor, ...], where: str
    ) -> Tensor:
        """Run the post-hooks on a result that has been checked.

        Returns:
            The result, in the bucket's dtype.
        """
        with torch.no_grad():
            result = result.to(bucket.dtype())
            reduced = bucket.pieces(result)
            new = self._run_all(self.posthooks, reduced, (local,), where, "post-hook")
            if bucket.is_sparse():
                return new[0]
            for before, after in zip(reduced, new, strict=True):
                if after is not before:
                    before.copy_(after)
            return result

    def done(self, bucket: GradBucket, where: str) -> None:
        """Run the post-accumulate hooks, when all gradients are written."""
        change_final_stages(1)
        try:
            with torch.no_grad():
                for hook, name in _hooks(self.post_accumulate_hooks):
                    result = hook(bucket)
                    if result is not None:
                        raise RuntimeError(
                            f"{where}: post-accumulate hook '{name}' should return None, "
                            f"but returned '{type(result).__name__}'"
                        )
        finally:
            change_final_stages(-1)

    @staticmethod
    def _run_all(
        hooks: _Hooks, values: Sequence[Tensor], others: tuple[Any, ...], where: str, kind: str
    ) -> list[Tensor]:
        current = list(values)
        for hook, name in _hooks(hooks):
            given = tuple(current)
            result = hook(given, *others)
            if result is None:
                continue
            which = f"{where}: {kind} '{name}'"
            if not isinstance(result, tuple):
                raise TypeError(
                    f"{which}: expected tuple, but hook returned '{type(result).__name__}'"
                )
            if len(result) != len(given):
                raise RuntimeError(
                    f"{which}: hook has returned an incorrect number of values (got "
                    f"{len(result)}, but expected {len(given)})"
                )
            for i, value in enumerate(result):
                if value is None or value is given[i]:
                    continue
                _check_value(value, given[i], f"{which}, value {i}")
                current[i] = value
        return current


def _hooks(stage: _Hooks) -> list[tuple[Callable[..., Any], str]]:
    """The present hooks of a stage: one that is removed meanwhile still runs.

    Also used to test whether there are any: torch 2.13's compiler guards the values of an ordered
    dict, but not whether it is empty.
    """
    return list(stage.values())


def _write(bucket: GradBucket, before: list[Tensor], after: list[Tensor]) -> None:
    if bucket.is_sparse():
        bucket.set_buffer(after[0])
        return
    for old, new in zip(before, after, strict=True):
        if new is not old:
            old.copy_(new)


def _check_value(value: object, was: Tensor, which: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{which}: expected Tensor, but hook returned '{type(value).__name__}'")
    for what in ("dtype", "layout", "device"):
        if getattr(value, what) != getattr(was, what):
            raise RuntimeError(
                f"{which}: hook has changed the type of value ({what} was {getattr(was, what)}, "
                f"got {getattr(value, what)})"
            )
    if value.shape != was.shape:
        raise RuntimeError(
            f"{which}: hook has changed the size of value (was {tuple(was.shape)}, "
            f"got {tuple(value.shape)})"
        )


# ---- the agreement of a group's ranks at the end of a step ---------------------------------------
#
# Each rank tells all others that its part succeeded, which takes half a round trip. A failed rank
# leaves the group, which ends the others' wait. The maps of used parameters follow only if each
# rank left some unused.


class StepEnd:
    """The end of one step, at which each rank sends a flag to all others.

    All ranks make theirs at the same point, after the end of the previous step.

    Args:
        group: one of the library's own groups, or one around it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._place = place_in(group, STEP_END) if exchanges(group) else None

    def any_rank(self, flag: bool = True) -> bool:
        """Wait until all ranks call this. Returns whether the flag is set on any of them.

        Raises:
            RuntimeError: a rank has left, or the group's timeout is over.
        """
        own = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        return bool(begin_maximum(self.group, own, self._place)().any())


def all_alike(group: dist.ProcessGroup, own: bytes, place: Place | None = None) -> bool:
    """Whether all ranks have the same bytes. All call this at the same point.

    Args:
        group: the group of the ranks, of any backend.
        own: this rank's bytes, equally many on all ranks.
        place: as for :func:`begin_maximum`.

    Raises:
        RuntimeError: as for :func:`begin_maximum`.
    """
    device = "cpu" if exchanges(group) else distributed_c10d._get_object_coll_device(group)
    digest = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    both = torch.cat([digest, 255 - digest])  # the maximum of the second half is the minimum
    return torch.equal(begin_maximum(group, both, place)(), both)


def agree_on_used(step_end: StepEnd, used: Tensor) -> None:
    """Wait until all ranks call this, and combine the parameters that they have used.

    Args:
        step_end: the step's end.
        used: uint8, flat, with the same shape on all ranks: not 0 for each parameter that this rank
            has used. Becomes the maximum over the ranks.

    Raises:
        RuntimeError: a rank has left, or the group's timeout is over.
    """
    group = step_end.group
    if step_end.any_rank(bool(used.all())):
        used.fill_(1)
    else:
        used.copy_(begin_maximum(group, used)())


def begin_maximum(
    group: dist.ProcessGroup, own: Tensor, place: Place | None = None
) -> Callable[[], Tensor]:
    """Start to take the maximum over the ranks, element by element.

    All ranks call this at the same point of a step.

    Args:
        group: the group of the ranks.
        own: this rank's numbers: uint8, flat, with the same size on all ranks; on the CPU if
            :func:`exchanges` holds for the group.
        place: its place, if one was taken.

    Returns:
        A function that waits for the maximum and returns it. It raises a RuntimeError if a rank has
        left, or the group's timeout is over.
    """
    if exchanges(group):
        return (place or place_in(group)).reduce(own.clone(), takes_maximum=True).wait
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    maximum = own.clone()
    work = group.allreduce([maximum], options)

    def wait() -> Tensor:
        work.wait()
        return maximum

    return wait
