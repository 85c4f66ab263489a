"""What a model calls before its forward."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from torch_commhook.native.dynamo import left_to_python


class _Listener(Protocol):
    def before_forward(self, module: nn.Module) -> None:
        """The module's forward begins."""


class BeforeForward:
    """A forward pre-hook of the library's. A copy of the module is another one, with none."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener

    # Where the module's own call is not traced, this would be compiled by itself, with nothing that
    # tells when it must be compiled anew.
    @left_to_python
    def __call__(self, module: nn.Module, args: Any) -> None:
        self._listener.before_forward(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


def register_first(module: nn.Module, hook: BeforeForward) -> RemovableHandle:
    """Have a hook called before the forward pre-hooks that a module has already."""
    handle = module.register_forward_pre_hook(hook, prepend=True)
    # An OrderedDict that has been reordered keeps its old order for dict's own methods, by which
    # Dynamo of torch 2.11 tells hooks apart.
    hooks = module._forward_pre_hooks
    for number in list(hooks):
        hooks[number] = hooks.pop(number)
    return handle


def _nothing(module: nn.Module, args: Any) -> None:
    pass


def _get_nothing() -> Any:
    return _nothing
