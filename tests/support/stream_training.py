"""Training with a hook on a group with collectives that run on a stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mode_cases import batch, with_futures
from modes import Mode
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.codecs import CODECS

#: The names of hooks that ``hook_of`` makes.
NAMES = [
    "cpp allreduce",
    "cpp cast",
    "cpp gradients",
    "cpp torch_allreduce",
    "cpp torch_style",
    "with_futures",
    "allreduce",
    "cast",
    "adaptive",
    "blockwise",
    "fp8",
    "sign",
    "topk",
    "randomk",
    "error_feedback",
    "powersgd",
    "policy",
    "hierarchical",
    "clip",
    "local_sgd",
    "streaming",
]


def hook_of(name: str, group: dist.ProcessGroup, alone: dist.ProcessGroup) -> Any:
    """Makes a hook.

    Args:
        group: the ranks, between which a hierarchical hook compresses.
        alone: this rank, within which it does not.
    """
    made = {
        "cpp": lambda: hooks.cpp(name.partition(" ")[2]),
        "with_futures": lambda: with_futures,
        "adaptive": lambda: hooks.adaptive(20_000, every=1, block_size=64),
        "cast": hooks.cast,
        "clip": lambda: hooks.clip(0.1, hooks.blockwise(8)),
        "error_feedback": lambda: hooks.error_feedback(hooks.topk(0.1)),
        "hierarchical": lambda: hooks.hierarchical(
            CODECS["blockwise"](8), intra_group=alone, inter_group=group
        ),
        "local_sgd": lambda: hooks.local_sgd(2),
        "streaming": lambda: hooks.local_sgd(2, hook=hooks.blockwise(8), delay=1, mix=0.5),
        "policy": lambda: hooks.policy(
            [("numel > 2500", hooks.allreduce()), ("numel < 1000", hooks.cast())],
            hooks.error_feedback(hooks.blockwise(8)),
        ),
        "powersgd": lambda: hooks.error_feedback(hooks.powersgd(2)),
        "sign": lambda: hooks.sign(block_size=256),
    }
    simple = {each: getattr(hooks, each) for each in ("allreduce", *CODECS)}
    return {**simple, **made}[name.partition(" ")[0]]()


def assert_same(want: list[list[Tensor]], got: list[list[Tensor]], same_bits: bool = True) -> None:
    """Compares the tensors of each rank."""
    for expected, found in zip(want, got, strict=True):
        for a, b in zip(expected, found, strict=True):
            if same_bits:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


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
