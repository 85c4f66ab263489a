"""Training with a hook that trains ranks apart, and streaming local steps in plain PyTorch."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from layered_net import BUCKET_CAP_MB, Net, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, hooks
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.hooks import outer_sgd

MEAN = outer_sgd(1.0, 0.0)
ROADS = ["module", "ddp", "python_reducer"]


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def attached(hook: Any, road: str = "module", model: nn.Module | None = None) -> Any:
    """A model on an execution path, and the handle of its hook."""
    model = net() if model is None else model
    if road == "module":
        return model, attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    reducer = "python_reducer" if road == "python_reducer" else "ddp_optimizer"
    with torch._dynamo.config.patch(optimize_ddp=reducer):
        model = DDP(model, bucket_cap_mb=BUCKET_CAP_MB)
    return model, attach(model, hook)


def backward(model: nn.Module, rank: int, step: int) -> None:
    first = next(model.parameters())
    model(batch(rank, step).to(first.dtype)).square().sum().backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range | int
) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def farthest(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def all_same(results: list[list[Tensor]]) -> bool:
    return all(same(results[0], other) for other in results[1:])


class Training:
    """A rank's training in plain SGD, with a hook on an execution path."""

    def __init__(
        self,
        rank: int,
        hook: Any,
        road: str = "module",
        model: nn.Module | None = None,
        *,
        lr: float = 0.01,
        momentum: float = 0.0,
    ) -> None:
        self.rank, self.done = rank, 0  # the steps so far, which select the batches
        self.model, self.handle = attached(hook, road, model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum)

    def train(self, steps: int = 1) -> None:
        train(self.model, self.optimizer, self.rank, range(self.done, self.done + steps))
        self.done += steps

    @property
    def parameters(self) -> list[Tensor]:
        return parameters_of(self.model)

    @property
    def exchanges(self) -> int:
        return self.handle.stats().steps

    @property
    def anchors(self) -> dict[str, Tensor]:
        return self.handle.state_dict()["shared"]["local_sgd_anchor"]

    def end(self) -> None:
        """Brings the ranks together, and removes the hook."""
        self.handle.synchronize()
        self.handle.remove()


def steps_done(handle: HookHandle) -> int:
    """The steps since the last exchange of all ranks."""
    assert handle._attached.local_steps is not None
    return handle._attached.local_steps.done


class StreamingTurns:
    """The steps at which exchanges of fragments begin and end.

    A subclass has ``train()``, which takes one step of all ranks, each by itself;
    ``take_means(fragment)``, which uses mean distances as gradients of the fragment's anchor; and
    ``move(fragment)``, which moves the anchor by these, and the parameters.
    """

    # ``H``, ``fragments``, ``delay`` and ``mix``, as in ``local_sgd``
    settings: tuple[int, int, int, float]
    steps: int  # the steps so far, by :meth:`train`
    # the step after which the exchange in flight began, and its fragment
    in_flight: tuple[int, int] | None = None

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
    """Ranks that step by themselves and average fragments in turn; settings as in ``local_sgd``."""

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
