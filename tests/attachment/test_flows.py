"""How many frames and files of Python a gradient passes, so that both flows stay short to read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from on_ranks import on_pool
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_commhook
from torch_commhook import attach
from torch_commhook.collectives.issuing import Place

_PACKAGE = str(Path(torch_commhook.__file__).parent)


class Flow:
    """The package's files in a backward, and its frames at the first message, innermost first."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.frames: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(_PACKAGE):
            return
        self.files.add(frame.f_code.co_filename[len(_PACKAGE) + 1 :])
        # The frame that calls the link's native code. Gathers of parameters call no hook.
        if frame.f_code is not Place.exchange.__code__ or self.frames:
            return
        frames: list[str] = []
        each: FrameType | None = frame
        while each is not None:
            if each.f_code.co_filename.startswith(_PACKAGE):
                frames.append(f"{each.f_code.co_filename}:{each.f_code.co_name}")
            each = each.f_back
        if any("attached_hook.py" in name for name in frames):
            self.frames = frames


@pytest.mark.filterwarnings("ignore:.*keeps errors of whole gradients")
@pytest.mark.parametrize(("sharded", "frames", "files"), [(False, 9, 20), (True, 10, 25)])
@on_pool("two_ranks")
def test_a_gradient_passes_few(rank: int, sharded: bool, frames: int, files: int) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if sharded:
        for module in (*model, model):
            fully_shard(module)
    else:
        model = DistributedDataParallel(model)
    handle = attach(model, "error_feedback(blockwise(bits=4))")
    for _ in range(3):  # DDP forms its buckets anew after the first
        loss, flow = model(torch.ones(8, 64)).sum(), Flow()
        sys.setprofile(flow)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
    handle.remove()
    assert 0 < len(flow.frames) <= frames, "\n".join(flow.frames)
    assert len(flow.files) <= files, "\n".join(sorted(flow.files))
