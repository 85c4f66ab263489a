"""Steps of DDP models with one bucket for each layer, for benchmarks on links."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_commhook
from torch_commhook.hooks.expressions import parse_hook

#: DDP rebuilds its buckets after the first step.
_FIRST_STEPS = 3


def step_of(
    text: str, layers: int, width: int, group: dist.ProcessGroup | None = None
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Make a DDP model with a hook; returns functions that do a step and remove the hook.

    A step is a forward and a backward. Three steps have been done.

    Args:
        text: a hook expression; ``NO_HOOK`` for DDP alone.
        layers: the number of the model's layers.
        width: of each layer; its bucket has ``width * width`` float32 elements.
        group: the model's process group; None for the default one.

    Raises:
        RuntimeError: the number of buckets differs from the number of layers.
    """
    made = [nn.Linear(width, width, bias=False) for _ in range(layers)]
    model = DDP(
        nn.Sequential(*made),
        process_group=group,
        bucket_cap_mb=width * width * 4 / (1 << 20),
        gradient_as_bucket_view=True,
    )
    hook = parse_hook(text)
    handle = None if hook is None else torch_commhook.attach(model, hook)
    inputs = torch.randn(1, width)

    def step() -> None:
        model(inputs).sum().backward()

    for _ in range(_FIRST_STEPS):
        step()
    if handle is None:
        return step, lambda: None
    buckets = len(handle.stats().buckets)
    if buckets != layers:
        raise RuntimeError(f"layer_buckets: {text} has {buckets} buckets, not {layers}")
    return step, handle.remove
