"""Warnings of ranks that are left apart."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import Protocol

from torch_commhook.attachment.user_warning import warn_user


class _KeepsApart(Protocol):
    def warn_if_apart(self, what: str) -> None:
        """Warn where ranks differ now."""


_attached: weakref.WeakSet[_KeepsApart] = weakref.WeakSet()


def warn_at_exit(steps: _KeepsApart) -> None:
    """Have ``steps.warn_if_apart()`` called if it lives when the process ends."""
    if not _attached:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _attached.add(steps)


def forget(steps: _KeepsApart) -> None:
    """Leave it alone when the process ends."""
    _attached.discard(steps)


def warn_apart(name: str, what: str, steps: int) -> None:
    """Warn that ranks differ, and say what to do.

    Args:
        name: of the hook.
        what: has happened to it.
        steps: since the ranks were together; 0 where they are apart by unsent updates alone.
    """
    if steps:
        when = f"{steps} step{'' if steps == 1 else 's'} after the ranks were together last"
    else:
        when = "while ranks had updates that they had not sent"
    warn_user(
        f"torch_commhook: hook '{name}' {what} {when}, so the ranks' parameters differ. Call "
        "HookHandle.synchronize() first, on all ranks",
        RuntimeWarning,
    )


def _at_exit() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # an exception has ended the program, which is news enough
    for steps in list(_attached):
        steps.warn_if_apart("was still attached when the process ended,")
