"""The C++ compiler of this machine, and programs that run parts of CUDA kernels on the host."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from repository import ROOT, SUPPORT

BUILD = ROOT / "build"


class NoCompilerError(Exception):
    """This machine has no compiler."""


def cpp_compiler() -> list[str]:
    """The value of the variable CXX, which may include arguments, or else ``c++``."""
    given = shlex.split(os.environ.get("CXX", ""))
    if not given and shutil.which("c++") is None:
        raise NoCompilerError("no C++ compiler was found (c++, or the variable CXX)")
    return given or ["c++"]


def build_once(name: str, command: list[str], sources: Iterable[Path]) -> Path:
    """Compiles sources, unless the folder ``build`` has the result; returns its path.

    Args:
        command: without ``-o``. If it fails, RuntimeError shows the compiler's output.
        sources: everything that the result depends on, except the command.
    """
    digest = hashlib.sha256(repr(command).encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    path = BUILD / f"{name}-{digest.hexdigest()[:16]}"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}")  # several processes may build at once
    try:
        built = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, timeout=600
        )
        if built.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{built.stderr}")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
    return path


FOLDERS = (ROOT / "cuda", ROOT / "csrc", SUPPORT)


def run_program(source: Path, *flags: str, arguments: tuple[str, ...] = ()) -> None:
    """Compiles a program, unless an earlier test has done so, and asserts that it passes.

    The program includes ``host_program.h``. It prints ``passed``, or the first difference and exits
    with 1. Without a compiler, the test is skipped.

    Args:
        flags: the compiler's, for optimisation and sanitizers.
        arguments: the program's.
    """
    try:
        compiler = cpp_compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))
    command = [
        *compiler,
        "-std=c++20",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-fsanitize-undefined-trap-on-error",
        *flags,
        *(f"-I{folder}" for folder in FOLDERS),
        f"-isystem{Path(torch.__file__).parent / 'include'}",
        str(source),
    ]
    headers = [file for folder in FOLDERS for file in folder.rglob("*.*h")]
    name = f"{source.stem.removeprefix('test_')}-torch-{torch.__version__}"
    program = build_once(name, command, [source, *headers])
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, "passed\n"), result.stdout + result.stderr
