"""Averages through a codec."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.base import CODECS, Codec
from torch_commhook.codecs.error_decay import decays_at_random
from torch_commhook.collectives.compressed import compressed_all_reduce
from torch_commhook.collectives.compressed_chunks import compressed_reduce_scatter
from torch_commhook.collectives.group_place import check_place, group_rank
from torch_commhook.collectives.plain import resolve_group
from torch_commhook.collectives.sum_arguments import shard_range
from torch_commhook.hooks.base import Hook, average_scale, check_dense, result_tensor
from torch_commhook.hooks.traits import HookTraits
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.sharded_bucket import ShardedBucket
from torch_commhook.metrics import ring_all_reduce_bytes


class compressed(Hook):  # noqa: N801 (a hook is written as it is called)
    """Average gradients through a codec: encode, exchange, sum in float32, decode.

    See :func:`torch_commhook.collectives.compressed_all_reduce` for the exchange and its traffic.
    All ranks get the same bits.

    Each codec has a hook of its name: ``hooks.blockwise(bits=4)`` is
    ``hooks.compressed(codecs.blockwise(bits=4))``.

    Args:
        codec: encodes gradients into messages.
        seed: the seed of random numbers, for codecs that need them. The numbers depend on seed,
            step, bucket, rank and the element's position, and not on the number of threads.
        process_group: the ranks to average over; see :class:`Hook`.

    Raises:
        TypeError: ``codec`` is not a codec, or ``seed`` is not an int.

    Example:
        >>> gradients = [[torch.linspace(-1, 1, 4096)], [torch.linspace(0, 1, 4096)]]
        >>> hook = hooks.compressed(codecs.fp8("e5m2"), seed=1)
        >>> hook
        fp8(format='e5m2', seed=1)
        >>> found = simulate(hook, gradients)
        >>> found.wire_bytes, found.error < 0.1
        (4160, True)
    """

    _commhook_traceable = True
    _lets_stages_wait = True

    def __init__(
        self, codec: Codec, *, seed: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        if not isinstance(codec, Codec):
            raise TypeError(f"compressed: codec must be a Codec, got {no_codec(codec)}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"compressed: seed must be an int, got {type(seed).__qualname__}")
        self.codec = codec
        self.traits = traits_of_codec(codec)
        self.seed = seed
        # Different codecs of a user may print alike.
        self._shard_plan = f"shard of {codec!r} {id(codec)}"

    def check_ranks(self, group: dist.ProcessGroup) -> None:
        if self.has_stages:
            own = self.process_group
            check_place(str(self), group if own is None else resolve_group(own))

    def prepare(self, memory: BucketMemory) -> None:
        codec = self.codec
        self._warn_where_a_cast_is_better(memory)
        if memory.with_error and codec.takes_error:
            memory.flat("error")
            if self.has_stages and not memory.is_sharded:
                rank, ranks = self._place(memory)
                span = shard_range(codec, memory.numel, rank=rank, world_size=ranks)
                shard = memory.shard("shard_error", *span, factor=ranks)
                memory.plans[self._shard_plan] = shard
        rounding_of(codec, self.seed, memory)

    def _place(self, memory: BucketMemory) -> tuple[int, int]:
        """This rank's number among the ranks of the average, and their number."""
        if self.process_group is None:
            return memory.rank, memory.world_size
        own = resolve_group(self.process_group)
        return group_rank(own), own.size()

    def _check_place_of_shard(self, memory: BucketMemory, group: dist.ProcessGroup) -> None:
        """Refuse the memory of a shard if the group's ranks have changed since it was made.

        Raises:
            RuntimeError: the group has had other ranks since the shard was chosen.
        """
        if self.process_group is not None or type(group) is dist.ProcessGroup:
            return
        if torch.compiler.is_compiling() or not self.shards(memory):
            return
        now = group_rank(group), group.size()
        if now != (memory.rank, memory.world_size):
            raise RuntimeError(
                f"{self}: the process group's ranks have changed: this was rank {memory.rank} of "
                f"{memory.world_size}, and is rank {now[0]} of {now[1]} now. Attach the hook "
                "again, or "
                "use torch_commhook.integrations.torchft.attach_to()"
            )

    def _warn_where_a_cast_is_better(self, memory: BucketMemory) -> None:
        if self.codec.exchange != "all_gather":
            return
        _, ranks = self._place(memory)
        sent = self.codec.nbytes(memory.numel) * (ranks - 1)
        if sent > ring_all_reduce_bytes(2 * memory.numel, ranks):
            warnings.warn(
                f"{self}: over {ranks} ranks its messages, which every rank gets from all others, "
                "take more bytes than cast(bfloat16) sends",
                stacklevel=2,
            )

    def shards(self, memory: BucketMemory) -> list[str]:
        found = memory.plans.get(self._shard_plan)
        return [] if found is None else [found]

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        check_dense(self, bucket)
        group = self.group(bucket)
        memory = self.memory(bucket)
        self._check_place_of_shard(memory, group)
        return compressed_all_reduce(
            bucket.sources(),
            self.codec,
            scale=average_scale(group),
            out=result_tensor(bucket, memory),
            error=memory.tensors.get("error"),
            error_decay=memory.error_decay,
            shard_error=memory.tensors.get(memory.plans.get(self._shard_plan, "")),
            rounding=rounding_of(self.codec, self.seed, memory),
            buffers=memory.buffers,
            meter=memory.meter,
            group=group,
        )

    def check_shards(self) -> None:
        if self.codec.exchange == "all_gather":
            raise TypeError(
                f"{self}: needs the gradients of all ranks in one place, but a rank has only its "
                "shards of sharded parameters; shard over a mesh of two dimensions, so that it "
                "averages across replicas, or use another codec"
            )

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        self.check_shards()
        check_dense(self, bucket)
        group = self.group(bucket)
        memory = self.memory(bucket)
        rounding = rounding_of(self.codec, self.seed, memory)
        return compressed_reduce_scatter(
            bucket.sources(),
            self.codec,
            sizes=[bucket.shard.numel()] * group.size(),
            scale=bucket.scale,
            out=bucket.shard,
            error=memory.tensors.get("error"),
            error_decay=memory.error_decay,
            rounding=None if rounding is None else rounding[0],  # nothing is encoded again
            buffers=memory.buffers,
            meter=memory.meter,
            group=group,
        )

    def __repr__(self) -> str:
        text = repr(self.codec)
        if type(self.codec).__name__ not in CODECS:
            seed = f", seed={self.seed}" if self.seed else ""
            return f"compressed({text}{seed})"
        if self.seed:
            comma = "" if text.endswith("()") else ", "
            text = f"{text[:-1]}{comma}seed={self.seed})"
        return text


