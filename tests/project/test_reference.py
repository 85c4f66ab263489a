"""The reference documents every public name, with its arguments and an example that runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from typing import Any

import pytest
from public_names import FRAMEWORKS, REFERENCE, documented_names, public_objects, resolve
from repository import ROOT

from torch_commhook.cli.main import COMMANDS

PUBLIC = public_objects()

#: A dict, and an enum that is torch's own from torch 2.15 on. The page says what they hold.
WITHOUT_DOCSTRING = {
    "torch_commhook.codecs.CODECS",
    "torch_commhook.process_group.HookOpName",
}

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


def undocumented_parameters(value: Any) -> list[str]:
    """Parameters that neither the object's docstring nor a base class's describes."""
    classes = value.__mro__ if inspect.isclass(value) else [value]
    texts = [inspect.cleandoc(each.__doc__ or "") for each in classes]
    sections = [
        section
        for text in texts
        for section in re.findall(r"^(?:Args|Attributes):\n((?:[ \t].*\n?|\n(?= ))*)", text, re.M)
    ]
    named = re.findall(r"^    ([\w*, ]+):", "\n".join(sections), re.M)
    described = {name.strip(" *") for each in named for name in each.split(",")}
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
    return [name for page in REFERENCE.glob("*.md") for name in documented_names(page)]


def test_each_name_has_one_place() -> None:
    places = _places()
    assert sorted(places) == sorted(set(places))
    frameworks = tuple(f"torch_commhook.integrations.{name}." for name in FRAMEWORKS)
    documented = [resolve(name) for name in places if not name.startswith(frameworks)]
    # A codec's hook is another function each time that it is asked for.
    missing = [
        name
        for name, value in PUBLIC.items()
        if name not in places and not any(value is each for each in documented)
    ]
    assert missing == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_names_for_frameworks_have_a_place(framework: str) -> None:
    tree = ast.parse((ROOT / f"torch_commhook/integrations/{framework}.py").read_text())
    module = f"torch_commhook.integrations.{framework}"
    public = [
        f"{module}.{node.name}"
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    assert public and {*public} <= {*_places()}


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
