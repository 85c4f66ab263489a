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
from torch_commhook.collectives.futures import StreamNumber, beside, chained
from torch_commhook.collectives.gloo_groups import exchanges
from torch_commhook.collectives.issuing import SECOND, as_bytes, issue_unseen, place_in
from torch_commhook.collectives.plain import LEAST_RANKS, padded_numel, sum_rows
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

# ---- a process group that sends large tensors in fewer bits --------------------------------------


#: The dtypes that 16-bit codecs round.
_ROUNDED = (torch.float32, torch.float64)


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
    ``torch.distributed`` knows, the all-gather of CPU tensors uses the library's own transport.
    Over other parents this all-reduce returns after its all-to-all has ended; with CUDA tensors
    over NCCL it returns at once.

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
        """A function that starts the operation and returns its Work; None without compression."""
        options = options_of(operation, arguments)
        if options is None:
            return None  # the parent checks it
        # Not by `in`, which would compare members of another type.
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
        if buffer.device.type != "cpu" or not exchanges(self.parent):
            # All ranks issue both here, so that the parent sees them in the same order.
            with beside(buffer.device, self._stream, [buffer, shards, sums]), torch.no_grad():
                self._call("all_to_all_single", shards.view(-1), buffer, [], [], to_all).wait()
                sum_rows(shards, sums)
                gather = _with_timeout(AllgatherOptions, options)
                return self._call("all_gather_single", buffer, sums, gather)

        place = place_in(self.parent, SECOND)

        def gather_sums(_: Any) -> torch.futures.Future[Tensor]:
            with torch.no_grad():
                sum_rows(shards, sums)
            rows = [as_bytes(row) for row in buffer.view(shards.shape)]
            return place.gather(as_bytes(sums), rows, buffer)

        first = issue_unseen(
            lambda: self._call("all_to_all_single", shards.view(-1), buffer, [], [], to_all),
            buffer.device,
        )
        self.bytes_sent += tensor_bytes(sums) * (self.size() - 1)
        return _C.as_work(chained(first.get_future(), gather_sums, lambda done: done))

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
        """The Work of an all-to-all, after which each rank sums the received tensors."""
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

    # ---- shared ----------------------------------------------------------------------------------

    def _flatten(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return flatten(tensors, scale=1.0 / self.size(), dtype=self._dtype, out=out)


def _with_timeout(make_options: Callable[[], Any], like: Any) -> Any:
    """Options of another operation, with the same timeout."""
    made = make_options()
    made.timeout = like.timeout
    return made