def traits_of_codec(codec: Codec) -> HookTraits:
    """The traits of a hook that averages through a codec."""
    return HookTraits(
        is_lossy=True,
        takes_error=codec.takes_error,
        has_stages=codec.exchange == "all_to_all",
    )


def no_codec(value: object) -> str:
    """What errors name in place of a codec: its type, and what to give instead.

    Args:
        value: what was given.
    """
    instead = "see torch_commhook.codecs"
    if isinstance(value, compressed):
        instead = f"a hook is not a codec; use codecs.{value.codec!r}"
    elif isinstance(value, type) and issubclass(value, Codec):
        instead = f"it is a class of codecs; call it: {value.__name__}(...)"
    elif (made_by := call_of_maker(value)) is not None:
        instead = f"it makes a hook; use codecs.{made_by}"
    return f"{type(value).__qualname__}; {instead}"


def rounding_of(codec: Codec, seed: int, memory: BucketMemory) -> Tensor | None:
    """The seed tensor of a codec's random numbers in this bucket and step, or None."""
    error = memory.tensors.get("error")
    if not (
        codec.is_random
        or codec.rounds_error_at_random(error)
        or decays_at_random(error, memory.error_decay)
    ):
        return None
    return memory.rounding_seeds(seed, alike=codec.exchange == "all_reduce")


_DOC = """Average gradients through the codec :class:`torch_commhook.codecs.{name}`.

Args:
{settings}    seed, process_group: as :class:`compressed`.

Example:
    >>> found = simulate(hooks.{name}(), [[torch.ones(4096)], [torch.ones(4096)]])
    >>> found.wire_bytes < 16384  # which allreduce() sends
    True
"""


def _documented_settings(codec: type[Codec]) -> str:
    """The arguments in a codec's docstring, as written there; empty if it has none."""
    _, _, arguments = (inspect.getdoc(codec) or "").partition("\nArgs:\n")
    lines = itertools.takewhile(lambda line: line.startswith(" "), arguments.splitlines())
    return "".join(f"{line}\n" for line in lines)


def hook_of_codec(codec: type[Codec]) -> Callable[..., compressed]:
    """Return a function that makes a codec's hook from the codec's settings."""

    def make(
        *args: Any, seed: int = 0, process_group: dist.ProcessGroup | None = None, **settings: Any
    ) -> compressed:
        return compressed(codec(*args, **settings), seed=seed, process_group=process_group)

    make.__name__ = make.__qualname__ = codec.__name__
    make.__doc__ = _DOC.format(name=codec.__name__, settings=_documented_settings(codec))
    own = [
        inspect.Parameter("seed", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=int),
        inspect.Parameter("process_group", inspect.Parameter.KEYWORD_ONLY, default=None),
    ]
    settings = list(inspect.signature(codec).parameters.values())
    rest = [one for one in settings if one.kind is inspect.Parameter.VAR_KEYWORD]
    settings = [one for one in settings if one not in rest]
    make.__signature__ = inspect.Signature([*settings, *own, *rest])  # type: ignore[attr-defined]
    needs = any(one.default is one.empty for one in settings if one.kind is not one.VAR_POSITIONAL)
    make.call = f"{codec.__name__}({'...' if needs else ''})"  # type: ignore[attr-defined]
    return make


def call_of_maker(value: object) -> str | None:
    """The text of a call of a function from :func:`hook_of_codec`; None for other values."""
    is_own = getattr(value, "__module__", None) == __name__
    call: str | None = getattr(value, "call", None) if is_own else None
    return call
