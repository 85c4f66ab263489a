"""A process group that sends large tensors in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook._ops import flatten, unflatten_into
from torch_commhook.process_group.work import FollowedWork
from torch_commhook.process_group.wrapper import WrapperProcessGroup

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
    divided by the number of ranks (in float32) and rounded to ``codec``; the parent adds in that
    dtype, and the result is scaled and cast back in one pass. Divided first, the sum stays in range
    where the mean does (float16: up to 65504). All else passes as it is: other reductions and
    dtypes, small, sparse and non-contiguous tensors. So ``fully_shard``, DTensor and DDP send
    compressed gradients without a hook; so do sums that are no gradients, which ``min_numel``
    should leave alone.

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

    def _run(self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if operation in _OPTIONS and not keywords:
            encoded = self._encode(operation, arguments)
            if encoded is not None:
                self.compressed += 1
                wire, write_back = encoded
                work = super()._run(*wire, {})
                work = _C.as_work(work)
                return FollowedWork(work, write_back)
        return super()._run(operation, arguments, keywords)

    def _encode(
        self, operation: str, arguments: tuple[Any, ...]
    ) -> tuple[tuple[str, tuple[Any, ...]], Callable[[], Any]] | None:
        """What the parent is called with, and what follows; None for what passes as it is."""
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

    def _encode_allreduce(
        self, operation: str, tensors: Any, options: Any, factor: float
    ) -> tuple[tuple[str, tuple[Any, ...]], Callable[[], Any]] | None:
        if not self._is_large(tensors):
            return None
        wire = self._flatten(tensors)

        def write_back() -> list[Tensor]:
            with torch.no_grad():
                unflatten_into(wire, tensors, scale=factor)
            return list(tensors)

        return (operation, ([wire], _as_sum(options))), write_back

    def _encode_reduce_scatter(
        self, operation: str, outputs: Any, inputs: Any, options: Any, factor: float
    ) -> tuple[tuple[str, tuple[Any, ...]], Callable[[], Any]] | None:
        in_lists = operation == "reduce_scatter"
        if in_lists and not all(isinstance(some, (list, tuple)) for some in inputs):
            return None
        flat = [each for some in inputs for each in some] if in_lists else inputs
        if not self._is_large(flat) or not self._is_large(outputs, at_least=0):
            return None
        results = [output.new_empty(output.shape, dtype=self.codec) for output in outputs]
        sent: list[Any] = []
        for each in inputs:
            parts = list(each) if in_lists else [each]
            wire = self._flatten(parts)
            views = [
                view.view(part.shape)
                for view, part in zip(
                    wire.split([part.numel() for part in parts]), parts, strict=True
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
            return (operation, (results[0], sent[0], new_options)), write_back
        return (operation, (results, sent, new_options)), write_back

    def _flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return flatten(tensors, scale=1.0 / self.size(), dtype=self.codec)

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
        return sum(tensor.numel() for tensor in tensors) >= at_least


def _as_sum(options: Any) -> Any:
    """The same options for a sum."""
    changed = type(options)()
    for name in ("timeout", "asyncOp"):
        if hasattr(options, name):
            setattr(changed, name, getattr(options, name))
    changed.reduceOp = dist.ReduceOp.SUM
    return changed
