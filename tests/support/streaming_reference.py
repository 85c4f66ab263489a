"""Streaming local steps in plain PyTorch, all ranks in one process; and trainings to compare."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from local_training import attached, net, parameters_of, train
from torch import Tensor, nn

from torch_commhook import GradBucket, hooks
from torch_commhook.hooks import outer_sgd


class Streaming:
    """Ranks that step by themselves, and fragments of layers that are averaged in turn.

    Args:
        ranks: their number.
        H, fragments, delay, mix, outer: as ``local_sgd`` takes them.
    """

    def __init__(
        self,
        ranks: int,
        H: int,  # noqa: N803
        fragments: int,
        delay: int,
        mix: float,
        outer: outer_sgd,
    ) -> None:
        self.settings = H, fragments, delay, mix
        self.anchor = net()
        self.outer = [
            torch.optim.SGD(
                self._of(self.anchor, fragment),
                lr=outer.lr,
                momentum=outer.momentum,
                nesterov=outer.nesterov and outer.momentum > 0,
            )
            for fragment in range(fragments)
        ]
        self.models = [copy.deepcopy(self.anchor) for _ in range(ranks)]
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.01, 0.5) for m in self.models]
        self.steps = 0
        self.in_flight: tuple[int, int, list[Tensor]] | None = None

    def _of(self, model: nn.Module, fragment: int) -> list[Tensor]:
        layers = list(model.layers)[fragment :: self.settings[1]]
        return [parameter for layer in layers for parameter in layer.parameters()]

    def train(self) -> None:
        """One step of all ranks, by themselves."""
        step, self.steps = self.steps, self.steps + 1
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train(model, optimizer, rank, range(step, step + 1))

    def step(self) -> None:
        """One step of all ranks, and what comes after it."""
        self.train()
        H, fragments, delay, _ = self.settings  # noqa: N806
        if self.in_flight is not None and self.steps == self.in_flight[0] + delay:
            self.apply()
        for fragment in range(fragments):
            if (self.steps - (fragment + 1) * H // fragments) % H == 0:
                self.begin(fragment)
                if delay == 0:
                    self.apply()

    @torch.no_grad()
    def begin(self, fragment: int) -> None:
        """Take the mean distance of this moment."""
        own = [self._of(model, fragment) for model in self.models]
        means = [
            torch.stack([anchor - parameters[i] for parameters in own]).mean(0)
            for i, anchor in enumerate(self._of(self.anchor, fragment))
        ]
        self.in_flight = self.steps, fragment, means

    @torch.no_grad()
    def apply(self) -> None:
        """Move the fragment that is on its way."""
        assert self.in_flight is not None
        _, fragment, means = self.in_flight
        self.in_flight = None
        mix = self.settings[3]
        anchors = self._of(self.anchor, fragment)
        for anchor, mean in zip(anchors, means, strict=True):
            anchor.grad = mean
        self.outer[fragment].step()
        for model in self.models:
            for parameter, anchor in zip(self._of(model, fragment), anchors, strict=True):
                parameter.copy_(mix * parameter + (1 - mix) * anchor)


class Held(hooks.allreduce):  # type: ignore[name-defined, misc]
    """Averages, and gives the result when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def average(self, bucket: GradBucket) -> Any:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        inner = super().average(bucket)

        def give() -> None:
            try:
                if not self.release.wait(30):
                    raise TimeoutError("nobody has released the result")
                future.set_result(inner.wait())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=give, name="held").start()
        return future


def trained_as(
    rank: int, hook: Any, steps: int, road: str = "module"
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A training with the hook: its parameters, and its anchors by name."""
    model, handle = attached(hook, road)
    train(model, torch.optim.SGD(model.parameters(), 0.01, 0.5), rank, steps)
    found = parameters_of(model), handle.state_dict()["shared"]["local_sgd_anchor"]
    handle.synchronize()
    handle.remove()
    return found
