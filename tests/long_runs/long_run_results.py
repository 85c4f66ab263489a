"""Writes what a long run has found."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch
from machine import as_lines


def store(table: Path, begun: float, **found: Any) -> None:
    """Write results, with the software and the seconds since ``begun``, of ``time.monotonic()``."""
    seconds = round(time.monotonic() - begun)
    about = {"torch": torch.__version__, "python": platform.python_version(), "seconds": seconds}
    table.write_text(as_lines({**about, **found}))
