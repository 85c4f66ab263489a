"""Averages of gradients as products of thin factors."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.base import decay_error, decays_at_random
from torch_commhook.collectives.futures import is_capturing, on_side_stream, two_stages
from torch_commhook.collectives.issuing import issue_all_reduce, second_place
from torch_commhook.collectives.plain import all_reduce, all_reduce_bytes
from torch_commhook.hooks.base import Hook, HookTraits, average_scale, check_dense
from torch_commhook.hooks.low_rank import (
    Plan,
    flat_source,
    left_factors,
    memory_order,
    plan_of,
    restore,
    right_factors,
)
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.metrics import CallMeter
from torch_commhook.spans import timed
from torch_commhook.wording import check_type


class powersgd(Hook):  # noqa: N801 (a hook is written as it is called)
    """Average gradients as products of thin factors: PowerSGD (arXiv:1905.13727).

    A gradient of two or more dimensions is a matrix M with n rows and m columns, its first
    dimension by all others. Q are the right factors of the previous step. The ranks average
    P = M Q, make it orthonormal, and average Q = M' P; the result is P Q'. They send
    ``rank (n + m)`` numbers instead of ``n m``. Vectors, and matrices that would shrink by less
    than a factor of ``min_compression_rate``, are averaged uncompressed in the same all-reduce as
    P. Traffic per rank: ``2 b (W - 1) / W`` bytes for each averaged number of b bytes.

    An average of rank ``rank`` or less is exact, up to rounding. Otherwise the remaining part is
    lost. Use error feedback::

        attach(model, hooks.error_feedback(hooks.powersgd(rank=2)))

    It remembers the gradient minus P times the rank's *own* Q', so that nothing is lost for good.
    (PyTorch's ``powerSGD_hook`` remembers the gradient minus the average, which grows without
    bound if the ranks' gradients differ.)

    Q is the same on all ranks, and part of the state. Its columns have length 1. A step of zeros
    leaves Q unchanged; columns that the gradients did not use restart. If a gradient is not finite
    on some rank, the parameter's result is not finite on any rank, its errors are dropped, and its
    Q stays unchanged. With error feedback the same happens if Q reaches a quarter of the last bit
    of the dtype's largest number, 5e30 in float32.

    Everything is computed and sent in float32; for float64 gradients in float64. All ranks get the
    same bits if they have the same kind of processor and number of threads. Eager and compiled code
    run the same kernels.

    On the CPU over Gloo no callback waits. Over process groups in Python the call waits for the
    first average.

    Args:
        rank: the number of columns of a factor, at least 1.
        min_compression_rate: a matrix is compressed if ``rank (n + m)`` is at least this many
            times smaller than ``n m``. At least 1.
        seed: the seed of the first Q.
        process_group: the ranks to average over; see :class:`Hook`.

    Raises:
        TypeError: an argument has another type. From :meth:`Hook.average`: sparse or complex
            gradients.
        ValueError: a number is out of range.

    Example:
        >>> gradients = [[torch.outer(torch.arange(1.0, 65), torch.ones(64))] for _ in range(2)]
        >>> found = simulate(hooks.powersgd(rank=1), gradients)  # the gradient has rank 1
        >>> found.wire_bytes, found.error < 1e-6
        (512, True)
    """

    _lets_stages_wait = True
    traits = HookTraits(is_lossy=True, takes_error=True, has_stages=True)

    def __init__(
        self,
        rank: int = 1,
        *,
        min_compression_rate: float = 2.0,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        check_type("powersgd: rank", rank, "an int", int)
        check_type("powersgd: seed", seed, "an int", int)
        check_type("powersgd: min_compression_rate", min_compression_rate, "a number", int, float)
        if rank < 1:
            raise ValueError(f"powersgd: rank must be at least 1, got {rank}")
        if not 1 <= min_compression_rate < math.inf:
            raise ValueError(
                "powersgd: min_compression_rate must be at least 1 and finite, got "
                f"{min_compression_rate}"
            )
        self.rank = rank
        self.min_compression_rate = float(min_compression_rate)
        self.seed = seed
        self._name = repr(self)

    def prepare(self, memory: BucketMemory) -> None:
        if memory.gradient_dtype.is_complex:  # average() refuses it
            return
        plan = Plan.of(memory.layout, self.rank, self.seed, self.min_compression_rate)
        if memory.with_error:
            memory.flat("error")
        _rounding_of(self, memory)
        # By settings: ``after`` may contain two.
        memory.plans[self._name] = plan.text
        if not plan.groups:
            return
        dtype = _dtype(memory.gradient_dtype)

        def first(number: int, parameter: Tensor, before: Tensor | None) -> Tensor:
            """A transposed factor: rows with the shape and memory order of the matrix's own."""
            outermost, *order = memory_order(parameter.shape, parameter.stride())
            columns = parameter.numel() // parameter.shape[outermost]
            factor = torch.empty(
                [self.rank, *(parameter.shape[d] for d in order)],
                dtype=dtype,
                device=parameter.device,
            )
            factor = factor.permute(0, *(1 + order.index(d) for d in sorted(order)))
            if before is not None and before.shape == factor.shape:
                return factor.copy_(before)
            return factor.copy_(plan.first_right(columns).view(factor.shape))

        memory.packed(f"powersgd_q{self.rank}", plan.numbers, first, key=self._name)

    def check_shards(self) -> None:
        raise TypeError(
            f"{self}: needs whole matrices, but a rank has only its rows of sharded parameters; "
            "shard over a mesh of two dimensions, so that it averages each shard across replicas "
            "as a matrix"
        )

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        check_dense(self, bucket)
        group = self.group(bucket)
        call = _LowRankAverage(self, bucket, group)
        used = (bucket.sources(), call.q, call.error)
        with on_side_stream(call.device, call.memory.buffers.stream, used):
            return call.start(bucket, group)

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return _dtype(bucket.dtype())

    def __repr__(self) -> str:
        settings = [f"rank={self.rank}"]
        if self.min_compression_rate != 2.0:
            settings.append(f"min_compression_rate={self.min_compression_rate:g}")
        if self.seed:
            settings.append(f"seed={self.seed}")
        return f"powersgd({', '.join(settings)})"


def _dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _rounding_of(hook: powersgd, memory: BucketMemory) -> Tensor | None:
    """The seed tensor of random rounding if an error decays in 16 bits; else None."""
    if not decays_at_random(memory.tensors.get("error"), memory.error_decay):
        return None
    return memory.rounding_seeds(hook.seed)[0]


class _LowRankAverage:
    """The running average of one bucket.

    It references neither the group nor the bucket, which has one: if a Gloo thread released a group
    last, it would wait for its own end.
    """

    def __init__(self, hook: powersgd, bucket: GradBucket, group: dist.ProcessGroup) -> None:
        self.memory = hook.memory(bucket)
        self.text = self.memory.plans[hook._name]
        q = self.memory.tensors.get(hook._name)
        self.has_matrices = q is not None
        self.q: Any = q
        self.error = self.memory.tensors.get("error")
        self.keeps_error = self.error is not None
        self.rounding = _rounding_of(hook, self.memory)
        self.lent: Tensor | None = None
        self.scale = average_scale(group)
        self.numel = bucket.numel()
        self.dtype = _dtype(bucket.dtype())
        self.device = bucket.device()
        self.sources_stay = bucket.sources_stay
        self.meter: CallMeter | None = None if is_capturing(self.device) else self.memory.meter

    def start(self, bucket: GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
        if not self.has_matrices:
            return self._average_vectors(bucket, group)
        with torch.no_grad(), timed(self.meter, "encode"):
            wire = self._left_factors(bucket)
        self.result = self._result(bucket)
        # The second average sends as many numbers as Q has.
        second_bytes = all_reduce_bytes(self.q, group)
        place = second_place(group, self.device)
        return two_stages(
            all_reduce(wire, group=group),
            self._right_factors,
            lambda tensor: issue_all_reduce(tensor, group, place=place),
            self._restore,
            has_place=place is not None,
            second_bytes=second_bytes,
            device=self.device,
            group=group,
            meter=self.meter,
        )

    def _buffer(self, name: str, numel: int) -> Tensor:
        return self.memory.buffers.get(name, (numel,), self.dtype, self.device)

    def _average_vectors(
        self, bucket: GradBucket, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        out = self._buffer("result", self.numel)
        wire = bucket.flatten(scale=self.scale, dtype=self.dtype, out=out)
        if self.error is not None:  # another hook's earlier errors
            with torch.no_grad():
                wire.add_(self.error, alpha=self.scale)
                self.error.zero_()
        return all_reduce(wire, group=group)

    def _work(self) -> Tensor:
        """Memory for the gradients plus errors, until new errors are known."""
        if self.error is None or self.error.dtype != torch.bfloat16:
            return self._buffer("work", self.numel)
        # Not kept for the bucket: it would double the memory of the errors.
        if self.device.type != "cpu":  # the device's allocator reuses memory by stream
            return torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.lent = self.memory.scratch.take(self.numel, self.dtype, self.device)
        return self.lent[: self.numel]

    def _left_factors(self, bucket: GradBucket) -> Tensor:
        error, sources = self.error, bucket.sources()
        flat = flat_source(sources)
        if error is not None and error.dtype == self.dtype:
            self.work = error
        elif error is None and flat is not None and flat.dtype == self.dtype and self.sources_stay:
            self.work = flat
        else:
            self.work = self._work()
            if error is not None:
                self.work.copy_(error)
        plan = plan_of(self.text)
        wire = self._buffer("wire", plan.wire_numel)
        left_factors(
            sources, self.work, self.q, plan, wire, scale=self.scale, adds=self.keeps_error
        )
        return wire

    def _right_factors(self, wire: Tensor) -> Tensor:
        self.wire = wire
        settings: Any = {"scale": self.scale, "keeps_error": self.keeps_error}
        plan = plan_of(self.text)
        with timed(self.meter, "encode"):
            self.left = self._buffer("left", plan.left_numel)
            right = self._buffer("right", plan.right_numel)
            right_factors(self.work, wire, plan, self.left, right, **settings)
        if self.meter is not None and self.meter.is_due():
            self.meter.note_squares(*self._squares(right))
        return right

    def _squares(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """The squares of the error of this rank's own product, and of its matrices."""
        plan = plan_of(self.text)
        lengths = [torch.linalg.vector_norm(plan.stack(self.work, g)) for g in plan.groups]
        work = torch.stack(lengths).double().square().sum()
        # P is orthonormal, so a product has the length of its right factor.
        product = torch.linalg.vector_norm(right).double().square() / self.scale**2
        if self.keeps_error:
            return work, work + product
        return (work - product).clamp(min=0.0), work

    def _restore(self, right: Tensor) -> Tensor:
        factors = self.q, self.work, self.wire, self.left, right
        result, plan = self.result, plan_of(self.text)
        with timed(self.meter, "decode"):
            restore(*factors, plan, result, keeps_error=self.keeps_error)
        if self.error is not None and self.error is not self.work:
            if self.error.dtype == torch.bfloat16:
                most = torch.finfo(torch.bfloat16).max
                self.error.copy_(self.work.clamp_(-most, most))
            else:  # float64 errors beyond float32's range are dropped: errors must stay finite
                self.error.copy_(self.work).nan_to_num_(0.0, 0.0, 0.0)
            if self.lent is not None:
                del self.work
                self.memory.scratch.give(self.lent)
                self.lent = None
        if self.error is not None and self.memory.error_decay != 1.0:
            decay_error(self.error, self.memory.error_decay, self.rounding)
        return result

    def _result(self, bucket: GradBucket) -> Tensor:
        result = bucket.result_buffer()
        if result is None or result.dtype != self.dtype:
            return self._buffer("result", self.numel)
        return result
