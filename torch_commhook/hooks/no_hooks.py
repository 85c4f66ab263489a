"""What is given in place of a hook, or of a codec, by mistake; and what to write instead."""

from __future__ import annotations

from torch_commhook.codecs.base import CODECS, Codec
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.compressed import call_of_maker


def instead_of(value: object) -> str | None:
    """A sentence that says what to give in place of a value that is no hook.

    Args:
        value: what was given.

    Returns:
        None where nobody knows what was meant.
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
        value: what was given in place of a hook.
        op: what it was given to, for errors.

    Raises:
        TypeError: says what to give instead.
    """
    if isinstance(value, str) or (isinstance(value, type) and issubclass(value, Hook)):
        return  # of which check_hook says so
    instead = instead_of(value)
    if instead is not None:
        raise TypeError(f"{op}: {instead}")


def no_hook(value: object) -> str:
    """What errors name in place of a hook: its type, and what to give instead.

    Args:
        value: what was given.
    """
    instead = instead_of(value)
    more = "" if instead is None else f"; {instead}"
    return f"{type(value).__qualname__}{more}"
