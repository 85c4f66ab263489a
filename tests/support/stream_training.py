"""Training with a hook on a group with collectives that run on a stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mode_cases import batch
from modes import Mode
from torch import Tensor, nn

from torch_commhook import attach


def attached(
    mode: Mode, net: nn.Module, hook: Any, group: dist.ProcessGroup, **options: Any
) -> tuple[nn.Module, Any]:
    """The model in a mode, and the hook's handle; both use the group.

    Args:
        options: for ``attach``.
    """
    own = {"process_group": group}
    model = mode.wrap(net, **(own if mode.model == "ddp" else {}))
    options |= {**mode.attach_options, **(own if mode.model == "module" else {})}
    return model, attach(model, hook, **options)


def parameters_of_steps(rank: int, mode: Mode, model: nn.Module) -> list[Tensor]:
    """The parameters after each of three steps, on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = next(model.parameters()).device
    found = []
    with mode.step_function(model) as step:
        for number in range(3):
            optimizer.zero_grad(set_to_none=False)
            step(batch(rank, number).to(device))
            optimizer.step()
            found += [parameter.detach().cpu().clone() for parameter in model.parameters()]
    return found
