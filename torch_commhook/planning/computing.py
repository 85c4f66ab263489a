"""Measures the computing time of a model's step on this machine, without communication."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_commhook.planning.hook_work import compute_clock

#: The optimizers of :func:`measure_step`.
OPTIMIZERS = ("adamw", "sgd")
_RUNS = 3


def measure_step(module: nn.Module, inputs: Sequence[Any], optimizer: str = "adamw") -> float:
    """The time of a step without communication in seconds: the median of three steps.

    A step is a forward, a backward, the copy of all gradients into DDP's buckets, and a step of the
    optimizer. A first step, which creates buffers, does not count. Parameters keep their values.

    Args:
        module: a module with its parameters on this machine.
        inputs: the arguments of the module's call.
        optimizer: ``adamw`` or ``sgd``.

    Raises:
        ValueError: another optimizer; no parameter requires a gradient; or the module returns no
            tensor with a gradient.
        Exception: any error of the module.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"measure_step: optimizer must be adamw or sgd, got {optimizer!r}")
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        raise ValueError("measure_step: the module must have a parameter that gets a gradient")
    # A learning rate of 0 leaves the parameters as they are.
    stepping: torch.optim.Optimizer
    if optimizer == "adamw":
        stepping = torch.optim.AdamW(parameters, lr=0.0)
    else:
        stepping = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    buckets = [torch.empty_like(each) for each in parameters]
    clock = compute_clock()
    seconds = []
    for _ in range(_RUNS + 1):
        begun = clock()
        _loss(module(*inputs)).backward()
        copy_gradients(parameters, buckets)
        stepping.step()
        stepping.zero_grad(set_to_none=True)
        seconds.append(clock() - begun)
    return statistics.median(seconds[1:])


def copy_gradients(parameters: Sequence[Tensor], buckets: Sequence[Tensor]) -> None:
    """Copy gradients into buckets, as DDP does before it sends a bucket.

    Args:
        parameters: the parameters; those without a gradient are skipped.
        buckets: a tensor of the same shape for each parameter.
    """
    for parameter, bucket in zip(parameters, buckets, strict=True):
        if parameter.grad is not None:
            bucket.copy_(parameter.grad)


def _loss(outputs: Any) -> Tensor:
    """A scalar that depends on all outputs that require a gradient."""
    found = [each.float().sum() for each in _tensors(outputs) if each.requires_grad]
    if not found:
        raise ValueError(
            "measure_step: the module must return a tensor with a gradient, or several in a "
            f"tuple, a list or a dict, got {type(outputs).__qualname__}"
        )
    return torch.stack(found).sum()


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        return [tensor for each in outputs for tensor in _tensors(each)]
    return []
