"""The program of a rank in an elastic training, in virtual time.

The hook quantizes with error feedback, in two exchanges like a reduce-scatter and an all-gather.
The steps, and the handling of failures, are the library's.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from virtual_elastic import TIMEOUT
from virtual_world import Killed, Process

from torch_commhook.attachment.elastic import ElasticReducer, ElasticStep, ElasticTraining
from torch_commhook.elastic.ranks import Elastic
from torch_commhook.step.step_group import StepGroup

GRACE = 1.0
_ELEMENTS = 5


class StepError(RuntimeError):
    """A rank's own hook has failed."""


@dataclass
class ProcessPlan:
    slowness: float = 1.0  # the additional time of its computation
    raises_at: int | None = None  # the step in which its hook raises an error
    leaves_at: int | None = None  # the step before which it leaves
    is_touched: bool = False  # whether a fault may end its participation


@dataclass
class TrainingPlan:
    """The settings of a training's ranks. ``ranks`` is their number at the beginning."""

    ranks: int
    knows_ranks: bool
    min_ranks: int
    steps: int
    buckets: int


class Memory:
    """The hook's memory: an error for each bucket, for this rank alone."""

    remembers_nothing = True
    error_bytes = 4 * _ELEMENTS
    scale = 1.0

    def __init__(self, buckets: int) -> None:
        self.errors = [torch.zeros(_ELEMENTS) for _ in range(buckets)]
        self.steps = 0
        self.averaged = 0

    def changing_tensors(self) -> Iterator[Tensor]:
        yield from self.errors

    def change_ranks(self, rank: int, size: int, *, averaged: int) -> None:
        for error in self.errors:
            error.mul_(averaged / (self.averaged or averaged))
        self.averaged = averaged

    def count_step(self) -> None:
        self.steps += 1


class AttachedDouble:
    """The hook on a rank."""

    keeps_ranks_apart = False
    local_steps = None
    choosing = None

    def __init__(self, buckets: int) -> None:
        self.memory = Memory(buckets)
        self.group: Any = None

    def use_group(self, group: StepGroup, device: object) -> None:
        """Connects like a second group."""
        self.group = group
        if group.size > 1:
            group.group.exchange("connect", None)


class VirtualStep(ElasticStep):
    """The real step, with a hook over virtual connections."""

    def __init__(self, trainer: Trainer, group: Any, gradients: list[Tensor]) -> None:
        self.attached: Any = trainer.attached
        self.agreement = self._group = group
        self.has_begun = False
        self.trainer = trainer
        self._buckets: Any = [
            SimpleNamespace(index=index, gradient=gradient, pending=0)
            for index, gradient in enumerate(gradients)
        ]
        self._parameters: Any = self
        self._next = 0
        self._starting = False
        self._calls: Any = []
        self._averaged = []
        self.train_with(trainer.training)

    def locally_used(self, buckets: object, agreement: object) -> Tensor:
        return self.trainer.used

    def _start(self, state: Any, gradients: list[Tensor] | None = None) -> None:
        self._next += 1
        self.trainer.fail_where_planned()
        size, who = self._group.size, frozenset([self._group.group.own])
        if self.training.new_ranks.is_joining:
            state.gradient.zero_()
            who = frozenset()
        error = self.attached.memory.errors[state.index]
        wanted = state.gradient + error
        sent = (wanted * 4).round() / 4
        error.copy_(wanted - sent)
        values = [(sent[rank::size].clone(), who) for rank in range(size)]
        tag = self._group.group.begin_exchange("bucket", values)
        call = SimpleNamespace(bucket=state, values=values, tag=tag, traffic=None)
        self._calls.append(call)

    def _results(self) -> Any:
        late = []
        group = self._group.group
        for call in self._calls:
            segments = group.end_exchange(call.tag, call.values)
            total = torch.stack([segment for segment, _ in segments]).sum(0) / group.size()
            senders = frozenset().union(*(who for _, who in segments))
            result = torch.empty(_ELEMENTS)
            for rank, (mean, theirs) in enumerate(group.exchange("results", (total, senders))):
                result[rank :: group.size()] = mean
                senders |= theirs
            late.append((call.bucket, (result, senders)))
        return late

    def _of_those_that_give(self, results: Any) -> Any:
        self.trainer.joining = self.trainer.training.new_ranks.joining
        scale = self._group.size / self.training.averaged
        return [(bucket, (result * scale, senders)) for bucket, (result, senders) in results]

    def _apply(self, late: Any, used: Tensor, traffic: Any) -> None:
        self.attached.memory.count_step()
        for bucket, (result, senders) in late:
            self.trainer.world.point("apply")
            self.trainer.written[bucket.index] = result, senders, bool(used[bucket.index])

    def repeat(self, group: StepGroup) -> None:
        self.trainer.repeated += 1
        super().repeat(group)

    def drain(self, error: BaseException | None = None) -> None:
        """Does nothing: closed connections end all exchanges at once."""

    run_post_accumulate_hooks = drain  # there are no such hooks


class VirtualReducer(ElasticReducer):
    """Begins, ends and repeats steps like the real one."""

    def __init__(self, attached: AttachedDouble, training: ElasticTraining) -> None:
        self._attached: Any = attached
        self._training = training
        training.use(self)
        self.group = training.group
        self.device = torch.device("cpu")

    def _do_nothing(self, *_: object) -> None:
        """The order of buckets is fixed, as with elastic, and each step is a new object."""

    _on_step = _agree_on_order = _reset = _step_ended = _prepare_memory = _do_nothing


