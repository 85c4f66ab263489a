"""Hooks over the replicas of torchft, whose number changes during training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft.process_group import ManagedProcessGroup

from torch_commhook import _C
from torch_commhook.attachment.attaching import attach
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.attachment.reducer_road import ReducerRoad
from torch_commhook.attachment.road import printed_hook
from torch_commhook.attachment.sharded.fsdp import trains_shards
from torch_commhook.attachment.training_state import BeforeForward
from torch_commhook.collectives.futures import completed
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.expressions import as_hook
from torch_commhook.process_group.base import ProcessGroup
from torch_commhook.process_group.wrapper import WrapperProcessGroup
from torch_commhook.step.attached_hook import Attached

_log = logging.getLogger(__name__)


def attach_to(
    manager: Any,
    model: nn.Module,
    hook: str | Callable[..., Any],
    *,
    key: str = "torch_commhook",
    **options: Any,
) -> HookHandle:
    """Attach a hook to a model that torchft's replicas train.

    Each backward averages over the replicas of the step's quorum, whatever their number. The
    hook's memory is registered with the manager: a replica that joins loads the memory of the
    replica that it recovers from.

    ``backward()`` does not raise errors of collectives. The manager records the error and runs no
    more collectives in this step; ``should_commit()`` is then False, so the optimizer must not
    step. The next step begins with the hook's memory from before.

    Args:
        manager: a torchft ``Manager``, made with ``use_async_quorum=False``, so that a joining
            replica has its state before its first forward. Call ``start_quorum()`` before each
            step's forward, as ``zero_grad()`` of torchft's ``OptimizerWrapper`` does.
        model: a module, the same on all replicas. Not torchft's DistributedDataParallel.
        hook: one of :mod:`torch_commhook.hooks`, an expression such as
            ``"error_feedback(blockwise(bits=4))"``, or a callable ``hook(state, bucket)``. Its
            ``bucket.process_group()`` is the quorum.
        key: the key of the hook's state among those of the manager; one for each model.
        options: options of :func:`torch_commhook.attach`: ``state``, ``scaler``, ``bucket_cap_mb``
            and ``gradient_as_bucket_view``.

    Returns:
        The handle. Any replica, of any quorum, can load its ``state_dict()``.

    Raises:
        ValueError: the manager has an asynchronous quorum, or a state under this key; the hook has
            its own process group, or keeps ranks apart (for this torchft has ``DiLoCo``).
        TypeError: the model averages gradients itself; or as :func:`torch_commhook.attach`.
        RuntimeError: this version of torchft does not report what the hook needs.

    Example::

        manager = Manager(..., use_async_quorum=False)
        handle = attach_to(manager, model, "error_feedback(blockwise(bits=4))")
    """
    checked: Callable[..., Any] = as_hook(hook, "attach_to")
    _check(manager, model, checked)
    quorum = _Quorum(manager)
    fixed: dict[str, Any] = {
        "process_group": quorum.group,
        "init_sync": False,
        "broadcast_buffers": False,
    }
    for name in fixed:
        if name in options:
            raise TypeError(f"attach_to: {name} follows from the manager; leave it out")
    handle = attach(model, checked, **fixed, **options)
    quorum.follow(handle, getattr(model, "_orig_mod", model))
    try:
        manager.register_state_dict_fn(key, quorum.load_state_dict, quorum.state_dict)
    except AssertionError as error:
        handle.remove()
        raise ValueError(f"attach_to: the manager has a state under key {key!r} already") from error
    return handle


def _check(manager: Any, model: nn.Module, hook: Callable[..., Any]) -> None:
    if isinstance(model, DistributedDataParallel) or trains_shards(model):
        raise TypeError(
            f"attach_to: model must be a module that does not average gradients itself, got "
            f"{type(model).__qualname__}; give the module inside"
        )
    if isinstance(hook, Hook) and hook.has_own_groups():
        raise ValueError(
            f"attach_to: hook '{hook!r}' must have no process group of its own; it averages over "
            "the manager's quorum"
        )
    if isinstance(hook, Hook) and hook.keeps_ranks_apart:
        raise ValueError(
            f"attach_to: hook '{hook!r}' keeps ranks apart between its exchanges, which the "
            "manager does not support; use torchft.local_sgd.DiLoCo"
        )
    for name in ("_use_async_quorum", "_quorum_future"):
        if not hasattr(manager, name):
            raise RuntimeError(
                f"attach_to: this version of torchft has no Manager.{name}, which reports when a "
                "quorum is complete; torchft-nightly 2026.10.26 has it"
            )
    if manager._use_async_quorum:
        raise ValueError(
            "attach_to: the manager must be made with use_async_quorum=False. Otherwise a replica "
            "that joins averages before it has the hook's memory"
        )


class _Quorum:
    """Keeps a hook in step with a manager's quorums."""

    def __init__(self, manager: Any) -> None:
        self.group = _QuorumGroup(manager, self)  # for the hook
        self.has_run = False  # a collective, since the last quorum
        self._manager = manager
        self._handle: HookHandle
        self._future: object = None  # of the present quorum
        self._step = -1
        self._before: dict[str, Any] = {}  # the hook's memory when the step began
        self._attached: Attached | None = None  # the hook of that memory
        self._loaded: dict[str, Any] | None = None

    def follow(self, handle: HookHandle, model: nn.Module) -> None:
        """Check the quorum before each forward of a model."""
        self._handle = handle
        handle._attached.memory.any_rank_loads = True
        road = handle._road
        assert isinstance(road, ReducerRoad)
        # Replicas that join would form other buckets than those that have trained.
        road.reducer.keep_buckets()
        self._road = road
        model.register_forward_pre_hook(BeforeForward(self), prepend=True)

    def check_is_followed(self) -> None:
        """Refuse collectives if the quorum has changed since the forward began.

        Raises:
            RuntimeError: it has.
        """
        if self._future is None or self._manager._quorum_future is not self._future:
            raise RuntimeError(
                "torch_commhook: the manager must know the step's quorum before the forward: call "
                "start_quorum() first, or zero_grad() of torchft's OptimizerWrapper"
            )

    def before_forward(self, module: nn.Module) -> None:
        """Follow the present quorum. The model calls this before its own forward."""
        future = self._manager._quorum_future
        if future is None or future is self._future:
            return  # before training, or another forward of the same step
        if not (torch.is_grad_enabled() and self._handle.is_attached):
            return
        self._manager.wait_quorum()
        if self._loaded is not None:
            self._go_on_from(self._loaded)
        elif self._is_to_repeat():
            _log.warning("torch_commhook: step %d was not committed, and is repeated", self._step)
            self._go_on_from(self._before)
        if self._manager.errored() is None:
            self._take_place()
        self._before = self._state()
        self._attached = self._handle._attached
        self._step = self._manager.current_step()
        self.has_run = False
        self._future = future

    def _take_place(self) -> None:
        """Set the rank and the number of replicas of the quorum."""
        rank, size = self._manager.participating_rank(), self._manager.num_participants()
        if rank is None or size != self.group.parent.size():
            raise RuntimeError(
                f"torch_commhook: all replicas of the quorum must take part in the average, got "
                f"{size} of {self.group.parent.size()}; a hook takes neither spares "
                "(WorldSizeMode.FIXED_WITH_SPARES) nor start_quorum(allow_heal=False)"
            )
        memory = self._handle._attached.memory
        if (rank, size) != (memory.rank, memory.world_size):
            # Other ranks have other segments: old segments' errors are added to their parameters'.
            state = self._state()
            self.group.place = memory.rank, memory.world_size = rank, size
            self._go_on_from(state)

    def _is_to_repeat(self) -> bool:
        if self._attached is not self._handle._attached:
            return False  # another hook has replaced it, without memory
        return self.has_run and self._step == self._manager.current_step()

    # ---- state -----------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        # Always complete: random numbers depend on the number of steps.
        return self._handle._attached.memory.state_dict()

    def _go_on_from(self, state: dict[str, Any]) -> None:
        self._loaded = None
        self._handle.load_state_dict(state)

    def _settings(self) -> dict[str, Any]:
        """The settings that must be the same on all replicas."""
        buckets = [list(names) for names in self._road.reducer.buckets()]
        return {"hook": printed_hook(self._handle.hook), "buckets": buckets}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a replica that joins; empty if the hook was removed.

        Called while a quorum is formed.
        """
        if not self._handle.is_attached:
            return {}
        state = self._before if self._is_to_repeat() else self._state()
        return {"settings": self._settings(), "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load another replica's :meth:`state_dict`, from the next forward on.

        Raises:
            RuntimeError: that replica has another hook, or none, or other buckets.
        """
        if not self._handle.is_attached:
            return
        settings = state.get("settings", {})
        for name, own in self._settings().items():
            if settings.get(name) != own:
                raise RuntimeError(
                    f"attach_to: {name} must be the same on all replicas: this one has {own}, the "
                    f"one that it recovers from has {settings.get(name)}"
                )
        # Copies: the manager's tensors may be in read-only memory.
        self._loaded = deepcopy(state["state"])


class _QuorumGroup(WrapperProcessGroup):
    """The replicas of a manager's quorum.

    Collectives are complete when they return. Errors go to the manager, which then runs no more
    collectives in this step.
    """

    #: Replicas tell each other which parameters they have used.
    _commhook_shares_used = True

    def __init__(self, manager: Any, quorum: _Quorum) -> None:
        # Not with the parent's ranks, of which there are none before the first quorum.
        ProcessGroup.__init__(self, 0, 2)
        self.parent = ManagedProcessGroup(manager).parent
        #: Rank and number of ranks. More than one, since others may join.
        self.place = 0, 2
        self._manager = manager
        self._quorum = quorum

    def rank(self) -> int:
        return self.place[0]

    def size(self) -> int:
        return self.place[1]

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        self._quorum.check_is_followed()
        self._quorum.has_run = True
        if self._manager.errored() is None:
            try:
                super().run_collective(operation, arguments, keywords).wait()
            except NotImplementedError:  # another quorum would raise it too
                raise
            except Exception as error:
                _log.warning(
                    "torch_commhook: %s failed, and so does this step: %s", operation, error
                )
                self._manager.report_error(error)
        return _C.as_work(completed(arguments[0]))
