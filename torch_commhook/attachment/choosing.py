"""Has a model's ranks find out which hook it is to have, for :class:`torch_commhook.hooks.auto`."""

from __future__ import annotations

import torch

from torch_commhook.attachment.road import Road, road_in_use
from torch_commhook.hooks.auto import auto
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.planning.choice import choose_hook
from torch_commhook.testing.scheduler import current_rank


class ChoosingByPlan:
    """Chooses by what the ranks measure, after the first steps or before a compiler takes one in.

    Args:
        hook: chooses.
        memory: of the model.
        road: the first one of the model.
    """

    def __init__(self, hook: auto, memory: HookMemory, road: Road) -> None:
        self._hook = hook
        self._memory = memory
        self._road = road
        self._can_measure()

    def before_step(self) -> None:
        """A step has begun. What is found counts from its end on, if that comes on all ranks."""
        if self._hook.is_due(self._memory) and self._can_measure():
            self._find()

    def before_capture(self) -> None:
        """A compiler takes in a backward, and knows one hook alone."""
        if self._hook.chosen(self._memory) is not None or not self._can_measure():
            return
        group = road_in_use(self._road).group
        group.begin()
        self._find()
        group.end()
        self._hook.take_proposed(self._memory)

    def step_repeats(self) -> None:
        """The step has failed on some rank, which may not know what the others have found."""
        self._hook.withdraw(self._memory)

    def _can_measure(self) -> bool:
        why_not = reason_for_none(self._memory.world_size)
        if why_not:
            self._hook.explain(self._memory, why_not)
        return not why_not

    def _find(self) -> None:
        memory, hook = self._memory, self._hook
        assert memory.group is not None
        with torch.random.fork_rng(devices=[]):  # random gradients change no number of the training
            choice = choose_hook(
                hook.candidates,
                hook.max_error,
                buckets=memory.bucket_memories(),
                first_steps=hook.first_steps(memory),
                group=memory.group,
            )
        hook.propose(memory, choice.number, choice.reason)


def reason_for_none(world_size: int) -> str:
    """Why there is nothing to measure; empty where there is."""
    if world_size == 1:
        return "there is one rank, which sends nothing"
    if current_rank() is not None:
        return "the ranks are threads of one process, which no link joins"
    return ""
