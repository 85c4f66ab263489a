"""Tries hooks on two ranks, which are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_commhook.cli.doctor.build import library_error
from torch_commhook.cli.doctor.findings import Finding, first_line
from torch_commhook.cli.doctor.settings import Settings

if TYPE_CHECKING:
    import torch

#: The hooks to try, as ``--hook`` of ``train`` takes them.
HOOKS = ("allreduce", "error_feedback(blockwise)")


def check_hooks(settings: Settings) -> Iterator[Finding]:
    """Average gradients of two ranks with each of two hooks."""
    if library_error() is not None:
        yield Finding("hooks", "hooks", "not tried, since the native libraries do not load")
        return
    for hook in HOOKS:
        error = _error_of(hook)
        if error is None:
            yield Finding("hooks", hook, "averages the gradients of two ranks")
        else:
            yield Finding(
                "hooks",
                hook,
                f"{type(error).__name__}: {first_line(error)}",
                "error",
                "Report this with the whole output of doctor.",
            )


def _error_of(hook: str) -> Exception | None:
    try:
        from torch_commhook.testing import run_ranks

        first, second = run_ranks(averaged, 2, hook)
        if not first.equal(second) or not (first - 1.5).abs().max() < 0.05:
            raise RuntimeError(f"gives {first} and {second}, and should give 1.5")
    except Exception as error:  # doctor reports any error
        return error
    return None


def averaged(rank: int, hook: str) -> torch.Tensor:
    """A gradient that is 1 on rank 0, 2 on rank 1, and so on, through a hook."""
    import torch

    from torch_commhook import attach
    from torch_commhook.hooks.expressions import parse_hook

    model = torch.nn.Linear(4, 4)
    handle = attach(model, parse_hook(hook))
    model(torch.full((1, 4), rank + 1.0, dtype=torch.float32, device="cpu")).sum().backward()
    handle.remove()
    assert model.weight.grad is not None
    return model.weight.grad
