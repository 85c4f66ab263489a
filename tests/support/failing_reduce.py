"""A hook between nodes that fails on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torch_commhook import PeerError, attach


def fails_between(rank: int, hook: Any) -> list[str]:
    """Runs a step in which rank 2 cannot add the other nodes' messages, and the next step.

    Args:
        rank: this process's.
        hook: a ``hierarchical``.

    Returns:
        For each step, ``right`` or the name of the error.
    """
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(5)))
    handle = attach(model, hook, bucket_cap_mb=40 * 40 * 4 / (1 << 20))
    found = []
    for fails in (rank == 2, False):
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(type(hook.codec), "reduce", _raise)
            try:
                model(torch.full((1, 40), 1.0)).sum().backward()
                found.append("right")
            except (ValueError, PeerError) as error:
                found.append(type(error).__name__)
    handle.remove()
    return found


def _raise(*args: object, **keywords: object) -> None:
    raise ValueError("no sum")
