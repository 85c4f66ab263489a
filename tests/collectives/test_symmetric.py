"""Compressed sums over memory that the ranks share: on the CPU, with ranks as threads.

The bits are those of the collectives. The same on the CUDA kernels: tests/cuda.
"""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernel_device import KernelDevice
from symmetric_ranks import (
    CODEC,
    Case,
    SharedRanks,
    assert_the_bits_of_collectives,
    test_a_barrier_that_waits_in_vain,  # noqa: F401
    test_a_rank_that_does_not_come,  # noqa: F401
    test_gathered_segments,  # noqa: F401
    test_segments_at_any_addresses,  # noqa: F401
    test_the_bits_of_the_collectives,  # noqa: F401
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_commhook.collectives import compressed_all_reduce
from torch_commhook.collectives.symmetric_memory import (
    SymmetricBuffers,
    control_words,
    symmetric_barrier,
    symmetric_gather,
)

commhook = torch.ops.commhook


@pytest.fixture
def device() -> KernelDevice:
    return KernelDevice("cpu")


def shared_for(case: Case) -> SharedRanks:
    return SharedRanks(case.ranks, case.codec.nbytes(case.numel, case.ranks))


def test_values_that_are_not_finite() -> None:
    case = Case(CODEC, 3, 1000)
    case.values[0][1][0][:3] = torch.tensor([torch.inf, torch.nan, 1.0])
    assert_the_bits_of_collectives(case, shared_for(case).run(case.of_rank))


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_come_at_any_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank overwrites what another has still to read."""
    draw = random.Random(seed)
    barrier, gather = SymmetricBuffers.barrier, SymmetricBuffers.gather

    def late(method: Any) -> Any:
        def call(*args: Any) -> None:
            time.sleep(draw.choice([0, 0, 0.005]))
            method(*args)
            time.sleep(draw.choice([0, 0, 0.005]))

        return call

    monkeypatch.setattr(SymmetricBuffers, "barrier", late(barrier))
    monkeypatch.setattr(SymmetricBuffers, "gather", late(gather))
    case = Case(CODEC, 4, 3000, steps=15, seed=seed)
    assert_the_bits_of_collectives(case, shared_for(case).run(case.of_rank))


def sum_of(rank: int, numel: int = 1000, **options: Any) -> Tensor:
    out = torch.zeros(numel)
    compressed_all_reduce(torch.full((numel,), 1.0 + rank), CODEC, out=out, **options).wait()
    return out


def test_a_group_whose_timeout_is_longer_than_a_barrier_takes() -> None:
    """Such a group is one that waits for ever, and no reason to fail."""
    shared = SharedRanks(2, CODEC.nbytes(1000, 2))
    for total in shared.run(sum_of, numel=1000, timeout=1e12):
        assert torch.equal(total, torch.full((1000,), 3.0))


@pytest.mark.real_time
def test_a_rank_that_fails_is_not_waited_for() -> None:
    shared = SharedRanks(3, CODEC.nbytes(1000, 3))

    def rank_2_fails(rank: int, **options: Any) -> None:
        if rank == 2:
            with pytest.raises(TypeError, match="must be dense"):
                compressed_all_reduce(
                    torch.ones(1000).to_sparse(), CODEC, out=torch.zeros(1000), **options
                )
        else:
            assert sum_of(rank, **options).isnan().all()
        with pytest.raises(RuntimeError, match=r"rank [012] of the group did not reach"):
            sum_of(rank, **options)

    begun = time.monotonic()
    shared.run(rank_2_fails, timeout=60)
    assert time.monotonic() - begun < 10


# ---- the operators -------------------------------------------------------------------------------


def controls(ranks: int = 2, **options: Any) -> list[Tensor]:
    return [torch.zeros(control_words(ranks), dtype=torch.int64, **options) for _ in range(ranks)]


def unlike() -> list[Tensor]:
    return [controls(2)[0], controls(3)[0]]


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BARRIER_ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: ([], 0), ValueError, "controls must be 2 to 16 tensors, one for each rank, got 0"),
    (lambda: (controls(1), 0), ValueError, "must be 2 to 16 tensors, one for each rank, got 1"),
    (lambda: (controls(17), 0), ValueError, "must be 2 to 16 tensors, one for each rank, got 17"),
    (lambda: (controls(), 2), ValueError, "rank must be at least 0 and below 2"),
    (lambda: (controls(), -1), ValueError, "rank must be at least 0 and below 2"),
    (lambda: ([controls()[0], torch.zeros(4)], 0), TypeError, r"controls\[1\] must be .* int64"),
    (lambda: (unlike(), 0), ValueError, r"controls\[1\] must be flat and hold 4 numbers"),
]


@pytest.mark.parametrize(("make", "error", "message"), BARRIER_ERRORS)
@pytest.mark.parametrize("is_fake", [False, True])
def test_what_a_barrier_refuses(make: Any, error: Any, message: str, is_fake: bool) -> None:
    with FakeTensorMode() if is_fake else nullcontext(), pytest.raises(error, match=message):
        symmetric_barrier(*make(), timeout=0.01)


def test_memory_that_a_barrier_refuses() -> None:
    whole, gone, other = zeros(8, dtype=torch.int64), controls(), controls()[0]
    gone[1].untyped_storage().resize_(8)
    strange = torch.frombuffer(zeros(40).numpy(), dtype=torch.int64, offset=4, count=4)
    for given, message in (
        ([whole[:4], whole[2:6]], r"controls\[1\] must share no memory with controls\[0\]"),
        ([whole[::2], other], r"controls\[0\] must be flat and hold 4"),
        (gone, r"controls\[1\] must have a storage"),
        ([strange, other], "must begin at an address that is a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            symmetric_barrier(given, 0, timeout=0.01)
    for timeout in (0.0, -1.0, float("nan"), 1e10):
        with pytest.raises(ValueError, match="timeout must be above 0"):
            symmetric_barrier(controls(), 0, timeout=timeout)


@pytest.mark.parametrize("is_fake", [False, True])
def test_what_a_gather_refuses(is_fake: bool) -> None:
    with FakeTensorMode() if is_fake else nullcontext():
        one, two = zeros(4), zeros(2, dtype=torch.int64)
        for segments, message, failed, error, text in [
            ([], zeros(0), None, ValueError, "shards must be 1 to 16 tensors"),
            ([one] * 17, zeros(68), None, ValueError, "shards must be 1 to 16 tensors"),
            ([one, zeros(4)], zeros(12), None, ValueError, "message must .*hold 8 bytes"),
            ([one.char()], zeros(4), None, TypeError, r"shards\[0\] must be of dtype uint8"),
            ([one], zeros(4), torch.zeros(1), TypeError, "failed must be .* int64"),
            ([one], zeros(4), two, ValueError, "failed must hold one number"),
        ]:
            with pytest.raises(error, match=text):
                symmetric_gather(segments, message, failed=failed)
    if not is_fake:
        with pytest.raises(ValueError, match="must hold a multiple of 4 bytes, got 3"):
            symmetric_gather([zeros(3)], zeros(3))
        whole = zeros(8)
        with pytest.raises(ValueError, match="message must share no memory with shards"):
            symmetric_gather([whole[:4], whole[4:]], whole)


@pytest.mark.parametrize("is_fake", [False, True])
def test_what_a_sum_of_segments_refuses(is_fake: bool) -> None:
    with FakeTensorMode() if is_fake else nullcontext():
        good = torch.zeros(CODEC.nbytes(100), dtype=torch.uint8)
        short = torch.zeros(8, dtype=torch.uint8)
        message = torch.zeros_like(good)
        reduce: Any = CODEC.reduce_segments
        for messages, own, failed, error, text in [
            ([], message, None, ValueError, "messages must be 1 to 16 tensors"),
            ([good] * 17, message, None, ValueError, "messages must be 1 to 16 tensors"),
            ([good, short], message, None, ValueError, r"messages\[1\] must .*hold 128 bytes"),
            ([good, good], short, None, ValueError, "message must .*hold 128 bytes"),
            (
                [good.char(), good],
                message,
                None,
                TypeError,
                r"messages\[0\] must be of dtype uint8",
            ),
            ([good], message, torch.zeros(1), TypeError, "failed must be .* int64"),
        ]:
            with pytest.raises(error, match=text):
                reduce(messages, own, 100, failed=failed)
    if not is_fake:
        with pytest.raises(ValueError, match=r"message must share no memory with messages\[1\]"):
            reduce([good.clone(), message], message, 100)
        with pytest.raises(ValueError, match=r"error must share no memory with messages\[0\]"):
            whole = torch.zeros(100)
            bytes_ = whole.view(torch.uint8)[: len(message)]
            reduce([bytes_], message, 100, error=whole)
        with pytest.raises(TypeError, match=r"error must be dense"):
            reduce([good], message, 100, error=torch.zeros(100).to_sparse())
        with pytest.raises(ValueError, match=r"numel must be at least 0 and at most 2\^60"):
            reduce([good], message, 2**63 - 1)


def test_segments_of_any_shape() -> None:
    """Their bytes count, as for other messages."""
    flat = torch.arange(CODEC.nbytes(100), dtype=torch.uint8)
    right, got = torch.empty_like(flat), torch.empty_like(flat)
    CODEC.reduce_segments([flat, flat], right, 100)
    CODEC.reduce_segments([flat.view(1, -1), flat.view(-1, 4)], got, 100)
    assert torch.equal(got, right)


def test_opcheck() -> None:
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    segments = [torch.zeros(CODEC.nbytes(100), dtype=torch.uint8) for _ in range(2)]
    message = torch.zeros_like(segments[0])
    for codec, settings in [
        ("blockwise", {"bits": 8, "block_size": 256, "symmetric": True}),
        ("fp8", {"format": "e4m3", "block_size": 256}),
    ]:
        operator = getattr(commhook, f"{codec}_reduce_shards").default
        more = {**settings, "error": torch.zeros(100), "failed": torch.tensor([0])}
        torch.library.opcheck(operator, (segments, message, 100), more, test_utils=tests)
    whole = torch.zeros(2 * len(message), dtype=torch.uint8)
    torch.library.opcheck(
        commhook.symmetric_gather.default, (segments, whole), {"failed": torch.tensor([0])}
    )
    torch.library.opcheck(
        commhook.symmetric_barrier.default, (controls(), 0), {"timeout": 0.01}, test_utils=tests
    )


def test_compiled() -> None:
    """Compiled code keeps the operators, in their order."""

    def step(segments: list[Tensor], given: list[Tensor], message: Tensor) -> Tensor:
        symmetric_barrier(given, 0, timeout=0.01)
        symmetric_gather(segments, message, failed=given[0][3:])
        return message.float().sum()

    segments = [torch.ones(8, dtype=torch.uint8) for _ in range(2)]
    given = controls()
    message = torch.zeros(16, dtype=torch.uint8)
    total = torch.compile(step, backend="aot_eager", fullgraph=True)(segments, given, message)
    assert total == 255 * 16  # since nobody has come to the barrier
    assert given[0].tolist() == [0, 0, 1, 2]
