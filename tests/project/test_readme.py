"""The README's example runs as it stands, in three modes, with the same gradients."""

from __future__ import annotations

import re

import pytest
import torch
from repository import ROOT

README = ROOT / "README.md"


def examples() -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return [block for block in blocks if "model" in block and "backward()" in block]


@pytest.mark.usefixtures("one_rank")
def test_three_modes() -> None:
    blocks = examples()
    assert len(blocks) == 3
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    names = {"model": model, "inputs": torch.randn(4, 8)}
    gradients = []
    for block in blocks:
        exec(block, names)
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            assert torch.allclose(a, b, rtol=2.0**-7)
