"""Attaching a hook on all ranks or on none, its handle, and the numbers for a user's log."""

from __future__ import annotations

import copy
import gc
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torch_commhook import _C
from torch_commhook.attachment.road import (
    Road,
    attached_hooks,
    compared_settings,
    first_road,
    keep_road,
    road_in_use,
    stop_watching_optimizers,
    watch_optimizers,
)
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.agreement import gather_along
from torch_commhook.elastic.ranks import Elastic
from torch_commhook.hooks.auto import auto
from torch_commhook.hooks.expressions import as_hook
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.resharding import merged_states, on_the_host
from torch_commhook.memory.states import LOCAL_STEPS, comparable_form
from torch_commhook.memory.watches import Scaler, checked_scale
from torch_commhook.metrics import HookStats, forget_bytes
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.link import check_connections
from torch_commhook.wording import warn_user

# ---- writes numbers to a user's log --------------------------------------------------------------


def write(writer: Any, values: Mapping[str, float], step: int | None) -> None:
    """Write numbers by name to a log; as :meth:`HookHandle.log_to`."""
    if callable(getattr(writer, "add_scalar", None)):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        return
    metrics: Callable[..., Any] | None = getattr(writer, "log_metrics", None)
    log = getattr(writer, "log", None)
    if callable(metrics):
        metrics(dict(values), step=step)
    elif callable(log):
        log(dict(values)) if step is None else log(dict(values), step=step)
    elif callable(writer):
        writer(dict(values))
    else:
        raise TypeError(
            "HookHandle.log_to: the writer must have add_scalar(), log_metrics() or log(), or be a "
            f"function of a dict, got {type(writer).__qualname__}"
        )


# ---- the handle of an attached hook --------------------------------------------------------------


#: Tensors made inside ``torch.inference_mode()`` cannot be modified outside it.
outside_inference_mode = torch.inference_mode(False)


