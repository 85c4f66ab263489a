"""Counts the hooks on all optimizers of a process."""

from __future__ import annotations

import gc

from torch.optim import optimizer


def listeners(rank: int = 0) -> set[int]:
    """The numbers of the hooks on all optimizers, after garbage collection. Numbers are unique."""
    kept = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    if any(kept):
        gc.collect()
    return {number for hooks in kept for number in hooks}
