"""What the CUDA kernels' accesses cost: sectors of global memory, bank conflicts of shared memory.

The kernels run on the host, which puts their warps together again
(tests/support/on_host/requests.h). With ``ACCESSES=1`` each test prints what each kernel costs, and
the lines that cost most.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from cuda_on_host import (
    NAMESPACE,
    UNDER_ASAN,
    Requests,
    cuda_kernels_on_host,
    load_cuda_on_host,
    requests_of,
)
from kernel_runs import FORMS, OTHERS, block_runs, least_block, other_runs

pytestmark = [
    pytest.mark.skipif(UNDER_ASAN, reason="one sanitizer's code at a time"),
    pytest.mark.long,  # compiling takes two minutes
]

#: Times the fewest sectors, or passes over the banks, of all of a kernel's accesses together.
LIMIT = 1.1


class Exemption(NamedTuple):
    """Runs that may cost more than LIMIT."""

    runs: str  # a pattern of "form or codec: run: kernel"
    memory: str  # a pattern, too
    limit: float
    blocks: range = range(1 << 20)


#: The first that matches counts. Tighten or drop them as kernels get better. Each limit is the
#: largest of today's kernels, rounded up. Above each is the reason.
EXEMPTIONS = [
    # Messages begin at multiples of 16 bytes, half of them within a sector: two requests touch it,
    # and the second finds it in the cache.
    Exemption("(?:int.*|e.m.): reduce: .*", "global", 1.2, range(512)),
    # The same, of codes that take half as many bytes.
    Exemption("int2.*: reduce: .*", "global", 1.2, range(512, 1025)),
    # A block's partial of 16 bytes is read in two parts of eight, for a few hundred in all.
    Exemption("flatten: .*: flatten_stats_sum_kernel", "global", 1.6),
    # Places are random.
    Exemption("randomk: .*: (?:take|put)_entries_kernel", "global", 6.2),
    # Places follow from the values.
    Exemption("topk: .*: add_entries_kernel", "global", 1.7),
    # A lane reads its group of 16 values, 64 bytes from its neighbour's, and writes entries and
    # errors that become zero where the values have them.
    Exemption("topk: .*: write_entries_kernel", "global", 4.4),
    # Groups are read as in write_entries_kernel, single values again; bins follow from them.
    Exemption("topk: .*: count_low_kernel", "global", 3.1),
    # The last block alone reads the bins, each thread its own ones, one after the other.
    Exemption("topk: .*: compensate_count_kernel", "global", 1.4),
    # Bins follow from the values.
    Exemption("topk: .*: compensate_count_kernel", "shared", 1.3),
    # A third of the values are candidates, which are read where they lie, again and again.
    Exemption("chunk_topk: encode, not finite: .*", "shared", 1.2),
    # Each signal of eight bytes goes to the memory of another rank.
    Exemption("symmetric: barrier.*: barrier_kernel", "global", 1.3),
]


BLOCKS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
SEGMENTS = [1, 2, 3, 8, 16]


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    load_cuda_on_host()
    with cuda_kernels_on_host(128):
        yield


def exemption_of(name: str, memory: str, block_size: int) -> Exemption | None:
    for each in EXEMPTIONS:
        fits = re.fullmatch(each.runs, name) and re.fullmatch(each.memory, memory)
        if fits and block_size in each.blocks:
            return each
    return None


def told(name: str, memory: str, shape: str, requests: Requests) -> str:
    most = ", ".join(f"{line}: {waste}" for line, waste in requests.waste.most_common(3))
    return (
        f"{name} {shape}: {memory} memory {requests.ratio:.2f} times the fewest parts,"
        f" {requests.bytes / requests.count:.0f} bytes a request; most at {most or 'none'}"
    )


def check(name: str, block_size: int, shape: str, found: dict[tuple[str, str], Requests]) -> None:
    """Every kernel of a run keeps its limits."""
    assert found, name
    wrong = []
    for (kernel, memory), requests in found.items():
        full = f"{name}: {kernel}"
        exemption = exemption_of(full, memory, block_size)
        line = told(full, memory, shape, requests)
        if os.environ.get("ACCESSES"):
            print(line)
        if requests.ratio > (LIMIT if exemption is None else exemption.limit):
            wrong.append(line)
    assert not wrong, "\n".join(wrong)


# ---- the count -----------------------------------------------------------------------------------

#: Requests, sectors or passes, the fewest, of all accesses to the memory.
KNOWN = [
    ("words", "global", (2, 8, 8)),
    ("words past the start of a sector", "global", (2, 10, 8)),
    ("every second word", "global", (2, 16, 8)),
    ("one word for all", "global", (2, 5, 5)),
    ("vectors", "global", (2, 32, 32)),
    ("every second vector", "global", (2, 64, 32)),
    ("bytes", "global", (2, 2, 2)),
    ("shared words", "shared", (1, 1, 1)),
    ("every second shared word", "shared", (1, 2, 1)),
    ("one bank", "shared", (1, 32, 1)),
    ("one bank, padded", "shared", (1, 1, 1)),
    ("shared vectors", "shared", (1, 4, 4)),
    ("every second shared vector", "shared", (1, 8, 4)),
    # Steps of 24, 16 and 8 lanes, three times.
    ("a loop of other lengths", "global", (9, 18, 18)),
    # The lanes of an iteration's branch are together, and so are all lanes after it.
    ("a branch in a loop", "global", (4, 16, 8)),
    ("a branch in a loop", "shared", (4, 4, 4)),
]


@pytest.mark.parametrize(("name", "memory", "cost"), KNOWN)
def test_accesses_of_known_cost(name: str, memory: str, cost: tuple[int, int, int]) -> None:
    found = requests_of(lambda: getattr(torch.ops, NAMESPACE).watched(name))["watched", memory]
    assert (found.count, found.parts, found.fewest) == cost


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("form", FORMS)
def test_block_codecs(form: str, block_size: int, segments: int) -> None:
    if block_size < least_block(form):
        pytest.skip("has no such blocks")
    numel = max(16384, 4 * block_size * segments)
    for name, run in block_runs(form, block_size, segments, [torch.randn(numel)]).items():
        shape = f"with {segments} segments of blocks of {block_size}"
        check(f"{form}: {name}", block_size, shape, requests_of(run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flatten(dtype: torch.dtype) -> None:
    """Most of a bucket's bytes are in large tensors, which begin anywhere in the bucket."""
    tensors = [torch.randn(numel).to(dtype) for numel in (20_000, 3001, 77, 16_384)]
    for name, run in other_runs("flatten", tensors).items():
        check(f"flatten: {name}", 1, f"of {dtype}", requests_of(run))


@pytest.mark.parametrize("kind", ["narrow error", "topk", "randomk", "chunk_topk"])
def test_whole_buckets(kind: str) -> None:
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0))  # what is sent matters
    for name, run in other_runs(kind, [values]).items():
        check(f"{kind}: {name}", 1, "of 40,000 values", requests_of(run))


def test_shared_memory() -> None:
    for name, run in other_runs("symmetric", [torch.empty(20_000), torch.empty(16_384)]).items():
        check(f"symmetric: {name}", 1, "of two segments", requests_of(run))


def test_each_exemption_is_of_some_run() -> None:
    """Of a name that runs have; the limits themselves are tried above."""
    values = [torch.randn(512)]
    runs = {form: block_runs(form, 256, 1, values) for form in FORMS}
    runs |= {kind: other_runs(kind, values) for kind in OTHERS}
    names = {
        f"{kind}: {name}: {kernel}"
        for kind, own in runs.items()
        for name, run in own.items()
        for kernel, _ in requests_of(run)
    }
    for each in EXEMPTIONS:
        assert any(re.fullmatch(each.runs, name) for name in names), each
        assert each.limit > LIMIT