class HookHandle:
    """A handle to a hook that is attached to a model. :func:`attach` makes it.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(4, 1)
        ...     handle = attach(model, hooks.allreduce())
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     sent = handle.stats().bytes_sent
        ...     handle.replace(hooks.cast(torch.bfloat16))
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     handle.remove()
        ...     return sent, handle.stats().bytes_sent
        >>> run_ranks(train, 2)
        [(20, 10), (20, 10)]
    """

    def __init__(self, road: Road, attached: Attached) -> None:
        self._first_road = road
        self._attached = attached
        self._logged: HookStats | None = None

    # An argument, since the module may be gone before the handle is.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        local_steps = self._attached.local_steps
        if local_steps is not None and not is_finalizing():
            # Only the next exchanges can give the ranks the same parameters now.
            local_steps.warn_if_apart("lost its handle")

    @property
    def _road(self) -> Road:
        return road_in_use(self._first_road)

    @property
    def hook(self) -> Callable[..., Any]:
        """The hook."""
        return self._attached.given

    @property
    def is_attached(self) -> bool:
        """Whether the model still uses this hook."""
        return self._road.attached is self._attached and self._road.is_alive

    def _check_attached(self, method: str, advice: str = "") -> None:
        if not self.is_attached:
            raise RuntimeError(
                f"HookHandle.{method}: hook '{self._attached.name}' is no longer attached{advice}"
            )

    def remove(self) -> None:
        """Remove the hook from the model.

        From the next backward on, a DDP model averages its gradients as without a hook, and a plain
        module's gradients stay each rank's own. A running backward still uses the hook. Does
        nothing if the hook was removed before. All ranks must call this between the same two steps.
        If the hook keeps ranks apart, call :meth:`synchronize` first, or the ranks' parameters
        differ.
        """
        if not self.is_attached:
            stop_watching_optimizers()  # the model may be gone
            return
        try:
            if self._attached.local_steps is not None:
                self._attached.local_steps.close()
        finally:  # the warning may be raised as an error
            road = self._road
            road.attached = None
            road.after_backward(self._attached.let_go)
            model = road.model()
            if model is not None and not road.is_alive and not road.is_closing:
                keep_road(model, None)
            stop_watching_optimizers()

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    @outside_inference_mode
    def replace(self, hook: Callable[..., Any] | str, *, state: object = None) -> None:
        """Replace the hook by another one, from the next backward on.

        Statistics restart, and the new hook starts without memory: what the old hook had not sent
        is lost. The scaler stays. All ranks must call this between the same two steps.

        Args:
            hook: as for :func:`attach`.
            state: the first argument of a callable hook.

        Raises:
            RuntimeError: the handle's hook is no longer attached; the ranks' hooks differ, or
                another rank refuses its hook.
            TypeError, ValueError: as :func:`torch_commhook.check_hook`. The old hook then stays, on
                all ranks.
        """
        self._check_attached("replace", "; use attach()")
        replacement, error, given = None, None, hook
        try:
            given = as_hook(hook, "HookHandle.replace")
            memory = self._attached.memory.new_for_same_model()
            replacement = Attached.checked(given, state, memory, "HookHandle.replace")
            self._road.check_fits(replacement)
        except Exception as refused:
            error = refused
        shared = compared_settings(given)
        self._road.agree("HookHandle.replace", error, shared)
        assert replacement is not None
        self._logged = None
        before = self._attached
        replacement.connections = before.connections
        replacement.bucket_hooks = before.bucket_hooks
        replacement.stats.of_shards = before.stats.of_shards
        self._attached = replacement
        try:
            begin_hook(self._first_road, replacement, "HookHandle.replace")
        except BaseException:
            if replacement.local_steps is not None:
                replacement.local_steps.close()
            self._attached = self._road.attached = before
            raise
        elastic = self._road.elastic
        if elastic is not None:
            elastic.hook_replaced(shared)
        if before.local_steps is not None:
            before.local_steps.close()
        stop_watching_optimizers()

    # ---- around the hook -------------------------------------------------------------------------

    def register_buffer_prehook(
        self, hook: Callable[[GradBucket], Tensor | None]
    ) -> RemovableHandle:
        """Call ``hook(bucket)`` first with each bucket.

        The hook returns None, or another buffer: a flat tensor of the bucket's size and dtype.

        This hook and those of the next three methods stay when the communication hook is replaced.
        Their results are checked as autograd checks its hooks'. A result of the wrong type raises a
        ``TypeError``; one of another number, dtype, layout, device or size raises a
        ``RuntimeError``. Compiled backward passes call them as eager ones do.
        """
        return self._attached.bucket_hooks.register("buffer_prehooks", hook)

    def register_prehook(
        self, hook: Callable[[tuple[Tensor, ...]], tuple[Tensor | None, ...] | None]
    ) -> RemovableHandle:
        """Call ``hook(gradients)`` before the communication hook.

        ``gradients`` is a tuple of views of the bucket's buffer, in the order of its parameters.
        The hook returns None, or a tuple of new gradients with None for each that stays.
        """
        return self._attached.bucket_hooks.register("prehooks", hook)

    def register_posthook(
        self,
        hook: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor | None, ...] | None],
    ) -> RemovableHandle:
        """Call ``hook(reduced, local)`` with each bucket's result, before it is written.

        Both are tuples of gradients. ``reduced`` has the communication hook's results, ``local``
        has its inputs. The hook returns None, or a tuple of gradients that replace ``reduced``.
        """
        return self._attached.bucket_hooks.register("posthooks", hook)

    def register_post_accumulate_hook(self, hook: Callable[[GradBucket], None]) -> RemovableHandle:
        """Call ``hook(bucket)`` for each bucket when all gradients are written.

        ``bucket.parameters()`` have the gradients. The hook must return None.
        """
        return self._attached.bucket_hooks.register("post_accumulate_hooks", hook)

    # ---- around a step ---------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager: gradients accumulate on each rank, without communication.

        For gradient accumulation. As in DDP, the place of the model's forward decides, or that of
        ``backward()`` if the model's own forward does not run. The next backward outside the block
        averages the accumulated gradients.
        """
        return self._road.no_sync()

    def join(self) -> AbstractContextManager[Any]:
        """Return a context manager in which ranks may have different numbers of inputs.

        A rank that leaves the block takes part in the others' steps with gradients of zero. Hooks
        of this library still divide by the number of all ranks. At the end all ranks get the
        parameters of a rank that left last. ``DistributedDataParallel.join()`` does the same. For
        other participants see ``torch.distributed.algorithms.join``.

        Raises:
            RuntimeError: the hook keeps ranks apart; all ranks must then take equally many steps.
        """
        if self._attached.keeps_ranks_apart:
            raise RuntimeError(
                f"HookHandle.join: with hook '{self._attached.name}' all ranks must take equally "
                "many steps; give each as many batches"
            )
        return self._road.join()

    @outside_inference_mode
    def synchronize(self) -> None:
        """Give all ranks the same parameters, if the hook keeps ranks apart.

        Call it at the end of training, before an evaluation, or before :meth:`remove`. It does
        nothing while the ranks have the same parameters, as with every hook but
        :class:`torch_commhook.hooks.local_sgd`. All ranks must call it at the same point.

        Raises:
            RuntimeError: the handle's hook is no longer attached.
            PeerError: another rank failed. The parameters are unchanged.
        """
        self._check_attached("synchronize")
        if self._attached.local_steps is not None:
            self._attached.local_steps.synchronize()

    def stats(self) -> HookStats:
        """Return what the hook has sent since it was attached; see :class:`HookStats`."""
        attached = self._attached
        stats = attached.stats
        attached.count_replays()
        if attached.has_unseen_traffic:
            forget_bytes(stats)
        stats.world_size = attached.memory.world_size
        for memory in attached.memory.bucket_memories():
            if memory.index < len(stats.buckets):
                stats.buckets[memory.index].measured(memory.meters())
        elastic = self._road.elastic
        if elastic is not None:
            stats.membership, stats.stragglers = elastic.ranks.events, elastic.stragglers
        if isinstance(attached.hook, auto):
            stats.choice, stats.reason = attached.hook.choice_and_reason(attached.memory)
        return copy.deepcopy(stats)

    def log_to(self, writer: Any, step: int | None = None, *, prefix: str = "commhook/") -> None:
        """Write what the hook has sent to a log; see :meth:`HookStats.scalars`.

        Times are means over the steps since the last call.

        Args:
            writer: TensorBoard's ``SummaryWriter``, with ``add_scalar(name, value, step)``; a
                logger of Lightning or MLflow, with ``log_metrics(values, step)``; a run of Weights
                & Biases, a tracker of Accelerate, or any object with ``log(dict)``; or a function
                of a dict.
            step: the number of the step; None if the writer counts steps itself.
            prefix: the beginning of each name.

        Raises:
            TypeError: ``writer`` is none of these, or ``step`` is no whole number.
        """
        if step is not None and (isinstance(step, bool) or not isinstance(step, SupportsIndex)):
            raise TypeError(f"log_to: step must be an int or None, got {_C.type_name(step)}")
        stats = self.stats()
        values = stats.scalars(self._logged)
        write(writer, {f"{prefix}{name}": value for name, value in values.items()}, step)
        self._logged = stats

    @property
    def steps(self) -> int:
        """The number of steps that training has counted. On a new rank it includes earlier steps.

        With local steps these are the optimizer's steps. Without ``elastic`` it is the number of
        steps since the hook was attached; with local steps, of exchanges.
        """
        elastic = self._road.elastic
        return self._attached.memory.steps if elastic is None else elastic.ranks.trained

    @property
    def is_joining(self) -> bool:
        """Whether this rank is still receiving the state of a running training in pieces.

        Until it has all pieces, its parameters and loss are meaningless and its gradients do not
        count. Always False without ``elastic``.
        """
        elastic = self._road.elastic
        return elastic is not None and elastic.new_ranks.lacks_state

    def on_membership(self, callback: Callable[[int, int], object]) -> None:
        """Call ``callback(rank, size)`` now, and whenever ranks are lost or join.

        Data samplers need this. The training thread makes the call, between two steps or before it
        repeats a step. See :class:`Elastic`.

        Args:
            callback: gets this rank's number and the number of ranks.

        Raises:
            RuntimeError: the hook was attached without ``elastic``.
        """
        elastic = self._road.elastic
        if elastic is None:
            raise RuntimeError("HookHandle.on_membership: the hook was attached without elastic")
        elastic.ranks.on_membership(callback)

    # ---- what the hook remembers -----------------------------------------------------------------

    @outside_inference_mode
    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return what the hook remembers on this rank, for a checkpoint.

        The state holds error memory, factors, momentum and steps by parameter name, as plain values
        and tensors. It loads with ``torch.load(..., weights_only=True)``, and
        ``torch.distributed.checkpoint`` saves it unchanged. Each rank's state is its own, under
        ``"rank0"``, ``"rank1"`` and so on. It is empty if the hook remembers nothing.

        Training that resumes from it takes the same steps, bit for bit, if the buckets are the
        same. Loading gives a module the state's buckets. DDP rebuilds its buckets after the first
        step, so they may differ before. Seeds are settings of the hook, and not part of the state.

        If the hook keeps ranks apart, the state contains the rank's parameters. The memory of a
        sharded model's ``shard_hook`` is under ``"shard_hook"``.

        Args:
            gather: whether to return the memory of all ranks, in one state that every rank can
                load. Use it for a file that one rank writes, as frameworks do. All ranks must then
                call this at the same point. The state is in host memory, as large as the memory of
                all ranks.

        Raises:
            RuntimeError: with ``gather``: it failed on another rank, the ranks are at different
                steps, or ``torch.distributed`` does not know the process group.
        """
        if gather:
            return self._gathered_state()
        memory, local_steps = self._attached.memory, self._attached.local_steps
        if local_steps is not None:
            with_parameters: dict[str, Any] = local_steps.state_dict()
            return with_parameters
        return {} if memory.remembers_nothing else memory.state_dict()

    def _gathered_state(self) -> dict[str, Any]:
        state, error = {}, None
        try:
            state = on_the_host(self.state_dict())
        except Exception as raised:
            error = raised
        self._road.agree("HookHandle.state_dict", error, {})
        parents = self._road.parents
        states = gather_along(parents, state)
        if len(states) != math.prod(group.size() for group in parents):
            raise RuntimeError(
                "HookHandle.state_dict: gather=True needs a process group that torch.distributed "
                "knows; save the state of each rank"
            )
        return merged_states(states)

    @outside_inference_mode
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned on this rank.

        All ranks must call this at the same point. For another number of ranks see
        :func:`torch_commhook.reshard_states`. If the hook keeps ranks apart, this writes the rank's
        parameters; call it after the model's own ``load_state_dict()``.

        Args:
            state: the state.

        Raises:
            RuntimeError: the handle's hook is no longer attached; the ranks' states are of
                different steps or buckets, or another rank refuses its state.
            ValueError: ``state`` is no such state, or belongs to other parameters, another number
                of ranks, or another kind of hook.

        After an error the hook's memory is unchanged, on all ranks.
        """
        self._check_attached("load_state_dict")
        memory, local_steps = self._attached.memory, self._attached.local_steps
        settings: dict[str, object] = {}
        go_on: Callable[[], None] | None = None
        error = None
        try:
            if local_steps is not None:
                apart = local_steps.check_state(state)
                go_on = partial(local_steps.take_state, apart)
                settings = _shared_of_state(apart.rest, apart.position)
            elif not (isinstance(state, dict) and not state and memory.remembers_nothing):
                checked = memory.check_state(state)
                go_on = partial(self._take_state, checked)
                settings = _shared_of_state(checked, None)
        except Exception as refused:
            error = refused
        self._road.agree("HookHandle.load_state_dict", error, settings)
        if go_on is not None:
            go_on()

    def _take_state(self, state: dict[str, Any]) -> None:
        self._attached.memory.load_state(state)
        self._road.memory_loaded(state["buckets"])

    def __repr__(self) -> str:
        where = "attached" if self.is_attached else "removed"
        return f"HookHandle({self._attached.name}, {where})"


# ---- attaching a hook to a model -----------------------------------------------------------------


#: What carries messages of tensors on a device.
_WIRES = "auto", "host", "device"


@dataclass(kw_only=True)
class Attaching(ABC):
    """One call of :func:`torch_commhook.attach`: on all ranks, or on none.

    A subclass knows a kind of model. The attributes are the user's arguments, and these:

    Attributes:
        model: the model, without the wrapper of ``torch.compile``.
        settings: the settings of a module, by name; None for those that the user left out.
        attached: the hook, set by :meth:`check`.
    """

    model: nn.Module
    hook: Callable[..., Any] | str
    state: object
    scaler: Scaler | None
    connections: int | None
    wire: str
    elastic: Elastic | None
    shard_hook: Callable[..., Any] | str | None
    weights: Codec | None
    process_group: dist.ProcessGroup | None
    settings: dict[str, Any]
    attached: Attached = field(init=False)

    def run(self) -> HookHandle:
        """Attach the hook; as :func:`torch_commhook.attach`."""
        error, settings = None, {}
        try:
            settings = self.check()
        except Exception as refused:
            error = refused
        # Nothing is written before, and nothing that one rank alone refuses is checked after.
        self.agree(error, settings)
        handle = None
        try:
            road = self.open()
            keep_road(self.model, road)
            handle = HookHandle(road, self.attached)
            self.begin(road)
        except BaseException:
            self._take_back(handle)
            raise
        return handle

    @abstractmethod
    def check(self) -> dict[str, object]:
        """Check the arguments and the model.

        Returns:
            The settings that must be the same on all ranks.
        """

    @abstractmethod
    def agree(self, error: Exception | None, settings: dict[str, object]) -> None:
        """Raise on all ranks if one has an error or settings differ."""

    @abstractmethod
    def open(self) -> Road:
        """Make the road, or find the one that the model has already."""

    def begin(self, road: Road) -> None:
        """Start the hook on the road."""
        begin_hook(road, self.attached, "attach")
        count, group = self.connections, road.group
        if count in (None, 1) or group.size == 1:
            return
        is_carried = all(group.carries(each.device) for each in self.model.parameters())
        if not (is_carried and group.takes_connections):
            warn_user(
                f"attach: connections={count} has no effect: it applies to tensors that go over "
                "the library's transport, and not to simulated ranks"
            )

    def _take_back(self, handle: HookHandle | None) -> None:
        """Leave the model as before, after an error."""
        if handle is not None:
            handle.remove()
            road = handle._road
            if road.attached is None:
                road.attached = None  # closes a new road: the next hook may have other settings
            if not road.is_alive:
                keep_road(self.model, None)

    # ---- checks of any kind of model -------------------------------------------------------------

    def checked(self, hook: Callable[..., Any], state: object, memory: HookMemory) -> Attached:
        """A hook with empty memory, checked as :meth:`Attached.checked`."""
        memory.scaler = self.scaler
        attached = Attached.checked(hook, state, memory)
        attached.connections = self.connections
        return attached

    def common_settings(self) -> dict[str, object]:
        """Settings of any kind of model that must be the same on all ranks."""
        return {
            "the scaler's scale": None if self.scaler is None else checked_scale(self.scaler),
            "connections": self.connections,
            "wire": self.wire,
        }

    def devices_over_host(self) -> set[str] | None:
        """The types of devices whose tensors go over the library's transport; None: as suits."""
        if self.wire == "auto":
            return None
        types = {parameter.device.type for parameter in self.model.parameters()}
        return types - {"cpu"} if self.wire == "host" else set()

    def check_arguments(self) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Check what does not depend on the kind of model; return the hook and ``shard_hook``."""
        model, shard_hook = self.model, self.shard_hook
        if not isinstance(model, nn.Module):
            raise TypeError(f"attach: model must be a torch.nn.Module, got {_C.type_name(model)}")
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError("attach: model must not be a ScriptModule, which takes no Python hooks")
        check_connections(self.connections)
        if self.wire not in _WIRES:
            wanted = ", ".join(map(repr, _WIRES))
            raise ValueError(f"attach: wire must be one of {wanted}, got {self.wire!r}")
        return as_hook(self.hook), None if shard_hook is None else as_hook(shard_hook)

    def check_unoccupied(self) -> None:
        """Refuse a model that has a hook."""
        first = first_road(self.model)
        if first is None:
            return
        road = road_in_use(first)
        if road.is_closing:
            raise RuntimeError(
                "attach: a hook was removed from this model in a backward() that is still "
                "running; attach the next one after it, or replace() the hook through its handle"
            )
        if road.is_alive and road.attached is not None:
            raise RuntimeError(
                f"attach: hook '{road.attached.name}' is attached to this model already; remove() "
                f"it, or replace() it through its handle"
            )

    def check_none_given(self, must: str, what: str) -> None:
        """Refuse settings that ``what``, a kind of model, has already: they ``must`` ..."""
        given = {"process_group": self.process_group, **self.settings}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"attach: {name} must {must}; got {value!r} for {what}")

    def check_unshared(self, parameters: list[tuple[str, Tensor]]) -> None:
        """Refuse parameters of another model with a hook. Only DDP models may share theirs."""
        taken = self._taken(parameters)
        if taken is not None:
            gc.collect()  # an unused DDP may be waiting for collection
            taken = self._taken(parameters)
        if taken is not None:
            name, hook_name = taken
            raise RuntimeError(
                f"attach: parameter '{name}' also belongs to another module, to which hook "
                f"'{hook_name}' is attached already"
            )

    def _taken(self, parameters: list[tuple[str, Tensor]]) -> tuple[str, str] | None:
        """A parameter of another model with a hook, and that hook's name; None if there is none."""
        names = {id(parameter): name for name, parameter in parameters}
        is_ddp = isinstance(self.model, DistributedDataParallel)
        for model, attached in attached_hooks():
            if model is self.model or (is_ddp and isinstance(model, DistributedDataParallel)):
                continue
            name = next((names[id(p)] for p in model.parameters() if id(p) in names), None)
            if name is not None:
                return name, attached.name
        return None


