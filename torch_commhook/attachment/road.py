"""What attached hooks share: their roads, replicas, hooks on optimizers, and compared settings."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import re
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from torch_commhook import __version__, collectives
from torch_commhook.autograd.registration import is_inside
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.agreement import agree
from torch_commhook.hooks import __name__ as hooks_module
from torch_commhook.hooks.base import Hook
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.bucket_hooks import check_not_in_backward, is_in_backward
from torch_commhook.step.step_group import StepGroup, step_groups

if TYPE_CHECKING:  # it imports the compiler
    from torch_commhook.attachment.elastic import ElasticTraining

# ---- copies of a model that a hook keeps apart ---------------------------------------------------


class Replica:
    """This rank's copy of a model, with whole parameters.

    All ranks of an exchange must begin and end it at the same point.

    Args:
        model: returns the model, or None once it is freed.
        buckets: returns the parameters of each bucket.
        group: the ranks that have other copies of the same part.

    Attributes:
        group: as given.
        is_sharded: whether the copy is divided among ranks.
    """

    is_sharded = False

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        buckets: Callable[[], list[list[Tensor]]],
        group: StepGroup,
    ) -> None:
        self._model = model
        self._buckets = buckets
        self.group = group

    def references(self) -> list[Callable[[], Tensor | None]]:
        """Functions that return each parameter as optimizers have it, or None once it is freed."""
        return [TensorWeakRef(parameter) for bucket in self._buckets() for parameter in bucket]

    def find(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The existing parameters with these names, as the hook's memory has them."""
        every = self._named()
        return {name: every[name] for name in names if name in every}

    def _named(self) -> dict[str, Tensor]:
        model = self._model()
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return {} if inner is None else dict(inner.named_parameters())

    def drop_copies(self) -> None:
        """Drop copies that were made of the parameters, which are about to be written."""

    def begin(self) -> None:
        """Begin an exchange."""
        self.group.begin()

    def end(self) -> None:
        """End an exchange that succeeded on this rank, together with all ranks."""
        self.group.end()

    def fail_with(self, error: BaseException) -> BaseException:
        """Fail an exchange on all ranks; returns an error as :meth:`StepGroup.fail_with`."""
        return self.group.fail_with(error)

    def on_any_rank(self, value: bool) -> bool:
        """Whether ``value`` is True on any rank. All ranks must call this at the same point."""
        return is_on_any_rank(value, [self.group], self._buckets()[0][0].device)

    def share_failure(self, failure: BaseException | None) -> BaseException | None:
        """Share the outcome of a background exchange with the ranks of the same copy.

        Args:
            failure: the error of this rank's part; None if it succeeded.

        Returns:
            The error to raise: ``failure``, or a PeerError if another rank's part failed.

        Raises:
            BaseException: a rank left before all ranks knew the outcome. Call this again.
        """
        return failure  # this rank has the whole copy


def is_on_any_rank(value: bool, groups: Sequence[StepGroup], device: torch.device) -> bool:
    """Whether ``value`` is True on any rank of groups along the axes of a mesh.

    Args:
        value: this rank's value.
        groups: the groups. All their ranks must call this at the same point.
        device: the device of the tensors that the groups send.
    """
    for group in groups:
        own = torch.tensor([float(value)], dtype=torch.float32, device=device)
        total = collectives.all_reduce(own, group=group.group_for(device)).wait()
        value = bool(total.item())
    return value


# ---- the interface between an attached hook and the reducer that runs it -------------------------


