"""powersgd: what theory says of it, a reference in NumPy, error feedback, state, odd gradients."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, hooks
from torch_commhook.buckets.layout import BucketLayout
from torch_commhook.hooks.low_rank import Plan, orthonormalize
from torch_commhook.metrics import ring_all_reduce_bytes
from torch_commhook.testing import run_ranks, simulate

#: For each step, for each rank, gradients of the same parameters.
Steps = Sequence[Sequence[Sequence[Tensor]]]


class Ranks:
    """A hook's steps on given gradients, one bucket, all ranks.

    Attributes:
        results: for each step and rank, the averages.
        errors: for each step and rank, what is remembered of each parameter.
        factors: for each step and rank, the bucket's right factors.
    """

    def __init__(
        self, hook: hooks.Hook, steps: Steps, like: Sequence[Tensor] | None = None
    ) -> None:
        parameters = [torch.empty_like(p) for p in (steps[0][0] if like is None else like)]

        def run_rank(rank: int) -> list[tuple[list[Tensor], list[Tensor], Tensor]]:
            own = copy.deepcopy(hook)
            found = []
            for gradients in steps:
                bucket = GradBucket(parameters, [g.clone() for g in gradients[rank]])
                result = own(None, bucket).wait().clone()
                tensors = own.memory(bucket).tensors
                error = tensors.get("error", torch.zeros(bucket.numel()))
                factors = [tensor.float() for name, tensor in tensors.items() if name != "error"]
                flat = torch.cat([torch.empty(0), *factors])
                found.append((bucket.pieces(result), bucket.pieces(error.clone()), flat))
            return found

        by_step = list(zip(*run_ranks(run_rank, len(steps[0])), strict=True))
        self.results = [[result for result, _, _ in ranks] for ranks in by_step]
        self.errors = [[error for _, error, _ in ranks] for ranks in by_step]
        self.factors = [[factors for _, _, factors in ranks] for ranks in by_step]

    def result(self, step: int = -1) -> list[Tensor]:
        """A step's averages, which all ranks have."""
        first, *others = self.results[step]
        for other in others:
            assert all(a.equal(b) for a, b in zip(_bits(first), _bits(other), strict=True))
        for other in self.factors[step][1:]:
            assert torch.equal(self.factors[step][0], other)
        return first


def _bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """For a comparison in which NaN equals itself."""
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


def powersgd(rank: int = 2, *, feedback: bool) -> hooks.Hook:
    hook = hooks.powersgd(rank)
    return hooks.error_feedback(hook) if feedback else hook


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative to what is wanted."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def of_rank(rows: int, columns: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, rank, dtype=dtype) @ torch.randn(rank, columns, dtype=dtype)


# ---- what theory says ----------------------------------------------------------------------------


