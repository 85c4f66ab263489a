"""A hint to the system must change no value, whatever it is given."""

from __future__ import annotations

import pytest
import torch

from torch_commhook import _C


@pytest.mark.parametrize("numel", [0, 1, 1000, 1 << 19, (1 << 21) + 7])
@pytest.mark.parametrize("offset", [0, 3])
def test_contents_stay(numel: int, offset: int) -> None:
    whole = torch.arange(float(numel + offset))
    tensor = whole[offset:]
    before = tensor.clone()
    _C.prefer_huge_pages(tensor)
    _C.prefer_huge_pages(tensor)
    assert torch.equal(tensor, before)
    tensor += 1
    assert torch.equal(tensor, before + 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1 << 20, device="meta"),
        torch.ones(1 << 20)[::2],
        torch.ones(3).to_sparse(),
        torch.frombuffer(bytearray(1 << 22), dtype=torch.uint8),
    ],
    ids=["meta", "strided", "sparse", "foreign"],
)
def test_anything_may_be_given(tensor: torch.Tensor) -> None:
    _C.prefer_huge_pages(tensor)
