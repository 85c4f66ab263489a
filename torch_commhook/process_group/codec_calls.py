"""Collectives of a process group that use codecs."""

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
from torch_commhook.collectives.compressed import compressed_all_reduce
from torch_commhook.collectives.compressed_chunks import (
    compressed_all_gather,
    compressed_reduce_scatter,
)
from torch_commhook.collectives.futures import StreamNumber, beside, then
from torch_commhook.collectives.gloo_groups import group_rank
from torch_commhook.collectives.plain import (
    LEAST_RANKS,
    all_to_all,
    padded_numel,
    sum_rows,
    wide_all_reduce,
)
from torch_commhook.metrics import note_collective, tensor_bytes
from torch_commhook.native.bucket_ops import BUCKET_DTYPES, flatten, unflatten_into
from torch_commhook.process_group.operations import describe
from torch_commhook.process_group.work import FollowedWork
from torch_commhook.process_group.wrapper import BINDINGS

#: The dtypes that a codec of 16 bits rounds.
_ROUNDED = (torch.float32, torch.float64)

#: Reductions that may be compressed, with the class of their options.
SUMS: dict[str, Any] = {
    "allreduce": dist.AllreduceOptions,
    "allreduce_coalesced": dist.AllreduceCoalescedOptions,
    "reduce_scatter": dist.ReduceScatterOptions,
    "reduce_scatter_single": dist.ReduceScatterOptions,
    "reduce_scatter_single_coalesced": dist.ReduceScatterOptions,
}
#: The same for all-gathers.
GATHERS: dict[str, Any] = dict.fromkeys(
    ("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    AllgatherOptions,
)

#: Kinds of operations; each draws different random numbers.
_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def options_of(operation: str, arguments: Sequence[Any]) -> Any:
    """The options of a call; None if its arguments do not have PyTorch's usual form."""
    make_options = SUMS.get(operation) or GATHERS[operation]
    tensors = 1 if operation.startswith("allreduce") else 2
    if len(arguments) == tensors:
        return make_options()
    fits = len(arguments) == tensors + 1 and isinstance(arguments[tensors], make_options)
    return arguments[tensors] if fits else None


def _timeout_of(options: Any) -> timedelta | None:
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
    outputs: Sequence[Tensor], inputs: Any, ranks: int, rank: int, *, in_lists: bool
) -> list[list[Tensor]] | None:
    """For each rank, the tensors that a reduce-scatter sums for it.

    Args:
        outputs: this rank's outputs.
        inputs: for each output a tensor of all ranks' shares, or a list of these.
        ranks: the number of ranks.
        rank: this rank.
        in_lists: whether the inputs are lists.

    Returns:
        The tensors, or None if the inputs do not fit the outputs.
    """
    if len(inputs) != len(outputs):
        return None
    shares: list[Any] = list(inputs)
    if not in_lists:
        for each, output in zip(inputs, outputs, strict=True):
            if each.numel() != ranks * output.numel():
                return None
        shares = [_rows(each, ranks) for each in inputs]
    for some, output in zip(shares, outputs, strict=True):
        if len(some) != ranks or some[rank].numel() != output.numel():
            return None
    return [list(of_rank) for of_rank in zip(*shares, strict=True)]


def _rows(tensor: Tensor, ranks: int) -> tuple[Tensor, ...]:
    return tensor.detach().view(ranks, -1).unbind()


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


def _times(tensor: Tensor, factor: Any, dtype: torch.dtype) -> Tensor:
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
            each.detach().copy_(_times(each, factor, each.dtype))
        return inputs, as_sum(options)
    multiplied = _mapped(inputs, lambda each: _times(each, factor, each.dtype))
    return *outputs, multiplied, as_sum(options)


