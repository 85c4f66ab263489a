"""A process group that sends large tensors in fewer bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from torch_commhook import _C
from torch_commhook.codecs.base import Codec, mix_seeds
from torch_commhook.collectives.compressed import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from torch_commhook.collectives.futures import (
    SecondStages,
    StreamNumber,
    issuing_later,
    on_side_stream,
    then,
)
from torch_commhook.collectives.plain import (
    LEAST_RANKS,
    all_to_all,
    padded_numel,
    sum_rows,
    wide_all_reduce,
)
from torch_commhook.metrics import WireMeter, counting, note_collective, tensor_bytes
from torch_commhook.native.bucket_ops import BUCKET_DTYPES, flatten, unflatten_into
from torch_commhook.process_group.operations import ALL_GATHERS, REDUCE_SCATTERS, describe, mapped
from torch_commhook.process_group.work import FollowedWork
from torch_commhook.process_group.wrapper import BINDINGS, WrapperProcessGroup
from torch_commhook.wording import check_type

#: The dtypes that a codec of 16 bits rounds.
_ROUNDED = (torch.float32, torch.float64)

#: Kinds of operations; each draws different random numbers.
_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


class CompressedProcessGroup(WrapperProcessGroup):
    """A process group around another one that compresses large sums and means.

    It compresses all-reduces and reduce-scatters of floating-point tensors with ``SUM`` or ``AVG``.
    So ``fully_shard``, DTensor and DDP send compressed gradients without a hook. The group also
    compresses sums that are no gradients; choose ``min_numel`` above their size. It does not
    compress other reductions and dtypes, small, sparse and non-contiguous tensors, and operations
    between ``start_coalescing`` and ``end_coalescing``.

    **A codec of 16 bits** (``torch.bfloat16``, ``torch.float16``) compresses float32 and float64.
    Each value is divided by the number of ranks (in float32) and rounded; the result is scaled and
    cast back in one pass. Because of the division the sum stays in range if the mean does (float16:
    up to 65504).

    Among fewer than 8 ranks the parent runs the same operation, and sums in ``codec``. With 8 or
    more ranks the error does not grow with their number. A reduce-scatter then is an all-to-all of
    the parent; each rank sums the values in float32, directly into the output. An all-reduce adds
    one rounding of the sum, and an all-gather. If the parent is a Gloo group that
    ``torch.distributed`` knows, CPU tensors use the library's own transport. Over other parents,
    and with a timeout of its own, this all-reduce returns after its all-to-all has ended; with CUDA
    tensors over NCCL it returns at once.

    **A codec of** :mod:`torch_commhook.codecs` compresses float64, float32, bfloat16 and float16,
    and sums in float32. An all-reduce is a
    :func:`~torch_commhook.collectives.compressed_all_reduce`, a reduce-scatter a
    :func:`~torch_commhook.collectives.compressed_reduce_scatter`, on the parent. An all-reduce
    gives all ranks the same bits. There is no error feedback: the group does not remember errors.
    Tensors are not compressed if this saves no bytes, and so never on one rank. ``PREMUL_SUM`` is
    compressed too; for small CPU tensors it becomes a sum of multiplied tensors, since Gloo has
    none.

    ``gathers`` also compresses all-gathers of floating-point tensors, such as those of parameters
    in ``fully_shard``. All ranks get the same bits, and a rank's own tensor is compressed too. This
    includes ``DTensor.full_tensor()``, and checkpoints that use it.

    Args:
        parent: the process group that does the work.
        codec: the codec of sums: ``torch.bfloat16``, ``torch.float16`` or a
            :class:`torch_commhook.codecs.Codec`. The same on all ranks.
        min_numel: operations on fewer elements are not compressed. The elements of all ranks count:
            those of a reduce-scatter's inputs and of an all-gather's outputs.
        seed: the seed of random numbers, for codecs that need them. The same on all ranks. The
            numbers depend on seed, rank, kind of operation, and the number of compressed operations
            of that kind.
        gathers: the codec of all-gathers, the same on all ranks. None does not compress them.

    Attributes:
        compressed: the number of compressed operations.
        bytes_sent: the bytes that this rank has sent for them. ``HookHandle.stats()`` instead
            counts the uncompressed bytes that a hook gives to the group.

    Raises:
        TypeError: ``parent`` is not a process group; ``codec`` is not a codec; ``seed`` is
            not an int.
        ValueError: ``min_numel`` is negative.

    Example:
        >>> def reduce(rank):
        ...     group = process_group.CompressedProcessGroup(dist.group.WORLD, torch.bfloat16)
        ...     values = torch.full((8192,), 1.0 + rank)
        ...     group.allreduce([values]).wait()
        ...     return values[:2], group.compressed, group.bytes_sent
        >>> run_ranks(reduce, 2)[0]
        (tensor([3., 3.]), 1, 16384)
    """

    def __init__(
        self,
        parent: dist.ProcessGroup,
        codec: torch.dtype | Codec = torch.bfloat16,
        *,
        min_numel: int = 4096,
        seed: int = 0,
        gathers: Codec | None = None,
    ) -> None:
        super().__init__(parent)
        name = type(self).__name__
        # Not by `in`, which would compare objects of another type.
        is_dtype = codec is torch.bfloat16 or codec is torch.float16
        if not is_dtype and not isinstance(codec, Codec):
            inside = getattr(codec, "codec", None)
            is_hook = isinstance(inside, Codec)
            raise TypeError(
                f"{name}: codec must be torch.bfloat16, torch.float16 or a codec of "
                f"torch_commhook.codecs, got "
                + (f"a hook; use codecs.{inside!r}" if is_hook else repr(codec))
            )
        if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
            raise ValueError(f"{name}: min_numel must be an int of at least 0, got {min_numel!r}")
        check_type(f"{name}: seed", seed, "an int", int)
        if gathers is not None and not isinstance(gathers, Codec):
            raise TypeError(
                f"{name}: gathers must be a codec of torch_commhook.codecs or None, got {gathers!r}"
            )
        self.codec = codec
        self.min_numel = min_numel
        self.seed = seed
        self.gathers = gathers
        self.compressed = 0
        self.bytes_sent = 0
        self._is_coalescing = False
        self._stream = StreamNumber()
        self._steps: dict[str, Iterator[int]] = {kind: itertools.count() for kind in _KINDS}

    def _settings_text(self) -> str:
        codec = str(self.codec).removeprefix("torch.")
        return codec if self.gathers is None else f"{codec}, gathers={self.gathers}"

    def start_coalescing(self, device: Any) -> Any:
        """Let the parent combine the following operations, uncompressed.

        The caller waits for the parent's Work of all of them, so nothing could be decoded after it.
        """
        result = getattr(self.parent, BINDINGS["start_coalescing"])(device)
        self._is_coalescing = True
        return result

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        if operation == "end_coalescing":
            self._is_coalescing = False
        takes = operation in SUMS or (operation in GATHERS and self.gathers is not None)
        if keywords or self._is_coalescing or not takes:
            return super().run_collective(operation, arguments, keywords)
        arguments = self.change_arguments(operation, arguments)
        start = self._prepare(operation, arguments)
        if start is None:
            call = getattr(self.parent, BINDINGS[operation])
            if operation in SUMS:
                arguments = without_premultiplier(operation, arguments)
            return self._issue(operation, arguments, lambda: call(*arguments))
        self.compressed += 1
        # A hook that issued this has counted it already.
        meter = WireMeter()
        with counting(meter):
            work = self._issue(operation, arguments, start)
        self.bytes_sent += meter.bytes_sent
        return work

    def _prepare(self, operation: str, arguments: Sequence[Any]) -> Callable[[], Any] | None:
        """A function that starts an operation and returns its Work; None without compression."""
        options = options_of(operation, arguments)
        if options is None:
            return None  # the parent checks it
        if operation in GATHERS:
            return self._prepare_gather(operation, arguments[0], arguments[1], timeout_of(options))
        reduction = reduction_of(options.reduceOp, self.size())
        if reduction is None:
            return None
        if not isinstance(self.codec, Codec) and reduction.premultiplier is not None:
            return None
        if operation.startswith("allreduce"):
            return self._prepare_all_reduce(operation, arguments[0], options, reduction)
        outputs, inputs = arguments[:2]
        return self._prepare_reduce_scatter(operation, outputs, inputs, options, reduction)

    # ---- sums ------------------------------------------------------------------------------------

    def _prepare_all_reduce(
        self, operation: str, tensors: Any, options: Any, reduction: Reduction
    ) -> Callable[[], Any] | None:
        codec, ranks = self.codec, self.size()
        if not is_large(tensors, self.min_numel, self._summed_dtypes):
            return None
        if not isinstance(codec, Codec):
            return lambda: self._sum_in_16_bits(codec, operation, tensors, options)
        numel = sum(tensor.numel() for tensor in tensors)
        if all_reduce_bytes(codec, numel, ranks) >= 2 * bytes_of(tensors) * (ranks - 1) / ranks:
            return None

        def start() -> Any:
            future = compressed_all_reduce(
                self._terms(tensors, reduction),
                codec,
                scale=reduction.scale,
                out=list(tensors),
                rounding=self._rounding("all_reduce", codec, tensors[0].device, rows=2),
                group=self.parent,
                timeout=timeout_of(options),
            )
            return work_of(future, tensors)

        return start

    def _prepare_reduce_scatter(
        self, operation: str, outputs: Any, inputs: Any, options: Any, reduction: Reduction
    ) -> Callable[[], Any] | None:
        codec, ranks = self.codec, self.size()
        if operation == "reduce_scatter_single":
            outputs, inputs = [outputs], [inputs]
        in_lists = operation == "reduce_scatter"
        flat = flattened(inputs, in_lists=in_lists)
        if not is_large(flat, self.min_numel, self._summed_dtypes):
            return None
        if not is_large(outputs, 0, self._summed_dtypes) or outputs[0].device != flat[0].device:
            return None
        parts = parts_of(inputs, outputs, ranks, self.rank(), in_lists=in_lists)
        if parts is None:
            return None
        if not isinstance(codec, Codec):
            return lambda: self._scatter_in_16_bits(
                codec, operation, outputs, inputs, parts, options
            )
        sizes = [sum(tensor.numel() for tensor in part) for part in parts]
        nbytes = sum(part.nbytes for part in codec.chunks(sizes))
        if ranks == 1 or nbytes >= bytes_of(flat):
            return None
        # The ranks of one output are in order.
        sources = flat if len(outputs) == 1 else [tensor for part in parts for tensor in part]

        def start() -> Any:
            future = compressed_reduce_scatter(
                self._terms(sources, reduction),
                codec,
                sizes=sizes,
                scale=reduction.scale,
                out=list(outputs),
                rounding=self._rounding("reduce_scatter", codec, flat[0].device),
                group=self.parent,
                timeout=timeout_of(options),
            )
            return work_of(future, outputs)

        return start

    @property
    def _summed_dtypes(self) -> Sequence[torch.dtype]:
        return BUCKET_DTYPES if isinstance(self.codec, Codec) else _ROUNDED

    @staticmethod
    def _terms(tensors: Sequence[Tensor], reduction: Reduction) -> list[Tensor]:
        if reduction.premultiplier is None:
            return list(tensors)
        # Only this rank's own terms: other ranks may have other factors.
        return [
            times(each, reduction.premultiplier, torch.promote_types(each.dtype, torch.float32))
            for each in tensors
        ]

    # ---- sums in 16 bits -------------------------------------------------------------------------
    #
    # Terms are divided by the number of ranks before they are rounded. A Work references no group,
    # since a thread of the group may release the Work last.

    def _sum_in_16_bits(
        self, dtype: torch.dtype, operation: str, tensors: Sequence[Tensor], options: Any
    ) -> Any:
        ranks, factor = self.size(), self._factor(options)
        numel = sum(tensor.numel() for tensor in tensors)
        is_wide = ranks >= LEAST_RANKS and numel > 0
        wire = tensors[0].new_empty(padded_numel(numel, ranks) if is_wide else numel, dtype=dtype)
        values = self._rounded(tensors, out=wire[:numel])

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                unflatten_into(values, tensors, scale=factor)
            return list(tensors)

        if not is_wide:
            return FollowedWork(self._call(operation, [values], as_sum(options)), write_back)
        wire[numel:].zero_()
        segments = torch.empty_like(wire)
        # The caller may wait at once: the second collective must not wait for a hook's next bucket.
        second = SecondStages()
        with on_side_stream(wire.device, self._stream, [wire, segments]), issuing_later(second):
            timeout = timeout_of(options)
            future = wide_all_reduce(wire, numel, segments, group=self.parent, timeout=timeout)
        second.issue()
        return FollowedWork(_C.as_work(future), write_back)

    def _scatter_in_16_bits(
        self,
        dtype: torch.dtype,
        operation: str,
        outputs: Sequence[Tensor],
        inputs: Any,
        parts: list[list[Tensor]],
        options: Any,
    ) -> Any:
        ranks, factor = self.size(), self._factor(options)
        sizes = [sum(tensor.numel() for tensor in part) for part in parts]
        if ranks < LEAST_RANKS or not any(sizes):
            results = [torch.empty_like(output, dtype=dtype) for output in outputs]
            sent = mapped(inputs, lambda x: self._rounded([x], dtype=dtype).view_as(x))
            is_single = operation == "reduce_scatter_single"
            given = (results[0], sent[0]) if is_single else (results, sent)
            work = self._call(operation, *given, as_sum(options))

            def write_results() -> list[Tensor]:
                with torch.no_grad():
                    for result, output in zip(results, outputs, strict=True):
                        unflatten_into(result, [output], scale=factor)
                return list(outputs)

            return FollowedWork(work, write_results)
        own = sizes[self.rank()]
        wire = self._rounded([tensor for part in parts for tensor in part], dtype=dtype)
        chunks = wire.new_empty(ranks, own)
        received = all_to_all(
            wire,
            input_split_sizes=sizes,
            output_split_sizes=[own] * ranks,
            out=chunks.view(-1),
            group=self.parent,
            timeout=timeout_of(options),
        )

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                if len(outputs) == 1:
                    sum_rows(chunks, outputs[0].detach().view(-1)).mul_(factor)
                else:
                    sums = sum_rows(chunks, chunks.new_empty(own, dtype=torch.float32))
                    unflatten_into(sums, outputs, scale=factor)
            return list(outputs)

        return FollowedWork(_C.as_work(received), write_back)

    def _rounded(self, tensors: Sequence[Tensor], **to: Any) -> Tensor:
        with torch.no_grad():
            return flatten(tensors, scale=1.0 / self.size(), **to)

    def _factor(self, options: Any) -> float:
        """The factor of a sum of terms that were divided by the number of ranks."""
        return 1.0 if options.reduceOp == dist.ReduceOp.AVG else float(self.size())

    def _call(self, operation: str, *arguments: Any) -> Any:
        """The Work of the parent's operation."""
        call = describe(operation, arguments, {})
        note_collective(call.bytes_sent(self.rank(), self.size()))
        return _C.as_work(getattr(self.parent, BINDINGS[operation])(*arguments))

    # ---- all-gathers -----------------------------------------------------------------------------

    def _prepare_gather(
        self, operation: str, outputs: Any, inputs: Any, timeout: timedelta | None
    ) -> Callable[[], Any] | None:
        codec, ranks, rank = self.gathers, self.size(), self.rank()
        assert codec is not None
        if operation == "all_gather_single":
            outputs, inputs = [outputs], [inputs]
        if not is_large(inputs, 0, BUCKET_DTYPES):
            return None
        in_lists = operation.startswith("allgather")
        flat = flattened(outputs, in_lists=in_lists)
        if not is_large(flat, self.min_numel, BUCKET_DTYPES) or flat[0].device != inputs[0].device:
            return None
        if operation == "allgather_coalesced":  # from a list for each rank to one for each input
            if any(len(some) != len(inputs) for some in outputs):
                return None
            outputs = list(zip(*outputs, strict=True))
        parts = parts_of(outputs, inputs, ranks, rank, in_lists=in_lists)
        if parts is None:
            return None
        places = [tensor for part in parts for tensor in part]
        dtypes = [each.dtype for each in inputs]
        if any([each.dtype for each in part] != dtypes for part in parts):
            return None
        sizes = [sum(tensor.numel() for tensor in part) for part in parts]
        longest = max(part.nbytes for part in codec.chunks(sizes))
        if ranks == 1 or longest * ranks >= bytes_of(places):
            return None

        def start() -> Any:
            future = compressed_all_gather(
                list(inputs),
                codec,
                sizes=sizes,
                out=[outputs[0].detach().view(-1)] if operation == "all_gather_single" else places,
                rounding=self._rounding("all_gather", codec, inputs[0].device),
                group=self.parent,
                timeout=timeout,
            )
            single = operation.startswith("all_gather_single")
            return work_of(future, outputs if single else places)

        return start

    # ---- random numbers --------------------------------------------------------------------------

    def _rounding(
        self, kind: str, codec: Codec, device: torch.device, *, rows: int = 1
    ) -> Tensor | None:
        """Seed and step of the next operation of a kind; two rows for one that encodes twice."""
        if not codec.is_random:
            return None
        step = next(self._steps[kind])
        number, rank = _KINDS.index(kind), self.rank()
        alike = codec.exchange == "all_reduce"
        own = mix_seeds(self.seed, number, 0 if alike else rank + 1)
        seeds = [[own, step], [mix_seeds(self.seed, number, -1 - rank), step]]
        rounding = torch.tensor(seeds if rows == 2 else seeds[0], dtype=torch.int64, device="cpu")
        if device.type == "cuda":  # without waiting for the device
            return rounding.pin_memory().to(device, non_blocking=True)
        return rounding.to(device)


