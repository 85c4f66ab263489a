"""The values of largest magnitude: exact values against NumPy, bounds, errors."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sparse_codecs
import torch
from codec_examples import restore
from ops_reference import threads
from sparse_codecs import each_level  # noqa: F401
from torch import Tensor

from torch_commhook.codecs.topk import topk

commhook = torch.ops.commhook


def encode(tensors: list[Tensor], count: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Indices and values of a message of so many entries."""
    message = torch.full((8 * count,), 77, dtype=torch.uint8)
    commhook.topk_encode(tensors, message, **options)
    return message[: 4 * count].view(torch.int32), message[4 * count :].view(torch.float32)


def right_indices(p: np.ndarray, count: int) -> np.ndarray:
    """By a full sort: NaN, infinities and numbers by magnitude, each from the lowest index on."""
    magnitudes = np.abs(p.astype(np.float64))
    magnitudes[np.isinf(p)] = 1e300
    magnitudes[np.isnan(p)] = np.inf
    return np.sort(np.argsort(-magnitudes, kind="stable")[:count])


def check(x: Tensor, count: int, scale: float = 1.0, error: Tensor | None = None) -> None:
    p = x.float() * scale if error is None else x.float() * scale + error
    p = p.numpy().copy()
    right = right_indices(p, count)
    indices, values = encode([x], count, scale=scale, error=error)
    np.testing.assert_array_equal(indices.numpy(), right)
    np.testing.assert_array_equal(values.numpy(), p[right])
    message, out = torch.cat([indices.view(torch.uint8), values.view(torch.uint8)]), x.clone()
    commhook.topk_decode(message, [out])
    restored = np.zeros_like(p)
    restored[right] = p[right]
    np.testing.assert_array_equal(out.numpy(), restored)
    if error is not None:
        left = np.where(np.isfinite(p), p, 0)
        left[right] = 0
        np.testing.assert_array_equal(error.numpy(), left)


# ---- which values are sent -----------------------------------------------------------------------

D = 50_000  # from a little less on, the kernels guess before they look


def concentrated(d: int) -> Tensor:
    """All that is sent comes from one place, which a sample sees little of."""
    x = torch.randn(d) * 1e-6
    x[d // 2 : d // 2 + d // 50] = torch.randn(d // 50)
    return x


INPUTS: dict[str, Callable[[int], Tensor]] = {
    **sparse_codecs.INPUTS,
    "uniform": lambda d: torch.rand(d) - 0.5,
    # fewer that are not zero than are sent
    "embedding": lambda d: torch.randn(d) * (torch.rand(d) < 0.001),
    "concentrated": concentrated,
}


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("d", [1, 100, 5000, D])
@pytest.mark.parametrize("name", INPUTS)
def test_the_largest_are_sent(name: str, d: int) -> None:
    x = INPUTS[name](d)
    for count in sorted({1, -(-d // 100), -(-d // 2), d}):
        check(x, count)
        error = torch.where(x.isfinite(), x, 0).roll(1) * 0.5
        check(x, count, 0.5, error)


@pytest.mark.usefixtures("each_level")
def test_every_nan_is_the_same() -> None:
    """Whatever its sign and payload are, which depend on the instructions that made it."""
    bits = torch.tensor([0x7F800001, -1, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF], dtype=torch.int32)
    for d in (100, D):
        x = torch.randn(d)
        x[10:60] = bits.repeat(10).view(torch.float32)
        for count, last in ((20, 30), (50, 60)):
            indices, values = encode([x], count)
            assert torch.equal(indices, torch.arange(10, last, dtype=torch.int32))
            assert (values.view(torch.int32) == 0x7FC00000).all()


@pytest.mark.usefixtures("each_level")
def test_nothing_that_is_not_finite_is_held_back() -> None:
    """Where there is more of it than is sent: first NaN, then infinities."""
    for d in (1000, D):
        x, error = torch.randn(d), torch.randn(d)
        x[::3] = float("inf")
        x[1::3] = float("nan")
        indices, values = encode([x], d // 10, error=error)
        assert values.isnan().all()
        assert torch.equal(indices, torch.arange(1, d, 3)[: d // 10].int())
        assert error.isfinite().all()
        indices, values = encode([x], d // 2, error=error)
        assert int(values.isnan().sum()) == len(x[1::3])
        assert error.isfinite().all()


def test_a_guess_may_be_wrong() -> None:
    """What is large comes in runs, so that a sample often sees too many of them."""
    for _ in range(60):
        x = torch.randn(D) * 0.01
        x.view(-1, 16)[torch.randperm(D // 16)[: D // 1600]] += 10
        check(x, D // 100)


@pytest.mark.parametrize("name", INPUTS)
def test_threads_do_not_matter(name: str) -> None:
    x, found = INPUTS[name](300_001), []
    for count in (1, 2, 3, 7):
        error = torch.where(x.isfinite(), x, 0).roll(1)
        with threads(count):
            found.append((*encode([x], 3001), *encode([x], 3001, scale=0.5, error=error), error))
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert torch.equal(one.view(torch.int32), another.view(torch.int32))


# ---- bounds --------------------------------------------------------------------------------------


def lost(x: Tensor, density: float) -> tuple[float, float]:
    """The square of what is lost, as a part of the square of all, and its bound 1 - k / d."""
    codec = topk(density)
    square = (x - restore(codec, x)).double().square().sum() / x.double().square().sum()
    return square.item(), 1 - codec.entries(len(x)) / len(x)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.5])
def test_the_bound(density: float) -> None:
    for x in (torch.randn(50_000), torch.rand(777), torch.randn(3000).exp()):
        square, bound = lost(x, density)
        assert square < bound
    square, bound = lost(torch.randn(10_000).sign() * 3, density)
    assert square == pytest.approx(bound, rel=1e-12)


def test_how_many_are_sent() -> None:
    assert topk().entries(0) == 0
    assert topk().entries(1) == 1
    assert [topk(0.07).entries(d) for d in (100, 101, 700)] == [7, 8, 49]
    assert topk(1 / 3).entries(3000) == 1000
    assert topk(1.0).entries(1234) == 1234
    assert topk(1e-12).entries(1 << 30) == 1
    for density in (0.3, 0.011, 1e-5):
        exact = Fraction(str(density))
        assert all(topk(density).entries(d) == max(1, -(-d * exact // 1)) for d in range(1, 2000))
    assert topk().nbytes(1 << 20) == 8 * 10486


# ---- errors; more in test_codec_operators.py -----------------------------------------------------


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("indices", [[5, 5], [6, 5], [-1, 5], [5, 64], [-(2**31), 2**31 - 1]])
def test_indices_are_checked(indices: list[int]) -> None:
    """A message comes from another process: what it says must not be written anywhere."""
    good = torch.tensor([0, 63], dtype=torch.int32).view(torch.uint8)
    bad = torch.tensor(indices, dtype=torch.int32).view(torch.uint8)
    values = torch.ones(2).view(torch.uint8)
    out = torch.zeros(64)
    commhook.topk_decode(torch.cat([good, values]), [out])
    messages = torch.stack([torch.cat([good, values]), torch.cat([bad, values])])
    with pytest.raises(ValueError, match="topk_decode: a message's indices must be ascending, at"):
        commhook.topk_decode(messages[1].clone(), [out])
    with pytest.raises(ValueError, match=r"topk_decode_sum: .*at least 0 and less than 64"):
        commhook.topk_decode_sum(messages, [out])


def test_too_many_values() -> None:
    with pytest.raises(ValueError, match=r"topk: numel must be at least 0 and less than 2\^31"):
        topk().nbytes(1 << 31)
