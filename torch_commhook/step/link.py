"""The link between a group's ranks: measured, used by several connections, and counted.

Over a far link, messages can use several connections to each rank (``attach(connections=)``), which
share the chunks of a message. This module measures whether several are faster.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import group_name, wire_backend
from torch_commhook.collectives.hosts import machine
from torch_commhook.collectives.issuing import FEW_RANKS, issue_unseen, place_in
from torch_commhook.process_group.operations import COLLECTIVES, Call, HookOpName
from torch_commhook.step.connected_group import ConnectedGroup

# ---- measures the link between a group's ranks, over one connection and over several -------------
#
# In one round trip a TCP connection carries at most the contents of its buffers, and each lost
# packet slows it down. So over a far link several connections carry more than one.


#: The number of connections that a link is tested with, and gets if they are faster.
MANY = 4
#: No rate is measured if the round trip is shorter.
_FAR_SECONDS = 5e-3
#: The required speedup of several connections.
_LEAST_GAIN = 1.3
#: The limits of a message, and of all messages that a rank sends at once.
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 26
#: A message that takes this many round trips shows the rate.
_ROUND_TRIPS = 6
_REPEATS = 3
#: A round trip is measured until two results differ by at most this share.
_TRIES, _STEADY = 4, 0.1


class Link(NamedTuple):
    """The measured link of a group's ranks; the same on all ranks.

    Attributes:
        round_trip: between the first rank and the farthest one, in seconds; 0 on one machine.
        rate: the rate of one connection, in bits per second; None if not measured.
        rate_of_many: the rate of :data:`MANY` connections; None if not measured.
    """

    round_trip: float
    rate: float | None = None
    rate_of_many: float | None = None

    @property
    def connections(self) -> int:
        """The number of connections that large messages should use."""
        if self.rate is None or self.rate_of_many is None:
            return 1
        return MANY if self.rate_of_many >= _LEAST_GAIN * self.rate else 1


def measure_link(group: dist.ProcessGroup, connect: Callable[[], object]) -> Link:
    """Measure a group's link. All ranks call this at the same point.

    Ranks of one machine have no link. On a far link ranks send messages of 256 KiB, 512 KiB and so
    on, until one takes six round trips or a rank's messages have 64 MiB in total. Then they send
    large ones over several connections.

    Args:
        group: a group whose ranks exchange messages, over one connection each way.
        connect: gives large messages :data:`MANY` connections from then on.
    """
    if _is_local(group):
        return Link(0.0)
    round_trip = _round_trip(group)
    if round_trip < _FAR_SECONDS:
        return Link(round_trip)
    nbytes, others = _FIRST_BYTES, group.size() - 1
    while True:
        seconds = _slowest(group, _seconds_of(group, nbytes))
        if seconds >= _ROUND_TRIPS * round_trip or 2 * nbytes * others > _MOST_BYTES:
            break
        nbytes *= 2
    seconds = min(seconds, _least_seconds(group, nbytes))
    connect()
    many = _least_seconds(group, nbytes)
    carried = 8.0 * nbytes * others
    # The first byte arrives after half a round trip, or a whole one: ranks begin apart.
    one, several = (carried / max(each - round_trip, each * 1e-3) for each in (seconds, many))
    return Link(round_trip, one, several)


def _is_local(group: dist.ProcessGroup) -> bool:
    """Whether all ranks are on one machine, and see the same network."""
    digest = hashlib.sha256(machine().encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    every = own.new_empty((group.size(), own.numel()))
    place_in(group).gather(own, list(every), every).wait()
    return bool((every == own).all())


def _round_trip(group: dist.ProcessGroup) -> float:
    """In seconds. Repeats only as needed to detect a short one, which a busy machine prolongs."""
    least = _echo(group)
    for _ in range(_TRIES):
        if least < _FAR_SECONDS:
            break
        another = _echo(group)
        is_steady = abs(another - least) < _STEADY * least
        least = min(least, another)
        if is_steady:
            break
    return least


def _echo(group: dist.ProcessGroup) -> float:
    """The duration of a byte's way from rank 0 to each other rank, and back, on all ranks."""
    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
    is_first, size = group.rank() == 0, group.size()
    begun = time.perf_counter()
    for answers in (False, True):
        inputs, outputs = [byte[:0]] * size, [byte[:0]] * size
        if is_first:
            (outputs if answers else inputs)[1:] = list(byte.new_empty((size - 1, 1)))
        else:
            (inputs if answers else outputs)[0] = byte
        place_in(group).exchange(0, inputs, outputs, byte).wait()
    return _slowest(group, time.perf_counter() - begun if is_first else 0.0)