def resnet18_shapes() -> list[tuple[int, ...]]:
    """ResNet-18 as for CIFAR: a 3x3 convolution first, no biases but the last layer's."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    width = 64
    for stage, planes in enumerate((64, 128, 256, 512)):
        for block in range(2):
            shapes += [(planes, width, 3, 3), (planes,), (planes,)]
            shapes += [(planes, planes, 3, 3), (planes,), (planes,)]
            if stage and not block:
                shapes += [(planes, width, 1, 1), (planes,), (planes,)]
            width = planes
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "factor"), [(1, 243.26), (2, 135.84), (4, 72.13)])
def test_resnet18_is_so_many_times_smaller(rank: int, factor: float) -> None:
    """Elements by elements that are averaged, once each, with vectors as they are."""
    parameters = [torch.zeros(1).expand(shape) for shape in resnet18_shapes()]
    numel = sum(parameter.numel() for parameter in parameters)
    assert numel == 11_173_962
    plan = Plan.of(BucketLayout(parameters), rank, 0, 2.0)
    sent = plan.vector_numel + plan.left_numel + plan.right_numel
    assert round(numel / sent, 2) == factor


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_on_the_wire(world_size: int) -> None:
    gradients = [torch.randn(40, 30), torch.randn(7), torch.randn(12, 3, 5, 2), torch.randn(2, 3)]
    simulation = simulate(hooks.powersgd(3), [gradients] * world_size)
    first = 4 * (7 + 6 + 3 * (40 + 12))
    second = 4 * 3 * (30 + 30)
    assert simulation.wire_bytes == pytest.approx(
        sum(ring_all_reduce_bytes(payload, world_size) for payload in (first, second)), abs=8
    )


@on_ranks(2)
def test_stats(rank: int) -> None:
    model = nn.Linear(40, 30)
    handle = attach(model, hooks.error_feedback(hooks.powersgd(2)))
    model(torch.randn(50, 40)).square().sum().backward()
    stats = handle.stats()
    assert stats.bytes_sent_last_step == 4 * (2 * (40 + 30) + 30)
    error = stats.buckets[0].relative_error
    assert error is not None and 0 < error < 1


@given(
    rows=st.integers(6, 40),
    columns=st.integers(6, 40),
    rank=st.integers(1, 4),
    world_size=st.integers(1, 3),
    decay=st.sampled_from([0.0, 0.5, 2.0]),
)
@settings(max_examples=25, deadline=None)
def test_no_better_than_the_singular_values_beyond_the_rank(
    rows: int, columns: int, rank: int, world_size: int, decay: float
) -> None:
    scale = torch.arange(1, columns + 1).pow(-decay)
    ranks = [[torch.randn(rows, columns) * scale] for _ in range(world_size)]
    hook = hooks.powersgd(rank, min_compression_rate=1)
    average = mean([gradients[0] for gradients in ranks])
    values = torch.linalg.svdvals(average)
    compressed = rank * (rows + columns) <= rows * columns
    least = values[rank:].square().sum().sqrt() if compressed else torch.tensor(0.0)
    for steps in (1, 4):
        (result,) = simulate(hook, ranks, steps=steps).result
        error = (result.double() - average).norm()
        assert error >= least * (1 - 1e-5) - 1e-6 * values.norm()
        assert error <= values.norm() * (1 + 1e-5)


def test_iterations_come_close_to_the_best() -> None:
    """Gradients that stay the same are a power iteration."""
    gradient = torch.linalg.qr(torch.randn(60, 40)).Q * 0.7 ** torch.arange(40)
    best = torch.linalg.svdvals(gradient)[3:].norm() / gradient.norm()
    errors = [simulate(hooks.powersgd(3), [[gradient]], steps=n).error for n in (1, 3, 25)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] == pytest.approx(best.item(), rel=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_the_rank_is_restored(rank: int, dtype: torch.dtype) -> None:
    # The rounding of P, times the condition of what the first factors see of the gradient.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    for of in range(1, rank + 1):
        gradient = of_rank(50, 90, of, dtype)
        assert simulate(hooks.powersgd(rank), [[gradient]] * 2).error < tolerance


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_it_is_the_average_that_must_have_the_rank(world_size: int) -> None:
    low = of_rank(50, 40, 2)
    noise = [torch.randn(50, 40) for _ in range(world_size - 1)]
    noise.append(-sum(noise))
    simulation = simulate(hooks.powersgd(2), [[low + one] for one in noise])
    assert distance(simulation.result[0], low) < 1e-4


def test_zeros_give_zeros_and_training_goes_on() -> None:
    some = [torch.randn(20, 30), torch.randn(5)]
    zeros = [torch.zeros(20, 30), torch.zeros(5)]
    for hook in (hooks.powersgd(2), hooks.error_feedback(hooks.powersgd(2))):
        ranks = Ranks(hook, [[zeros] * 2, [some] * 2, [some] * 2])
        assert all(not tensor.any() for tensor in ranks.result(0))
        assert torch.equal(ranks.result(1)[0], Ranks(hook, [[some] * 2]).result()[0])
    ranks = Ranks(hooks.powersgd(2), [[some] * 2, [zeros] * 2, [some] * 2])
    assert torch.equal(ranks.factors[0][0], ranks.factors[1][0])
    again = Ranks(hooks.powersgd(2), [[some] * 2, [some] * 2])
    assert torch.equal(ranks.result()[0], again.result()[0])  # as if there had been no zeros


# ---- a reference ---------------------------------------------------------------------------------


def reference(
    first: list[Any], steps: Steps, rank: int, *, feedback: bool
) -> tuple[list[list[Any]], list[list[Any]]]:
    """PowerSGD in NumPy and float64, with matrices by their first dimension.

    Args:
        first: for each parameter its first right factor, or None for those that are not compressed.
        steps: the gradients.
        rank: of the products.
        feedback: whether errors are.

    Returns:
        Each step's averages, and the mean of the ranks' errors after it.
    """
    world_size = len(steps[0])
    factors = list(first)
    errors: list[list[Any]] = [[0.0] * len(first) for _ in range(world_size)]
    results, remembered = [], []
    for gradients in steps:
        result = []
        for i, factor in enumerate(factors):
            own = [gradients[r][i].double().numpy() for r in range(world_size)]
            if factor is None:
                result.append(sum(own) / world_size)
                continue
            shape = own[0].shape
            matrices = [one.reshape(shape[0], -1) + errors[r][i] for r, one in enumerate(own)]
            basis, _ = np.linalg.qr(sum(m @ factor for m in matrices) / world_size)
            rights = [m.T @ basis for m in matrices]
            factors[i] = sum(rights) / world_size
            result.append((basis @ factors[i].T).reshape(shape))
            if feedback:
                for r, (matrix, right) in enumerate(zip(matrices, rights, strict=True)):
                    errors[r][i] = matrix - basis @ right.T
        results.append(result)
        remembered.append([sum(e[i] for e in errors) / world_size for i in range(len(first))])
    return results, remembered


SHAPES = [(30, 20), (9,), (24, 4, 3, 3), (30, 20), (3, 2), (16, 64), (30, 20)]


def first_factors(shapes: Sequence[tuple[int, ...]], rank: int, seed: int = 0) -> list[Any]:
    plan = Plan.of(BucketLayout([torch.zeros(shape) for shape in shapes]), rank, seed, 2.0)
    found: list[Any] = [None] * len(shapes)
    for i in plan.numbers:
        columns = math.prod(shapes[i][1:])
        found[i] = plan.first_right(columns).double().T.numpy()
    return found


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 4, 5])
def test_against_a_reference(rank: int, feedback: bool) -> None:
    steps = [
        [[torch.randn(s, dtype=torch.float64) for s in SHAPES] for _ in range(3)] for _ in "1234"
    ]
    wants, errors = reference(first_factors(SHAPES, rank), steps, rank, feedback=feedback)
    hook = powersgd(rank, feedback=feedback)
    for dtype, tolerance in ((torch.float64, 1e-6 if feedback else 1e-11), (torch.float32, 1e-4)):
        cast = [[[g.to(dtype) for g in rank_] for rank_ in step] for step in steps]
        ranks = Ranks(hook, cast)
        for step, want in enumerate(wants):
            for got, expected in zip(ranks.result(step), want, strict=True):
                assert got.dtype == dtype
                assert distance(got, torch.from_numpy(expected)) < tolerance
            for i, expected in enumerate(errors[step] if feedback else []):
                got = mean([error[i] for error in ranks.errors[step]]).view(len(want[i]), -1)
                assert np.abs(got.numpy() - expected).max() < tolerance * 10


def test_the_order_in_a_bucket_and_its_neighbours_do_not_matter() -> None:
    gradients = [[torch.randn(shape) for shape in SHAPES] for _ in range(2)]
    together = simulate(hooks.powersgd(2), gradients, steps=2).result
    for i in range(len(SHAPES)):
        alone = simulate(hooks.powersgd(2), [[g[i]] for g in gradients], steps=2).result
        assert distance(alone[0], together[i]) < 1e-5
    turned = simulate(hooks.powersgd(2), [g[::-1] for g in gradients], steps=2).result
    for a, b in zip(turned[::-1], together, strict=True):
        assert distance(a, b) < 1e-5


# ---- error feedback ------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_lost_for_good(world_size: int, dtype: torch.dtype) -> None:
    """x_t - lr * mean(e_t) follows uncompressed SGD on the gradients that were observed."""
    lr, steps = 0.1, 12
    gradients = [
        [[torch.randn(s).to(dtype) for s in SHAPES] for _ in range(world_size)]
        for _ in range(steps)
    ]
    ranks = Ranks(hooks.error_feedback(hooks.powersgd(2)), gradients)
    compressed = [torch.zeros(s, dtype=torch.float64) for s in SHAPES]
    plain = [torch.zeros(s, dtype=torch.float64) for s in SHAPES]
    # Results are cast to the bucket's dtype on their way out.
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 1e-6)
    for step in range(steps):
        for i, result in enumerate(ranks.result(step)):
            compressed[i] -= lr * result.double()
            plain[i] -= lr * mean([g[i] for g in gradients[step]])
            virtual = compressed[i] - lr * mean([e[i] for e in ranks.errors[step]])
            assert (virtual - plain[i]).abs().max() < rounding * 2 * (step + 1)


def test_vectors_have_no_error() -> None:
    gradients = [[torch.randn(shape) for shape in SHAPES] for _ in range(2)]
    ranks = Ranks(hooks.error_feedback(hooks.powersgd(2)), [gradients] * 3)
    for i in (1, 4):
        assert distance(ranks.result()[i], mean([g[i] for g in gradients])) < 1e-6
        assert not any(error[i].any() for error in ranks.errors[-1])


@pytest.mark.parametrize("shapes", [[(30, 20), (9,)], [(9,), (5,)]])
@pytest.mark.filterwarnings("ignore:topk")  # which sends more than a cast
def test_what_another_hook_has_lost_is_sent(shapes: list[tuple[int, ...]]) -> None:
    before, hook = (hooks.error_feedback(h) for h in (hooks.topk(0.3), hooks.powersgd(2)))
    steps = [[[torch.randn(s) for s in shapes] for _ in range(2)] for _ in range(4)]
    ranks = Ranks(hooks.after(2, hook, before), steps)
    assert any(error[1].any() for error in ranks.errors[1])
    assert not any(error[1].any() for error in ranks.errors[-1])
    for i in range(2):
        sent = torch.stack([ranks.result(step)[i].double() for step in range(4)]).sum(0)
        late = mean([error[i] for error in ranks.errors[-1]])
        whole = torch.stack([mean([g[i] for g in step]) for step in steps]).sum(0)
        assert (sent + late - whole).abs().max() < 1e-4


def test_ranks_that_differ_for_a_long_time() -> None:
    """The error stays within 4 (1 - delta) G^2 / delta^2, which bounds its square."""
    gradients = [[torch.randn(20, 30)] for _ in range(3)]
    length = max(g[0].norm().item() for g in gradients)
    delta = 2 / 20  # rank / smaller dimension: what a random projection keeps
    bound = math.sqrt(4 * (1 - delta)) * length / delta
    ranks = Ranks(hooks.error_feedback(hooks.powersgd(2)), [gradients] * 300)
    norms = [max(error[0].norm().item() for error in errors) for errors in ranks.errors]
    assert max(norms) < bound
    assert max(norms[200:]) < 1.5 * max(norms[50:120])


# ---- odd gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (29, 7)])
def test_what_is_not_finite_stays_in_its_parameter(
    bad: float, place: tuple[int, int], feedback: bool
) -> None:
    good = [[torch.randn(30, 20), torch.randn(9), torch.randn(30, 20)] for _ in range(2)]
    broken = copy.deepcopy(good)
    broken[1][0][place] = bad
    hook = powersgd(feedback=feedback)
    ranks = Ranks(hook, [good, broken, good, good])
    first, *others = ranks.result(1)
    assert not first.isfinite().any()
    assert all(other.isfinite().all() for other in others)
    assert torch.equal(ranks.factors[0][0][:40], ranks.factors[1][0][:40])
    if feedback:
        assert not any(error[0].any() for error in ranks.errors[1])
        assert all(error[2].any() for error in ranks.errors[1])
    fine = Ranks(hook, [good, good, good])
    for i in (1, 2):
        assert torch.equal(ranks.result(3)[i], Ranks(hook, [good] * 4).result(3)[i])
    assert ranks.result(2)[0].isfinite().all()
    if not feedback:
        assert torch.equal(ranks.result(2)[0], fine.result(1)[0])


def test_where_no_gradient_has_been() -> None:
    """Rows and columns that are zero in the factors hide no NaN."""
    gradient = torch.randn(30, 20)
    gradient[:, 3] = 0
    gradient[5] = 0
    broken = gradient.clone()
    broken[5, 3] = math.nan
    ranks = Ranks(hooks.powersgd(2), [[[gradient]] * 2, [[gradient], [broken]]])
    assert not ranks.result()[0].isfinite().any()


def test_vectors_that_are_not_finite() -> None:
    good = [torch.randn(30, 20), torch.randn(9)]
    broken = [good[0], good[1].clone()]
    broken[1][4] = math.inf
    hook = hooks.error_feedback(hooks.powersgd(2))
    ranks = Ranks(hook, [[good, broken], [good, good]])
    assert ranks.result(0)[1].isfinite().sum() == 8
    assert ranks.result(1)[1].isfinite().all()


def test_factors_that_overflow() -> None:
    """P is finite, and Q is not."""
    first = torch.from_numpy(first_factors([(40, 30)], 1)[0]).flatten()
    big = torch.zeros(40, 30)
    big[:, first.abs().argmin()] = 1e38
    assert (big @ first.float()).isfinite().all()
    other = torch.randn(40, 30)
    ranks = Ranks(hooks.error_feedback(hooks.powersgd(1)), [[[big], [big]], [[other], [other]]])
    assert not ranks.result(0)[0].isfinite().all()
    assert torch.equal(ranks.factors[0][0], first.float())
    want = Ranks(hooks.error_feedback(hooks.powersgd(1)), [[[other], [other]]])
    assert torch.equal(ranks.result(1)[0], want.result()[0])


def _leaves_finite_errors(steps: Steps) -> None:
    ranks = Ranks(powersgd(1, feedback=True), steps)
    assert all(error[0].isfinite().all() for errors in ranks.errors for error in errors)
    assert ranks.result()[0].isfinite().all()


def test_the_largest_numbers_leave_a_finite_error() -> None:
    """Factors that are finite can leave what is not."""
    largest = torch.finfo(torch.float32).max
    good = [[torch.randn(30, 20)] for _ in range(2)]
    steps = []
    for _ in range(10):
        large = copy.deepcopy(good)
        for gradient in large:
            places = torch.randint(600, (20,))
            gradient[0].view(-1)[places] = largest * torch.randn(20).sign()
        steps += [large, good]
    _leaves_finite_errors(steps)


def test_float64_beyond_float32_leaves_a_finite_error() -> None:
    good = [[torch.randn(30, 20, dtype=torch.float64), torch.randn(3).double()] for _ in range(2)]
    large = copy.deepcopy(good)
    large[0][0].mul_(1e100)
    _leaves_finite_errors([large, good])


def test_sums_that_would_overflow() -> None:
    """The mean is finite, and the sum is not."""
    first = torch.from_numpy(first_factors([(40, 30)], 1)[0]).flatten().float()
    gradient = 0.3e38 * torch.outer(torch.ones(40), first / first.norm())
    vector = torch.full((3,), 3e38)
    simulation = simulate(hooks.powersgd(1), [[gradient, vector]] * 4)
    assert (4 * (gradient @ first)).isinf().any()
    assert distance(simulation.result[0], gradient) < 1e-5
    assert distance(simulation.result[1], vector) < 1e-6


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e18, 1e36])
def test_tiny_and_huge_gradients(scale: float) -> None:
    gradients = [[torch.randn(30, 20)] for _ in range(2)]
    plain = Ranks(hooks.powersgd(2), [gradients] * 3).result()[0]
    scaled = Ranks(hooks.powersgd(2), [[[g[0] * scale] for g in gradients]] * 3).result()[0]
    assert distance(scaled.double() / scale, plain) < 1e-4


def test_directions_without_use_come_back() -> None:
    """Gradients of lower rank, and of others, leave no factor that stays useless."""
    a, b = torch.zeros(30, 20), torch.zeros(30, 20)
    a[:15, :10], b[15:, 10:] = of_rank(15, 10, 1), of_rank(15, 10, 1)
    full = of_rank(30, 20, 3)
    zero = torch.zeros(30, 20)
    for before in ([a], [a, b], [a, b, b, a], [zero, a, zero], [a, a, a], [a, b, a + b, b, b]):
        steps = [[[g]] * 2 for g in [*before, full, full, full]]
        ranks = Ranks(hooks.powersgd(3), steps)
        for step in range(len(before)):
            assert (ranks.result(step)[0] - before[step]).norm() <= 1e-4 * before[step].norm()
        assert distance(ranks.result()[0], full) < 1e-5


def test_factors_that_have_become_parallel() -> None:
    """One gradient of rank 1 lets all factors of the step before point the same way."""
    u, v = torch.linalg.qr(torch.randn(50, 3)).Q.T, torch.linalg.qr(torch.randn(40, 3)).Q.T
    before = 10 * torch.outer(u[0], v[0]) + torch.outer(u[1], v[1])
    single = torch.outer(u[2], v[1])
    after = 10 * torch.outer(u[0], v[1]) + torch.outer(u[1], v[2])
    ranks = Ranks(hooks.powersgd(2), [[[g]] for g in [*[before] * 8, single, *[after] * 3]])
    factors = ranks.factors[8][0].view(2, 40)
    assert (factors[0] @ factors[1]).abs() > 0.999
    assert distance(ranks.result()[0], after) < 1e-4


@given(
    rank=st.integers(1, 6),
    deficient=st.integers(0, 5),
    spread=st.sampled_from([1.0, 0.1, 1e-3]),
    rows=st.integers(6, 60),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60, deadline=None)
def test_bases_are_orthonormal(
    rank: int, deficient: int, spread: float, rows: int, dtype: torch.dtype
) -> None:
    plan = Plan.of(BucketLayout([torch.zeros(rows, 99)] * 3), rank, 0, 0.01)
    span = rank - min(deficient, rank - 1)
    directions = torch.randn(3, span, rows, dtype=torch.float64)
    directions *= spread ** torch.linspace(0, 1, span)[:, None]
    mixed = (torch.randn(3, rank, span, dtype=torch.float64) @ directions).to(dtype)
    out = torch.empty(plan.left_numel, dtype=dtype)
    orthonormalize(mixed.reshape(-1), plan, out)
    (group,) = plan.groups
    basis = plan.left(out, group).double()
    gram = basis @ basis.transpose(1, 2)
    kept = gram.diagonal(dim1=1, dim2=2).round()
    assert (gram - torch.diag_embed(kept)).abs().max() < (2e-6 if dtype == torch.float32 else 1e-13)
    # What is not kept is shorter than 1e-4 beside the others.
    beyond = mixed.double() - mixed.double() @ basis.transpose(1, 2) @ basis
    assert (beyond.norm(dim=2) <= 1e-4 * mixed.double().norm(dim=2)).all()


def test_bases_of_what_is_not_finite() -> None:
    plan = Plan.of(BucketLayout([torch.zeros(9, 99)] * 3), 2, 0, 0.01)
    factors = torch.randn(3, 2, 9)
    factors[1, 1, 4] = math.nan
    out = torch.empty(plan.left_numel)
    orthonormalize(factors.reshape(-1), plan, out)
    basis = plan.left(out, plan.groups[0])
    assert basis[1].isnan().all() and basis[[0, 2]].isfinite().all()


# ---- dtypes, memory formats ----------------------------------------------------------------------


@pytest.mark.parametrize("feedback", [False, True])
def test_memory_formats(feedback: bool) -> None:
    gradients = [[torch.randn(24, 4, 3, 3), torch.randn(8, 6, 2, 5, 3)] for _ in range(2)]
    hook, steps = powersgd(feedback=feedback), [gradients] * 3
    plain = Ranks(hook, steps)
    formats = [torch.channels_last, torch.channels_last_3d]
    like = [g.to(memory_format=f) for g, f in zip(gradients[0], formats, strict=True)]
    permuted = Ranks(hook, steps, like)
    for got, want in zip(permuted.result(), plain.result(), strict=True):
        assert not got.is_contiguous()
        assert distance(got, want) < 1e-5


def test_transposed_weights_and_other_orders() -> None:
    low = of_rank(40, 30, 2)
    deep = of_rank(24, 36, 2).view(24, 6, 6).permute(1, 0, 2)
    ranks = Ranks(hooks.powersgd(2), [[[low.t(), deep]] * 2], [low.t(), deep])
    for got, want in zip(ranks.result(), (low.t(), deep), strict=True):
        assert got.stride() == want.stride()
        assert distance(got, want) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    gradients = [[torch.randn(s).to(dtype) for s in SHAPES] for _ in range(2)]
    for hook in (hooks.powersgd(2), hooks.error_feedback(hooks.powersgd(2))):
        got = simulate(hook, gradients, steps=2).result
        want = simulate(hook, [[g.float() for g in rank] for rank in gradients], steps=2).result
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(got, want, strict=True))


def test_a_mean_beyond_float16() -> None:
    low = of_rank(30, 20, 1)
    low = (low / low.abs().max() * 6e4).half()
    gradients = [[low, torch.full((5,), 6e4, dtype=torch.float16)]] * 4
    simulation = simulate(hooks.powersgd(2), gradients)
    assert all(tensor.isfinite().all() for tensor in simulation.result)


# ---- settings ------------------------------------------------------------------------------------


def test_the_seed_decides() -> None:
    gradients = [[torch.randn(30, 20)]]
    results = [simulate(hooks.powersgd(2, seed=seed), gradients).result[0] for seed in (0, 0, 1)]
    assert torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


@pytest.mark.parametrize(("rate", "compressed"), [(1.0, True), (2.0, False), (1.5, True)])
def test_small_matrices_are_averaged_as_they_are(rate: float, compressed: bool) -> None:
    gradients = [[torch.randn(6, 6)] for _ in range(2)]  # 36 elements, and 2 * 12
    simulation = simulate(hooks.powersgd(2, min_compression_rate=rate), gradients)
    assert (simulation.error > 1e-3) == compressed
    assert simulation.wire_bytes == 4 * (24 if compressed else 36)


# ---- state ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        self.layers = nn.Sequential(nn.Linear(16 * 9, 40), nn.ReLU(), nn.Linear(40, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.conv(x).flatten(1))


def _train(rank: int, model: Net, steps: range) -> list[Tensor]:
    gradients = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        model.zero_grad()
        x = torch.randn(4, 3, 5, 5, generator=generator).to(model.conv.weight.dtype)
        model(x).square().sum().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    return gradients


@pytest.mark.parametrize(
    "hook",
    [
        "powersgd(2)",
        "error_feedback(powersgd(2))",
        "after(4, error_feedback(powersgd(1)), error_feedback(powersgd(3)))",
        "policy([('dim <= 1', allreduce())], error_feedback(powersgd(2)))",
    ],
)
@pytest.mark.parametrize("settings", [{"bucket_cap_mb": 0.01}, {}])
@on_ranks(2)
def test_training_goes_on_bit_for_bit(rank: int, hook: str, settings: dict[str, Any]) -> None:
    model = Net()
    handle = attach(model, hook, bucket_cap_mb=0.01)
    _train(rank, model, range(3))
    weights, state = copy.deepcopy(model.state_dict()), handle.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    want = _train(rank, model, range(3, 6))
    other = Net()
    other.load_state_dict(weights)
    handle = attach(other, hook, **settings)
    file.seek(0)
    handle.load_state_dict(torch.load(file, weights_only=True))
    assert all(map(torch.equal, _train(rank, other, range(3, 6)), want))
    kinds = state["shared"]
    assert all(kind.startswith("powersgd_q") for kind in kinds)
    for factors in kinds.values():
        assert set(factors) == {"conv.weight", "layers.0.weight", "layers.2.weight"}
        assert all(torch.isfinite(factor).all() for factor in factors.values())
    if "error" in state[f"rank{rank}"]:
        assert state[f"rank{rank}"]["error"]["conv.weight"].shape == (16, 3, 3, 3)


@on_ranks(2)
def test_a_state_of_another_rank_keeps_its_errors(rank: int) -> None:
    model = Net()
    handle = attach(model, hooks.error_feedback(hooks.powersgd(3)))
    _train(rank, model, range(3))
    state = handle.state_dict()
    other = Net()
    handle = attach(other, hooks.error_feedback(hooks.powersgd(1)))
    handle.load_state_dict(state)
    own = handle.state_dict()[f"rank{rank}"]["error"]
    assert all(torch.equal(own[name], e) for name, e in state[f"rank{rank}"]["error"].items())
    _train(rank, other, range(1))
    assert "powersgd_q1" in handle.state_dict()["shared"]


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("register", [False, True])
@on_processes
def test_many_buckets_over_gloo(rank: int, register: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(24)))
    model = DDP(net, bucket_cap_mb=0.01)
    hook = hooks.error_feedback(hooks.powersgd(2))
    if register:
        model.register_comm_hook(None, hook)
    else:
        attach(model, hook)
    for step in range(15):
        model.zero_grad()
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().sum().backward()
    first, second = of_all_ranks([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, first, second))
    assert all(gradient.isfinite().all() for gradient in first)
