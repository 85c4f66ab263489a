"""``python -m torch_commhook doctor``: what it prints, and what it does where nothing loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT

import torch_commhook
from torch_commhook.cli import doctor
from torch_commhook.cli.main import main


def test_all_is_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMHOOK_SHOWN", "yes")
    monkeypatch.setenv("SOME_TOKEN", "a-secret")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch_commhook: {torch_commhook.__version__}" in lines
    assert f"torch: {torch.__version__}" in lines
    assert f"_C built for torch: {torch.__version__}" in lines
    assert "COMMHOOK_SHOWN: yes" in lines
    assert lines[-1].startswith("check: ok")
    assert not any("a-secret" in line for line in lines)


def test_wrong_gradients_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_averaged", lambda rank, hook: torch.full((2,), rank + 1.0))
    assert doctor.main([]) == 1
    assert "check: FAILED: RuntimeError" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["_ops", "_C"])
def test_a_native_library_that_does_not_load(broken: str, tmp_path: Path) -> None:
    package = tmp_path / "torch_commhook"
    for path in (ROOT / "torch_commhook").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = package / path.relative_to(ROOT / "torch_commhook")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            if path.suffix == ".so" and path.name.startswith(broken):
                copy.write_bytes(b"nonsense")
    done = subprocess.run(
        [sys.executable, "-m", "torch_commhook", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert f"torch: {torch.__version__}" in done.stdout
    assert "check: FAILED: NativeLibraryError" in done.stdout
    assert "python setup.py develop" in done.stdout
    assert "Traceback" not in done.stderr
