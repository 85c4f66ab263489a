"""A hook that is attached to a model, and its calls for single buckets."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket, checked_result
from torch_commhook.collectives.agreement import gathering_through
from torch_commhook.collectives.futures import (
    SecondStages,
    UsedTensors,
    await_lazy,
    is_capturing,
    issuing_later,
    keeping,
)
from torch_commhook.collectives.gloo_groups import check_not_managed, group_name, resolve_group
from torch_commhook.collectives.symmetric import SHARING_DEVICES
from torch_commhook.hooks.base import (
    FunctionHook,
    Hook,
    checked_result_dtype,
    step_scale_of,
)
from torch_commhook.hooks.compressed import check_is_hook
from torch_commhook.hooks.cpp import cpp
from torch_commhook.memory.bucket_memory import BucketMemory, ShardedBucket
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.watches import ScaleJumpDetector, scale_of
from torch_commhook.metrics import (
    BucketTraffic,
    HookStats,
    WireMeter,
    count_bucket,
    counting,
)
from torch_commhook.native.runtime import check_hook_of, hook_name
from torch_commhook.spans import active, bucket_label, spans_of
from torch_commhook.step.bucket_hooks import BucketHooks
from torch_commhook.step.seen_collectives import SeenCollectives
from torch_commhook.step.step_group import StepGroup

# ---- a running call of a hook on one bucket: started, awaited, checked ---------------------------


#: How long a failed rank waits for its own running collectives.
DRAIN_SECONDS = 60.0


@dataclass(eq=False)
class HookCall:
    """A running call of a hook on one bucket.

    Attributes:
        bucket: the hook's bucket.
        future: a Future of the result.
        dtype: the dtype that the result must have.
        where: names hook and bucket in errors.
        traffic: the call's traffic (None bytes if the hook does not use the library's collectives).
        local: the gradients before the hook, if post-hooks need them.
        used: tensors that the library's streams use until :attr:`future` is waited for.
        look: notes whether the hook has issued collectives that nobody has counted. Called once the
            result is there, before the library issues other messages.
    """

    bucket: GradBucket
    future: Any
    dtype: torch.dtype
    where: str
    traffic: BucketTraffic
    local: tuple[Tensor, ...] | None = None
    used: UsedTensors | None = None
    look: Callable[[], None] | None = None

    @classmethod
    def start_average(cls, hook: Hook, bucket: GradBucket, where: str) -> HookCall:
        """Start a hook of the library on a bucket, without hooks around it."""
        used, meter = UsedTensors(), WireMeter()
        spans = spans_of(lambda: bucket_label(bucket.index(), hook_name(hook)))
        with keeping(used), counting(meter), active(spans):
            dtype = checked_result_dtype(hook, bucket)
            result = await_lazy(_C.run_average(hook, bucket))
        if spans is not None:
            spans.note_sent(result)
        traffic = meter.traffic(bucket.numel(), bucket.dtype())
        return cls(bucket, _C.as_future(result, where), dtype, where, traffic, used=used)

    def wait(self, timeout: timedelta) -> Tensor:
        """Wait for the result, and check it.

        Args:
            timeout: the longest time of a collective.

        Raises:
            TimeoutError: it takes longer.
            Exception: as :meth:`result`.
        """
        _C.wait_for_result(self.future, self.where, timeout.total_seconds())
        return self.result()

    def result(self) -> Tensor:
        """Wait for the result without a limit, and check it.

        Raises:
            Exception: the hook's error, or as :func:`checked_result`.
        """
        value = self.future.wait()
        if self.look is not None:
            self.look()
        if self.used is not None:
            self.used.waited_for()
        return checked_result(value, self.bucket, self.dtype, self.where)

    def drain(self, deadline: float) -> None:
        """Wait for running collectives, and ignore their results. Raises only for a signal.

        Args:
            deadline: the end of the wait, by ``time.monotonic()``.
        """
        with suppress(Exception):  # a consequence of the failure, or as good a reason
            _C.wait_for(self.future, max(deadline - time.monotonic(), 0.0))


# ---- a hook that is attached to a model, and its calls for single buckets ------------------------


@dataclass(eq=False)
class Attached:
    """An attached hook with its state, memory and statistics.

    Attributes:
        hook: the hook, or a :class:`FunctionHook` of a callable.
        given: what the user gave: a hook or a callable.
        local_steps: its :class:`LocalSteps` if the hook keeps ranks apart, or None.
        choosing: its :class:`AutoSelector` if the hook chooses, or None.
        second_stages: second stages of collectives, which wait for the next bucket.
        connections: the number of connections for a large message between two ranks; None to keep
            the present number, or to find one.
        has_unseen_traffic: whether the hook is not the library's, and issues collectives that are
            not counted.
        captured_traffic: the buckets' traffic in the last step that a CUDA graph has captured.
        counted_replays: the number of replayed steps that :attr:`stats` includes.
        lacks_scaler: whether the hook should know a scaler of its gradients, and does not.
    """

    hook: Hook
    given: Callable[..., Any]
    name: str
    memory: HookMemory
    bucket_hooks: BucketHooks = field(default_factory=BucketHooks)
    stats: HookStats = field(default_factory=HookStats)
    local_steps: Any = None
    choosing: Any = None
    second_stages: SecondStages = field(default_factory=SecondStages)
    connections: int | None = None
    has_unseen_traffic: bool = False
    captured_traffic: list[BucketTraffic] = field(default_factory=list)
    counted_replays: int = 0
    lacks_scaler: bool = False
    _capturing: list[BucketTraffic] = field(default_factory=list)
    _step_group: weakref.ref[StepGroup] | None = None

    @classmethod
    def checked(
        cls, hook: Callable[..., Any], state: object, memory: HookMemory, op: str = "attach"
    ) -> Attached:
        """Check a user's hook, and return its :class:`Attached` with empty memory.

        Args:
            hook, state: the user's arguments.
            memory: stores the hook's memory.
            op: the function's name in errors.

        Raises:
            TypeError, ValueError: as :func:`check_hook`; or the hook does not use ``state``, or has
                a process group that has been destroyed.
        """
        check_is_hook(hook, op)
        check_hook_of(op, hook)
        own = hook if isinstance(hook, Hook) else FunctionHook(hook, state)
        if own is hook and state is not None:
            raise TypeError(
                f"{op}: state must be None for hook '{hook_name(hook)}', which keeps its own, "
                f"got {_C.type_name(state)}"
            )
        for group in own.own_groups():
            check_not_managed(op, resolve_group(group))
        return cls(own, hook, hook_name(hook), memory)

    def memory_of(self, parameters: Sequence[Tensor], index: int) -> BucketMemory | None:
        """The hook's memory of a bucket; None for callables."""
        if isinstance(self.hook, FunctionHook):
            return None
        return self.memory.memory_of_bucket(parameters, index, self.hook.prepare)

    def use_group(self, group: StepGroup, device: torch.device) -> None:
        """Set the group through which the hook communicates. All ranks call this."""
        group.hook_changes()
        self._step_group = weakref.ref(group)
        self.memory.replays.prepare(device)
        group.choose_wire(device)
        self.memory.group = group.group_for(device)
        if group.carries(device):
            group.use_connections(self.connections)
        self.memory.on_step = self.hook.step_counted
        if self.follows_scale:
            self.memory.make_loss_scale(device)
        elif self.minds_scale:
            self.memory.jump_detector = ScaleJumpDetector(self.name, keeps_error=self.keeps_error)
        private_groups = self.memory.private_groups
        for own in self.hook.own_groups():
            private_groups[group_name(own)] = group.private_group(own, device)

    def gathering(self, device: torch.device) -> AbstractContextManager[None]:
        """Let gathers of the hook's collectives inside the block end with the step, if it fails.

        Only collectives over shared memory gather anything.
        """
        if device.type not in SHARING_DEVICES:
            return nullcontext()
        group = None if self._step_group is None else self._step_group()
        if group is None or not group.recovers:
            return nullcontext()
        return gathering_through(group.group)

    def let_go(self) -> None:
        """Release the model's parameters and all buckets; memory of them stays."""
        self.second_stages.give_up(_left())  # of a backward that an exception has ended
        self.choosing = None
        if self.local_steps is not None:
            self.local_steps.let_go()
        self.memory.release_parameters()

    def step_scale(
        self, results: Sequence[Tensor], past: Mapping[int, bool] | None = None
    ) -> Tensor | None:
        """Call :meth:`Hook.step_scale`, if needed.

        Args:
            results: as there.
            past: as there; None until the step is counted.
        """
        past = self.memory.past if past is None else past
        with torch.no_grad():
            return step_scale_of(self.hook, results, past, self.memory.loss_scale)

    @property
    def minds_scale(self) -> bool:
        """Whether the gradients' scale matters, to the hook's memory or to norms."""
        return (self.keeps_error or self.hook.scales_steps) and not self.keeps_ranks_apart

    @property
    def follows_scale(self) -> bool:
        """Whether the scale matters and is known."""
        return self.minds_scale and self.memory.scaler is not None

    def look_at_scale(self, *, in_join: bool, has_joined: bool = False) -> None:
        """Read the scale of the gradients, before the first bucket is sent.

        Args:
            in_join: whether there may be ranks without inputs. All ranks then call this at the same
                point.
            has_joined: whether this is one of them; its scaler does not know this step.

        Raises:
            ValueError: the scale is not positive and finite.
            RuntimeError: a CUDA graph captures the current stream.
        """
        scaler = self.memory.scaler
        if scaler is None or not self.minds_scale:
            return
        if self.memory.replays.is_capturing:
            raise RuntimeError(
                f"hook '{self.name}': a CUDA graph cannot capture this step, since the hook reads "
                "the scaler's scale on the host; attach the hook without scaler=, "
                "and train without a scale"
            )
        scale = None if has_joined else scale_of(scaler, f"hook '{self.name}'")
        if in_join:
            scale = self.memory.agree_on_scale(scale)
        if scale is not None:
            self.memory.change_scale(scale)

    def choose(self) -> None:
        """Find out which hook it is to be, where that is due. All ranks come here in each step.

        After :meth:`look_at_scale`, before the first bucket is sent.
        """
        if self.choosing is not None and not self.memory.replays.is_capturing:
            self.choosing.before_step()

    def choose_before_capture(self) -> None:
        """:meth:`choose` now, before a compiler takes in a backward. No step is open."""
        if self.choosing is not None:
            self.choosing.before_capture()

    @property
    def keeps_ranks_apart(self) -> bool:
        """Whether a backward sends nothing, and needs no agreement of the ranks."""
        return self.hook.keeps_ranks_apart

    @property
    def keeps_error(self) -> bool:
        """Whether the hook remembers errors of gradients."""
        return self.hook.keeps_error and not self.keeps_ranks_apart

    @property
    def cpp_hook(self) -> _C.CppHook | None:
        """The hook in C++, if it is one and no Python hooks run around it."""
        # A subclass may do more.
        return self.hook.native if type(self.hook) is cpp and self.bucket_hooks.is_empty else None

    @property
    def own_group(self) -> dist.ProcessGroup | None:
        """The C++ hook's own process group, if it has one."""
        group = self.hook.process_group
        return None if group is None else self.memory.private_group(resolve_group(group))

    def start(self, bucket: GradBucket, where: str, *, in_order: bool = False) -> HookCall:
        """Run the hooks before the hook, and start it.

        Args:
            bucket: the bucket.
            where: names hook and bucket in errors.
            in_order: whether all buckets of a step are started in order before anybody waits for a
                result. Collectives of two stages may then overlap.
        """
        local = self.bucket_hooks.before(bucket, where)
        hook = self.hook
        if bucket.memory is not None and is_capturing(bucket.device()):
            hook.check_capture(bucket.memory)
        elif self.memory.jump_detector is not None:
            self.memory.jump_detector.look(bucket)
        is_waiting = in_order and hook.lets_stages_wait
        if is_waiting and bucket.index() == 0:
            self.second_stages.give_up(_left())  # of a backward that an exception has ended
        seeing = nullcontext() if is_waiting else self._seeing()
        later = issuing_later(self.second_stages) if is_waiting else nullcontext()
        used, meter = UsedTensors(), WireMeter()
        spans = spans_of(lambda: bucket_label(bucket.index(), self.name))
        with keeping(used), self.gathering(bucket.device()):
            with later, seeing as seen, counting(meter), active(spans):
                # Writing the result into the gradients casts it, without another pass.
                dtype = checked_result_dtype(hook, bucket)
                result = await_lazy(_C.run_average(hook, bucket))
            if spans is not None:
                spans.note_sent(result)
            if is_waiting and bucket.index() + 1 == bucket.bucket_count():
                self.second_stages.issue()
        traffic = meter.traffic(bucket.numel(), bucket.dtype())
        traffic, look = self._with_seen(traffic, seen, result, bucket)
        return HookCall(
            bucket, _C.as_future(result, where), dtype, where, traffic, local, used, look
        )

    def start_on_shards(self, bucket: ShardedBucket, where: str) -> torch.futures.Future[Tensor]:
        """Start a hook of the library on sharded gradients: :meth:`Hook.average_shard`.

        Returns:
            A Future that completes once the shard is written.
        """
        if is_capturing(bucket.device()):
            self.hook.check_capture(self.hook.memory(bucket))
        elif self.memory.jump_detector is not None:
            self.memory.jump_detector.look(bucket)
        spans = spans_of(lambda: bucket_label(bucket.index(), self.name))
        with self._seeing(), active(spans), self.gathering(bucket.device()):
            future: torch.futures.Future[Tensor] = _C.as_future(
                await_lazy(self.hook.average_shard(bucket)), where
            )
        if spans is not None:
            spans.note_sent(future)
        return future

    def _seeing(self) -> AbstractContextManager[SeenCollectives | None]:
        """What sees collectives of a hook that is not the library's."""
        return nullcontext() if self._counts_itself else SeenCollectives()

    def _with_seen(
        self, traffic: BucketTraffic, seen: SeenCollectives | None, result: Any, bucket: GradBucket
    ) -> tuple[BucketTraffic, Callable[[], None] | None]:
        """The traffic, with what was seen where nobody else has counted, and HookCall.look."""
        if seen is None or self.has_unseen_traffic or traffic.bytes_sent is not None:
            return traffic, None
        sent = seen.bytes_sent()

        def look() -> None:
            self.has_unseen_traffic = self.has_unseen_traffic or seen.has_missed()

        # On CUDA, callbacks run at once.
        is_pending = isinstance(result, torch._C.Future) and not result.done()
        follows = sent is not None and is_pending and bucket.device().type == "cpu"
        return traffic._replace(bytes_sent=sent), look if follows else None

    @cached_property
    def _counts_itself(self) -> bool:
        return _is_of_the_library(self.hook)

    # ---- statistics ------------------------------------------------------------------------------

    def count_bucket(self, index: int, count: int, traffic: BucketTraffic, *, first: bool) -> None:
        """Count one bucket's traffic in a step; during capture, the traffic of each replay.

        Args:
            index: the bucket's number.
            count: the number of buckets.
            traffic: the bucket's traffic.
            first: whether a step begins with this bucket.
        """
        if not self.memory.replays.is_capturing:
            count_bucket(self.stats, index, count, traffic, first=first)
            return
        if first:
            self._capturing.clear()
        self._capturing.append(traffic)
        if len(self._capturing) == count:  # otherwise the last graph's stays if this capture fails
            self.captured_traffic = list(self._capturing)

    def count_replays(self) -> None:
        """Count the steps that CUDA graphs replayed since the last call. Waits for the device."""
        replays = self.memory.replays.count()
        steps, self.counted_replays = replays - self.counted_replays, replays
        for index, traffic in enumerate(self.captured_traffic if steps else ()):
            buckets = len(self.captured_traffic)
            count_bucket(self.stats, index, buckets, traffic, first=index == 0, steps=steps)


def _is_of_the_library(hook: Hook) -> bool:
    """Whether a hook, and each inside of it, communicates through the library's collectives."""
    is_own = type(hook).__module__.partition(".")[0] == "torch_commhook"
    is_own = is_own and not isinstance(hook, FunctionHook)
    return is_own and all(map(_is_of_the_library, hook.hooks_inside()))


def _left() -> RuntimeError:
    return RuntimeError("the step was abandoned")
