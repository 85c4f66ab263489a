"""The error that ranks raise because of another rank, and the errors that it replaces.

Gloo reports a lost connection only in the text of an error, so these functions read texts.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch_commhook.step.rendezvous import Reason

#: Gloo's errors for a connection to a host that does not answer. Its processes may be alive.
_NO_ANSWER = re.compile(r"Connection timed out|No route to host|Network is unreachable")
#: Gloo's errors for a connection that another rank has closed, or that ended with its process.
_CLOSED = re.compile(r"closed by peer|reset by peer|Broken pipe|Socket closed|pair closure")
#: Gloo's errors for a rank that did not come in time: of the collective, and of others beside it.
_LATE = re.compile(r"gloo.*Timed out waiting|Application timeout caused pair closure", re.DOTALL)
#: Errors of a collective that another thread of this rank may have ended: Gloo's, and PyTorch's for
#: a group that has no backend any more.
_MAY_BE_CUT = re.compile(r"gloo|Could not retrieve or create the backend")
_EXCHANGE_WITH = re.compile(r"exchange: with rank (\d+): ")


class PeerError(RuntimeError):
    """Another rank's hook failed, or its process ended, so this step counts on no rank.

    Attributes:
        rank: the rank at fault in the default group; None if unknown.

    Example:
        >>> error = PeerError("rank 1 failed")  # backward() raises one on the other ranks
        >>> isinstance(error, RuntimeError), error.rank
        (True, None)
    """

    rank: int | None = None
    #: The reason as ranks send it to each other; None for an error that a user has made.
    _reason: Reason | None = None


def peer_error(reason: Reason) -> PeerError:
    """The error of a step, with the reason as ranks send it to each other."""
    error = PeerError(f"torch_commhook: this step failed {reason.text}")
    error.rank, error._reason = reason.rank, reason
    return error


def reason_of(error: BaseException | str) -> Reason | None:
    """The reason that ranks have sent to each other, if the error has one."""
    return error._reason if isinstance(error, PeerError) else None


def is_lost(error: BaseException) -> bool:
    """Whether an error is Gloo's for a lost connection."""
    text = str(error)
    return "gloo" in text and bool(_CLOSED.search(text) or _NO_ANSWER.search(text))


def is_late(error: BaseException) -> bool:
    """Whether an error is Gloo's for a collective to which another rank did not come in time."""
    # A PeerError has the text of another rank's.
    return not isinstance(error, PeerError) and _LATE.search(str(error)) is not None


def may_be_cut(error: BaseException) -> bool:
    """Whether another thread of this rank may have caused an error, by closing the connections."""
    return _MAY_BE_CUT.search(str(error)) is not None


def reason_of_loss(error: RuntimeError, seen_by: int, others: Collection[int]) -> Reason:
    """The reason to send to the other ranks for a lost connection.

    A rank reports a reason before it closes its connections. Without a report, a process has
    ended, unless its host does not answer.

    Args:
        error: Gloo's error, for which :func:`is_lost` holds.
        seen_by: this rank.
        others: the other ranks of the group.
    """
    found = _EXCHANGE_WITH.search(str(error))
    lost = next(iter(others)) if len(others) == 1 else None
    if found is not None and int(found[1]) in others:
        lost = int(found[1])
    who = "another rank" if lost is None else f"rank {lost}"
    has_ended = _NO_ANSWER.search(str(error)) is None
    text = (
        f"since the process of {who} ended, or left the others without saying why"
        if has_ended
        else f"since the host of {who} did not answer"
    )
    return Reason(f"{text}, as rank {seen_by} saw: {error}", lost, has_ended)
