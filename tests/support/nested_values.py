"""Nested lists and dicts of tensors and plain values, such as states and checkpoints."""

from __future__ import annotations

from typing import Any

import torch


def different_paths(one: Any, other: Any, path: str = "") -> list[str]:
    """The paths at which two nested values differ; compares tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return [] if isinstance(other, torch.Tensor) and torch.equal(one, other) else [path]
    if isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            return [path]
        return [p for key in one for p in different_paths(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [path]
        pairs = enumerate(zip(one, other, strict=True))
        return [p for i, pair in pairs for p in different_paths(*pair, f"{path}/{i}")]
    return [] if one == other else [path]
