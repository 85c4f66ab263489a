"""A process group that sends large tensors in fewer bits, and broadcasts in few messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from torch_commhook import _C
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.futures import StreamNumber, beside, chained
from torch_commhook.collectives.gloo_groups import exchanges, resolve_group
from torch_commhook.collectives.issuing import SECOND, as_bytes, issue_unseen, place_in
from torch_commhook.collectives.plain import LEAST_RANKS, padded_numel, sum_rows
from torch_commhook.metrics import WireMeter, counting, tensor_bytes
from torch_commhook.native.bucket_ops import BUCKET_DTYPES, flatten, unflatten_into
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
from torch_commhook.process_group.wrapper import BINDINGS, WrapperProcessGroup, seen_by_cpp

# ---- broadcasts many tensors from one rank in few messages ---------------------------------------
#
# ``csrc/ops/library.cpp`` has the schema, and ``csrc/runtime/collectives/broadcast_coalesced.cpp``
# the kernel.


_NAME = "broadcast_coalesced"
_INT64_MAX = 2**63 - 1


def broadcast_coalesced(
    process_group: dist.ProcessGroup | None,
    tensors: Iterable[Tensor],
    buffer_size: int,
    rank: int = 0,
) -> None:
    """Broadcast one rank's tensors to all ranks, in few messages. Writes the tensors in place.

    The results are those of ``torch.distributed._broadcast_coalesced``. Tensors of one dtype and
    device are sent together, in flat buckets of at most ``buffer_size`` bytes. A large tensor is
    sent alone, without a copy if it is contiguous, and in pieces if it is very large. At most two
    broadcasts are in flight, so the call needs memory for at most two buckets or two such pieces. A
    compiler sees ``torch.ops.commhook.broadcast_coalesced``, and decomposes it into functional
    collectives with constant sizes.

    All ranks must call this with the same number of tensors, of the same shapes and dtypes; strides
    may differ. When it returns, the tensors are written, or on CUDA will be by work on the current
    stream. After an error nothing is in flight, and the tensors' contents are undefined.

    Args:
        process_group: the process group; None for the default one.
        tensors: any number of dense tensors, also none, of any shapes, strides and dtypes, on
            devices that the group supports. They need not agree, and may be empty. A tensor that is
            listed twice, like tied weights, is sent once.
        buffer_size: the size of a bucket in bytes, at least 1.
        rank: the rank within the group that sends its tensors.

    Raises:
        TypeError: ``tensors`` is not a list of tensors, or one of them is sparse or quantized;
            ``buffer_size`` or ``rank`` is not an int; ``process_group`` is none.
        ValueError: ``buffer_size`` or ``rank`` is out of range; tensors share memory, with each
            other or among their own elements (expanded tensors), or have no memory (the meta
            device). Compiled code does not detect all of these.
        RuntimeError: a tensor requires grad while gradients are recorded, or was made in inference
            mode and is written outside of it; torch.distributed is not initialized.
        Exception: the process group raised it.

    Example:
        >>> def share(rank):
        ...     tensors = [torch.full((2,), float(rank)), torch.tensor([10 * rank])]
        ...     broadcast_coalesced(None, tensors, 1 << 20, rank=1)
        ...     return tensors
        >>> run_ranks(share, 2)[0]
        [tensor([1., 1.]), tensor([10])]
    """
    group = resolve_group(process_group)
    tensors = _checked_list(tensors)
    _check_int("buffer_size", buffer_size)
    _check_int("rank", rank)
    _check_range(buffer_size, rank)
    if torch.compiler.is_compiling():
        torch.ops.commhook.broadcast_coalesced(tensors, buffer_size, rank, group.group_name)
    else:
        _C.broadcast_coalesced(seen_by_cpp(group), tensors, buffer_size, rank)


def _checked_list(tensors: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(
            f"{_NAME}: tensors must be a list of tensors, got {type(tensors).__qualname__}"
        )
    tensors = list(tensors)
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{_NAME}: tensors[{i}] must be a tensor, got {type(tensor).__qualname__}"
            )
        if tensor.is_nested:
            raise TypeError(
                f"{_NAME}: tensors[{i}] must be a dense tensor, got a nested one; pass its values()"
            )
    return tensors


def _check_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{_NAME}: {name} must be an int, got {type(value).__qualname__}")
    if abs(value) > _INT64_MAX:
        raise ValueError(f"{_NAME}: {name} must be an int of 64 bits, got {value}")


def _check_range(buffer_size: int, rank: int) -> None:
    if buffer_size < 1:
        raise ValueError(f"{_NAME}: buffer_size must be at least 1 byte, got {buffer_size}")
    if rank < 0:
        raise ValueError(f"{_NAME}: rank must be a rank of the group, got {rank}")


# ---- the operator --------------------------------------------------------------------------------


@torch.library.register_fake("commhook::broadcast_coalesced")
def _broadcast_coalesced_fake(
    tensors: Sequence[Tensor], buffer_size: int, rank: int, group_name: str
) -> None:
    _check_range(buffer_size, rank)
    for i, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{_NAME}: tensors[{i}] must be dense (torch.strided), got layout {tensor.layout}"
            )
        if tensor.is_quantized:
            raise TypeError(
                f"{_NAME}: tensors[{i}] must not be quantized, got dtype {tensor.dtype}; pass its "
                "int_repr()"
            )
        if any(map(_is_expanded, tensor.shape, tensor.stride())):
            raise ValueError(
                f"{_NAME}: tensors[{i}] must reach each of its elements once, got sizes "
                f"{list(tensor.shape)} with strides {list(tensor.stride())}; pass "
                "tensor.contiguous()"
            )


def _is_expanded(size: int | torch.SymInt, stride: int | torch.SymInt) -> bool:
    """Whether a tensor is expanded, if known without a guard; the kernel checks the rest."""
    return isinstance(size, int) and isinstance(stride, int) and size > 1 and stride == 0


# The form for compilers. They treat it as the functional collectives that they know: they do not
# remove it, not even if nobody reads the tensors again, as on the source. They do not reorder it
# among other collectives, which must have one order on all ranks.
@torch.ops.commhook.broadcast_coalesced.default.py_impl(FunctionalTensorMode)
def _broadcast_coalesced_traced(
    mode: Any, tensors: Sequence[Tensor], buffer_size: int, rank: int, group_name: str
) -> None:
    _broadcast_coalesced_fake(tensors, buffer_size, rank, group_name)
    size = _resolve_process_group(group_name).size()  # type: ignore[arg-type]
    if rank >= size:
        raise ValueError(f"{_NAME}: rank must be a rank below {size}, got {rank}")
    with mode:
        in_flight: list[_TracedBucket] = []
        different = list({id(tensor): tensor for tensor in tensors}.values())
        for bucket in _buckets(_pieces(different), buffer_size):
            before = in_flight.pop(0).finish() if len(in_flight) == 2 else None
            in_flight.append(_TracedBucket(bucket, rank, group_name, before))
        for started in in_flight:
            started.finish()


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces: list[Tensor] = []
    for tensor in tensors:
        cut = _C.broadcast_cut([int(size) for size in tensor.shape], tensor.element_size())
        pieces += [tensor] if cut is None else tensor.split(cut[1], cut[0])
    return pieces


def _buckets(tensors: Sequence[Tensor], buffer_size: int) -> list[list[Tensor]]:
    kinds: dict[Any, int] = {}
    numbers = [kinds.setdefault((tensor.dtype, tensor.device), len(kinds)) for tensor in tensors]
    sizes = [int(tensor.numel() * tensor.element_size()) for tensor in tensors]
    return [
        [tensors[i] for i in indices]
        for indices in _C.broadcast_buckets(sizes, numbers, buffer_size)
    ]


class _TracedBucket:
    """A bucket in flight in traced code, once ``before`` has arrived."""

    def __init__(
        self, tensors: list[Tensor], rank: int, group_name: str, before: Tensor | None
    ) -> None:
        self._tensors = tensors
        buffer = _gather(tensors, before).view(_sent_dtype(tensors[0].dtype))
        self._sent = torch.ops._c10d_functional.broadcast(buffer, rank, group_name)

    def finish(self) -> Tensor:
        received: Tensor = torch.ops._c10d_functional.wait_tensor(self._sent)
        is_negated = any(tensor.is_neg() for tensor in self._tensors)
        if self._tensors[0].dtype in BUCKET_DTYPES and not is_negated:
            unflatten_into(received, self._tensors)
            return received
        # Traced code cannot write to an alias of another dtype.
        width = received.element_size()
        sizes = [tensor.numel() * tensor.element_size() // width for tensor in self._tensors]
        for tensor, piece in zip(self._tensors, received.split(sizes), strict=True):
            tensor.copy_(_from_sent(piece, tensor))
        return received


def _gather(tensors: list[Tensor], before: Tensor | None) -> Tensor:
    """The tensors' bits in one tensor, as :func:`_words`.

    It seems to depend on ``before``, but uses no value of it. So a compiler cannot gather more
    buckets before those in flight have arrived, as Inductor does since torch 2.15.
    """
    words = [_words(tensor) for tensor in tensors]
    if before is not None and before.device != words[0].device:
        before = None
    if words[0].dtype in BUCKET_DTYPES:
        after = [] if before is None else [before.narrow(0, 0, 0).view(words[0].dtype)]
        return flatten([*words, *after])
    gathered = torch.cat(words)
    return gathered if before is None else gathered | (before[:1].view(torch.uint8)[:1] & 0)


def _words(tensor: Tensor) -> Tensor:
    """A tensor's elements in a dtype that the bucket operators copy, if there is one."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in BUCKET_DTYPES:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    flat = tensor.reshape(-1).contiguous()
    if tensor.dtype is torch.bool:  # Inductor of torch 2.11 does not support views of it
        return flat.to(torch.uint8)
    return flat.view(_WORDS[tensor.element_size()])


_WORDS = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}

#: Not all backends support other dtypes, which are sent as bytes.
_SENT_AS_THEY_ARE = (*BUCKET_DTYPES, torch.int8, torch.uint8, torch.int32, torch.int64)


def _sent_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return dtype.to_real()
    return dtype if dtype in _SENT_AS_THEY_ARE else torch.uint8


def _from_sent(piece: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(piece.view(*like.shape, 2))
    if like.dtype is not torch.bool:
        piece = piece.view(like.dtype)
    return piece.view(like.shape)


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
