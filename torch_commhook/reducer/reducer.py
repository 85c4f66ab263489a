"""Data parallelism without DDP's reducer: gradients of any parameters through one hook.

A post-accumulate-grad hook on each parameter counts its bucket full; the communication hook starts
with the last of them, in the order of the buckets; results are written when backward ends.

In eager, counting is C++ (``Arrivals``), which enters Python once for each bucket. Under compiled
autograd it is plain Python, and so is all the rest, over tensors, so that it can be traced.

Where backward ends depends on who runs it. The autograd engine has a queue of callbacks for that.
Compiled autograd has none that works with graph breaks, but knows beforehand which hooks it will
call; the last of them is the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
import torch._dynamo
import torch._logging
from torch import Tensor
from torch._dynamo import compiled_autograd

from torch_commhook import collectives
from torch_commhook.autograd.running_backward import RunningBackward
from torch_commhook.buckets.results import scaled_result
from torch_commhook.memory.unsent import Late, add_unsent, keep_unsent, unsent_table, without_unused
from torch_commhook.metrics import BucketTraffic, as_text, count_bucket
from torch_commhook.native.dynamo import left_to_python
from torch_commhook.native.runtime import hook_on_bucket
from torch_commhook.reducer.buckets import (
    BucketState,
    ReducerBucket,
    TracedBucket,
    destinations,
)
from torch_commhook.reducer.cpp_run import CppRun
from torch_commhook.reducer.formed_buckets import FormedBuckets
from torch_commhook.reducer.parameter_hooks import ParameterHooks
from torch_commhook.reducer.parameters import ReducerParameters
from torch_commhook.reducer.tracing import (
    begin_step,
    commit_step,
    count_step,
    expected_hooks,
    note_backward,
    parameters_changed,
    prepare_tracing,
    reducers,
    start_traced,
    write_missing,
)
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.hook_call import DRAIN_SECONDS
from torch_commhook.step.step_group import NoAgreement, StepGroup

_log = logging.getLogger(__name__)
_engine = torch.autograd.Variable._execution_engine
_current_task = torch._C._current_graph_task_id
_is_compiling = torch.compiler.is_dynamo_compiling

#: Stands for a backward that compiled autograd runs.
_COMPILED = -1

_ALONE = NoAgreement()

_NOT_NESTED = (
    "torch_commhook: a parameter's hook was called outside of backward(), or in one that is nested "
    "in a compiled one; reentrant activation checkpointing under compiled autograd needs "
    "torch.utils.checkpoint(..., use_reentrant=False)"
)

_TWO_AT_ONCE = (
    "torch_commhook: another backward() of this model began in another thread before this one had "
    "ended; a model's backward passes that a hook averages must come one after another"
)

_LATE_SECONDS = 0.5


class Reducer:
    """Averages the gradients of some parameters over ranks, through whatever hook is attached.

    Args:
        named_parameters: names and parameters that require grad.
        group: the ranks.
        capacity_bytes: of a bucket.
        sparse: names of the parameters whose gradients are sparse.
        as_views: gradients stay in the buckets' memory, as views of it.
        should_sync: asked at the beginning of each backward.
        change_of_parameters: says what has happened to the parameters since, if anything.
        in_join: whether ranks that have run out of inputs may take part in the step.
        on_step: told of the beginning (True) and the end of each step that is not traced.
        on_captured: told of each backward that compiled autograd takes in.
        on_closed: called when nothing of it is on the parameters any more.

    Attributes:
        attached: the hook; with none, gradients stay as they are.
        group: the ranks.
        device: of the first parameter.
        parameters: those whose gradients are averaged.
        key: by which compiled code finds it in ``reducers``.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        group: StepGroup,
        *,
        capacity_bytes: int,
        sparse: frozenset[str] = frozenset(),
        as_views: bool = False,
        should_sync: Callable[[], bool] = lambda: True,
        change_of_parameters: Callable[[], str | None] = lambda: None,
        in_join: Callable[[], bool] = lambda: False,
        on_step: Callable[[bool], None] = lambda begins: None,
        on_captured: Callable[[], None] = lambda: None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._attached: Attached | None = None
        self.group = group
        self.parameters = ReducerParameters(named_parameters, sparse)
        self.device = self.parameters.tensors[0].device
        self._should_sync = should_sync
        self.change_of_parameters = change_of_parameters
        self._in_join = in_join
        self._on_step = on_step
        self._on_captured = on_captured
        self._on_closed = on_closed
        self.key = str(id(self))
        reducers[self.key] = self

        # What compiled code does to these is seen from outside, so that it is done.
        self._token = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._used = torch.zeros(len(self.parameters), dtype=torch.uint8, device="cpu")

        self._idle = True
        self._closes = False  # at the end of this backward
        self._memory_is_old = False  # the buckets', of the hook of this backward
        self._begun_count = 0  # how many backward passes have begun
        self._task: int | None = None  # the backward that is being counted
        self._outermost: int | None = None
        self._backward: RunningBackward | None = None
        self._remaining = 0  # gradients to come, where that is known
        self._next = 0  # the bucket whose turn it is
        self._starting = False
        self._running: Attached | None = None  # for this backward; None: no synchronisation
        self._cpp: CppRun | None = None  # its hook, where that runs in C++
        # Whether each parameter has got a gradient since the last synchronisation, under no_sync().
        self._used_before = [False] * len(self.parameters)
        self._rebuilt = False  # in the order in which gradients have come
        self._agreed_order: list[int] | None = None

        self._buckets = FormedBuckets(
            self.parameters, capacity_bytes=capacity_bytes, as_views=as_views
        )
        self._hooks = ParameterHooks(self, self.parameters)
        self._arrivals = self._hooks.arrivals
        # The last parameters have the first gradients.
        self._fill_buckets(range(len(self.parameters) - 1, -1, -1))

    @property
    def hooks(self) -> set[Callable[..., None]]:
        """Those on the parameters that compiled autograd calls."""
        return self._hooks.called

    @property
    def attached(self) -> Attached | None:
        """The hook."""
        return self._attached

    @attached.setter
    def attached(self, attached: Attached | None) -> None:
        self._attached = attached
        if attached is not None:
            attached.use_group(self.group, self.device)
        if self._is_under_way():  # that backward goes on with what its own hook remembers
            self._memory_is_old = True
        else:
            self._buckets.prepare_memory(attached)

    # ---- buckets ---------------------------------------------------------------------------------

    @left_to_python
    def _renew_memory(self) -> None:
        """After the backward in which another hook was attached."""
        self._memory_is_old = False
        self._buckets.prepare_memory(self._attached)

    def memory_loaded(self, buckets: list[list[str]]) -> None:
        """The hook's memory has been read from elsewhere, where these were the buckets."""
        # Under the names by which the memory knows them, which are a model's own inside DDP too.
        attached = self._attached
        names = None if attached is None else attached.memory.names_of(self.parameters.tensors)
        numbers = {name: number for number, name in enumerate(names or ())}
        if self._is_under_way() or sorted(numbers) != sorted(
            name for names in buckets for name in names
        ):
            self._buckets.prepare_memory(attached)
            return
        self._rebuilt = True
        self._arrivals.stop_noting_order()
        self._buckets.fill_as([[numbers[name] for name in names] for names in buckets])
        self._buckets_formed()

    def _fill_buckets(self, order: Sequence[int]) -> None:
        self._buckets.fill_in_order(order)
        self._buckets_formed()

    def _buckets_formed(self) -> None:
        self._buckets.prepare_memory(self._attached)
        self._hooks.renew(self._ready_hook, self._buckets.bucket_of_each())

    def parameter_buckets(self) -> list[list[Tensor]]:
        """Each bucket's parameters."""
        return [list(bucket.parameters) for bucket in self._buckets.all]

    def buckets(self) -> list[list[str]]:
        """The names of each bucket's parameters."""
        return self._buckets.names()

    def shadow_step(self) -> None:
        """Take part in a step of the other ranks, with zeros, and leave the gradients alone."""
        self._idle = self._begun = False
        self._running = self.attached
        if self._running is None:
            self._reset()
            return
        try:
            self._begin_step()
            self._running.look_at_scale(in_join=True, has_joined=True)
            while self._next < len(self._buckets.all):
                bucket = self._buckets.all[self._next]
                self._start(bucket, [bucket.zeros(p) for p in bucket.parameters])
            for bucket in self._buckets.all:
                self._result(bucket)
            used = torch.zeros(len(self.parameters), dtype=torch.uint8, device="cpu")
            self.group.commit(used)
            self._running.memory.advance()
            if self.group.shares_used:  # else all ranks use all parameters
                self._keep_unsent(used, zeros_sent=True)
            if self._is_to_rebuild():
                self._agreed_order = self._agree_on_order()
        except BaseException as error:
            self._abort(error)
        self._step_ended()

    def close(self) -> None:
        """Take the hooks off the parameters, and keep neither these nor the buckets' memory.

        A backward that is under way goes on to its end first.
        """
        if self._is_under_way():
            self._closes = True
        elif not self.is_closed:
            self._hooks.remove()
            self._reset()
            self._buckets.clear()
            self.parameters.tensors.clear()
            self._on_closed()

    @property
    def is_closed(self) -> bool:
        """Whether nothing of it is on the parameters any more."""
        return self._hooks.are_removed

    def _is_under_way(self) -> bool:
        """Whether a backward has begun, and was not left by an exception."""
        if self._idle:
            return False
        if self._task == _COMPILED:
            return compiled_autograd.in_compiled_autograd_region
        return not RunningBackward().has_left(self._backward)

    # ---- during backward -------------------------------------------------------------------------

    def _ready_hook(self, name: str) -> Callable[[Tensor], None]:
        """What compiled autograd calls with a parameter when its gradient is there."""
        # By name, since Dynamo makes variables of numbers that change with the place of a hook in
        # the list of those that it is given.
        reducer = self

        def ready(parameter: Tensor) -> None:
            if not _is_compiling() and not compiled_autograd.in_compiled_autograd_region:
                return  # C++ counts
            bucket, place = reducer._buckets.places[name]
            if reducer._task != _COMPILED:
                reducer._enter_compiled()
            if bucket.arrived[place] is not None:
                # Compiled autograd was left by an exception before it came to an end.
                reducer._abandon()
                reducer._begin_known()
            bucket.arrived[place] = parameter
            bucket.pending -= 1
            if bucket.pending == 0:
                reducer._start_full()
            reducer._one_less()

        return ready

    def _one_less(self) -> None:
        self._remaining -= 1
        if self._remaining == 0:
            if self._breaks_graph():
                self._finish_untraced()
            else:
                self._finish()

    @left_to_python
    def enter_backward(self) -> None:
        """The first gradient of a backward, or of another one nested in it or around it."""
        if compiled_autograd.in_compiled_autograd_region:
            raise RuntimeError(_NOT_NESTED)
        task = _current_task()
        if task == self._task:  # another thread of this backward was here before
            return
        backward = RunningBackward()
        nested = backward.is_nested
        left = (
            self._task == _COMPILED
            or (not nested and self._outermost not in (None, task))
            or backward.has_left(self._backward)
        )
        if not self._idle and left:
            self._abandon()
            if self.is_closed:
                return
        if self._idle:
            self._reset()  # other threads may have written to it, though they should not
            self._begin()
            try:
                if self._running is not None:
                    self._running.look_at_scale(in_join=self._in_join())
                self._cpp = CppRun.of(
                    self._running, self.group, self._buckets.all, self._check_layouts
                )
            except BaseException as error:
                self._abort(error)
        if not nested:
            self._outermost = task
        self._backward = backward
        self._task = task
        self._arrivals.count_in_this_backward(
            self._running is not None, None if self._cpp is None else self._cpp.native
        )
        begun = self._begun_count
        _engine.queue_callback(left_to_python(lambda: self._end_of_backward(nested, begun)))

    @left_to_python
    def before_capture(self) -> None:
        """Compiled autograd takes in a backward.

        The last that Python sees of it: the compiler knows what is remembered as tensors alone.
        """
        try:
            if self.attached is not None:
                self.attached.look_at_scale(in_join=self._in_join())
            self._on_captured()
        except BaseException as error:  # the other ranks may begin the step
            raised = self.group.fail_with(error)
            if raised is error:
                raise
            raise raised from error

    def captured(self) -> None:
        """That backward has run."""
        self._arrivals.captured()

    @left_to_python
    def bucket_full(self, index: int) -> None:
        """The last gradient of a bucket has come."""
        self._buckets.all[index].pending = 0
        self._start_full()

    @left_to_python
    def came_again(self, number: int) -> None:
        """A second gradient for a parameter of a bucket that is full."""
        started = self._next if self._cpp is None else self._cpp.started
        if any(number in bucket.members for bucket in self._buckets.all[:started]):
            name = self.parameters.names[number]
            self._abort(
                RuntimeError(
                    f"torch_commhook: parameter '{name}' got a gradient after its "
                    "bucket had been sent; a parameter that is used in several segments of "
                    "reentrant activation checkpointing needs "
                    "torch.utils.checkpoint(..., use_reentrant=False)"
                )
            )

    @left_to_python
    def start_failed(self, error: BaseException) -> None:
        """The C++ hook raised when it was started on a bucket."""
        if self._cpp is not None:  # as long as this is the backward under way
            self._cpp.explain(error)
        self._abort(error)

    @left_to_python
    def _end_of_backward(self, nested: bool, begun: int) -> None:
        if begun != self._begun_count:
            raise RuntimeError(_TWO_AT_ONCE)
        if self._idle:
            return
        missing = set(self._arrivals.missing())
        if nested and missing:
            return
        self._buckets.set_arrived(missing)
        self._finish()

    def _enter_compiled(self) -> None:
        if not self._idle:  # an eager backward was left by an exception
            self._abandon()
        self._begin_known()

    def _begin_known(self) -> None:
        """Begin a backward of compiled autograd."""
        expected = expected_hooks(self.key)
        if not expected:
            raise RuntimeError(_NOT_NESTED)
        self._begin()
        self._task = _COMPILED
        self._remaining = expected

    def _begin(self) -> None:
        self._idle = False
        self._begun = False
        if not _is_compiling():
            self._begun_count += 1
        self._next = 0
        self._running = self.attached if self._should_sync() else None
        if self._running is not None and self._running.keeps_ranks_apart:
            self._begin_apart()
        if self._running is None:
            return
        if not _is_compiling():
            self._begin_step()
        elif not self._running.traceable:
            return
        elif parameters_changed(self.key):
            self._leave_trace()
        elif self._agreement.size > 1:
            prepare_tracing(self.group.name)
            begin_step(self._token, self.group.name)
            self._begun = True

    def _begin_apart(self) -> None:
        """Begin a backward after which each rank has its own gradients."""
        attached = self._running
        assert attached is not None
        if _is_compiling():
            note_backward(self._token, self.key)
        else:
            assert attached.local_steps is not None
            attached.local_steps.note_backward()
        if attached.stages.is_empty:  # the gradients stay where they are
            if not _is_compiling():
                self._on_step(True)
            self._running = None

    @property
    def _agreement(self) -> StepGroup | NoAgreement:
        """Through which the ranks agree on the step."""
        apart = self._running is not None and self._running.keeps_ranks_apart
        return _ALONE if apart else self.group

    def _begin_step(self) -> None:
        if not self._begun:
            self._begun = True
            try:
                self._on_step(True)
                self._agreement.begin()
            except BaseException:
                self._reset()
                raise

    def _start_full(self) -> None:
        """Run the hook on the buckets whose turn it is and which are full."""
        attached = self._running
        if attached is None or self._starting or (self._remaining and not attached.traceable):
            return
        self._starting = True  # another thread's bucket may become full meanwhile
        while self._next < len(self._buckets.all) and self._buckets.all[self._next].pending == 0:
            self._start(self._buckets.all[self._next])
        self._starting = False

    def _start_all(self) -> None:
        """Run the hook on the buckets that have not had their turn."""
        while self._next < len(self._buckets.all):
            self._start(self._buckets.all[self._next])

    def _start(self, bucket: BucketState, gradients: list[Tensor] | None = None) -> None:
        """Run the hook on the bucket whose turn it is."""
        attached = self._running
        assert attached is not None
        self._next += 1
        count = len(self._buckets.all)
        group = self.group.group_for(bucket.device)
        where = hook_on_bucket(attached.name, bucket.index, count)
        if _is_compiling():
            bucket.bucket = TracedBucket(bucket, bucket.gradients(), count, group)
            try:
                bucket.running = start_traced(attached, bucket.bucket, where)
            except Exception:
                self._leave_trace()
            return
        # A parameter that no rank uses keeps its gradient; so do those of a rank that has joined.
        bucket.is_apart = bucket.pending > 0
        bucket.native.take_gradients(gradients, bucket.is_apart)
        bucket.bucket = ReducerBucket(bucket, count, group)
        if bucket.sparse:
            self._check_layouts(bucket)
        begun = self._begun_count
        try:
            bucket.running = attached.start(bucket.bucket, where)
        except BaseException as error:
            if begun != self._begun_count:  # this is not the backward that is under way
                raise RuntimeError(_TWO_AT_ONCE) from error
            if isinstance(error, TypeError):  # for which this may have been the reason
                self._check_layouts(bucket)
            self._abort(error)

    def _check_layouts(self, bucket: BucketState) -> None:
        try:
            self.parameters.check_layouts(bucket.members, bucket.native.gradients())
        except TypeError as error:
            self._abort(error)

    @torch.compiler.disable
    def _leave_trace(self) -> None:
        """Something is wrong while it is traced: break the graph, so that Python tells of it."""
        raise AssertionError("this is traced, and never run")

    # ---- the end of backward ---------------------------------------------------------------------

    def _finish(self) -> None:
        """All gradients of this backward are there: wait for the hooks and write their results."""
        if self._running is None:
            self._note_used()
            self._reset()
        elif _is_compiling():
            self._finish_traced()
        else:
            attached = self._running
            try:
                self._finish_eager()
            except BaseException as error:
                self._abort(error)
            # The step has been agreed on: what is raised from here on is this rank's own affair.
            try:
                self._run_post_accumulate_hooks(attached)
            finally:
                self._step_ended()

    def _finish_eager(self) -> None:
        self._begin_step()
        attached, count = self._running, len(self._buckets.all)
        assert attached is not None
        cpp = self._cpp
        if cpp is None:
            late = self._results()
            traffic = [_traffic(bucket) for bucket in self._buckets.all]
        else:
            late = cpp.results(self.group.timeout.total_seconds())
            traffic = cpp.traffic()
        used = self._locally_used()
        self._agreement.commit(used)
        found = self._step_scale(late, used) if attached.scales_steps else None
        scale = 1.0 if found is None else float(found)
        together = not attached.keeps_ranks_apart
        if together:
            attached.memory.advance()
        for bucket, result in late:
            if bucket.pending == 0 and not bucket.sparse:
                bucket.native.write(result, scale)
                continue
            scaled = result if scale == 1.0 else scaled_result(result, scale, bucket.dtype)
            if bucket.pending == 0:
                bucket.native.write(scaled, 1.0)
            else:
                self.parameters.write_missing(bucket.members, bucket.pieces(scaled), used)
        if together:
            self._keep_unsent(used)
            for index, of_bucket in enumerate(traffic):
                count_bucket(attached.stats, index, count, of_bucket, first=index == 0)
        self._forget_used()
        if self._is_to_rebuild():
            self._agreed_order = self._agree_on_order()

    def _results(self) -> list[tuple[BucketState, Tensor]]:
        """Run the hook on the buckets that are left, and write what can be written already.

        Returns:
            The other buckets and their results: where parameters have no gradient, and all where
            the results are to be scaled.
        """
        attached = self._running
        assert attached is not None
        self._start_all()
        late = []
        for bucket in self._buckets.all:
            result = self._result(bucket)
            if bucket.pending or attached.scales_steps:
                late.append((bucket, result))
            else:
                bucket.native.write(result, 1.0)  # while others are on their way
        return late

    def _step_scale(
        self, results: Sequence[tuple[BucketState, Tensor]], used: Tensor
    ) -> Tensor | None:
        """What the hook scales all results by, for those that go into gradients."""
        assert self._running is not None
        applied = []
        for bucket, result in results:
            if bucket.pending == 0:
                applied.append(result)
            elif bucket.sparse:
                applied.append(result * used[bucket.members[0]].to(result.device))
            else:
                lengths = bucket.layout.lengths
                applied.append(without_unused(result.view(-1), used, bucket.members, lengths))
        return self._running.step_scale(applied)

    def _result(self, bucket: BucketState) -> Tensor:
        """Wait for what the hook gives, check it, and run the post-hooks."""
        running, attached = bucket.running, self._running
        assert running is not None and bucket.bucket is not None and attached is not None
        result = running.wait(self.group.timeout)
        bucket.averaged = result
        if running.local is None:
            return result
        if attached.keeps_error and bucket.pending:
            bucket.averaged = result.clone()  # post-hooks may write to it
        return attached.stages.after(bucket.bucket, result, running.local, running.where)

    def _run_post_accumulate_hooks(self, attached: Attached) -> None:
        if attached.stages.has_post_accumulate_hooks and self._cpp is None:
            for bucket in self._buckets.all:
                assert bucket.running is not None and bucket.bucket is not None
                attached.stages.done(bucket.bucket, bucket.running.where)

    def _step_ended(self) -> None:
        self._reset()
        self._on_step(False)
        order, self._agreed_order = self._agreed_order, None
        if order is not None and not self.is_closed:
            self._rebuilt = True
            self._arrivals.stop_noting_order()
            self._fill_buckets(order)

    def note_used_before(self, used: Sequence[bool]) -> None:
        """Take parameters for used in a backward that did not synchronise.

        Args:
            used: for each parameter, whether it was.
        """
        self._used_before = list(used)

    def _note_used(self) -> None:
        """A backward that does not synchronise has ended: its gradients wait for one that does."""
        for bucket in self._buckets.all:
            for number, arrived in zip(bucket.members, bucket.arrived, strict=True):
                if bucket.pending == 0 or arrived is not None:
                    self._used_before[number] = True

    def _forget_used(self) -> None:
        self._used_before = [False] * len(self.parameters)

    def _locally_used(self) -> Tensor:
        used = [1] * len(self.parameters)
        for bucket in self._buckets.all:
            if bucket.pending == 0:
                continue
            for number, parameter, arrived in zip(
                bucket.members, bucket.parameters, bucket.arrived, strict=True
            ):
                if arrived is None and not (
                    self._used_before[number] and parameter.grad is not None
                ):
                    used[number] = 0
        if not self._agreement.shares_used and self._agreement.size > 1 and 0 in used:
            names = [name for name, yes in zip(self.parameters.names, used, strict=True) if not yes]
            raise RuntimeError(
                f"torch_commhook: parameters {names} got no gradient, and over this process group "
                "ranks do not tell each other which they used; freeze them "
                "(requires_grad_(False)) before the hook is attached, or let the loss depend on "
                "them"
            )
        return torch.tensor(used, dtype=torch.uint8, device="cpu")

    def _keep_unsent(self, used: Tensor, *, zeros_sent: bool = False) -> None:
        """Let the hook remember results that go nowhere, since no rank has used a parameter."""
        late = [
            Late(
                bucket.members,
                bucket.memory,
                bucket.averaged,
                [None] * len(bucket.members) if zeros_sent else bucket.left_from_before(),
            )
            for bucket in self._buckets.all
            if bucket.averaged is not None and bucket.pending
        ]
        errors, results, gradients, table = unsent_table(late)
        if table:
            keep = keep_unsent if _is_compiling() else add_unsent
            keep(errors, results, gradients, used, table)

    def _breaks_graph(self) -> bool:
        return _is_compiling() and self._running is not None and not self._running.traceable

    @torch.compiler.disable
    def _finish_untraced(self) -> None:
        """Run a hook that cannot be traced, on all buckets."""
        assert self._running is not None
        torch._logging.warning_once(
            _log,
            "hook '%s' is not marked as traceable (torch_commhook.traceable): under compiled "
            "autograd it runs after the compiled backward, as a graph break",
            self._running.name,
        )
        self._finish()

    def _finish_traced(self) -> None:
        attached = self._running
        assert attached is not None
        self._start_all()
        for bucket in self._buckets.all:
            assert bucket.running is not None
            bucket.running.future.start_next()
        results = [self._result(bucket) for bucket in self._buckets.all]
        used = self._locally_used()
        if self._agreement.size > 1:
            self._used.copy_(used)
            used = self._used
            commit_step(used, results, self.group.name)
        if attached.scales_steps:
            scale = self._step_scale(list(zip(self._buckets.all, results, strict=True)), used)
            if scale is not None:
                with torch.no_grad():
                    results = [
                        scaled_result(result, scale, bucket.dtype)
                        for bucket, result in zip(self._buckets.all, results, strict=True)
                    ]
        for bucket, result in zip(self._buckets.all, results, strict=True):
            if bucket.pending == 0:
                bucket.write_traced(result)
        if not attached.keeps_ranks_apart:
            buckets = [_traffic(bucket) for bucket in self._buckets.all]
            if attached.memory.is_empty and not attached.follows_scale:
                attached.traced_steps.add(buckets)
            else:
                count_step(self._token, results, as_text(buckets), self.key)
        numbers: list[int] = []
        missing: list[Tensor] = []
        for bucket, result in zip(self._buckets.all, results, strict=True):
            if bucket.pending == 0:
                continue
            for number, arrived, piece in zip(
                bucket.members, bucket.arrived, bucket.pieces(result), strict=True
            ):
                if arrived is None:
                    numbers.append(number)
                    missing.append(piece)
                else:
                    with torch.no_grad():
                        destinations([arrived])[0].copy_(piece)
        if missing:
            write_missing(self._token, used, missing, numbers, self.key)
            if not attached.keeps_ranks_apart:
                self._keep_unsent(used)
        self._forget_used()
        if missing and attached.stages.has_post_accumulate_hooks:
            self._run_post_accumulate_hooks_untraced(attached)
        else:
            self._run_post_accumulate_hooks(attached)
        self._reset()

    @torch.compiler.disable
    def _run_post_accumulate_hooks_untraced(self, attached: Attached) -> None:
        """Where they must see gradients that the compiler knows nothing of."""
        self._run_post_accumulate_hooks(attached)

    def _is_to_rebuild(self) -> bool:
        """Whether buckets are to be formed anew, in the order in which gradients have come.

        Not for hooks whose result depends on what shares a bucket: compiled code has another order.
        """
        attached = self._running
        assert attached is not None
        # Ranks that are apart have nothing to agree through, and one that has joined does not know
        # whether the others' backward is compiled.
        is_free = not (attached.is_lossy or attached.keeps_ranks_apart or self._in_join())
        return not self._rebuilt and self._task != _COMPILED and is_free

    def _agree_on_order(self) -> list[int]:
        """The order in which rank 0's gradients have arrived, on all ranks."""
        # Once each, and those that have not come at the end.
        arrived = self._arrivals.take_order()
        order = list(dict.fromkeys([*arrived, *reversed(range(len(self.parameters)))]))
        if self.group.size > 1:
            device = "cpu" if self.group.recovers else self.device
            agreed = torch.tensor(order, dtype=torch.int64, device=device)
            collectives.broadcast(agreed, group=self.group.group).wait()
            order = agreed.tolist()
        return order

    # ---- failure ---------------------------------------------------------------------------------

    def _abort(self, error: BaseException) -> None:
        """End this backward on all ranks, and raise."""
        # Where one had the time that a collective may take, so had the others.
        patient = isinstance(error, Exception) and not isinstance(error, TimeoutError)
        try:
            self._drain(DRAIN_SECONDS if patient else _LATE_SECONDS)
        except BaseException as interrupt:  # the other ranks are told all the same
            error = interrupt
        raised = self._agreement.fail_with(error)
        self._forget_used()
        self._reset()
        raise raised

    def _drain(self, seconds: float) -> None:
        """Wait for what is in flight. Raises only what a signal does."""
        deadline = time.monotonic() + seconds
        if self._cpp is not None:
            self._cpp.drain(seconds)
        for bucket in self._buckets.all:
            if bucket.running is not None:
                bucket.running.drain(deadline)

    def _abandon(self) -> None:
        """Forget a backward that was left by an exception."""
        if self._running is not None:
            self._agreement.fail("backward() was left by an exception")
            self._forget_used()
        elif self._task != _COMPILED and not _is_compiling():  # what it has given stays
            self._buckets.set_arrived(set(self._arrivals.missing()))
            self._note_used()
        self._reset()

    def _reset(self) -> None:
        for bucket in self._buckets.all:
            bucket.reset()
        self._task = self._outermost = self._backward = None
        self._remaining = 0
        self._next = 0
        self._starting = False
        self._running = self._cpp = None
        if self._memory_is_old:
            self._renew_memory()
        if not _is_compiling():
            self._arrivals.reset()
            self._arrivals.captured()
        # Last: another thread that begins meanwhile would be half forgotten, and still be running.
        self._idle = True
        if self._closes:
            self._closes = False
            self.close()


def _traffic(bucket: BucketState) -> BucketTraffic:
    assert bucket.running is not None
    return bucket.running.traffic
