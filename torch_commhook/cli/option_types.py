"""Options of commands: types of their texts, and dataclasses whose fields are options.

A type is a function that converts an option's text, or refuses it by
``argparse.ArgumentTypeError`` with a message that names the contract and the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

_Value = TypeVar("_Value")
_Number = TypeVar("_Number", int, float)


def positive_int(text: str) -> int:
    """Convert to a whole number of at least 1."""
    value = _number(text, int, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_float(text: str) -> float:
    """Convert to a finite number above 0."""
    value = _number(text, float, "a number")
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0 and finite, got {text}")
    return value


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Make a type of whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        value = _number(text, int, "a whole number")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {value}")
        return value

    return read


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


def some_of(names: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Make a type of names with commas between them; it returns them in the order of ``names``."""

    def read(text: str) -> tuple[str, ...]:
        chosen = [name.strip() for name in text.split(",")]
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, got {unknown[0]!r}")
        return tuple(name for name in names if name in chosen)

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


def _number(text: str, kind: Callable[[str], _Number], noun: str) -> _Number:
    """Convert by ``kind``; the error names the expected value by ``noun``."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {noun}, got {text!r}") from None


# ---- dataclasses whose fields are options --------------------------------------------------------


class OptionError(ValueError):
    """Options are wrong together. The message is one sentence that names one of them."""


@contextmanager
def of_option(name: str) -> Iterator[None]:
    """Turn each ValueError of the block into an OptionError that names the option."""
    try:
        yield
    except ValueError as error:
        raise OptionError(f"argument {name}: {error}") from error


def option(
    kind: Callable[[str], Any],
    text: str,
    default: Any = None,
    *,
    shown: str | None = None,
    group: str = "options",
    **settings: Any,
) -> Any:
    """A field of a dataclass that the command line can set.

    Args:
        kind: the type of the option's text.
        text: the help. The default in brackets follows it.
        default: the value without the option.
        shown: the default in the help, if its text differs.
        group: the title of the option's group in the help.
        settings: more keyword arguments of ``add_argument``.
    """
    if shown is None and default is not None:
        values = default if isinstance(default, tuple) else (default,)
        shown = " ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)
    settings |= {"type": kind, "help": text if shown is None else f"{text} ({shown})"}
    return dataclasses.field(default=default, metadata={"option": settings, "group": group})


def option_of(name: str) -> str:
    """The option that gives a field: ``--shard-hook`` for ``shard_hook``."""
    return "--" + name.replace("_", "-")


def add_options(
    parser: argparse.ArgumentParser,
    *owners: Any,
    groups: Mapping[str, argparse._ActionsContainer] | None = None,
) -> None:
    """Add the options of dataclasses. The namespace gets only those that the command line gives.

    The function takes the owners' own fields, without those of a base class. ``groups`` has groups
    of the parser by title; the function makes the others.
    """
    made = dict(groups or {})
    for owner in owners:
        for name in owner.__annotations__:
            field = owner.__dataclass_fields__[name]
            if "option" not in field.metadata:
                continue
            title = field.metadata["group"]
            if title not in made:
                made[title] = parser.add_argument_group(title)
            settings = field.metadata["option"]
            made[title].add_argument(option_of(name), default=argparse.SUPPRESS, **settings)


def given_fields(given: Mapping[str, Any], owner: Any) -> dict[str, Any]:
    """The options that the command line gives for the fields of a dataclass; lists as tuples."""
    return {
        each.name: tuple(value) if isinstance(value := given[each.name], list) else value
        for each in dataclasses.fields(owner)
        if each.name in given
    }


# ---- the options of commands that run on ranks ---------------------------------------------------


#: The most threads of a rank. Like other limits, it refuses what would only fail in the ranks.
MOST_THREADS = 1024

_communication = partial(option, group="communication")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """How ranks communicate.

    Attributes:
        notes: remarks to print before the run.
    """

    timeout: float = _communication(
        at_most(30 * 24 * 3600, positive_float), "timeout of a collective, in seconds", 300.0
    )
    device: str = _communication(
        str,
        "auto: CUDA if each rank of this machine has a GPU of its own, else the CPU",
        "auto",
        choices=("auto", "cpu", "cuda"),
    )
    backend: str = _communication(
        str, "auto: NCCL on CUDA, Gloo on the CPU", "auto", choices=("auto", "gloo", "nccl")
    )
    threads: int = _communication(
        at_most(MOST_THREADS, positive_int),
        "threads of a rank on the CPU",
        shown="cores // ranks",
    )
    notes: tuple[str, ...] = ()
