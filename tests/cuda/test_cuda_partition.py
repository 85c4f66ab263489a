"""The CUDA kernels' index arithmetic, tried on the host: no GPU and no CUDA toolkit is needed."""

import subprocess
from pathlib import Path

import pytest
import torch
from cpp_compiler import NoCompilerError, build_once, cpp_compiler
from repository import ROOT

pytestmark = pytest.mark.long  # compiling takes a quarter of a minute


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        compiler = cpp_compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))
    source = Path(__file__).with_suffix(".cpp")
    command = [
        *compiler,
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        # A vector at an address that is not aligned for it ends the program.
        "-fsanitize=address,alignment,bounds,shift,signed-integer-overflow",
        "-fsanitize-undefined-trap-on-error",
        f"-I{ROOT / 'cuda'}",
        f"-I{ROOT / 'csrc'}",
        f"-isystem{Path(torch.__file__).parent / 'include'}",
        str(source),
    ]
    headers = [file for name in ("cuda", "csrc") for file in (ROOT / name).rglob("*.*h")]
    return build_once(f"cuda_partition-torch-{torch.__version__}", command, [source, *headers])


@pytest.mark.parametrize("seed", range(4))
def test_every_element_is_moved_once_by_aligned_vectors(program: Path, seed: int) -> None:
    result = subprocess.run([program, str(seed), "4"], capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, "passed\n"), result.stdout + result.stderr