class Model(nn.Module):
    """A parameter for each bucket, and a buffer that each rank changes by itself."""

    def __init__(self, seed: int, buckets: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index in range(buckets):
            first = torch.randn(_ELEMENTS, generator=generator)
            self.register_parameter(f"weight{index}", nn.Parameter(first))
        self.register_buffer("statistic", torch.zeros(3))


class Optimizer(torch.optim.Optimizer):
    """Momentum, and a count of steps."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"count": 0})

    @property
    def count(self) -> int:
        return int(self.param_groups[0]["count"])

    @property
    def momentum(self) -> list[Tensor]:
        return [self.state[key]["momentum"] for key in self._parameters if key in self.state]

    @property
    def _parameters(self) -> list[Tensor]:
        return self.param_groups[0]["params"]

    def move(self, index: int, result: Tensor) -> None:
        parameter = self._parameters[index]
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros(_ELEMENTS)
        state["momentum"].mul_(0.9).add_(result)
        parameter -= 0.1 * state["momentum"]


@dataclass
class Counted:
    step: int
    digest: str  # of parameters, buffers and the optimizer's state after it
    senders: frozenset[int]  # the ranks with gradients in it
    joining: frozenset[int]  # the ranks that took part with zeros
    count: int  # the optimizer's


class Trainer:
    def __init__(
        self, process: Process, training: TrainingPlan, plan: ProcessPlan, seed: str
    ) -> None:
        self.process = process
        self.world = process.world
        self.whole = training
        self.plan = plan
        self.own: int | None = None  # its number in the training; None before it has one
        self.counted: list[Counted] = []  # the steps that it has counted
        self.said: BaseException | str | None = None  # the reason of its end; None while it runs
        # the gradients that the step has written
        self.written: dict[int, tuple[Tensor, frozenset[int], bool]] = {}
        self.used = torch.ones(training.buckets, dtype=torch.uint8)
        self.repeated = 0  # the number of repeated steps
        self._random = random.Random(seed)
        self.sent_again = 0  # parameters that it received twice while it joined in pieces
        # the ranks that take part with zeros in the open step
        self.joining: frozenset[int] = frozenset()
        self._fails = False

    def main(self) -> None:
        """Trains to the end; records the reason of the end."""
        try:
            self.train()
            self.said = "done"
        except Killed:
            self.said = "killed"
            raise
        except Exception as error:
            self.said = error
        for leave in list(self.process.exits):
            leave()
        self.process.end()

    def train(self) -> None:
        world, plan = self.world, self.whole
        self.model = Model(self.process.number, plan.buckets)
        self.optimizer = Optimizer(self.model.parameters())
        self.attached = AttachedDouble(plan.buckets)
        settings = Elastic(
            min_ranks=plan.min_ranks,
            name="histories",
            grace=GRACE,
            state=[self.optimizer],
            store="virtual:1",
            ranks=plan.ranks if plan.knows_ranks else None,
            timeout=TIMEOUT,
        )
        attached: Any = self.attached
        named = list(self.model.named_parameters())
        shared: dict[str, object] = {"the hook": "a double"}
        self.training = training = ElasticTraining(
            self.model, attached, settings, named, shared, broadcast_buffers=True
        )
        self.ranks = ranks = training.ranks
        self.own = ranks.membership.own
        reducer: Any = VirtualReducer(self.attached, training)
        try:
            training.use_group()
            training.begin()
        except BaseException:
            training.leave()
            raise
        while ranks.steps < plan.steps:
            world.point("between")
            training.before_forward()
            self._fails = self.plan.raises_at == ranks.steps + 1
            if self.plan.leaves_at == ranks.steps + 1:
                break
            self.one_step(reducer)
        self.sent_again = training.new_ranks.sent_again
        training.leave()

    def one_step(self, reducer: Any) -> None:
        world, chance, buckets = self.world, self._random, self.whole.buckets
        with torch.no_grad():
            self.model.statistic += chance.random()
        self.used = torch.tensor([chance.random() < 0.8 for _ in range(buckets)], dtype=torch.uint8)
        gradients = [
            torch.tensor([chance.gauss(0, 1) for _ in range(_ELEMENTS)]) for _ in range(buckets)
        ]
        world.sleep(0.02 * (0.5 + chance.random()) * self.plan.slowness)
        step = VirtualStep(self, reducer.group, gradients)
        reducer._begin_step(step)
        step.start_full()
        world.sleep(0.01 * chance.random() * self.plan.slowness)
        reducer._finish(step)
        self.optimize()
        digest = hashlib.sha256()
        for tensor in (*self.model.state_dict().values(), *self.optimizer.momentum):
            digest.update(tensor.numpy().tobytes())
        (senders,) = {senders for _, senders, _ in self.written.values()}
        self.counted.append(
            Counted(
                self.ranks.steps, digest.hexdigest(), senders, self.joining, self.optimizer.count
            )
        )

    @torch.no_grad()
    def optimize(self) -> None:
        self.optimizer.param_groups[0]["count"] += 1
        for index, (result, _, is_used) in self.written.items():
            if is_used:
                self.optimizer.move(index, result)

    def fail_where_planned(self) -> None:
        if self._fails:
            raise StepError("the hook fails")
