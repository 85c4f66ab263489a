"""The CUDA kernels' index arithmetic, tried on the host: no GPU and no CUDA toolkit is needed."""

from pathlib import Path

import pytest
from cpp_compiler import run_program

pytestmark = pytest.mark.long  # compiling takes a quarter of a minute

HERE = Path(__file__).parent


def run(name: str, seed: int) -> None:
    run_program(
        HERE / name,
        "-O1",
        # A vector at an address that is not aligned for it ends the program.
        "-fsanitize=address,alignment,bounds,shift,signed-integer-overflow",
        arguments=(str(seed), "4"),
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_warp_finds_its_run_and_its_tensors(seed: int) -> None:
    run("test_cuda_partition.cpp", seed)


@pytest.mark.parametrize("seed", range(4))
def test_every_element_is_moved_once_by_aligned_vectors(seed: int) -> None:
    run("test_cuda_rows.cpp", seed)
