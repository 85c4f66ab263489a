"""What runs on a CUDA device while a function does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


def kernels_of(function: Callable[[], object]) -> list[str]:
    """The names of the kernels that a function launches; skips the test where none can be seen."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    names = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not names:
        pytest.skip("the profiler sees no kernels here")
    return names