class Road(ABC):
    """Runs the attached hook on a model's gradients.

    Each kind of reducer has a road: DDP's, our own, and ``fully_shard``'s.

    Attributes:
        model: returns the model, or None once it is freed.
        key: the key by which compiled code finds the road; it never changes.
        number: roads are made in this order, which is the same on all ranks.
        attached: the hook, or None.
        successor: the road that has replaced this one, or None.
        elastic: the ranks, if they come and go.
    """

    attached: Attached | None
    successor: Road | None = None
    elastic: ElasticTraining | None = None
    _numbers = itertools.count()

    def __init__(self, model: nn.Module, group: StepGroup) -> None:
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.key = str(id(self))
        self.number = next(self._numbers)
        self._group = group
        self._closed = False
        self._then: list[Callable[[], None]] = []

    @property
    def group(self) -> StepGroup:
        """The group through which the hook communicates."""
        return self._group

    def register(self) -> None:
        """Let other threads and compiled code find this road, which is complete."""
        self.group.users[self.key] = self

    @property
    def parents(self) -> Sequence[dist.ProcessGroup]:
        """The user's process groups that together reach all ranks of the model."""
        return [self.group.parent]

    @property
    def is_alive(self) -> bool:
        """Whether the model still exists and this road can run a hook."""
        return not self._closed and self.model() is not None

    @property
    def is_closing(self) -> bool:
        """Whether the hook was removed during a backward that is still running."""
        return False

    @abstractmethod
    def check_fits(self, attached: Attached) -> None:
        """Raise a TypeError or ValueError if this road cannot run the hook."""

    def agree(self, what: str, error: Exception | None, settings: dict[str, object]) -> None:
        """Raise on all ranks if one fails or settings differ; see :func:`agree`."""
        agree(self.group.parent, what, error, settings, self.group.all_alike)

    @abstractmethod
    def parameter_buckets(self) -> list[list[Tensor]]:
        """The parameters of each bucket, in order, as the hook's memory has them."""

    @property
    def replica(self) -> Replica:
        """This rank's copy of the model, for a hook that keeps ranks apart."""
        return Replica(self.model, self.parameter_buckets, self.group)

    @abstractmethod
    def memory_loaded(self, buckets: list[list[str]]) -> None:
        """Note that the hook's memory was loaded, with these names of parameters by bucket."""

    def after_backward(self, then: Callable[[], None]) -> None:
        """Call ``then`` once no backward of the last hook is running."""
        self._then.append(then)
        if not self._is_running:
            self._do_then()

    @property
    def _is_running(self) -> bool:
        """Whether a backward of the last hook is running."""
        return self.is_closing

    def _do_then(self) -> None:
        while self._then:
            self._then.pop()()

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager: gradients accumulate on each rank, without communication."""

    @abstractmethod
    def join(self) -> AbstractContextManager[Any]:
        """Return a context manager in which ranks may have different numbers of inputs."""


class _FirstRoad:
    """The attribute of a model that has had a hook. A copy of the model gets None."""

    def __init__(self, road: Road) -> None:
        self.road = road

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_ATTRIBUTE = "_commhook_road"


def keep_road(model: nn.Module, road: Road | None) -> None:
    """Let a model have its first road, or none."""
    if road is None:
        vars(model).pop(_ATTRIBUTE, None)
    else:
        road.register()
        vars(model)[_ATTRIBUTE] = _FirstRoad(road)


def first_road(model: nn.Module) -> Road | None:
    """The first road of a model that has had a hook, or None."""
    found = vars(model).get(_ATTRIBUTE)
    return None if found is None else found.road


def road_in_use(first: Road) -> Road:
    """The road that a model's hook uses at the moment: another may have replaced the first."""
    return first if first.successor is None else first.successor


# ---- hooks on all optimizers, while hooks are attached -------------------------------------------
#
# An optimizer reports its steps only to hooks, of one optimizer or of all. One hook refuses steps
# inside backward, and finds scalers that no attached hook knows: a scaler of mixed precision is
# among the callers of the optimizer's step(). Two more hooks, with local steps, count steps. An
# optimizer may consist of others, and step by their steps; only the outer step counts then.


_log = logging.getLogger(__name__)

_OPTIMIZER_FILE = register_optimizer_step_pre_hook.__code__.co_filename
#: The scaler's methods, one of which calls an optimizer's ``step()``.
_STEPS = frozenset(
    method.__code__
    for method in (GradScaler.step, getattr(GradScaler, "_maybe_opt_step", None))
    if method is not None
)
#: Functions between these and the optimizer's hooks: wrappers of ``step()``, such as a scheduler's.
_MOST_FRAMES = 16

_handles: list[RemovableHandle] = []
_counting_handles: list[RemovableHandle] = []
#: What counts optimizers' steps beside attached hooks, with the methods of LocalSteps for it.
_watches: list[Any] = []


class _Begun(threading.local):
    """The optimizers of this thread whose steps have begun and not ended, or have raised."""

    def __init__(self) -> None:
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []


_begun = _Begun()


