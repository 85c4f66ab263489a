"""Checks whether a hook fits a sharded model, and warns of its memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch_commhook.attachment.sharded import fsdp
from torch_commhook.attachment.user_warning import warn_user
from torch_commhook.hooks.base import Hook
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.sharded_memory import ReplicaMemory, UnshardedMemory
from torch_commhook.step.attached_hook import Attached


def check_fits(attached: Attached, op: str = "attach", *, beside: bool = False) -> None:
    """Refuse hooks that do not support a sharded model.

    Args:
        attached: the hook.
        op: the function's name in errors.
        beside: whether it is a ``shard_hook``, beside a hook that averages across replicas.

    Raises:
        TypeError, ValueError: the hook does not support the model.
    """
    hook = attached.hook
    on_shards = isinstance(attached.memory, UnshardedMemory)
    if isinstance(hook, Hook) and _scales_steps(hook):
        raise TypeError(
            f"{op}: {hook} scales all gradients of a step after their average, which no hook can "
            "do on a model with fully_shard() or replicate(); call "
            "torch.nn.utils.clip_grad_norm_() after backward()"
        )
    if isinstance(hook, Hook) and hook.chooses:
        raise TypeError(
            f"{op}: {hook} chooses a hook on a model whose ranks have all of it; on a model with "
            "fully_shard() or replicate(), attach the hook itself, which `commhook plan "
            "--parallel` with fsdp or hsdp finds"
        )
    if beside:
        _check_fits_beside(attached, op)
    if on_shards and isinstance(hook, Hook) and hook.keeps_ranks_apart:
        raise TypeError(
            f"{op}: {hook} keeps replicas apart, but on a mesh of one dimension each rank has a "
            "part of the only replica; shard over a mesh of two dimensions, of replicas and shards"
        )
    if on_shards:
        if not isinstance(hook, Hook):
            raise TypeError(
                f"{op}: hook '{attached.name}' averages whole gradients, but a rank has only its "
                "shards of sharded parameters; subclass torch_commhook.hooks.Hook, "
                "with average_shard(), or shard over a mesh of two dimensions"
            )
        hook.check_shards()


def _check_fits_beside(attached: Attached, op: str) -> None:
    hook, error = attached.hook, None
    if isinstance(hook, Hook) and not hook.keeps_ranks_apart:
        try:
            hook.check_shards()
        except TypeError as raised:
            error = raised
        else:
            return
    raise TypeError(
        f"{op}: shard_hook takes part in reduce-scatters, but '{attached.name}' cannot; give it as "
        "hook=, which averages across replicas"
    ) from error


def _scales_steps(hook: Hook) -> bool:
    return hook.scales_steps or any(map(_scales_steps, hook.hooks_inside()))


def settings_by_ranks(
    memory: HookMemory | None, settings: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Separate settings of all ranks from those of the replicas of one shard.

    Returns:
        Settings that must be the same on all ranks; and settings that only the replicas of a shard
        share, by names that contain the shard.
    """
    choices = "the state's choices"
    if choices not in settings or not isinstance(memory, ReplicaMemory):
        return dict(settings), {}
    of_all = {name: value for name, value in settings.items() if name != choices}
    of_shard = f"{choices} for shard {memory.shard[0]} of part {memory.part[0]}"
    return of_all, {of_shard: settings[choices]}


def check_backward() -> None:
    """Refuse a backward in which ``fully_shard`` would reduce only some gradients.

    Raises:
        RuntimeError: compiled autograd runs the backward.
    """
    if fsdp.is_compiled_backward():
        raise RuntimeError(
            "torch_commhook: compiled autograd runs this backward, in which fully_shard computes "
            "different gradients, with a hook or without; call backward() outside of it"
        )


def warn_of_memory(attached: Attached) -> None:
    """Warn of error memory with the size of whole gradients."""
    lost = attached.memory.error_bytes
    if lost and isinstance(attached.memory, UnshardedMemory):
        warn_user(
            f"torch_commhook: {attached.hook} keeps errors of whole gradients, "
            f"{lost / 2**20:.1f} MiB on each rank, which do not shrink with the number of "
            "shards; on a mesh of two dimensions it keeps errors of a shard only"
        )
