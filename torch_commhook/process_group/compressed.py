"""A process group that sends large tensors in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from torch_commhook import _C
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.gloo_groups import second_group
from torch_commhook.collectives.stages import staged
from torch_commhook.collectives.streams import StreamNumber, beside
from torch_commhook.collectives.wide_sum import LEAST_RANKS, padded_numel, sum_rows
from torch_commhook.metrics import WireMeter, counting, tensor_bytes
from torch_commhook.native.bucket_ops import flatten, unflatten_into
from torch_commhook.process_group.codec_calls import (
    SUMS,
    CodecCalls,
    as_sum,
    is_large,
    options_of,
    parts_of,
    without_premultiplier,
)
from torch_commhook.process_group.operations import describe
from torch_commhook.process_group.work import FollowedWork
from torch_commhook.process_group.wrapper import BINDINGS, WrapperProcessGroup

#: What is rounded to 16 bits.
_ROUNDED = (torch.float32, torch.float64)


class CompressedProcessGroup(WrapperProcessGroup):
    """Leaves everything to another group, and sends large sums and means in fewer bits.

    This holds for all-reduce and reduce-scatter of floating tensors, with ``SUM`` or ``AVG``. So
    ``fully_shard``, DTensor and DDP send compressed gradients without a hook. The group also
    compresses sums that are no gradients, which ``min_numel`` should leave alone. All else passes
    as it is: other reductions and dtypes, small, sparse and non-contiguous tensors, and operations
    between ``start_coalescing`` and ``end_coalescing``.

    **A codec of 16 bits** (``torch.bfloat16``, ``torch.float16``) takes float32 and float64. Each
    value travels divided by the number of ranks (in float32) and rounded; the result is scaled and
    cast back in one pass. Divided first, the sum stays in range where the mean does (float16: up to
    65504).

    Among fewer than 8 ranks the parent runs the same operation, and adds in ``codec``. From 8 ranks
    on the error does not grow with their number. A reduce-scatter is an all-to-all of the parent's,
    whose values each rank adds up in float32, straight into the output. An all-reduce is the same
    with a sum that is rounded once, and an all-gather. Where the parent is a Gloo group that
    ``torch.distributed`` knows, the all-gather runs on a second group, which the first such
    all-reduce of CPU tensors makes; over other parents that all-reduce returns once its all-to-all
    has ended, with CUDA tensors over NCCL at once.

    **A codec of** :mod:`torch_commhook.codecs` takes float64, float32, bfloat16 and float16, and
    adds in float32. An all-reduce is a :func:`~torch_commhook.collectives.compressed_all_reduce`, a
    reduce-scatter a :func:`~torch_commhook.collectives.compressed_reduce_scatter`, on the parent.
    All ranks get the same bits of an all-reduce. There is no error feedback: the group keeps
    nothing of what a message loses. Tensors pass as they are where that takes as few bytes, and so
    on one rank. ``PREMUL_SUM`` is compressed too; that of small CPU tensors becomes a sum of
    multiplied tensors, since Gloo has none.

    ``gathers`` compresses all-gathers of floating tensors as well, such as those of parameters in
    ``fully_shard``. All ranks get the same bits, this rank of its own tensor, too. That includes
    ``DTensor.full_tensor()``, and so checkpoints that are made by it.

    Args:
        parent: the process group that does the work.
        codec: of sums: ``torch.bfloat16``, ``torch.float16`` or a
            :class:`torch_commhook.codecs.Codec`, the same on all ranks.
        min_numel: operations on fewer elements pass as they are. The elements of all ranks count,
            so those of a reduce-scatter's inputs and of an all-gather's outputs.
        seed: of random numbers, for codecs that draw some; the same on all ranks. They follow from
            seed, rank, kind of operation and how many of that kind the group has compressed.
        gathers: a codec of all-gathers, the same on all ranks; None leaves them as they are.

    Attributes:
        compressed: how many operations were.
        bytes_sent: by this rank, for these. ``HookHandle.stats()`` counts what a hook hands to the
            group instead, uncompressed.

    Raises:
        TypeError: no process group; another codec; a seed that is no int.
        ValueError: a negative ``min_numel``.

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
        # Not by `in`, which would ask objects of another type whether they are equal.
        is_dtype = codec is torch.bfloat16 or codec is torch.float16
        if not is_dtype and not isinstance(codec, Codec):
            raise TypeError(
                f"{name}: codec must be torch.bfloat16, torch.float16 or a codec of "
                f"torch_commhook.codecs, got {codec!r}"
            )
        if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
            raise ValueError(f"{name}: min_numel must be an int of at least 0, got {min_numel!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"{name}: seed must be an int, got {_C.type_name(seed)}")
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
        self._stream = StreamNumber()
        self._is_coalescing = False
        of_sums = codec if isinstance(codec, Codec) else None
        self._calls = CodecCalls(parent, of_sums, gathers, min_numel, seed)

    def _settings_text(self) -> str:
        codec = str(self.codec).removeprefix("torch.")
        return codec if self.gathers is None else f"{codec}, gathers={self.gathers}"

    @property
    def _dtype(self) -> torch.dtype:
        assert isinstance(self.codec, torch.dtype)
        return self.codec

    def start_coalescing(self, device: Any) -> Any:
        """Have the parent take what follows for one operation. It passes as it is.

        The caller waits for the parent's Work of all of it, so nothing could be decoded after it.
        """
        result = getattr(self.parent, BINDINGS["start_coalescing"])(device)
        self._is_coalescing = True
        return result

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        if operation == "end_coalescing":
            self._is_coalescing = False
        elif not keywords and not self._is_coalescing:
            if self._calls.takes(operation):
                return self._run_with_codec(operation, arguments)
            if operation in SUMS:
                start = self._encode(operation, arguments)
                if start is not None:
                    self.compressed += 1
                    return start()
        return super().run_collective(operation, arguments, keywords)

    def _run_with_codec(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        arguments = self.change_arguments(operation, arguments)
        start = self._calls.prepare(operation, arguments)
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

    def _call(self, operation: str, *arguments: Any) -> Any:
        """The Work of the parent's operation."""
        call = describe(operation, arguments, {})
        if call is not None:
            self.bytes_sent += call.bytes_sent(self.rank(), self.size())
        return _C.as_work(super().run_collective(operation, arguments, {}))

    def _encode(self, operation: str, arguments: tuple[Any, ...]) -> Callable[[], Any] | None:
        """Starts the operation, and returns its Work; None for what passes as it is."""
        options = options_of(operation, arguments)
        if options is None:
            return None  # for the parent to judge
        # Not by `in`, which would ask the members of another type whether they are equal.
        if options.reduceOp == dist.ReduceOp.AVG:
            factor = 1.0
        elif options.reduceOp == dist.ReduceOp.SUM:
            factor = float(self.size())
        else:
            return None
        if operation.startswith("allreduce"):
            return self._encode_allreduce(operation, arguments[0], options, factor)
        outputs, inputs = arguments[:2]
        if operation == "reduce_scatter_single":
            outputs, inputs = [outputs], [inputs]
        elif not isinstance(outputs, (list, tuple)) or not isinstance(inputs, (list, tuple)):
            return None
        return self._encode_reduce_scatter(operation, outputs, inputs, options, factor)

    # ---- all-reduce ------------------------------------------------------------------------------

    def _encode_allreduce(
        self, operation: str, tensors: Any, options: Any, factor: float
    ) -> Callable[[], Any] | None:
        if not is_large(tensors, self.min_numel, _ROUNDED):
            return None
        numel = sum(tensor.numel() for tensor in tensors)
        adds_in_float32 = self.size() >= LEAST_RANKS and numel > 0
        padded = padded_numel(numel, self.size()) if adds_in_float32 else numel
        buffer = tensors[0].new_empty(padded, dtype=self._dtype)
        wire = self._flatten(tensors, buffer[:numel])

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                unflatten_into(wire, tensors, scale=factor)
            return list(tensors)

        def start() -> Any:
            if not adds_in_float32:
                return FollowedWork(self._call(operation, [wire], as_sum(options)), write_back)
            buffer[numel:].zero_()
            return FollowedWork(self._sum_in_float32(buffer, options), write_back)

        return start

    def _sum_in_float32(self, buffer: Tensor, options: Any) -> Any:
        """The Work of two collectives that replace a buffer by its sum over the ranks."""
        shards = buffer.new_empty(self.size(), buffer.numel() // self.size())
        sums = buffer.new_empty(shards.shape[1])
        to_all = _with_timeout(AllToAllOptions, options)
        gather = _with_timeout(AllgatherOptions, options)
        second = second_group(self.parent) if buffer.device.type == "cpu" else None
        if second is None:
            # All ranks issue both here, so that their order on the parent is the same.
            with beside(buffer.device, self._stream, [buffer, shards, sums]), torch.no_grad():
                self._call("all_to_all_single", shards.view(-1), buffer, [], [], to_all).wait()
                sum_rows(shards, sums)
                return self._call("all_gather_single", buffer, sums, gather)

        def send(_: Any) -> Tensor:
            with torch.no_grad():
                return sum_rows(shards, sums)

        def issue(tensor: Tensor) -> Any:
            return getattr(second, BINDINGS["all_gather_single"])(
                buffer, tensor, gather
            ).get_future()

        first = self._call("all_to_all_single", shards.view(-1), buffer, [], [], to_all)
        self.bytes_sent += tensor_bytes(sums) * (self.size() - 1)
        return _C.as_work(staged(first.get_future(), send, issue, lambda _: buffer, second))

    # ---- reduce-scatter --------------------------------------------------------------------------

    def _encode_reduce_scatter(
        self, operation: str, outputs: Any, inputs: Any, options: Any, factor: float
    ) -> Callable[[], Any] | None:
        in_lists = operation == "reduce_scatter"
        if in_lists and not all(isinstance(some, (list, tuple)) for some in inputs):
            return None
        flat = [each for some in inputs for each in some] if in_lists else inputs
        if not is_large(flat, self.min_numel, _ROUNDED) or not is_large(outputs, 0, _ROUNDED):
            return None
        if self.size() >= LEAST_RANKS and any(each.numel() for each in flat):
            parts = parts_of(outputs, inputs, self.size(), self.rank(), in_lists=in_lists)
            if parts is not None:
                return lambda: self._scatter_in_float32(parts, outputs, options, factor)
        results = [output.new_empty(output.shape, dtype=self._dtype) for output in outputs]
        sent: list[Any] = []
        for each in inputs:
            tensors = list(each) if in_lists else [each]
            wire = self._flatten(tensors)
            views = [
                view.view(tensor.shape)
                for view, tensor in zip(
                    wire.split([tensor.numel() for tensor in tensors]), tensors, strict=True
                )
            ]
            sent.append(views if in_lists else views[0])

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                for result, output in zip(results, outputs, strict=True):
                    unflatten_into(result, [output], scale=factor)
            return list(outputs)

        new_options = as_sum(options)
        if operation == "reduce_scatter_single":
            given: tuple[Any, ...] = results[0], sent[0], new_options
        else:
            given = results, sent, new_options
        return lambda: FollowedWork(self._call(operation, *given), write_back)

    def _scatter_in_float32(
        self, parts: list[list[Tensor]], outputs: Any, options: Any, factor: float
    ) -> Any:
        """The Work of an all-to-all, after which each rank adds up what has come."""
        sizes = [sum(tensor.numel() for tensor in part) for part in parts]
        own = sizes[self.rank()]
        wire = self._flatten([tensor for part in parts for tensor in part])
        shards = wire.new_empty(self.size(), own)
        equal = all(size == own for size in sizes)
        splits: tuple[list[int], list[int]] = ([], []) if equal else ([own] * len(sizes), sizes)

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                if len(outputs) == 1:
                    sum_rows(shards, outputs[0].detach().view(-1)).mul_(factor)
                else:
                    sums = sum_rows(shards, shards.new_empty(own, dtype=torch.float32))
                    unflatten_into(sums, outputs, scale=factor)
            return list(outputs)

        new_options = _with_timeout(AllToAllOptions, options)
        work = self._call("all_to_all_single", shards.view(-1), wire, *splits, new_options)
        return FollowedWork(work, write_back)

    # ---- what both share -------------------------------------------------------------------------

    def _flatten(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return flatten(tensors, scale=1.0 / self.size(), dtype=self._dtype, out=out)


def _with_timeout(make_options: Callable[[], Any], like: Any) -> Any:
    """Options of another operation, with the same timeout."""
    made = make_options()
    made.timeout = like.timeout
    return made
