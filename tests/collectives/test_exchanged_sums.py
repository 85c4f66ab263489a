"""Sums by exchanges: of values in their dtype, and of 16-bit values that are added up in float32.

The operator, the values, the bytes, hooks.cast among many ranks, and what waits for what.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_threads import gloo_ranks
from mode_cases import CastInTwoStages, Mode
from on_ranks import on_processes
from ops_reference import LEVELS, cpu_level, threads
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import GradBucket, PeerError, attach, collectives, hooks, run_hook
from torch_commhook.collectives.issuing import bytes_of_sum, is_gathered, sums_in_place
from torch_commhook.collectives.plain import sum_rows
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.metrics import ring_all_reduce_bytes
from torch_commhook.native.bucket_ops import BUCKET_DTYPES
from torch_commhook.process_group import register
from torch_commhook.testing import run_ranks, simulate

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
by_dtype = pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)

# ---- the operator --------------------------------------------------------------------------------


def in_order(rows: Tensor, dtype: torch.dtype) -> Tensor:
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total.to(dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_added_in_order(dtype: torch.dtype, level: str) -> None:
    for count, columns in ((1, 5), (2, 1), (8, 2049), (17, 9001), (3, 0)):
        rows = torch.randn(count, columns).to(dtype)
        for out_dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            want = in_order(rows, out_dtype)
            for number in (1, 3):
                out = torch.full((columns + 2,), 7.0, dtype=out_dtype)
                with cpu_level(level), threads(number):
                    assert torch.equal(sum_rows(rows, out[1:-1]), want)
                assert out[0] == out[-1] == 7


def test_what_is_not_finite_stays_so() -> None:
    rows = torch.ones(8, 3, dtype=torch.bfloat16)
    rows[3, 0], rows[5, 1] = math.inf, math.nan
    assert str(sum_rows(rows, torch.empty(3)).tolist()) == "[inf, nan, 8.0]"


def test_opcheck() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape in ((3, 5), (1, 1), (2, 0)):
            rows, out = torch.randn(shape).to(dtype), torch.empty(shape[1])
            torch.library.opcheck(torch.ops.commhook.sum_rows.default, (rows, out))


ROWS, OUT, FREED = torch.ones(3, 4), torch.empty(4), torch.ones(3, 4)
FREED.untyped_storage().resize_(8)
ERRORS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "float64": (ROWS.double(), OUT, TypeError, "rows must be of dtype float32, float16 or"),
    "int64": (ROWS.long(), OUT, TypeError, "rows must be of dtype float32, float16 or"),
    "complex out": (ROWS, OUT.cfloat(), TypeError, "out must be of dtype float64, float32"),
    "sparse": (ROWS.to_sparse(), OUT, TypeError, "rows must be dense"),
    "flat": (ROWS[0], OUT, ValueError, "rows must be contiguous, of two dimensions, with one"),
    "none": (ROWS[:0], OUT, ValueError, "rows must be contiguous, of two dimensions, with one"),
    "strided": (ROWS.t(), OUT[:3], ValueError, "rows must be contiguous, of two dimensions"),
    "short": (ROWS, OUT[:3], ValueError, r"out must be contiguous, of sizes \[4\], got"),
    "matrix": (ROWS, OUT.view(2, 2), ValueError, r"out must be contiguous, of sizes \[4\], got"),
    "shared": (ROWS, ROWS[1], ValueError, "out must share no memory with rows"),
    "meta": (ROWS, OUT.to("meta"), ValueError, "out must be on the device of the values"),
    "freed": (FREED, OUT, ValueError, "rows must have a storage of"),
    "leaf": (ROWS.clone().requires_grad_(), OUT, RuntimeError, "rows must not require grad"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    rows, out, error, message = ERRORS[case]
    with pytest.raises(error, match=f"sum_rows: {message}"):
        sum_rows(rows, out)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_values_are_refused() -> None:
    rows = torch.quantize_per_tensor(ROWS, 1.0, 0, torch.qint8)
    with pytest.raises(TypeError, match="rows must be of dtype float32, float16 or bfloat16, got"):
        sum_rows(rows, OUT)


# ---- hooks.cast ----------------------------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize("ranks", [8, 64, 256])
def test_the_error_does_not_grow_with_the_ranks(dtype: torch.dtype, ranks: int) -> None:
    """Each value is rounded once, and so is the mean."""
    grads = [[torch.rand(777) + 0.5] for _ in range(ranks)]
    found = simulate(hooks.cast(dtype), grads)
    exact = torch.stack([each for (each,) in grads]).double().mean(0)
    (got,) = found.result  # the same bits on all ranks
    assert ((got.double() - exact).abs() <= 2.01 * ROUNDOFF[dtype] * exact).all()
    assert 0 < found.error < ROUNDOFF[dtype]


def all_reduced(state: object, bucket: GradBucket) -> Any:
    group = collectives.resolve_group()
    wire = bucket.flatten(scale=1 / group.size(), dtype=torch.bfloat16)
    return collectives.all_reduce(wire).then(lambda done: done.value().float())


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_among_few_ranks_one_all_reduce_adds_in_16_bits(ranks: int) -> None:
    grads = [[torch.randn(1000)] for _ in range(ranks)]
    (got,), (want,) = simulate(hooks.cast(), grads).result, simulate(all_reduced, grads).result
    assert torch.equal(got, want)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
def test_any_number_of_elements(numel: int) -> None:
    grads = [[torch.randn(numel)] for _ in range(8)]
    found = simulate(hooks.cast(), grads, steps=2)
    assert found.result[0].shape == (numel,)
    rounded = torch.stack([(each / 8).bfloat16() for (each,) in grads])
    assert torch.equal(found.result[0], in_order(rounded, torch.bfloat16).float())
    assert found.wire_bytes == ring_all_reduce_bytes(2 * 8 * math.ceil(numel / 8), 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    grads = [[torch.randn(50).to(dtype)] for _ in range(8)]
    (got,) = simulate(hooks.cast(), grads).result
    assert got.dtype == dtype
    rounded = torch.stack([(each.to(torch.float64) / 8).bfloat16() for (each,) in grads])
    assert torch.equal(got, in_order(rounded, torch.bfloat16).to(dtype))


def test_sums_beyond_16_bits() -> None:
    grads = [[torch.full((10,), 60000.0)] for _ in range(8)]
    assert simulate(hooks.cast(torch.float16), grads).result[0].tolist() == [60000.0] * 10
    grads[3][0][2], grads[5][0][4] = math.nan, math.inf
    (got,) = simulate(hooks.cast(torch.float16), grads).result
    assert got[2].isnan() and got[4].isinf() and got[[0, 1, 3, 5, 6, 7, 8, 9]].isfinite().all()


def _step(rank: int, text: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    handle = attach(model, parse_hook(text), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(8, 5, generator=generator)).square().mean().backward()
        optimizer.step()
    handle.remove()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("cast()", "allreduce()"),
        ("after(2, cast())", "allreduce()"),
        ("after(2, allreduce(), cast())", "allreduce()"),
        ("clip(0.1, cast())", "clip(0.1, allreduce())"),
        ("policy([('dim <= 1', cast(float16))], cast())", "allreduce()"),
        ("local_sgd(2, hook=cast())", "local_sgd(2)"),
    ],
)
def test_attached_to_a_model(text: str, plain: str) -> None:
    every, exact = run_ranks(_step, 8, text), run_ranks(_step, 8, plain)[0]
    for parameters in every:
        assert all(map(torch.equal, parameters, every[0]))
    for got, want in zip(every[0], exact, strict=True):
        assert (got - want).norm() < 0.01 * want.norm()


def _on_gloo(rank: int, group: Any) -> list[Tensor]:
    register(group, f"cast on thread {rank}")
    hook = hooks.cast(process_group=group)
    found = []
    for numel in (1, 1000, 30_001):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        bucket = GradBucket([torch.zeros(numel)], [gradient])
        found.append(run_hook(hook, None, bucket).wait().clone())
    dist.destroy_process_group(group)
    return found


def test_on_gloo_as_simulated() -> None:
    every = gloo_ranks(_on_gloo, 8)
    for place, numel in enumerate((1, 1000, 30_001)):
        grads = [
            [torch.randn(numel, generator=torch.Generator().manual_seed(rank))] for rank in range(8)
        ]
        (want,) = simulate(hooks.cast(), grads).result
        assert all(torch.equal(found[place], want) for found in every)


@pytest.mark.parametrize(
    "text",
    ["allreduce()", "cast()", "blockwise()", "topk(0.1)", "powersgd(rank=1)"],
)
def test_many_ranks_start_later_stages_in_any_order(text: str) -> None:
    ranks, shapes = 20, [(3,), (40, 25), (300, 200), (7, 9)]

    def drawn(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def run(rank: int, group: Any) -> list[Tensor]:
        register(group, f"{text} on thread {rank}")
        hook, futures = parse_hook(text), []
        hook.process_group = group
        for gradient in drawn(rank):
            bucket = GradBucket([torch.zeros_like(gradient)], [gradient])
            futures.append(run_hook(hook, None, bucket))
        order = random.Random(rank).sample(range(len(shapes)), len(shapes))
        found = {number: futures[number].wait().clone() for number in order}
        dist.destroy_process_group(group)
        return [found[number] for number in range(len(shapes))]

    every = gloo_ranks(run, ranks)
    wanted = [
        simulate(parse_hook(text), [[drawn(rank)[number]] for rank in range(ranks)]).result[0]
        for number in range(len(shapes))
    ]
    for found in every:
        assert all(map(torch.equal, found, every[0]))
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.flatten(), want.flatten(), rtol=1e-4, atol=1e-4)


# ---- two stages ----------------------------------------------------------------------------------


def _odd(rank: int, mode: Mode) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mode.wrap(nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False)))
    handle = attach(model, CastInTwoStages(), bucket_cap_mb=1e-5)
    with mode.step_function(model) as step:
        for number in range(2):
            step(torch.randn(8, 5, generator=torch.Generator().manual_seed(2 * number + rank)))
    assert [bucket.numel for bucket in handle.stats().buckets] == [21, 35]
    handle.remove()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_padding_under_compiled_autograd(two_ranks: RankPool) -> None:
    compiled = Mode("module", "context", fullgraph=True)
    eager = two_ranks.run(_odd, Mode("module", "eager"))
    for got, want in zip(two_ranks.run(_odd, compiled), eager, strict=True):
        assert all(map(torch.equal, got, want)) and all(map(torch.equal, got, eager[0]))


def _fails_between(rank: int) -> tuple[Tensor, str, Tensor]:
    """A rank cannot add up what it has got, and all ranks go on after that step."""
    model = nn.Linear(300, 300, bias=False)
    attach(model, CastInTwoStages(), bucket_cap_mb=25)
    found: list[Any] = []
    for step in range(3):
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and step == 1:
                patch.setattr("torch_commhook.collectives.plain.sum_rows", _raise)
            try:
                model(torch.full((2, 300), rank + 1.0)).sum().backward()
                found.append(model.weight.grad)
            except (ArithmeticError, PeerError) as error:
                found.append(f"{type(error).__name__}: {error}")
    first, said, last = found
    return first, said, last


def _raise(*arguments: Any) -> Tensor:
    raise ArithmeticError("no sum")


def test_a_rank_that_fails_between_two_stages_ends_the_step_of_all(three_ranks: RankPool) -> None:
    replies = three_ranks.run(_fails_between, timeout=60)
    for rank, (first, said, last) in enumerate(replies):
        pattern = "PeerError.* on rank 0: ArithmeticError" if rank else "ArithmeticError"
        assert re.match(pattern, said) and "no sum" in said, said
        assert first.eq(4.0).all() and last.eq(4.0).all()


# ---- direct sums ---------------------------------------------------------------------------------


def _drawn(rank: int, numel: int, dtype: torch.dtype, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def _sum_of_ranks(ranks: int, numel: int, dtype: torch.dtype, number: int = 0) -> Tensor:
    """The sum in the order of the ranks, in float32 or wider, rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = _drawn(0, numel, dtype, number).to(wide)
    for rank in range(1, ranks):
        total += _drawn(rank, numel, dtype, number).to(wide)
    return total.to(dtype)


