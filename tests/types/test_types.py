"""What mypy and pyright know of the package, as an editable install shows it to them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from repository import ROOT
from train_processes import finished

from torch_commhook import codecs, hooks

HERE = Path(__file__).parent
PACKAGE = ROOT / "torch_commhook"
SECONDS = 900


def _outside(folder: Path) -> None:
    """Copy both files to a folder from which tools see only what is installed."""
    for name in ("uses.py", "mistakes.py"):
        shutil.copyfile(HERE / name, folder / name)


def _run(folder: Path, *command: str) -> str:
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"needs {command[0]} (pip install {command[0]})")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return finished(
        *(sys.executable, "-m", *command, "uses.py", "mistakes.py"),
        folder=folder,
        code=1,  # 0: no mistakes; 2: the tool failed
        environment=environment,
        seconds=SECONDS,
    ).stdout


def _wrong_lines() -> set[tuple[str, int]]:
    lines = (HERE / "mistakes.py").read_text().splitlines()
    return {("mistakes.py", i) for i, line in enumerate(lines, 1) if "# wrong" in line}


def test_mypy(tmp_path: Path) -> None:
    _outside(tmp_path)
    cache = ROOT / "build" / "mypy_cache"
    python = ["--python-executable", sys.executable]
    output = _run(tmp_path, "mypy", "--strict", "--cache-dir", str(cache), *python)
    errors = re.findall(r"^(.+?):(\d+): error: ", output, re.MULTILINE)
    assert {(name, int(line)) for name, line in errors} == _wrong_lines(), output


def test_pyright(tmp_path: Path) -> None:
    """In basedpyright, a pyright whose wheel brings node with it; its strict mode is pyright's."""
    _outside(tmp_path)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    output = _run(tmp_path, "basedpyright", "--outputjson", "--pythonpath", sys.executable)
    found = json.loads(output)["generalDiagnostics"]
    errors = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in found
        if each["severity"] == "error"
    }
    assert errors == _wrong_lines(), output


def _declared(package: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((PACKAGE / package / "__init__.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _imported(package: str) -> set[str]:
    tree = ast.parse((PACKAGE / package / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names}


def _own_codecs() -> dict[str, type[codecs.Codec]]:
    """Without those that other tests have registered."""
    own = f"{codecs.__name__}."
    return {name: cls for name, cls in codecs.CODECS.items() if cls.__module__.startswith(own)}


def _parameters(function: ast.FunctionDef) -> dict[str, tuple[str, str]]:
    """Annotation and default by name, as their source says."""
    arguments = function.args
    assert arguments.vararg is None and arguments.kwarg is None and not arguments.posonlyargs
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    found = [*arguments.args, *arguments.kwonlyargs]
    return {
        each.arg: (ast.unparse(each.annotation), ast.unparse(default))
        for each, default in zip(found, defaults, strict=True)
        if each.annotation is not None and default is not None
    }


def test_hooks_of_codecs_are_declared_as_they_are() -> None:
    declared = _declared("hooks")
    assert set(declared) == set(_own_codecs())
    for name, function in declared.items():
        signature = inspect.signature(getattr(hooks, name))
        assert [*_parameters(function)] == [*signature.parameters]
        keywords = [each.arg for each in function.args.kwonlyargs]
        assert keywords == ["seed", "process_group"]
        for each, (annotation, default) in _parameters(function).items():
            parameter = signature.parameters[each]
            assert parameter.default == ast.literal_eval(default), (name, each)
            if each == "process_group":
                assert annotation == "dist.ProcessGroup | None"
            else:
                kind = parameter.annotation
                text = kind if isinstance(kind, str) else kind.__name__
                assert annotation == text, (name, each)


def test_all_names_are_declared() -> None:
    names = {*hooks.__all__} - {*codecs.CODECS}
    assert _imported("hooks") == names
    assert _imported("codecs") == {*codecs.__all__, *_own_codecs()}


def test_constructors_name_all_arguments() -> None:
    """Except ``cpp``, whose options are the C++ hook's."""
    classes = [getattr(hooks, name) for name in _imported("hooks") - {"Hook", "cpp"}]
    for cls in [*classes, *_own_codecs().values()]:
        for parameter in inspect.signature(cls).parameters.values():
            assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD), cls
            assert parameter.annotation is not parameter.empty, (cls, parameter)
