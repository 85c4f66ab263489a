"""Rates in the notation of people and ``tc``."""

from __future__ import annotations

import math
import re

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([a-z]+)(?:/s)?", re.IGNORECASE)
#: Below, a packet takes longer than a second; above, tc's 64 bits overflow in places.
_LEAST, _MOST = 10**4, 10**12


def parse_rate(rate: str | float) -> int:
    """Bits per second for ``200mbit``, ``1.5gbit``, ``200 Mbit/s``, or a plain number of them.

    Raises:
        ValueError: it is not of this form, or not between 10 kbit and 1 tbit.
    """
    bits = math.nan
    if isinstance(rate, str):
        match = _RATE.fullmatch(rate.strip())
        if match is not None and match[2].lower() in _BITS:
            bits = float(match[1]) * _BITS[match[2].lower()]
    elif not isinstance(rate, bool) and isinstance(rate, (int, float)):
        bits = float(rate)
    if not _LEAST <= bits <= _MOST:  # also refuses NaN
        raise ValueError(f"rate must be 10kbit to 1tbit, written as 200mbit or 1gbit, got {rate!r}")
    return round(bits)


def format_rate(bits: int) -> str:
    """The shortest notation of a rate, such as ``200mbit``."""
    for unit, size in reversed(_BITS.items()):
        if bits >= size:
            return f"{bits / size:.6g}{unit}"
    return f"{bits}bit"
