"""A process group that sends large tensors in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import second_group
from torch_commhook.collectives.stages import staged
from torch_commhook.collectives.streams import StreamNumber, beside
from torch_commhook.collectives.wide_sum import LEAST_RANKS, padded_numel, sum_rows
from torch_commhook.native.bucket_ops import flatten, unflatten_into
from torch_commhook.process_group.work import FollowedWork
from torch_commhook.process_group.wrapper import BINDINGS, WrapperProcessGroup

_OPTIONS: dict[str, Any] = {
    "allreduce": dist.AllreduceOptions,
    "allreduce_coalesced": dist.AllreduceCoalescedOptions,
    "reduce_scatter": dist.ReduceScatterOptions,
    "reduce_scatter_single": dist.ReduceScatterOptions,
    "reduce_scatter_single_coalesced": dist.ReduceScatterOptions,
}


class CompressedProcessGroup(WrapperProcessGroup):
    """Leaves everything to another group, and large sums and means travel in 16 bits.

    All-reduce and reduce-scatter of floating tensors, with ``SUM`` or ``AVG``, send each value
    divided by the number of ranks (in float32) and rounded to ``codec``; the result is scaled and
    cast back in one pass. Divided first, the sum stays in range where the mean does (float16: up to
    65504). All else passes as it is: other reductions and dtypes, small, sparse and non-contiguous
    tensors. So ``fully_shard``, DTensor and DDP send compressed gradients without a hook; so do
    sums that are no gradients, which ``min_numel`` should leave alone.

    Among fewer than 8 ranks the parent runs the same operation, and adds in ``codec``. From 8 ranks
    on the error does not grow with their number. A reduce-scatter is an all-to-all of the parent's,
    whose values each rank adds up in float32, straight into the output. An all-reduce is the same
    with a sum that is rounded once, and an all-gather. Where the parent is a Gloo group that
    ``torch.distributed`` knows, the all-gather runs on a second group, which the first such
    all-reduce of CPU tensors makes; over other parents that all-reduce returns once its all-to-all
    has ended, with CUDA tensors over NCCL at once.

    Args:
        parent: the process group that does the work.
        codec: ``torch.bfloat16`` or ``torch.float16``.
        min_numel: operations on fewer elements pass as they are.

    Attributes:
        compressed: how many operations were.

    Raises:
        TypeError: no process group; another codec.
        ValueError: a negative ``min_numel``.
    """

    def __init__(
        self,
        parent: dist.ProcessGroup,
        codec: torch.dtype = torch.bfloat16,
        *,
        min_numel: int = 4096,
    ) -> None:
        super().__init__(parent)
        if codec not in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"{type(self).__name__}: codec must be torch.bfloat16 or torch.float16, got {codec}"
            )
        if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
            raise ValueError(
                f"{type(self).__name__}: min_numel must be an int of at least 0, got {min_numel!r}"
            )
        self.codec = codec
        self.min_numel = min_numel
        self.compressed = 0
        self._stream = StreamNumber()

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        if operation in _OPTIONS and not keywords:
            start = self._encode(operation, arguments)
            if start is not None:
                self.compressed += 1
                return start()
        return super().run_collective(operation, arguments, keywords)

    def _call(self, operation: str, *arguments: Any) -> Any:
        """The Work of the parent's operation."""
        return _C.as_work(super().run_collective(operation, arguments, {}))

    def _encode(self, operation: str, arguments: tuple[Any, ...]) -> Callable[[], Any] | None:
        """Starts the operation, and returns its Work; None for what passes as it is."""
        make_options = _OPTIONS[operation]
        tensors = 1 if operation.startswith("allreduce") else 2
        options = arguments[tensors] if len(arguments) > tensors else make_options()
        if not tensors <= len(arguments) <= tensors + 1 or not isinstance(options, make_options):
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
        if not self._is_large(tensors):
            return None
        numel = sum(tensor.numel() for tensor in tensors)
        adds_in_float32 = self.size() >= LEAST_RANKS and numel > 0
        padded = padded_numel(numel, self.size()) if adds_in_float32 else numel
        buffer = tensors[0].new_empty(padded, dtype=self.codec)
        wire = self._flatten(tensors, buffer[:numel])

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                unflatten_into(wire, tensors, scale=factor)
            return list(tensors)

        def start() -> Any:
            if not adds_in_float32:
                return FollowedWork(self._call(operation, [wire], _as_sum(options)), write_back)
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
        return _C.as_work(staged(first.get_future(), send, issue, lambda _: buffer, second))

    # ---- reduce-scatter --------------------------------------------------------------------------

    def _encode_reduce_scatter(
        self, operation: str, outputs: Any, inputs: Any, options: Any, factor: float
    ) -> Callable[[], Any] | None:
        in_lists = operation == "reduce_scatter"
        if in_lists and not all(isinstance(some, (list, tuple)) for some in inputs):
            return None
        flat = [each for some in inputs for each in some] if in_lists else inputs
        if not self._is_large(flat) or not self._is_large(outputs, at_least=0):
            return None
        if self.size() >= LEAST_RANKS and any(each.numel() for each in flat):
            parts = self._parts(outputs, inputs, in_lists=in_lists)
            if parts is not None:
                return lambda: self._scatter_in_float32(parts, outputs, options, factor)
        results = [output.new_empty(output.shape, dtype=self.codec) for output in outputs]
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

        new_options = _as_sum(options)
        if operation == "reduce_scatter_single":
            given: tuple[Any, ...] = results[0], sent[0], new_options
        else:
            given = results, sent, new_options
        return lambda: FollowedWork(self._call(operation, *given), write_back)

    def _parts(self, outputs: Any, inputs: Any, *, in_lists: bool) -> list[list[Tensor]] | None:
        """For each rank the tensors that go there; None where they do not fit the outputs."""
        ranks, rank = self.size(), self.rank()
        if len(inputs) != len(outputs):
            return None
        shares: list[Any] = list(inputs)
        if not in_lists:
            for each, output in zip(inputs, outputs, strict=True):
                if each.numel() != ranks * output.numel():
                    return None
            shares = [each.detach().view(ranks, -1).unbind() for each in inputs]
        for some, output in zip(shares, outputs, strict=True):
            if len(some) != ranks or some[rank].numel() != output.numel():
                return None
        return [list(of_rank) for of_rank in zip(*shares, strict=True)]

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
            return flatten(tensors, scale=1.0 / self.size(), dtype=self.codec, out=out)

    def _is_large(self, tensors: Any, at_least: int | None = None) -> bool:
        if not isinstance(tensors, (list, tuple)) or not tensors:
            return False
        for tensor in tensors:
            if (
                not isinstance(tensor, Tensor)
                or tensor.layout is not torch.strided
                or tensor.dtype not in (torch.float32, torch.float64)
                or not tensor.is_contiguous()
                or tensor.device != tensors[0].device
            ):
                return False
        at_least = self.min_numel if at_least is None else at_least
        numel: int = sum(tensor.numel() for tensor in tensors)
        return numel >= at_least


def _as_sum(options: Any) -> Any:
    """The same options for a sum."""
    changed = type(options)()
    for name in ("timeout", "asyncOp"):
        if hasattr(options, name):
            setattr(changed, name, getattr(options, name))
    changed.reduceOp = dist.ReduceOp.SUM
    return changed


def _with_timeout(make_options: Callable[[], Any], like: Any) -> Any:
    """Options of another operation, with the same timeout."""
    made = make_options()
    made.timeout = like.timeout
    return made
