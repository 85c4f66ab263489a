"""Merges the states of all ranks' hooks into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_commhook.memory.state_values import shown


def merged_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge states into one that each rank can load.

    Args:
        states: the states of all ranks. Plain values under the same name must be equal. Of tensors
            the first is taken: they are equal on all ranks.

    Raises:
        RuntimeError: plain values differ.
    """
    merged: dict[str, Any] = {}
    for state in states:
        _add(merged, state, "")
    return merged


def _add(merged: dict[str, Any], state: dict[str, Any], where: str) -> None:
    for key, value in state.items():
        path = f"{where}{key}"
        if isinstance(value, dict):
            _add(merged.setdefault(key, {}), value, f"{path}.")
        elif isinstance(merged.setdefault(key, value), Tensor):
            continue
        elif merged[key] != value:
            raise RuntimeError(
                f"HookHandle.state_dict: the ranks' '{path}' must be the same for one state of "
                f"all ranks, got {shown(merged[key])} and {shown(value)}; save each rank's state "
                "instead"
            )


def on_the_host(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state, with its tensors in host memory."""
    return {
        key: on_the_host(value)
        if isinstance(value, dict)
        else value.cpu().clone()
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }
