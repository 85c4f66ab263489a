"""Steps on each rank's own gradients, and the exchanges that bring the ranks together."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import collectives
from torch_commhook.attachment.apart_warning import forget, warn_apart, warn_at_exit
from torch_commhook.attachment.forward_hook import BeforeForward, register_first
from torch_commhook.attachment.optimizer_steps import add_step_counter, remove_step_counter
from torch_commhook.attachment.replica import Replica
from torch_commhook.attachment.road import Road
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.buckets.results import scaled_result
from torch_commhook.hooks.local_sgd import local_sgd
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.bucket_with_memory import BucketWithMemory
from torch_commhook.memory.replays import cannot_be_captured
from torch_commhook.memory.state_values import check_tensor, shown
from torch_commhook.memory.states import (
    ANCHOR,
    LOCAL_STEPS,
    PARAMETERS,
    checked_position,
    load_error,
)
from torch_commhook.metrics import count_bucket
from torch_commhook.native.runtime import hook_on_bucket
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.hook_call import DRAIN_SECONDS, HookCall
from torch_commhook.step.ranks_apart import CheckedState
from torch_commhook.step.step_group import StepGroup


class LocalSteps:
    """Counts the steps of a model that a hook keeps apart, and brings the ranks together.

    Args:
        model: whose parameters these are.
        attached: the hook, a :class:`local_sgd`.
        road: gives the road that the hook is on at the moment.

    Attributes:
        done: steps since the ranks were together.
        is_open: whether a step has begun and is not over.
    """

    def __init__(
        self,
        model: nn.Module,
        attached: Attached,
        road: Callable[[], Road],
    ) -> None:
        self._attached = attached
        self._road = road
        self._model = weakref.ref(model)
        self.done = 0
        self.is_open = False
        self._in_step = False  # of an optimizer, which may run forward and backward
        self._stepped: set[int] = set()  # parameters, in the step that is open
        # DDP asks for memory in the first backward, when an optimizer may have stepped already.
        self._names = [name for memory in self._memories() for name in memory.names or ()]
        self._references = self._replica.references()
        self._is_let_go = False
        self._is_over = False  # nobody is to be warned any more
        self._loaded: set[int] = set()  # whose anchors have moved since the last exchange
        self._versions = self._versions_now()
        self._gradient_versions: dict[int, int] = {}  # of sharded ones, after the last backward
        # First, since what else the model sends before a forward comes after the exchange.
        self._forward_handle = register_first(model, BeforeForward(self))
        add_step_counter(self)
        self._end = weakref.finalize(model, self._model_gone)
        self._end.atexit = False
        warn_at_exit(self)

    @property
    def hook(self) -> local_sgd:
        """The hook."""
        hook = self._attached.hook
        assert isinstance(hook, local_sgd)
        return hook

    @property
    def is_due(self) -> bool:
        """Whether the ranks are to come together."""
        return self.done >= self.hook.H

    def close(self) -> None:
        """Count no more."""
        self._end.detach()
        try:
            self.warn_if_apart("was taken off")
        finally:  # the warning may be an error
            self._stop()

    def handle_gone(self) -> None:
        """Nobody can bring the ranks together any more, but for the steps to come."""
        self.warn_if_apart("lost its handle")

    def _model_gone(self) -> None:
        try:
            self.warn_if_apart("lost its model")
        finally:
            self._stop()

    def warn_if_apart(self, what: str) -> None:
        """Warn where ranks differ now, once.

        Args:
            what: has happened to the hook.
        """
        if self._is_over or self._attached.memory.world_size == 1:
            return
        steps = self.done + bool(self._stepped)
        if steps or any(map(self.hook.is_ahead, self._attached.memory.bucket_memories())):
            self._is_over = True
            warn_apart(self._attached.name, what, steps)

    def let_go(self) -> None:
        """Keep no parameter; :meth:`state_dict` finds them by their names."""
        self._references.clear()
        self._is_let_go = True

    @property
    def _replica(self) -> Replica:
        return self._road().replica

    def _by_name(self) -> dict[str, Tensor]:
        """The parameters that there are, as the hook's memory has them."""
        return self._replica.find(self._names)

    def _stop(self) -> None:
        self._is_over = True
        forget(self)
        self._forward_handle.remove()
        remove_step_counter(self)

    # ---- what a step is --------------------------------------------------------------------------

    def note_backward(self) -> None:
        """A backward begins whose gradients a step is to use, or ends where ranks have shards.

        Raises:
            RuntimeError: in ``join()``, or while a CUDA graph captures the current stream.
        """
        if self._attached.memory.replays.is_capturing:
            raise cannot_be_captured(
                f"hook '{self._attached.name}'", "the host counts the optimizer's steps"
            )
        model = self._model()
        if isinstance(model, DistributedDataParallel) and model._join_config.enable:
            raise RuntimeError(
                f"hook '{self._attached.name}': all ranks must take equally many steps, which "
                "join() is not for; give each as many batches"
            )
        if self._is_at_rest:
            self._look_for_anchor()
        if not self._replica.counts_writes:
            gradients = [parameter.grad for parameter in self._living()]
            self._gradient_versions = {
                id(each): each._version for each in gradients if each is not None
            }
        self.is_open = True

    def before_optimizer_step(self, parameters: frozenset[int]) -> None:
        """An optimizer is about to step parameters of these ids."""
        if not self._ids().isdisjoint(parameters):
            self._in_step = True

    def count_optimizer_step(self, parameters: frozenset[int]) -> None:
        """An optimizer has stepped parameters of these ids."""
        own = self._ids() & parameters
        if not own:
            return
        self._in_step = False
        self._stepped |= own
        if any(id(p) not in self._stepped for p in self._living() if p.grad is not None):
            self.is_open = True
        else:
            self._count()

    def after_optimizer_step(self, parameters: frozenset[int]) -> None:
        """Bring the ranks together where that is due, once all have counted the step."""
        if self.is_due and not self._ids().isdisjoint(parameters):
            self.exchange()

    def before_forward(self, module: nn.Module) -> None:
        """Called by the model before its own forward."""
        if self.is_open and torch.is_grad_enabled():
            _end_step(self)

    def end_step(self) -> None:
        """End a step that optimizers have not ended, where another one begins."""
        if self._in_step or not (self._stepped or self._gradients_are_gone()):
            return  # a closure, or gradients that add up
        self._count()
        if self.is_due:
            self.exchange()

    def _count(self) -> None:
        self.done += 1
        self.is_open = False
        self._stepped.clear()

    def _living(self) -> list[Tensor]:
        """The parameters, as optimizers have them."""
        found = [reference() for reference in self._references]
        return [parameter for parameter in found if parameter is not None]

    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self._living()))

    def _gradients_are_gone(self) -> bool:
        gradients = [parameter.grad for parameter in self._living()]
        return all(each is None or self._is_zeroed(each) for each in gradients)

    def _is_zeroed(self, gradient: Tensor) -> bool:
        """Whether somebody has made a gradient zero; all ranks that have shards of it say so."""
        if isinstance(gradient, DTensor):
            # One rank's shard may be empty, or zero by itself. What fully_shard() adds to a
            # gradient that is there does not count as a version of the whole.
            if gradient._version == self._gradient_versions.get(id(gradient), 0):
                return False
            return not gradient.to_local().any()
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        return not values.any()

    # ---- the anchor ------------------------------------------------------------------------------

    @property
    def _is_at_rest(self) -> bool:
        """Whether parameters are where an exchange has put them, unless somebody wrote to them."""
        return self.done == 0 and not self.is_open and not self._stepped

    def _memories(self) -> list[BucketMemory]:
        """What the hook remembers of each bucket."""
        found = []
        for index, parameters in enumerate(self._road().parameter_buckets()):
            memory = self._attached.memory_of(parameters, index)
            assert memory is not None
            found.append(memory)
        return found

    def _versions_now(self) -> list[int] | None:
        """Numbers that differ after somebody has written to a parameter; None if nobody counts."""
        if not self._replica.counts_writes:
            return None
        return [parameter._version for parameter in self._living()]

    @torch.no_grad()
    def _look_for_anchor(self) -> None:
        """Move the anchor to parameters that were loaded since it was where they are."""
        versions = self._versions_now()
        if versions is None or versions != self._versions:
            for memory in self._memories():
                self._loaded |= self.hook.anchor_here(memory)
            self._versions = versions

    def _agree_on_anchors(self, group: StepGroup) -> None:
        """Move what other ranks have moved.

        A rank whose own parameters are loaded on all ranks finds them where they were.
        """
        parameters = [parameter for memory in self._memories() for parameter in memory.parameters]
        own = [float(id(parameter) in self._loaded) for parameter in parameters]
        device = parameters[0].device
        counts = collectives.all_reduce(
            torch.tensor(own, dtype=torch.float32, device=device), group=group.group_for(device)
        ).wait()
        moved = zip(parameters, counts.tolist(), strict=True)
        elsewhere = {id(parameter) for parameter, count in moved if count} - self._loaded
        for memory in self._memories() if elsewhere else ():
            self.hook.anchor_at_start(memory, elsewhere)
        self._loaded |= elsewhere

    # ---- the exchange ----------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Have the ranks together, with nothing that is not sent."""
        if self._is_at_rest:
            self._look_for_anchor()
        self.exchange(at_the_end=True)

    @torch.inference_mode(False)  # under which an optimizer may step
    @torch.no_grad()
    def exchange(self, *, at_the_end: bool = False) -> None:
        """Bring the ranks together. All come here at the same point.

        A step of its own, on which the ranks agree before anything changes.

        Args:
            at_the_end: where ranks go on from places of their own, send all that there is; where
                they are together, do nothing.

        Raises:
            PeerError: it failed on another rank.
            Exception: what the hook raised.
        """
        attached, replica = self._attached, self._replica
        group = replica.group
        replica.begin()
        calls: list[HookCall] = []
        kept: list[list[tuple[Tensor, Tensor]]] = []
        try:
            memories = self._memories()
            if self.hook.error_reset:
                self._agree_on_anchors(group)
            kept += map(self.hook.unsent, memories)
            if at_the_end and not replica.on_any_rank(self._is_apart()):
                replica.end()
                return
            unsent = at_the_end and self.hook.error_reset
            hook = allreduce() if unsent else self.hook.hook
            for index, memory in enumerate(memories):
                distance = self.hook.distance(memory, unsent=unsent)
                bucket = _bucket_of(memory, distance, index, len(memories), group)
                where = hook_on_bucket(attached.name, index, len(memories))
                with attached.gathering():
                    calls.append(HookCall.start_average(hook, bucket, where))
            results = [call.wait(group.timeout) for call in calls]
            scale = hook.step_scale(results, attached.memory.past) if hook.scales_steps else None
            if scale is not None:
                results = [
                    scaled_result(result, scale, memory.dtype)
                    for memory, result in zip(memories, results, strict=True)
                ]
            replica.drop_copies()
            replica.end()
        except BaseException as error:
            _drain(calls)
            for tensors in kept:  # the same distance is to be sent again
                for tensor, before in tensors:
                    tensor.copy_(before)
            raised = replica.fail_with(error)
            if raised is error:
                raise
            raise raised from error
        for memory, result in zip(memories, results, strict=True):
            self.hook.move(memory, result, unsent=unsent)
        self.done = 0
        self.is_open = False
        self._stepped.clear()
        self._loaded.clear()
        self._versions = self._versions_now()
        attached.memory.count_step()
        for index, call in enumerate(calls):
            count_bucket(attached.stats, index, len(calls), call.traffic, first=index == 0)

    def _is_apart(self) -> bool:
        """Whether this rank's parameters may be elsewhere than others'."""
        if self.done > 0 or self._stepped:
            return True
        # Where a step is written by hand, all that tells of the last one is what it has written.
        if self.is_open and self._is_written():
            return True
        return any(map(self.hook.is_ahead, self._memories()))

    def _is_written(self) -> bool:
        """Whether somebody has written to parameters since an exchange has, or a load."""
        versions = self._versions_now()
        if versions is None:
            return any(map(self.hook.has_moved, self._memories()))
        return versions != self._versions

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the hook remembers, with the rank's parameters."""
        if self._is_at_rest and not self._is_let_go:
            self._look_for_anchor()
        memory = self._attached.memory
        state = memory.state_dict()
        state[LOCAL_STEPS] = {"done": self.done, "is_open": self.is_open}
        # At rest too, so that what a state has is always the same.
        state[memory.own_key][PARAMETERS] = {
            name: parameter.detach().clone() for name, parameter in self._by_name().items()
        }
        return state

    def check_state(self, state: Any) -> CheckedState:
        """What of a :meth:`state_dict` is what.

        Raises:
            ValueError: no such state, or one that does not fit.
        """
        parameters, position, rest = self._taken_apart(state)
        rest = self._attached.memory.check_state(rest)
        missing = sorted(set(self._names) - set(rest["shared"].get(ANCHOR, {})))
        if missing:  # each rank would take its own parameters for it
            raise load_error(f"its '{ANCHOR}' lacks {missing}")
        return CheckedState(parameters, position, rest)

    @torch.no_grad()
    def take_state(self, checked: CheckedState) -> None:
        """Go on from what :meth:`check_state` gave. Writes the parameters."""
        self._replica.drop_copies()
        self._attached.memory.load_state(checked.rest)
        self._road().memory_loaded(checked.rest["buckets"])
        for bucket in self._memories():
            self.hook.return_to_start(bucket)
        for parameter, value in checked.parameters:
            parameter.copy_(value)
        self.done, self.is_open = checked.position["done"], checked.position["is_open"]
        self._stepped.clear()
        self._loaded.clear()
        self._versions = self._versions_now()

    def _taken_apart(
        self, state: dict[str, Any]
    ) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any], dict[str, Any]]:
        """What is this rank's of the parameters, where in a round it is, and the rest."""
        if not isinstance(state, dict) or LOCAL_STEPS not in state:
            raise load_error(
                f"the state must be one of a hook that keeps ranks apart, such as "
                f"'{self._attached.name}', got one without '{LOCAL_STEPS}'"
            )
        position = checked_position(state, "its ", load_error)
        key = self._attached.memory.own_key
        pieces = state.get(key)
        if not isinstance(pieces, dict):  # of which the memory tells
            return [], position, state
        rest = {**state, key: {kind: pieces[kind] for kind in pieces if kind != PARAMETERS}}
        values = pieces.get(PARAMETERS, {})
        is_apart = position["done"] > 0 or position["is_open"]
        if not isinstance(values, dict) or (not values and is_apart):
            got = "none" if isinstance(values, dict) else shown(values)
            raise load_error(
                f"its '{PARAMETERS}' must have the rank's parameters, by name, got {got}"
            )
        own = []
        for name, parameter in self._by_name().items() if values else ():
            if name not in values:
                raise load_error(
                    f"the state must have parameter '{name}' of shape "
                    f"{tuple(parameter.shape)}, got none"
                )
            # Where training has diverged, a state has what became of it.
            value = check_tensor(
                f"'{PARAMETERS}' of parameter '{name}'",
                values[name],
                parameter.shape,
                parameter.dtype,
                load_error,
                is_finite=False,
            )
            own.append((parameter, value))
        return own, position, rest


def _bucket_of(
    memory: BucketMemory, distance: Tensor, index: int, count: int, group: StepGroup
) -> GradBucket:
    return BucketWithMemory(
        memory.parameters,
        buffer=distance,
        index=index,
        bucket_count=count,
        process_group=group.group_for(memory.device),
        memory=memory,
    )


def _drain(calls: Iterable[HookCall]) -> None:
    """Wait for what is in flight, before its buffers go."""
    deadline = time.monotonic() + DRAIN_SECONDS
    for call in calls:
        call.drain(deadline)


@torch.compiler.disable
def _end_step(steps: LocalSteps) -> None:
    steps.end_step()
