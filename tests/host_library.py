"""Libraries of C++ that play CUDA kernels on the host; no CUDA toolkit is needed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def compile_host_library(source: str, folder: Path) -> ctypes.CDLL:
    """Compile a file beside this one into a folder, and load it; skips without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler was found (c++, or the variable CXX)")
    path = folder / Path(source).with_suffix(".so").name
    command = [
        compiler,
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-ffp-contract=off",
        # A vector at an address that is not aligned for it ends the program.
        "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
        "-fsanitize-undefined-trap-on-error",
        "-shared",
        "-fPIC",
        f"-I{ROOT / 'cuda'}",
        f"-I{ROOT / 'csrc'}",
        f"-isystem{Path(torch.__file__).parent / 'include'}",
        str(Path(__file__).with_name(source)),
        "-o",
        str(path),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(path))
