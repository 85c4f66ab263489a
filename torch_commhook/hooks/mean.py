"""The mean over the ranks, in full precision or with 16 bits on the wire."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives import all_reduce, all_to_all
from torch_commhook.collectives.futures import on_side_stream, then_on_side_stream
from torch_commhook.collectives.plain import (
    LEAST_RANKS,
    issue_reduce_scatter,
    padded_numel,
    sum_rows,
    wide_all_reduce,
)
from torch_commhook.hooks.base import Hook, average_scale, check_dense
from torch_commhook.hooks.expressions import SHORT_DTYPES
from torch_commhook.memory.bucket_memory import ShardedBucket
from torch_commhook.spans import timed


class allreduce(Hook):  # noqa: N801 (a hook is written as it is called)
    """Average gradients with one all-reduce, as DDP does without a hook.

    Each rank divides its gradients by the number of ranks before the sum, so that the sum of large
    gradients stays finite. Traffic per rank and element of b bytes: ``2 b (W - 1) / W``.

    Same as PyTorch's ``allreduce_hook``.

    Example:
        >>> gradients = [[torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([3.0, 2.0, 1.0])]]
        >>> found = simulate(hooks.allreduce(), gradients)
        >>> found.result, found.wire_bytes
        ([tensor([2., 2., 2.])], 12)
    """

    _lets_stages_wait = True

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        group = self.group(bucket)
        return all_reduce(bucket.scaled_buffer(average_scale(group)), group=group)

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        # As fully_shard does itself, with the same bits.
        return issue_reduce_scatter(
            bucket.buffer(), bucket.shard, bucket.op, self.group(bucket), scale=bucket.scale
        )

    def __repr__(self) -> str:
        return "allreduce()"


class cast(Hook):  # noqa: N801
    """Average gradients in 16 bits.

    Gradients are scaled by 1 / ranks in float32 and then rounded to ``dtype``, in one pass over
    memory. So a sum over the ranks stays in range if the gradients do. The relative error of a
    rounding is at most the dtype's unit roundoff: 2^-11 for float16 (finite up to 65504), 2^-8 for
    bfloat16 (the range of float32). Traffic per rank and element: ``4 (W - 1) / W`` bytes, half of
    float32's.

    Among fewer than 8 ranks an all-reduce sums the values in ``dtype``. With 8 or more ranks the
    error does not grow with their number: an all-to-all sends each rank its segment from all ranks,
    the rank sums it in float32 and rounds the sum once, and an all-gather sends all sums to all
    ranks. Segments are padded to equal lengths. The process group must support both collectives.
    The hook then keeps 4 bytes for each element instead of 2. For sharded gradients, each rank
    always sums its shard in float32, and sends ``2 (W - 1) / W`` bytes for each element.

    Replaces PyTorch's ``fp16_compress_hook`` and ``bf16_compress_hook``. Those divide after the
    cast, when large values have already become infinite, and refuse bfloat16 on the CPU.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        process_group: the ranks to average over; see :class:`Hook`.

    Raises:
        TypeError: ``dtype`` is another dtype.

    Example:
        >>> gradients = [[torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([3.0, 2.0, 1.0])]]
        >>> found = simulate(hooks.cast(torch.bfloat16), gradients)
        >>> found.result, found.wire_bytes
        ([tensor([2., 2., 2.])], 6)
    """

    _lets_stages_wait = True
    #: From so many ranks on it sums in float32.
    _wide_from = LEAST_RANKS

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        if dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"cast: dtype must be torch.float16 or torch.bfloat16, got {dtype!r}"
                + _dtype_instead(dtype)
            )
        self.dtype = dtype

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        check_dense(self, bucket)
        group = self.group(bucket)
        if group.size() >= self._wide_from and bucket.numel():
            return self._add_in_float32(bucket, group)
        wire = self._buffer("rounded", bucket, bucket.numel())
        with timed(None, "encode"):
            wire = bucket.flatten(scale=average_scale(group), dtype=self.dtype, out=wire)
        return all_reduce(wire, group=group)

    def _buffer(self, name: str, bucket: GradBucket, numel: int) -> Tensor:
        """Memory that stays from step to step."""
        return self.memory(bucket).buffers.get(name, (numel,), self.dtype, bucket.device())

    def _add_in_float32(
        self, bucket: GradBucket, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        scale, numel = average_scale(group), bucket.numel()
        padded = padded_numel(numel, group.size())
        with on_side_stream(
            bucket.device(), self.memory(bucket).buffers.stream, [bucket.sources()]
        ):
            wire = self._buffer("rounded", bucket, padded)
            segments = self._buffer("received", bucket, padded)
            with timed(None, "encode"):
                bucket.flatten(scale=scale, out=wire[:numel])
                wire[numel:].zero_()
            return wide_all_reduce(wire, numel, segments, group=group)

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return self.dtype

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        check_dense(self, bucket)
        group = self.group(bucket)
        with on_side_stream(
            bucket.device(), self.memory(bucket).buffers.stream, [bucket.sources()]
        ):
            wire = self._buffer("rounded", bucket, bucket.numel())
            chunks = self._buffer("received", bucket, bucket.numel())
            with timed(None, "encode"):
                wire = bucket.flatten(scale=bucket.scale, dtype=self.dtype, out=wire)
            received = all_to_all(wire, out=chunks, group=group)
            ranks, shard = group.size(), bucket.shard

            def add_up(done: torch.futures.Future[Tensor]) -> Tensor:
                with torch.no_grad(), timed(None, "decode"):
                    return sum_rows(done.value().view(ranks, -1), shard)

            return then_on_side_stream(received, add_up, bucket.device())

    def __repr__(self) -> str:
        return f"cast({str(self.dtype).removeprefix('torch.')})"


def _dtype_instead(value: object) -> str:
    """What to write in place of the text of a dtype."""
    if not isinstance(value, str):
        return ""
    name = value.removeprefix("torch.").lower()
    meant = SHORT_DTYPES.get(name, name)
    return f"; write torch.{meant}" if meant in ("float16", "bfloat16") else ""
