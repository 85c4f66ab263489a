"""Second stages of a step's collectives on the process group of the first stages.

All backends over NCCL run the collectives of a group on one communicator, in order (``nccl-lazy``
has others for point-to-point messages). So a bucket's second stage must not be issued right behind
the first: the wire would be idle while a rank sums and encodes. It waits until the next bucket's
first stage has been issued, or until the last bucket has come. So the order depends on the order of
the buckets only, which is the same on all ranks.

A separate communicator for second stages would not need this order. But collectives of two NCCL
communicators that run at once may deadlock, waiting for each other's resources on different
devices; NCCL and PyTorch warn about this. Each communicator also takes device memory.
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
        """Let the next call of :meth:`issue` issue a stage.

        Args:
            issue: issues it. May raise.
            failed: called with an error if it is not issued.
        """
        self._waiting.append(_Waiting(issue, failed))

    def issue(self) -> None:
        """Issue the waiting stages, in order.

        Raises:
            Exception: a stage raised it. The stages behind it fail too: other ranks would pair them
                with the missing one.
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
        """Fail the waiting stages: the step has failed on this rank, or was abandoned."""
        while self._waiting:
            self._waiting.popleft().failed(error)

    def __len__(self) -> int:
        return len(self._waiting)


def issuing_later(stages: SecondStages) -> setting[SecondStages]:
    """Let second stages of collectives that this thread begins inside the block wait in ``stages``.

    The caller must not wait for a result inside the block, and must call
    :meth:`SecondStages.issue` after the last bucket of a step.
    """
    return setting(_stages, stages)


def current_second_stages() -> SecondStages | None:
    """The waiting stages of the hook that this thread runs; None if no stage is to wait."""
    return _stages.value
