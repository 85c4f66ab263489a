"""Data parallelism without DDP's reducer: averages gradients of any parameters through one hook.

Compiled autograd traces a part of it, and runs the rest in operators (``compiled_step.py``). A hook
on each parameter counts the gradients of its bucket. Under the engine that hook is C++ and takes no
GIL. The engine enters Python once for a backward and once for each full bucket
(``csrc/runtime/reducer/arrivals.h``). This took the cost of 1000 small parameters from about 0.85
to 0.5 of DDP's with ``allreduce_hook`` (``python benchmarks/bench_modes.py --models 1000x64``). The
hook wraps the dict of Python hooks that PyTorch keeps for a tensor
(``csrc/runtime/reducer/parameter_hooks.h``). Users' own hooks in this dict run first, whenever they
were registered. Compiled autograd gets the Python function that counts there.

The hook gets a full bucket at once, if it has got those before it, so that collectives come in one
order on all ranks. A hook in C++ starts directly, on the thread of the last gradient
(``csrc/runtime/reducer/reducer_run.h``), and its results are also written without the GIL. C++
gathers gradients only when the hook asks for them. The hook's first operation, such as scaling them
or casting them into another buffer, is then the same pass over memory. When backward ends, the
reducer waits for the results, checks them and writes them.

The end of a backward depends on who runs it. The engine has a queue of callbacks. A backward nested
in another one (reentrant checkpointing) also has this queue; the stack tells the two apart.
Compiled autograd's queue works only without graph breaks, so there the last hook is the end. The
hooks to call are an argument of the compiled function, and their number is a constant in the trace.
State in Python that is traced returns to the same values at the end of each step, because otherwise
the code would be compiled again.

If gradients are views of a bucket, a hook writes its result over them. A parameter that no rank has
used keeps its gradient, but the ranks know these parameters only after the hook. So a bucket that
lacks a gradient is gathered into other memory. DDP's reducer has one memory for both. There the
library copies the gradients that this rank has not used before the hook, and restores those that no
rank has used.

At the beginning of each step the reducer checks the parameters (``parameters.py``). It compares
their dtypes, devices and shapes (``csrc/runtime/reducer/parameter_forms.h``), and the objects that
the modules hold (``csrc/runtime/python/module_members.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo import compiled_autograd

from torch_commhook import collectives
from torch_commhook.buckets.grad_bucket import assign_buckets, split_by_kind
from torch_commhook.collectives.futures import is_capturing
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.reducer.buckets import BucketState
from torch_commhook.reducer.compiled_step import (
    CompiledBackward,
    CompiledStep,
    GraphStep,
    expected_hooks,
    note_backward,
)
from torch_commhook.reducer.eager_step import EagerBackward, EagerStep
from torch_commhook.reducer.parameters import ReducerParameters, ReducerState
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import RunningBackward, StepGroup

# ---- the errors of backward passes that cannot be averaged ---------------------------------------


NOT_NESTED = (
    "torch_commhook: a parameter's hook was called outside of backward(), or in one that is nested "
    "in a compiled one; reentrant activation checkpointing under compiled autograd needs "
    "torch.utils.checkpoint(..., use_reentrant=False)"
)

TWO_AT_ONCE = (
    "torch_commhook: another backward() of this model began in another thread before this one had "
    "ended; a model's backward passes that a hook averages must come one after another"
)


# ---- data parallelism without DDP's reducer ------------------------------------------------------


_engine = torch.autograd.Variable._execution_engine
_current_task = torch._C._current_graph_task_id
_is_compiling = torch.compiler.is_dynamo_compiling


class Reducer(ReducerState):
    """Averages the gradients of some parameters over ranks, through the attached hook.

    Args:
        named_parameters: names and parameters that require grad.
        group: the group of the ranks.
        capacity_bytes: the capacity of a bucket.
        sparse: the names of parameters with sparse gradients.
        as_views: whether gradients stay in the buckets' memory, as views.
        should_sync: returns whether to average; called at the beginning of each backward.
        change_of_parameters: describes how the parameters have changed since, or returns None.
        in_join: returns whether ranks without inputs may take part in the step.
        on_step: called at the beginning (True) and the end of each step that is not traced.
        on_captured: called for each backward that compiled autograd captures.
        on_closed: called when all hooks are removed from the parameters.

    Attributes:
        device: the first parameter's device.
        change_of_parameters: as given.
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
        self._should_sync = should_sync
        self._in_join = in_join
        self._on_step = on_step
        self._on_captured = on_captured
        self._on_closed = on_closed
        self.change_of_parameters = change_of_parameters
        self.key = str(id(self))

        self._eager: EagerBackward | None = None  # if running
        self._compiled: CompiledBackward | None = None  # if running
        self._graph_step: GraphStep | None = None  # of compiled code, if running
        self._closes = False  # at the end of this backward
        self._memory_is_old = False  # buckets have the memory of this backward's hook
        self._begun_count = 0  # the number of backward passes so far
        self._capacity_bytes = capacity_bytes
        self._as_views = as_views
        self._buckets: list[BucketState] = []
        # By parameter name: its bucket, and its place there.
        self._places: dict[str, tuple[BucketState, int]] = {}
        self.parameters = ReducerParameters(named_parameters, sparse, self)
        self._arrivals = self.parameters.arrivals
        self.device = self.parameters.tensors[0].device
        self.token = torch.zeros(1, dtype=torch.float32, device="cpu")
        group.users[self.key] = self
        self._is_settled = False  # whether the buckets have their final form
        self._next_order: list[int] | None = None  # of the next buckets, if the ranks have agreed
        # The last parameters have the first gradients.
        self._expected_order = range(len(self.parameters) - 1, -1, -1)
        self._fill_buckets(self._expected_order)

    @property
    def attached(self) -> Attached | None:
        return self._attached

    @attached.setter
    def attached(self, attached: Attached | None) -> None:
        before, self._attached = self._attached, attached
        if before is not None and before.keeps_ranks_apart:
            self.parameters.all_are_own()
        if attached is not None:
            self._connect_hook(attached)
        if self._is_under_way():  # that backward continues with its own hook's memory
            self._memory_is_old = True
        else:
            self._prepare_memory()

    def _connect_hook(self, attached: Attached) -> None:
        attached.use_group(self.group, self.device)

    # ---- buckets ---------------------------------------------------------------------------------

    @skip_dynamo
    def _renew_memory(self) -> None:
        """Renew the memory after the backward in which another hook was attached."""
        self._memory_is_old = False
        self._prepare_memory()

    def _prepare_memory(self) -> None:
        """Let the hook ask for its memory of each bucket, outside of compilers."""
        attached = self._attached
        for bucket in self._buckets:
            bucket.memory = (
                None if attached is None else attached.memory_of(bucket.parameters, bucket.index)
            )

    def memory_loaded(self, buckets: list[list[str]]) -> None:
        """Use the buckets of a memory that was loaded, if it has the same parameters.

        Their dtypes may differ.

        Args:
            buckets: the names of the parameters in each bucket.
        """
        # By the memory's names, which are the model's own, also inside DDP.
        attached, parameters = self._attached, self.parameters
        names = (attached and attached.memory.names_of(parameters.tensors)) or []
        numbers = {name: number for number, name in enumerate(names)}
        is_same = sorted(numbers) == sorted(name for bucket in buckets for name in bucket)
        if self._is_under_way() or not is_same:
            self._prepare_memory()
            return
        assigned: list[list[int]] = []
        for bucket in buckets:
            members = [numbers[name] for name in bucket]
            kinds = split_by_kind(
                [parameters.tensors[i] for i in members], [parameters.sparse[i] for i in members]
            )
            assigned += [[members[place] for place in places] for places in kinds]
        self.keep_buckets()
        self._form(assigned)

    def keep_buckets(self) -> None:
        """Do not rebuild the buckets any more."""
        self._is_settled = True
        self._arrivals.stop_noting_order()

    def _fill_buckets(self, order: Sequence[int]) -> None:
        """Fill buckets with the parameters in an order of their numbers."""
        parameters, order = self.parameters, list(order)
        assigned = assign_buckets(
            [parameters.tensors[i] for i in order],
            [parameters.sparse[i] for i in order],
            self._capacity_bytes,
        )
        self._form([[order[place] for place in places] for places in assigned])

    def _form(self, assigned: Sequence[Sequence[int]]) -> None:
        """Form buckets of the parameters with these numbers."""
        parameters = self.parameters
        self._buckets = [
            BucketState(
                index,
                members,
                [parameters.tensors[i] for i in members],
                sparse=parameters.sparse[members[0]],
                as_views=self._as_views,
            )
            for index, members in enumerate(assigned)
        ]
        self._places.clear()
        bucket_of = [0] * len(parameters)
        for bucket in self._buckets:
            for place, number in enumerate(bucket.members):
                self._places[parameters.names[number]] = bucket, place
                bucket_of[number] = bucket.index
        self._prepare_memory()
        self.parameters.renew(self._ready_hook, bucket_of)

    def parameter_buckets(self) -> list[list[Tensor]]:
        return [list(bucket.parameters) for bucket in self._buckets]

    def buckets(self) -> list[list[str]]:
        """The names of each bucket's parameters."""
        return [[self.parameters.names[i] for i in bucket.members] for bucket in self._buckets]

    def shadow_step(self) -> None:
        """Take part in a step of the other ranks with zeros, and leave the gradients unchanged."""
        attached = self.attached
        if attached is None:
            self._reset()
            return
        self._eager = EagerBackward(self._begun_count)
        step = self._eager.step = self._step(attached)
        try:
            self._begin_step(step)
            attached.look_at_scale(in_join=True, has_joined=True)
            attached.choose()
            step.take_part_with_zeros()
            self._agree_on_order(attached)
        except BaseException as error:
            self._abort(step, error)
        self._step_ended()

    def close(self) -> None:
        """Remove the hooks from the parameters, and release these and the buckets' memory.

        A running backward is completed first.
        """
        if self._is_under_way():
            self._closes = True
        elif not self.is_closed:
            self.parameters.remove()
            self._reset()
            if not compiled_autograd.in_compiled_autograd_region:  # which still writes to them
                self._places.clear()
                self._buckets.clear()
            self._on_closed()

    @property
    def is_closed(self) -> bool:
        """Whether all hooks are removed from the parameters."""
        return self.parameters.are_removed

    def _is_under_way(self) -> bool:
        """Whether a backward has begun, and no exception has ended it."""
        if self._compiled is not None or self._graph_step is not None:
            return compiled_autograd.in_compiled_autograd_region
        return self._eager is not None and not self._eager.was_left(RunningBackward())

    # ---- an eager backward -----------------------------------------------------------------------

    @skip_dynamo
    def enter_backward(self) -> None:
        """Note the first gradient of a backward, or of another one nested in it or around it."""
        if compiled_autograd.in_compiled_autograd_region:
            raise RuntimeError(NOT_NESTED)
        task, eager = _current_task(), self._eager
        if eager is not None and task == eager.task:  # another of its threads was here before
            return
        running = RunningBackward()
        was_compiled = self._compiled is not None or self._graph_step is not None
        if was_compiled or (eager is not None and eager.was_left(running, task)):
            self._abandon()
            if self.is_closed:
                return
        eager = self._begin_eager() if self._eager is None else self._eager
        eager.enter(task, running)
        step = eager.step
        cpp = None if step is None else step.cpp
        self._arrivals.count_in_this_backward(step is not None, cpp)
        nested, number = running.is_nested, self._begun_count
        _engine.queue_callback(skip_dynamo(lambda: self._end_of_backward(nested, number)))

    def _begin_eager(self) -> EagerBackward:
        self._reset()  # other threads may have written to it, though they should not
        self._begun_count += 1
        # At once, so that another thread of this backward does not begin it again.
        eager = self._eager = EagerBackward(self._begun_count)
        attached = self._synchronising_hook()
        if attached is None:
            return eager
        step = eager.step = self._step(attached)
        self._begin_step(step)
        try:
            attached.look_at_scale(in_join=self._in_join())
            step.choose()
            step.run_in_cpp()
        except BaseException as error:
            self._abort(step, error)
        return eager

    @skip_dynamo
    def bucket_full(self, index: int) -> None:
        """Note the last gradient of a bucket."""
        self._buckets[index].pending = 0
        eager = self._eager
        step = None if eager is None else eager.step
        if eager is None or step is None:
            return
        try:
            step.start_full()
        except BaseException as error:
            if eager.number != self._begun_count:  # this is not the running backward
                raise RuntimeError(TWO_AT_ONCE) from error
            self._abort(step, error)

    @skip_dynamo
    def came_again(self, number: int) -> None:
        """Note a second gradient for a parameter of a full bucket."""
        step = None if self._eager is None else self._eager.step
        if step is not None and step.has_started(number):
            error = RuntimeError(
                f"torch_commhook: parameter '{self.parameters.names[number]}' got a gradient after "
                "its bucket had been sent; a parameter that is used in several segments of "
                "reentrant activation checkpointing needs "
                "torch.utils.checkpoint(..., use_reentrant=False)"
            )
            self._abort(step, error)

    @skip_dynamo
    def start_failed(self, error: BaseException) -> None:
        """Note that the C++ hook raised when it was started on a bucket."""
        step = None if self._eager is None else self._eager.step
        try:
            if step is not None:
                step.raise_known_cause(error)
        except TypeError as explained:
            error = explained
        self._abort(step, error)

    @skip_dynamo
    def _end_of_backward(self, nested: bool, number: int) -> None:
        if number != self._begun_count:
            raise RuntimeError(TWO_AT_ONCE)
        if self._eager is None:
            return
        missing = set(self._arrivals.missing())
        if nested and missing:
            return
        for bucket in self._buckets:
            bucket.set_arrived(missing)
        self._finish(self._eager.step)

    # ---- a backward of compiled autograd ---------------------------------------------------------

    def _ready_hook(self, name: str) -> Callable[[Tensor], None]:
        """The function that compiled autograd calls with a parameter once it has its gradient."""
        # By name: Dynamo makes variables of numbers that change with a hook's position in the list
        # of its hooks.
        reducer = self

        def ready(parameter: Tensor) -> None:
            if not _is_compiling() and not compiled_autograd.in_compiled_autograd_region:
                return  # C++ counts
            bucket, place = reducer._places[name]
            compiled = reducer._compiled
            if compiled is None:
                compiled = reducer._begin_compiled()
            bucket.arrived[place] = parameter
            bucket.pending -= 1
            if bucket.pending == 0 and compiled.step is not None:
                compiled.step.start_full()
            compiled.remaining -= 1
            if compiled.remaining == 0:
                reducer._end_of_compiled(compiled.step)

        return ready

    def _begin_compiled(self) -> CompiledBackward:
        expected = expected_hooks(self.key)
        if not expected:
            raise RuntimeError(NOT_NESTED)
        attached = self._synchronising_hook()
        step = None if attached is None else CompiledStep(attached, self)
        compiled = self._compiled = CompiledBackward(expected, step)
        return compiled

    def _end_of_compiled(self, step: CompiledStep | None) -> None:
        if step is not None and step.is_traced:
            step.finish()
        elif step is not None:
            step.finish_untraced()
        self._reset()

    @skip_dynamo
    def start_in_graph(self, index: int, gradients: list[Tensor], missing: list[int]) -> None:
        step = self._graph_step
        if step is None or index == 0:
            if self._attached is None or self.is_closed:
                raise ValueError("start_bucket: key must be that of a reducer with a hook")
            self._begun_count += 1
            step = self._graph_step = GraphStep(self._attached, self)
            self._begin_step(step)
        try:
            step.start_bucket(index, gradients, missing)
        except BaseException as error:
            self._abort(step, error)

    @skip_dynamo
    def finish_in_graph(self, gradients: list[Tensor]) -> None:
        step = self._graph_step
        if step is None:
            raise ValueError("finish_step: key must be that of a reducer whose step has begun")
        try:
            step.finish_into(gradients)
        except BaseException as error:
            self._abort(step, error)
        step.drop()
        if self._compiled is None:
            self._step_ended()
            return
        # Python goes on with this backward, and then resets what it counts by.
        step.reset()
        self._graph_step = None
        self._arrivals.reset()
        self._on_step(False)

    @skip_dynamo
    def before_capture(self) -> None:
        """Prepare for compiled autograd to capture a backward.

        Python sees no more of it: the compiler knows the hook's memory as tensors only.
        """
        under_way = self._eager, self._compiled, self._graph_step
        if any(each is not None for each in under_way):  # ended by an exception
            self._abandon()
        try:
            if self.attached is not None:
                self.attached.look_at_scale(in_join=self._in_join())
                self.attached.choose_before_capture()
            self._on_captured()
        except BaseException as error:  # the other ranks may begin the step
            raised = self.group.fail_with(error)
            if raised is error:
                raise
            raise raised from error

    # ---- the beginning and the end of any backward -----------------------------------------------

    def _synchronising_hook(self) -> Attached | None:
        """The hook on the backward that begins; None if it has nothing to do there."""
        attached = self.attached if self._should_sync() else None
        if attached is None or not attached.keeps_ranks_apart:
            return attached
        # After this backward each rank has its own gradients.
        if _is_compiling():
            note_backward(self.token, self.key)
        elif attached.local_steps is not None:
            attached.local_steps.note_backward()
        if not attached.bucket_hooks.is_empty:
            return attached
        if not _is_compiling():  # the gradients stay in their memory
            self._on_step(True)
        return None

    def _step(self, attached: Attached) -> EagerStep:
        return EagerStep(attached, self)

    def _begin_step(self, step: EagerStep) -> None:
        try:
            step.begin(self._on_step)
        except BaseException:
            self._reset()
            raise

    def _finish(self, step: EagerStep | None) -> None:
        """Finish after the last gradient: wait for the hooks and write their results."""
        if step is None:
            self._reset()
            return
        try:
            self._begin_step(step)
            step.finish()
            self._agree_on_order(step.attached)
        except BaseException as error:
            self._failed(step, error)
        # The ranks have agreed on the step: later errors concern this rank only.
        try:
            step.run_post_accumulate_hooks()
        finally:
            self._finished(step)

    def _failed(self, step: EagerStep, error: BaseException) -> None:
        """End the backward of a step that has failed, and raise; or repeat the step."""
        self._abort(step, error)

    def _finished(self, step: EagerStep) -> None:
        """Note that a step counts, and that this rank has written its results."""
        self._step_ended()

    def _agree_on_order(self, attached: Attached) -> None:
        """Agree on the order in which buckets are rebuilt, if they will be: that on rank 0.

        Not for hooks whose result depends on the parameters of a bucket: compiled code has another
        order.
        """
        # Ranks that are apart have no means to agree, and a rank that has joined does not know
        # whether the others' backward is compiled.
        is_fixed = attached.hook.is_lossy or attached.keeps_ranks_apart or self._in_join()
        if self._is_settled or self._compiled is not None or is_fixed:
            return
        if is_capturing(self.device):
            raise RuntimeError(
                "torch_commhook: a CUDA graph cannot capture the step after which buckets are "
                "rebuilt; run a few steps before the capture"
            )
        # Each parameter once; those without a gradient are last.
        order = list(dict.fromkeys([*self._arrivals.take_order(), *self._expected_order]))
        if self.group.size > 1:
            at = "cpu" if self.group.recovers else self.device
            agreed = torch.tensor(order, dtype=torch.int64, device=at)
            collectives.broadcast(agreed, group=self.group.group).wait()
            order = agreed.tolist()
        self._next_order = order

    def _step_ended(self) -> None:
        self._reset()
        self._on_step(False)
        order, self._next_order = self._next_order, None
        if order is not None and not self.is_closed:
            self.keep_buckets()
            self._fill_buckets(order)

    # ---- failure ---------------------------------------------------------------------------------

    def _abort(self, step: EagerStep | None, error: BaseException) -> NoReturn:
        """End this backward on all ranks, and raise."""
        try:
            if step is not None:
                step.drain(error)
        except BaseException as interrupt:  # the other ranks are still notified
            error = interrupt
        if step is None:
            raised = self.group.fail_with(error)
        else:
            raised = step.agreement.fail_with(error)
            step.drop()
        self._reset()
        raise raised

    def _abandon(self) -> None:
        """Forget a backward that an exception has ended."""
        step: EagerStep | None = self._graph_step
        if self._eager is not None:
            step = self._eager.step
        if step is not None:
            reason = "backward() was left by an exception"
            step.attached.second_stages.give_up(RuntimeError(reason))
            step.agreement.fail(reason)
        self._reset()

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        if self._eager is not None:
            self._eager.end()
        if self._memory_is_old:
            self._renew_memory()
        if not _is_compiling():
            self._arrivals.reset()
        # Last: another thread that begins meanwhile would be forgotten half way, while running.
        self._eager = self._compiled = self._graph_step = None
        if self._closes:
            self._closes = False
            self.close()
