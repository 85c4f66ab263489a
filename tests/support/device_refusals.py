"""Errors of the bucket operators for tensors on several devices."""

from __future__ import annotations

import pytest
import torch

import torch_commhook.native.bucket_ops as ops


def check_that_devices_must_agree(device: str, other: str) -> None:
    """Calls operators with tensors[0] and the buffer on ``device``, tensors[1] on ``other``."""
    tensors = [torch.ones(2, device=device), torch.ones(2, device=other)]
    buffer = torch.empty(4, device=device)
    home, away = tensors[0].device, tensors[1].device
    for op, argument, beside, call in (
        ("flatten", "tensors", r"tensors\[0\]", lambda: ops.flatten(tensors)),
        ("flatten_stats", "tensors", r"tensors\[0\]", lambda: ops.flatten_stats(tensors)),
        ("flatten", "tensors", "out", lambda: ops.flatten(tensors, out=buffer)),
        ("unflatten_into", "tensors", "buffer", lambda: ops.unflatten_into(buffer, tensors)),
        ("unflatten", "like", "buffer", lambda: ops.unflatten(buffer, tensors)),
    ):
        message = rf"^{op}: {argument}\[1\] must be on the device of {beside}, {home}, got {away}$"
        with pytest.raises(ValueError, match=message):
            call()
