"""The operations of a process group: their arguments, bytes, and messages."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from torch_commhook.collectives.issuing import FEW_RANKS, FEW_ROUNDS, is_gathered, sum_bytes
from torch_commhook.metrics import ring_all_reduce_bytes, tensor_bytes

# ---- arguments of a process group's methods: tensors, root, and the bytes that they send ---------


def _hook_op_name() -> Any:
    """PyTorch's enumeration if it has all names, else one with the names and values of 2.15."""
    own = getattr(c10d, "HookOpName", None)
    if hasattr(own, "ALLTOALL_BASE"):
        return own
    names = (
        "SEND RECV BROADCAST ALLREDUCE REDUCE ALLGATHER REDUCE_SCATTER ALLTOALL BARRIER SCATTER "
        "GATHER SPLIT NEW_WINDOW ALLREDUCE_COALESCED ALLGATHER_BASE ALLGATHER_COALESCED "
        "ALLGATHER_INTO_TENSOR_COALESCED REDUCE_SCATTER_BASE REDUCE_SCATTER_TENSOR_COALESCED "
        "ALLTOALL_BASE UNKNOWN"
    )
    make: Any = enum.Enum
    made = make("HookOpName", names, start=0)
    made.__doc__ = "The operation of a hook's call: the names and values of torch 2.15."
    return made


#: The operation of a hook's call. PyTorch's own if possible, so that one hook serves its groups and
#: ours.
HookOpName: Any = _hook_op_name()


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
    def tensors(self) -> list[Tensor]:
        """All tensors that are read or written."""
        return [*self.inputs, *self.outputs]

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


#: By operation: its hook name, and the names of its parameters in PyTorch's bindings, in order.
_SIGNATURES: dict[str, tuple[str, str]] = {
    "allgather": ("ALLGATHER", "output_tensors input_tensors|input_tensor opts|timeout"),
    "all_gather_single": ("ALLGATHER_BASE", "output input opts"),
    "all_gather_single_coalesced": ("ALLGATHER_INTO_TENSOR_COALESCED", "outputs inputs opts"),
    "allgather_coalesced": ("ALLGATHER_COALESCED", "output_lists input_list opts"),
    "allreduce": ("ALLREDUCE", "tensors|tensor opts|op timeout"),
    "allreduce_coalesced": ("ALLREDUCE_COALESCED", "tensors opts"),
    "all_to_all_single": (
        "ALLTOALL_BASE",
        "output input output_split_sizes input_split_sizes opts|timeout",
    ),
    "alltoall": ("ALLTOALL", "output_tensors input_tensors opts"),
    "barrier": ("BARRIER", "opts|timeout"),
    "broadcast": ("BROADCAST", "tensors|tensor opts|root timeout"),
    "end_coalescing": ("UNKNOWN", "device_type"),
    "gather": ("GATHER", "output_tensors input_tensors|input_tensor opts|root timeout"),
    "gather_single": ("GATHER", "output input opts"),
    "monitored_barrier": ("BARRIER", "timeout wait_all_ranks"),
    "new_window": ("NEW_WINDOW", "tensor"),
    "recv": ("RECV", "tensors srcRank tag"),
    "recv_anysource": ("RECV", ""),
    "reduce": ("REDUCE", "tensors|tensor opts|root op timeout"),
    "reduce_scatter": (
        "REDUCE_SCATTER",
        "output_tensors|output input_tensors|input opts|op timeout",
    ),
    "reduce_scatter_single": ("REDUCE_SCATTER_BASE", "outputTensor|output inputTensor|input opts"),
    "reduce_scatter_single_coalesced": ("REDUCE_SCATTER_TENSOR_COALESCED", "outputs inputs opts"),
    "scatter": ("SCATTER", "output_tensors|output_tensor input_tensors opts|root timeout"),
    "send": ("SEND", "tensors dstRank tag"),
    "split_group": ("SPLIT", ""),
}
#: All methods with hooks, by their newest names.
OPERATIONS = frozenset(_SIGNATURES)
#: The methods that communicate. All but monitored_barrier return a Work.
COLLECTIVES = OPERATIONS - {"new_window", "split_group"}

