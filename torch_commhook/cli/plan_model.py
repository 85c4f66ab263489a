"""Reads the model of ``plan``, and measures a step of it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torch_commhook.cli.formatting import one_line
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.transformer import ByteTransformer
from torch_commhook.planning import Model, Parameter
from torch_commhook.planning.computing import measure_step

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
        """Measure a step of a runnable model on this machine, without communication.

        Args:
            optimizer: ``adamw`` or ``sgd``.

        Returns:
            Its time in seconds.

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


def model_of_size(elements: int) -> Subject:
    """A model of a given number of parameters."""
    return Subject(Model(elements))


def model_of_factory(text: str, inputs: Sequence[Callable[[], Tensor]] | None) -> Subject:
    """The model that a function makes. It is built on the meta device, where it takes no memory.

    Args:
        text: ``MODULE:FACTORY``, or ``FILE.py:FACTORY``. The factory takes no arguments.
        inputs: functions that make the model's inputs. None stands for the factory's attribute
            ``example_inputs``, if it has one.

    Raises:
        ModelError: there is no such function, it fails, or it returns no module with parameters.
    """
    factory = _load_factory(text)

    def make() -> Any:
        return factory()

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
    example = getattr(factory, EXAMPLE_INPUTS, None)
    return Subject(model, text, make, None if example is None else lambda: _listed(example))


def _listed(example: Any) -> list[Any]:
    found = example() if callable(example) else example
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _load_factory(text: str) -> Callable[[], Any]:
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise ModelError(f"{text!r} must be MODULE:FACTORY or FILE.py:FACTORY")
    try:
        found: Any = _load_module(place)
        for part in name.split("."):
            found = getattr(found, part)
    except ModelError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise ModelError(f"{text} can't be loaded: {one_line(error)}") from error
    if not callable(found):
        raise ModelError(f"{text} must be a function, got {type(found).__qualname__}")
    factory: Callable[[], Any] = found
    return factory


def _load_module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        folder = os.getcwd()
        if folder not in sys.path:  # the command `commhook` lacks it, unlike `python -m`
            sys.path.insert(0, folder)
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise ModelError(f"there is no file {place}")
    name = f"_commhook_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{place} can't be imported as Python")
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
