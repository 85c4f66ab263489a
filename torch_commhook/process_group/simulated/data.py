"""A simulated collective: its arguments, each rank's part, and its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.process_group import operations
from torch_commhook.wording import check_type

# ---- the results of simulated collectives --------------------------------------------------------
#
# Sums are taken in the order of ranks, in the tensors' own dtype and rounded at each step, as Gloo
# does: on two ranks results have Gloo's bits.


#: For each rank: the values of its outputs.
Results = Sequence[Sequence[Tensor]]
#: From the calls of all ranks, in rank order, to the results of each.
Collective = Callable[[Sequence["Call"]], Results]

#: The binary functions of reductions; of bool they are the logical ones.
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


class Reduction:
    """A reduce operation; each tensor is first multiplied by the factor of ``PREMUL_SUM``."""

    def __init__(self, op: Any) -> None:
        kind = getattr(op, "op", op)  # a ReduceOp, or its enumeration
        self.name: str = kind.name
        self.factor = op.__getstate__()[1] if self.name == "PREMUL_SUM" else None

    def __str__(self) -> str:
        return self.name.lower()


@functools.lru_cache(maxsize=1000)
def pairwise(name: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The binary function of a reduction; None if torch does not support it for a dtype."""
    function = _PAIRWISE.get(name)
    if function is None or (dtype == torch.bool and name in ("AVG", "PREMUL_SUM")):
        return None
    one = torch.empty(1, dtype=dtype, device="cpu")
    try:
        return function if function(one, one).dtype == dtype else None
    except (RuntimeError, TypeError):
        return None


def reduce_tensors(tensors: Sequence[Tensor], reduction: Reduction | None) -> Tensor:
    """The reduction of one tensor of each rank, as a new tensor."""
    assert reduction is not None  # each collective that reduces has one
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
        total = torch.div(total, len(tensors), rounding_mode=None if exact else "trunc")
    return total.to(first.dtype)


def write(output: Tensor, value: Tensor) -> None:
    """Write a result, hidden from autograd: collectives are not differentiated."""
    if output.layout is torch.sparse_coo:
        with torch.no_grad():
            output.copy_(value)
    else:
        output.data.copy_(value.reshape(output.shape))


# ---- each collective: the calls of all ranks, in rank order, to the results of each --------------


def all_reduce(calls: Sequence[Call]) -> Results:
    """Each tensor's reduction, for all ranks."""
    totals = [
        functools.reduce(torch.add, tensors).coalesce().clone()
        if tensors[0].layout is torch.sparse_coo
        else reduce_tensors(tensors, calls[0].reduction)
        for tensors in zip(*(call.inputs for call in calls), strict=True)
    ]
    return [totals] * len(calls)


def broadcast(calls: Sequence[Call]) -> Results:
    """The root's tensors, for all ranks."""
    root = calls[0].root
    return [[] if rank == root else calls[root].inputs for rank in range(len(calls))]


def all_gather(calls: Sequence[Call]) -> Results:
    """Give each rank the tensors of all ranks."""
    return [[tensor.clone() for call in calls for tensor in call.inputs]] * len(calls)


def all_gather_single(calls: Sequence[Call]) -> Results:
    """Give each rank the tensors of all ranks in one tensor."""
    gathered = [_cat(tensors) for tensors in zip(*(call.inputs for call in calls), strict=True)]
    return [gathered] * len(calls)


def for_root(collective: Collective) -> Collective:
    """A collective whose results only the root gets."""

    def run(calls: Sequence[Call]) -> Results:
        return [
            values if rank == calls[0].root else [] for rank, values in enumerate(collective(calls))
        ]

    run.__doc__ = (collective.__doc__ or "").replace("each rank", "the root")
    return run


reduce = for_root(all_reduce)
gather = for_root(all_gather)
gather_single = for_root(all_gather_single)


def scatter(calls: Sequence[Call]) -> Results:
    """Give each rank its tensor of the root's."""
    return [[piece.clone()] for piece in calls[calls[0].root].inputs]


def reduce_scatter(calls: Sequence[Call]) -> Results:
    """Reduce one tensor for each rank."""
    pieces = zip(*(call.inputs for call in calls), strict=True)
    return [[reduce_tensors(tensors, calls[0].reduction)] for tensors in pieces]


