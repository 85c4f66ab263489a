"""Barriers of the CUDA kernels: none is missing, and a missing one is found in every run.

The kernels run on the host. Two accesses race unless a barrier orders them, whatever they happened
to give (tests/support/on_host/races.h).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import cuda_on_host
import pytest
import torch
from cuda_on_host import (
    LAUNCH,
    NAMESPACE,
    UNDER_ASAN,
    cuda_kernels_on_host,
    failure_to_load,
    load_cuda_on_host,
    nothing_past,
    omitted,
    take_launched,
)
from cuda_sanitized import run_kernels
from kernel_runs import FORMS, OTHERS, Runs, runs_of
from repository import ROOT

pytestmark = pytest.mark.long  # compiling takes two minutes
finds_races = pytest.mark.skipif(UNDER_ASAN, reason="one sanitizer's code at a time")
of_missing_barriers = pytest.mark.parametrize(
    "mistake", ["no barrier", "a barrier of the warp alone", "a shuffle as a barrier"]
)
RIGHT = [*range(1, 64), 0]

RACE = "no barrier orders accesses"
BARRIER = re.compile(r"\b__sync(?:warp|threads)\(")
#: One block of threads at a time, whose warps then have several tiles, and many at once.
WARPS = (1, 128)


def barrier_in(name: str, function: str, number: int = 0) -> str:
    """A barrier of a function of ``cuda/``, by its number."""
    text = (ROOT / "cuda" / name).read_text()
    found = [*BARRIER.finditer(text, text.index(f" {function}("))][number]
    return f"cuda/{name}:{text.count(chr(10), 0, found.start()) + 1}"


#: Barriers that no race shows: the kernel's runs, the barrier, and the reason.
NEEDLESS = {
    ("topk encode", barrier_in("topk_passes.cuh", "is_last_block")): (
        "What other threads did before it is atomic. It is for the fence after it to order them."
    ),
    ("chunk_topk encode", barrier_in("compensate.cuh", "for_each_compensated_tile", 1)): (
        "A warp has one tile, which it does not write anew."
    ),
}


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    load_cuda_on_host()
    yield
    host().omit_barrier("")


def host() -> torch._ops._OpNamespace:
    return getattr(torch.ops, NAMESPACE)


def barriers_reached(kind: str) -> set[str]:
    host().take_barriers()
    with cuda_kernels_on_host(min(WARPS)):
        for runs in runs_of(kind):
            for run in runs.values():
                run()
    return set(host().take_barriers())


def is_found(runs: Runs, name: str, barrier: str) -> bool:
    """Whether a run shows that the barrier is missing; if so, it must do so each time."""
    with omitted(barrier):
        try:
            runs[name]()
        except RuntimeError as error:
            assert RACE in str(error)
        else:
            return False
        for _ in range(2):
            with pytest.raises(RuntimeError, match=RACE):
                runs[name]()
    return True


def broken(name: str) -> list[int]:
    values: list[int] = host().broken(name).tolist()
    return values


# ---- what plays the kernels shows their mistakes, and goes on after them -------------------------


@of_missing_barriers
@pytest.mark.skipif(not UNDER_ASAN, reason="is an error: see test_a_missing_barrier_races")
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


@finds_races
def test_an_access_past_a_tensor_is_an_error() -> None:
    x = torch.ones(100)
    with cuda_kernels_on_host(max(WARPS)):
        for past in (x[:99], x[:96]):
            forbidden = pytest.raises(RuntimeError, match=r"forbidden memory .* at .*row\.h")
            with nothing_past([past]), forbidden:
                torch.ops.commhook.flatten([x])
        with nothing_past([x]):
            torch.ops.commhook.flatten([x])


@pytest.mark.parametrize("shape", [(0, 32, 0), (1, 0, 0), (1, 33, 0), (1, 2048, 0), (1, 32, 65536)])
def test_what_no_gpu_launches(shape: tuple[int, int, int]) -> None:
    with pytest.raises(RuntimeError, match="on_host: no"):
        host().launch_empty(*shape)


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


# ---- the detector --------------------------------------------------------------------------------


@finds_races
@pytest.mark.parametrize(
    "right",
    [
        "none",
        "neighbouring bytes",
        "neighbouring vectors",
        "atomics",
        "volatile as a flag for nothing",
        "a barrier of the lanes that share",
        "shared memory of two blocks",
        "fences",
        "a store with release, a load with acquire",
    ],
)
def test_what_is_ordered_does_not_race(right: str) -> None:
    for _ in range(5):
        host().racing(right)


@finds_races
@pytest.mark.parametrize(
    "mistake",
    [
        "all write one element",
        "two blocks write one element",
        "a block reads what another writes",
        "all read one element, one writes it",
        "bytes that overlap",
        "a word of a neighbour's vector",
        "an atomic and a read",
        "an atomic and a write",
        "a read, then a write past a barrier of other lanes",
        "no fence before the atomic",
        "no fence after the atomic",
        "fences of all before the barrier",
        "a store without release",
        "a load without acquire",
    ],
)
def test_what_nothing_orders_races_in_every_run(mistake: str) -> None:
    for _ in range(5):
        with pytest.raises(RuntimeError, match=rf"{RACE} of racing\n.*broken_kernels.cpp:\d+"):
            host().racing(mistake)
    host().racing("none")


@finds_races
@of_missing_barriers
def test_a_missing_barrier_races(mistake: str) -> None:
    for _ in range(5):
        host().broken("none")
        with pytest.raises(RuntimeError, match=RACE):
            host().broken(mistake)


# ---- the kernels ---------------------------------------------------------------------------------


@finds_races
@pytest.mark.parametrize("kind", [*FORMS, *OTHERS])
def test_each_missing_barrier_is_found(kind: str) -> None:
    """Of each kernel, by the name of its runs up to a comma."""
    missed: dict[tuple[str, str], bool] = {}
    for warps in WARPS:
        with cuda_kernels_on_host(warps):
            for runs in runs_of(kind):
                for name, run in runs.items():
                    host().take_barriers()
                    run()
                    for barrier in host().take_barriers():
                        key = (f"{kind} {name.partition(',')[0]}", barrier)
                        if missed.get(key, True):
                            missed[key] = not is_found(runs, name, barrier)
    never = {key for key, is_missed in missed.items() if is_missed}
    assert never == {key for key in NEEDLESS if key in missed}


@finds_races
def test_all_barriers_are_reached() -> None:
    written = set()
    for path in sorted((ROOT / "cuda").glob("*.cu*")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if BARRIER.search(line.partition("//")[0]):
                written.add(f"{Path('cuda') / path.name}:{number}")
    reached = set().union(*(barriers_reached(kind) for kind in [*FORMS, *OTHERS]))
    assert reached == written


@finds_races
def test_sanitizers_see_each_kernel() -> None:
    """The program that a GPU's sanitizers watch runs all kernels that ``cuda/`` launches."""
    written = {
        match[1].partition("<")[0]
        for path in (ROOT / "cuda").glob("*.cu*")
        for match in LAUNCH.finditer(path.read_text())
    }
    take_launched()
    with cuda_kernels_on_host(max(WARPS)):
        run_kernels("cpu")
    assert {name.partition("<")[0] for name in take_launched()} == written
