"""Places and single instructions of the block codecs' CUDA kernels, tried on the host."""

import subprocess
from pathlib import Path

import pytest
from cpp_compiler import NoCompilerError, build_once, cpp_compiler
from repository import ROOT


def test_short_ways_give_what_long_ones_do() -> None:
    try:
        compiler = cpp_compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))
    source = Path(__file__).with_suffix(".cpp")
    command = [
        *compiler,
        "-std=c++20",
        "-O2",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-ffp-contract=off",
        "-fsanitize=bounds,shift,signed-integer-overflow",
        "-fsanitize-undefined-trap-on-error",
        f"-I{ROOT / 'cuda'}",
        f"-I{ROOT / 'csrc'}",
        str(source),
    ]
    headers = [file for name in ("cuda", "csrc") for file in (ROOT / name).rglob("*.h")]
    program = build_once("cuda_places", command, [source, *headers])
    result = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "passed\n"), result.stdout + result.stderr
