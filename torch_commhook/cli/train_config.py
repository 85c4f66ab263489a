"""The configuration of ``train``, and the options that it shares with ``plan`` and ``bench``."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from torch_commhook.hooks.expressions import (
    NO_HOOK,
    HookExpressionError,
    check_hook,
    is_file_reference,
    parse_codec,
    parse_hook,
)

if TYPE_CHECKING:
    from torch_commhook.memory.hook_memory import HookMemory


# ---- the configuration of a run of train: all settings that decide its numbers -------------------


#: The most ranks on one machine. More are a typing error.
MOST_RANKS = 1024
#: The largest values of options. Far larger ones would only fail in the ranks.
MOST = {
    "layers": 10**4,
    "dim": 10**6,
    "heads": 10**6,
    "seq": 10**6,
    "batch": 10**6,
    "steps": 10**9,
    "timeout": 30 * 24 * 3600,  # 30 days
    "threads": 1024,
    "bucket_cap_mb": 10**6,
    "data_cap_mb": 10**6,
}


#: The distribution of a model over the ranks: whole on each rank, sharded over all ranks, or in
#: replicas that are each sharded over some ranks.
PARALLEL = ("ddp", "fsdp", "hsdp")


@dataclass(frozen=True)
class TrainConfig:
    """The settings that decide the numbers of a run. A checkpoint contains them."""

    layers: int = 6
    dim: int = 384
    heads: int = 6
    seq: int = 128
    batch: int = 4
    steps: int = 200
    lr: float = 1e-3
    seed: int = 0
    ranks: int = 2
    hook: str = "cast(bfloat16)"
    #: The first bucket is small, so that communication starts early. The last one is small, because
    #: the step waits for it.
    bucket_cap_mb: tuple[float, ...] = (2.0, 12.0, 14.0, 10.0, 6.0)
    data: tuple[str, ...] | None = None
    data_cap_mb: float | None = None
    parallel: str = "ddp"
    #: Only with ``"hsdp"``: the ranks of a replica.
    shards: int | None = None
    shard_hook: str | None = None
    weights: str | None = None

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that a parameter is sharded over; 1 with DDP."""
        if self.parallel == "hsdp":
            assert self.shards is not None
            return self.shards
        return self.ranks if self.parallel == "fsdp" else 1

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return self.ranks // self.shard_ranks

    @property
    def is_plain(self) -> bool:
        """Whether there is no hook."""
        return is_no_hook(self.hook)

    @property
    def communication(self) -> str:
        """The hook, ``shard_hook`` and ``weights``, as in a call of ``attach``."""
        options = {"shard_hook": self.shard_hook, "weights": self.weights}
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        return ", ".join([self.hook, *given])

    @property
    def cap_bytes(self) -> int | None:
        """The most bytes of text to use; None for all. By default 16 MB of the standard library."""
        cap = self.data_cap_mb
        if cap is None and self.data is None:
            cap = 16.0
        return None if cap is None else int(cap * 1e6)

    def to_plain(self) -> dict[str, Any]:
        """The configuration as plain values, for JSON and for a checkpoint."""
        plain = asdict(self)
        plain["data"] = None if self.data is None else list(self.data)
        plain["bucket_cap_mb"] = list(self.bucket_cap_mb)
        return plain

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> TrainConfig:
        """The inverse of :meth:`to_plain`. Ignores unknown keys; missing ones get defaults.

        Raises:
            ValueError: a field can't have its value.
        """
        known = {f.name: f.default for f in fields(TrainConfig)}
        values = {name: value for name, value in plain.items() if name in known}
        for name, value in values.items():
            if not _can_be(name, value, known[name]):
                raise ValueError(f"its {name} can't be {reprlib.repr(value)}")
        for name in ("data", "bucket_cap_mb"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return TrainConfig(**values)


def is_no_hook(expression: str) -> bool:
    """Whether the text of a hook stands for no hook: ``none``."""
    return expression.strip().lower() == NO_HOOK


def _can_be(name: str, value: Any, default: Any) -> bool:
    """Whether the field ``name`` of TrainConfig can have ``value``."""
    if name == "parallel":
        return value in PARALLEL
    if name == "shards":
        return value is None or (type(value) is int and 1 <= value <= MOST_RANKS)
    if name in ("shard_hook", "weights"):
        return value is None or isinstance(value, str)
    if name == "data":
        return value is None or (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        )
    if isinstance(default, tuple):
        own = isinstance(value, list) and len(value) > 0
        return own and all(_can_be(name, item, default[0]) for item in value)
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, int):
        return type(value) is int and (0 if name == "seed" else 1) <= value <= MOST.get(
            name, 2**63 - 1
        )
    if value is None:
        return default is None
    return type(value) in (int, float) and 0 < value <= MOST.get(name, sys.float_info.max)


#: The fields that decide the shapes of the model. A checkpoint fits only these values.
MODEL_FIELDS = ("layers", "dim", "heads", "seq")
#: The fields that a hook's memory depends on. With other values, a checkpoint's memory is useless.
MEMORY_FIELDS = ("hook", "parallel", "shards", "shard_hook")


# ---- the hooks that plan and bench compare by default --------------------------------------------
#
# ``plan --link FILE`` takes the hooks' computation from a file of ``bench`` only if the file has
# all of these hooks, so both commands take the same list.


#: Compresses AdamW's updates instead of gradients: error feedback hurts neither these nor gradients
#: of four bits.
OF_UPDATES = "local_sgd(1, outer=outer_sgd(1.0, 0.0), hook={hook}, error_reset=True)"
_STREAMED = "local_sgd(30, delay=20, mix=0.5, hook=error_feedback(blockwise(bits=4)))"

#: By optimizer. The plain all-reduce is first: the others are compared with it.
DEFAULT_HOOKS = {
    "adamw": (
        "allreduce()",
        "cast()",
        "blockwise()",
        "error_feedback(blockwise(bits=4))",
        "powersgd(rank=2)",
        OF_UPDATES.format(hook="error_feedback(topk(0.01))"),
        _STREAMED,
    ),
    "sgd": (
        "allreduce()",
        "cast()",
        "blockwise()",
        "error_feedback(blockwise(bits=4))",
        "error_feedback(powersgd(rank=2))",
        "error_feedback(topk(0.01))",
        "error_feedback(sign())",
        _STREAMED,
    ),
}
#: By optimizer: hooks that average across the replicas of a sharded model.
DEFAULT_REPLICA_HOOKS = {optimizer: found[:5] for optimizer, found in DEFAULT_HOOKS.items()}
#: By optimizer: hooks that take part in the reduce-scatters of a sharded model.
DEFAULT_SHARD_HOOKS = {
    "adamw": (
        "allreduce()",
        "cast()",
        "blockwise()",
        "fp8()",
        "error_feedback(blockwise(bits=4))",
    ),
    "sgd": (
        "allreduce()",
        "cast()",
        "blockwise()",
        "fp8()",
        "error_feedback(blockwise(bits=4))",
        "error_feedback(sign())",
    ),
}


# ---- the options of train and plan for sharded models, and checks of their hooks -----------------


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
    from torch_commhook.attachment.sharded.fsdp import check_fits
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
