"""Errors for values that are not hooks, with the expression to use instead."""

from __future__ import annotations

from torch_commhook.codecs.base import CODECS, Codec
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.compressed import call_of_maker


def instead_of(value: object) -> str | None:
    """A sentence that names the hook to use instead of a value that is not a hook.

    Args:
        value: the value.

    Returns:
        None if the value suggests no hook.
    """
    cls = value if isinstance(value, type) else type(value)
    if issubclass(cls, Codec):
        call = f"{cls.__name__}(...)" if cls is value else repr(value)
        has_hook = CODECS.get(cls.__name__) is cls
        use = f"hooks.{call}" if has_hook else f"hooks.compressed({call})"
        return f"a codec is no hook; use {use}"
    made_by = call_of_maker(value)
    if made_by is not None:
        name = made_by.partition("(")[0]
        return f"hooks.{name} makes a hook; call it: hooks.{made_by}"
    if isinstance(value, type) and issubclass(value, Hook):
        return f"{value.__name__} is a class of hooks; call it: {value.__name__}(...)"
    if isinstance(value, str):
        return "torch_commhook.parse_hook reads a hook that is written as text"
    return None


def check_is_hook(value: object, op: str) -> None:
    """Refuse a codec, and a function of the library that makes a hook.

    Args:
        value: the value in the place of a hook.
        op: the function or class that got it, for errors.

    Raises:
        TypeError: names the hook to use instead.
    """
    if isinstance(value, str) or (isinstance(value, type) and issubclass(value, Hook)):
        return  # check_hook refuses these
    instead = instead_of(value)
    if instead is not None:
        raise TypeError(f"{op}: {instead}")


def no_hook(value: object) -> str:
    """The type of a value that is not a hook, and the hook to use instead, for errors.

    Args:
        value: the value.
    """
    instead = instead_of(value)
    more = "" if instead is None else f"; {instead}"
    return f"{type(value).__qualname__}{more}"
