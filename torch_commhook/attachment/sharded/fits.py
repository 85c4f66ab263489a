"""Whether a hook fits a sharded model, and what it costs there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch_commhook.hooks.base import Hook
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.sharded_memory import ReplicaMemory, UnshardedMemory
from torch_commhook.step.attached_hook import Attached


def check_fits(attached: Attached) -> None:
    """Refuse hooks that cannot do what a sharded model asks of them.

    Raises:
        TypeError, ValueError: one cannot.
    """
    hook = attached.hook
    on_shards = isinstance(attached.memory, UnshardedMemory)
    if on_shards and isinstance(hook, Hook) and hook.keeps_ranks_apart:
        raise TypeError(
            f"attach: {hook} keeps replicas apart, and on a mesh of one dimension each rank has a "
            "part of the only one; shard over a mesh of two dimensions, of replicas and shards"
        )
    if on_shards:
        if not isinstance(hook, Hook):
            raise TypeError(
                f"attach: hook '{attached.name}' averages whole gradients, and of sharded "
                "parameters each rank needs its shard alone; subclass torch_commhook.hooks.Hook, "
                "with average_shard(), or shard over a mesh of two dimensions"
            )
        hook.check_shards()
    if isinstance(hook, Hook) and _scales_steps(hook):
        raise TypeError(
            f"attach: {hook} scales a step's gradients by what all of them are, of which no rank "
            "has more than its shards; call torch.nn.utils.clip_grad_norm_() after backward()"
        )


def _scales_steps(hook: Hook) -> bool:
    return hook.scales_steps or any(map(_scales_steps, hook.hooks_inside()))


def settings_by_ranks(
    memory: HookMemory | None, settings: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Tell settings that all ranks must have alike from those of the replicas of a shard.

    Returns:
        The former, and the latter by names that contain the shard.
    """
    choices = "the state's choices"
    if choices not in settings or not isinstance(memory, ReplicaMemory):
        return dict(settings), {}
    of_all = {name: value for name, value in settings.items() if name != choices}
    of_shard = f"{choices} for shard {memory.shard[0]} of part {memory.part[0]}"
    return of_all, {of_shard: settings[choices]}


def warn_of_memory(attached: Attached) -> None:
    lost = attached.memory.error_bytes
    if lost and isinstance(attached.memory, UnshardedMemory):
        warnings.warn(
            f"attach: {attached.hook} remembers what it loses of whole gradients, "
            f"{lost / 2**20:.1f} MiB on each rank, which do not shrink with the number of "
            "shards; on a mesh of two dimensions it remembers as much of a shard",
            stacklevel=8,
        )
