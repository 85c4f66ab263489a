"""Fixtures for all tests."""

from __future__ import annotations

import pytest
import torch

import torch_commhook  # noqa: F401  (registers torch.ops.commhook)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        reason = "needs a CUDA GPU, and none is visible"
    elif not torch.ops.commhook.has_cuda_kernels():
        reason = "needs CUDA kernels, and this build has none (COMMHOOK_CUDA=1 builds them)"
    else:
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
