"""The configuration of ``train``, and the options that it shares with ``plan`` and ``bench``."""

from __future__ import annotations

import argparse
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch_commhook.cli.option_types import (
    OptionError,
    at_most,
    of_option,
    option,
    option_of,
    positive_float,
    positive_int,
    whole_number,
)
from torch_commhook.hooks.expressions import (
    NO_HOOK,
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

#: The distribution of a model over the ranks: whole on each rank, sharded over all ranks, or in
#: replicas that are each sharded over some ranks.
PARALLEL = ("ddp", "fsdp", "hsdp")

_model = partial(option, group="model")
_training = partial(option, group="training")
_communication = partial(option, group="communication")
_data = partial(option, group="data")
_million = at_most(10**6, positive_int)
_megabytes = at_most(10**6, positive_float)


@dataclass(frozen=True)
class TrainConfig:
    """The settings that decide the numbers of a run. A checkpoint contains them."""

    layers: int = _model(at_most(10**4, positive_int), "transformer blocks", 6)
    dim: int = _model(_million, "width", 384)
    heads: int = _model(_million, "attention heads", 6)
    seq: int = _model(_million, "bytes of a sequence", 128)
    batch: int = _training(_million, "sequences of a rank in a step", 4)
    steps: int = _training(at_most(10**9, positive_int), "steps in all", 200)
    lr: float = _training(positive_float, "highest learning rate of AdamW", 1e-3)
    seed: int = _training(whole_number(0, 2**63 - 1), "seed of the weights and the batches", 0)
    hook: str = _communication(
        str,
        f"hook of the library such as cast(bfloat16), {NO_HOOK} for plain DDP or fully_shard, or "
        "FILE.py:NAME",
        "cast(bfloat16)",
    )
    parallel: str = _communication(
        str,
        "ddp: each rank has the model; fsdp: fully_shard over all ranks, and the hook takes part "
        "in its reduce-scatters; hsdp: sharded replicas, and the hook averages across replicas",
        "ddp",
        choices=PARALLEL,
    )
    shards: int | None = _communication(
        positive_int, "with hsdp: ranks of a replica", shown="half of the ranks"
    )
    shard_hook: str | None = _communication(
        str,
        f"with hsdp: hook for the reduce-scatters within a replica, or {NO_HOOK}",
        shown=NO_HOOK,
        metavar="HOOK",
    )
    weights: str | None = _communication(
        str,
        "with fsdp and hsdp: codec such as blockwise() for the all-gathers of parameters, or "
        f"{NO_HOOK}",
        shown=NO_HOOK,
        metavar="CODEC",
    )
    #: The first bucket is small, so that communication starts early. The last one is small, because
    #: the step waits for it.
    bucket_cap_mb: tuple[float, ...] = _communication(
        _megabytes,
        "with ddp: sizes of the buckets, in the order in which the backward fills them; the last "
        "size is for all later buckets",
        (2.0, 12.0, 14.0, 10.0, 6.0),
        metavar="MIB",
        nargs="+",
    )
    ranks: int = _communication(positive_int, f"ranks to launch, at most {MOST_RANKS}", 2)
    data: tuple[str, ...] | None = _data(
        str,
        "files of text to train on",
        shown="the sources of Python's standard library",
        nargs="+",
        metavar="FILE",
    )
    data_cap_mb: float | None = _data(
        _megabytes,
        "most text to use",
        shown="16 of the standard library, all of --data",
        metavar="MB",
    )

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
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> TrainConfig:
        """The inverse of :meth:`to_plain`. Ignores unknown keys; missing ones get defaults.

        Raises:
            ValueError: a field can't have its value.
        """
        known = [each for each in fields(TrainConfig) if each.name in plain]
        return TrainConfig(**{each.name: _value(each, plain[each.name]) for each in known})


def _value(field: Field[Any], plain: Any) -> Any:
    """The value of a field from plain values; raises ValueError where its option refuses them."""
    if plain is None and field.default is None:
        return None
    settings = field.metadata["option"]
    items = plain if "nargs" in settings else [plain]
    if isinstance(items, list) and items and all(_is_accepted(each, settings) for each in items):
        return tuple(items) if items is plain else plain
    raise ValueError(f"its {field.name} can't be {reprlib.repr(plain)}")


def _is_accepted(item: object, settings: Mapping[str, Any]) -> bool:
    if type(item) not in (str, int, float):
        return False
    try:
        return item in settings.get("choices", [settings["type"](str(item))])
    except argparse.ArgumentTypeError:
        return False


def is_no_hook(expression: str) -> bool:
    """Whether the text of a hook stands for no hook: ``none``."""
    return expression.strip().lower() == NO_HOOK


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

_PLAIN = ("allreduce()", "cast()", "blockwise()")
_INT4 = "error_feedback(blockwise(bits=4))"

#: By optimizer. The plain all-reduce is first: the others are compared with it.
DEFAULT_HOOKS = {
    "adamw": (
        *_PLAIN,
        _INT4,
        "powersgd(rank=2)",
        OF_UPDATES.format(hook="error_feedback(topk(0.01))"),
        _STREAMED,
    ),
    "sgd": (
        *_PLAIN,
        _INT4,
        "error_feedback(powersgd(rank=2))",
        "error_feedback(topk(0.01))",
        "error_feedback(sign())",
        _STREAMED,
    ),
}
#: By optimizer: hooks that average across the replicas of a sharded model.
DEFAULT_REPLICA_HOOKS = {optimizer: found[:5] for optimizer, found in DEFAULT_HOOKS.items()}
_IN_SHARDS = (*_PLAIN, "fp8()", _INT4)
#: By optimizer: hooks that take part in the reduce-scatters of a sharded model.
DEFAULT_SHARD_HOOKS = {"adamw": _IN_SHARDS, "sgd": (*_IN_SHARDS, "error_feedback(sign())")}


# ---- the options of train and plan for sharded models, and checks of their hooks -----------------


#: Field of TrainConfig: the values of ``--parallel`` that have its option.
_BELONGS_TO = {
    "bucket_cap_mb": ("ddp",),
    "shards": ("hsdp",),
    "shard_hook": ("hsdp",),
    "weights": ("fsdp", "hsdp"),
}


class ShardedOptionError(OptionError):
    """Options of a sharded model are wrong together."""


def resolve_sharded(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """Set the default of ``--shards``, and drop options of a checkpoint that do not apply.

    Only the fields in ``given`` are from the command line.

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


def check_hooks(config: TrainConfig, name: str) -> None:
    """Check the hook and, for a sharded model, the shard hook and the codec of the weights.

    The check does not run a user's file: ``attach`` checks its hook. ``name`` is the option that
    gives the hook, for errors.

    Raises:
        OptionError: a text names no hook or codec, or one that does not fit.
    """
    with of_option(name):
        check_hook(config.hook)
    if config.parallel == "ddp":
        return
    for each in ("shard_hook", "weights"):
        if config.is_plain and getattr(config, each) is not None:
            raise ShardedOptionError(f"argument {option_of(each)}: needs a --hook, got {NO_HOOK}")
    with of_option(name):
        check_hook_fits(config.hook, on_shards=config.parallel == "fsdp")
    with of_option("--shard-hook"):
        if config.shard_hook is not None:
            check_hook_fits(config.shard_hook, on_shards=True)
    with of_option("--weights"):
        if config.weights is not None:
            check_weights(config.weights)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the errors of a hook or codec that does not fit into a ShardedOptionError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).removeprefix("attach: ")
        raise ShardedOptionError(reason) from error


def check_hook_fits(expression: str, *, on_shards: bool) -> None:
    """Check that a hook can average a sharded model's gradients, without running a user's file.

    ``on_shards`` tells whether the hook takes part in reduce-scatters, or averages across replicas.

    Raises:
        ShardedOptionError: the text names no hook, or one that cannot.
    """
    from torch_commhook.attachment.sharded.fsdp import check_fits
    from torch_commhook.memory.sharded_memory import ReplicaMemory, WholeGradientMemory
    from torch_commhook.step.attached_hook import Attached

    memory: HookMemory = WholeGradientMemory() if on_shards else ReplicaMemory()
    with _refusals():
        check_hook(expression)
        hook = None if is_file_reference(expression) else parse_hook(expression)
        if hook is not None:
            check_fits(Attached.checked(hook, None, memory))


def check_weights(expression: str) -> None:
    """Check that a codec can send the parameters in all-gathers.

    Raises:
        ShardedOptionError: the text names no codec, or one that cannot.
    """
    from torch_commhook.attachment.sharded.attaching import check_weights_codec

    with _refusals():
        codec = parse_codec(expression)
        if codec is not None:
            check_weights_codec(codec)
