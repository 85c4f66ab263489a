"""Averages through a codec; a choice of bits for each bucket; errors for what is no hook."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.base import CODECS, Codec, decays_at_random
from torch_commhook.codecs.block_codec import blockwise
from torch_commhook.collectives.compressed import (
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from torch_commhook.collectives.compressed_call import segment_range
from torch_commhook.collectives.gloo_groups import check_place, exchanges, group_rank, resolve_group
from torch_commhook.collectives.plain import all_reduce
from torch_commhook.hooks.base import Hook, HookTraits, average_scale, check_dense, result_tensor
from torch_commhook.memory.bucket_memory import BucketMemory, ShardedBucket
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.watches import cannot_be_captured
from torch_commhook.metrics import ring_all_reduce_bytes
from torch_commhook.wording import check_type

# ---- averages through a codec --------------------------------------------------------------------


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

    _lets_stages_wait = True

    def __init__(
        self, codec: Codec, *, seed: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        if not isinstance(codec, Codec):
            raise TypeError(f"compressed: codec must be a Codec, got {no_codec(codec)}")
        check_type("compressed: seed", seed, "an int", int)
        self.codec = codec
        self.traits = traits_of_codec(codec)
        self.seed = seed
        # Different codecs of a user may print alike.
        self._segment_plan = f"segment of {codec!r} {id(codec)}"

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
                span = segment_range(codec, memory.numel, rank=rank, world_size=ranks)
                segment = memory.segment("shard_error", *span, factor=ranks)
                memory.plans[self._segment_plan] = segment
        rounding_of(codec, self.seed, memory)

    def _place(self, memory: BucketMemory) -> tuple[int, int]:
        """This rank's number among the ranks of the average, and their number."""
        if self.process_group is None:
            return memory.rank, memory.world_size
        own = resolve_group(self.process_group)
        return group_rank(own), own.size()

    def _check_place_of_segment(self, memory: BucketMemory, group: dist.ProcessGroup) -> None:
        """Refuse the memory of a segment if the group's ranks have changed since it was made.

        Raises:
            RuntimeError: the group has had other ranks since the segment was chosen.
        """
        if self.process_group is not None or type(group) is dist.ProcessGroup:
            return
        if not self.segments(memory):
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

    def segments(self, memory: BucketMemory) -> list[str]:
        found = memory.plans.get(self._segment_plan)
        return [] if found is None else [found]

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        check_dense(self, bucket)
        group = self.group(bucket)
        memory = self.memory(bucket)
        self._check_place_of_segment(memory, group)
        return compressed_all_reduce(
            bucket.sources(),
            self.codec,
            scale=average_scale(group),
            out=result_tensor(bucket, memory),
            error=memory.tensors.get("error"),
            error_decay=memory.error_decay,
            sum_error=memory.tensors.get(memory.plans.get(self._segment_plan, "")),
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
    """What errors name in place of a codec: its type, and what to give instead."""
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


# ---- errors for values that are not hooks, with the expression to use instead --------------------


def instead_of(value: object) -> str | None:
    """A sentence that names the hook to use instead of a value that is not a hook, if any."""
    cls = value if isinstance(value, type) else type(value)
    if issubclass(cls, Codec):
        call = f"{cls.__name__}(...)" if cls is value else repr(value)
        has_hook = CODECS.get(cls.__name__) is cls
        use = f"hooks.{call}" if has_hook else f"hooks.compressed({call})"
        return f"a codec is no hook; use {use}"
    made_by = call_of_maker(value)
    if made_by is not None:
        name = made_by.partition("(")[0]
        return f"hooks.{name} makes a hook; call it: hooks.{made_by}"
    if isinstance(value, type) and issubclass(value, Hook):
        return f"{value.__name__} is a class of hooks; call it: {value.__name__}(...)"
    if isinstance(value, str):
        return "torch_commhook.parse_hook reads a hook that is written as text"
    return None


def check_is_hook(value: object, op: str) -> None:
    """Refuse a codec, and a function of the library that makes a hook.

    The TypeError names ``op``, the function or class that got it, and the hook to use instead.
    """
    if isinstance(value, str) or (isinstance(value, type) and issubclass(value, Hook)):
        return  # check_hook refuses these
    instead = instead_of(value)
    if instead is not None:
        raise TypeError(f"{op}: {instead}")


def no_hook(value: object) -> str:
    """The type of a value that is not a hook, and the hook to use instead, for errors."""
    instead = instead_of(value)
    more = "" if instead is None else f"; {instead}"
    return f"{type(value).__qualname__}{more}"


def check_inner_hook(where: str, hook: object, must: str = "must be") -> None:
    """Refuse a value that cannot be a hook inside of another one.

    Args:
        where: names the other hook and its argument.
        must: the argument's relation to the hook.

    Raises:
        TypeError: it is not a hook of the library.
        ValueError: it is yet to choose in its first steps which hook it is.
    """
    if not isinstance(hook, Hook):
        raise TypeError(f"{where} {must} one of torch_commhook.hooks, got {no_hook(hook)}")
    if hook.chooses:
        raise ValueError(
            f"{where} must be known before the first step, and {hook} chooses after some steps; "
            "attach auto() by itself, with such hooks among the hooks= that it chooses from"
        )


# ---- a choice of bits for each bucket, under a budget of bytes -----------------------------------


_NAME = "adaptive_bits"


class adaptive(Hook):  # noqa: N801 (a hook is written as it is called)
    """Average gradients in 4 or 8 bits, chosen for each bucket, with error feedback.

    Every ``every`` steps the ranks sum each bucket's errors and choose again. Buckets get 8 bits in
    the order of the error that they save per additional byte, while a rank sends no more than
    ``budget`` in a step. A choice sends one number per bucket and takes one pass over the error
    memory. A compiled backward recompiles when a bucket's bits change.

    Args:
        budget: the number of bytes that each rank may send in a step.
        every: the number of steps between two choices.
        block_size: as for :class:`torch_commhook.codecs.blockwise`.

    Raises:
        TypeError: ``budget`` or ``every`` is not an int.
        ValueError: one of them is not positive, or the codec refuses the block size.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(4096, 1, bias=False)
        ...     handle = attach(model, hooks.adaptive(budget=3000))
        ...     model(torch.ones(1, 4096)).sum().backward()
        ...     return handle.stats().bytes_sent_last_step
        >>> run_ranks(train, 2)[0] <= 3000
        True
    """

    _lets_stages_wait = True
    traits = HookTraits(is_lossy=True, has_stages=True, keeps_error=True, settles_buckets=True)

    def __init__(self, budget: int, *, every: int = 100, block_size: int = 256) -> None:
        super().__init__()
        given: tuple[tuple[str, Any], ...] = (("budget", budget), ("every", every))
        for name, value in given:
            if not isinstance(value, int) or isinstance(value, bool):
                whole = isinstance(value, float) and value.is_integer()
                raise TypeError(
                    f"adaptive: {name} must be an int, got {type(value).__qualname__}"
                    + (f"; write {int(value)}" if whole else "")
                )
            if value < 1:
                raise ValueError(f"adaptive: {name} must be at least 1, got {value}")
        self.budget = budget
        self.every = every
        self.block_size = block_size
        self._hooks = {bits: compressed(blockwise(bits, block_size)) for bits in (4, 8)}

    def prepare(self, memory: BucketMemory) -> None:
        memory.with_error = True
        for hook in self._hooks.values():  # both have the same segments
            hook.prepare(memory)
        memory.declare_choice(_NAME, 4, among=(4, 8))

    def check_capture(self, memory: BucketMemory) -> None:
        raise cannot_be_captured(str(self), "the host chooses bits by the number of the step")

    def segments(self, memory: BucketMemory) -> list[str]:
        return self._hooks[8].segments(memory)  # the other hook has the same

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return self._hooks[self.memory(bucket).choices[_NAME]].average(bucket)

    def step_counted(self, memory: HookMemory) -> None:
        # After the first step too: before it, the errors are unknown.
        if memory.steps != 1 and memory.steps % self.every != 0:
            return
        buckets = memory.bucket_memories()
        lost = torch.tensor(
            [self._lost(bucket) for bucket in buckets], dtype=torch.float64, device="cpu"
        )
        if memory.world_size > 1:
            lost = all_reduce(lost.to(_wire_device(memory)), group=memory.group).wait().cpu()
        self._settle(buckets, lost.tolist(), memory)

    def _settle(
        self, buckets: Sequence[BucketMemory], lost: list[float], memory: HookMemory
    ) -> None:
        sizes = [
            {bits: self._bytes(bits, bucket.numel, memory) for bits in (4, 8)} for bucket in buckets
        ]
        left = self.budget - sum(size[4] for size in sizes)
        if left < 0:
            warnings.warn(
                f"{self}: with 4 bits for each value a step sends {self.budget - left} bytes "
                "already",
                stacklevel=2,
            )
        gains = []
        for number, (bucket, square, size) in enumerate(zip(buckets, lost, sizes, strict=True)):
            # A step of 8 bits is 7 / 127 as wide as one of 4 bits, and so is the error.
            at_four = square * ((127 / 7) ** 2 if bucket.choices[_NAME] == 8 else 1.0)
            more = max(size[8] - size[4], 1)
            gains.append((-(at_four - at_four * (7 / 127) ** 2) / more, number))
        for _, number in sorted(gains):
            more = sizes[number][8] - sizes[number][4]
            bits = 8 if more <= left else 4
            left -= more if bits == 8 else 0
            if buckets[number].choices[_NAME] != bits:
                buckets[number].set_choice(_NAME, bits)

    def _lost(self, memory: BucketMemory) -> float:
        """The square of this rank's unsent error; 0 if it is not finite."""
        square = sum(
            torch.linalg.vector_norm(memory.tensors[name], dtype=torch.float64).item() ** 2
            for name in ("error", *self.segments(memory))
        )
        return square if square < float("inf") else 0.0

    def _bytes(self, bits: int, numel: int, memory: HookMemory) -> int:
        """The bytes of a bucket on the rank that sends most."""
        ranks = memory.world_size
        sizes = [each.nbytes for each in blockwise(bits, self.block_size).segments(numel, ranks)]
        group = memory.group
        if group is not None and exchanges(group, _wire_device(memory)):
            return max(sum(sizes) + (ranks - 2) * own for own in sizes)
        return sum(sizes) - min(sizes) + (ranks - 1) * max(sizes)

    def __repr__(self) -> str:
        every = "" if self.every == 100 else f", every={self.every}"
        size = "" if self.block_size == 256 else f", block_size={self.block_size}"
        return f"adaptive({self.budget}{every}{size})"


def _wire_device(memory: HookMemory) -> torch.device:
    return memory.bucket_memories()[0].device