# ---- the arguments of sums and all-gathers -------------------------------------------------------

#: Reductions that may be compressed, with the class of their options.
SUMS: dict[str, Any] = {
    "allreduce": dist.AllreduceOptions,
    "allreduce_coalesced": dist.AllreduceCoalescedOptions,
    **dict.fromkeys(REDUCE_SCATTERS, dist.ReduceScatterOptions),
}
#: The same for all-gathers.
GATHERS: dict[str, Any] = dict.fromkeys(ALL_GATHERS, AllgatherOptions)


def options_of(operation: str, arguments: Sequence[Any]) -> Any:
    """The options of a call; None if its arguments do not have PyTorch's usual form."""
    make_options = SUMS.get(operation) or GATHERS[operation]
    tensors = 1 if operation.startswith("allreduce") else 2
    if len(arguments) == tensors:
        return make_options()
    fits = len(arguments) == tensors + 1 and isinstance(arguments[tensors], make_options)
    return arguments[tensors] if fits else None


def timeout_of(options: Any) -> timedelta | None:
    """The timeout of a call; None for the group's."""
    timeout: timedelta = options.timeout
    return None if timeout == type(options)().timeout else timeout


def is_large(tensors: Any, at_least: int, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether these are dense, contiguous tensors of one device with enough elements in total."""
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return False
    for tensor in tensors:
        if (
            not isinstance(tensor, Tensor)
            or tensor.layout is not torch.strided
            or tensor.dtype not in dtypes
            or not tensor.is_contiguous()
            or tensor.device != tensors[0].device
        ):
            return False
    numel: int = sum(tensor.numel() for tensor in tensors)
    return numel >= at_least


def as_sum(options: Any) -> Any:
    """The same options for a sum."""
    changed = type(options)()
    for name in ("timeout", "asyncOp"):
        if hasattr(options, name):
            setattr(changed, name, getattr(options, name))
    changed.reduceOp = dist.ReduceOp.SUM
    return changed


def parts_of(
    many: Any, few: Sequence[Tensor], ranks: int, rank: int, *, in_lists: bool
) -> list[list[Tensor]] | None:
    """For each rank, its tensors among those of all ranks; None if they do not fit this rank's.

    Args:
        many: for each of ``few``, a tensor of all ranks' shares or a list of these.
        few: this rank's tensors.
        ranks: the number of ranks.
        rank: this rank.
        in_lists: whether ``many`` are lists.
    """
    if len(many) != len(few):
        return None
    if not in_lists:
        if any(each.numel() % ranks for each in many):
            return None
        many = [each.detach().view(ranks, each.numel() // ranks).unbind() for each in many]
    if any(len(some) != ranks for some in many):
        return None
    parts = [list(of_rank) for of_rank in zip(*many, strict=True)]
    fits = [each.numel() for each in parts[rank]] == [each.numel() for each in few]
    return parts if fits else None


def flattened(values: Any, *, in_lists: bool) -> list[Any]:
    """The tensors of lists, or of one list; none if they do not have this form."""
    lists = values if in_lists else [values]
    if not isinstance(lists, (list, tuple)):
        return []
    if not all(isinstance(some, (list, tuple)) for some in lists):
        return []
    return [each for some in lists for each in some]


class Reduction(NamedTuple):
    """A sum, with the factors of its terms and of the sum.

    Attributes:
        scale: the factor of the sum.
        premultiplier: the factor of this rank's terms: a number or a tensor of one element; None
            for 1.
    """

    scale: float
    premultiplier: Any


def reduction_of(op: Any, ranks: int) -> Reduction | None:
    """The sum that an operation computes; None if it computes none."""
    # Not by `in`, which would compare members of another type.
    if op == dist.ReduceOp.SUM:
        return Reduction(1.0, None)
    if op == dist.ReduceOp.AVG:
        return Reduction(1.0 / ranks, None)
    if op == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            return Reduction(1.0, factor)
    return None


def times(tensor: Tensor, factor: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(factor, Tensor):
        factor = factor.detach().reshape(())
    return tensor.detach().to(dtype, copy=True).mul_(factor)


def without_premultiplier(operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace a reduction of CPU tensors with a factor by a sum of multiplied terms.

    Gloo does not support ``PREMUL_SUM``, which FSDP's divide factor uses.

    Args:
        operation: one of ``SUMS``.
        arguments: the method's arguments. An all-reduce's tensors are multiplied in place.

    Returns:
        The arguments of the sum; any other call's unchanged arguments.
    """
    options = options_of(operation, arguments)
    reduction = None if options is None else reduction_of(options.reduceOp, 1)
    if reduction is None or reduction.premultiplier is None:
        return arguments
    factor = reduction.premultiplier
    *outputs, inputs = arguments[: 1 if operation.startswith("allreduce") else 2]
    terms = _listed(inputs)
    if not all(
        isinstance(each, Tensor)
        and each.layout is torch.strided
        and each.is_floating_point()
        and each.device.type == "cpu"
        for each in terms
    ):
        return arguments
    if not outputs:
        for each in terms:
            each.detach().copy_(times(each, factor, each.dtype))
        return inputs, as_sum(options)
    multiplied = mapped(inputs, lambda each: times(each, factor, each.dtype))
    return *outputs, multiplied, as_sum(options)


def _listed(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [each for value in values for each in _listed(value)]
    return [values]


def all_reduce_bytes(codec: Codec, numel: int, ranks: int) -> float:
    """The number of bytes that each rank sends for a sum, on average."""
    if codec.exchange == "all_to_all":
        sizes = [segment.nbytes for segment in codec.segments(numel, ranks)]
        return (sum(sizes) / ranks + max(sizes)) * (ranks - 1)
    nbytes = codec.nbytes(numel)
    if codec.exchange == "all_gather":
        return nbytes * (ranks - 1)
    return 2 * nbytes * (ranks - 1) / ranks


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors)


def work_of(future: torch.futures.Future[Tensor], tensors: Sequence[Tensor]) -> Any:
    """A collective's Work, with a Future that holds a list of tensors."""
    value: Any = list(tensors)

    def finish(done: torch.futures.Future[Tensor]) -> Any:
        done.value()  # raises the collective's error
        return value

    return _C.as_work(then(future, finish, value[0].device))
