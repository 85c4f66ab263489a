"""Measures the codecs, as a part of ``bench``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from torch_commhook.cli.bench.timing import timed
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.planning.hook_work import MOST_MEASURED
from torch_commhook.planning.link_file import CodecSpeed

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 30


def measure_codecs(device: torch.device, elements: int, seconds: float) -> list[CodecSpeed]:
    """Measure the speed of each codec on this rank, with each of its ``examples()``.

    Args:
        device: the device of the gradients.
        elements: the number of their elements. The function takes at most a bucket of 25 MiB.
        seconds: the approximate time of all measurements.
    """
    examples = [codec for kind in CODECS.values() for codec in kind.examples()]
    gradients = torch.randn(min(elements, MOST_MEASURED), dtype=torch.float32, device=device)
    share = seconds / len(examples)
    return [_speed(codec, gradients, share) for codec in examples]


def _speed(codec: Codec, gradients: torch.Tensor, seconds: float) -> CodecSpeed:
    """Encode, decode and copy in turn, so that all three have the same conditions."""
    device, nbytes = gradients.device, gradients.nbytes
    message = torch.zeros(codec.nbytes(gradients.numel()), dtype=torch.uint8, device=device)
    into = torch.zeros_like(gradients)
    seeds = torch.tensor([1, 2], dtype=torch.int64, device=device)
    rounding = seeds if codec.is_random else None
    calls: dict[str, Callable[[], object]] = {
        "copy": partial(into.copy_, gradients),
        "encode": partial(codec.encode, [gradients], message, rounding=rounding),
        "decode": partial(codec.decode, message, [into], rounding=rounding),
    }
    begun = time.perf_counter()
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begun > seconds:
            break
        for name, call in calls.items():
            found[name].append(timed(call, device))
    copy, encode, decode = (statistics.median(times) for times in found.values())
    return CodecSpeed(
        repr(codec),
        nbytes / len(message),
        nbytes / encode,
        nbytes / decode,
        encode / copy,
        decode / copy,
    )
