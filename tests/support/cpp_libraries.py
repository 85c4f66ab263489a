"""Builds libraries of C++ hooks, once for each torch; later runs compile only changes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from repository import ROOT


@lru_cache
def built(project: str) -> Path:
    """The folder of the libraries that a folder's ``setup.py`` builds."""
    folder = ROOT / project
    into = ROOT / "build" / f"torch-{torch.__version__}-{folder.name}"
    into.mkdir(parents=True, exist_ok=True)
    # Parallel test runs load the same files; these must not be linked again while they are loaded.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"of process {os.getpid()}")
    with open(into / "built_by", "a+") as built_by:
        fcntl.flock(built_by, fcntl.LOCK_EX)
        built_by.seek(0)
        if built_by.read() != run:
            _build(project, folder, into)
            built_by.truncate(0)
            built_by.write(run)
    return into


def _build(project: str, folder: Path, into: Path) -> None:
    command = [
        "build_ext",
        "--force",
        "--build-lib",
        str(into),
        "--build-temp",
        str(into / "objects"),
    ]
    # torch searches the PATH for ninja; this Python's ninja may be elsewhere.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    # Takes half the time; Python's own flags are those of a release.
    environment["CFLAGS"] = f"{os.environ.get('CFLAGS', '')} -O0 -g0"
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode != 0:
        pytest.fail(f"{project} does not build:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


def library(project: str, name: str) -> str:
    """The path of one of these libraries."""
    found = sorted(built(project).glob(f"{name}*.so"))
    assert len(found) == 1, found
    return str(found[0])
