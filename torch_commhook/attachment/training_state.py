"""The state of a training, and what reports its steps: optimizers, and forward."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from torch_commhook.attachment.road import road_in_use, roads
from torch_commhook.autograd.registration import is_inside
from torch_commhook.elastic import joining
from torch_commhook.elastic.joining import Pieces, groups_of, load_groups, load_states
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.native.runtime import left_to_python
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.stages import check_not_in_backward, is_in_backward

if TYPE_CHECKING:  # it imports the compiler
    from torch_commhook.reducer.reducer import Reducer


# ---- the library's forward pre-hook, which a model calls before its forward ----------------------


class _Listener(Protocol):
    def before_forward(self, module: nn.Module) -> None:
        """Called when the module's forward begins."""


class BeforeForward:
    """A forward pre-hook of the library. A copy of the module gets an empty one."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener

    # If the module's own call is not traced, Dynamo would compile this alone, without guards that
    # recompile it when needed.
    @left_to_python
    def __call__(self, module: nn.Module, args: Any) -> None:
        self._listener.before_forward(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


def register_first(module: nn.Module, hook: BeforeForward) -> RemovableHandle:
    """Register a hook that runs before the module's existing forward pre-hooks."""
    handle = module.register_forward_pre_hook(hook, prepend=True)
    # After reordering, an OrderedDict keeps the old order for dict's own methods. Dynamo of torch
    # 2.11 uses these to tell hooks apart.
    hooks = module._forward_pre_hooks
    for number in list(hooks):
        hooks[number] = hooks.pop(number)
    return handle


def _nothing(module: nn.Module, args: Any) -> None:
    pass


def _get_nothing() -> Any:
    return _nothing


# ---- hooks on all optimizers, while hooks are attached -------------------------------------------
#
# An optimizer reports its steps only to hooks, of one optimizer or of all. One hook refuses steps
# inside backward, and finds scalers that no attached hook knows: a scaler of mixed precision is
# among the callers of the optimizer's step(). This costs a few microseconds per step. Two more
# hooks, with local steps, count steps. An optimizer may consist of others, and step by their steps;
# only the outer step counts then.


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


class _Begun(threading.local):
    """The optimizers of this thread whose steps have begun and not ended, or have raised."""

    def __init__(self) -> None:
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []


_begun = _Begun()


def _attached() -> list[Attached]:
    """The attached hooks, in an order that is the same on all ranks."""
    models = [reference() for reference in roads.keyrefs()]  # other threads may attach hooks
    found = [roads.get(model) for model in models if model is not None]
    hooks = [road_in_use(first).attached for first in found if first is not None]
    return [attached for attached in hooks if attached is not None]


def _local_steps() -> list[Any]:
    """The :class:`LocalSteps` of the attached hooks that have them, in order."""
    return [each.local_steps for each in _attached() if each.local_steps is not None]


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
    if not _counting_handles:
        # Compilers must not trace when a rank sends messages.
        before, after = map(torch.compiler.disable, (_before_step, _after_step))
        _counting_handles.append(register_optimizer_step_pre_hook(before))
        _counting_handles.append(register_optimizer_step_post_hook(after))


@left_to_python
def stop_watching_optimizers() -> None:
    """Remove hooks from all optimizers, if no attached hook needs them."""
    if is_inside(_OPTIMIZER_FILE):
        return  # the garbage collector calls this while an optimizer iterates over its hooks
    while _counting_handles and not _local_steps():
        _counting_handles.pop().remove()
    while _handles and not _attached():
        _handles.pop().remove()


def _at_exit() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # an exception has ended the program; its traceback suffices
    for steps in _local_steps():
        steps.warn_if_apart("was still attached when the process ended,")