ALL_REDUCES = ("allreduce", "allreduce_coalesced")
REDUCE_SCATTERS = ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced")
ALL_GATHERS = (
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
)
_GATHERS = ("gather", "gather_single")
_RECEIVES = ("recv", "recv_anysource")


def by_position(
    operation: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with its keywords in their positions, as far as these are consecutive."""
    left = dict(keywords)
    if left:
        for names in _SIGNATURES[operation][1].split()[len(arguments) :]:
            name = next((each for each in names.split("|") if each in left), None)
            if name is None:
                break
            arguments = (*arguments, left.pop(name))
    return arguments, left


def describe(operation: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Call:
    """Describe a call of one of ``OPERATIONS``; the arguments are those without the group."""
    name, parameters = _SIGNATURES[operation]
    arguments, keywords = by_position(operation, tuple(arguments), keywords)
    values = (*arguments, *keywords.values())
    outputs = inputs = _tensors(values[:1])  # in place, or no tensors
    if parameters.startswith("output"):
        inputs = _tensors(values[1:2])
    elif operation in _RECEIVES:
        inputs = []
    elif operation in ("send", "new_window"):
        outputs = []
    options = next((value for value in values if hasattr(value, "timeout")), None)
    root, splits = getattr(options, "rootRank", -1), ()
    if operation in ("send", "recv", "broadcast", "reduce") and len(values) > 1:
        if isinstance(values[1], int):  # a peer, or the root in PyTorch's short forms
            root = values[1]
    elif operation == "all_to_all_single" and len(values) > 3:
        splits = values[3]
    async_op = getattr(options, "asyncOp", True)
    return Call(operation, getattr(HookOpName, name), inputs, outputs, root, async_op, splits)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def mapped(values: Any, function: Callable[[Any], Any]) -> Any:
    """The values of ``function`` for all values in lists of lists."""
    if isinstance(values, (list, tuple)):
        return [mapped(value, function) for value in values]
    return function(values)


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
    **dict.fromkeys(ALL_GATHERS, _to_all),
    **dict.fromkeys(ALL_REDUCES, lambda call, rank, size: ring_all_reduce_bytes(call.nbytes, size)),
    "all_to_all_single": _all_to_all_single,
    "alltoall": _all_but_own,
    # For broadcast and reduce: all but one rank must receive it, or send it. The backend chooses
    # the senders: an equal share each.
    **dict.fromkeys(("broadcast", "reduce", *REDUCE_SCATTERS), _share),
    **dict.fromkeys(_GATHERS, lambda call, rank, size: 0 if rank == call.root else call.nbytes),
    "scatter": lambda call, rank, size: _all_but_own(call, rank, size) if call.inputs else 0,
    "send": lambda call, rank, size: call.nbytes,
}


# ---- the messages of Gloo's collectives, and their order -----------------------------------------
#
# In Gloo a receiver requests each message from the sender. If both reach a message at the same
# time, it takes a round trip: the request, then the message.


#: The library's own collectives, see :class:`torch_commhook.collectives.issuing.Place`. Nobody has
#: to request their messages.
EXCHANGE, GATHER, SUM = "exchange", "gather in place", "sum in place"
#: The largest message of Gloo's all-reduce and reduce.
_MOST_SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Traffic:
    """The part of a process group's call that matters for a link.

    Attributes:
        operation: the method, by its newest name.
        ranks: the number of the group's ranks.
        nbytes: bytes of the tensors that it reads; of those that it writes if it reads nothing.
        carried: bytes that the rank's link carries, in the direction that carries more.
        is_root: whether this rank gathers or scatters.
    """

    operation: str
    ranks: int
    nbytes: float
    carried: float
    is_root: bool = False

    def scaled(self, factor: float) -> Traffic:
        """The same call on tensors that are ``factor`` times as large."""
        return replace(self, nbytes=self.nbytes * factor, carried=self.carried * factor)


@dataclass(frozen=True)
class Messages:
    """Messages that a rank receives in one part of a collective.

    Attributes:
        count: the number of messages.
        nbytes: the size of each.
        at_once: the number of messages in flight: each waits for the one this many before it.
        is_requested: whether the receiver requests each message when the collective reaches it,
            which takes one more latency. Otherwise requests were sent in advance.
        shares_connection: whether requests queue behind the rank's own messages, as in collectives
            between two ranks.
        latencies: the latencies of each message: 1, or more for a message that stands for several
            (:func:`merged`).
    """

    count: int
    nbytes: float
    at_once: int = 1
    is_requested: bool = True
    shares_connection: bool = False
    latencies: float = 1.0


def traffic_of(call: Call, rank: int, ranks: int) -> Traffic:
    """The load of a call on one rank's link, in a group of ``ranks`` ranks."""
    carried = link_bytes(call, rank, ranks)
    return Traffic(call.operation, ranks, call.nbytes, carried, call.root == rank)


def link_bytes(call: Call, rank: int, ranks: int) -> int:
    """The bytes that a rank's link carries for an operation, in the direction that carries more."""
    if ranks == 1:
        return 0
    if call.operation in ("broadcast", "reduce", *_RECEIVES):
        return call.nbytes  # each rank sends or receives these at least once
    if call.operation in _GATHERS:
        return call.nbytes * (ranks - 1 if rank == call.root else 1)
    if call.operation == "scatter" and rank != call.root:
        return sum(tensor_bytes(tensor) for tensor in call.outputs)
    return call.bytes_sent(rank, ranks)


def on_transport(traffic: Traffic) -> Traffic:
    """A hook's collective over the library's own transport."""
    ranks, nbytes = traffic.ranks, traffic.nbytes
    if ranks == 1 or nbytes == 0:
        return traffic
    if traffic.operation == "all_to_all_single":
        return replace(traffic, operation=EXCHANGE)
    if traffic.operation == "all_gather_single":
        return replace(traffic, operation=GATHER, carried=nbytes * (ranks - 1))
    if traffic.operation == "allreduce":
        return replace(traffic, operation=SUM, carried=sum_bytes(nbytes, ranks))
    return traffic


def is_each_to_each(traffic: Traffic) -> bool:
    """Whether all ranks send messages to all others."""
    if traffic.operation in (GATHER, SUM):
        return traffic.ranks <= FEW_RANKS
    return traffic.operation in ("all_to_all_single", EXCHANGE)


def messages_of(traffic: Traffic) -> list[Messages]:
    """The parts of a collective, in order; none if nothing is sent."""
    parts = _PARTS.get(traffic.operation)
    if traffic.ranks < 2 or parts is None:
        return []
    shares = traffic.ranks == 2 and traffic.operation not in (EXCHANGE, GATHER, SUM)
    return [replace(each, shares_connection=shares) for each in parts(traffic)]


def has_a_thread(traffic: Traffic) -> bool:
    """Whether the operation occupies one of the group's few threads."""
    without = ("send", *_RECEIVES, "monitored_barrier", EXCHANGE, GATHER, SUM)
    return traffic.operation not in without


def merged(parts: Sequence[Messages], most: int) -> list[Messages]:
    """The same bytes and latencies in fewer messages, if a part has more than ``most``.

    For collectives of many ranks, which have too many messages to simulate each one.
    """
    found = []
    for each in parts:
        rounds = math.ceil(each.count / each.at_once)
        kept = max(1, most // each.at_once)
        if rounds > kept:
            count = kept * each.at_once
            nbytes = each.nbytes * each.count / count
            each = replace(each, count=count, nbytes=nbytes, latencies=rounds / kept)
        found.append(each)
    return found


# ---- by collective -------------------------------------------------------------------------------


def _around_ring(traffic: Traffic) -> Messages:
    """A tensor's segments, two in flight, each passing all ranks."""
    ranks, nbytes = traffic.ranks, traffic.nbytes
    least = max(math.ceil(nbytes / _MOST_SEGMENT_BYTES), 2 * ranks)
    of_a_rank = math.ceil(least / ranks)
    return Messages(of_a_rank * (ranks - 1), nbytes / (of_a_rank * ranks), at_once=2)


def _all_reduce(traffic: Traffic) -> list[Messages]:
    if traffic.nbytes <= 2:
        # The first rank owns everything. The others have requested it before it arrives.
        return [Messages(2 * (traffic.ranks - 1), traffic.nbytes, is_requested=False)]
    return [_around_ring(traffic)] * 2


def _to_each_other(traffic: Traffic) -> list[Messages]:
    others = traffic.ranks - 1
    return [Messages(others, traffic.carried / others, at_once=others)]


def _to_each_other_at_once(traffic: Traffic) -> list[Messages]:
    return [replace(each, is_requested=False) for each in _to_each_other(traffic)]


def _gathered_in_place(traffic: Traffic) -> list[Messages]:
    if traffic.ranks <= FEW_RANKS:
        return _to_each_other_at_once(traffic)
    few = math.ceil(math.log2(traffic.ranks))
    count = few if traffic.nbytes <= FEW_ROUNDS else traffic.ranks - 1
    return [Messages(count, traffic.carried / count, is_requested=False)]


def _summed_in_place(traffic: Traffic) -> list[Messages]:
    ranks, nbytes, others = traffic.ranks, traffic.nbytes, traffic.ranks - 1
    if ranks <= FEW_RANKS:
        if is_gathered(nbytes, ranks):
            return _to_each_other_at_once(traffic)
        return [Messages(others, nbytes / ranks, at_once=others, is_requested=False)] * 2
    if nbytes <= FEW_ROUNDS * ranks:
        return [Messages(math.ceil(math.log2(ranks)), nbytes, is_requested=False)]
    return [Messages(others, nbytes / ranks, is_requested=False)] * 2


def _broadcast(traffic: Traffic) -> list[Messages]:
    # A tree, in which all ranks but the root have requested the message before it arrives.
    depth = math.ceil(math.log2(traffic.ranks))
    first = Messages(1, traffic.nbytes)
    return [first, Messages(depth - 1, traffic.nbytes, is_requested=False)][: min(depth, 2)]


def _reduce(traffic: Traffic) -> list[Messages]:
    others = traffic.ranks - 1
    share = traffic.nbytes / traffic.ranks
    count = others if traffic.is_root else 1
    return [_around_ring(traffic), Messages(count, share, at_once=count)]


def _with_root(traffic: Traffic) -> list[Messages]:
    count = traffic.ranks - 1 if traffic.is_root else 1
    return [Messages(count, traffic.carried / count, at_once=count)]


_PARTS: dict[str, Callable[[Traffic], list[Messages]]] = {
    **dict.fromkeys(
        ALL_GATHERS, lambda each: [Messages(2 * (each.ranks - 1), each.nbytes / 2, at_once=2)]
    ),
    # Gloo sums everything on all ranks, also for a reduce-scatter.
    **dict.fromkeys((*ALL_REDUCES, *REDUCE_SCATTERS), _all_reduce),
    **dict.fromkeys(("all_to_all_single", "alltoall"), _to_each_other),
    "barrier": lambda each: [Messages(math.ceil(math.log2(each.ranks)), 0.0)],
    "broadcast": _broadcast,
    EXCHANGE: _to_each_other_at_once,
    GATHER: _gathered_in_place,
    SUM: _summed_in_place,
    # The first rank serves one after another.
    "monitored_barrier": lambda each: [Messages(each.ranks - 1, 0.0)],
    "reduce": _reduce,
    **dict.fromkeys(("scatter", *_GATHERS), _with_root),
    **dict.fromkeys(("send", *_RECEIVES), lambda each: [Messages(1, each.carried)]),
}
