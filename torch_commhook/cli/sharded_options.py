"""The options of ``train`` for models in shards, and the hooks that they take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import (
    NO_HOOK,
    HookExpressionError,
    check_hook,
    is_file_reference,
    parse_codec,
    parse_hook,
)

if TYPE_CHECKING:  # it imports torch, which DDP's options do not need
    from torch_commhook.memory.hook_memory import HookMemory

#: The options that only some values of ``--parallel`` have.
_BELONGS_TO = {
    "bucket_cap_mb": ("ddp",),
    "shards": ("hsdp",),
    "shard_hook": ("hsdp",),
    "weights": ("fsdp", "hsdp"),
}


class ShardedOptionError(ValueError):
    """Options that are wrong together, in one sentence."""


def resolve_sharded(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """``config`` with the default of ``--shards``, and without what a checkpoint has needlessly.

    Args:
        config: as given on the command line and by a checkpoint.
        given: the fields that the command line has.

    Raises:
        ShardedOptionError: an option is given that ``--parallel`` has no use for, or the shards do
            not divide the ranks.
    """
    none: dict[str, Any] = {}
    if config.hook.strip().lower() == NO_HOOK:
        none = {name: None for name in ("shard_hook", "weights") if name not in given}
    for name, modes in _BELONGS_TO.items():
        if config.parallel in modes or getattr(config, name) is None:
            continue
        if name in given:
            raise ShardedOptionError(
                f"argument {_option(name)}: needs --parallel {' or '.join(modes)}, "
                f"got {config.parallel}"
            )
        if name != "bucket_cap_mb":
            none[name] = None
    config = replace(config, **none)
    if config.parallel != "hsdp":
        return config
    if config.shards is None and config.ranks % 2:
        raise ShardedOptionError(
            f"argument --shards: is half of the ranks by default, got {config.ranks} ranks; give "
            "a number that divides them"
        )
    shards = config.ranks // 2 if config.shards is None else config.shards
    if config.ranks % shards:
        raise ShardedOptionError(
            f"argument --shards: must divide the {config.ranks} ranks, got {shards}"
        )
    return replace(config, shards=shards)


def check_sharded(config: TrainConfig, option: str = "--hook") -> None:
    """Check what averages gradients and gathers parameters, where the model is sharded.

    A user's file is not run; ``attach`` checks its hook.

    Args:
        config: of the run.
        option: that the hook comes from.

    Raises:
        ShardedOptionError: a hook or codec is none, or can't do what is asked of it.
    """
    if config.parallel == "ddp":
        return
    has_no_hook = config.hook.strip().lower() == NO_HOOK
    for name in ("shard_hook", "weights"):
        if has_no_hook and getattr(config, name) is not None:
            raise ShardedOptionError(f"argument {_option(name)}: needs a --hook, got {NO_HOOK}")
    on_shards = config.parallel == "fsdp"
    _check(option, config.hook, on_shards=on_shards)
    if config.shard_hook is not None:
        _check("--shard-hook", config.shard_hook, on_shards=True)
    if config.weights is not None:
        try:
            check_weights(config.weights)
        except ShardedOptionError as error:
            raise ShardedOptionError(f"argument --weights: {error}") from error


def _check(option: str, expression: str, *, on_shards: bool) -> None:
    try:
        check_hook_fits(expression, on_shards=on_shards)
    except ShardedOptionError as error:
        raise ShardedOptionError(f"argument {option}: {error}") from error


def check_hook_fits(expression: str, *, on_shards: bool) -> None:
    """Check that a hook of the library can average a sharded model's gradients.

    Args:
        expression: of the hook.
        on_shards: whether it takes part in reduce-scatters; else it averages across replicas.

    Raises:
        ShardedOptionError: it is no hook, or can't.
    """
    from torch_commhook.attachment.sharded.fits import check_fits
    from torch_commhook.memory.sharded_memory import ReplicaMemory, UnshardedMemory
    from torch_commhook.step.attached_hook import Attached

    memory: HookMemory = UnshardedMemory() if on_shards else ReplicaMemory()
    try:
        check_hook(expression)
        hook = None if is_file_reference(expression) else parse_hook(expression)
        if hook is not None:
            check_fits(Attached.checked(hook, None, memory))
    except HookExpressionError as error:
        raise ShardedOptionError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ShardedOptionError(_said(error)) from error


def check_weights(expression: str) -> None:
    """Check that parameters can be gathered through a codec.

    Raises:
        ShardedOptionError: it is no codec, or they can't.
    """
    from torch_commhook.attachment.sharded.attaching import check_weights_codec

    try:
        codec = parse_codec(expression)
        if codec is not None:
            check_weights_codec(codec)
    except HookExpressionError as error:
        raise ShardedOptionError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ShardedOptionError(_said(error)) from error


def _said(error: Exception) -> str:
    return " ".join(str(error).split()).removeprefix("attach: ")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