def begin_hook(first: Road, attached: Attached, op: str) -> None:
    """Start a hook on a model: on all ranks, or on none.

    Args:
        first: the road that the model's handle was made with.
        attached: the hook.
        op: the function's name in errors.

    Raises:
        Exception: the hook raised it when it asked for memory.
        RuntimeError: the hook raised an exception on another rank.
    """
    road, hook, error = road_in_use(first), attached.hook, None
    try:
        attached.hook.check_ranks(road.group.parent)
        attached.hook.check_parameters(attached.memory.store.named_parameters())
    except Exception as refused:
        error = refused
    try:
        # Also if this rank refuses the hook: the others may be measuring the link with this rank.
        if error is None or road.elastic is None:
            road.attached = attached
        if error is None:
            model = road.model()
            if attached.keeps_ranks_apart and model is not None:
                # Imports torch's compiler, which takes seconds, and which other hooks do not need.
                from torch_commhook.attachment.local_steps import LocalSteps

                attached.local_steps = LocalSteps(model, attached, lambda: road_in_use(first))
            if isinstance(hook, auto):
                # Imports what plans steps, which other hooks do not need.
                from torch_commhook.attachment.choosing import AutoSelector

                attached.choosing = AutoSelector(hook, attached.memory, first)
    except Exception as raised:
        error = error or raised
    road.agree(op, error, {})
    watch_optimizers(attached)


def _shared_of_state(state: dict[str, Any], position: dict[str, Any] | None) -> dict[str, object]:
    """The parts of a checked state that must be equal on all ranks, as plain values."""
    shared = {"steps": state["steps"], "choices": state["choices"], LOCAL_STEPS: position}
    return {
        f"the state's {key}": value for key, value in {**shared, **comparable_form(state)}.items()
    }
