"""The command line of ``plan``: its numbers, its model, its options."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import (
    MOST_THREADS,
    add_options,
    at_most,
    given_fields,
    number_of,
    option,
    path,
    positive_int,
    type_of,
)
from torch_commhook.cli.text_model import ByteTransformer
from torch_commhook.cli.train_config import MOST_RANKS, TrainConfig, is_no_hook
from torch_commhook.planning import BUCKET_CAPS_MB, LinkFile, MeasuredLink, Model, Parameter
from torch_commhook.planning.model import OPTIMIZERS, measure_step
from torch_commhook.wording import one_line

# ---- parses and formats the numbers of plan: 7B, 100 Gbit/s, 0.42 s ------------------------------


_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_MOST_COUNT = 10**13
# Bits per second.
_LEAST_RATE, _LARGEST_RATE = 1e3, 1e15


def parse_count(text: str) -> int:
    """Parse a number of elements, such as ``124M`` or ``7B``.

    Raises:
        ValueError: the text is no such number, or the number is not from 1 to 10 T.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmgbt]?)", text.strip().lower())
    count = round(float(match[1]) * _SUFFIXES[match[2]]) if match else 0
    if not 1 <= count <= _MOST_COUNT:
        raise ValueError(f"must be a number such as 124M or 7B, got {text!r}")
    return count


def parse_rate(text: str) -> float:
    """Parse a rate such as ``200mbit``, ``10 Gbit/s``, ``100G`` or ``1gbps`` to bits per second.

    Raises:
        ValueError: the text is no such rate, a rate in bytes (``1GB/s``), or not from 1 kbit/s to
            1000 Tbit/s.
    """
    match = re.fullmatch(
        r"([0-9]*\.?[0-9]+)\s*(?:([kmgt])|([kmgt]?)(?:bits?(?:/s|ps)?|bps|b/s))",
        re.sub(r"B(?=/|$)", "bytes", text.strip()).lower(),
    )
    rate = float(match[1]) * _SUFFIXES[match[2] or match[3] or ""] if match else 0.0
    if not _LEAST_RATE <= rate <= _LARGEST_RATE:
        raise ValueError(
            "must be a rate such as 200mbit, 10gbit or 100G, in bits, from 1 kbit/s to "
            f"1000 Tbit/s, got {text!r}"
        )
    return rate


def format_count(count: float) -> str:
    """Format a number of elements: ``7 B``, ``124.4 M``."""
    return _in_units(count, ("", " k", " M", " B", " T"))


def format_rate(bits_per_second: float) -> str:
    """Format a rate: ``100 Gbit/s``."""
    return _in_units(bits_per_second, (" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"))


def format_seconds(seconds: float) -> str:
    """Format a time for a table: ``1.90 s``, ``42.0 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def say_seconds(seconds: float) -> str:
    """Format a time for a sentence, with two digits: ``1.9 s``, ``0.42 s``, ``42 ms``."""
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    if seconds >= 0.0995:
        return f"{seconds:.{1 if seconds >= 0.995 else 2}f} s"
    return f"{seconds * 1e3:.{0 if seconds >= 9.95e-3 or not seconds else 1}f} ms"


def _in_units(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 999.95:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:.4g}{units[-1]}"


# ---- reads the model of plan, and measures a step of it ------------------------------------------


#: The attribute of a factory with the model's inputs, or with a function that makes them.
EXAMPLE_INPUTS = "example_inputs"
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = 10**13


class ModelError(ValueError):
    """A model can't be read, built or run. The message is one sentence."""


@dataclass(frozen=True)
class Subject:
    """A model to plan for.

    Attributes:
        model: the number of its parameters and, if known, their shapes.
        name: its name on the command line; None for a model of ``--model-size``.
        make: a function that makes the model with values; None if unknown.
        inputs: a function that makes the model's inputs; None if unknown.
    """

    model: Model
    name: str | None = None
    make: Callable[[], Any] | None = None
    inputs: Callable[[], Sequence[Any]] | None = None

    @property
    def is_runnable(self) -> bool:
        """Whether the model can be made and called, so that its step can be measured."""
        return self.make is not None and self.inputs is not None

    def compute_seconds(self, optimizer: str) -> float:
        """Measure the seconds of a runnable model's step on this machine, without communication.

        Raises:
            ModelError: the model fails when it is made or run.
        """
        assert self.make is not None and self.inputs is not None
        try:
            module = self.make()
            return measure_step(module, self.inputs(), optimizer)
        except Exception as error:  # a user's model may raise anything
            raise ModelError(
                f"a step of {self.name} can't be measured: {one_line(error)}"
            ) from error


