"""What the documents name is there; the reference has every public name, with an example that runs.

``make docs`` checks their links.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import shlex
import textwrap
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

import torch_commhook
from torch_commhook import autograd, codecs, collectives, hooks, process_group, testing
from torch_commhook.cli.main import COMMANDS, main
from torch_commhook.hooks.expressions import HookExpressionError, is_file_reference, parse_hook
from torch_commhook.integrations import slurm

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("cuda", "benchmarks")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "api").glob("*.md")),
]

_SUFFIXES = r"\.(?:py|pyi|cpp|h|cu|cuh|inl|md|json|toml|\*)"
_TOP = {"torch_commhook", "csrc", "cuda", "tests", "docs", "examples", "benchmarks", ".ci"}
_MODULES = "torch_commhook|hooks|codecs|collectives|testing|process_group|autograd"
_DOTTED = rf"(?:{_MODULES})(?:\.[A-Za-z_]\w*)+"


@cache
def _files() -> list[str]:
    top = [path for path in ROOT.iterdir() if path.is_file() or path.name in _TOP]
    below = [each for path in top for each in path.rglob("*") if "__pycache__" not in each.parts]
    return [str(path.relative_to(ROOT)) for path in (*top, *below)]


@cache
def _words() -> frozenset[str]:
    texts = (ROOT / name for name in _files() if re.search(r"\.(py|pyi|cpp|h|cu|cuh|inl)$", name))
    return frozenset(
        word
        for path in texts
        if path.name != Path(__file__).name
        for word in re.findall(r"\w+", path.read_text(errors="ignore"))
    )


def _inline(text: str) -> list[str]:
    without_blocks = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    return [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", without_blocks)]


def _code(text: str) -> list[str]:
    """What stands in backticks, and the lines of blocks."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```$", text.replace("\\\n", " "), re.M | re.S)
    return _inline(text) + [line.strip() for block in blocks for line in block.splitlines()]


def wrong_paths(text: str) -> list[str]:
    """Paths from the root must be there, and other files anywhere; ``*`` is a glob's.

    In a row of a table, a file must be in the package or in a folder that the row has named before.
    """
    wrong = []
    for part in (re.sub(r"^\|.*$", "", text, flags=re.M), *re.findall(r"^\|.*$", text, re.M)):
        named: list[str] = []
        for code in _inline(part):
            if not re.fullmatch(r"[\w.*/-]+", code) or code.startswith("torch.") or _resolves(code):
                continue
            path, folders = code.rstrip("/"), ["", *(named or ["*/"])]
            if code.split("/")[0] in _TOP and "/" in code:
                folders = [""]
                if part.startswith("|"):
                    folder = path if (ROOT / path).is_dir() else path.rpartition("/")[0]
                    named += ["torch_commhook/", f"{folder}/", f"{folder}/*/"]
            elif not re.search(_SUFFIXES + "$", code):
                continue
            patterns = [folder + path + end for folder in folders for end in ("", ".*")]
            if not any(fnmatch(name, pattern) for name in _files() for pattern in patterns):
                wrong.append(code)
    return wrong


def wrong_targets(text: str) -> list[str]:
    targets = set(re.findall(r"^([a-z][\w -]*):", (ROOT / "Makefile").read_text(), re.M))
    known = {target for group in targets for target in group.split()}
    named = [name for code in _code(text) for name in re.findall(r"^make ([a-z][\w-]*)", code)]
    return [name for name in named if name not in known]