def reduce_scatter_single(calls: Sequence[Call]) -> Results:
    """Reduce tensors and give each rank its share."""
    totals = all_reduce(calls)[0]
    shares = [total.reshape(len(calls), total.numel() // len(calls)) for total in totals]
    return [[share[rank] for share in shares] for rank in range(len(calls))]


def all_to_all(calls: Sequence[Call]) -> Results:
    """For each rank, the tensors that all ranks have for it."""
    return [[call.inputs[rank].clone() for call in calls] for rank in range(len(calls))]


def all_to_all_single(calls: Sequence[Call]) -> Results:
    """For each rank, the rows that all ranks have for it."""
    pieces = [call.inputs[0].split(call.splits) for call in calls]
    return [[_cat([of_one[rank] for of_one in pieces])] for rank in range(len(calls))]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    return torch.cat([tensor.reshape(-1).to(device) for tensor in tensors])


# ---- one rank's part in a simulated collective ---------------------------------------------------


@dataclass(frozen=True)
class Call(operations.Call):
    """One rank's part in a collective.

    Attributes:
        key: properties that must be the same on all ranks.
        text: a description for messages.
        reduction: its reduction, if it has one.
        gets: the rows from each rank, for an all-to-all of one tensor.
    """

    key: tuple[Any, ...] = ()
    text: Callable[[], str] = str
    reduction: Reduction | None = None
    gets: Sequence[int] = ()

    @property
    def returned(self) -> list[Tensor]:
        """The value of its Future."""
        return self.inputs if self.operation == "send" else self.outputs

    def __str__(self) -> str:
        details = self.text()
        return f"{self.operation} of {details}" if details else self.operation


# ---- checks of a simulated collective's arguments, and their text in messages --------------------


def tensors_of(
    operation: str, name: str, value: Any, *, count: int | None = None, sparse: bool = False
) -> list[Tensor]:
    """The tensors of an argument; a single tensor counts as a list of one."""
    tensors = [value] if isinstance(value, Tensor) else value
    check_type(f"{operation}: {name}", tensors, "a list of tensors", list, tuple)
    for tensor in tensors:
        check_type(f"{operation}: {name}", tensor, "tensors", Tensor)
        if tensor.layout is not torch.strided and not (
            sparse and tensor.layout is torch.sparse_coo
        ):
            raise TypeError(
                f"{operation}: {name} must be dense (torch.strided), got layout {tensor.layout}"
            )
    if count is not None and len(tensors) != count:
        raise ValueError(f"{operation}: {name} must be {count} tensors, got {len(tensors)}")
    return list(tensors)


def only_list(value: Any) -> Any:
    """The inner list of a list of one list, which some collectives use; a plain list as it is."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        return value[0]
    return value


def check_like(operation: str, name: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    """Raise ValueError if a tensor has another number of elements or dtype."""
    for tensor in tensors:
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{operation}: {name} must be of {like.numel()} elements of {like.dtype} each, "
                f"got {text_of([tensor])}"
            )


def check_times(
    operation: str, name: str, large: Sequence[Tensor], small: Sequence[Tensor], times: int
) -> None:
    """Raise ValueError unless one tensor has ``times`` as many elements as the other."""
    for whole, share in zip(large, small, strict=True):
        if whole.numel() != times * share.numel() or whole.dtype != share.dtype:
            raise ValueError(
                f"{operation}: {name} must be of {times} times {share.numel()} elements of "
                f"{share.dtype}, got {text_of([whole])}"
            )


def reduction_of(operation: str, opts: Any, tensors: Sequence[Tensor]) -> Reduction:
    """The reduction of options, or of an operation in their place."""
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)
    kinds = dist.ReduceOp, dist.ReduceOp.RedOpType
    check_type(f"{operation}: op", op, "a ReduceOp", *kinds)
    reduction = Reduction(op)
    for tensor in tensors:
        if pairwise(reduction.name, tensor.dtype) is None:
            raise ValueError(
                f"{operation}: op must be one for tensors of {tensor.dtype}, got {reduction}"
            )
        if tensor.layout is torch.sparse_coo and reduction.name != "SUM":
            raise ValueError(f"{operation}: op must be sum for sparse tensors, got {reduction}")
    return reduction


def root_of(operation: str, opts: Any, size: int) -> int:
    """The root of options, or the number in their place."""
    root = getattr(opts, "rootRank", 0 if opts is None else opts)
    return peer_of(operation, "root", root, size)


def peer_of(operation: str, name: str, rank: Any, size: int) -> int:
    """Check a rank of the group, and return it."""
    check_type(f"{operation}: {name}", rank, "a rank", int)
    if not 0 <= rank < size:
        raise ValueError(f"{operation}: {name} must be a rank below {size}, got {rank}")
    return int(rank)


def split_sizes(operation: str, name: str, tensor: Tensor, splits: Any, ranks: int) -> list[int]:
    """The number of a tensor's rows for each rank; equal shares for None or an empty list."""
    if not tensor.dim():
        raise ValueError(f"{operation}: {name} must have at least one dimension, got shape []")
    rows = tensor.shape[0]
    if not splits:
        if rows % ranks:
            raise ValueError(
                f"{operation}: {name} must have a multiple of {ranks} rows, or splits, got "
                f"{text_of([tensor])}"
            )
        return [rows // ranks] * ranks
    sizes = [int(size) for size in splits]
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{operation}: {name}_splits must be {ranks} sizes that add up to {rows} rows, "
            f"got {sizes}"
        )
    return sizes


def signature(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The properties of tensors that must be the same on all ranks."""
    return tuple(
        (tensor.dtype, tensor.numel() if tensor.layout is torch.strided else tensor.shape)
        for tensor in tensors
    )


def text_of(tensors: Sequence[Tensor]) -> str:
    """A text such as ``float32 [4]``."""
    return ", ".join(
        f"{'' if tensor.layout is torch.strided else 'sparse '}{dtype_name(tensor.dtype)} "
        f"{list(tensor.shape)}"
        for tensor in tensors
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A text such as ``float32``."""
    return str(dtype).removeprefix("torch.")
