"""Argument types for argparse: functions that convert an option's text or refuse it.

Each raises ``argparse.ArgumentTypeError`` with a message that names the contract and the text.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Value = TypeVar("_Value")
_Number = TypeVar("_Number", int, float)


def positive_int(text: str) -> int:
    """Convert to a whole number of at least 1."""
    value = number(text, int, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_float(text: str) -> float:
    """Convert to a finite number above 0."""
    value = number(text, float, "a number")
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0 and finite, got {text}")
    return value


def at_most(most: int, kind: Callable[[str], _Number]) -> Callable[[str], _Number]:
    """Make a type that converts by ``kind`` and refuses numbers above ``most``."""

    def read(text: str) -> _Number:
        value = kind(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text}")
        return value

    return read


def number_of(unit: str, least: float, most: float) -> Callable[[str], float]:
    """Make a type of numbers from ``least`` to ``most``; its errors name the unit."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be a number of {unit} from {least:g} to {most:.0f}, got {text!r}"
            )
        return value

    return read


def path(text: str) -> Path:
    """Convert to a path."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return Path(text)


def type_of(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Make a type from a function that raises ValueError; the error's text is the message."""

    def read(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def number(text: str, kind: Callable[[str], _Number], noun: str) -> _Number:
    """Convert by ``kind``; the error names the expected value by ``noun``."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {noun}, got {text!r}") from None
