"""The project in examples/cpp_hook, and what docs/cpp_hooks.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpp_libraries import library
from mode_cases import batch, module
from rank_pool import RankPool
from repository import ROOT
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks, load_cpp_hooks

MAX_NORM = 0.01


def _clipped(rank: int, path: str, use_ddp: bool) -> list[torch.Tensor]:
    assert load_cpp_hooks(path) == ["clipped_mean"]
    model = DDP(module()) if use_ddp else module()
    handle = attach(model, hooks.cpp("clipped_mean", max_norm=MAX_NORM))  # one bucket
    model(batch(rank, 0)).square().sum().backward()
    handle.remove()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("use_ddp", [False, True])
def test_the_example(two_ranks: RankPool, use_ddp: bool) -> None:
    expected = [torch.zeros_like(parameter) for parameter in module().parameters()]
    for rank in range(2):
        model = module()
        model(batch(rank, 0)).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        for total, parameter in zip(expected, model.parameters(), strict=True):
            total += parameter.grad / 2
    path = library("clipped_mean")
    for gradients in two_ranks.run(_clipped, path, use_ddp):
        for got, want in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_the_document_shows_what_is_there() -> None:
    text = (ROOT / "docs" / "cpp_hooks.md").read_text()
    source = (ROOT / "examples" / "cpp_hook" / "clipped_mean.cpp").read_text()
    shown = text[text.index("COMMHOOK_REGISTER_HOOK(ClippedMean") :]
    assert shown[: shown.index(";")] in source
    headers = ROOT / "csrc" / "include" / "commhook"
    for header in ("comm_hook.h", "autograd_hook.h", "ops.h"):
        assert f"commhook/{header}" in text and Path(headers, header).is_file()
