"""What a message has lost, measured on a sample."""

from __future__ import annotations

import math

import pytest
import torch

from torch_commhook import codecs
from torch_commhook.collectives.message_error import _places, _values_at, begin_measuring
from torch_commhook.metrics import CallMeter


def _measured(
    codec: codecs.Codec, values: torch.Tensor, error: torch.Tensor | None
) -> tuple[float, float]:
    """What a meter finds, and what was lost in truth."""
    meter = CallMeter()
    wanted = values.double() + (0 if error is None else error.double())
    measured = begin_measuring(meter, [values[:1000], values[1000:]], error)
    message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode([values], message, error=error)
    assert measured is not None
    measured.note(meter, codec, error, None)
    restored = torch.empty_like(values)
    codec.decode(message, [restored])
    lost = torch.linalg.vector_norm(wanted - restored) / torch.linalg.vector_norm(wanted)
    assert meter.relative_error is not None
    return meter.relative_error, float(lost)


@pytest.mark.parametrize("numel", [5_000, 20_000, 3_000_000])
@pytest.mark.parametrize("keeps_error", [False, True])
@pytest.mark.parametrize(
    "codec", [codecs.blockwise(bits=4), codecs.fp8(), codecs.topk(0.05), codecs.sign()], ids=str
)
def test_the_error_of_a_sample(codec: codecs.Codec, keeps_error: bool, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator)
    error = torch.randn(numel, generator=generator) if keeps_error else None
    found, truth = _measured(codec, values, error)
    assert found == pytest.approx(truth, rel=1e-5 if numel == 5_000 else 0.03)


def test_places() -> None:
    assert _places(0) == [(0, 0)]
    assert _places(16384) == [(0, 16384)]
    for numel in (16385, 20_000, 600_000, 10**8 + 1):
        places = _places(numel)
        count = sum(end - begin for begin, end in places)
        assert 16384 <= count <= 1 << 20 and count <= max(16384, numel / 32)
        ends = [0, *(end for _, end in places)]
        assert all(end <= begin for end, (begin, _) in zip(ends, places, strict=False))
        assert all(begin % 4096 == 0 for begin, _ in places) and places[-1][1] <= numel
        # They are spread over all values.
        assert places[-1][1] > 0.7 * numel


def test_values_of_several_tensors() -> None:
    tensors = [torch.arange(5), torch.arange(5, 5), torch.arange(5, 12).view(7, 1)]
    found = _values_at(tensors, [(1, 3), (4, 9), (11, 12)])
    assert found.dtype == torch.float32
    assert found.tolist() == [1, 2, 4, 5, 6, 7, 8, 11]
    assert _values_at([torch.empty(0)], [(0, 0)]).tolist() == []
    column = torch.arange(12).view(3, 4).t()
    assert _values_at([column], [(0, 3)]).tolist() == [0, 4, 8]


def test_only_what_is_due_is_measured() -> None:
    meter = CallMeter()
    values = [torch.ones(10)]
    assert begin_measuring(None, values, None) is None
    due = [begin_measuring(meter, values, None) is not None for _ in range(201)]
    assert [number for number, is_due in enumerate(due) if is_due] == [0, 100, 200]
    assert math.isclose(sum(due), 3)
