"""The reference documents every public name, with its arguments and an example that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from typing import Any

import pytest
from repository import ROOT

import torch_commhook
from torch_commhook import autograd, codecs, collectives, hooks, process_group, testing
from torch_commhook.cli.main import COMMANDS
from torch_commhook.integrations import slurm

REFERENCE = ROOT / "docs" / "api"

#: Frameworks' modules; an import needs the framework.
FRAMEWORKS = ("accelerate", "lightning", "torchft", "torchtitan", "transformers")


def _public_objects() -> dict[str, Any]:
    """All public objects except modules, by their shortest name; each once."""
    named: dict[str, Any] = {}
    for module in (
        *(torch_commhook, hooks, codecs, collectives),
        *(process_group, testing, autograd),
    ):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and not any(value is each for each in named.values()):
                named[f"{module.__name__}.{name}"] = value
    # Only the library's: tests may have registered others.
    for name, codec in codecs.CODECS.items():
        if codec.__module__.startswith("torch_commhook."):
            named[f"torch_commhook.codecs.{name}"] = codec
    named["torch_commhook.integrations.slurm.set_variables"] = slurm.set_variables
    return named


PUBLIC = _public_objects()
INTEGRATIONS = ROOT / "torch_commhook" / "integrations"

#: A dict, and an enum that is torch's own from torch 2.15 on. The page says what they hold.
WITHOUT_DOCSTRING = {"torch_commhook.codecs.CODECS", "torch_commhook.process_group.HookOpName"}

#: Classes whose objects the library makes.
WITHOUT_ARGUMENTS = {"torch_commhook.HookHandle", "torch_commhook.autograd.RemovableHandle"}


def _names_of_the_examples() -> dict[str, Any]:
    """What the examples assume: the page that says so has the imports."""
    block = re.search(r"^```python\n(.*?)^```$", (REFERENCE / "index.md").read_text(), re.M | re.S)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


def _docstring(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _parameters(value: Any) -> list[str]:
    """Those that a caller gives; none where the class brings no ``__init__`` of its own."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return []
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):  # C++ defines it
        return []


def described_names(*docstrings: str) -> set[str]:
    """The arguments and attributes that docstrings describe."""
    sections = [
        section
        for text in docstrings
        for section in re.findall(r"^(?:Args|Attributes):\n((?:[ \t].*\n?|\n(?= ))*)", text, re.M)
    ]
    named = re.findall(r"^    ([\w*, ]+):", "\n".join(sections), re.M)
    return {name.strip(" *") for each in named for name in each.split(",")}


def undocumented_parameters(value: Any) -> list[str]:
    """Parameters that neither the object's docstring nor a base class's describes."""
    classes = value.__mro__ if inspect.isclass(value) else [value]
    described = described_names(*(inspect.cleandoc(each.__doc__ or "") for each in classes))
    return [
        name for name in _parameters(value) if name not in described and not name.startswith("_")
    ]


@pytest.mark.parametrize("name", PUBLIC)
def test_example(name: str) -> None:
    if name in WITHOUT_DOCSTRING:
        return
    test = doctest.DocTestParser().get_doctest(
        _docstring(PUBLIC[name]), _names_of_the_examples(), name, None, None
    )
    assert test.examples, f"{name} has no example"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("name", sorted({*PUBLIC} - WITHOUT_DOCSTRING - WITHOUT_ARGUMENTS))
def test_arguments_are_described(name: str) -> None:
    assert undocumented_parameters(PUBLIC[name]) == []


def _places() -> list[str]:
    directive = re.compile(r"^\.\. (?:auto(?:class|function|exception)|py:data):: (\S+)$", re.M)
    return [name for page in REFERENCE.glob("*.md") for name in directive.findall(page.read_text())]


def test_each_name_has_one_place() -> None:
    places = _places()
    assert sorted(places) == sorted(set(places))
    frameworks = tuple(f"torch_commhook.integrations.{name}." for name in FRAMEWORKS)
    documented = [
        getattr(importlib.import_module(module), attribute)
        for module, _, attribute in (name.rpartition(".") for name in places)
        if not f"{module}.".startswith(frameworks)
    ]
    # A codec's hook is another function each time that it is asked for.
    missing = [
        name
        for name, value in PUBLIC.items()
        if name not in places and not any(value is each for each in documented)
    ]
    assert missing == []


def _for_frameworks() -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """The public names for frameworks, which may not be there to import, as they are written."""
    return {
        f"torch_commhook.integrations.{framework}.{node.name}": node
        for framework in FRAMEWORKS
        for node in ast.parse((INTEGRATIONS / f"{framework}.py").read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }


def test_names_for_frameworks_have_a_place() -> None:
    assert {*_for_frameworks()} <= {*_places()}


@pytest.mark.parametrize("name", _for_frameworks())
def test_names_for_frameworks_are_described(name: str) -> None:
    """Their examples call them. They run only where the frameworks are: tests/integrations."""
    node = _for_frameworks()[name]
    text = ast.get_docstring(node) or ""
    _, mark, example = text.partition("\nExample::\n\n")
    assert mark, f"{name} has no example"
    parsed = ast.walk(ast.parse(textwrap.dedent(example)))
    assert node.name in [ast.unparse(each.func) for each in parsed if isinstance(each, ast.Call)]
    functions = node.body if isinstance(node, ast.ClassDef) else [node]
    arguments = [
        argument.arg
        for function in functions
        if isinstance(function, ast.FunctionDef) and function.name in (node.name, "__init__")
        for argument in (*function.args.args, *function.args.kwonlyargs)
        if argument.arg != "self"
    ]
    assert arguments and [each for each in arguments if each not in described_names(text)] == []


def test_each_command_has_a_place() -> None:
    page = (REFERENCE / "commands.md").read_text()
    assert {*re.findall(r"^```{command-help} (\w+)$", page, re.M)} == {*COMMANDS}


def test_what_is_not_described_is_found() -> None:
    def function(first: int, second: int, *rest: int) -> None:
        """Do.

        Args:
            first: a number.
        """

    assert undocumented_parameters(function) == ["second", "rest"]
