"""Hosts on one machine: network namespaces behind links of a given rate.

``with Lab(hosts=2, rate="200mbit") as lab: lab.run(["python", "train.py"])`` runs one rank on each
host. As a program: ``python -m benchmarks.netlab --help``.
"""

from .lab import Lab, Link, remove_leftovers, why_impossible
from .ranks import TIMED_OUT
from .signals import Stopped, stopped_by_signals
from .tools import LabError
from .units import format_rate, parse_rate

__all__ = [
    "TIMED_OUT",
    "Lab",
    "LabError",
    "Link",
    "Stopped",
    "format_rate",
    "parse_rate",
    "remove_leftovers",
    "stopped_by_signals",
    "why_impossible",
]
