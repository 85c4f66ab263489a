"""The operators of csrc/ops/low_rank: matrices times thin factors, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_reference import LEVELS, cache_bytes, cpu_level, not_beyond_a_large_cache, threads
from torch import Tensor

import torch_commhook.hooks.low_rank  # noqa: F401 (the fakes)
from torch_commhook.native.bucket_ops import BUCKET_DTYPES

ops = torch.ops.commhook

#: Matrices, rows, columns. Around the numbers of rows and columns that kernels take at once.
SHAPES = [
    *((1, 1, 1), (3, 7, 5), (2, 16, 15), (2, 25, 33), (2, 300, 67), (1, 5, 2100)),
    *((1, 260, 1030), (4, 17, 200), (2, 16384 + 300, 3), (2, 0, 3), (2, 3, 0), (0, 3, 4)),
]
GAP = 3  # elements between matrices


class Problem:
    """Matrices with gaps of sevens between them, their factors, and gradients for them."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        rank: int,
        *,
        dtype: torch.dtype = torch.float32,
        of_gradients: torch.dtype | None = None,
    ) -> None:
        count, rows, columns = shape
        generator = torch.Generator().manual_seed(rows * 31 + columns * 7 + rank)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        distance = rows * columns + GAP
        self.buffer = torch.full((GAP + count * distance,), 7.0, dtype=dtype)
        self.matrices = self.buffer.as_strided(shape, (distance, columns, 1), GAP)
        self.matrices.copy_(random(*shape))
        self.left = random(count, rank, rows)
        self.right = random(count, rank, columns)
        self.gradients = [random(rows, columns).to(of_gradients or dtype) for _ in range(count)]

    def sevens(self) -> Tensor:
        """What is beside the matrices."""
        beside = torch.ones_like(self.buffer, dtype=torch.bool)
        if self.matrices.numel():
            of_matrices = beside.as_strided(self.matrices.shape, self.matrices.stride(), GAP)
            of_matrices.fill_(False)
        return self.buffer[beside]


#: Of each run, the operator, the tensors that it takes, and its options.
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "run_left": ("left", "matrices right left", {}),
    "run_gather": ("gather_left", "gradients matrices right left", {}),
    "run_gather_adds": ("gather_left", "gradients matrices right left", {"adds": True}),
    "run_right": ("right", "matrices left right", {}),
    "run_right_error": ("right_error", "matrices left right", {}),
    "run_product": ("product", "left right matrices", {}),
}
of_each_run = pytest.mark.parametrize("run", RUNS)


def call(run: str, p: Problem, **changed: Any) -> None:
    operator, names, options = RUNS[run]
    arguments = [changed.get(name, getattr(p, name)) for name in names.split()]
    getattr(ops, f"low_rank_{operator}")(*arguments, **options)


