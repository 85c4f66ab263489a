"""The file that ``commhook bench --out`` writes and ``commhook plan --link`` reads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from torch_commhook.planning.link import MeasuredLink

#: What the file says it is.
FORMAT = "commhook bench 1"
_KINDS = {"str": "a text", "int": "a whole number", "float": "a number"}


@dataclass(frozen=True)
class Message:
    """A message to each other rank, and one from each.

    Attributes:
        bytes: of each message.
        seconds: from the beginning until all have come, with a round trip on the CPU.
    """

    bytes: int
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """A collective of the backend.

    Attributes:
        name: such as ``all_reduce``.
        bytes: of its tensor; of all ranks' parts of it, where each rank has one.
        seconds: of the slowest rank.
    """

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CodecSpeed:
    """What encoding and decoding take on rank 0.

    Attributes:
        codec: with its arguments.
        ratio: bytes of float32 values to those of their message.
        encode_bytes_per_second: of float32 values.
        decode_bytes_per_second: of float32 values.
        encode_to_copy: the time of encoding to that of copying the values.
        decode_to_copy: the same for decoding.
    """

    codec: str
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float
    encode_to_copy: float
    decode_to_copy: float


@dataclass(frozen=True)
class HookTime:
    """A step with a hook, which computes next to nothing itself.

    Attributes:
        hook: as it is written.
        seconds: of a step, on the slowest rank.
        bytes: that each rank sends in a step; None where the hook does not tell.
        to_allreduce: the time to that with ``allreduce()``.
    """

    hook: str
    seconds: float
    bytes: float | None
    to_allreduce: float


_Entry = TypeVar("_Entry", Message, CollectiveTime, CodecSpeed, HookTime)


@dataclass(frozen=True)
class LinkFile:
    """What ``commhook bench`` has measured.

    Attributes:
        ranks: that took part.
        backend: of their group.
        device: of their tensors: ``cpu`` or ``cuda``.
        link: between them; None where it was not measured, as of one rank.
        messages: by size.
        collectives: by name and size.
        codecs: by name.
        hooks: in the order in which they were given.
        machine: of rank 0: versions, threads, what was measured, as the file shows them.
    """

    ranks: int
    backend: str
    device: str
    link: MeasuredLink | None = None
    messages: list[Message] = field(default_factory=list)
    collectives: list[CollectiveTime] = field(default_factory=list)
    codecs: list[CodecSpeed] = field(default_factory=list)
    hooks: list[HookTime] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The contents of the file, as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        Path(path).write_text(self.text(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LinkFile:
        """Read a file.

        Raises:
            ValueError: it cannot be read, or is no file of ``commhook bench``; the error says why.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{os.fspath(path)}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(_no_file(path, "it is no text")) from error
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(_no_file(path, f"it is no JSON ({error})")) from error
        except RecursionError as error:
            raise ValueError(_no_file(path, "it is nested too deeply")) from error
        try:
            return cls._of(found)
        except _WrongError as error:
            raise ValueError(_no_file(path, str(error))) from None

    @classmethod
    def _of(cls, found: object) -> LinkFile:
        document = _mapping(found, "it")
        if document.get("format") != FORMAT:
            said = json.dumps(document.get("format"))[:80]
            raise _WrongError(f"its format must be {json.dumps(FORMAT)}, got {said}")
        link = document.get("link")
        return cls(
            ranks=_value(document, "ranks", "int", "its "),
            backend=_value(document, "backend", "str", "its "),
            device=_value(document, "device", "str", "its "),
            link=None if link is None else _link(_mapping(link, "its link")),
            messages=_entries(document, "messages", Message),
            collectives=_entries(document, "collectives", CollectiveTime),
            codecs=_entries(document, "codecs", CodecSpeed),
            hooks=_entries(document, "hooks", HookTime),
            machine=dict(_mapping(document.get("machine", {}), "its machine")),
        )


class _WrongError(ValueError):
    """What is wrong in a file, in a sentence."""


def _no_file(path: str | os.PathLike[str], reason: str) -> str:
    return f"{os.fspath(path)} is no file of commhook bench --out: {reason}"


def _mapping(found: object, what: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise _WrongError(f"{what} must be an object, got {json.dumps(found)[:80]}")
    return found


def _value(document: Mapping[str, Any], name: str, kind: str, whose: str) -> Any:
    """A text, a whole number above 0, or a number of at least 0 that is finite.

    Args:
        document: an object.
        name: of the value in it.
        kind: a key of ``_KINDS``, followed by ``| None`` where there may be none.
        whose: begins the error.
    """
    found = document.get(name)
    kind, _, none = kind.partition(" | ")
    if none and name in document and found is None:
        return None
    if kind == "str":
        is_right = isinstance(found, str)
    elif isinstance(found, bool) or not isinstance(found, (int, float)):
        is_right = False
    elif kind == "int":
        is_right = isinstance(found, int) and found > 0
    else:
        is_right = 0 <= found <= sys.float_info.max
    if not is_right:
        got = "nothing" if name not in document else json.dumps(found)[:80]
        raise _WrongError(f"{whose}{name} must be {_KINDS[kind]}, got {got}")
    return float(found) if kind == "float" else found  # type: ignore[arg-type]


def _link(found: Mapping[str, Any]) -> MeasuredLink:
    names = [each.name for each in fields(MeasuredLink)]
    numbers = [_value(found, name, "float", "its link.") for name in names]
    try:
        return MeasuredLink(*numbers)
    except ValueError as error:
        raise _WrongError(f"its link is none ({error})") from error


def _entries(document: Mapping[str, Any], name: str, kind: type[_Entry]) -> list[_Entry]:
    found = document.get(name, [])
    if not isinstance(found, list):
        raise _WrongError(f"its {name} must be a list, got {json.dumps(found)[:80]}")
    entries = []
    for number, each in enumerate(found):
        whose = f"its {name}[{number}]"
        given = _mapping(each, whose)
        values = {
            part.name: _value(given, part.name, str(part.type), f"{whose}.")
            for part in fields(kind)
        }
        entries.append(kind(**values))
    return entries
