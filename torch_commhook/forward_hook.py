"""What a model calls before its forward."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class _Listener(Protocol):
    def before_forward(self, module: nn.Module) -> None:
        """The module's forward begins."""


class BeforeForward:
    """A forward pre-hook of the library's. A copy of the module is another one, with none."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._listener.before_forward(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


def _nothing(module: nn.Module, args: Any) -> None:
    pass


def _get_nothing() -> Any:
    return _nothing