def train_transformer() -> Subject:
    """The model of ``train``, with a batch of its default size."""
    config = TrainConfig()

    def make() -> nn.Module:
        return ByteTransformer(config.layers, config.dim, config.heads)

    def inputs() -> list[Tensor]:
        text = torch.zeros(config.batch, config.seq, dtype=torch.int64, device="cpu")
        return [text, text]

    with torch.device("meta"):
        return Subject(Model.of(make()), "train's transformer", make, inputs)


def model_of_factory(text: str, inputs: Sequence[Callable[[], Tensor]] | None) -> Subject:
    """The model that a function makes. It is built on the meta device, where it takes no memory.

    ``text`` names a function without arguments. Without ``inputs``, the model's are those of the
    function's attribute ``example_inputs``, if it has one.

    Raises:
        ModelError: there is no such function, it fails, or it returns no module with parameters.
    """
    make = _load_factory(text)
    try:
        with torch.device("meta"):
            module = make()
    except Exception as error:
        raise ModelError(
            f"{text} can't be built on the meta device, which has shapes and no values: "
            f"{one_line(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{text} must return a torch.nn.Module, got {type(module).__qualname__}")
    try:
        model = Model.of(module)
    except ValueError as error:
        raise ModelError(f"{text}: {error}") from error
    if inputs is not None:
        return Subject(model, text, make, lambda: [each() for each in inputs])
    example = getattr(make, EXAMPLE_INPUTS, None)
    return Subject(model, text, make, None if example is None else lambda: _listed(example))


def _listed(example: Any) -> list[Any]:
    found = example() if callable(example) else example
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _load_factory(text: str) -> Callable[[], Any]:
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise ModelError(f"{text!r} must be MODULE:FACTORY or FILE.py:FACTORY")
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ModelError(f"there is no file {place}")
    folder = os.getcwd()
    if not is_file and folder not in sys.path:  # unlike `python -m`
        sys.path.insert(0, folder)
    try:
        found = attrgetter(name)(_run_file(Path(place))) if is_file else resolve_name(text)
    except Exception as error:  # a user's module may raise anything
        raise ModelError(f"{text} can't be loaded: {one_line(error)}") from error
    if not callable(found):
        raise ModelError(f"{text} must be a function, got {type(found).__qualname__}")
    factory: Callable[[], Any] = found
    return factory


def _run_file(path: Path) -> ModuleType:
    name = f"_commhook_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up a class's module by name
    spec.loader.exec_module(module)
    return module


# ---- inputs --------------------------------------------------------------------------------------


def parse_input(text: str) -> Callable[[], Tensor]:
    """Parse an input such as ``8x3x224x224`` or ``4x128:int64``; returns a function that makes it.

    Its values are random for a floating or complex dtype. Otherwise they are zeros, which are valid
    indices of any embedding.

    Raises:
        ValueError: the text has no shape, or an unknown dtype.
    """
    shape_text, _, dtype_text = text.partition(":")
    shape = _shape_of(re.split(r"[x,]", shape_text))
    dtype = getattr(torch, dtype_text.removeprefix("torch.") or "float32", None)
    if shape is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"must be a shape such as 8x3x224x224 or 4x128:int64, got {text!r}")

    def make() -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, dtype=dtype, device="cpu")
        return torch.zeros(shape, dtype=dtype, device="cpu")

    return make


# ---- shapes --------------------------------------------------------------------------------------


