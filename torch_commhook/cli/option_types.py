"""Types of options: what argparse calls with their texts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def positive_int(text: str) -> int:
    """A whole number from 1 on."""
    value = number(text, int, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = number(text, float, "a number")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0 and finite, got {text}")
    return value


def at_most(most: int, kind: Callable[[str], _Number]) -> Callable[[str], _Number]:
    """A type of numbers of ``kind`` that are no larger than ``most``."""

    def read(text: str) -> _Number:
        value = kind(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text}")
        return value

    return read


def number(text: str, kind: Callable[[str], _Number], what: str) -> _Number:
    """A number of ``kind``, which errors call ``what``."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None
