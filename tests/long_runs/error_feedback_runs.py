"""What error feedback is for: runs of many steps, with it and without.

Three of them, from the literature: gradients that stay the same and differ between ranks, whose
memory stays bounded; four different quadratics, whose common minimum is not found without; and a
function on which signs alone are stuck (Karimireddy et al., "Error Feedback Fixes SignSGD", 2019).

``make error-feedback`` runs them at full length, on simulated ranks, and writes
``error_feedback_runs.json`` beside this file. Exits with 1 where one is not as it should be.
``test_formulas.py`` runs them shorter.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from long_run_results import store
from torch import Tensor

from torch_commhook import GradBucket, hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.testing import run_ranks

TABLE = Path(__file__).with_suffix(".json")
NUMEL = 700  # whole blocks and a shorter one
CONSTANT_STEPS = 12_000  # signs with one magnitude for all values come to their level so late
QUADRATIC_STEPS = 20_000
STUCK_STEPS = 4000

#: Settings of the codecs for the quadratics: as strong as it takes to fail without feedback.
OF_QUADRATICS: dict[str, Codec] = {"topk": CODECS["topk"](0.05), "sign": CODECS["sign"]()}


class Steps:
    """One flat parameter, whose gradients go through a hook."""

    def __init__(self, hook: hooks.Hook, numel: int) -> None:
        self.hook = copy.deepcopy(hook)
        self.x = torch.zeros(numel, requires_grad=True)

    def average(self, gradient: Tensor) -> Tensor:
        self.bucket = GradBucket([self.x], [gradient])
        return self.hook(None, self.bucket).wait()

    @property
    def memory(self) -> dict[str, Tensor]:
        """What is remembered: ``error`` and ``shard_error``."""
        return self.hook.memory(self.bucket).tensors


# ---- gradients that stay the same ----------------------------------------------------------------


def constant_gradients(rank: int, codec: Codec, steps: int, seed: int) -> dict[str, list[float]]:
    """The norms of ``error`` and ``shard_error`` after each step.

    And the norm of this rank's ``gradient``, and that of the error as a ``part`` of what was sent.
    """
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed + rank))
    run = Steps(hooks.error_feedback(hooks.compressed(codec)), NUMEL)
    norms: dict[str, list[float]] = {"error": [], "shard_error": [], "part": []}
    norms["gradient"] = [gradient.norm().item()]
    sent = norms["gradient"][0]
    for _ in range(steps):
        run.average(gradient)
        for name, tensor in run.memory.items():
            norms[name].append(tensor.norm().item())
        norms["part"].append(norms["error"][-1] / sent)
        sent = (gradient + run.memory["error"]).norm().item()
    return norms


def contraction_of(codec: Any) -> float | None:
    """The part of the square of any values that a message holds at least, where that is known."""
    settings = getattr(codec, "_settings", {})
    size = settings.get("block_size", 0)
    if type(codec).__name__ == "topk":
        return codec.entries(NUMEL) / NUMEL
    if type(codec).__name__ == "sign":
        return 1 / size
    if type(codec).__name__ == "fp8":
        roundoff, least = {"e4m3": (2**-4, 2**-10 / 448), "e5m2": (2**-3, 2**-17 / 57344)}[
            settings["format"]
        ]
        return 1 - roundoff**2 - size * least**2
    if type(codec).__name__ == "blockwise":
        levels = 2 ** settings["bits"] - 1 if not settings["symmetric"] else 127
        if settings["bits"] == 2:
            # The values above the threshold have (1 - 0.767) of all magnitudes at least. Of the
            # square of their sum a part of as many as there are is held. Of the others nothing is
            # known: between the least and the largest value zeros may come back as a third of it.
            return 0.05 / size if settings["symmetric"] and not codec.is_random else None
        if settings["symmetric"] and settings["bits"] == 4:
            return 1 / size  # the largest of a block is exact
        off = 1 / levels if not settings["symmetric"] or codec.is_random else 0.5 / levels
        return 1 - size * off**2  # of the square of the largest alone
    return None


def is_bounded(codec: Codec, found: dict[str, list[float]]) -> bool:
    """Whether what is remembered stays below what a contraction allows, and does not grow.

    A codec that leaves at most ``1 - c`` of the square of what it is given leaves no more than
    ``4 (1 - c) (gradient / c)^2`` of what it is given with what it has left, for ever.
    """
    contraction = contraction_of(codec)
    if contraction is None:
        contraction = 1 - max(found["part"]) ** 2
    rounding = 1 + 1e-4
    bound = 2 * (1 - contraction) ** 0.5 * found["gradient"][0] / contraction
    if max(found["part"]) ** 2 > (1 - contraction) * rounding or contraction <= 0:
        return False
    for norms in (found["error"], found["shard_error"]):
        half = len(norms) // 2
        if half and max(norms[half:]) > 1.25 * max(norms[:half]):
            return False
    return max(found["error"]) <= bound * rounding


# ---- quadratics ----------------------------------------------------------------------------------


def quadratics(rank: int, hook: hooks.Hook, steps: int, seed: int) -> float:
    """Distance of the mean of all ranks' functions from its minimum, after so many steps.

    Rank r has ``sum_i a_ri (x_i - b_ri)^2 / 2`` of 200 dimensions, a from 0.01 to 1.
    """
    world_size, numel = dist.get_world_size(), 200
    generator = torch.Generator().manual_seed(seed)
    a = 10 ** (torch.rand(world_size, numel, generator=generator, dtype=torch.float64) * 2 - 2)
    b = 3 * torch.randn(world_size, numel, generator=generator, dtype=torch.float64)

    def mean_of_all(x: Tensor) -> float:
        return (0.5 * a * (x - b).square()).sum(1).mean().item()

    run = Steps(hook, numel)
    own_a, own_b = a[rank].float(), b[rank].float()
    with torch.no_grad():
        for _ in range(steps):
            run.x -= 0.1 * run.average(own_a * (run.x - own_b))
        best = (a * b).sum(0) / a.sum(0)
        return mean_of_all(run.x.double()) - mean_of_all(best)


# ---- signs that are stuck ------------------------------------------------------------------------


def stuck(rank: int, hook: hooks.Hook, steps: int) -> list[float]:
    """``|x + y| / 2 + |x - y|`` from (1, 1) on, step by step; its minimum is 0."""
    run = Steps(hook, 2)
    values = []
    with torch.no_grad():
        run.x.fill_(1.0)
        for _ in range(steps):
            x, y = run.x.tolist()
            values.append(0.5 * abs(x + y) + abs(x - y))
            along = 0.5 if x + y >= 0 else -0.5
            across = 1.0 if x - y >= 0 else -1.0
            run.x -= 0.01 * run.average(torch.tensor([along + across, along - across]))
    return values


# ---- at full length ------------------------------------------------------------------------------


def main() -> int:
    """Run everything; 1 where something is not as it should be."""
    torch.set_num_threads(1)
    begin, good = time.monotonic(), True
    examples = [codec for cls in CODECS.values() for codec in cls.examples() if codec.takes_error]
    constant = []
    for codec in examples:
        own = run_ranks(constant_gradients, 2, codec, CONSTANT_STEPS, 0)
        bounded = all(is_bounded(codec, found) for found in own)
        half = CONSTANT_STEPS // 2
        row: dict[str, Any] = {
            "hook": f"error_feedback({codec})",
            "gradient": max(found["gradient"][0] for found in own),
            "largest_error": max(max(found["error"]) for found in own),
            "largest_error_of_second_half": max(max(found["error"][half:]) for found in own),
            "bounded": bounded,
        }
        constant.append(row)
        print(row, flush=True)
        good = good and bounded
    distances = []
    for codec in OF_QUADRATICS.values():
        plain = hooks.compressed(codec)
        row = {"codec": str(codec)}
        for name, hook in (("without", plain), ("with", hooks.error_feedback(plain))):
            row[name] = run_ranks(quadratics, 4, hook, QUADRATIC_STEPS, 0)[0]
        distances.append(row)
        print(row, flush=True)
        good = good and row["without"] > 10 * row["with"]
    signs = {}
    for name, hook in (("without", hooks.sign()), ("with", hooks.error_feedback(hooks.sign()))):
        values = run_ranks(stuck, 2, hook, STUCK_STEPS)[0]
        signs[name] = {"least": min(values), "last": values[-1]}
    print(signs, flush=True)
    good = good and signs["without"]["least"] >= 0.999 and signs["with"]["last"] < 0.1
    store(
        TABLE,
        begin,
        good=good,
        constant_gradients={"steps": CONSTANT_STEPS, "ranks": 2, "rows": constant},
        quadratics={"steps": QUADRATIC_STEPS, "ranks": 4, "rows": distances},
        signs={"steps": STUCK_STEPS, "ranks": 2, **signs},
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
