"""The CUDA kernels' index arithmetic, tried on the host: no GPU and no CUDA toolkit is needed."""

import subprocess
from pathlib import Path

import pytest
import torch
from cpp_compiler import NoCompilerError, cpp_compiler
from repository import ROOT


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = cpp_compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("cuda_partition") / "program"
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
        str(Path(__file__).with_suffix(".cpp")),
        "-o",
        str(path),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return path


@pytest.mark.parametrize("seed", range(4))
def test_every_element_is_moved_once_by_aligned_vectors(program: Path, seed: int) -> None:
    result = subprocess.run([program, str(seed), "4"], capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, "passed\n"), result.stdout + result.stderr
