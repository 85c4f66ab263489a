"""The protocol of ``csrc/runtime/wire``, without sockets: what is below a link may do anything."""

from __future__ import annotations

import subprocess

import pytest
from cpp_compiler import NoCompilerError, build_once, cpp_compiler
from repository import ROOT, SUPPORT

_WIRE = ROOT / "csrc/runtime/wire"
SOURCES = [
    *(_WIRE / f"{name}{end}" for name in ("frame", "rail", "link") for end in (".h", ".cpp")),
    SUPPORT / "wire_histories.cpp",
]


def _run(flags: list[str], *arguments: str) -> None:
    """Runs ``wire_histories.cpp``, compiled with these flags."""
    try:
        compiler = cpp_compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))
    sources = [str(each) for each in SOURCES if each.suffix == ".cpp"]
    command = [*compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    program = build_once("wire_histories", [*command, f"-I{ROOT / 'csrc'}", *sources], SOURCES)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout == f"{arguments[1]} histories\n"


def test_connections_that_are_cut_and_changed() -> None:
    """All messages arrive as they were sent, once, or both sides know why they do not."""
    _run([], "1", "200")


def test_frames_that_do_not_fit() -> None:
    """Their checksums are right: a process that does not keep to the protocol has sent them."""
    _run([], "1", "2000", "hostile")


@pytest.mark.long
@pytest.mark.parametrize("arguments", [("500", "300"), ("5000", "5000", "hostile")])
def test_memory_of_messages_that_are_over(arguments: tuple[str, ...]) -> None:
    """No byte of it is read or written: the sanitizer sees it."""
    _run(["-fsanitize=address,undefined"], *arguments)
