"""Exchanges of the ranks' distances from their anchors: at once, in the background, repeated.

``local_sgd(delay=)`` leaves a step of the model's group open while other steps run. As soon as a
rank has all its means, a thread of the library issues the all-reduce by which ranks agree. So in
the step that uses the means, the agreement has usually arrived too. A rank whose part fails issues
none, and keeps its error until that step. There it leaves the group, and all ranks raise in the
same step.

Until then no other step ends this group. Steps of other models over the same ranks, which otherwise
fail together, leave the group alone (``StepGroup.in_background``). The hook's memory is formed
anew, loaded or saved only when no exchange writes to it (``HookMemory.before_change``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.attachment.elastic import ElasticTraining, RepeatableStep
from torch_commhook.attachment.road import Replica
from torch_commhook.buckets.grad_bucket import checked_result, hook_on_bucket, scaled_result
from torch_commhook.collectives.futures import set_error, set_outcome
from torch_commhook.collectives.issuing import issue_all_reduce
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.local_sgd import local_sgd
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketMemory, BucketWithMemory
from torch_commhook.memory.states import ANCHOR, MOMENTUM
from torch_commhook.metrics import BucketTraffic
from torch_commhook.step.attached_hook import DRAIN_SECONDS, Attached, HookCall
from torch_commhook.step.step_group import StepGroup


class ParameterExchange:
    """Averages the ranks' distances from the anchor, for some buckets.

    Args:
        attached: the hook, a :class:`local_sgd`.
        group: the group of the ranks.
        keeps_all: whether :meth:`undo` restores all memory of the hook. Otherwise it restores
            only the unsent part, with which ranks continue together.

    Attributes:
        traffic: the hook's traffic for each bucket; set by :meth:`receive`.
    """

    def __init__(self, attached: Attached, group: StepGroup, *, keeps_all: bool = False) -> None:
        hook = attached.hook
        assert isinstance(hook, local_sgd)
        self._attached = attached
        self._hook = hook
        self._group = group
        self._keeps_all = keeps_all
        self._averages: Hook = hook.hook
        self._memories: list[BucketMemory] = []
        self._calls: list[HookCall] = []
        self._kept: list[tuple[Tensor, Tensor]] = []
        # For each bucket the mean distance of each parameter, with the parameter's shape and the
        # anchor's dtype.
        self._means: list[list[Tensor]] = []
        self.traffic: list[BucketTraffic] = []

    def send(self, memories: Sequence[BucketMemory], *, unsent: bool = False) -> None:
        """Measure the distances, and start to average them.

        Args:
            memories: the hook's memory of the buckets.
            unsent: whether to send all that the hook has not sent, uncompressed.
        """
        self._memories = list(memories)
        for memory in memories:
            self._kept += self._copies(memory) if self._keeps_all else self._hook.unsent(memory)
        self._averages = allreduce() if unsent else self._hook.hook
        count = len(memories)
        for index, memory in enumerate(memories):
            distance = self._hook.distance(memory, unsent=unsent)
            bucket = BucketWithMemory(
                memory.parameters,
                buffer=distance,
                index=index,
                bucket_count=count,
                process_group=self._group.group_for(memory.device),
                memory=memory,
            )
            where = hook_on_bucket(self._attached.name, index, count)
            with self._attached.gathering(bucket.device()):
                self._calls.append(HookCall.start_average(self._averages, bucket, where))

    def _copies(self, memory: BucketMemory) -> list[tuple[Tensor, Tensor]]:
        """All tensors that an exchange changes before :meth:`move`, with copies."""
        tensors = memory.changing_tensors(but=(ANCHOR, MOMENTUM))
        found = [(tensor, tensor.clone()) for tensor in tensors]
        for part in memory.parts.values():
            found += self._copies(part)
        return found

    def receive(self) -> None:
        """Wait for the means."""
        results = [call.wait(self._group.timeout) for call in self._calls]
        scale = None
        if self._averages.scales_steps:
            scale = self._averages.step_scale(results, self._attached.memory.past)
        if scale is not None:
            results = [
                scaled_result(result, scale, memory.dtype)
                for memory, result in zip(self._memories, results, strict=True)
            ]
        self._means = [
            self._hook.means(memory, result)
            for memory, result in zip(self._memories, results, strict=True)
        ]
        self.traffic = [call.traffic for call in self._calls]

    def move(self, *, unsent: bool = False, mix: float = 0.0) -> None:
        """Move the anchors and the parameters by the means; as :meth:`local_sgd.move`."""
        for memory, means in zip(self._memories, self._means, strict=True):
            self._hook.move(memory, means, unsent=unsent, mix=mix)

    def drain(self, error: object = None) -> bool:
        """Wait briefly for collectives that use the buffers. Returns whether all have ended."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for call in self._calls:
            call.drain(deadline)
        return all(call.future.done() for call in self._calls)

    def undo(self) -> None:
        """Restore the hook's memory as if it had not sent, so that it sends the distance again."""
        self.drain()
        for tensor, before in self._kept:
            tensor.copy_(before)