def _listed(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [each for value in values for each in _listed(value)]
    return [values]


def _mapped(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(values, (list, tuple)):
        return [_mapped(value, function) for value in values]
    return function(values)


class CodecCalls:
    """Runs a group's sums and all-gathers through codecs.

    Args:
        parent: the group that sends the messages.
        codec: the codec of sums, or a dtype of 16 bits.
        gathers: the codec of all-gathers; None does not compress them.
        min_numel: operations on fewer elements are not compressed.
        seed: the seed of random numbers.
    """

    def __init__(
        self,
        parent: dist.ProcessGroup,
        codec: torch.dtype | Codec,
        gathers: Codec | None,
        min_numel: int,
        seed: int,
    ) -> None:
        self._parent = parent
        self._codec = codec
        self._gathers = gathers
        self._min_numel = min_numel
        self._seed = seed
        self._stream = StreamNumber()
        self._steps: dict[str, Iterator[int]] = {kind: itertools.count() for kind in _KINDS}

    def takes(self, operation: str) -> bool:
        """Whether some calls of a method use a codec."""
        return operation in SUMS or (operation in GATHERS and self._gathers is not None)

    def prepare(self, operation: str, arguments: Sequence[Any]) -> Callable[[], Any] | None:
        """Return a function that starts an operation through its codec and returns the Work.

        Args:
            operation: an operation that :meth:`takes`.
            arguments: the method's arguments, without keywords.

        Returns:
            The function, or None for a call that is not compressed.
        """
        options = options_of(operation, arguments)
        if options is None:
            return None  # the parent checks it
        if operation in GATHERS:
            return self._prepare_gather(operation, arguments[0], arguments[1], _timeout_of(options))
        reduction = reduction_of(options.reduceOp, self._parent.size())
        if reduction is None:
            return None
        if not isinstance(self._codec, Codec) and reduction.premultiplier is not None:
            return None
        if operation.startswith("allreduce"):
            return self._prepare_all_reduce(operation, arguments[0], options, reduction)
        outputs, inputs = arguments[:2]
        return self._prepare_reduce_scatter(operation, outputs, inputs, options, reduction)

    # ---- sums ------------------------------------------------------------------------------------

    def _prepare_all_reduce(
        self, operation: str, tensors: Any, options: Any, reduction: Reduction
    ) -> Callable[[], Any] | None:
        codec, ranks = self._codec, self._parent.size()
        if not is_large(tensors, self._min_numel, self._summed_dtypes):
            return None
        if not isinstance(codec, Codec):
            return lambda: self._sum_in_16_bits(codec, operation, tensors, options)
        numel = sum(tensor.numel() for tensor in tensors)
        if _all_reduce_bytes(codec, numel, ranks) >= 2 * _bytes_of(tensors) * (ranks - 1) / ranks:
            return None

        def start() -> Any:
            future = compressed_all_reduce(
                self._terms(tensors, reduction),
                codec,
                scale=reduction.scale,
                out=list(tensors),
                rounding=self._rounding("all_reduce", codec, tensors[0].device, rows=2),
                group=self._parent,
                timeout=_timeout_of(options),
            )
            return _work_of(future, tensors)

        return start

    def _prepare_reduce_scatter(
        self, operation: str, outputs: Any, inputs: Any, options: Any, reduction: Reduction
    ) -> Callable[[], Any] | None:
        codec, ranks = self._codec, self._parent.size()
        if operation == "reduce_scatter_single":
            outputs, inputs = [outputs], [inputs]
        in_lists = operation == "reduce_scatter"
        if not isinstance(outputs, (list, tuple)) or not isinstance(inputs, (list, tuple)):
            return None
        if in_lists and not all(isinstance(some, (list, tuple)) for some in inputs):
            return None
        flat = [each for some in inputs for each in some] if in_lists else list(inputs)
        if not is_large(flat, self._min_numel, self._summed_dtypes):
            return None
        if not is_large(outputs, 0, self._summed_dtypes) or outputs[0].device != flat[0].device:
            return None
        parts = parts_of(outputs, inputs, ranks, group_rank(self._parent), in_lists=in_lists)
        if parts is None:
            return None
        if not isinstance(codec, Codec):
            return lambda: self._scatter_in_16_bits(
                codec, operation, outputs, inputs, parts, options
            )
        sizes = [sum(tensor.numel() for tensor in part) for part in parts]
        nbytes = sum(part.nbytes for part in codec.chunks(sizes))
        if ranks == 1 or nbytes >= _bytes_of(flat):
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
                group=self._parent,
                timeout=_timeout_of(options),
            )
            return _work_of(future, outputs)

        return start

    @property
    def _summed_dtypes(self) -> Sequence[torch.dtype]:
        return BUCKET_DTYPES if isinstance(self._codec, Codec) else _ROUNDED

    @staticmethod
    def _terms(tensors: Sequence[Tensor], reduction: Reduction) -> list[Tensor]:
        if reduction.premultiplier is None:
            return list(tensors)
        # Only this rank's own terms: other ranks may have other factors.
        return [
            _times(tensor, reduction.premultiplier, _at_least_float32(tensor.dtype))
            for tensor in tensors
        ]

    # ---- sums in 16 bits -------------------------------------------------------------------------
    #
    # Terms are divided by the number of ranks before they are rounded.

    def _sum_in_16_bits(
        self, dtype: torch.dtype, operation: str, tensors: Sequence[Tensor], options: Any
    ) -> Any:
        ranks, numel = self._parent.size(), sum(tensor.numel() for tensor in tensors)
        is_wide = ranks >= LEAST_RANKS and numel > 0
        wire = tensors[0].new_empty(padded_numel(numel, ranks) if is_wide else numel, dtype=dtype)
        values = self._rounded(tensors, out=wire[:numel])

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                unflatten_into(values, tensors, scale=self._factor(options))
            return list(tensors)

        if not is_wide:
            return FollowedWork(self._call(operation, [values], as_sum(options)), write_back)
        wire[numel:].zero_()
        shards = torch.empty_like(wire)
        with beside(wire.device, self._stream, [wire, shards]):
            timeout = _timeout_of(options)
            future = wide_all_reduce(wire, numel, shards, group=self._parent, timeout=timeout)
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
        ranks, factor = self._parent.size(), self._factor(options)
        sizes = [sum(tensor.numel() for tensor in part) for part in parts]
        if ranks < LEAST_RANKS or not any(sizes):
            return self._scatter_by_parent(dtype, operation, outputs, inputs, options)
        own = sizes[group_rank(self._parent)]
        wire = self._rounded([tensor for part in parts for tensor in part], dtype=dtype)
        shards = wire.new_empty(ranks, own)
        received = all_to_all(
            wire,
            input_split_sizes=sizes,
            output_split_sizes=[own] * ranks,
            out=shards.view(-1),
            group=self._parent,
            timeout=_timeout_of(options),
        )

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                if len(outputs) == 1:
                    sum_rows(shards, outputs[0].detach().view(-1)).mul_(factor)
                else:
                    sums = sum_rows(shards, shards.new_empty(own, dtype=torch.float32))
                    unflatten_into(sums, outputs, scale=factor)
            return list(outputs)

        return FollowedWork(_C.as_work(received), write_back)

    def _scatter_by_parent(
        self,
        dtype: torch.dtype,
        operation: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Any],
        options: Any,
    ) -> Any:
        results = [torch.empty_like(output, dtype=dtype) for output in outputs]
        sent = _mapped(inputs, lambda x: self._rounded([x], dtype=dtype).view_as(x))
        if operation == "reduce_scatter_single":
            work = self._call(operation, results[0], sent[0], as_sum(options))
        else:
            work = self._call(operation, results, sent, as_sum(options))

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                for result, output in zip(results, outputs, strict=True):
                    unflatten_into(result, [output], scale=self._factor(options))
            return list(outputs)

        return FollowedWork(work, write_back)

    def _rounded(self, tensors: Sequence[Tensor], **to: Any) -> Tensor:
        with torch.no_grad():
            return flatten(tensors, scale=1.0 / self._parent.size(), **to)

    def _factor(self, options: Any) -> float:
        """The factor of a sum of terms that were divided by the number of ranks."""
        return 1.0 if options.reduceOp == dist.ReduceOp.AVG else float(self._parent.size())

    def _call(self, operation: str, *arguments: Any) -> Any:
        """The Work of the parent's operation."""
        call = describe(operation, arguments, {})
        if call is not None:
            note_collective(call.bytes_sent(group_rank(self._parent), self._parent.size()))
        return _C.as_work(getattr(self._parent, BINDINGS[operation])(*arguments))

    # ---- all-gathers -----------------------------------------------------------------------------

    def _prepare_gather(
        self, operation: str, outputs: Any, inputs: Any, timeout: timedelta | None
    ) -> Callable[[], Any] | None:
        codec, ranks, rank = self._gathers, self._parent.size(), group_rank(self._parent)
        assert codec is not None
        if operation == "all_gather_single":
            outputs, inputs = [outputs], [inputs]
        if not is_large(inputs, 0, BUCKET_DTYPES):
            return None
        by_rank = _places(operation, outputs, len(inputs), ranks)
        if by_rank is None:
            return None
        places = [tensor for part in by_rank for tensor in part]
        if not is_large(places, self._min_numel, BUCKET_DTYPES):
            return None
        if places[0].device != inputs[0].device:
            return None
        if [each.numel() for each in by_rank[rank]] != [each.numel() for each in inputs]:
            return None
        dtypes = [each.dtype for each in inputs]
        if any([each.dtype for each in part] != dtypes for part in by_rank):
            return None
        sizes = [sum(tensor.numel() for tensor in part) for part in by_rank]
        longest = max(part.nbytes for part in codec.chunks(sizes))
        if ranks == 1 or longest * ranks >= _bytes_of(places):
            return None

        def start() -> Any:
            future = compressed_all_gather(
                list(inputs),
                codec,
                sizes=sizes,
                out=[outputs[0].detach().view(-1)] if operation == "all_gather_single" else places,
                rounding=self._rounding("all_gather", codec, inputs[0].device),
                group=self._parent,
                timeout=timeout,
            )
            single = operation.startswith("all_gather_single")
            return _work_of(future, outputs if single else places)

        return start

    # ---- random numbers --------------------------------------------------------------------------

    def _rounding(
        self, kind: str, codec: Codec, device: torch.device, *, rows: int = 1
    ) -> Tensor | None:
        """Seed and step of the next operation of a kind; two rows for one that encodes twice."""
        if not codec.is_random:
            return None
        step = next(self._steps[kind])
        number, rank = _KINDS.index(kind), group_rank(self._parent)
        alike = codec.exchange == "all_reduce"
        own = mix_seeds(self._seed, number, 0 if alike else rank + 1)
        seeds = [[own, step], [mix_seeds(self._seed, number, -1 - rank), step]]
        rounding = torch.tensor(seeds if rows == 2 else seeds[0], dtype=torch.int64, device="cpu")
        if device.type == "cuda":  # without waiting for the device
            return rounding.pin_memory().to(device, non_blocking=True)
        return rounding.to(device)


