"""The handle of a hook that is attached to a model."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torch_commhook.attachment.parameters import release
from torch_commhook.attachment.road import Road, road_in_use, roads
from torch_commhook.attachment.writers import write
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives.agreement import gather_along
from torch_commhook.hooks import __name__ as hooks_module
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.expressions import as_hook
from torch_commhook.memory.merging import merged_states, on_the_host
from torch_commhook.memory.scaler_watch import stop_watching_for_scaler, watch_for_scaler
from torch_commhook.memory.states import LOCAL_STEPS, comparable_form
from torch_commhook.metrics import HookStats, forget_bytes
from torch_commhook.step.attached_hook import Attached

#: Tensors that are made inside of ``torch.inference_mode()`` cannot be modified outside of it.
outside_inference_mode = torch.inference_mode(False)


class HookHandle:
    """A hook that is attached to a model. Made by :func:`attach`.

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

    # As an argument, since the module may have ended before the handle does.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        local_steps = self._attached.local_steps
        if local_steps is not None and not is_finalizing():
            local_steps.handle_gone()

    @property
    def _road(self) -> Road:
        return road_in_use(self._first_road)

    @property
    def hook(self) -> Callable[..., Any]:
        """The hook."""
        return self._attached.hook

    @property
    def is_attached(self) -> bool:
        """Whether the hook is still the one that the model uses."""
        return self._road.attached is self._attached and self._road.is_alive

    def remove(self) -> None:
        """Take the hook off.

        A DDP model's gradients are averaged as without one from the next backward on; those of a
        plain module stay each rank's own. A backward that is under way goes on through the hook.
        Does nothing where the hook is off already. All ranks must do so between the same two steps.
        A hook that keeps ranks apart leaves them where they are: :meth:`synchronize` comes first.
        """
        if not self.is_attached:
            return
        stop_watching_for_scaler(self._attached)
        try:
            if self._attached.local_steps is not None:
                self._attached.local_steps.close()
        finally:  # what it warns of may be an error
            self._take_off()

    def _take_off(self) -> None:
        road = self._road
        road.attached = None
        road.after_backward(self._attached.let_go)
        model = road.model()
        if model is not None:
            release(model)
            if not road.is_alive and not road.is_closing:
                roads.pop(model, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    @outside_inference_mode
    def replace(self, hook: Callable[..., Any] | str, *, state: object = None) -> None:
        """Put another hook in this one's place, from the next backward on.

        Statistics begin anew, and the new hook remembers nothing: what the old one had not sent
        goes with it. The scaler stays. All ranks must do so between the same two steps.

        Raises:
            RuntimeError: the handle's hook is not attached any more.
            TypeError, ValueError: as :func:`torch_commhook.check_hook`; the old hook then stays,
                on all ranks.
            RuntimeError: the ranks' hooks differ, or one is refused on another rank.
        """
        if not self.is_attached:
            raise RuntimeError(
                f"HookHandle.replace: hook '{self._attached.name}' is not attached any more; "
                "use attach()"
            )
        replacement, error, given = None, None, hook
        try:
            given = as_hook(hook, "HookHandle.replace")
            memory = self._attached.memory.new_for_same_model()
            replacement = Attached.checked(given, state, memory, "HookHandle.replace")
            self._road.check_fits(replacement)
        except Exception as refused:
            error = refused
        shared: dict[str, object] = {"the hook": printed_hook(given)}
        self._road.agree("HookHandle.replace", error, shared)
        assert replacement is not None
        self._logged = None
        before = self._attached
        replacement.connections = before.connections
        replacement.stages = before.stages
        replacement.stats.of_shards = before.stats.of_shards
        self._attached = replacement
        try:
            begin_hook(self._first_road, replacement, "HookHandle.replace")
        except BaseException:
            if replacement.local_steps is not None:
                replacement.local_steps.close()
            self._attached = self._road.attached = before
            raise
        elastic = getattr(self._road, "elastic", None)
        if elastic is not None:
            elastic.hook_replaced(printed_hook(given))
        stop_watching_for_scaler(before)
        if before.local_steps is not None:
            before.local_steps.close()

    # ---- around the hook -------------------------------------------------------------------------

    def register_buffer_prehook(
        self, hook: Callable[[GradBucket], Tensor | None]
    ) -> RemovableHandle:
        """Call ``hook(bucket)`` first with each bucket. It may return another buffer.

        This hook and the next three stay when the communication hook is replaced. What they return
        is checked as autograd checks its hooks: ``TypeError`` for something else than asked for,
        ``RuntimeError`` for another number, dtype, layout, device or size. Under compiled autograd
        they are traced together with the communication hook.
        """
        return self._attached.stages.register("buffer_prehooks", hook)

    def register_prehook(
        self, hook: Callable[[tuple[Tensor, ...]], tuple[Tensor | None, ...] | None]
    ) -> RemovableHandle:
        """Call ``hook(gradients)`` before the communication hook.

        ``gradients`` is a tuple of views of the bucket's buffer, in its parameters' order. The hook
        may return a tuple of others, None in it for those that stay.
        """
        return self._attached.stages.register("prehooks", hook)

    def register_posthook(
        self,
        hook: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor | None, ...] | None],
    ) -> RemovableHandle:
        """Call ``hook(reduced, local)`` with each bucket's result, before it is written.

        Both are tuples of gradients: as the communication hook has made them, and as they were
        before it. The hook may return a tuple of others for ``reduced``.
        """
        return self._attached.stages.register("posthooks", hook)

    def register_post_accumulate_hook(self, hook: Callable[[GradBucket], None]) -> RemovableHandle:
        """Call ``hook(bucket)`` for each bucket when all gradients are written.

        The gradients are those of ``bucket.parameters()``. The hook must return None.
        """
        return self._attached.stages.register("post_accumulate_hooks", hook)

    # ---- around a step ---------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients add up on each rank, without communication, inside a ``with`` block.

        For gradient accumulation. As in DDP, what counts is whether the model's forward runs
        inside; where it does not run at all, whether backward does. The next backward outside
        averages what has added up.
        """
        return self._road.no_sync()

    def join(self) -> AbstractContextManager[Any]:
        """Let ranks run out of inputs at different times, inside a ``with`` block.

        A rank that leaves the block takes part in the others' steps with gradients of zeros, and
        hooks of this library go on dividing by all ranks. In the end all ranks have the parameters
        of one that was the last to leave. Same as ``DistributedDataParallel.join()``; for other
        participants see ``torch.distributed.algorithms.join``.

        Raises:
            RuntimeError: the hook keeps ranks apart, which must take equally many steps.
        """
        if self._attached.keeps_ranks_apart:
            raise RuntimeError(
                f"HookHandle.join: with hook '{self._attached.name}' all ranks must take equally "
                "many steps; give each as many batches"
            )
        return self._road.join()

    @outside_inference_mode
    def synchronize(self) -> None:
        """Bring ranks together that the hook keeps apart: all have the same parameters then.

        For the end of training, an evaluation in between, or before :meth:`remove`. Does nothing
        where they are together, as with all hooks but :class:`torch_commhook.hooks.local_sgd`. All
        ranks must call it at the same point.

        Raises:
            RuntimeError: the handle's hook is not attached any more.
            PeerError: it failed on another rank. Parameters are as before.
        """
        if not self.is_attached:
            raise RuntimeError(
                f"HookHandle.synchronize: hook '{self._attached.name}' is not attached any more"
            )
        if self._attached.local_steps is not None:
            self._attached.local_steps.synchronize()

    def stats(self) -> HookStats:
        """What the hook has sent while it was attached, up to now; see :class:`HookStats`."""
        attached = self._attached
        stats = attached.stats
        attached.traced_steps.move_to(stats)
        attached.count_replays()
        if attached.has_unseen_traffic:
            forget_bytes(stats)
        stats.world_size = attached.memory.world_size
        for memory in attached.memory.bucket_memories():
            if memory.index < len(stats.buckets):
                stats.buckets[memory.index].measured(memory.meters())
        elastic = getattr(self._road, "elastic", None)
        if elastic is not None:
            stats.membership, stats.stragglers = elastic.ranks.events, elastic.stragglers
        return copy.deepcopy(stats)

    def log_to(self, writer: Any, step: int | None = None, *, prefix: str = "commhook/") -> None:
        """Write what the hook has sent to a log; see :meth:`HookStats.scalars`.

        Times are means over the steps since the last call.

        Args:
            writer: TensorBoard's ``SummaryWriter``, a logger of Lightning or MLflow, a run of
                Weights & Biases, anything with ``log(dict)``, or a function of a dict.
            step: of which this is; None where the writer counts itself.
            prefix: of the names.

        Raises:
            TypeError: no such writer.
        """
        stats = self.stats()
        values = stats.scalars(self._logged)
        write(writer, {f"{prefix}{name}": value for name, value in values.items()}, step)
        self._logged = stats

    @property
    def steps(self) -> int:
        """Steps of the training that have counted: on a new rank those before it came, too.

        With local steps these are the optimizer's. Without ``elastic``, steps that the hook has
        taken since it was attached; of local steps, exchanges.
        """
        elastic = getattr(self._road, "elastic", None)
        return self._attached.memory.steps if elastic is None else elastic.ranks.trained

    @property
    def is_joining(self) -> bool:
        """Whether this rank gets the state of a training in pieces, and does not have all yet.

        Until then its parameters and its loss mean nothing, and its gradients do not count. False
        without ``elastic``.
        """
        elastic = getattr(self._road, "elastic", None)
        return elastic is not None and bool(elastic.lacks_state)

    def on_membership(self, callback: Callable[[int, int], object]) -> None:
        """Call ``callback(rank, size)`` now, and whenever ranks are lost or join.

        The thread that trains calls it, between two steps or before it repeats a step. For data
        samplers. See :class:`Elastic`.

        Raises:
            RuntimeError: the hook was not attached with ``elastic``.
        """
        elastic = getattr(self._road, "elastic", None)
        if elastic is None:
            raise RuntimeError("HookHandle.on_membership: the hook was attached without elastic")
        elastic.ranks.on_membership(callback)

    # ---- what the hook remembers -----------------------------------------------------------------

    @outside_inference_mode
    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """What the hook remembers on this rank, to go on from later.

        Error memory, factors, momentum and steps, by the names of parameters, as plain values and
        tensors: it loads with ``torch.load(..., weights_only=True)`` and goes into
        ``torch.distributed.checkpoint`` as it is. Each rank has its own, under ``"rank0"``,
        ``"rank1"`` and so on. Empty for a hook that remembers nothing.

        Training that goes on from it takes the same steps, bit for bit, where the buckets are the
        same: those of a module are made so when it is loaded; DDP forms its buckets anew after its
        first step, before which they may be others. Seeds are settings of the hook.

        Of a hook that keeps ranks apart this has the rank's parameters too. Where a sharded model
        has a ``shard_hook``, what that remembers is under ``"shard_hook"``.

        Args:
            gather: whether to give what the hook remembers on all ranks, in one state that each of
                them can load: for a file that one rank writes, as frameworks do. All ranks must
                call this at the same point then, and get the same, in the memory of the host: as
                much as all of them remember together.

        Raises:
            RuntimeError: with ``gather``, it failed on another rank, the ranks are at different
                steps, or ``torch.distributed`` does not know the process group.
        """
        if gather:
            return self._gathered_state()
        memory, local_steps = self._attached.memory, self._attached.local_steps
        if local_steps is not None:
            return local_steps.state_dict()
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
        """Go on from what :meth:`state_dict` gave on this rank.

        All ranks must do so at the same point. For another number of ranks see
        :func:`torch_commhook.reshard_states`. With a hook that keeps ranks apart, this writes the
        rank's parameters; it comes after the model's own ``load_state_dict()``.

        Raises:
            RuntimeError: the handle's hook is not attached any more; the ranks' states are of
                different steps or buckets, or one is refused on another rank.
            ValueError: no such state, or one of other parameters, of another number of ranks, or of
                a hook that remembers other things.

        What the hook remembers then stays, on all ranks.
        """
        if not self.is_attached:
            raise RuntimeError(
                f"HookHandle.load_state_dict: hook '{self._attached.name}' is not attached any more"
            )
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


def begin_hook(first: Road, attached: Attached, op: str) -> None:
    """Have a model use a hook: all ranks, or none.

    Args:
        first: the road that the model's handle was made with.
        attached: the hook.
        op: whose errors these are.

    Raises:
        Exception: what the hook raised when it was asked what it remembers.
        RuntimeError: it raised on another rank.
    """
    road = road_in_use(first)
    error = _refused(attached, road)
    try:
        # Also a hook that is refused here: the others may be measuring the link with this rank.
        if error is None or getattr(road, "elastic", None) is None:
            road.attached = attached
        if error is None:
            _begin_local_steps(first, attached)
    except Exception as raised:
        error = error or raised
    road.agree(op, error, {})
    if attached.minds_scale and not attached.follows_scale:
        watch_for_scaler(attached)


def _refused(attached: Attached, road: Road) -> Exception | None:
    """Why the hook cannot have these ranks and parameters, if so."""
    hook = attached.hook
    try:
        if isinstance(hook, Hook):
            hook.check_ranks(road.group.parent)
            hook.check_parameters(attached.memory.store.named_parameters())
    except Exception as refused:
        return refused
    return None


def _begin_local_steps(first: Road, attached: Attached) -> None:
    model = road_in_use(first).model()
    if attached.keeps_ranks_apart and model is not None:
        # Imports torch's compiler, which takes seconds, and which other hooks do not need.
        from torch_commhook.attachment.local_steps import LocalSteps

        attached.local_steps = LocalSteps(model, attached, lambda: road_in_use(first))


def printed_hook(hook: object) -> str:
    """What ranks compare. Hooks of the library print as they are written; of others none knows."""
    return repr(hook) if type(hook).__module__.startswith(hooks_module) else "another"


def _shared_of_state(state: dict[str, Any], position: dict[str, Any] | None) -> dict[str, object]:
    """What of a checked state all ranks must load alike: plain values, since they are sent."""
    shared = {"steps": state["steps"], "choices": state["choices"], LOCAL_STEPS: position}
    return {
        f"the state's {key}": value for key, value in {**shared, **comparable_form(state)}.items()
    }