class BackgroundExchange(ParameterExchange):
    """A fragment's exchange that runs while ranks take their next steps on their own parameters.

    All ranks begin and end it after the same steps. If one rank fails in between, all ranks raise
    when they end it.

    Args:
        attached, keeps_all: as for :class:`ParameterExchange`.
        replica: the parameters' copy of the model.
        fragment: the fragment's number.
        began_at: the number of steps in the round when the exchange began.
        steps: the number of steps since it began.
        means: the mean distances by parameter name, for an exchange from a loaded state.

    Attributes:
        fragment, began_at, steps, means: as given.
        failure: the error that all ranks raise when they end the exchange.
        is_shared: whether this process began it. Ranks with other shards may then see another
            outcome.
    """

    def __init__(
        self,
        attached: Attached,
        replica: Replica,
        fragment: int,
        *,
        began_at: int,
        steps: int = 0,
        means: Mapping[str, Tensor] | None = None,
        keeps_all: bool = False,
    ) -> None:
        super().__init__(attached, replica.group, keeps_all=keeps_all)
        self.fragment = fragment
        self.began_at = began_at
        self.steps = steps
        self.means = means
        self.failure: BaseException | None = None
        self.is_shared = False
        self._replica = replica
        self._number = 0  # the exchange's number, the same on all ranks
        self._agreed: torch.futures.Future[Tensor] | None = None
        self._lock = threading.Lock()
        self._has_agreed = False  # whether it has reported success to the other ranks
        self._is_given_up = False  # whether it must not report that any more
        self._has_begun = False
        self._error: BaseException | None = None  # raised at its begin

    def begin(self, memories: Sequence[BucketMemory], agree_on_anchors: Callable[[], None]) -> None:
        """Send the distances of a fragment's buckets.

        Keeps an exception of the hook until the end, when the other ranks learn of it.

        Args:
            memories: the hook's memory of the buckets.
            agree_on_anchors: called first, on all ranks.
        """
        group, self.is_shared = self._group, True
        try:
            group.begin()
            self._has_begun = group.in_background = True
            agree_on_anchors()
            # A rank on which an earlier exchange failed has a smaller count. Sums of squares of
            # 16-bit numbers are exact in float64.
            exchanges = self._attached.memory.steps
            self._number = (exchanges * self._hook.fragments + self.fragment) % (1 << 16)
            self.send(memories)
            self._agreed = self._agree_later()
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = _left_by(error)
            raise

    def _agree_later(self) -> torch.futures.Future[Tensor] | None:
        """Let the ranks agree on success in the background, once each has its means.

        Returns:
            A Future of the sums for :meth:`_check_agreed`. None if the ranks do not agree in the
            background, because later work may still fail.
        """
        if not self._group.recovers or self._averages.scales_steps:
            return None
        agreed: torch.futures.Future[Tensor] = torch.futures.Future()
        # Gloo's threads run this. They must not release the process group last.
        itself = weakref.ref(self)

        def agree(done: torch.futures.Future[Any]) -> None:
            try:
                done.value()
                exchange = itself()
                if exchange is None:
                    raise RuntimeError("the exchange was abandoned")
                issued = exchange._agree()
            except BaseException as error:  # no caller would see a callback's error
                set_error(agreed, error)
                return
            issued.add_done_callback(
                lambda each: set_outcome(agreed, each.value, caught=BaseException)
            )

        torch.futures.collect_all([call.future for call in self._calls]).add_done_callback(agree)
        return agreed

    def _agree(self) -> torch.futures.Future[Tensor]:
        """Tell the other ranks that this rank succeeded. It must have its means.

        Returns:
            A Future of the sums for :meth:`_check_agreed`.

        Raises:
            RuntimeError: the exchange was given up, or a result does not fit its bucket.
        """
        for call in self._calls:
            checked_result(call.future.value(), call.bucket, call.dtype, call.where)
        numbers = torch.tensor([self._number, self._number**2], dtype=torch.float64, device="cpu")
        with self._lock:
            if self._is_given_up:
                raise RuntimeError("the exchange was given up")
            self._has_agreed = True
            return issue_all_reduce(numbers, self._group.group)

    def _check_agreed(self, sums: Tensor) -> None:
        """Check that all ranks run the same exchange. All ranks get the same answer.

        Args:
            sums: float64 of shape (2,): the sums over the ranks of their exchange's number and of
                its square.

        Raises:
            RuntimeError: the ranks run different exchanges.
        """
        size = self._group.size
        if sums.tolist() != [size * self._number, size * self._number**2]:
            raise RuntimeError(
                "local_sgd: ranks exchanged different fragments, because an earlier exchange "
                "failed on "
                "some ranks only. Their anchors differ: on all ranks load the last checkpoint of "
                "the "
                "model and of handle.state_dict()"
            )

    def settle(self) -> None:
        """Wait for the outcome, and set :attr:`means` or :attr:`failure`.

        Raises:
            KeyboardInterrupt: Ctrl-C, after the other ranks had learnt of this rank's success.
        """
        if self.means is not None or self.failure is not None or not self.is_shared:
            return
        try:
            if self._error is not None:
                raise self._error
            self.receive()
            self._end()
        except BaseException as error:
            if self._goes_on():
                self._take_means()
                if isinstance(error, Exception):  # the means have arrived nevertheless
                    return
                raise
            self.undo()
            raised = error
            if self._has_begun:
                self._group.in_background = False
                raised = self._group.fail_with(error)
            if raised is not error:
                raised.__cause__ = error
            self.failure = raised
        else:
            self._take_means()

    def _take_means(self) -> None:
        """Set :attr:`means`. Releases all other memory but the unsent part."""
        found: dict[str, Tensor] = {}
        for memory, means in zip(self._memories, self._means, strict=True):
            names = memory.names
            assert names is not None
            found.update(zip(names, means, strict=True))
        self.means = found
        self._calls, self._memories, self._means = [], [], []

    def _goes_on(self) -> bool:
        """Whether the other ranks use the means, so that this rank must not fail alone."""
        with self._lock:
            self._is_given_up = True
            has_agreed = self._has_agreed
        if self._agreed is None or not has_agreed or not _C.wait_for(self._agreed, DRAIN_SECONDS):
            return False
        try:
            self.receive()
            self._end()
        except Exception:  # it failed on another rank
            return False
        return True

    def _end(self) -> None:
        """End the step, together with the ranks that take part."""
        group = self._group
        group.in_background = False
        if not group.recovers:
            group.end()
            return
        agreed = self._agree() if self._agreed is None else self._agreed

        def wait() -> None:
            _C.wait_for_result(agreed, "the end of an exchange", group.timeout.total_seconds())
            agreed.wait()

        group.end_agreed(wait)
        self._check_agreed(agreed.value())

    def look(self) -> None:
        """Wait for the outcome early; as :meth:`settle`, but raises a Ctrl-C at once.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        self.settle()
        failure = self.failure
        if failure is not None and not isinstance(failure, Exception):
            self.failure = _left_by(failure)
            raise failure

    def fail_if(self, failure: BaseException | None) -> None:
        """Fail because another shard's exchange has failed, if this one has not failed already."""
        if failure is not None and self.failure is None:
            self.undo()
            self.failure, self.means = failure, None

    def leave(self) -> None:
        """End all communication, on all ranks. Means that have arrived are kept.

        The exchange fails if its means do not arrive soon.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        if not self.is_shared:
            return
        try:
            if self.means is None and self.failure is None:
                is_done = self.drain()
                if is_done and self._agreed is not None:
                    is_done = _C.wait_for(self._agreed, DRAIN_SECONDS)
                if not is_done and self._error is None:
                    self._error = RuntimeError("an exchange was running when its hook was removed")
            self.look()
        finally:
            self.is_shared = False
            self._calls, self._memories, self._kept = [], [], []


def _left_by(error: BaseException) -> RuntimeError:
    """The error to raise later in place of one that ends the program."""
    return RuntimeError(f"an exchange was interrupted by {type(error).__name__}")


# ---- an exchange of local steps that the remaining ranks repeat when a rank is lost --------------


class RepeatableExchange(ParameterExchange, RepeatableStep):
    """An exchange that moves no parameter until all ranks have all means.

    Args:
        attached: the hook, a :class:`local_sgd`.
        training: the ranks.
        memories: returns the hook's memory of the buckets, which depends on the ranks.
        is_wanted: returns whether there are distances to average. Called on all ranks.
        move: moves the parameters, once all ranks have the means; gets the exchange with its means,
            or None if there was nothing to average.
        unsent: as for :meth:`ParameterExchange.send`.
        undone: called when the exchange has failed, before the ranks change and repeat it.
    """

    def __init__(
        self,
        attached: Attached,
        training: ElasticTraining,
        memories: Callable[[], Sequence[BucketMemory]],
        is_wanted: Callable[[], bool],
        move: Callable[[ParameterExchange | None], None],
        *,
        unsent: bool = False,
        undone: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(attached, training.group, keeps_all=True)
        self.training = training
        self._find_memories = memories
        self._is_wanted = is_wanted
        self._move = move
        self._unsent = unsent
        self._undone = undone
        self._wanted = False

    def run(self, *, lets_in: bool) -> None:
        """Average the distances among the remaining ranks, move the parameters, and count it.

        Args:
            lets_in: whether new ranks may join now.

        Raises:
            BaseException: this rank does not continue. Before the move its parameters are
                unchanged.
        """
        self.training.new_ranks.give()
        try:
            self.take()
        except BaseException as error:
            self.go_on(error)
        self.apply()
        self.count(lets_in=lets_in)

    def _send(self) -> Tensor:
        self._group.begin()
        self._wanted = self._is_wanted()
        if self._wanted:
            self.send(self._find_memories(), unsent=self._unsent)
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def _receive(self) -> None:
        if self._wanted:
            self.receive()

    def _write_results(self) -> None:
        self._move(self if self._wanted else None)

    def undo(self) -> None:
        super().undo()
        self._undone()

    def repeat(self, group: StepGroup) -> None:
        self._group = group
        self._calls, self._memories, self._kept, self._means = [], [], [], []
        self.take()
