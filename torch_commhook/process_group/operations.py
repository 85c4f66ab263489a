"""Arguments of a process group's methods: tensors, root, and the bytes that they send."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from torch_commhook.metrics import ring_all_reduce_bytes, tensor_bytes


class _HookOpName(enum.Enum):
    """The operation of a hook's call: the names and values of torch 2.15."""

    SEND = 0
    RECV = 1
    BROADCAST = 2
    ALLREDUCE = 3
    REDUCE = 4
    ALLGATHER = 5
    REDUCE_SCATTER = 6
    ALLTOALL = 7
    BARRIER = 8
    SCATTER = 9
    GATHER = 10
    SPLIT = 11
    NEW_WINDOW = 12
    ALLREDUCE_COALESCED = 13
    ALLGATHER_BASE = 14
    ALLGATHER_COALESCED = 15
    ALLGATHER_INTO_TENSOR_COALESCED = 16
    REDUCE_SCATTER_BASE = 17
    REDUCE_SCATTER_TENSOR_COALESCED = 18
    ALLTOALL_BASE = 19
    UNKNOWN = 20


#: PyTorch's own if it has all of them, so that one hook serves its groups and ours.
HookOpName: Any = getattr(c10d, "HookOpName", _HookOpName)
if not hasattr(HookOpName, "ALLTOALL_BASE"):
    HookOpName = _HookOpName


@dataclass(frozen=True)
class Call:
    """One call of a method that communicates.

    Attributes:
        operation: the method's newest name.
        name: its name for PyTorch's hooks, a ``HookOpName``.
        inputs: the tensors that are read.
        outputs: the tensors that are written; the same ones for an operation in place.
        root: the rank with the result or the source; the peer of a send or receive; else -1.
        async_op: whether the caller asked for a Work.
        splits: rows for each rank, for an all-to-all of one tensor with unequal splits.
    """

    operation: str
    name: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    root: int = -1
    async_op: bool = True
    splits: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs, or of the outputs if nothing is read."""
        return sum(tensor_bytes(tensor) for tensor in self.inputs or self.outputs)

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        """Sizes of the inputs, or of the outputs if nothing is read."""
        return tuple(tensor.size() for tensor in self.inputs or self.outputs)

    @property
    def dtype(self) -> torch.dtype | None:
        """The first tensor's dtype; None without tensors."""
        for tensor in self.inputs or self.outputs:
            return tensor.dtype
        return None

    def bytes_sent(self, rank: int, world_size: int) -> int:
        """The minimum of bytes that a rank must send, by the contents of all ranks afterwards."""
        count = _BYTES_SENT.get(self.operation)
        return 0 if count is None or world_size == 1 else count(self, rank, world_size)


#: By operation: its hook name, and the positions of inputs and outputs among the arguments.
_SIGNATURES: dict[str, tuple[str, int | None, int | None]] = {
    "allgather": ("ALLGATHER", 1, 0),
    "all_gather_single": ("ALLGATHER_BASE", 1, 0),
    "all_gather_single_coalesced": ("ALLGATHER_INTO_TENSOR_COALESCED", 1, 0),
    "allgather_coalesced": ("ALLGATHER_COALESCED", 1, 0),
    "allreduce": ("ALLREDUCE", 0, 0),
    "allreduce_coalesced": ("ALLREDUCE_COALESCED", 0, 0),
    "all_to_all_single": ("ALLTOALL_BASE", 1, 0),
    "alltoall": ("ALLTOALL", 1, 0),
    "barrier": ("BARRIER", None, None),
    "broadcast": ("BROADCAST", 0, 0),
    "end_coalescing": ("UNKNOWN", None, None),
    "gather": ("GATHER", 1, 0),
    "gather_single": ("GATHER", 1, 0),
    "monitored_barrier": ("BARRIER", None, None),
    "new_window": ("NEW_WINDOW", 0, None),
    "recv": ("RECV", None, 0),
    "recv_anysource": ("RECV", None, 0),
    "reduce": ("REDUCE", 0, 0),
    "reduce_scatter": ("REDUCE_SCATTER", 1, 0),
    "reduce_scatter_single": ("REDUCE_SCATTER_BASE", 1, 0),
    "reduce_scatter_single_coalesced": ("REDUCE_SCATTER_TENSOR_COALESCED", 1, 0),
    "scatter": ("SCATTER", 1, 0),
    "send": ("SEND", 0, None),
    "split_group": ("SPLIT", None, None),
}


#: All methods with hooks, by their newest names.
OPERATIONS = frozenset(_SIGNATURES)
#: The methods that communicate. All but monitored_barrier return a Work.
COLLECTIVES = OPERATIONS - {"new_window", "split_group"}


