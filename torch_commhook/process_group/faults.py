"""The faults that a process group can inject."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_commhook import _C
from torch_commhook.process_group.operations import OPERATIONS


class InjectedError(RuntimeError):
    """The default error of :class:`Fail`.

    Example:
        >>> process_group.Fail().error is process_group.InjectedError
        True
    """


class DroppedRankError(RuntimeError):
    """This rank no longer takes part in operations; see :class:`Drop`.

    Example:
        >>> issubclass(process_group.DroppedRankError, RuntimeError)
        True
    """


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in some operations on some ranks. The base class of all faults.

    Attributes:
        operations: the names of a group's methods, such as ``"allreduce"``; None for all methods.
            Old names mean the newest one.
        ranks: the ranks of the group; None for all.
        skip: the number of matching operations that succeed first.
        count: the highest number of faults; None for no limit.
        probability: the probability that a matching operation fails. Each rank draws its own
            random numbers.

    Raises:
        TypeError, ValueError: an attribute has a wrong type or value.

    Example:
        >>> fault = process_group.Fail(operations=["allreduce", "broadcast"], skip=10, count=1)
        >>> isinstance(fault, process_group.Fault), fault.skip
        (True, 10)
    """

    operations: str | Sequence[str] | None = None
    ranks: int | Sequence[int] | None = None
    skip: int = 0
    count: int | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        for name in ("skip", "count"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(self._refusal(name, "an int", _C.type_name(value)))
        self._check_number("probability", self.probability)
        self._check_one_or_several("operations", str)
        self._check_one_or_several("ranks", int)
        unknown = sorted((newest_names(self.operations) or set()) - OPERATIONS)
        if unknown:
            known = ", ".join(sorted(OPERATIONS))
            raise ValueError(self._refusal("operations", f"of {known}", repr(unknown[0])))
        if self.skip < 0:
            raise ValueError(self._refusal("skip", "at least 0", self.skip))
        if self.count is not None and self.count < 0:
            raise ValueError(self._refusal("count", "at least 0 or None", self.count))
        if not 0 <= self.probability <= 1:
            raise ValueError(self._refusal("probability", "between 0 and 1", self.probability))

    def _refusal(self, name: str, contract: str, got: object) -> str:
        return f"FaultyProcessGroup: {type(self).__name__}.{name} must be {contract}, got {got}"

    def _check_number(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(self._refusal(name, "a number", _C.type_name(value)))

    def _check_one_or_several(self, name: str, kind: type) -> None:
        value = getattr(self, name)
        values = [value] if isinstance(value, kind) else value
        if values is not None and (
            isinstance(values, str)
            or not isinstance(values, Iterable)
            or not all(isinstance(each, kind) for each in values)
        ):
            contract = f"of {kind.__name__}, one or several"
            raise TypeError(self._refusal(name, contract, repr(value)))

    def _check_seconds(self, seconds: float) -> None:
        self._check_number("seconds", seconds)
        if not 0 <= seconds <= threading.TIMEOUT_MAX:
            contract = f"between 0 and {threading.TIMEOUT_MAX:.0f}"
            raise ValueError(self._refusal("seconds", contract, seconds))


@dataclass(frozen=True, kw_only=True)
class Delay(Fault):
    """The rank starts the operation ``seconds`` late.

    Attributes:
        seconds: the delay.

    Example:
        >>> fault = process_group.Delay(operations="allreduce", ranks=[0], seconds=0.01, count=1)
        >>> fault.seconds, fault.count
        (0.01, 1)
    """

    seconds: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_seconds(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Fail(Fault):
    """The operation raises an error and is not issued; the other ranks wait for this rank.

    Attributes:
        error: the exception that is raised, or its class.

    Example:
        >>> def reduce(rank):
        ...     fault = process_group.Fail(operations="allreduce", error=OSError("no link"))
        ...     group = process_group.FaultyProcessGroup(dist.group.WORLD, [fault])
        ...     try:
        ...         group.allreduce([torch.ones(2)])
        ...     except OSError as error:
        ...         return str(error)
        >>> run_ranks(reduce, 2)
        ['no link', 'no link']
    """

    error: BaseException | type[BaseException] = InjectedError

    def __post_init__(self) -> None:
        super().__post_init__()
        error: Any = self.error
        if not isinstance(error, BaseException) and not (
            isinstance(error, type) and issubclass(error, BaseException)
        ):
            raise TypeError(self._refusal("error", "an exception", _C.type_name(error)))


@dataclass(frozen=True, kw_only=True)
class Hang(Fault):
    """The operation is not issued, and its Work fails with a TimeoutError when its time is over.

    Attributes:
        seconds: the time; None for the timeout of the operation, or else of the group.

    Example:
        >>> def reduce(rank):
        ...     fault = process_group.Hang(operations="allreduce", seconds=0.01)
        ...     group = process_group.FaultyProcessGroup(dist.group.WORLD, [fault])
        ...     try:
        ...         group.allreduce([torch.ones(2)]).wait()
        ...     except TimeoutError:
        ...         return "timed out"
        >>> run_ranks(reduce, 2)
        ['timed out', 'timed out']
    """

    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None:
            self._check_seconds(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Corrupt(Fault):
    """One element of the operation's output or input is wrong.

    Attributes:
        value: the element's new value; None for NaN, or plus one in integer tensors.
        index: the element's index in the first tensor, in row-major order; None for a random one.
            If the tensor has no such element, the operation raises an IndexError.
        of: ``"output"`` or ``"input"``. An input that the operation does not write is copied first,
            so that the caller's tensor stays unchanged.

    Example:
        >>> def reduce(rank):
        ...     fault = process_group.Corrupt(operations="allreduce", ranks=1, index=0)
        ...     group = process_group.FaultyProcessGroup(dist.group.WORLD, [fault])
        ...     values = torch.ones(3)
        ...     group.allreduce([values]).wait()
        ...     return values
        >>> run_ranks(reduce, 2)
        [tensor([2., 2., 2.]), tensor([nan, 2., 2.])]
    """

    value: float | None = None
    index: int | None = None
    of: str = "output"

    def __post_init__(self) -> None:
        super().__post_init__()
        index: Any = self.index
        if index is not None and (not isinstance(index, int) or index < 0):
            raise ValueError(self._refusal("index", "an int of at least 0 or None", repr(index)))
        if self.of not in ("input", "output"):
            raise ValueError(self._refusal("of", "'input' or 'output'", repr(self.of)))


@dataclass(frozen=True, kw_only=True)
class Drop(Fault):
    """The rank is gone: this and all later operations raise :class:`DroppedRankError`.

    Example:
        >>> def reduce(rank):
        ...     faults = [process_group.Drop(ranks=0)]
        ...     group = process_group.FaultyProcessGroup(dist.group.WORLD, faults)
        ...     if rank == 0:
        ...         try:
        ...             group.allreduce([torch.ones(2)])
        ...         except process_group.DroppedRankError as error:
        ...             return str(error)
        >>> run_ranks(reduce, 2)[0]
        'FaultyProcessGroup: rank 0 has been dropped, at allreduce number 0'
    """


@dataclass(frozen=True)
class Injected:
    """A fault that has happened.

    Attributes:
        operation: the method, by its newest name.
        op_id: the operation's number on the group, from 0.
        fault: the fault.

    Example:
        >>> def reduce(rank):
        ...     faults = [process_group.Corrupt(value=0.0, index=0)]
        ...     group = process_group.FaultyProcessGroup(dist.group.WORLD, faults)
        ...     group.allreduce([torch.ones(2)]).wait()
        ...     return group.injected[0].operation
        >>> run_ranks(reduce, 2)
        ['allreduce', 'allreduce']
    """

    operation: str
    op_id: int
    fault: Fault


#: The newest name of a method, by each of its names.
_NEWEST = {name: names[0] for names in _C.process_group_methods().values() for name in names}


def newest_names(operations: str | Sequence[str] | None) -> set[str] | None:
    """The newest names of methods, by any of their names; None for all methods."""
    if operations is None:
        return None
    names = {operations} if isinstance(operations, str) else set(operations)
    return {_NEWEST.get(name, name) for name in names}
