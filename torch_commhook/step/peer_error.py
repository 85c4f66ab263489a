"""The error that ranks raise because of another rank, and the errors that it replaces."""

from __future__ import annotations

from torch_commhook._C import WireFailure
from torch_commhook.step.connected_group import Failure
from torch_commhook.step.rendezvous import Reason


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


def reason_of_loss(failure: Failure, error: BaseException, seen_by: int) -> Reason:
    """The reason to send to the other ranks for a rank that has gone.

    A rank that leaves says which reason it has, as it reports it in the store, which may have ended
    with the process of the rank at fault. Without a reason a process has ended, unless its host
    does not answer.

    Args:
        failure: of the group, by which a rank has gone.
        error: the error on this rank.
        seen_by: this rank.
    """
    if failure.why:
        rank = failure.rank if failure.rank >= 0 else None
        return Reason(failure.why, rank, failure.kind != WireFailure.LOST)
    if failure.kind == WireFailure.TOLD:
        return Reason(f"on rank {failure.rank}: {failure.text}", failure.rank)
    has_ended = failure.kind != WireFailure.LOST
    text = (
        f"since the process of rank {failure.rank} ended, or left the others without saying why"
        if has_ended
        else f"since the host of rank {failure.rank} did not answer"
    )
    return Reason(f"{text}, as rank {seen_by} saw: {error}", failure.rank, has_ended)
