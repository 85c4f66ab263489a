"""The parts of a hook that must be the same on all ranks, as texts that the ranks compare."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from torch_commhook import __version__
from torch_commhook.codecs.base import Codec
from torch_commhook.hooks import __name__ as hooks_module
from torch_commhook.hooks.base import Hook

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
