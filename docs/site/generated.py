"""Directives that show the library's operators and the options of its commands."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import torch_commhook
from torch_commhook.cli.main import main
from torch_commhook.codecs import CODECS, Codec

ROOT = Path(__file__).resolve().parents[2]

#: Methods of a codec by the ends of their operators' names.
_METHODS = ("encode", "decode_sum", "decode", "reduce")


class CommandHelp(Directive):
    """``command-help:: train`` shows the output of ``python -m torch_commhook train --help``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        text = command_help(self.arguments[0])
        return [nodes.literal_block(text, text, language="text")]


def command_help(command: str) -> str:
    """The options of a command, 80 columns wide."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(SystemExit),
        mock.patch.dict(os.environ, COLUMNS="80"),
    ):
        main([command, "--help"])
    return out.getvalue()


class Operators(SphinxDirective):
    """``operators::`` lists all operators of ``torch.ops.commhook``."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(operators_page(), allow_section_headings=True)


def operators_page() -> str:
    """A section for each operator: its description, its schema, and the devices with kernels."""
    sections = []
    for name, schemas in _schemas().items():
        lines = [f"## {name}", "", *filter(None, [description(name)]), ""]
        lines += ["```{code-block} text", ":class: schema", ""]
        lines += [str(schema).removeprefix("commhook::") for schema in schemas]
        lines += ["```", "", f"Kernels: {kernels(name)}.", ""]
        sections.append("\n".join(lines))
    return "\n".join(sections)


def _schemas() -> dict[str, list[Any]]:
    """The schemas by operators' names; overloads share a name."""
    for _ in _modules():  # importing some modules registers operators
        pass
    found: dict[str, list[Any]] = {}
    for schema in sorted(torch._C._jit_get_all_schemas(), key=str):
        namespace, _, name = schema.name.partition("::")
        if namespace == "commhook":
            found.setdefault(name, []).append(schema)
    return found


def _modules() -> Iterator[Any]:
    for module in pkgutil.walk_packages(torch_commhook.__path__, "torch_commhook."):
        if not re.search(r"\.(cli|__main__|integrations|lib)\b|\._", module.name):
            yield importlib.import_module(module.name)


def description(name: str) -> str:
    """A sentence or two about an operator.

    They come from the docstring of its function in Python, else of the codec's method, else from
    the comment at its schema. Empty if the comment only compares it with the operator above.
    """
    for module in _modules():
        value = vars(module).get(name)
        function = getattr(value, "_init_fn", value)  # of a torch.library.custom_op
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            return _first_line(function)
    codec, _, method = name.rpartition("_")
    codec, method = (codec[:-7], "decode_sum") if codec.endswith("_decode") else (codec, method)
    if codec in CODECS and method in _METHODS:
        return f"Of the codec `{codec}`: {_first_line(getattr(Codec, method))}"
    comment = _comments().get(name, "")
    return "" if comment.startswith("The same") else comment


def _first_line(function: Any) -> str:
    text = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


@cache
def _comments() -> dict[str, str]:
    """The comments above the schemas in C++, by operators' names."""
    text = "".join(path.read_text() for path in sorted((ROOT / "csrc" / "ops").rglob("*.cpp")))
    found = re.findall(r'((?:^ *//[^\n]*\n)+) *m\.def\(\s*"(\w+)', text, re.M)
    return {name: " ".join(re.sub("^ *// ?", "", note, flags=re.M).split()) for note, name in found}


def kernels(name: str) -> str:
    """The devices with kernels of an operator, such as ``CPU, CUDA, and one for all devices``."""
    found = []
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"commhook::{name}", "CPU"):
        found.append("CPU")
    if name in _cuda_operators():
        found.append("CUDA")
    return ", ".join([*found, "and one for all devices"]) if found else "one for all devices"


@cache
def _cuda_operators() -> frozenset[str]:
    """The operators that ``cuda/`` registers, also if this build has no CUDA."""
    text = "".join(path.read_text() for path in sorted((ROOT / "cuda").glob("*.c*")))
    return frozenset(re.findall(r'm\.impl\("(\w+)', text))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("operators", Operators)
    return {"parallel_read_safe": True}
