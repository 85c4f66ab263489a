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

#: The file's ``format``.
FORMAT = "commhook bench 1"
_KINDS = {"str": "a string", "int": "a whole number", "float": "a number"}


@dataclass(frozen=True)
class Message:
    """An exchange of messages: each rank sends one to each other rank.

    Attributes:
        bytes: the bytes of each message.
        seconds: the time until all have arrived; on the CPU it contains a round trip.
    """

    bytes: int
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """A collective of the backend.

    Attributes:
        name: the name, such as ``all_reduce``.
        bytes: the bytes of its tensor; if each rank has a part of the tensor, of all parts.
        seconds: the time of the slowest rank.
    """

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CodecSpeed:
    """The speed of a codec on rank 0.

    Attributes:
        codec: the codec with its arguments.
        ratio: the bytes of float32 values, divided by the bytes of their message.
        encode_bytes_per_second: the bytes of float32 values that it encodes in a second.
        decode_bytes_per_second: the bytes of float32 values that it decodes in a second.
        encode_to_copy: the time of encoding, divided by that of copying the values.
        decode_to_copy: the time of decoding, divided by that of copying the values.
    """

    codec: str
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float
    encode_to_copy: float
    decode_to_copy: float


@dataclass(frozen=True)
class HookTime:
    """The time of a step with a hook. The step itself computes almost nothing.

    Attributes:
        hook: the hook's text.
        seconds: the time of a step on the slowest rank.
        bytes: the bytes that each rank sends in a step; None if they are unknown.
        to_allreduce: the time of a step, divided by that with ``allreduce()``.
    """

    hook: str
    seconds: float
    bytes: float | None
    to_allreduce: float


_Entry = TypeVar("_Entry", Message, CollectiveTime, CodecSpeed, HookTime)


@dataclass(frozen=True)
class LinkFile:
    """The measurements of ``commhook bench``.

    Attributes:
        ranks: the number of ranks.
        backend: the backend of their group.
        device: the device of their tensors: ``cpu`` or ``cuda``.
        link: the link between them; None if it was not measured, as with one rank.
        messages: exchanges of messages, by size.
        collectives: times of collectives, by name and size.
        codecs: speeds of codecs, by name.
        hooks: times of steps, in the order of the given hooks.
        machine: facts about rank 0's machine and the run, such as versions and threads.
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
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.text(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LinkFile:
        """Read a file.

        Raises:
            ValueError: the file cannot be read, or is not one of ``commhook bench``. The error has
                the reason.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{os.fspath(path)}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(_no_file(path, "it is not text")) from error
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(_no_file(path, f"it is not valid JSON ({error})")) from error
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
    """An error in a file's content. The text is one sentence."""


def _no_file(path: str | os.PathLike[str], reason: str) -> str:
    return f"{os.fspath(path)} is not a file of commhook bench --out: {reason}"


def _mapping(found: object, name: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise _WrongError(f"{name} must be an object, got {json.dumps(found)[:80]}")
    return found


def _value(document: Mapping[str, Any], name: str, kind: str, prefix: str) -> Any:
    """A value of an object: a string, a whole number above 0, or a finite number of at least 0.

    Args:
        document: the object.
        name: the value's key.
        kind: a key of ``_KINDS``, followed by ``| None`` if null is allowed.
        prefix: the beginning of an error's text.

    Raises:
        _WrongError: the value is missing, or of another kind.
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
        raise _WrongError(f"{prefix}{name} must be {_KINDS[kind]}, got {got}")
    return float(found) if kind == "float" else found  # type: ignore[arg-type]


def _link(found: Mapping[str, Any]) -> MeasuredLink:
    names = [each.name for each in fields(MeasuredLink)]
    numbers = [_value(found, name, "float", "its link.") for name in names]
    try:
        return MeasuredLink(*numbers)
    except ValueError as error:
        raise _WrongError(f"its link is not valid ({error})") from error


def _entries(document: Mapping[str, Any], name: str, kind: type[_Entry]) -> list[_Entry]:
    found = document.get(name, [])
    if not isinstance(found, list):
        raise _WrongError(f"its {name} must be a list, got {json.dumps(found)[:80]}")
    entries = []
    for number, each in enumerate(found):
        prefix = f"its {name}[{number}]"
        given = _mapping(each, prefix)
        values = {
            part.name: _value(given, part.name, str(part.type), f"{prefix}.")
            for part in fields(kind)
        }
        entries.append(kind(**values))
    return entries
