"""The results of simulated collectives.

Sums are taken in the order of ranks, in the tensors' own dtype and rounded at each step, as Gloo
does: on two ranks results have Gloo's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

#: For each rank: the values of its outputs.
Results = Sequence[Sequence[Tensor]]

_ON_BOOL = {
    "SUM": torch.logical_or,
    "MAX": torch.logical_or,
    "BOR": torch.logical_or,
    "PRODUCT": torch.logical_and,
    "MIN": torch.logical_and,
    "BAND": torch.logical_and,
    "BXOR": torch.logical_xor,
}
_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Part(Protocol):
    """One rank's input to a collective: see ``simulated.call.Call``."""

    inputs: Sequence[Tensor]
    reduction: Reduction | None
    root: int
    input_splits: Sequence[int]


class Reduction:
    """A reduce operation of a collective's options.

    Attributes:
        name: such as ``SUM``.
        factor: the factor of ``PREMUL_SUM``, which multiplies each tensor first.
    """

    def __init__(self, op: Any) -> None:
        kind = getattr(op, "op", op)  # a ReduceOp, or its enumeration
        self.name: str = kind.name
        self.factor = op.__getstate__()[1] if self.name == "PREMUL_SUM" else None

    def key(self) -> tuple[str, Any]:
        """The properties that must be the same on all ranks. A factor may differ."""
        return self.name, None

    def __str__(self) -> str:
        return self.name.lower()


def pairwise(name: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The binary function of a reduction; None if there is none."""
    if dtype == torch.bool:
        return _ON_BOOL.get(name)
    return _PAIRWISE.get(name)


@lru_cache(maxsize=1000)
def can_reduce(name: str, dtype: torch.dtype) -> bool:
    """Whether torch supports the reduction for a dtype."""
    function = pairwise(name, dtype)
    if function is None:
        return False
    one = torch.empty(1, dtype=dtype, device="cpu")
    try:
        return function(one, one).dtype == dtype
    except (RuntimeError, TypeError):
        return False


def reduce_tensors(tensors: Sequence[Tensor], reduction: Reduction, ranks: int) -> Tensor:
    """The reduction of one tensor of each rank, as a new tensor."""
    first = tensors[0]
    function = pairwise(reduction.name, first.dtype)
    assert function is not None
    if reduction.factor is not None:
        tensors = [tensor * reduction.factor for tensor in tensors]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = function(total, tensor.to(first.device).reshape(total.shape))
    if reduction.name == "AVG":
        exact = total.is_floating_point() or total.is_complex()
        total = torch.div(total, ranks, rounding_mode=None if exact else "trunc")
    return total.to(first.dtype)


def reduce_sparse(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of sparse tensors, coalesced."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total.coalesce().clone()


def write(output: Tensor, value: Tensor) -> None:
    """Write a result, hidden from autograd: collectives are not differentiated."""
    if output.layout is torch.sparse_coo:
        with torch.no_grad():
            output.copy_(value)
    else:
        output.data.copy_(value.reshape(output.shape))


# ---- each collective: the calls of all ranks, in rank order, to the results of each --------------


def all_reduce(calls: Sequence[Part]) -> Results:
    """Each tensor's reduction, for all ranks."""
    totals = []
    for tensors in zip(*(call.inputs for call in calls), strict=True):
        if tensors[0].layout is torch.sparse_coo:
            totals.append(reduce_sparse(tensors))
        else:
            reduction = _merged(calls)
            totals.append(reduce_tensors(tensors, reduction, len(calls)))
    return [totals] * len(calls)


def _merged(calls: Sequence[Part]) -> Reduction:
    reduction = calls[0].reduction
    assert reduction is not None
    return reduction


def reduce(calls: Sequence[Part]) -> Results:
    """The reduction, for the root."""
    root = calls[0].root
    totals = all_reduce(calls)[root]
    return [totals if rank == root else [] for rank in range(len(calls))]


def broadcast(calls: Sequence[Part]) -> Results:
    """The root's tensors, for all ranks."""
    root = calls[0].root
    return [[] if rank == root else calls[root].inputs for rank in range(len(calls))]


def all_gather(calls: Sequence[Part]) -> Results:
    """The tensors of each rank one after another, for all ranks."""
    return [[tensor.clone() for call in calls for tensor in call.inputs]] * len(calls)


def all_gather_single(calls: Sequence[Part]) -> Results:
    """For each tensor those of all ranks in one, for all ranks."""
    gathered = [_cat(tensors) for tensors in zip(*(call.inputs for call in calls), strict=True)]
    return [gathered] * len(calls)


def gather(calls: Sequence[Part]) -> Results:
    """As all_gather, for the root."""
    root = calls[0].root
    gathered = [call.inputs[0] for call in calls]
    return [gathered if rank == root else [] for rank in range(len(calls))]


def gather_single(calls: Sequence[Part]) -> Results:
    """As all_gather_single, for the root."""
    root = calls[0].root
    gathered = [_cat([call.inputs[0] for call in calls])]
    return [gathered if rank == root else [] for rank in range(len(calls))]


def scatter(calls: Sequence[Part]) -> Results:
    """For each rank its tensor of the root's."""
    pieces = calls[calls[0].root].inputs
    return [[piece.clone()] for piece in pieces]


def reduce_scatter(calls: Sequence[Part]) -> Results:
    """For each rank the reduction of its tensors on all ranks."""
    reduction = _merged(calls)
    pieces = zip(*(call.inputs for call in calls), strict=True)
    return [[reduce_tensors(tensors, reduction, len(calls))] for tensors in pieces]


def reduce_scatter_single(calls: Sequence[Part]) -> Results:
    """For each tensor, each rank's share of the reduction."""
    ranks, reduction = len(calls), _merged(calls)
    shares = [
        reduce_tensors([tensor.reshape(-1) for tensor in tensors], reduction, ranks).chunk(ranks)
        for tensors in zip(*(call.inputs for call in calls), strict=True)
    ]
    if not shares or not shares[0]:
        return [[] for _ in calls]
    return [[share[rank] for share in shares] for rank in range(ranks)]


def all_to_all(calls: Sequence[Part]) -> Results:
    """For each rank, the tensors that all ranks have for it."""
    return [[call.inputs[rank].clone() for call in calls] for rank in range(len(calls))]


def all_to_all_single(calls: Sequence[Part]) -> Results:
    """For each rank, the rows that all ranks have for it."""
    pieces = [call.inputs[0].split(call.input_splits) for call in calls]
    return [[_cat([of_one[rank] for of_one in pieces])] for rank in range(len(calls))]


def barrier(calls: Sequence[Part]) -> Results:
    """Nothing, for all ranks."""
    return [[] for _ in calls]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    return torch.cat([tensor.reshape(-1).to(device) for tensor in tensors])
