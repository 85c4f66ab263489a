"""Seeds of codecs' random numbers."""

from __future__ import annotations


def mix_seeds(*numbers: int) -> int:
    """Mix similar numbers into one of 63 bits (splitmix64)."""
    mask = (1 << 64) - 1
    state = 0
    for number in numbers:
        state = (state + (number & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
