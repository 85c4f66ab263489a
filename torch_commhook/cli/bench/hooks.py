"""Measures a step with each hook, as a part of ``bench``."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_commhook.attachment.attaching import attach
from torch_commhook.cli.bench.timing import slowest, timed
from torch_commhook.cli.formatting import one_line
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.planning.hook_work import unwrap_hook
from torch_commhook.planning.link_file import HookTime

#: The name of the row without a hook.
ALONE = "no communication"
#: The least steps in a turn. An untimed turn comes first: buckets change, and TCP adapts.
_STEPS = 3
_LEAST_TURNS, _MOST_TURNS = 2, 30


class _Given(torch.autograd.Function):
    """A loss with given gradients, so that a backward computes next to nothing."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *parameters: Any) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), dtype=torch.float32, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return None, *ctx.gradients


class StandIn(nn.Module):
    """A model of given shapes. Its random gradients are the same in each step.

    Each rank has its own gradients.

    Args:
        shapes: the shapes of the parameters, in the order of the forward.
        device: the device of the parameters.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        super().__init__()
        random = torch.Generator(device).manual_seed(dist.get_rank())
        self.given = [
            torch.randn(tuple(shape), generator=random, dtype=torch.float32, device=device)
            for shape in shapes
        ]
        self.weights = nn.ParameterList(torch.zeros_like(each) for each in self.given)

    def forward(self) -> torch.Tensor:
        """The loss."""
        found: torch.Tensor = _Given.apply(self.given, *self.weights)
        return found


def measure_hooks(
    hooks: Sequence[str],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    seconds: float,
) -> list[HookTime]:
    """Measure a step without a hook, then with each hook. Ratios compare with the first hook.

    Args:
        hooks: the hooks, as ``train`` takes them.
        shapes: the shapes of the parameters.
        device: the device of the parameters.
        seconds: the approximate time of all measurements. Each hook has at least a few steps.

    Raises:
        RuntimeError: a hook fails; the message names the hook.
    """
    share = seconds / (len(hooks) + 1)
    model = StandIn(shapes, device)
    found: list[tuple[str, float, float | None]] = [
        (ALONE, _step_seconds(Steps(model), share / 4), 0.0)
    ]
    for text in hooks:
        try:
            found.append((text, *_with_hook(model, text, share)))
        except Exception as error:  # a user's hook may raise anything
            raise RuntimeError(f"the hook {text!r} can't be measured: {one_line(error)}") from error
    baseline = found[1][1]
    return [HookTime(text, took, sent, took / baseline) for text, took, sent in found]


class Steps:
    """Does the steps of a model, several in a turn.

    Args:
        model: the model, with its hook attached.
        every: the steps from one exchange of the hook to the next. A turn has a multiple of these.
        is_apart: whether the hook counts the steps of an optimizer.

    Attributes:
        device: the device of the model.
        count: the number of steps in a turn.
        done: the number of steps so far.
    """

    def __init__(self, model: StandIn, every: int = 1, *, is_apart: bool = False) -> None:
        self._model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if is_apart else None
        self.device = model.given[0].device
        self.count = every * math.ceil(_STEPS / every)
        self.done = 0

    def turn(self) -> list[float]:
        """Do the steps of a turn; returns the seconds of each."""
        self.done += self.count
        return [timed(self._step, self.device) for _ in range(self.count)]

    def _step(self) -> None:
        self._model.zero_grad(set_to_none=True)
        self._model().backward()
        if self._optimizer is not None:
            self._optimizer.step()


def _step_seconds(steps: Steps, seconds: float) -> float:
    """The median over turns of a turn's mean step, in seconds, on the slowest rank."""
    begun = time.perf_counter()
    found: list[float] = []
    while len(found) < _MOST_TURNS:
        dist.barrier()
        own = steps.turn()
        *took, elapsed = slowest([*own, time.perf_counter() - begun], steps.device)
        found.append(statistics.fmean(took))
        if len(found) >= _LEAST_TURNS and elapsed > seconds:
            break
    return statistics.median(found)


def _with_hook(model: StandIn, text: str, seconds: float) -> tuple[float, float | None]:
    """The seconds of a step, and the bytes that this rank sends in it; None if unknown."""
    hook = parse_hook(text)
    every = unwrap_hook(hook).every
    handle = attach(model, hook)
    try:
        steps = Steps(model, every, is_apart=getattr(hook, "keeps_ranks_apart", False))
        steps.turn()
        done, before = steps.done, handle.stats().bytes_sent
        took = _step_seconds(steps, seconds)
        after = handle.stats().bytes_sent
        handle.synchronize()  # otherwise a hook that keeps ranks apart warns when it is removed
        if before is None or after is None:
            return took, None
        return took, (after - before) / (steps.done - done)
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
        gc.collect()
