"""Random histories of ``local_sgd``, whose hook must lose nothing of how far parameters move.

Each rank's optimizer steps on the rank's own gradients, which are its moves. For each parameter,
what the ranks have in common in the end must be the sum of the mean moves, less what the hook
remembers that it has not sent. Some exchanges fail on one rank and are tried again.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from typing import Any

import torch
from balance import HOOKS, RANKS, History, OwnError, Road, or_zeros, small_buckets
from torch import Tensor

from torch_commhook import HookHandle, hooks

#: Steps from one exchange to the next.
ROUND = 2

#: Every hook on both reducers. A backward sends nothing, so that other roads add nothing.
CASES = [
    (name, Road(model), seed) for seed, name in enumerate(HOOKS) for model in ("module", "ddp")
]

_PARAMETERS = "local_sgd_parameter"  # which a state has beside what the hook remembers


class LocalHistory(History):
    def __init__(self, name: str, road: Road, seed: int) -> None:
        self.with_error_reset = seed % 4 < 2
        super().__init__(name, road, seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.done = 0  # steps since the ranks were together

    def _attach(self) -> HookHandle:
        inside = self.make_hook()
        resets = self.with_error_reset and not (inside.splits_buckets or inside.own_groups())
        self.hook = hooks.local_sgd(
            ROUND, outer=hooks.outer_sgd(1.0, 0.0), hook=inside, error_reset=resets
        )
        return self.road.attach(self.model, self.hook)

    def _failed_step(self, saved: dict[str, Any]) -> None:
        self._step("the step that fails", fails=True)
        self._zero_grad()

    def _step(self, where: str, *, takes_over: bool = False, fails: bool = False) -> None:
        batches = self.dice.choice([1, 1, 2])
        for batch in range(batches):
            gradients = self._draw(self._draw_used())[self.rank]
            # DDP refuses one that was used under no_sync() alone, and has no gradient any more.
            is_last = batch == batches - 1
            with contextlib.nullcontext() if is_last else self.handle.no_sync():
                self._backward(gradients, compiled=False)
        for name, parameter in self.parameters.items():
            self.given[name] += or_zeros(parameter.grad, parameter)
        self.done += 1
        if fails and self.done >= ROUND:
            self._fail_to_exchange()
            return
        self.optimizer.step()
        if self.done >= ROUND:
            self.done = 0

    def _fail_to_exchange(self) -> None:
        # A hook may fail before it has sent anything, or when it has sent everything.
        at_fault, late = self.dice.randrange(RANKS), self.dice.random() < 0.5
        average = self.hook.hook.average

        def boo(bucket: Any) -> Any:
            if late and not bucket.is_last():
                return average(bucket)
            raise OwnError("boo")

        failing = unittest.mock.patch.object(self.hook.hook, "average", boo)
        with self.fails("an exchange", at_fault):
            with failing if self.rank == at_fault else contextlib.nullcontext():
                self.optimizer.step()

    def _own_state(self) -> dict[str, dict[str, Tensor]]:
        own = super()._own_state()
        return {kind: tensors for kind, tensors in own.items() if kind != _PARAMETERS}

    def _compare(self) -> None:
        self.handle.synchronize()
        for name, parameter in self.parameters.items():
            self.delivered[name] = -parameter.detach()
            self.size = max(self.size, float(parameter.detach().abs().max()))
        super()._compare()


def run_local_history(rank: int, name: str, road: Road, seed: int) -> list[str]:
    """What is wrong with one history, if anything. Runs on each rank."""
    with small_buckets():
        return LocalHistory(name, road, seed).run()