def wanted(run: str, p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices, left and right afterwards, computed in float64."""
    m, left, right = p.matrices.double(), p.left.double(), p.right.double()
    gradients = torch.stack(p.gradients).double() if p.gradients else m
    if run == "run_gather":
        m = gradients
    if run == "run_gather_adds":
        m = m + gradients
    if run in ("run_left", "run_gather", "run_gather_adds"):
        left = right @ m.transpose(1, 2)
    if run in ("run_right", "run_right_error"):
        right = left @ m
    if run == "run_right_error":
        m = m - left.transpose(1, 2) @ right
    if run == "run_product":
        m = left.transpose(1, 2) @ right
    return m, left, right


def assert_near(got: Tensor, want: Tensor, terms: int) -> None:
    """As near as sums of so many products of about 1 in the dtype are."""
    if want.numel():
        most = float((got.double() - want).abs().max())
        assert most <= 30 * torch.finfo(got.dtype).eps * (terms + 1), most


@of_each_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", LEVELS)
def test_against_float64(run: str, dtype: torch.dtype, level: str) -> None:
    with cpu_level(level):
        for shape in SHAPES:
            for rank in (1, 2, 3, 4, 5, 9):
                p = Problem(shape, rank, dtype=dtype)
                wants = wanted(run, p)
                call(run, p)
                for got, want in zip((p.matrices, p.left, p.right), wants, strict=True):
                    assert_near(got, want, rank * max(1, *shape[1:]))
                assert (p.sevens() == 7).all()


@of_each_run
def test_the_same_bits_on_all_processors_and_threads(run: str) -> None:
    for shape in ((2, 300, 67), (1, 260, 1030), (40, 64, 65), (2, 40_000, 3)):
        for dtype in (torch.float32, torch.float64):
            found = []
            for level in LEVELS[1:]:
                for count in (1, 3):
                    with cpu_level(level), threads(count):
                        p = Problem(shape, 3, dtype=dtype)
                        call(run, p)
                        found.append((p.matrices, p.left, p.right))
            for other in found[1:]:
                assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of_gradients", BUCKET_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_any_dtype(dtype: torch.dtype, of_gradients: torch.dtype, level: str) -> None:
    for shape in ((3, 7, 5), (1, 3, 2100)):
        for run in ("run_gather", "run_gather_adds"):
            p = Problem(shape, 5, dtype=dtype, of_gradients=of_gradients)
            m, left, _ = wanted(run, p)
            with cpu_level(level):
                call(run, p)
            assert_near(p.matrices, m, 2)
            assert_near(p.left, left, 5 * shape[2])


@not_beyond_a_large_cache
@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("offset", [0, 1])
def test_products_past_the_caches(level: str, offset: int) -> None:
    """What is written past the caches is what would have been written through them."""
    rows, columns = 515, 2051
    count = cache_bytes() // 4 // (4 * rows * columns) + 1
    size = count * rows * columns
    assert 4 * size >= cache_bytes() // 4
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(count, 5, rows, generator=generator)
    right = torch.randn(count, 5, columns, generator=generator)
    memory = torch.full((size + 20,), 7.0)
    stack = memory[offset : offset + size].view(count, rows, columns)
    with cpu_level(level):
        for threads_ in (1, 2):
            with threads(threads_):
                ops.low_rank_product(left, right, stack)
            for i in range(count):
                alone = torch.empty(1, rows, columns)
                ops.low_rank_product(left[i : i + 1], right[i : i + 1], alone)
                assert torch.equal(stack[i], alone[0])
            assert (memory[:offset] == 7).all() and (memory[offset + size :] == 7).all()
            memory.fill_(7)


def test_what_is_not_finite_stays_so() -> None:
    for value in (float("nan"), float("inf")):
        p = Problem((3, 20, 30), 2)
        p.matrices[1, 4, 5] = value
        call("run_left", p)
        call("run_right_error", p)
        assert not p.left[1, :, 4].isfinite().any()
        assert not p.right[1, :, 5].isfinite().any()
        assert p.left[[0, 2]].isfinite().all() and p.right[[0, 2]].isfinite().all()
        assert p.matrices[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        ("run_left", [0, 1, 0]),
        ("run_gather", [1, 1, 0]),
        ("run_gather_adds", [1, 1, 0]),
        ("run_right", [0, 0, 1]),
        ("run_right_error", [1, 0, 1]),
        ("run_product", [1, 0, 0]),
    ],
)
def test_versions_move(run: str, moved: list[int]) -> None:
    p = Problem((2, 3, 4), 2)
    tensors = (p.buffer, p.left, p.right)
    before = [tensor._version for tensor in tensors]
    call(run, p)
    assert [each._version - old for each, old in zip(tensors, before, strict=True)] == moved


@of_each_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(run: str, dtype: torch.dtype) -> None:
    p = Problem((3, 5, 7), 2, dtype=dtype)
    operator, names, options = RUNS[run]
    arguments = tuple(getattr(p, name) for name in names.split())
    torch.library.opcheck(getattr(ops, f"low_rank_{operator}").default, arguments, options)


def test_nothing_is_recorded() -> None:
    p = Problem((2, 3, 4), 2)
    with pytest.raises(RuntimeError, match=r"low_rank_left: right must not require grad"):
        ops.low_rank_left(p.matrices, p.right.requires_grad_(), p.left)


def _turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


Changes = list[tuple[str, Callable[[Problem], Any], str]]
TYPES: Changes = [
    ("matrices", lambda p: p.matrices.to(torch.int32), "matrices must be of dtype"),
    ("matrices", lambda p: p.matrices.half(), "matrices must be of dtype"),
    ("matrices", lambda p: p.matrices.to_sparse(), "matrices must be dense"),
    ("left", lambda p: p.left.double(), "left must have the matrices' dtype"),
]
VALUES: Changes = [
    ("matrices", lambda p: p.matrices[0], "matrices must have three dimensions"),
    ("matrices", lambda p: _turned(p.matrices), "matrices must be row-major"),
    (
        "matrices",
        lambda p: p.buffer.as_strided((2, 3, 4), (4, 4, 1)),
        "matrices must be row-major, one after the other",
    ),
    ("left", lambda p: p.left[0], "left must have three dimensions"),
    ("left", lambda p: p.left[:, :, :2], "left must be contiguous, of sizes"),
    ("left", lambda p: _turned(p.left), "left must be contiguous, of sizes"),
    ("left", lambda p: p.left[:, :0], "a rank of at least 1"),
    ("right", lambda p: p.right[:, :1].contiguous(), "right must be contiguous, of"),
    ("right", lambda p: p.right[:1], "right must be contiguous, of sizes"),
    ("right", lambda p: p.buffer[:16].view(2, 2, 4), "right must share no memory with matrices"),
]
#: What takes the place of gradients a and b of a problem, and the message.
GRADIENTS: dict[type[Exception], list[tuple[Callable[..., list[Tensor]], str]]] = {
    TypeError: [
        (lambda p, a, b: [a, b.long()], r"gradients\[1\] must be of dtype .*, got torch.int64"),
        (lambda p, a, b: [a.to_sparse(), b], r"gradients\[0\] must be dense"),
    ],
    ValueError: [
        (lambda p, a, b: [a], "gradients must be one for each of 2 matrices, got 1"),
        (lambda p, a, b: [a.t(), b], r"gradients\[0\] must be contiguous, of sizes \[3, 4\]"),
        (lambda p, a, b: [*p.matrices], r"matrices must share no memory with gradients\[0\]"),
        (lambda p, a, b: [a, p.left.view(3, 4)], r"left must share no memory with gradients\[1\]"),
    ],
}


@of_each_run
def test_errors(run: str) -> None:
    for table, error in ((TYPES, TypeError), (VALUES, ValueError)):
        for name, change, message in table:
            p = Problem((2, 3, 4), 2)
            changed = {name: change(p)}
            with pytest.raises(error, match=message):
                call(run, p, **changed)


@pytest.mark.parametrize("run", ["run_gather", "run_gather_adds"])
def test_errors_of_gradients(run: str) -> None:
    for error, table in GRADIENTS.items():
        for change, message in table:
            p = Problem((2, 3, 4), 2)
            gradients = change(p, *p.gradients)
            with pytest.raises(error, match=message):
                call(run, p, gradients=gradients)


def test_memory_that_is_gone() -> None:
    p = Problem((2, 3, 4), 2)
    p.buffer.untyped_storage().resize_(8)
    with pytest.raises(ValueError, match="matrices must have a storage of"):
        call("run_left", p)
