"""The file that ``commhook bench --out`` writes and ``commhook plan --link`` reads."""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torch_commhook.step.link import MeasuredLink

#: The file's ``format``.
FORMAT = "commhook bench 1"
_KINDS = {str: "a string", int: "a whole number", float: "a number"}


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
        """Write the file; raises OSError if that fails."""
        Path(path).write_text(self.text(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LinkFile:
        """Read a file.

        Raises:
            ValueError: the file cannot be read, or is not one of ``commhook bench``. The error has
                the reason.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{os.fspath(path)}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(_no_file(path, "it is not text")) from error
        except ValueError as error:
            raise ValueError(_no_file(path, f"it is not valid JSON ({error})")) from error
        except RecursionError as error:
            raise ValueError(_no_file(path, "it is nested too deeply")) from error
        try:
            if not isinstance(found, dict):
                raise _WrongError(f"it must be an object, got {_shown(found)}")
            if found.get("format") != FORMAT:
                said = _shown(found.get("format"))
                raise _WrongError(f"its format must be {json.dumps(FORMAT)}, got {said}")
            file: LinkFile = _object(found, cls, "its ")
            return file
        except _WrongError as error:
            raise ValueError(_no_file(path, str(error))) from None


class _WrongError(ValueError):
    """An error in a file's content. The text is one sentence."""


def _no_file(path: str | os.PathLike[str], reason: str) -> str:
    return f"{os.fspath(path)} is not a file of commhook bench --out: {reason}"


def _shown(found: object) -> str:
    return "nothing" if found is MISSING else json.dumps(found)[:80]


def _object(found: dict[str, Any], kind: Any, prefix: str) -> Any:
    """An object of a file, as one of the classes above.

    Raises _WrongError if a value is missing, or of another kind than the class's annotation. Errors
    begin with ``prefix``.
    """
    kinds = get_type_hints(kind)
    values = {}
    for part in fields(kind):
        value = found.get(part.name, MISSING)
        is_needed = part.default is MISSING and part.default_factory is MISSING
        if is_needed or value is not MISSING:
            values[part.name] = _value(value, kinds[part.name], f"{prefix}{part.name}")
    try:
        return kind(**values)
    except ValueError as error:
        raise _WrongError(f"{prefix.removesuffix('.')} is not valid ({error})") from error


def _value(found: Any, kind: Any, name: str) -> Any:
    """A value of an annotated type. Whole numbers are above 0, numbers finite and at least 0."""
    if get_origin(kind) is types.UnionType:  # with None
        return None if found is None else _value(found, get_args(kind)[0], name)
    if get_origin(kind) is list:
        if not isinstance(found, list):
            raise _WrongError(f"{name} must be a list, got {_shown(found)}")
        (kind,) = get_args(kind)
        return [_value(each, kind, f"{name}[{number}]") for number, each in enumerate(found)]
    if kind not in _KINDS:
        if not isinstance(found, dict):
            raise _WrongError(f"{name} must be an object, got {_shown(found)}")
        return _object(found, kind, f"{name}.") if is_dataclass(kind) else found
    if kind is str:
        is_right = isinstance(found, str)
    elif isinstance(found, bool) or not isinstance(found, (int, float)):
        is_right = False
    elif kind is int:
        is_right = isinstance(found, int) and found > 0
    else:
        is_right = 0 <= found <= sys.float_info.max
    if not is_right:
        raise _WrongError(f"{name} must be {_KINDS[kind]}, got {_shown(found)}")
    return float(found) if kind is float else found
