"""The options of ``train`` and ``plan`` for sharded models, and checks of their hooks."""

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

#: Field of TrainConfig: the values of ``--parallel`` that have its option.
_BELONGS_TO = {
    "bucket_cap_mb": ("ddp",),
    "shards": ("hsdp",),
    "shard_hook": ("hsdp",),
    "weights": ("fsdp", "hsdp"),
}


class ShardedOptionError(ValueError):
    """Options are wrong together. The message is one sentence that names one of them."""


def resolve_sharded(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """Set the default of ``--shards``, and drop options of a checkpoint that do not apply.

    Args:
        config: the configuration from the command line and a checkpoint.
        given: the fields that the command line gives.

    Returns:
        The new configuration.

    Raises:
        ShardedOptionError: the command line gives an option that ``--parallel`` excludes, or the
            shards do not divide the ranks.
    """
    none: dict[str, Any] = {}
    if config.is_plain:
        none = {name: None for name in ("shard_hook", "weights") if name not in given}
    for name, modes in _BELONGS_TO.items():
        if config.parallel in modes or getattr(config, name) is None:
            continue
        if name in given:
            raise ShardedOptionError(
                f"argument {option_of(name)}: needs --parallel {' or '.join(modes)}, "
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
    """Check the hooks and the codec of a sharded model; does nothing for DDP.

    The check does not run a user's file: ``attach`` checks its hook.

    Args:
        config: the configuration of the run.
        option: the option that gives the hook, for errors.

    Raises:
        ShardedOptionError: a text names no hook or codec, or one that does not fit.
    """
    if config.parallel == "ddp":
        return
    for name in ("shard_hook", "weights"):
        if config.is_plain and getattr(config, name) is not None:
            raise ShardedOptionError(f"argument {option_of(name)}: needs a --hook, got {NO_HOOK}")
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
    """Check that a hook can average a sharded model's gradients.

    Args:
        expression: the hook as text. The check does not run a user's file.
        on_shards: whether the hook takes part in reduce-scatters, or averages across replicas.

    Raises:
        ShardedOptionError: the text names no hook, or one that cannot.
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
        raise ShardedOptionError(_reason(error)) from error


def check_weights(expression: str) -> None:
    """Check that a codec can send the parameters in all-gathers.

    Raises:
        ShardedOptionError: the text names no codec, or one that cannot.
    """
    from torch_commhook.attachment.sharded.attaching import check_weights_codec

    try:
        codec = parse_codec(expression)
        if codec is not None:
            check_weights_codec(codec)
    except HookExpressionError as error:
        raise ShardedOptionError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ShardedOptionError(_reason(error)) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).removeprefix("attach: ")


def option_of(name: str) -> str:
    """The option that gives a field of TrainConfig: ``--shard-hook`` for ``shard_hook``."""
    return "--" + name.replace("_", "-")
