"""The messages of Gloo's collectives, and their order.

In Gloo a receiver requests each message from the sender. If both reach a message at the same time,
it takes a round trip: the request, then the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch_commhook.collectives.exchange import FEW_RANKS, FEW_ROUNDS, is_gathered, sum_bytes
from torch_commhook.metrics import tensor_bytes
from torch_commhook.process_group.operations import Call

#: The library's own collectives, see :class:`torch_commhook.collectives.exchange.Place`. Nobody has
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
    return Traffic(
        call.operation,
        ranks,
        call.nbytes,
        link_bytes(call, rank, ranks),
        call.root == rank,
    )


def link_bytes(call: Call, rank: int, ranks: int) -> int:
    """The bytes that a rank's link carries for an operation, in the direction that carries more."""
    if ranks == 1:
        return 0
    if call.operation in ("broadcast", "reduce", "recv", "recv_anysource"):
        return call.nbytes  # each rank sends or receives these at least once
    if call.operation in ("gather", "gather_single"):
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
    return traffic.operation not in _WITHOUT_THREAD


_WITHOUT_THREAD = (
    *("send", "recv", "recv_anysource", "monitored_barrier"),
    *(EXCHANGE, GATHER, SUM),
)


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


def _segments(nbytes: float, ranks: int) -> int:
    """The number of segments into which a ring divides the tensor."""
    least = max(math.ceil(nbytes / _MOST_SEGMENT_BYTES), 2 * ranks)
    return math.ceil(least / ranks) * ranks


def _around_ring(traffic: Traffic) -> Messages:
    """A tensor's segments, two in flight, each passing all ranks."""
    segments = _segments(traffic.nbytes, traffic.ranks)
    count = segments // traffic.ranks * (traffic.ranks - 1)
    return Messages(count, traffic.nbytes / segments, at_once=2)


def _all_reduce(traffic: Traffic) -> list[Messages]:
    if traffic.nbytes <= 2:
        # The first rank owns everything. The others have requested it before it arrives.
        return [Messages(2 * (traffic.ranks - 1), traffic.nbytes, is_requested=False)]
    return [_around_ring(traffic)] * 2


def _all_gather(traffic: Traffic) -> list[Messages]:
    return [Messages(2 * (traffic.ranks - 1), traffic.nbytes / 2, at_once=2)]


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


def _barrier(traffic: Traffic) -> list[Messages]:
    return [Messages(math.ceil(math.log2(traffic.ranks)), 0.0)]


def _monitored_barrier(traffic: Traffic) -> list[Messages]:
    return [Messages(traffic.ranks - 1, 0.0)]  # the first rank serves one after another


def _one(traffic: Traffic) -> list[Messages]:
    return [Messages(1, traffic.carried)]


_PARTS: dict[str, Callable[[Traffic], list[Messages]]] = {
    "allgather": _all_gather,
    "all_gather_single": _all_gather,
    "all_gather_single_coalesced": _all_gather,
    "allgather_coalesced": _all_gather,
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "all_to_all_single": _to_each_other,
    "alltoall": _to_each_other,
    "barrier": _barrier,
    "broadcast": _broadcast,
    EXCHANGE: _to_each_other_at_once,
    GATHER: _gathered_in_place,
    "gather": _with_root,
    "gather_single": _with_root,
    "monitored_barrier": _monitored_barrier,
    "recv": _one,
    "recv_anysource": _one,
    "reduce": _reduce,
    # Gloo sums everything on all ranks.
    "reduce_scatter": _all_reduce,
    "reduce_scatter_single": _all_reduce,
    "reduce_scatter_single_coalesced": _all_reduce,
    SUM: _summed_in_place,
    "scatter": _with_root,
    "send": _one,
}
