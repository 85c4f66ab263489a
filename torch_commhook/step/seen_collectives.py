"""Counts the bytes of hooks that call collectives of ``torch.distributed`` themselves.

It also hides these collectives' Works from PyTorch's profiler; see :func:`issue_unseen`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_commhook.collectives.gloo_groups import state_of, wire_backend
from torch_commhook.collectives.issuing import issue_unseen
from torch_commhook.process_group.operations import COLLECTIVES, Call, HookOpName

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


class SeenCollectives(TorchDispatchMode):
    """Counts the collectives that a hook issues on this thread, in a ``with`` block.

    It sees the operators of PyTorch's own groups. It does not see collectives of a Future's
    callbacks, but notices them by the group's own count. The bytes are unknown then.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a hook's compiled functions stay compiled."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._baselines: list[_Baseline] = []
        self._bytes = 0
        self._operations = 0
        self._is_known = True

    def __enter__(self) -> SeenCollectives:
        # The base class would set a flag for all threads.
        _python_dispatch._push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _python_dispatch._pop_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if getattr(func, "namespace", "") not in ("c10d", "_c10d_functional"):
            return call()
        self._note(func, args)
        sent = _tensors(list(args))
        return issue_unseen(call, sent[0].device) if sent else call()

    def _note(self, operator: Any, arguments: Sequence[Any]) -> None:
        """Count a collective that is about to be issued."""
        found = _described(operator, arguments)
        if found is None:
            return
        call, group = found
        if call.operation not in COLLECTIVES:
            self._is_known = False
            return
        state = state_of(group)
        try:
            with _lock:
                if all(each.group() is not group for each in self._baselines):
                    baseline = _Baseline(weakref.ref(group), _issued(group), state.collectives_seen)
                    self._baselines.append(baseline)
                state.collectives_seen += 1
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
                count += issued - (state_of(group).collectives_seen - baseline.begun)
    return count


def _issued(group: Any) -> int:
    """The number of collectives that a group has issued, by its own count."""
    # PyTorch's groups ask only PyTorch's backends.
    source: Any = wire_backend(group) or group
    count: int = source._get_sequence_number_for_group()
    return count


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
