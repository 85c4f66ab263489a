"""A process group that fails on purpose, to test how a training reacts."""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import group_rank, group_timeout
from torch_commhook.process_group.operations import OPERATIONS, Call, describe, mapped
from torch_commhook.process_group.work import FollowedWork, Timers, Work
from torch_commhook.process_group.wrapper import WrapperProcessGroup
from torch_commhook.wording import check_type

# ---- the faults that a process group can inject --------------------------------------------------


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
            if getattr(self, name) is not None:
                self._check_type(name, "an int", int)
        self._check_type("probability", "a number", int, float)
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

    def _check_type(self, name: str, contract: str, *kinds: type) -> None:
        where = f"FaultyProcessGroup: {type(self).__name__}.{name}"
        check_type(where, getattr(self, name), contract, *kinds)

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
        self._check_type("seconds", "a number", int, float)
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


# ---- a process group that fails on purpose, to test how a training reacts ------------------------


_TIMERS = Timers("commhook-faults")


class FaultyProcessGroup(WrapperProcessGroup):
    """A process group around another one that injects faults.

    Use it to test a training loop: whether it detects a fault, ends, or continues correctly.

    Args:
        parent: the process group that does the work.
        faults: any number of :class:`Delay`, :class:`Fail`, :class:`Hang`, :class:`Corrupt` and
            :class:`Drop`, applied in this order to each operation.
        seed: the seed of random choices. Each rank has its own sequence.

    Attributes:
        injected: the faults that have happened, in order.

    Raises:
        TypeError: ``parent`` is not a process group, or ``faults`` is not a list of faults.
        ValueError: a fault names ranks that the group does not have.

    Example:
        >>> def reduce(rank):
        ...     fault = process_group.Fail(operations="allreduce", skip=1)
        ...     group = process_group.FaultyProcessGroup(dist.group.WORLD, [fault])
        ...     group.allreduce([torch.ones(2)]).wait()
        ...     try:
        ...         group.allreduce([torch.ones(2)])
        ...     except process_group.InjectedError:
        ...         return [each.op_id for each in group.injected]
        >>> run_ranks(reduce, 2)
        [[1], [1]]
    """

    injected: list[Injected]

    def __init__(
        self, parent: dist.ProcessGroup, faults: Sequence[Fault] = (), *, seed: int = 0
    ) -> None:
        super().__init__(parent)
        self.injected = []
        self._lock = threading.Lock()
        check_type(f"{type(self).__name__}: faults", faults, "a list of faults", Iterable)
        self._rules = [_Rule(fault, parent.size()) for fault in faults]
        self._random = random.Random(f"{seed}/{group_rank(parent)}")
        self._op_id = 0
        self._timeout: timedelta | None = None
        self._dropped = False
        self._hanging: weakref.WeakSet[_HangingWork] = weakref.WeakSet()

    def _settings_text(self) -> str:
        return ", ".join(type(rule.fault).__name__ for rule in self._rules)

    def abort(self) -> None:
        """Abort the parent, and end hanging operations."""
        self._end_hanging("aborted")
        super().abort()

    def shutdown(self) -> None:
        """Shut down the parent, and end hanging operations."""
        self._end_hanging("shut down")
        super().shutdown()

    def _end_hanging(self, how: str) -> None:
        for work in list(self._hanging):
            work.end(how)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the parent and of :class:`Hang`."""
        self._timeout = timeout
        super().set_timeout(timeout)

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        with self._lock:
            op_id = self._op_id
            self._op_id += 1
            faults = [
                rule.fault
                for rule in self._rules
                if rule.applies(operation, self.rank(), self._random)
            ]
            if self._dropped:
                faults = [Drop()]
            else:
                self.injected += [Injected(operation, op_id, fault) for fault in faults]
        call = describe(operation, arguments, keywords)
        corruptions: list[Corrupt] = []
        for fault in faults:
            if isinstance(fault, Delay):
                time.sleep(fault.seconds)
            elif isinstance(fault, Fail):
                if fault.error is InjectedError:
                    raise InjectedError(
                        f"FaultyProcessGroup: {operation} number {op_id} fails on rank "
                        f"{self.rank()}"
                    )
                raise fault.error
            elif isinstance(fault, Drop):
                self._dropped = True
                raise DroppedRankError(
                    f"FaultyProcessGroup: rank {self.rank()} has been dropped, at {operation} "
                    f"number {op_id}"
                )
            elif isinstance(fault, Hang):
                return self._hang(fault, operation, arguments, keywords)
            elif isinstance(fault, Corrupt):
                corruptions.append(fault)
        for fault in corruptions:
            if fault.of == "input":
                arguments = self._corrupt_input(fault, call, arguments)
        work = super().run_collective(operation, arguments, keywords)
        after = [fault for fault in corruptions if fault.of == "output"]
        if not after or not call.outputs:
            return work
        work = _C.as_work(work)

        def corrupt() -> None:
            for fault in after:
                self._corrupt(fault, call.outputs[0])

        return FollowedWork(work, corrupt)

    def _hang(
        self, fault: Hang, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        seconds = fault.seconds
        if seconds is None:
            seconds = self._seconds_of(arguments, keywords)
        work = _HangingWork(f"{operation} on rank {self.rank()}", seconds)
        self._hanging.add(work)
        if operation == "monitored_barrier":
            work.wait()
        return work

    def _seconds_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> float:
        for value in (*arguments, *keywords.values()):
            timeout = getattr(value, "timeout", value)
            if isinstance(timeout, timedelta) and timeout > timedelta(0):
                return timeout.total_seconds()
        return (self._timeout or group_timeout(self.parent)).total_seconds()

    def _corrupt_input(
        self, fault: Corrupt, call: Call, arguments: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        if not call.inputs:
            return arguments
        tensor = call.inputs[0]
        if any(tensor is written for written in call.outputs):
            self._corrupt(fault, tensor)
            return arguments
        copy = tensor.clone()
        self._corrupt(fault, copy)
        return tuple(mapped(arguments, lambda value: copy if value is tensor else value))

    def _corrupt(self, fault: Corrupt, tensor: Tensor) -> None:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        if not tensor.numel():
            return
        if fault.index is not None and fault.index >= tensor.numel():
            raise IndexError(
                f"FaultyProcessGroup: Corrupt.index must be below {tensor.numel()}, got "
                f"{fault.index}"
            )
        index = self._random.randrange(tensor.numel()) if fault.index is None else fault.index
        where = np.unravel_index(index, tensor.shape)
        value: Any = fault.value
        if value is None and tensor.dtype is torch.bool:
            value = not tensor[where]
        elif value is None:
            is_inexact = tensor.is_floating_point() or tensor.is_complex()
            value = math.nan if is_inexact else tensor[where] + 1
        with torch.no_grad():
            tensor[where] = value


class _HangingWork(Work):
    """Work that never succeeds: it ends by timeout or abort."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__()
        self._what, self._seconds = what, seconds
        self._until = _C.steady_seconds() + seconds
        self._ended = threading.Event()
        self._how = ""
        self._lock = threading.RLock()
        self._future: torch.futures.Future[Any] | None = None
        self._timer = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        left = min(self._until - _C.steady_seconds(), threading.TIMEOUT_MAX)
        if timeout is not None and timeout > timedelta(0):
            left = min(left, timeout.total_seconds())
        self._ended.wait(max(left, 0.0))
        raise self._error()

    def is_completed(self) -> bool:
        return self._ended.is_set() or _C.steady_seconds() >= self._until

    def is_success(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        return self._error() if self.is_completed() else None

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._ended.is_set():
                    self._fail()
                else:
                    self._timer = _TIMERS.call_at(self._until, self._fail)
            return self._future

    def abort(self) -> None:
        self.end("aborted")

    def end(self, how: str) -> None:
        """Fail now."""
        with self._lock:
            if self.is_completed():
                return
            self._how = how
            self._ended.set()
            if self._future is not None:
                _TIMERS.cancel(self._timer)
                self._fail()

    def _fail(self) -> None:
        with self._lock:
            if self._future is not None and not self._future.done():
                self._future.set_exception(self._error())

    def _error(self) -> Exception:
        if self._how:
            return RuntimeError(f"FaultyProcessGroup: {self._what} hung and was {self._how}")
        return TimeoutError(
            f"FaultyProcessGroup: {self._what} hangs, and has taken longer than {self._seconds:g} s"
        )


class _Rule:
    """A fault, with counts of its matching operations and of its occurrences."""

    def __init__(self, fault: Fault, world_size: int) -> None:
        if not isinstance(fault, Fault) or type(fault) is Fault:
            raise TypeError(
                "FaultyProcessGroup: faults must be Delay, Fail, Hang, Corrupt or Drop, got "
                f"{_C.type_name(fault)}"
            )
        self.fault = fault
        self._operations = newest_names(fault.operations)
        self._ranks = (fault.ranks,) if isinstance(fault.ranks, int) else fault.ranks
        for rank in self._ranks or ():
            if not 0 <= rank < world_size:
                raise ValueError(
                    f"FaultyProcessGroup: {type(fault).__name__}.ranks must be below {world_size}, "
                    f"got {rank}"
                )
        self._seen = 0
        self._happened = 0

    def applies(self, operation: str, rank: int, numbers: random.Random) -> bool:
        fault = self.fault
        is_other = self._operations is not None and operation not in self._operations
        if is_other or (self._ranks is not None and rank not in self._ranks):
            return False
        self._seen += 1
        if self._seen <= fault.skip:
            return False
        if fault.count is not None and self._happened >= fault.count:
            return False
        if fault.probability < 1 and numbers.random() >= fault.probability:
            return False
        self._happened += 1
        return True
