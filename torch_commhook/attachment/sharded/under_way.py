"""Exchanges of gradients that run while the backward continues."""

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
        future: completes when the exchange has ended.
        where: names the waiting operation in errors.
        group: the group of the exchange.
        finish: writes the result.
        target: the result's destination. It contains NaN if nothing is written.
    """

    unit: int
    future: torch.futures.Future[Any]
    where: str
    group: StepGroup
    finish: Callable[[Any], None]
    target: torch.Tensor

    def wait(self) -> None:
        """Wait for it, and write its result.

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
        """Let an exchange continue, or wait for it.

        Raises:
            Exception: it failed.
        """
        if goes_on:
            self._exchanges.append(exchange)
        else:
            exchange.wait()

    def has(self, unit: int) -> bool:
        """Whether an exchange of a unit is running."""
        return any(exchange.unit == unit for exchange in self._exchanges)

    def wait(self, failed: Callable[[Exception, StepGroup], BaseException]) -> None:
        """Wait for all exchanges.

        Args:
            failed: returns the error to raise for an error in a group.

        Raises:
            Exception: one failed. The others' results are not written.
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
        """Wait for the exchanges of a failed step, and write NaN."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._exchanges:
            exchange = self._exchanges.pop(0)
            with suppress(Exception):  # a consequence of the failure
                _C.wait_for(exchange.future, max(deadline - time.monotonic(), 0.0))
            exchange.target.fill_(math.nan)