@cache
def _help(command: str, *arguments: str) -> str | None:
    """What a command prints for ``--help`` after arguments; None if it refuses their values."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        with contextlib.redirect_stderr(io.StringIO()):
            main([command, *arguments, "--help"])
    return out.getvalue() if ended.value.code == 0 else None


def wrong_commands(text: str) -> list[str]:
    """Scripts, commands and options are there; commands in full take their values and hooks."""
    wrong = []
    for code in _code(text):
        script = re.match(r"python3? (\w[\w/]*/\w+\.py)\b", code)
        if script is not None and not (ROOT / script[1]).is_file():
            wrong.append(script[1])
        called = re.search(r"(?:-m torch_commhook|^commhook) ([a-z]\w*)(.*)", code)
        if called is None:
            continue
        command, rest = called.groups()
        if command not in COMMANDS:
            wrong.append(command)
            continue
        options = re.findall(r"(?<!\S)--[a-z][\w-]*", rest)
        wrong += [option for option in options if option not in (_help(command) or "")]
        if code.startswith("commhook"):
            continue
        arguments = shlex.split(rest, comments=True)
        hook = arguments[arguments.index("--hook") + 1] if "--hook" in arguments[:-1] else "none"
        if _help(command, *arguments) is None or not _is_hook(hook):
            wrong.append(code)
    return wrong


def _is_hook(text: str) -> bool:
    with contextlib.suppress(HookExpressionError):
        return is_file_reference(text) or text == "none" or bool(parse_hook(text))
    return False


def _resolves(name: str) -> bool:
    """Whether it is a dotted name of the package, such as ``hooks.cpp``."""
    if not re.fullmatch(_DOTTED, name):
        return False
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name("torch_commhook." + name.removeprefix("torch_commhook."))
        return True
    return False


def wrong_names(text: str) -> list[str]:
    """Dotted names of the package resolve; other identifiers with a ``_`` are in the sources."""
    wrong = []
    for code in _inline(text):
        name = code.split("(")[0]
        if re.fullmatch(_DOTTED, name) and not re.search(_SUFFIXES + "$", code):
            is_there = _resolves(name)
        else:
            is_there = not re.fullmatch(r"[A-Za-z_]\w*_\w+", name) or name in _words()
        if not is_there:
            wrong.append(name)
    return wrong


def test_what_pictures_name_is_there() -> None:
    named = {
        name
        for picture in (ROOT / "docs" / "images").glob("*.svg")
        for name in re.findall(rf"[\w/]+/\w+{_SUFFIXES}", picture.read_text())
    }
    assert {
        n for n in named if not any((top / n).exists() for top in (ROOT, ROOT / "torch_commhook"))
    } == set()
    assert len(named) > 10


CHECKS = [wrong_paths, wrong_targets, wrong_commands, wrong_names]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_pages_name_is_there(check: Callable[[str], list[str]]) -> None:
    wrong = {str(page.relative_to(ROOT)): check(page.read_text()) for page in PAGES}
    assert {page: names for page, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("check", "planted", "found"),
    [
        (wrong_paths, "see `torch_commhook/no_such.py`", "torch_commhook/no_such.py"),
        (wrong_paths, "see `no_such.py`", "no_such.py"),
        (wrong_paths, "| `torch_commhook/codecs/`: `base.py`, `powersgd.py` |", "powersgd.py"),
        (wrong_paths, "`csrc/runtime/no_such.*`", "csrc/runtime/no_such.*"),
        (wrong_targets, "```sh\nmake no-such\n```", "no-such"),
        (wrong_commands, "`python -m torch_commhook no_such`", "no_such"),
        (wrong_commands, "`commhook train --no-such 1`", "--no-such"),
        (wrong_commands, "```sh\npython benchmarks/no_such.py\n```", "benchmarks/no_such.py"),
        (wrong_commands, "`python -m torch_commhook train --steps few`", None),
        (wrong_commands, "`python -m torch_commhook train --hook 'no_such()'`", None),
        (wrong_names, "`hooks.no_such(3)`", "hooks.no_such"),
        (wrong_names, "`leave_to_no_one`", "leave_to_no_one"),
    ],
)
def test_what_is_not_there_is_found(
    check: Callable[[str], list[str]], planted: str, found: str | None
) -> None:
    assert check(planted) == [planted.strip("`") if found is None else found]


def test_the_table_of_layers_names_every_folder_of_the_package() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "torch_commhook"
    folders = [path.name for path in package.iterdir() if (path / "__init__.py").is_file()]
    assert [name for name in folders if f"`torch_commhook/{name}" not in table] == []


def test_the_page_on_frameworks_has_the_versions_that_are_tested() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    tested = (ROOT / "tests" / "integrations" / "requirements.txt").read_text()
    versions = dict(re.findall(r"^([\w-]+)\S*==(\S+)$", tested, re.M))
    assert versions.pop("pytorch-lightning") == versions["lightning"]
    for logs in ("tensorboard", "wandb"):
        del versions[logs]
    names = {"ray": "ray train", "torchft-nightly": "torchft"}
    rows = re.findall(r"^\| (\w[\w ]*)(?:, \S+)? \| (\d\S*) \|", page, re.M)
    named = {name.lower(): version for name, version in rows}
    assert named == {names.get(each, each): version for each, version in versions.items()}
    scripts = {path.name for path in (ROOT / "examples").glob("*_training.*")}
    of_no_framework = {"trace_training.py", "profile_training.py"}
    assert scripts - of_no_framework == set(re.findall(r"examples/(\w+\.\w+)", page))


# ---- the reference -------------------------------------------------------------------------------

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
WITHOUT_ARGUMENTS = {
    "torch_commhook.HookHandle",
    "torch_commhook.ReplicaWatch",
    "torch_commhook.autograd.RemovableHandle",
}


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
