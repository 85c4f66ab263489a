"""Deliberate faults: tests use them to check what a run stores when a part of it fails."""

from __future__ import annotations

import os
import time

#: The environment variable that names the faults: ``place=fault`` pairs separated by semicolons.
#: Faults are ``abort``, ``exit``, ``hang``, ``error`` and ``wrong``.
VARIABLE = "COMMHOOK_GPU_FAULTS"


def fault_at(place: str) -> str | None:
    """The fault to cause at a place."""
    pairs = (pair.partition("=") for pair in os.environ.get(VARIABLE, "").split(";"))
    return next((fault for where, _, fault in pairs if where == place), None)


def strike(place: str) -> None:
    """Fails in the wanted way at this place. The caller handles ``wrong``."""
    fault = fault_at(place)
    if fault == "abort":
        os.abort()
    if fault == "exit":
        os._exit(3)
    if fault == "error":
        raise RuntimeError(f"a fault was planted at {place}")
    while fault == "hang":
        time.sleep(1)