def _seconds_of(group: dist.ProcessGroup, nbytes: int) -> float:
    """The duration of messages of this size, to each rank and from each."""
    sent = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    received = list(sent.new_empty((group.size(), nbytes)))
    begun = time.perf_counter()
    place_in(group).gather(sent, received, sent).wait()
    return time.perf_counter() - begun


def _least_seconds(group: dist.ProcessGroup, nbytes: int) -> float:
    return min(_slowest(group, _seconds_of(group, nbytes)) for _ in range(_REPEATS))


def _slowest(group: dist.ProcessGroup, seconds: float) -> float:
    """The largest of the ranks' measurements."""
    own = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    return float(place_in(group).reduce(own, takes_maximum=True).wait())


# ---- additional connections between two ranks, for large messages of a step's groups -------------


#: The most that help on any link known.
MOST = 16

_log = logging.getLogger(__name__)


def check_connections(count: object) -> None:
    """Check a number of connections.

    Args:
        count: the user's argument; None is valid.

    Raises:
        TypeError, ValueError: it is not an int, or not in [1, :data:`MOST`].
    """
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"attach: connections must be an int or None, got {_C.type_name(count)}")
    if not 1 <= count <= MOST:
        raise ValueError(f"attach: connections must be 1 to {MOST}, got {count}")


