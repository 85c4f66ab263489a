"""Autograd hooks in C++."""

from __future__ import annotations

from typing import Any

import torch

from torch_commhook import _C


class cpp:  # noqa: N801 (named and written as hooks.cpp)
    """A hook that is written in C++ and registered by name, for the functions of this module.

    It runs without the GIL. Under compiled autograd it interrupts the compiled graph.
    :func:`torch_commhook.load_cpp_hooks` loads such hooks; ``docs/cpp_hooks.md`` explains how to
    write one. The object may also be called like a Python hook of its kind.

    Args:
        name: the hook's name.
        options: the hook's options, checked against its registration.

    Raises:
        ValueError: there is no such hook, or an option breaks the hook's own rule.
        TypeError: an option is unknown, missing, or of another type.
        RuntimeError: the hook's factory threw it.

    Example:
        >>> autograd.cpp("no_such_hook")
        Traceback (most recent call last):
            ...
        ValueError: cpp: there is no autograd hook 'no_such_hook' in C++, ...
    """

    def __init__(self, name: str, /, **options: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"cpp: name must be a str, got {_C.type_name(name)}")
        self.native = _C.CppAutogradHook(name, options)

    @property
    def kind(self) -> str:
        """Return ``tensor``, ``prehook``, ``posthook`` or ``post_accumulate``."""
        return self.native.kind

    @torch._disable_dynamo
    def __call__(self, value: Any, *others: Any) -> Any:
        hook = _C.AutogradHook(self, None, "", self.native, None, self.kind)
        several = self.kind in ("prehook", "posthook")
        values = list(value) if several else [value]
        results = _C.call_autograd_hooks(
            [hook], self.kind, values, list(others[0]) if others else []
        )
        if self.kind == "post_accumulate":
            return None
        return tuple(results) if several else results[0]

    def __repr__(self) -> str:
        return self.native.name