def attached_hooks() -> list[tuple[nn.Module, Attached]]:
    """The models with hooks, and these hooks, in an order that is the same on all ranks."""
    users = [user for group in step_groups() for user in list(group.users.values())]
    roads = {user.number: user for user in users if isinstance(user, Road)}
    found = []
    for number in sorted(roads):
        model, attached = roads[number].model(), roads[number].attached
        if model is not None and attached is not None:
            found.append((model, attached))
    return found


def _local_steps() -> list[Any]:
    """The :class:`LocalSteps` of the attached hooks that have them, in order."""
    return [each.local_steps for _, each in attached_hooks() if each.local_steps is not None]


def _counters() -> list[Any]:
    """What counts the steps of optimizers."""
    return [*_local_steps(), *_watches]


def watch_optimizers(attached: Attached) -> None:
    """Watch the optimizers of an attached hook's parameters; local steps count their steps.

    A step inside backward, before the gradients are averaged, raises a RuntimeError. A scaler that
    the hook should know and does not gets one warning in the log. Local steps warn at the end of
    the process if the ranks' parameters differ.
    """
    attached.lacks_scaler = attached.minds_scale and not attached.follows_scale
    # Of a freed model with an attached hook.
    weakref.finalize(attached, stop_watching_optimizers).atexit = False
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_check_step))
    if attached.local_steps is None:
        return
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    _count_steps()


def _count_steps() -> None:
    if not _counting_handles:
        # Compilers must not trace when a rank sends messages.
        before, after = map(torch.compiler.disable, (_before_step, _after_step))
        _counting_handles.append(register_optimizer_step_pre_hook(before))
        _counting_handles.append(register_optimizer_step_post_hook(after))


def add_watch(watch: Any) -> None:
    """Let a watch count the steps of all optimizers."""
    _watches.append(watch)
    _count_steps()


def remove_watch(watch: Any) -> None:
    """Remove a watch that :func:`add_watch` has added, if it is still there."""
    if watch in _watches:
        _watches.remove(watch)
    stop_watching_optimizers()


@skip_dynamo
def stop_watching_optimizers() -> None:
    """Remove hooks from all optimizers, if no attached hook or watch needs them."""
    if is_inside(_OPTIMIZER_FILE):
        return  # the garbage collector calls this while an optimizer iterates over its hooks
    while _counting_handles and not _counters():
        _counting_handles.pop().remove()
    while _handles and not attached_hooks():
        _handles.pop().remove()


def _at_exit() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # an exception has ended the program; its traceback suffices
    for steps in _local_steps():
        steps.warn_if_apart("was still attached when the process ended,")


@skip_dynamo
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    in_backward = is_in_backward()
    # A compiler that traces step() would break its graph below.
    looks = not torch.compiler.is_dynamo_compiling() and any(
        each.lacks_scaler for _, each in attached_hooks()
    )
    if in_backward or (looks and _scaler_calls()):
        _check_owners(optimizer, in_backward)


@skip_dynamo
def _check_owners(optimizer: torch.optim.Optimizer, in_backward: bool) -> None:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for _, attached in attached_hooks():
        if not attached.memory.store.has_any_of(own):
            continue
        if in_backward:
            check_not_in_backward(attached.name)
        elif attached.lacks_scaler:
            attached.lacks_scaler = False
            attached.memory.jump_detector = None
            _log.warning(
                "hook '%s' was not told of the GradScaler that scales its gradients: %s; use "
                "attach(model, hook, scaler=scaler)",
                attached.name,
                "its error memory is in units of the old scale when the scale changes"
                if attached.keeps_error
                else "it clips by the norm of scaled gradients",
            )


# As torch.compiler.disable, without the import of the compiler: it cannot trace groups.
_check_owners._torchdynamo_disable = True  # type: ignore[attr-defined]


def _scaler_calls() -> bool:
    """Whether a scaler is calling the optimizer's step()."""
    frame: Any = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code in _STEPS:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


