"""Parses and formats the numbers of ``plan``: 7B, 100 Gbit/s, 0.42 s."""

from __future__ import annotations

import re

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_MOST_COUNT = 10**13
# Bits per second.
_LEAST_RATE, _LARGEST_RATE = 1e3, 1e15


def parse_count(text: str) -> int:
    """Parse a number of elements, such as ``124M`` or ``7B``.

    Raises:
        ValueError: the text is no such number, or the number is not from 1 to 10 T.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmgbt]?)", text.strip().lower())
    count = round(float(match[1]) * _SUFFIXES[match[2]]) if match else 0
    if not 1 <= count <= _MOST_COUNT:
        raise ValueError(f"must be a number such as 124M or 7B, got {text!r}")
    return count


def parse_rate(text: str) -> float:
    """Parse a rate such as ``200mbit``, ``10 Gbit/s``, ``100G`` or ``1gbps`` to bits per second.

    Raises:
        ValueError: the text is no such rate, a rate in bytes (``1GB/s``), or not from 1 kbit/s to
            1000 Tbit/s.
    """
    match = re.fullmatch(
        r"([0-9]*\.?[0-9]+)\s*(?:([kmgt])|([kmgt]?)(?:bits?(?:/s|ps)?|bps|b/s))",
        re.sub(r"B(?=/|$)", "bytes", text.strip()).lower(),
    )
    rate = float(match[1]) * _SUFFIXES[match[2] or match[3] or ""] if match else 0.0
    if not _LEAST_RATE <= rate <= _LARGEST_RATE:
        raise ValueError(
            "must be a rate such as 200mbit, 10gbit or 100G, in bits, from 1 kbit/s to "
            f"1000 Tbit/s, got {text!r}"
        )
    return rate


def format_count(count: float) -> str:
    """Format a number of elements: ``7 B``, ``124.4 M``."""
    return _in_units(count, ("", " k", " M", " B", " T"))


def format_rate(bits_per_second: float) -> str:
    """Format a rate: ``100 Gbit/s``."""
    return _in_units(bits_per_second, (" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"))


def format_seconds(seconds: float) -> str:
    """Format a time for a table: ``1.90 s``, ``42.0 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def say_seconds(seconds: float) -> str:
    """Format a time for a sentence, with two digits: ``1.9 s``, ``0.42 s``, ``42 ms``."""
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    if seconds >= 0.0995:
        return f"{seconds:.{1 if seconds >= 0.995 else 2}f} s"
    return f"{seconds * 1e3:.{0 if seconds >= 9.95e-3 or not seconds else 1}f} ms"


def _in_units(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 999.95:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:.4g}{units[-1]}"
