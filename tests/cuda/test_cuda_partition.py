"""The CUDA kernels' index arithmetic, tried on the host: no GPU and no CUDA toolkit is needed."""

from pathlib import Path

import pytest
from cpp_compiler import run_program

HERE = Path(__file__).parent
UNDEFINED = "bounds,shift,signed-integer-overflow"


@pytest.mark.long  # compiling takes a quarter of a minute
@pytest.mark.parametrize("seed", range(4))
def test_every_warp_finds_its_run_and_its_tensors(seed: int) -> None:
    # A vector at an address that is not aligned for it ends the program.
    sanitizers = f"-fsanitize=address,alignment,{UNDEFINED}"
    source = HERE / "test_cuda_partition.cpp"
    run_program(source, "-O1", sanitizers, arguments=(str(seed), "4"))


def test_short_ways_give_what_long_ones_do() -> None:
    """Places and single instructions of the block codecs."""
    source = HERE / "test_cuda_places.cpp"
    run_program(source, "-O2", "-ffp-contract=off", f"-fsanitize={UNDEFINED}")