def _parameters_of(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _begun.optimizers.append(weakref.ref(optimizer))
    parameters = _parameters_of(optimizer)
    for steps in _counters():
        steps.before_optimizer_step(optimizer, parameters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = _parameters_of(optimizer)
    if _is_part_of_a_step(optimizer, parameters):
        return
    every = _counters()
    # A failed exchange must not keep others from counting.
    for steps in every:
        steps.count_optimizer_step(parameters)
    for steps in every:
        steps.after_optimizer_step(optimizer, parameters)


def _is_part_of_a_step(optimizer: torch.optim.Optimizer, parameters: frozenset[int]) -> bool:
    """Whether this step is part of the step of another optimizer with the same parameters."""
    others = [other for other in (ref() for ref in _begun.optimizers) if other is not None]
    others = [other for other in others if other is not optimizer and _is_stepping(other)]
    _begun.optimizers = [weakref.ref(other) for other in others]
    return any(not _parameters_of(other).isdisjoint(parameters) for other in others)


def _is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a method of the optimizer is on the call stack. A step that raised never ends."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
    return False


# ---- the parts of a hook that must be the same on all ranks --------------------------------------


#: The number of values in the messages whose lengths ranks compare.
_VALUES = (1, 1000)
_MOST_LEVELS = 6
#: Larger containers hold data or caches.
_MOST_ENTRIES = 100
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def printed_hook(hook: object) -> str:
    """The text of a hook that ranks compare.

    A hook of the library prints as its expression, and a user's :class:`Hook` with a ``__repr__``
    of its own by that, without addresses. Another callable may differ between ranks, but not in the
    library's hooks and codecs that it holds: in its attributes, its closure, its defaults, or as
    globals that it names.
    """
    if _is_printed(hook):
        return _ADDRESS.sub("", repr(hook))
    parts = [_ADDRESS.sub("", repr(part)) for part in _parts(hook)]
    return f"another with {', '.join(parts)}" if parts else "another"


def compared_settings(hook: object) -> dict[str, object]:
    """The settings of a hook that must be the same on all ranks, by name."""
    codecs = (part for part in _parts(hook, inside=True) if isinstance(part, Codec))
    forms = {f"{_ADDRESS.sub('', repr(each))}: {', '.join(_lengths(each))}" for each in codecs}
    return {
        "the version of torch_commhook": __version__,
        "the hook": printed_hook(hook),
        "the form of messages": sorted(forms),
    }


def _lengths(codec: Codec) -> list[str]:
    return [f"{numel} values in {codec.nbytes(numel)} bytes" for numel in _VALUES]


def _is_printed(value: object) -> bool:
    if type(value).__module__.startswith(hooks_module):
        return True
    without_settings = (Hook.__repr__, object.__repr__)  # the second shows an address
    return isinstance(value, Hook) and type(value).__repr__ not in without_settings


def _parts(value: object, *, inside: bool = False) -> Iterator[Hook | Codec]:
    """The hooks and codecs that a value holds, in the same order on all ranks.

    Args:
        value: a hook.
        inside: whether to continue inside hooks that print as their settings.
    """
    seen: set[int] = set()
    level = [value]
    for _ in range(_MOST_LEVELS):
        held: list[object] = []
        for each in level:
            if id(each) in seen:
                continue
            seen.add(id(each))
            is_part = isinstance(each, Codec) or (each is not value and _is_printed(each))
            if is_part and isinstance(each, (Hook, Codec)):
                yield each
            if not is_part or (inside and isinstance(each, Hook)):
                held += _held(each)
        level = held


def _held(value: object) -> list[object]:
    """The values that a callable, an object or a container holds."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *_by_name(value.keywords)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return _held_by_function(value)
    if isinstance(value, nn.Module):
        return []
    if isinstance(value, (list, tuple, dict)) and len(value) > _MOST_ENTRIES:
        return []
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return _by_name({key: each for key, each in value.items() if isinstance(key, str)})
    if isinstance(value, (Hook, Codec)) or (callable(value) and not isinstance(value, type)):
        return _by_name(getattr(value, "__dict__", {}))
    return []


def _held_by_function(function: FunctionType) -> list[object]:
    held: list[object] = [*(function.__defaults__ or ()), *_by_name(function.__kwdefaults__ or {})]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    # Of globals only hooks and codecs: functions would lead to other modules.
    found = (function.__globals__.get(name) for name in _names(function.__code__))
    return [*held, *(each for each in found if isinstance(each, (Hook, Codec)))]


def _names(code: CodeType) -> list[str]:
    """The globals that a function and the functions inside it name."""
    inside = (each for each in code.co_consts if isinstance(each, CodeType))
    return sorted({*code.co_names, *(name for each in inside for name in _names(each))})


def _by_name(values: Mapping[Any, Any]) -> list[object]:
    return [values[name] for name in sorted(values, key=str)]
