"""What plays CUDA kernels on the host shows their mistakes, and goes on after them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cuda_on_host
import pytest
import torch
from cuda_on_host import UNDER_ASAN, failure_to_load, load_cuda_on_host

pytestmark = pytest.mark.long  # compiling takes a minute

RIGHT = [*range(1, 64), 0]


@pytest.fixture(autouse=True)
def loaded() -> None:
    load_cuda_on_host()


def broken(name: str) -> list[int]:
    values: list[int] = torch.ops.commhook_on_host.broken(name).tolist()
    return values


@pytest.mark.parametrize(
    "mistake", ["no barrier", "a barrier of the warp alone", "a shuffle as a barrier"]
)
@pytest.mark.skipif(not UNDER_ASAN, reason="is an error: see test_cuda_races.py")
def test_a_missing_barrier_gives_other_values(mistake: str) -> None:
    for _ in range(20):  # in any order
        assert broken("none") == RIGHT
        assert broken(mistake) != RIGHT


def test_shared_memory_begins_without_meaning() -> None:
    assert broken("none") == RIGHT
    assert len(set(broken("memory that nobody wrote"))) == 1


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("half of a block at a barrier", "wait for others that do not come"),
        ("half of a warp at a barrier", "wait for others that do not come"),
        ("half of a warp in a shuffle", "wait for others that do not come"),
        ("half of a warp in a shuffle, for itself", "have left out a shuffle"),
        ("a shuffle of half of a warp", "must be one of all lanes"),
        ("a block that waits for another", "waits for one that need not have begun"),
    ],
)
def test_threads_that_part_are_an_error(mistake: str, message: str) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match=message):
            broken(mistake)
    assert broken("none") == RIGHT


@pytest.mark.parametrize("shape", [(0, 32, 0), (1, 0, 0), (1, 33, 0), (1, 2048, 0), (1, 32, 65536)])
def test_what_no_gpu_launches(shape: tuple[int, int, int]) -> None:
    with pytest.raises(RuntimeError, match="on_host: no"):
        torch.ops.commhook_on_host.launch_empty(*shape)


def test_a_build_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho called >> {tmp_path}/log\necho "is broken" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -pipe")
    monkeypatch.setattr(cuda_on_host, "BUILD", tmp_path)
    monkeypatch.setattr(cuda_on_host, "failure_to_load", cache(failure_to_load.__wrapped__))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"compiler -pipe .*\n.*is broken"):
            load_cuda_on_host()
    assert (tmp_path / "log").read_text() == "called\n"
