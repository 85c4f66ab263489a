"""Streaming local steps in plain PyTorch, all ranks in one process; and trainings to compare."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from typing import Any

import torch
from local_training import net, train
from torch import Tensor, nn

from torch_commhook import GradBucket, hooks
from torch_commhook.hooks import outer_sgd


class StreamingTurns(ABC):
    """The steps at which exchanges of fragments begin and end.

    Attributes:
        settings: ``H``, ``fragments``, ``delay`` and ``mix``, as in ``local_sgd``.
        steps: the steps so far, by :meth:`train`.
        in_flight: the step after which the exchange in flight began, and its fragment.
    """

    settings: tuple[int, int, int, float]
    steps: int
    in_flight: tuple[int, int] | None = None

    @abstractmethod
    def train(self) -> None:
        """One step of all ranks, each by itself."""

    @abstractmethod
    def take_means(self, fragment: int) -> None:
        """Uses a fragment's mean distances as gradients of its anchor."""

    @abstractmethod
    def move(self, fragment: int) -> None:
        """Moves a fragment's anchor by the means, and its parameters."""

    def step(self) -> None:
        """One step of all ranks, and the exchanges after it."""
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
        """Begins the exchange of a fragment."""
        self.in_flight = self.steps, fragment
        self.take_means(fragment)

    @torch.no_grad()
    def apply(self) -> None:
        """Ends the exchange in flight."""
        assert self.in_flight is not None
        _, fragment = self.in_flight
        self.in_flight = None
        self.move(fragment)


class Streaming(StreamingTurns):
    """Ranks that step by themselves, and average fragments of layers in turn.

    Args:
        ranks: their number.
        H, fragments, delay, mix, outer: as in ``local_sgd``.
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

    def _of(self, model: nn.Module, fragment: int) -> list[Tensor]:
        layers = list(model.layers)[fragment :: self.settings[1]]
        return [parameter for layer in layers for parameter in layer.parameters()]

    def train(self) -> None:
        step, self.steps = self.steps, self.steps + 1
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train(model, optimizer, rank, range(step, step + 1))

    def take_means(self, fragment: int) -> None:
        own = [self._of(model, fragment) for model in self.models]
        for i, anchor in enumerate(self._of(self.anchor, fragment)):
            anchor.grad = torch.stack([anchor - parameters[i] for parameters in own]).mean(0)

    def move(self, fragment: int) -> None:
        mix = self.settings[3]
        self.outer[fragment].step()
        anchors = self._of(self.anchor, fragment)
        for model in self.models:
            for parameter, anchor in zip(self._of(model, fragment), anchors, strict=True):
                parameter.copy_(mix * parameter + (1 - mix) * anchor)


class Held(hooks.allreduce):  # type: ignore[name-defined, misc]
    """Averages, and returns the result only when it is told to."""

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
