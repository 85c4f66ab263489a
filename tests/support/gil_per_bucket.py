"""Measures how often a communication hook takes the GIL for each bucket of a step.

It trains the same model with few buckets and with many, and compares the counts of a backward. DDP,
autograd and Python take the GIL once for a backward or once for a parameter in both figures, which
cancels in the difference. DDP's own count for a bucket remains; a model without a hook gives it.
Call it on every rank at once::

    def hooked(net: nn.Module, bucket_cap_mb: float) -> DDP:
        model = DDP(net, bucket_cap_mb=bucket_cap_mb)
        model.register_comm_hook(None, my_hook)
        return model

    ddp, mine = gil_calls_per_bucket(ddp_alone), gil_calls_per_bucket(hooked)
    assert mine.per_bucket - ddp.per_bucket < NOISE
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from gil_calls import count_gil_calls
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS = 32  # with one parameter each
WIDTH = 32
FEW, MANY = 8, 32  # numbers of buckets
WARM_UP = 3  # DDP rebuilds its buckets before the second step
STEPS = 5

#: The possible difference between two figures of the same ``per_bucket``. Every Work of Gloo keeps
#: the local state of the thread, with one Python object of the backward (its `contextvars`). A
#: thread of Gloo that drops it last takes the GIL: at most once for a backward, for any number of
#: buckets.
NOISE = 2 / (MANY - FEW) + 1e-9

#: Makes a model with a hook from a plain one, with the given size of a bucket in MiB.
MakeHookedDdp = Callable[[nn.Module, float], nn.Module]


def ddp_alone(net: nn.Module, bucket_cap_mb: float) -> DDP:
    """DDP without a hook, for comparison."""
    return DDP(net, bucket_cap_mb=bucket_cap_mb)


@dataclass(frozen=True)
class GilCallsPerBucket:
    """The counts of this rank's threads."""

    # how often threads took the GIL in ``STEPS`` backwards with ``FEW`` buckets, by library
    few: dict[str, int]
    many: dict[str, int]  # the same with ``MANY`` buckets

    @property
    def per_bucket(self) -> float:
        """How often one more bucket takes the GIL, give or take half of ``NOISE``."""
        return (sum(self.many.values()) - sum(self.few.values())) / (MANY - FEW) / STEPS


def gil_calls_per_bucket(make_hooked_ddp: MakeHookedDdp) -> GilCallsPerBucket:
    """Measures a hook; every rank of the group must call it.

    Args:
        make_hooked_ddp: called with a model and ``bucket_cap_mb``; returns the model to train.

    Raises:
        CannotCountError: see `gil_calls`.
        AssertionError: DDP has formed an unexpected number of buckets.
    """
    return GilCallsPerBucket(_count(make_hooked_ddp, FEW), _count(make_hooked_ddp, MANY))


def _count(make_hooked_ddp: MakeHookedDdp, buckets: int) -> dict[str, int]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    of_a_bucket = LAYERS // buckets * WIDTH * WIDTH * 4
    model = make_hooked_ddp(net, of_a_bucket / 2**20)
    batch = torch.randn(4, WIDTH)

    def loss_of_a_step() -> torch.Tensor:
        model.zero_grad()
        return model(batch).square().sum()

    for _ in range(WARM_UP):
        # Kept, as below: the time of its end decides which thread drops its objects.
        loss = loss_of_a_step()
        loss.backward()
    if isinstance(model, DDP):
        sizes = str(model._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")
        if len(sizes) != buckets:
            raise AssertionError(f"the model must have {buckets} buckets, got {len(sizes)}")

    # This thread counts only within backward, where the hook runs. Others count all the time: a
    # thread that completes a bucket's work may drop the hook's objects after the backward. Counts
    # of the last step may come too late, just as counts of the warm-up may be included.
    here = threading.get_native_id()
    taken: Counter[str] = Counter()
    with count_gil_calls() as everywhere:
        for _ in range(STEPS):
            loss = loss_of_a_step()
            with count_gil_calls() as in_backward:
                loss.backward()
            for call, count in in_backward.calls.items():
                if call.thread == here and not call.already_held:
                    taken[call.library] += count
    for call, count in everywhere.calls.items():
        if call.thread != here and not call.already_held:
            taken[call.library] += count
    return {"/".join(Path(library).parts[-2:]): count for library, count in taken.items()}
