"""Each framework's example runs by the command that it names."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest
from launched_ranks import free_port
from repository import ROOT
from train_processes import finished

#: What a script imports first of its framework, and what it prints at last.
SCRIPTS = {
    "lightning_training": "lightning",
    "fabric_training": "lightning",
    "accelerate_training": "accelerate",
    "transformers_training": "transformers",
}


def _command(script: Path) -> list[str]:
    """That which the script's docstring names, with this Python."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    (line,) = (line.strip() for line in text.splitlines() if str(script.name) in line)
    launcher, *rest = line.split()
    if launcher == "torchrun":
        port = f"--master-port={free_port()}"
        return [sys.executable, "-m", "torch.distributed.run", port, *rest]
    assert launcher == "python"
    return [sys.executable, *rest]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str) -> None:
    pytest.importorskip(SCRIPTS[name])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = _command(ROOT / "examples" / f"{name}.py")
    printed = finished(*command, environment=environment, seconds=170).stdout
    assert "steps, 7." in printed and "times less traffic" in printed, printed
