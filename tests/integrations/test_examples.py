"""Each framework's example runs by the command that it names; Ray's does as a plain loop does."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launched_ranks import free_port, launched
from nested_values import different_paths
from repository import ROOT
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from train_processes import finished

from torch_commhook import attach

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


# ---- Ray Train, two workers on the CPU -----------------------------------------------------------

RAY_SCRIPT = ROOT / "examples" / "ray_training.py"
#: Those of the run, and of that which goes on from it.
RAY_STEPS = (4, 7)
RAY_SECONDS = 400  # Ray takes long to start


def _example() -> Any:
    """The example's model, data and hook, for which it needs no Ray."""
    spec = importlib.util.spec_from_file_location("ray_training", RAY_SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    nothing = mock.MagicMock()
    with mock.patch.dict(
        sys.modules, {"ray": nothing, "ray.train": nothing, "ray.train.torch": nothing}
    ):
        spec.loader.exec_module(module)
    return module


def _loop(rank: int, folder: str) -> None:
    """Write what the example saves, from a plain loop that ends and begins anew as it does."""
    torch.distributed.init_process_group("gloo")
    example = _example()
    saved: list[dict[str, Any]] = []
    for start, end in zip((0, *RAY_STEPS), RAY_STEPS, strict=False):
        model = DDP(example.make_model())
        optimizer = example.make_optimizer(model)
        handle = attach(model, example.make_hook())
        if saved:
            model.module.load_state_dict(saved[-1]["model"])
            optimizer.load_state_dict(saved[-1]["optimizer"])
            handle.load_state_dict(saved[-1]["hook"])
        for step in range(start, end):
            inputs, labels = example.make_batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "hook": handle.state_dict(gather=True),
            "step": end,
        }
        saved.append(state)
        if rank == 0:
            torch.save((state, handle.stats().bytes_sent), Path(folder) / f"loop{end}.pt")
        handle.remove()


def _run(folder: Path, steps: int) -> tuple[dict[str, Any], int]:
    """The checkpoint of the example's run, and the bytes that it says its hook has sent."""
    command = (sys.executable, RAY_SCRIPT, "--steps", str(steps), "--folder", folder)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    printed = finished(*command, environment=environment, seconds=RAY_SECONDS).stdout
    said = re.search(r"loss [\d.]+, (\d+) bytes of gradients in (\d+) steps", printed)
    checkpoint = re.search(r"^checkpoint: (.*)$", printed, re.MULTILINE)
    assert said is not None and checkpoint is not None, printed
    return torch.load(Path(checkpoint[1]) / "training.pt", weights_only=True), int(said[1])


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_ray_does_as_a_loop_does(tmp_path: Path) -> None:
    """Also after it goes on: the hook of each worker then has what it remembered."""
    launched(_loop, str(tmp_path), seconds=RAY_SECONDS)
    for steps in RAY_STEPS:
        expected, expected_sent = torch.load(tmp_path / f"loop{steps}.pt", weights_only=True)
        saved, sent = _run(tmp_path, steps)
        assert {"rank0", "rank1"} <= saved["hook"].keys()
        assert sent == expected_sent > 0
        assert different_paths(saved, expected) == []
