"""Second stages of a step's collectives on the process group of the first ones.

Where both stages have one communicator, such as NCCL's, the second stage of a bucket must not be
issued behind the first: the wire would then idle while a rank adds up and encodes. It waits until
the next bucket's first stage has been issued, or until the last bucket has come. So the order
follows from the order of the buckets alone, which is the same on all ranks.

Another communicator for second stages would need no such order. But collectives of two NCCL
communicators at once may wait for each other's resources on different devices for ever, which NCCL
and PyTorch warn of, and each takes memory of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch_commhook.thread_values import ThreadValue, setting

_stages: ThreadValue[SecondStages] = ThreadValue()


class _Waiting(NamedTuple):
    issue: Callable[[], None]
    failed: Callable[[BaseException], None]


class SecondStages:
    """The second stages that wait in a step of one attached hook, in the order of its buckets."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()

    def add(self, issue: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Have a stage issued with the next call of :meth:`issue`.

        Args:
            issue: issues it. Raises what keeps the rank from it.
            failed: called with an error where it is not issued.
        """
        self._waiting.append(_Waiting(issue, failed))

    def issue(self) -> None:
        """Issue those that wait, in order.

        Raises:
            Exception: what one raised. Those behind it fail, too: other ranks would pair them with
                the one that is left out.
        """
        while self._waiting:
            waiting = self._waiting.popleft()
            try:
                waiting.issue()
            except BaseException as error:
                waiting.failed(error)
                self.give_up(error)
                raise

    def give_up(self, error: BaseException) -> None:
        """Let those that wait fail: the step has failed on this rank, or was left."""
        while self._waiting:
            self._waiting.popleft().failed(error)

    def __len__(self) -> int:
        return len(self._waiting)


def issuing_later(stages: SecondStages) -> setting[SecondStages]:
    """Let second stages of collectives that this thread begins inside wait in ``stages``.

    Whoever uses it must not wait for a result inside, and calls :meth:`SecondStages.issue` after
    the last bucket of a step.
    """
    return setting(_stages, stages)


def current_second_stages() -> SecondStages | None:
    """Those that wait for the hook which this thread runs; None where no stage is to wait."""
    return _stages.value