@left_to_python
def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    in_backward = is_in_backward()
    # A compiler that traces step() would break its graph below.
    looks = not torch.compiler.is_compiling() and any(each.lacks_scaler for each in _attached())
    if not in_backward and not (looks and _scaler_calls()):
        return
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for attached in _attached():
        if not attached.memory.store.has_any_of(own):
            continue
        if in_backward:
            check_not_in_backward(attached.name)
        elif attached.lacks_scaler:
            attached.lacks_scaler = False
            attached.memory.jump_watch = None
            _log.warning(
                "hook '%s' was not told of the GradScaler that scales its gradients: %s; use "
                "attach(model, hook, scaler=scaler)",
                attached.name,
                "its error memory is in units of the old scale when the scale changes"
                if attached.keeps_error
                else "it clips by the norm of scaled gradients",
            )


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
    for steps in _local_steps():
        steps.before_optimizer_step(optimizer, parameters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = _parameters_of(optimizer)
    if _is_part_of_a_step(optimizer, parameters):
        return
    every = _local_steps()
    # A failed exchange must not keep others from counting.
    for steps in every:
        steps.count_optimizer_step(parameters)
    for steps in every:
        steps.after_optimizer_step(parameters)


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


# ---- the state of a training, which a rank receives when it joins --------------------------------


#: If an optimizer has any of these hooks, its ``state_dict()`` may differ from its state.
_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class TrainingState:
    """Reads the state of a training on a donor, and writes it on a new rank.

    Args:
        model: the model that is trained. Only a weak reference is kept.
        objects: optimizers, schedulers and other objects with ``state_dict``, from
            ``Elastic(state=)``.
        ranks: the ranks of the training. Their counters are part of the state.
        attached: returns the hook that is attached now.
        printed_hook: the initial :attr:`printed_hook`.

    Attributes:
        printed_hook: the text of the hook that is attached now, with its settings.
    """

    def __init__(
        self,
        model: nn.Module,
        objects: Sequence[Any],
        ranks: ElasticRanks,
        attached: Callable[[], Attached],
        printed_hook: str,
    ) -> None:
        self._weak = weakref.ref(model)
        self._objects = objects
        self._ranks = ranks
        self._attached = attached
        self.printed_hook = printed_hook

    @property
    def _model(self) -> nn.Module:
        model = self._weak()
        assert model is not None
        return model

    @property
    def is_large(self) -> bool:
        """Whether new ranks get the parameters in pieces."""
        return sum(each.nbytes for each in self._model.parameters()) > joining.AT_ONCE

    @property
    def nbytes(self) -> int:
        """The bytes of the model's parameters and buffers."""
        return sum(each.nbytes for each in self._tensors().values())

    def pieces(self) -> Pieces:
        """The parameters and the optimizers' state for them, in pieces."""
        return Pieces(list(self._model.parameters()), self._optimizers)

    @property
    def _others_than_optimizers(self) -> list[Any]:
        optimizers = self._optimizers
        return [each for each in self._objects if each not in optimizers]

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose state can be sent in pieces."""
        plain = torch.optim.Optimizer
        return [
            each
            for each in self._objects
            if isinstance(each, plain)
            and type(each).state_dict is plain.state_dict
            and type(each).load_state_dict is plain.load_state_dict
            and not any(getattr(each, hooks) for hooks in _STATE_HOOKS)
        ]

    def whole(self) -> dict[str, Any]:
        """The whole state for a new rank."""
        return {
            **self._counters(),
            "tensors": {name: tensor.detach() for name, tensor in self._tensors().items()},
            "objects": [each.state_dict() for each in self._objects],
        }

    def head(self) -> dict[str, Any]:
        """The part of the state that a new rank needs before the first piece."""
        return {**self._counters(), **self.rest()}

    def rest(self) -> dict[str, Any]:
        """The part of the state that is not in pieces.

        It contains buffers, other objects and the optimizers' settings.
        """
        return {
            "tensors": dict(self._model.named_buffers()),
            "objects": [each.state_dict() for each in self._others_than_optimizers],
            "groups": [groups_of(each) for each in self._optimizers],
            "of_no_parameter": self.pieces().others(),
        }

    def _counters(self) -> dict[str, Any]:
        memory, local_steps = self._attached().memory, self._attached().local_steps
        return {
            "steps": self._ranks.steps,
            "trained": self._ranks.trained,
            "printed_hook": self.printed_hook,
            "place": None if local_steps is None else local_steps.place(),
            "hook": None if memory.remembers_nothing else _without_own(memory.state_dict()),
        }

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def load(self, state: dict[str, Any], reducer: Reducer) -> None:
        """Write a donor's :meth:`whole` or :meth:`head` into the model, the objects and the hook.

        Raises:
            RuntimeError: the other ranks attached another hook while this rank waited.
        """
        if state["printed_hook"] != self.printed_hook:
            raise RuntimeError(
                f"attach: the hook must be the same on all ranks: this one has "
                f"{self.printed_hook}, the others have {state['printed_hook']}"
            )
        self._load_tensors(state)
        attached = self._attached()
        if state["hook"] is not None:
            memory = attached.memory
            memory.load_state(memory.check_state(_of_new_rank(state["hook"], memory)))
            reducer.memory_loaded(state["hook"]["buckets"])
        if attached.local_steps is not None:
            attached.local_steps.begin_at(state["place"])
        self._ranks.steps, self._ranks.trained = state["steps"], state["trained"]

    def load_rest(self, state: dict[str, Any]) -> None:
        """Write a donor's :meth:`rest` into the model and the objects.

        Raises:
            ValueError: the state does not fit this rank's model or objects.
        """
        try:
            self._load_tensors(state)
        except RuntimeError as error:  # callers take a RuntimeError for a closed connection
            raise ValueError(
                f"Elastic: another rank's state does not fit this one: {error}"
            ) from error

    def _load_tensors(self, state: dict[str, Any]) -> None:
        own = self._tensors()
        with torch.no_grad():
            for name, tensor in state["tensors"].items():
                own[name].copy_(tensor)
        if "groups" in state:
            load_states(self._others_than_optimizers, state["objects"])
            for optimizer, groups in zip(self._optimizers, state["groups"], strict=True):
                load_groups(optimizer, groups)
            self.pieces().put_others(state["of_no_parameter"])
        else:
            load_states(self._objects, state["objects"])


def _without_own(state: dict[str, Any]) -> dict[str, Any]:
    """A rank's state of the hook, with one number in place of each of the rank's own tensors."""
    (own,) = [key for key in state if key.startswith("rank")]
    return {
        **state,
        own: {
            kind: {
                name: torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
                for name, tensor in tensors.items()
            }
            for kind, tensors in state[own].items()
        },
    }


def _of_new_rank(state: dict[str, Any], memory: HookMemory) -> dict[str, Any]:
    """The state of the hook for a new rank, from another rank's: its own tensors are zeros."""
    (other,) = [key for key in state if key.startswith("rank")]
    zeros = {
        kind: {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
            for name, tensor in tensors.items()
        }
        for kind, tensors in state.pop(other).items()
    }
    rank, world_size = memory.place
    return {**state, "world_size": world_size, f"rank{rank}": zeros}
