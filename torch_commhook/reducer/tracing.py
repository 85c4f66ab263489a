"""The reducer's interface to compiled autograd."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._dynamo.external_utils import call_hook

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives import TracedFuture
from torch_commhook.hooks.base import Hook
from torch_commhook.metrics import TRACED_METER, from_text
from torch_commhook.native.dynamo import left_to_python
from torch_commhook.native.tensor_checks import check_flat, check_used
from torch_commhook.reducer.parameter_use import ParameterUse
from torch_commhook.reducer.parameters import ReducerParameters
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.hook_call import HookCall
from torch_commhook.step.step_group import StepGroup, groups_by_name


class TraceableReducer(Protocol):
    """The interface of a reducer for compiled code.

    Attributes:
        parameters: the parameters whose gradients are averaged.
        use: records which of these have got gradients.
        change_of_parameters: describes how the parameters have changed since, or returns None.
    """

    parameters: ReducerParameters
    use: ParameterUse
    change_of_parameters: Callable[[], str | None]

    @property
    def hooks(self) -> set[Callable[..., None]]:
        """The hooks on the parameters that compiled autograd calls."""

    @property
    def attached(self) -> Attached | None:
        """The hook."""


#: By key, for compiled code. Keys are text, since Dynamo makes variables of numbers that change.
reducers: weakref.WeakValueDictionary[str, TraceableReducer] = weakref.WeakValueDictionary()

# Compiled autograd calls hooks through this. Otherwise a graph break would compile it with the hook
# inside.
left_to_python(call_hook, with_callees=False)


@torch.compiler.assume_constant_result
def expected_hooks(key: str) -> int:
    """The number of a reducer's hooks that the compiled backward around this call will call.

    Compiled autograd collects the hooks of a backward before it runs it, and passes them to the
    function that it compiles. While that is traced, the result is a constant: another set of hooks
    is another function.

    Returns:
        The number; 0 outside of compiled autograd.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "runtime_wrapper" and "hooks" in frame.f_locals:
            own = reducers[key].hooks
            return sum(hook in own for hook in frame.f_locals["hooks"])
        frame = frame.f_back
    return 0


@torch.compiler.assume_constant_result
def parameters_changed(key: str) -> bool:
    """Whether a reducer's parameters have changed since its hook was attached.

    A constant: compiled code is for the parameters at the time of tracing.
    """
    return reducers[key].change_of_parameters() is not None


def start_traced(attached: Attached, bucket: GradBucket, where: str) -> HookCall:
    """Start a hook while a compiler traces; as :meth:`Attached.start`.

    Raises:
        TypeError: the hook returned neither a Future nor a tensor.
    """
    hook = attached.hook
    local = attached.stages.before(bucket, where)
    TRACED_METER.active = True
    try:
        if isinstance(hook, Hook):
            dtype = hook.result_dtype(bucket)
            result: Any = hook.average(bucket)
        else:
            dtype = bucket.dtype()
            result = hook(attached.state, bucket)
        traffic = TRACED_METER.traffic(bucket.numel(), bucket.dtype())
    finally:
        TRACED_METER.reset()
    if isinstance(result, Tensor):
        future = TracedFuture(lambda: result)
    elif isinstance(result, TracedFuture):
        future = result
    else:
        raise TypeError(
            f"{where}: a traced hook must return a tensor, or the result of a function in "
            f"torch_commhook.collectives, got {type(result).__qualname__}"
        )
    return HookCall(bucket, future, dtype, where, traffic, local)


# ---- steps ---------------------------------------------------------------------------------------
# Work that must happen once a step, compiled or not, is in operators that write to a tensor that
# outlives the step: compilers remove work without a visible effect.


def _group(op: str, name: str) -> StepGroup:
    group = groups_by_name.get(name)
    if group is None:
        raise ValueError(f"{op}: name must be that of a group that steps run over, got {name!r}")
    return group


def _reducer(op: str, key: str) -> TraceableReducer:
    reducer = reducers.get(key)
    if reducer is None:
        raise ValueError(f"{op}: key must be that of a reducer, got {key!r}")
    return reducer


@torch.library.custom_op("commhook::begin_step", mutates_args=("token",))
def begin_step(token: Tensor, name: str) -> None:
    """Run :meth:`StepGroup.begin` of the named group."""
    _group("begin_step", name).begin()