def model_of_shapes(path: Path) -> Subject:
    """The model with the parameters in a file.

    The file is JSON or text. JSON is a list of shapes, a list of objects with a ``shape`` and a
    ``name``, or an object with such a list as ``parameters``. Text has a shape on each line, such
    as ``768x2304`` or ``768 2304``, after an optional name. A line may end with a comment (``#``).

    Raises:
        ModelError: the file can't be read, or has no such shapes.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} can't be read: {one_line(error)}") from error
    is_json = text.lstrip()[:1] in ("[", "{")
    parameters = _of_json(path, text) if is_json else _of_lines(path, text)
    elements = sum(each.numel for each in parameters)
    if not 1 <= elements <= _MOST_ELEMENTS:
        raise ModelError(
            f"{path} must list shapes of 1 to {_MOST_ELEMENTS:.0e} elements, got {elements}"
        )
    return Subject(Model.of_parameters(parameters), str(path))


def _of_json(path: Path, text: str) -> list[Parameter]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {one_line(error)}") from error
    if isinstance(document, dict):
        document = document.get("parameters")
    if not isinstance(document, list):
        raise ModelError(f"{path} must have a list of shapes, itself or as 'parameters'")
    found = []
    for number, each in enumerate(document):
        name, shape = None, each
        if isinstance(each, dict):
            name, shape = each.get("name"), each.get("shape")
        is_shape = isinstance(shape, list) and all(
            isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape
        )
        if not is_shape or len(shape) > _MOST_DIMENSIONS or not isinstance(name, (str, type(None))):
            raise ModelError(
                f"{path}: entry {number} must be a shape such as [768, 2304], or an object with "
                f"'shape' and 'name', got {json.dumps(each)[:100]}"
            )
        found.append(Parameter(tuple(shape), name))
    return found


def _of_lines(path: Path, text: str) -> list[Parameter]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(":", " ").split()
        if not words:
            continue
        name = None if re.fullmatch(r"[\d,x]+", words[0]) else words.pop(0)
        shape = _shape_of([size for word in words for size in re.split(r"[x,]", word) if size])
        if shape is None:
            raise ModelError(
                f"{path}, line {number}: must be a shape such as 768x2304, after an optional name, "
                f"got {line.strip()[:100]!r}"
            )
        found.append(Parameter(shape, name))
    return found


def _shape_of(sizes: Sequence[str]) -> tuple[int, ...] | None:
    if not 1 <= len(sizes) <= _MOST_DIMENSIONS:
        return None
    if not all(re.fullmatch(r"[0-9]{1,14}", size) for size in sizes):
        return None
    return tuple(map(int, sizes))


# ---- the command line of plan --------------------------------------------------------------------


_MOST_DELAY_MS = 3_600_000  # an hour: light takes minutes over the longest links
_MOST_COMPUTE_MS = 1_000_000_000  # 11 days
_MOST_CONNECTIONS = 16  # as attach takes

_ranks = at_most(MOST_RANKS, positive_int)


class LinkOption(NamedTuple):
    """The value of ``--link``: a rate, or the link and the path of a file of ``bench``."""

    link: MeasuredLink
    path: str | None = None
    file: LinkFile | None = None


def _link(text: str) -> LinkOption:
    """Read a rate, or a file of ``commhook bench``."""
    try:
        return LinkOption(MeasuredLink(parse_rate(text), 0.0))
    except ValueError as error:
        if not Path(text).exists() or Path(text).is_dir():
            raise argparse.ArgumentTypeError(
                f"{error}; or a file of commhook bench --out, and there is none of this name"
            ) from error
    file = type_of(LinkFile.read)(text)
    if file.link is None:
        why = "one rank has none" if file.ranks == 1 else "bench measured other --parts"
        raise argparse.ArgumentTypeError(f"{text} has no link: {why}")
    return LinkOption(file.link, text, file)


def _unless_none(text: str) -> str | None:
    return None if is_no_hook(text) else text


def _resharding(text: str) -> str:
    if text not in ("yes", "no") and not (text.isdecimal() and 2 <= int(text) <= MOST_RANKS):
        raise argparse.ArgumentTypeError(f"must be yes, no or a number from 2, got {text!r}")
    return text


def _as_train(name: str, default: Any = None, **settings: Any) -> Any:
    """A field with the option of ``train``, except for some of its settings."""
    shared = TrainConfig.__dataclass_fields__[name].metadata["option"]
    metadata = {"option": shared | settings, "group": "options"}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of ``plan``.

    Attributes:
        json: whether ``plan`` prints JSON.
    """

    model_size: int | None = option(
        type_of(parse_count),
        "number of parameters, such as 124M or 7B",
        group="model",
        metavar="N",
    )
    model: str | None = option(
        str,
        "function without arguments that makes the model, or FILE.py:FACTORY; plan builds the "
        "model on the meta device, where it takes no memory",
        group="model",
        metavar="MODULE:FACTORY",
    )
    shapes: Path | None = option(
        path,
        "file of the parameters' shapes: one on each line, after an optional name; or JSON",
        group="model",
        metavar="FILE",
    )
    input: tuple[Callable[[], Tensor], ...] | None = option(
        type_of(parse_input),
        "with --model: shapes of its inputs, such as 8x3x224x224 or 4x128:int64, to measure a step",
        shown="the factory's attribute example_inputs",
        nargs="+",
        metavar="SHAPE",
    )
    link: LinkOption = option(
        _link,
        "rate of each rank's link, each way, such as 200mbit or 100G; or a file of commhook bench "
        "--out, which gives the rate, the delay, and the hooks' computation if it has all --hooks",
        _link("1gbit"),
        shown="1gbit",
        metavar="RATE|FILE",
    )
    delay: float | None = option(
        number_of("milliseconds", 0, _MOST_DELAY_MS),
        "with ddp: delay of each message, one way, in ms; a round trip takes two delays",
        shown="that of the file, else 0",
        metavar="MS",
    )
    world: int | None = option(
        _ranks, "number of ranks, at least two", shown="that of the file, else 2"
    )
    nodes: int | None = option(
        _ranks,
        "with ddp: number of nodes, each with as many consecutive ranks; adds columns for a rank's "
        "messages, connections and round trips, and for the bytes that a node sends to others",
    )
    connections: int = option(
        at_most(_MOST_CONNECTIONS, positive_int),
        "with ddp: connections= of attach; plan counts them, but predicts the same times, because "
        "it assumes that one connection fills the link",
        1,
        metavar="N",
    )
    compute_ms: float | None = option(
        number_of("milliseconds", 0, _MOST_COMPUTE_MS),
        "time of a step without communication; by default plan measures it on this machine, for "
        "the model of train or for --model with its inputs",
        metavar="MS",
    )
    threads: int = option(at_most(MOST_THREADS, positive_int), "threads of a rank", 1)
    hooks: tuple[str, ...] | None = option(
        str,
        "hooks to compare, as train takes them; plan adds the plain all-reduce",
        nargs="+",
        metavar="HOOK",
    )
    optimizer: str = option(
        str,
        "optimizer of the training: error feedback on gradients of fewer than four bits hurts "
        "under AdamW",
        OPTIMIZERS[0],
        choices=OPTIMIZERS,
    )
    parallel: str = _as_train("parallel", "ddp")
    shards: int | None = _as_train("shards")
    shard_hook: str | None = _as_train("shard_hook", type=_unless_none)
    weights: str | None = _as_train("weights", type=_unless_none)
    bucket_cap_mb: tuple[float, ...] | None = _as_train(
        "bucket_cap_mb",
        type=number_of("MiB", 1e-3, 1e5),
        help=(
            "with ddp: sizes of the buckets, as those of train "
            f"({' '.join(f'{cap:g}' for cap in BUCKET_CAPS_MB)})"
        ),
    )
    reshard_after_forward: str = option(
        _resharding,
        "with fsdp and hsdp: whether the forward frees the parameters, so that the backward "
        "gathers them again; or over how many ranks they stay sharded in between",
        "yes",
        metavar="yes|no|RANKS",
    )
    inner_link: float | None = option(
        type_of(parse_rate),
        "rate of the links within a replica of hsdp, and among the RANKS of "
        "--reshard-after-forward",
        shown="that of --link",
    )
    plot: Path | None = option(
        path,
        "draw the time of a step over links of 10 Mbit/s to 100 Gbit/s",
        metavar="FILE.png",
    )
    json: bool = False


def parse_options(argv: Sequence[str]) -> PlanOptions:
    """Read the options of ``plan``; ends the process with one line and exit code 2 on an error."""
    parser = OneLineParser(
        prog="commhook plan",
        description=(
            "Recommend a hook for a link, and predict the time of a step with each hook. plan "
            "measures the hooks' computation on this machine, and counts their bytes. Without a "
            "model it takes the model of train."
        ),
    )
    model = parser.add_mutually_exclusive_group()
    add_options(parser, PlanOptions, groups={"options": parser, "model": model})
    parser.add_argument("--json", action="store_true", help="print JSON")
    return PlanOptions(**given_fields(vars(parser.parse_args(argv)), PlanOptions))
