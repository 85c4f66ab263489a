"""C++ programs that run a part of the CUDA kernels on the host, without a GPU or a CUDA toolkit.

Each includes ``host_program.h``, prints the first difference that it finds and exits with 1, or
prints ``passed``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from cpp_compiler import NoCompilerError, build_once, cpp_compiler
from repository import ROOT, SUPPORT

FOLDERS = (ROOT / "cuda", ROOT / "csrc", SUPPORT)


def run_program(source: Path, *flags: str, arguments: tuple[str, ...] = ()) -> None:
    """Compiles a program, unless an earlier test has done so, and asserts that it passes.

    Skips the test without a compiler.

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
