"""A process group that sends large tensors in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.codecs.base import Codec
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.process_group.codec_calls import SUMS, CodecCalls, without_premultiplier
from torch_commhook.process_group.wrapper import BINDINGS, WrapperProcessGroup


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
        self._is_coalescing = False
        self._calls = CodecCalls(parent, codec, gathers, min_numel, seed)

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
        if keywords or self._is_coalescing or not self._calls.takes(operation):
            return super().run_collective(operation, arguments, keywords)
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