def _places(
    operation: str, outputs: Any, inputs: int, ranks: int
) -> list[tuple[Tensor, ...]] | None:
    """For each rank the positions of its tensors; None if their numbers differ."""
    if not isinstance(outputs, (list, tuple)):
        return None
    in_lists = operation.startswith("allgather")
    if in_lists and not all(isinstance(some, (list, tuple)) for some in outputs):
        return None
    if operation == "allgather_coalesced":
        fits = len(outputs) == ranks and all(len(some) == inputs for some in outputs)
        return [tuple(some) for some in outputs] if fits else None
    if len(outputs) != inputs:
        return None
    if not in_lists:
        if not is_large(outputs, 0, BUCKET_DTYPES):
            return None
        if any(output.numel() % ranks for output in outputs):
            return None
        outputs = [_rows(output, ranks) for output in outputs]
    if any(len(some) != ranks for some in outputs):
        return None
    return list(zip(*outputs, strict=True))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _all_reduce_bytes(codec: Codec, numel: int, ranks: int) -> float:
    """The number of bytes that each rank sends for a sum, on average."""
    if codec.exchange == "all_to_all":
        sizes = [shard.nbytes for shard in codec.shards(numel, ranks)]
        return (sum(sizes) / ranks + max(sizes)) * (ranks - 1)
    nbytes = codec.nbytes(numel)
    if codec.exchange == "all_gather":
        return nbytes * (ranks - 1)
    return 2 * nbytes * (ranks - 1) / ranks


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors)


def _work_of(future: torch.futures.Future[Tensor], tensors: Sequence[Tensor]) -> Any:
    """A collective's Work, with a Future that holds a list of tensors."""
    value: Any = list(tensors)

    def finish(done: torch.futures.Future[Tensor]) -> Any:
        done.value()  # raises the collective's error
        return value

    return _C.as_work(then(future, finish, value[0].device))