#: The names of a method's parameters in PyTorch's bindings, in order.
_PARAMETERS: dict[str, str] = {
    "allgather": "output_tensors input_tensors|input_tensor opts|timeout",
    "all_gather_single": "output input opts",
    "all_gather_single_coalesced": "outputs inputs opts",
    "allgather_coalesced": "output_lists input_list opts",
    "allreduce": "tensors|tensor opts|op timeout",
    "allreduce_coalesced": "tensors opts",
    "all_to_all_single": "output input output_split_sizes input_split_sizes opts|timeout",
    "alltoall": "output_tensors input_tensors opts",
    "barrier": "opts|timeout",
    "broadcast": "tensors|tensor opts|root timeout",
    "end_coalescing": "device_type",
    "gather": "output_tensors input_tensors|input_tensor opts|root timeout",
    "gather_single": "output input opts",
    "monitored_barrier": "timeout wait_all_ranks",
    "new_window": "tensor",
    "recv": "tensors srcRank tag",
    "reduce": "tensors|tensor opts|root op timeout",
    "reduce_scatter": "output_tensors|output input_tensors|input opts|op timeout",
    "reduce_scatter_single": "outputTensor|output inputTensor|input opts",
    "reduce_scatter_single_coalesced": "outputs inputs opts",
    "scatter": "output_tensors|output_tensor input_tensors opts|root timeout",
    "send": "tensors dstRank tag",
}


def by_position(
    operation: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with its keywords in their positions, as far as these are consecutive."""
    left = dict(keywords)
    if left:
        for names in _PARAMETERS.get(operation, "").split()[len(arguments) :]:
            name = next((each for each in names.split("|") if each in left), None)
            if name is None:
                break
            arguments = (*arguments, left.pop(name))
    return arguments, left


def describe(operation: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Call | None:
    """Describe a call of a group's method; None if it does not communicate.

    Args:
        operation: the method's newest name.
        arguments: its arguments, without the group.
        keywords: its keyword arguments.
    """
    signature = _SIGNATURES.get(operation)
    if signature is None:
        return None
    name, read, written = signature
    arguments, keywords = by_position(operation, tuple(arguments), keywords)
    values = (*arguments, *keywords.values())
    inputs = [] if read is None else _tensors(values[read : read + 1])
    outputs = inputs if written == read else []
    if written is not None and written != read:
        outputs = _tensors(values[written : written + 1])
    options = next((value for value in values if hasattr(value, "timeout")), None)
    root, splits = getattr(options, "rootRank", -1), ()
    if operation in ("send", "recv", "broadcast", "reduce") and len(values) > 1:
        if isinstance(values[1], int):  # a peer, or the root in PyTorch's short forms
            root = values[1]
    elif operation == "all_to_all_single" and len(values) > 3:
        splits = values[3]
    return Call(
        operation,
        getattr(HookOpName, name),
        inputs,
        outputs,
        root,
        getattr(options, "asyncOp", True),
        splits,
    )


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


# ---- bytes on the wire: the minimum that a rank must send ----------------------------------------


def _share(call: Call, rank: int, world_size: int) -> int:
    return round(call.nbytes * (world_size - 1) / world_size)


def _all_to_all_single(call: Call, rank: int, world_size: int) -> int:
    if not call.splits or not call.inputs or not call.inputs[0].dim():
        return _share(call, rank, world_size)
    rows = max(call.inputs[0].shape[0], 1)
    return call.nbytes // rows * (sum(call.splits) - call.splits[rank])


def _all_but_own(call: Call, rank: int, world_size: int) -> int:
    others = [tensor for place, tensor in enumerate(call.inputs) if place != rank]
    return sum(tensor_bytes(tensor) for tensor in others)


def _to_all(call: Call, rank: int, world_size: int) -> int:
    return call.nbytes * (world_size - 1)


_BYTES_SENT: dict[str, Callable[[Call, int, int], int]] = {
    "allgather": _to_all,
    "all_gather_single": _to_all,
    "all_gather_single_coalesced": _to_all,
    "allgather_coalesced": _to_all,
    "allreduce": lambda call, rank, size: ring_all_reduce_bytes(call.nbytes, size),
    "allreduce_coalesced": lambda call, rank, size: ring_all_reduce_bytes(call.nbytes, size),
    "all_to_all_single": _all_to_all_single,
    "alltoall": _all_but_own,
    # All but one rank must receive it. The backend chooses the senders: an equal share each.
    "broadcast": _share,
    "reduce": _share,
    "gather": lambda call, rank, size: 0 if rank == call.root else call.nbytes,
    "gather_single": lambda call, rank, size: 0 if rank == call.root else call.nbytes,
    "reduce_scatter": _share,
    "reduce_scatter_single": _share,
    "reduce_scatter_single_coalesced": _share,
    "scatter": lambda call, rank, size: _all_but_own(call, rank, size) if call.inputs else 0,
    "send": lambda call, rank, size: call.nbytes,
}
