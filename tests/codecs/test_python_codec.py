"""The example of a codec in Python alone: it passes what every codec is tried in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from repository import ROOT, TESTS

EXAMPLES = ROOT / "examples"

#: Files that try each codec of the table, what of them to choose, without what needs processes, and
#: how many there are. Tests by properties draw from the table: no codec is in their names.
TRIED = {
    "codecs/test_codecs.py": ("truncated and not inductor", 31),
    "codecs/test_codec_chunks.py": ("truncated", 11),
    "collectives/test_compressed_chunks.py": ("truncated and not gloo", 14),
    "collectives/test_compressed_all_reduce.py": ("truncated and not gloo", 9),
    "hooks/test_hooks_properties.py": ("", 8),
    "codecs/test_formulas.py": ("truncated", 2),
}


def run(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    # Not one of the processes of a run with pytest-xdist.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**own, "PYTHONPATH": str(EXAMPLES)},
    )


def passed(files: Iterable[str], chosen: str) -> Counter[str]:
    """How many tests pass in each file, with the codec in the table; none may fail."""
    options = ["-p", "python_codec", "-p", "no:cacheprovider", "-v", "-p", "no:xdist"]
    ran = run(
        "-m", "pytest", *options, *(str(TESTS / name) for name in files), "-k", chosen, "-m", ""
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    return Counter(re.findall(r"^tests/(\S+?)::.* PASSED", ran.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def found() -> Counter[str]:
    parts = [
        f"({Path(name).stem}{chosen and f' and {chosen}'})" for name, (chosen, _) in TRIED.items()
    ]
    return passed(TRIED, " or ".join(parts))


@pytest.mark.parametrize("name", TRIED)
def test_it_is_tried_as_all_codecs_are(found: Counter[str], name: str) -> None:
    assert found[name] >= TRIED[name][1]


@pytest.mark.long
def test_it_is_compiled_by_inductor() -> None:
    assert passed(["codecs/test_codecs.py"], "truncated and inductor").total() >= 1


def test_it_trains(tmp_path: Path) -> None:
    options = ["--layers", "1", "--dim", "32", "--heads", "2", "--seq", "16", "--steps", "4"]
    hook = str(EXAMPLES / "python_codec.py:hook")
    ran = run("-m", "torch_commhook", "train", "--hook", hook, *options, "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "2.00x" in ran.stdout  # of what float32 would have been
