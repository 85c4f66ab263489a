"""Words for counts, errors and tables; errors of types; warnings at the user's line; old names."""

from __future__ import annotations

import abc
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any


def pluralize(number: int, noun: str) -> str:
    """``number`` with ``noun``, which gets an ``s`` unless the number is 1: ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """The type and the text of an error in one line; only the type if there is no text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def align_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, is_underlined: bool = False
) -> list[str]:
    """The lines of a table: the first column is aligned left, the others right.

    Args:
        header: the titles of the columns.
        rows: as many cells each as the header.
        is_underlined: whether a line of dashes follows the header.
    """
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if is_underlined:
        table.insert(1, ["-" * width for width in widths])
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def check_type(what: str, value: object, contract: str, *kinds: Any) -> None:
    """Refuse a value of another type than ``kinds``. A bool is no number.

    Args:
        what: the function and its argument, such as ``"clip: max_norm"``.
        value: the argument's value.
        contract: the types in words.
        kinds: the types.

    Raises:
        TypeError: names the argument, its contract and the value's type.
    """
    is_number = not isinstance(value, bool) or bool in kinds
    if not (is_number and isinstance(value, kinds)):
        kind = type(value)
        got = "None" if value is None else f"{kind.__module__}.{kind.__qualname__}"
        raise TypeError(f"{what} must be {contract}, got {got.removeprefix('builtins.')}")


_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the innermost frame outside the package.

    Python 3.12 has ``skip_file_prefixes`` for this.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(file: str) -> bool:
    import torch.utils._contextlib as decorators  # who asks for words may do without torch

    # Between the user's frame and ours: torch.inference_mode() as a decorator, and the statement of
    # an abstract class.
    between = decorators.__file__, abc.ABCMeta.__new__.__code__.co_filename
    return file.startswith(_PACKAGE) or file in between


def keep_old_method(cls: type, old: str, new: str) -> bool:
    """Let a class that defines a method by one name also have it by the other.

    The old name of a method that is defined by the new one gives a DeprecationWarning.

    Returns:
        Whether the class defines it by its old name only, as a user's subclass may.
    """
    own = vars(cls)
    is_old = old in own and new not in own
    if is_old:
        setattr(cls, new, own[old])
    elif new in own and old not in own:

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            warn_user(f"{cls.__name__}.{old} is deprecated: use {new}", DeprecationWarning)
            return own[new](self, *arguments, **named)

        setattr(cls, old, call)
    return is_old
