"""The public names of the library, and their places in the reference."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from repository import ROOT

import torch_commhook
from torch_commhook import (
    autograd,
    codecs,
    collectives,
    hooks,
    process_group,
    testing,
)
from torch_commhook.integrations import slurm

REFERENCE = ROOT / "docs" / "api"

#: Frameworks' modules; an import needs the framework.
FRAMEWORKS = ("accelerate", "lightning", "torchft", "torchtitan", "transformers")

_DIRECTIVE = re.compile(r"^\.\. (?:auto(?:class|function|exception)|py:data):: (\S+)$", re.M)


def public_objects() -> dict[str, Any]:
    """All public objects except modules, by their shortest name; each once."""
    named: dict[str, Any] = {}
    for module in (
        torch_commhook,
        hooks,
        codecs,
        collectives,
        process_group,
        testing,
        autograd,
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


def documented_names(page: Path) -> list[str]:
    """The names that a page of the reference documents, in order."""
    return _DIRECTIVE.findall(page.read_text())


def resolve(name: str) -> Any:
    """The object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
