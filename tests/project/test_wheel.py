"""A wheel for the torch that is installed: what it holds, and training from it."""

from __future__ import annotations

import json
import os
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from repository import ROOT
from train_processes import TINY, finding, finished

import torch_commhook

#: The first one builds a wheel.
pytestmark = pytest.mark.long

SECONDS = 600
_RELEASE = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what was compiled for the build in place."""
    folder = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "setup.py", "--quiet", "wheel", "--dist-dir", folder)
    finished(*command, seconds=SECONDS)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a bare environment with the wheel, which sees this environment's torch."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    found = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(found), "--disable-pip-version-check"]
    finished(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, seconds=SECONDS)
    (packages,) = folder.glob("lib/python3*/site-packages")
    # A path alone: the files *.pth of the other environment, such as an editable install's, do
    # not count.
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parent.parent))
    return found


def _run(python: Path, folder: Path, *arguments: str) -> str:
    """What a module of the wheel prints, away from the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return finished(python, *arguments, folder=folder, environment=environment).stdout


def test_its_name_and_metadata(wheel: Path) -> None:
    cuda = (torch.version.cuda or "").replace(".", "")
    build = torch.__version__.partition("+")[2] or (f"cu{cuda}" if cuda else "cpu")
    version = f"{torch_commhook.__version__}+torch{_RELEASE}{build}"
    assert wheel.name.startswith(f"torch_commhook-{version}-cp3")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert f"\nRequires-Dist: torch=={_RELEASE}.*\n" in text
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "torch_commhook").rglob("*")
        if path.suffix in (".py", ".pyi", ".so", ".json") or path.name == "py.typed"
    }
    package = {name for name in names if name.startswith("torch_commhook/")}
    headers = {name for name in package if name.startswith("torch_commhook/include/commhook/")}
    assert package - headers == expected
    assert "torch_commhook/include/commhook/huge_pages.h" in headers


def test_it_is_the_package_that_is_imported(python: Path, tmp_path: Path) -> None:
    program = "import torch, torch_commhook; print(torch.__version__, torch_commhook.__file__)"
    version, file = _run(python, tmp_path, "-c", program).split()
    assert version == torch.__version__
    assert Path(file).is_relative_to(python.parent.parent)
    text = _run(python, tmp_path, "-m", "torch_commhook", "--version")
    assert text == f"torch_commhook {torch_commhook.__version__}, built for torch {version}\n"


def test_doctor(python: Path, tmp_path: Path) -> None:
    found = json.loads(_run(python, tmp_path, "-m", "torch_commhook", "doctor", "--json"))
    assert found["errors"] == 0
    assert finding(found, "_ops built for torch")["value"] == torch.__version__
    assert finding(found, "two processes on this host, all-reduce over Gloo")["level"] == "ok"


def test_training_on_two_ranks(python: Path, tmp_path: Path) -> None:
    command = ["-m", "torch_commhook", "train", "--ranks", "2", "--steps", "5", *TINY]
    _run(python, tmp_path, *command, "--hook", "error_feedback(blockwise(bits=4))", "--out", "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())
