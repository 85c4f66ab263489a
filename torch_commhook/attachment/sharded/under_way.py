"""Exchanges of gradients that go on beside the rest of a backward."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from torch_commhook import _C
from torch_commhook.step.hook_call import DRAIN_SECONDS
from torch_commhook.step.step_group import StepGroup


@dataclass
class Exchange:
    """An exchange of one unit's gradients.

    Attributes:
        unit: the unit's number.
        future: complete when it has come to its end.
        where: names what waits for it.
        group: through which it goes.
        finish: writes what it gives.
        target: where that is; it holds NaN where nothing is written.
    """

    unit: int
    future: torch.futures.Future[Any]
    where: str
    group: StepGroup
    finish: Callable[[Any], None]
    target: torch.Tensor

    def wait(self) -> None:
        """Wait for it, and write what it gives.

        Raises:
            Exception: it failed.
        """
        _C.wait_for_result(self.future, self.where, self.group.timeout.total_seconds())
        self.finish(self.future.wait())


class UnderWay:
    """The exchanges of a backward that nobody has waited for yet, in order."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []

    def wait_or_add(self, exchange: Exchange, goes_on: bool) -> None:
        """Let an exchange go on, or wait for it.

        Raises:
            Exception: it failed.
        """
        if goes_on:
            self._exchanges.append(exchange)
        else:
            exchange.wait()

    def has(self, unit: int) -> bool:
        """Whether one of a unit's is under way."""
        return any(exchange.unit == unit for exchange in self._exchanges)

    def wait(self, failed: Callable[[Exception, StepGroup], BaseException]) -> None:
        """Wait for all.

        Args:
            failed: gives what to raise for an error in a group.

        Raises:
            Exception: one failed; the others are not written.
        """
        while self._exchanges:
            exchange = self._exchanges.pop(0)
            try:
                exchange.wait()
            except Exception as error:
                exchange.target.fill_(math.nan)
                explained = failed(error, exchange.group)
                self.drop()
                raise explained from None

    def drop(self) -> None:
        """Wait for what is in flight in a step that failed, and write NaN."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._exchanges:
            exchange = self._exchanges.pop(0)
            with suppress(Exception):  # a consequence of what has failed
                _C.wait_for(exchange.future, max(deadline - time.monotonic(), 0.0))
            exchange.target.fill_(math.nan)
