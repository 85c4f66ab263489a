"""The choice of a model's hook by measurements, for :class:`torch_commhook.hooks.auto`."""

from __future__ import annotations

import torch

from torch_commhook.attachment.road import Road, road_in_use
from torch_commhook.hooks.auto import auto
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.planning.choice import choose_hook
from torch_commhook.process_group.simulated.scheduler import current_rank


class AutoSelector:
    """Chooses a hook by measurements, after the first steps or before a compiler captures one."""

    def __init__(self, hook: auto, memory: HookMemory, road: Road) -> None:
        self._hook = hook
        self._memory = memory
        self._road = road
        self._can_measure()

    def before_step(self) -> None:
        """Choose at the beginning of a step. The choice counts once all ranks end the step."""
        if self._hook.is_due(self._memory) and self._can_measure():
            self._find()

    def before_capture(self) -> None:
        """Choose before a compiler captures a backward: the graph contains one hook only."""
        if self._hook.chosen(self._memory) is not None or not self._can_measure():
            return
        group = road_in_use(self._road).group
        group.begin()
        self._find()
        group.end()
        self._hook.take_proposed(self._memory)

    def step_repeats(self) -> None:
        """Drop the proposed choice: the step failed on some rank, which may not know it."""
        self._hook.withdraw(self._memory)

    def _can_measure(self) -> bool:
        why_not = reason_for_none(self._memory.world_size)
        if why_not:
            self._hook.explain(self._memory, why_not)
        return not why_not

    def _find(self) -> None:
        memory, hook = self._memory, self._hook
        assert memory.group is not None
        with torch.random.fork_rng(devices=[]):  # the training's random numbers stay the same
            choice = choose_hook(
                hook.candidates,
                hook.max_error,
                buckets=memory.bucket_memories(),
                first_steps=hook.first_steps(memory),
                group=memory.group,
            )
        hook.propose(memory, choice.number, choice.reason)


def reason_for_none(world_size: int) -> str:
    """The reason why the ranks cannot measure a link; empty if they can."""
    if world_size == 1:
        return "there is one rank, which sends nothing"
    if current_rank() is not None:
        return "the ranks are threads of one process, with no link between them"
    return ""