class MoreConnections:
    """Additional connections of some groups.

    Attributes:
        count: the number of connections for large messages; None to choose the fastest.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self._links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link] = (
            weakref.WeakKeyDictionary()
        )

    def link(self, group: dist.ProcessGroup) -> Link | None:
        """The measured link of a group, or None."""
        return self._links.get(group)

    def connect(self, own: ConnectedGroup, store: dist.Store) -> None:
        """Give large messages of a group :attr:`count` connections. All of its ranks call this.

        Args:
            own: the group. Among more than 16 ranks, only a count that was given is used.
            store: a store in which nobody else uses the group's name.
        """
        group = own.group

        def use(count: int) -> None:
            own.use_rails(
                count, dist.PrefixStore(f"connections/{group_name(group)}/{count}", store)
            )

        if self.count is not None:
            use(self.count)
        elif group not in self._links and 1 < group.size() <= FEW_RANKS:
            self._links[group] = link = measure_link(group, lambda: use(MANY))
            if link.rate is not None:
                _log.info("%s: %s", group_name(group), link)
            use(link.connections)


# ---- counts the bytes of hooks that call collectives of torch.distributed themselves -------------
#
# It also hides these collectives' Works from PyTorch's profiler; see :func:`issue_unseen`.


#: The newest names of methods whose operators on process groups have other names.
_OF_GROUPS = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "recv_any_source": "recv_anysource",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}
#: The same for functional collectives. Their last argument is the name of their group.
_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather_single",
    "all_gather_into_tensor_coalesced": "all_gather_single_coalesced",
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}
#: Positions among an operator's arguments after its group: the root or peer, by operation, and the
#: rows that each rank gets.
_ROOTS = {"broadcast": 0, "gather": 0, "reduce": 1, "scatter": 0, "send": 0}
_SPLITS = 1

#: The number of collectives that hooks were seen to begin, by group.
_begun: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Baseline(NamedTuple):
    """A group's counts before a hook's first collective on it.

    Attributes:
        group: the group.
        issued: the collectives that it had issued, by its own count.
        begun: the collectives that hooks were seen to begin on it.
    """

    group: weakref.ref[dist.ProcessGroup]
    issued: int
    begun: int


class SeenCollectives:
    """Counts the collectives that a hook issues on this thread, in a ``with`` block.

    It sees the operators of PyTorch's own groups. It does not see collectives of a Future's
    callbacks, but notices them by the group's own count. The bytes are unknown then.
    """

    def __init__(self) -> None:
        self._mode = _Mode(self)
        self._baselines: list[_Baseline] = []
        self._bytes = 0
        self._operations = 0
        self._is_known = True

    def __enter__(self) -> SeenCollectives:
        # Entering the mode itself would set a flag for all threads.
        _python_dispatch._push_mode(self._mode)
        return self

    def __exit__(self, *error: object) -> None:
        _python_dispatch._pop_mode()

    def note(self, operator: Any, arguments: Sequence[Any]) -> None:
        """Count a collective that is about to be issued."""
        found = _described(operator, arguments)
        if found is None:
            return
        call, group = found
        if call.operation not in COLLECTIVES:
            self._is_known = False
            return
        try:
            with _lock:
                if all(each.group() is not group for each in self._baselines):
                    baseline = _Baseline(weakref.ref(group), _issued(group), _begun.get(group, 0))
                    self._baselines.append(baseline)
                _begun[group] = _begun.get(group, 0) + 1
            self._bytes += call.bytes_sent(group.rank(), group.size())
        except RuntimeError:  # a group that does not count
            self._is_known = False
        self._operations += 1

    def bytes_sent(self) -> int | None:
        """The bytes that the hook has sent. Call it once the hook has returned.

        Returns:
            None if no collective was seen, or if some were not seen.
        """
        if not self._operations or not self._is_known or _unseen(self._baselines) != 0:
            return None
        return self._bytes

    def has_missed(self) -> bool:
        """Whether unseen collectives were issued. Call it before the library issues its own."""
        return _unseen(self._baselines) > 0


def _unseen(baselines: Sequence[_Baseline]) -> int:
    """The number of collectives that groups have issued and no hook was seen to begin.

    Below 0 if a group has no count, for example after a failed step.
    """
    count = 0
    for baseline in baselines:
        group = baseline.group()
        if group is not None:
            try:
                issued = _issued(group) - baseline.issued
            except RuntimeError:
                return -1
            with _lock:  # read second: a collective that begins now only lowers the result
                count += issued - (_begun.get(group, 0) - baseline.begun)
    return count


def _issued(group: Any) -> int:
    """The number of collectives that a group has issued, by its own count."""
    # PyTorch's groups ask only PyTorch's backends.
    source: Any = wire_backend(group) or group
    count: int = source._get_sequence_number_for_group()
    return count


class _Mode(TorchDispatchMode):
    """Shows operators to a :class:`SeenCollectives`, and runs them unseen by the profiler."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a hook's compiled functions stay compiled."""
        return True

    def __init__(self, seen: SeenCollectives) -> None:
        super().__init__()
        self._seen = weakref.ref(seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = self._seen()
        call = partial(func, *args, **(kwargs or {}))
        if getattr(func, "namespace", "") not in ("c10d", "_c10d_functional"):
            return call()
        if seen is not None:
            seen.note(func, args)
        sent = _tensors(list(args))
        return issue_unseen(call, sent[0].device) if sent else call()


def _described(operator: Any, arguments: Sequence[Any]) -> tuple[Call, dist.ProcessGroup] | None:
    """An operator's collective and its group; None for an operator that does not communicate."""
    name = operator._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out")
    if operator.namespace == "_c10d_functional":
        if name not in _FUNCTIONAL:
            return None  # such as wait_tensor
        group = distributed_c10d._resolve_process_group(arguments[-1])
        given = [_tensors(arguments[0])]
        numbers: Sequence[Any] = arguments[1:]
        operation = _FUNCTIONAL[name]
    else:
        place = next(
            (i for i, a in enumerate(arguments) if isinstance(a, torch.ScriptObject)), None
        )
        if place is None:
            return None
        group = dist.ProcessGroup.unbox(arguments[place])
        given = [_tensors(argument) for argument in arguments[:place]]
        numbers = arguments[place + 1 :]
        operation = _OF_GROUPS.get(name, name)
    inputs = given[-1] if given else []
    root, splits = -1, ()
    if operation in _ROOTS and isinstance(numbers[_ROOTS[operation]], int):
        root = numbers[_ROOTS[operation]]
    if operation == "all_to_all_single":
        splits = tuple(numbers[_SPLITS])
    return Call(operation, HookOpName.UNKNOWN, inputs, [], root, splits=splits), group


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list) else []
    )
