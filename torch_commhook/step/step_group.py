"""The process group through which the hooks of one model communicate, step by step.

If a hook fails on one rank, the others' collectives can never complete. So a step counts only if
every rank has confirmed its part. Groups that a user gives to hooks belong to the user: for each
there is one of the library's own over the same ranks, which is handled in the same way.

On Gloo a model's hooks have a ``ProcessGroup`` of their own over the library's transport. At the
end of a step, a rank that has all results tells all other ranks, which takes half a round trip, and
among more than 16 ranks half of log2 of their number. If each rank left some parameter unused, the
ranks then exchange one byte for each parameter: whether it was used.

No rank ends the step without all others. A rank that fails does not reach this point:
:meth:`StepGroup.fail_with` writes the reason to the store and leaves the group. What it has sent
before still arrives; ranks that wait for more of it, in a hook, in a wait or at the end, get an
error at once, find the reason, and leave as well. So all ranks raise in the same step. It matters
that its messages still arrive: another rank may still be at the end of the step before, which this
one has ended. A failure that ended all messages of a group at once would undo that step on some
ranks alone.

A rank writes its address to the store, and reads those of the others. Two ranks connect when one
first expects a message of the other. When a hook is attached, all gather a greeting of each, with a
digest of the hook and its settings. So they learn at once that all are there and have the same
hook. Rank 0's parameters travel while ranks continue, if they have at most 64 MiB.

After a failed step all ranks join a new channel when the next step begins
(:meth:`StepGroup.connect`), under another prefix in the store, over the connections that they have.
First each rank writes the number of its attempt to the store, and rank 0 writes the list of all
attempts. A rank joins only if rank 0's list contains its latest attempt; stale attempts are
ignored. Other models' groups over the same ranks fail together with one, because the rank may have
left a backward before it reached them. If a rank's process has ended, the first rank that notices
writes this as the reason, and blames no rank that is alive. The group keeps its name and identity,
because compiled code finds it by name; only its backend gets another channel.

Tensors on a device may use the same channel, through memory of the host
(:meth:`StepGroup.carries`). Otherwise their backend decides how a failed step ends: they travel
over the model's group, while the ranks agree over a Gloo group for the CPU. The library makes that
group for ``cpu:gloo,cuda:nccl`` and for a group that has NCCL alone. So all ranks raise in the step
that failed, on NCCL as on Gloo. But NCCL cannot cancel a collective: a rank may have issued some
that the others never join, and later ones would pair with these. So each rank marks the group as
lost, and refuses the next step, DDP's next broadcast of buffers, and another ``attach``; the error
gives the reason. The library aborts no communicator, because it belongs to the user. The user calls
``abort()`` on all ranks, makes a new group and attaches again. If the CPU's backend is not Gloo,
the ranks cannot agree: they wait until the group's own timeout.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook._C import WireFailure
from torch_commhook.collectives.agreement import gather_values
from torch_commhook.collectives.gloo_groups import (
    destroy_group,
    device_types,
    devices_over_host,
    every_state,
    exchanges,
    group_description,
    group_name,
    group_rank,
    group_store,
    group_timeout,
    is_gloo,
    is_gloo_or_own,
    lacks_cpu,
    resolve_group,
    state_of,
)
from torch_commhook.collectives.hosts import machine
from torch_commhook.collectives.issuing import (
    COMPARISON,
    Place,
    StepEnd,
    agree_on_used,
    all_alike,
    begin_maximum,
    place_in,
)
from torch_commhook.collectives.symmetric import give_up
from torch_commhook.step.connected_group import (
    ConnectedGroup,
    Failure,
    PeerError,
    Reason,
    Rendezvous,
    innermost,
    peer_error,
    reason_of,
    reason_of_loss,
)
from torch_commhook.step.link import MoreConnections

_log = logging.getLogger(__name__)
#: Below so many bits per second, copies of a device's tensors to the host take little of the time
#: of their messages.
_SLOW = 5e9
#: Another rank is at fault, and will send nothing more.
_GONE = (WireFailure.ENDED, WireFailure.LOST, WireFailure.LEFT, WireFailure.TOLD)


def step_groups() -> list[StepGroup]:
    """All existing groups."""
    found = [reference() for state in every_state() for reference in state.step_groups.valuerefs()]
    return [group for group in found if group is not None]


def found_by(key: str) -> Any:
    """The reducer or road with a key, by which compiled code finds it; None if it is gone."""
    # Dynamo would make variables of numbers that change.
    found = (group.users.get(key) for group in step_groups())
    return next((each for each in found if each is not None), None)


def parameters_changed(key: str) -> bool:
    """Whether the parameters of a reducer or road have changed since its hook was attached.

    A constant: compiled code is for the parameters at the time of tracing.
    """
    return found_by(key).change_of_parameters() is not None


# As torch.compiler.assume_constant_result, without the import of the compiler.
parameters_changed._dynamo_marked_constant = True  # type: ignore[attr-defined]


class StepGroup:
    """A process group that survives failed steps.

    All ranks of ``parent`` must make theirs at the same point.

    Args:
        parent: the ranks that take part; None for the default group.
        meets_again: whether the same ranks continue after a failed step. Otherwise the owner makes
            another group, over the remaining ranks.
        connect_within: how long ranks wait for each other to connect, and a connection for an
            answer of its host; None for ``timeout``, and 15 s.
        greeting: a digest of at most 32 bytes: the argument of the first :attr:`all_alike`, which
            then takes less time.
        devices: the types of devices whose tensors go over the library's transport, beside the CPU;
            None for those of which the parent's go over Gloo, and :meth:`choose_wire`.

    Attributes:
        group: the group through which hooks communicate. A failed step replaces its channel.
        timeout: the longest time of a collective.
        shares_used: whether ranks tell each other at a step's end which parameters they have used.
        in_background: whether the open step runs beside steps of other groups. Then only the code
            that ends it detects failures: no other group fails it, and it fails no other group.
        users: the road and the reducer of the model whose steps it takes, by their keys.
    """

    def __init__(
        self,
        parent: dist.ProcessGroup | None = None,
        *,
        meets_again: bool = True,
        connect_within: timedelta | None = None,
        greeting: bytes = b"",
        devices: Collection[str] | None = None,
    ) -> None:
        self.parent = resolve_group(parent)
        found = devices_over_host(self.parent) if devices is None else devices
        self._carried = frozenset(found) | {"cpu"}
        self._may_choose = devices is None
        self._meets_again = meets_again
        self._connect_within = connect_within
        self.size: int = self.parent.size()
        self.rank: int = group_rank(self.parent)
        self.timeout = group_timeout(self.parent)
        self._open = False  # a step has begun and not ended
        self._broken = False
        self.in_background = False
        self.users: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._backward: RunningBackward | None = None  # of the last step
        self._step_end: StepEnd | None = None  # of the open step, if ranks agree
        self._comparison: Place | None = None  # of the next one, if it was announced
        state = state_of(self.parent)
        #: Of its rendezvous; it never changes.
        self.name = _name_of(self.parent, state.step_groups_made)
        state.step_groups_made += 1
        #: The ranks' group that can reconnect, or None.
        self._rendezvous: Rendezvous | None = None
        self._ranks = list(range(self.size))  # as messages name them
        if self.size > 1 and (is_gloo_or_own(self.parent) or lacks_cpu(self.parent)):
            store = group_store(self.parent)
            if store is not None:
                self._ranks = dist.get_process_group_ranks(self.parent)
                self._rendezvous = Rendezvous(store, self.name, self.rank, self.size, self.timeout)
                port = getattr(innermost(store), "port", None)
                state.ports |= set() if port is None else {port}
        self.group = self.parent
        # Compilers must not ask the parent.
        self.shares_used = self.recovers or hasattr(self.parent, "_commhook_shares_used")
        #: Whether ranks agree on each step.
        self._agrees = self.recovers or hasattr(self.parent, "_commhook_agrees")
        self._own: list[ConnectedGroup] = []
        #: Connections for large messages.
        self.connections = MoreConnections()
        self._has_connected_more = False  # the present groups
        self._private_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
            weakref.WeakKeyDictionary()
        )
        # Groups of the hook beside its own, which cannot reconnect.
        self._outside: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._end = weakref.finalize(self, _destroy_all, self._own)
        if self.recovers:
            self.group = self._make(self.name, self.parent, greeting)
        state.step_groups[self.name] = self

    @property
    def recovers(self) -> bool:
        """Whether ranks agree on each step, and reconnect after a failed one."""
        return self._rendezvous is not None

    @property
    def epoch(self) -> int:
        """The number of the next step's connections: each failed step ends its own.

        The same on all ranks in a step that has begun. 0 if ranks cannot reconnect.
        """
        return 0 if self._rendezvous is None else self._rendezvous.epoch + self._broken

    @property
    def _global_rank(self) -> int:
        return self._ranks[self.rank]

    def carries(self, device: torch.device) -> bool:
        """Whether tensors on a device go over the library's transport, if ranks can reconnect."""
        return device.type in self._carried

    def choose_wire(self, device: torch.device) -> None:
        """Also carry tensors on a device, if a far and slow link connects the ranks.

        Does nothing if that was decided. All ranks call this, and measure the link the first time.
        """
        if not self._may_choose or self.carries(device) or not self.recovers:
            return
        self.use_connections(None)
        link = self.connections.link(self.group)
        if link is not None and link.rates and link.measured.bits_per_second < _SLOW:
            self._carried |= {device.type}
            _log.info("%s: tensors on %s go over the host: %s", self.name, device.type, link)

    def group_for(self, device: torch.device) -> dist.ProcessGroup:
        """The group through which hooks communicate tensors on a device."""
        group = self.group if self.carries(device) else self.parent
        self._note_outside(group)
        return group

    def _note_outside(self, group: dist.ProcessGroup) -> None:
        is_own = self.recovers and group is self.group
        # Traced groups were noted when the hook was attached.
        if not is_own and not torch.compiler.is_dynamo_compiling() and group.size() > 1:
            self._outside.add(group)

    def hook_changes(self) -> None:
        """Note that another hook is attached, which may communicate through other groups."""
        self._outside.clear()

    def private_group(self, group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        """The group through which hooks communicate instead of a group that the user gave.

        It has a channel of its own, which begins anew together with :attr:`group`. All ranks call
        this for the same groups in the same order.

        Returns:
            The group itself if it cannot reconnect: one of another backend, or with ranks that do
            not take part here. Also for tensors on a device, if its own backend connects some of
            the ranks, on one machine, such as NCCL in a node of ``hierarchical``.
        """
        is_known = is_gloo_or_own(group) or lacks_cpu(group)
        is_ours = self.recovers and self.carries(device) and is_known and self._has(group)
        if not is_ours or self._is_faster(group, device):
            self._note_outside(group)
            return group
        found = self._private_groups.get(group)
        if found is None:
            found = self._make(f"{self.name}/{group_name(group)}", group)
            self._private_groups[group] = found
            self._connect_more(found)
        return found

    def _is_faster(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether some of the ranks share a machine, and their backend for a device no host."""
        if device.type == "cpu" or not 1 < group.size() < self.size:
            return False
        if is_gloo(group, device.type):
            return False
        return len(set(gather_values(machine(), group) or [])) == 1

    def use_connections(self, count: int | None) -> None:
        """Give large messages between two ranks several connections. All ranks call this.

        Groups of other backends than Gloo do not change.

        Args:
            count: the number of connections. None keeps the last number; the first time it measures
                the link, here and when :meth:`private_group` makes a group.
        """
        is_new = count is not None and count != self.connections.count
        if not self.recovers or (self._has_connected_more and not is_new):
            return
        self.connections.count = self.connections.count if count is None else count
        self.connect()
        for group in [self.group, *self._private_groups.values()]:
            self._connect_more(group)
        self._has_connected_more = True

    @property
    def takes_connections(self) -> bool:
        """Whether :meth:`use_connections` changes a group."""
        groups = [self.group, *self._private_groups.values()]
        return self.recovers and any(map(exchanges, groups))

    def _connect_more(self, group: dist.ProcessGroup) -> None:
        own = next(own for own in self._own if own.group is group)
        assert self._rendezvous is not None
        self.connections.connect(own, self._rendezvous.store)
        self._step_end = self._comparison = None  # their places may be of before

    def _has(self, group: dist.ProcessGroup) -> bool:
        return set(dist.get_process_group_ranks(group)) <= set(
            dist.get_process_group_ranks(self.parent)
        )

    def begin(self) -> None:
        """Begin a step. After a failed one, wait for the other ranks and reconnect.

        Raises:
            RuntimeError: some ranks do not come within the group's timeout; or the failed step has
                communicated through a group that cannot reconnect.
            PeerError: a rank has come, and failed again since.
        """
        if self._open:  # an exception has ended the last step, and nobody reported it
            _log.warning("%s", self.explain("backward() was left by an exception"))
            self.fail("backward() was left by an exception")
        self._backward = backward = RunningBackward()
        open_ones = [group for group in self._others() if group._open]
        for group in open_ones:
            if backward.has_left(group._backward):
                group.fail("backward() was left by an exception")
        if open_ones and not self._broken and self._reason() is not None:
            explained = self.explain("")
            self.fail(explained)
            raise explained
        for outside in self._outside:
            check_is_free(outside)
        self.connect()
        self._open = self.size > 1
        # An exchange in the background agrees by itself; its step end then serves this step.
        if self._open and self._agrees and self._step_end is None:
            with suppress(RuntimeError):  # a rank has left, which the end of the step finds
                self._step_end = StepEnd(self.group)

    def connect(self) -> None:
        """Reconnect if the last step failed. All ranks call this."""
        if not self._broken:
            return
        self._step_end = self._comparison = None
        if not self._meets_again:
            raise self.explain("the step has failed already")
        assert self._rendezvous is not None
        try:
            # Callbacks of the failed step would take part in the next one. One may cause another.
            until = time.monotonic() + self.timeout.total_seconds()
            while any([own.drain(until) for own in self._own]):
                pass
            store = self._rendezvous.meet()
            for own in self._own:
                own.renew(store)
        except BaseException as error:
            for own in self._own:
                own.close(Reason(f"since rank {self._global_rank} could not begin anew", None))
            if not isinstance(error, RuntimeError):
                raise
            if self._rendezvous.catch_up():  # another rank has failed again quickly
                raise self.explain(error) from error
            raise RuntimeError(
                f"torch_commhook: rank {self._global_rank} could not reach the other ranks again "
                "after the last step failed; every rank must run another backward()"
            ) from error
        self._rendezvous.epoch += 1
        self._broken = False

    def end(self) -> None:
        """End a step that succeeded on this rank; wait for the others if that detects failures."""
        if self._agrees and self.size > 1:
            self.end_agreed(lambda: self._end_of_step().any_rank())
        else:
            self._open = False

    def commit(self, used: Tensor) -> None:
        """End a step that succeeded on this rank; if ranks agree, wait until it has on all.

        Args:
            used: uint8, flat, with the same shape on all ranks: not 0 for each parameter that this
                rank has used. Becomes the maximum over the ranks.

        Raises:
            PeerError: another rank failed.
        """
        if self.size > 1 and self._agrees:
            self.end_agreed(lambda: agree_on_used(self._end_of_step(), used))
            return
        if self.size > 1 and self.shares_used:
            used.copy_(begin_maximum(self.group, used)())
        self._open = False

    def _end_of_step(self) -> StepEnd:
        step_end, self._step_end = self._step_end, None
        if step_end is None and self._broken:
            raise self.explain("the step has failed already")
        return step_end or StepEnd(self.group)

    def end_agreed(self, agree: Callable[[], object]) -> None:
        """End a step that succeeded on this rank, by an agreement of the ranks.

        Raises:
            PeerError: another rank failed.
            TimeoutError: another rank did not come in time.
        """
        try:
            agree()
        except RuntimeError as error:
            if not self.recovers:
                raise
            # Elastic ranks agree on who continues after a PeerError.
            failure = self._failure(error)
            is_late = failure is not None and failure.kind == WireFailure.TIMEOUT
            if failure is not None and (failure.kind in _GONE or (is_late and self._meets_again)):
                raise self.fail_with(error) from error
            explained = self.explain(error)
            self.fail(explained)
            raise explained from error
        self._open = False

    def lose(self, rank: int | None, why: str) -> None:
        """Fail the step, also one in the background, because of another rank; as :meth:`fail`.

        Another thread than the step's may call this.

        Args:
            rank: the rank in the default group; None if unknown.
            why: the continuation of "this step failed" in errors.
        """
        self._fail_all(Reason(why, rank, has_ended=False), lost=True)

    def fail(self, reason: BaseException | str) -> None:
        """End the other ranks' collectives of this step, and tell them why.

        This includes other models' groups over the same ranks. Several models may take part in one
        backward, and this rank may have left it before it reached them. All ranks do the same, and
        begin the next step with new channels.

        Args:
            reason: the error or a text. A :class:`PeerError` passes on the reason of the rank at
                fault.
        """
        told = reason_of(reason)
        if told is not None:
            self._fail_all(told)
            return
        if isinstance(reason, BaseException):
            reason = f"{type(reason).__name__}: {reason}"
        text = f"on rank {self._global_rank}: {reason}"
        self._fail_all(Reason(text, self._global_rank))

    def _fail_all(self, reason: Reason, *, lost: bool = False) -> None:
        if not self._broken and (lost or not self.in_background):
            self._fail(reason, lost=lost)
            for sibling in self._others():
                sibling._fail(reason, lost=lost)

    def _others(self) -> list[StepGroup]:
        every = state_of(self.parent).step_groups.values()
        return [each for each in every if each is not self and not each.in_background]

    def _fail(self, reason: Reason, *, lost: bool = False) -> None:
        if self._open:
            outside = list(self._outside)
            for group in outside:
                state_of(group).is_lost = True
            for group in outside:
                give_up(group)
        self._open = False
        if not lost:  # otherwise the step's thread uses it
            self._step_end = self._comparison = None
        if self._rendezvous is None or self._broken:
            return
        self._broken = True
        self._rendezvous.tell(reason)
        for own in self._own:
            own.close(reason)

    def fail_with(self, error: BaseException) -> BaseException:
        """Fail the step because of an error; as :meth:`fail`.

        Returns:
            The error to raise: the error itself, or a :class:`PeerError` if another rank is at
            fault. A TimeoutError for a rank that is late.
        """
        failure = self._failure(error)
        if failure is not None and failure.kind in _GONE:
            return self._fail_with_lost(failure, error)
        if failure is not None and failure.kind == WireFailure.TIMEOUT:
            late = TimeoutError(f"torch_commhook: another rank did not come in time: {error}")
            late.__cause__ = error
            error = late
        elif failure is not None and self._reason() is not None:  # another thread has failed it
            explained = self.explain(error)
            self.fail(explained)
            explained.__cause__ = error
            return explained
        self.fail(error)
        return error

    def _failure(self, error: BaseException) -> Failure | None:
        """Why the messages of one of this step's groups fail, if an error comes from that."""
        if not isinstance(error, RuntimeError) or reason_of(error) is not None:
            return None
        for own in self._own:
            failure = own.failure()
            # Callbacks may have put the text into another error.
            if failure is not None and failure.text in str(error):
                return failure
        return None

    def _fail_with_lost(self, failure: Failure, error: BaseException) -> PeerError:
        """Fail the step because a rank has gone; returns the error to raise."""
        reason = reason_of_loss(failure, error, self._global_rank)
        self._fail_all(reason)  # the first reported reason stays
        explained = peer_error(self._reason() or reason)
        explained.__cause__ = error
        return explained

    def explain(self, error: BaseException | str) -> PeerError:
        """The error to raise for a collective's error, with the report of the rank at fault."""
        reason = self._reason()
        if reason is not None:
            return peer_error(reason)
        text = (
            "since another rank left it, or its connection failed, as rank "
            f"{self._global_rank} saw: {error}"
        )
        return peer_error(Reason(text, None))

    def forget_reason(self) -> None:
        """Remove why the step has failed from the store, once all ranks have left the group."""
        if self._rendezvous is not None:
            self._rendezvous.forget_reason()

    def close(self) -> None:
        """Close the group. Runs automatically when the object or the interpreter ends."""
        self._broken = True
        self._step_end = self._comparison = None
        self._end()

    def _reason(self) -> Reason | None:
        return None if self._rendezvous is None else self._rendezvous.reason()

    @property
    def all_alike(self) -> Callable[[bytes], bool] | None:
        """Return a function that tells whether all ranks have the same bytes.

        All ranks call it between the same two steps. None for a group of another class, which may
        not support an all-reduce of the maximum.
        """
        if self.recovers:
            return self._all_alike
        is_plain = type(self.parent) is dist.ProcessGroup or self.shares_used
        return partial(all_alike, self.parent) if is_plain else None

    def _all_alike(self, own: bytes) -> bool:
        self.connect()
        place, self._comparison = self._comparison, None
        found = self._own[0].is_alike(own) if place is None else None
        return all_alike(self.group, own, place) if found is None else found

    def expect_comparison(self) -> None:
        """Reserve the place of the next :attr:`all_alike`, which other threads' may come before."""
        if self.recovers and not self._broken and exchanges(self.group):
            self._comparison = self._comparison or place_in(self.group, COMPARISON)

    def _make(self, name: str, like: dist.ProcessGroup, greeting: bytes = b"") -> dist.ProcessGroup:
        """Make a group over the ranks of ``like``, through which a hook communicates instead.

        Raises:
            PeerError: a step is open, and has failed on another rank, which does not come.
        """
        assert self._rendezvous is not None
        if self._open:
            reason = self._rendezvous.wait_for_all(name, like.size())
            if reason is not None:
                raise peer_error(reason)
        own = ConnectedGroup(
            self._rendezvous.store,
            name,
            like,
            f"commhook: gradients over {group_description(like)}",
            connect_within=self._connect_within,
            greeting=greeting,
            devices=(self._carried | (device_types(like) if self._may_choose else set())) - {"cpu"},
        )
        self._own.append(own)
        return own.group


def _destroy_all(groups: Collection[ConnectedGroup]) -> None:
    for each in groups:
        destroy_group(each.group)


def tell_unreachable(parent: dist.ProcessGroup, error: BaseException) -> None:
    """Tell the other ranks that this one could not make the first group of ``parent`` with them."""
    store = group_store(parent)
    assert store is not None
    name, timeout = _name_of(parent, 0), group_timeout(parent)
    rendezvous = Rendezvous(store, name, parent.rank(), parent.size(), timeout)
    text = f"since ranks could not connect, as rank {parent.rank()} of them saw: {error}"
    rendezvous.tell(Reason(text, None, has_ended=False))


def _name_of(parent: dist.ProcessGroup, number: int) -> str:
    """The name of one of the groups over the ranks of another."""
    return f"{group_name(parent)}/commhook{number}"


def check_is_free(group: dist.ProcessGroup) -> None:
    """Refuse a group on which collectives of a failed step may still be running."""
    if state_of(group).is_lost:
        raise RuntimeError(
            f"torch_commhook: a step that communicated through process group "
            f"{group_name(group)!r} failed. Its collectives may still be running, and would "
            "interfere with later ones. Only groups of Gloo, with tensors on the CPU, can "
            "continue: restart the processes, or abort() this process group on all ranks and "
            "make a new one"
        )


# ---- determines which backward() Python code is a part of ----------------------------------------
#
# The autograd engine only reports the number of the innermost backward; the stack shows outer ones.


_FUNCTION_FILE = torch.autograd.function.__file__
_GRAPH_FILE = torch.autograd.graph.__file__


class RunningBackward:
    """The outermost ``backward()`` on this thread's stack.

    Attributes:
        is_nested: whether another one runs inside a node of its graph, as in reentrant activation
            checkpointing.
        thread: the thread's number.
    """

    def __init__(self) -> None:
        frame: Any = sys._getframe(1)
        outermost: Any = None
        self.is_nested = False
        while frame is not None:
            code = frame.f_code
            if code.co_name == "_engine_run_backward" and code.co_filename == _GRAPH_FILE:
                outermost = frame
            elif (
                outermost is not None
                and code.co_name == "apply"
                and code.co_filename == _FUNCTION_FILE
                # A node's method; a function's own, which runs its forward, is a class method.
                and code.co_varnames[0] == "self"
            ):
                self.is_nested = True
            frame = frame.f_back
        self.thread = threading.get_ident()
        self._frame_id = id(outermost)
        self._output: weakref.ref[Any] | None = None
        if outermost is not None:
            with suppress(LookupError, TypeError):  # no tensor, or one without a weak reference
                self._output = weakref.ref(outermost.f_locals["t_outputs"][0])

    def has_left(self, earlier: RunningBackward | None) -> bool:
        """Whether an earlier one on this thread has ended, possibly by an exception."""
        return earlier is not None and earlier.thread == self.thread and not earlier.is_same(self)

    def is_same(self, other: RunningBackward) -> bool:
        """Whether two are the same. Frames are reused; tensors seldom are."""
        if self.thread != other.thread or self._frame_id != other._frame_id:
            return False
        if self._output is None or other._output is None:
            return self._output is other._output
        output = self._output()
        return output is not None and output is other._output()
