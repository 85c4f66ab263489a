"""The library's forward pre-hook, which a model calls before its forward."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from torch_commhook.native.dynamo import left_to_python


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
