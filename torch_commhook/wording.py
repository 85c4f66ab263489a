"""Words for the counts that the library prints."""

from __future__ import annotations


def pluralize(number: int, noun: str) -> str:
    """``number`` with ``noun``, which gets an ``s`` unless the number is 1: ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
