"""What hooks put on the wire that call collectives of ``torch.distributed`` themselves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_commhook.process_group.operations import COLLECTIVES, Call, HookOpName

#: Of PyTorch's operators on process groups: the method's newest name, where it differs.
_OF_GROUPS = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "recv_any_source": "recv_anysource",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}
#: Of functional collectives. The name of their group is their last argument.
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
#: Arguments of an operator after its group: where the root or peer, and the rows for each rank are.
_ROOTS = {"broadcast": 0, "gather": 0, "reduce": 1, "scatter": 0, "send": 0}
_SPLITS = 1

#: How many collectives hooks were seen to begin on each group.
_begun: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Place(NamedTuple):
    """What a group had issued, by its own count and by ours, before a hook's first collective."""

    group: weakref.ref[dist.ProcessGroup]
    issued: int
    begun: int


class SeenCollectives:
    """Counts the collectives that a hook issues inside of it, on this thread.

    They are seen as operators, on groups of PyTorch's own. A group counts what it issues, so that
    collectives are noticed that are not seen, such as those of a Future's callbacks. The bytes are
    unknown then.
    """

    def __init__(self) -> None:
        self._mode = _Mode(self)
        self._places: list[_Place] = []
        self._bytes = 0
        self._operations = 0
        self._is_known = True

    def __enter__(self) -> SeenCollectives:
        # Not by entering the mode, which notes so for all threads.
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
                if all(place.group() is not group for place in self._places):
                    place = _Place(weakref.ref(group), _issued(group), _begun.get(group, 0))
                    self._places.append(place)
                _begun[group] = _begun.get(group, 0) + 1
            self._bytes += call.bytes_sent(group.rank(), group.size())
        except RuntimeError:  # a group that does not count
            self._is_known = False
        self._operations += 1

    def bytes_sent(self, result: Any, find_more: Callable[[], object] | None) -> int | None:
        """What the hook has sent, once it has returned.

        Args:
            result: what it gave.
            find_more: called, maybe on another thread, if collectives that nobody has seen come
                before the result is complete. None where callbacks run at once, as on CUDA.

        Returns:
            None where nothing was seen, or not everything.
        """
        if not self._operations or not self._is_known or self._unseen() != 0:
            return None
        is_pending = isinstance(result, torch._C.Future) and not result.done()
        if is_pending and find_more is not None:
            places, found = list(self._places), find_more

            def look(_: object) -> None:
                if _unseen(places) > 0:
                    found()

            result.add_done_callback(look)
        return self._bytes

    def _unseen(self) -> int:
        return _unseen(self._places)


def _unseen(places: Sequence[_Place]) -> int:
    """How many collectives groups have issued that no hook was seen to begin.

    Less than 0 where a group does not tell, such as one whose step has failed.
    """
    count = 0
    for place in places:
        group = place.group()
        if group is not None:
            try:
                issued = _issued(group) - place.issued
            except RuntimeError:
                return -1
            with _lock:  # after the group's own count: one that begins now is no more than begun
                count += issued - (_begun.get(group, 0) - place.begun)
    return count


def _issued(group: Any) -> int:
    """How many collectives a group has issued, by its own count."""
    count: int = group._get_sequence_number_for_group()
    return count


class _Mode(TorchDispatchMode):
    """Shows operators to a :class:`SeenCollectives`, and runs them as they are."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: what a hook has compiled stays compiled."""
        return True

    def __init__(self, seen: SeenCollectives) -> None:
        super().__init__()
        self._seen = weakref.ref(seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = self._seen()
        if seen is not None and getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            seen.note(func, args)
        return func(*args, **(kwargs or {}))


def _described(operator: Any, arguments: Sequence[Any]) -> tuple[Call, dist.ProcessGroup] | None:
    """What an operator communicates, and on which group; None where it does not."""
    name = operator._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out")
    if operator.namespace == "_c10d_functional":
        if name not in _FUNCTIONAL:
            return None  # such as the one that waits
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
