"""Builds the C++ doubles of the tests in one run of ninja, once for each torch."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import uuid
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from repository import ROOT
from torch.utils import cpp_extension

from torch_commhook import include_paths

#: By name, their sources beside this file.
DOUBLES = {
    **{
        name: f"cpp_hooks/{name}.cpp"
        for name in ("comm_hooks", "autograd_hooks", "no_hooks", "wrong_hooks", "old_hooks")
    },
    "stream_device": "stream_device/*.cpp",
    "stream_group": "stream_group/*.cpp",
}
#: ``setup.py`` builds it, as readers of docs/cpp_hooks.md do.
EXAMPLE = "clipped_mean"
#: The workers of a run have this in common. A later process may get this one's number.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
#: Parse the headers of the library's runtime once. Another run may load a library meanwhile, so
#: that the new one takes the old one's place at once.
RULES = """
rule precompile
  command = $cxx $flags -x c++-header $in -o $out -MD -MF $out.d
  depfile = $out.d
  deps = gcc
rule compile
  command = $cxx $flags -DTORCH_EXTENSION_NAME=$name -include precompiled.h -c $in -o $out $
    -MD -MF $out.d
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx -shared $in -o $out.new $libraries && mv $out.new $out
build precompiled.h.gch: precompile precompiled.h
"""


@lru_cache
def library(name: str) -> str:
    """The path of a double or of the example. The first test of a run builds it."""
    kind = "example" if name == EXAMPLE else "doubles"
    into = ROOT / "build" / f"torch-{torch.__version__}-{kind}"
    into.mkdir(parents=True, exist_ok=True)
    with open(into / "built_by", "a+") as built_by:
        fcntl.flock(built_by, fcntl.LOCK_EX)
        built_by.seek(0)
        if built_by.read() != RUN:
            _build_example(into) if name == EXAMPLE else _build_doubles(into)
            built_by.truncate(0)
            built_by.write(RUN)
    return str(into / f"{name}.so")


def _build_example(into: Path) -> None:
    new = into / "new"
    options = ["--force", "--build-lib", str(new), "--build-temp", str(into / "objects")]
    command = [sys.executable, "setup.py", "--quiet", "build_ext", *options]
    _run(command, ROOT / "examples" / "cpp_hook")
    (new / f"{EXAMPLE}.so").replace(into / f"{EXAMPLE}.so")


def _build_doubles(into: Path) -> None:
    flags = ["-O0", "-g0", "-fPIC", "-fvisibility=hidden", "-std=c++20", "-Winvalid-pch"]
    flags += ["-DUSE_C10D", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    includes = [sysconfig.get_path("include"), *cpp_extension.include_paths(), *include_paths()]
    of_torch = cpp_extension.library_paths()
    libraries = [*(f"-L{path}" for path in of_torch), "-lc10 -ltorch -ltorch_cpu -ltorch_python"]
    if sys.platform == "darwin":
        libraries.append("-undefined dynamic_lookup")  # the symbols of Python
    # Another build of the same version may have headers that are older than the objects.
    built = max(each.stat().st_mtime_ns for path in of_torch for each in Path(path).iterdir())
    lines = [
        f"cxx = {os.environ.get('CXX', 'c++')}",
        f"flags = {' '.join([*flags, *(f'-isystem {path}' for path in includes)])}",
        f"libraries = {' '.join(libraries)}",
        RULES,
    ]
    for name, pattern in DOUBLES.items():
        objects = []
        for source in sorted(Path(__file__).parent.glob(pattern)):
            objects.append(f"{name}-{source.stem}.o")
            lines.append(f"build {objects[-1]}: compile {source} | precompiled.h.gch")
            lines.append(f"  name = {name}")
        lines.append(f"build {name}.so: link {' '.join(objects)}")
    for file, text in {
        "build.ninja": "\n".join([*lines, ""]),
        "precompiled.h": f'#include "{ROOT}/csrc/runtime/precompiled.h"  // torch: {built}\n',
    }.items():
        if not (into / file).exists() or (into / file).read_text() != text:
            (into / file).write_text(text)
    _run(["ninja", "-j", "2"], into)


def _run(command: list[str], folder: Path) -> None:
    # Also torch searches the PATH for ninja; this Python's ninja may be elsewhere.
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
