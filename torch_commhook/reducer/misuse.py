"""The errors of backward passes that cannot be averaged."""

from __future__ import annotations

NOT_NESTED = (
    "torch_commhook: a parameter's hook was called outside of backward(), or in one that is nested "
    "in a compiled one; reentrant activation checkpointing under compiled autograd needs "
    "torch.utils.checkpoint(..., use_reentrant=False)"
)

TWO_AT_ONCE = (
    "torch_commhook: another backward() of this model began in another thread before this one had "
    "ended; a model's backward passes that a hook averages must come one after another"
)


def came_again(name: str) -> RuntimeError:
    """The error for a parameter's second gradient after the first has been sent."""
    return RuntimeError(
        f"torch_commhook: parameter '{name}' got a gradient after its bucket had been sent; a "
        "parameter that is used in several segments of reentrant activation checkpointing needs "
        "torch.utils.checkpoint(..., use_reentrant=False)"
    )
