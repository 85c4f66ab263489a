"""Warnings that ranks end with different parameters."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import Protocol

from torch_commhook.attachment.user_warning import warn_user


class _KeepsApart(Protocol):
    def warn_if_apart(self, what: str) -> None:
        """Warn if the ranks' parameters differ now."""


_attached: weakref.WeakSet[_KeepsApart] = weakref.WeakSet()


def warn_at_exit(steps: _KeepsApart) -> None:
    """Call ``steps.warn_if_apart()`` at the end of the process, if ``steps`` still exists."""
    if not _attached:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _attached.add(steps)


def forget(steps: _KeepsApart) -> None:
    """Do not warn at the end of the process."""
    _attached.discard(steps)


def warn_apart(name: str, what: str, steps: int) -> None:
    """Warn that the ranks' parameters differ, and say how to avoid it.

    Args:
        name: the hook's name.
        what: the event, as a verb after the hook's name.
        steps: steps since the last exchange; 0 if only unsent updates differ.
    """
    if steps:
        when = f"{steps} step{'' if steps == 1 else 's'} after the ranks' last exchange"
    else:
        when = "while ranks had updates that they had not sent"
    warn_user(
        f"torch_commhook: hook '{name}' {what} {when}, so the ranks' parameters differ. Call "
        "HookHandle.synchronize() first, on all ranks",
        RuntimeWarning,
    )


def _at_exit() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # an exception has ended the program; its traceback suffices
    for steps in list(_attached):
        steps.warn_if_apart("was still attached when the process ended,")