def _direct_sums(rank: int, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """All under way at once, each in place."""
    tensors = [_drawn(rank, numel, dtype, number) for number, numel in enumerate(sizes)]
    futures = [collectives.all_reduce(tensor) for tensor in tensors]
    found = [future.wait() for future in futures]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(found, tensors, strict=True))
    return found


@pytest.mark.parametrize("dtype", BUCKET_DTYPES, ids=str)
def test_all_ranks_add_up_in_their_order(three_ranks: RankPool, dtype: torch.dtype) -> None:
    sizes = [1, 2, 5, 1000, 30_000, 100_000]
    assert [is_gathered(numel * dtype.itemsize, 3) for numel in sizes] == [
        2 * numel * dtype.itemsize <= 64 * 1024 for numel in sizes
    ]
    for found in three_ranks.run(_direct_sums, sizes, dtype):
        for number, (numel, got) in enumerate(zip(sizes, found, strict=True)):
            assert torch.equal(got, _sum_of_ranks(3, numel, dtype, number))


@on_processes
def test_shapes_and_inference_mode(rank: int) -> None:
    with torch.inference_mode():
        inference = collectives.all_reduce(torch.ones(4)).wait()
    matrix = collectives.all_reduce(torch.full((3, 40_000), rank + 1.0)).wait()
    whole = collectives.all_reduce(torch.tensor(2.5)).wait()
    assert inference.tolist() == [2.0] * 4
    assert matrix.shape == (3, 40_000)
    assert matrix.eq(3.0).all()
    assert whole.item() == 5.0


@pytest.mark.parametrize("rank", range(3))
def test_bytes_are_those_of_a_ring_or_of_a_gather(rank: int) -> None:
    assert bytes_of_sum(torch.empty(10), rank, 3) == 80
    own = 4 * (33_334 if rank == 2 else 33_333)
    assert bytes_of_sum(torch.empty(100_000), rank, 3) == 400_000 - own + 2 * own
    assert bytes_of_sum(torch.empty(100), rank, 20) == 5 * 400  # doubled distances
    assert bytes_of_sum(torch.empty(1_000_000), rank, 20) == 2 * 4_000_000 * 19 // 20


@on_processes
def test_which_tensors(rank: int) -> None:
    group = dist.group.WORLD
    tensors = (
        torch.ones(4),
        torch.ones(4, dtype=torch.int32),
        torch.ones(4).to_sparse(),
        torch.ones(0),
        torch.ones((4 << 20) // 4 + 1),
    )
    found = [sums_in_place(tensor, group) for tensor in tensors]
    assert found == [True, False, False, False, False]
