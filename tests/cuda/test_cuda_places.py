"""Places and single instructions of the block codecs' CUDA kernels, tried on the host."""

from pathlib import Path

from cpp_compiler import run_program


def test_short_ways_give_what_long_ones_do() -> None:
    run_program(
        Path(__file__).with_suffix(".cpp"),
        "-O2",
        "-ffp-contract=off",
        "-fsanitize=bounds,shift,signed-integer-overflow",
    )
