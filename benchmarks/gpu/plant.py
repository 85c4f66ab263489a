"""Faults on purpose: tests use them to see what a run stores when a part of it fails."""

from __future__ import annotations

import os
import time

#: The environment variable that says where: ``place=fault`` pairs between semicolons. Faults are
#: ``abort``, ``exit``, ``hang``, ``error`` and ``wrong``.
VARIABLE = "COMMHOOK_GPU_FAULTS"


def fault_at(place: str) -> str | None:
    """The fault that is wanted at a place."""
    pairs = (pair.partition("=") for pair in os.environ.get(VARIABLE, "").split(";"))
    return next((fault for where, _, fault in pairs if where == place), None)


def strike(place: str) -> None:
    """Fails as wanted at this place. ``wrong`` is left to the caller."""
    fault = fault_at(place)
    if fault == "abort":
        os.abort()
    if fault == "exit":
        os._exit(3)
    if fault == "error":
        raise RuntimeError(f"a fault was planted at {place}")
    while fault == "hang":
        time.sleep(1)