@torch.library.custom_op("commhook::leave_out", mutates_args=("used",))
def leave_out(used: Tensor, touched: Tensor, missing: list[int], needs_all: bool, key: str) -> None:
    """Run :meth:`ParameterUse.leave_out` of the reducer with a key.

    It reads the flags when the step runs, so that other flags need no other code.

    Args:
        used: one flag for each parameter, uint8. Written.
        touched: as :attr:`ParameterUse.touched`; a compiler knows the flags by it.
        missing: the numbers of parameters.
        needs_all: whether an unused parameter is an error.
        key: the reducer's key.

    Raises:
        TypeError, ValueError: tensors or numbers do not fit the reducer's parameters.
        RuntimeError: a parameter is not used, and ``needs_all`` is True.
    """
    reducer = _reducer("leave_out", key)
    check_used("leave_out", used, missing, "missing")
    check_flat("leave_out", "touched", touched, (torch.uint8,))
    count = len(reducer.parameters)
    if not len(used) == len(touched) == count:
        raise ValueError(
            f"leave_out: used and touched must have {count} elements, got {len(used)} and "
            f"{len(touched)}"
        )
    reducer.use.leave_out(used, touched, missing, needs_all=needs_all)


@torch.library.custom_op("commhook::commit_step", mutates_args=("used",))
def commit_step(used: Tensor, results: list[Tensor], name: str) -> None:
    """Run :meth:`StepGroup.commit` of the named group, once ``results`` are known."""
    group = _group("commit_step", name)
    check_flat("commit_step", "used", used, (torch.uint8,))
    group.commit(used)


@torch.library.custom_op("commhook::count_step", mutates_args=("token",))
def count_step(token: Tensor, results: list[Tensor], traffic: str, key: str) -> None:
    """Run :meth:`HookMemory.count_step` of the attached hook, once ``results`` are known.

    The traffic is this code's, in the form of :func:`torch_commhook.metrics.as_text`. If a hook's
    traffic changes from step to step, the code changes with it.
    """
    reducer = _reducer("count_step", key)
    attached = reducer.attached
    if attached is not None:
        buckets = from_text(traffic)
        attached.memory.count_step()
        for index, bucket in enumerate(buckets):
            attached.count_bucket(index, len(buckets), bucket, first=index == 0)


@torch.library.custom_op("commhook::note_backward", mutates_args=("token",))
def note_backward(token: Tensor, key: str) -> None:
    """Run :meth:`LocalSteps.note_backward` of the attached hook."""
    attached = _reducer("note_backward", key).attached
    if attached is not None and attached.local_steps is not None:
        attached.local_steps.note_backward()


@torch.library.custom_op("commhook::write_missing", mutates_args=("token",))
def write_missing(
    token: Tensor, used: Tensor, gradients: list[Tensor], numbers: list[int], key: str
) -> None:
    """Run :meth:`ReducerParameters.write_missing`.

    Whether a parameter without a gradient gets one depends on the other ranks, which no compiler
    can know. The compiled graph does not use these parameters, so the write may happen unseen.

    Raises:
        TypeError, ValueError: gradients or numbers do not fit the reducer's parameters.
    """
    parameters = _reducer("write_missing", key).parameters
    check_used("write_missing", used, numbers, "numbers")
    parameters.check_gradients("write_missing", numbers, gradients)
    parameters.write_missing(numbers, gradients, used)


@begin_step.register_fake
def _begin_step_fake(token: Tensor, name: str) -> None:
    return None


@leave_out.register_fake
def _leave_out_fake(
    used: Tensor, touched: Tensor, missing: list[int], needs_all: bool, key: str
) -> None:
    return None


@commit_step.register_fake
def _commit_step_fake(used: Tensor, results: list[Tensor], name: str) -> None:
    return None


@count_step.register_fake
def _count_step_fake(token: Tensor, results: list[Tensor], traffic: str, key: str) -> None:
    return None


@note_backward.register_fake
def _note_backward_fake(token: Tensor, key: str) -> None:
    return None


@write_missing.register_fake
def _write_missing_fake(
    token: Tensor, used: Tensor, gradients: list[Tensor], numbers: list[int], key: str
) -> None:
    return None
