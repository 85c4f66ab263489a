"""How often a communication hook takes the GIL for each bucket of a step.

The same model is trained with few buckets and with many, and what one backward takes is compared.
What DDP, autograd and Python take once for a backward or once for a parameter is in both figures
and cancels in their difference. What DDP takes for a bucket remains; it is measured by a model
without a hook. To be called on every rank at once::

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

LAYERS = 32  # one parameter each
WIDTH = 32
FEW, MANY = 8, 32  # buckets
WARM_UP = 3  # DDP forms its buckets anew before the second step
STEPS = 5

#: By how much two figures of the same ``per_bucket`` may differ. Every work of Gloo keeps the local
#: state of the thread, and in it one Python object of the backward (its `contextvars`). A thread of
#: Gloo that is the last to drop it takes the GIL: at most once a backward, whatever its buckets.
NOISE = 2 / (MANY - FEW) + 1e-9

#: Makes a model with a hook out of a plain one, with the given size of a bucket in MiB.
MakeHookedDdp = Callable[[nn.Module, float], nn.Module]


def ddp_alone(net: nn.Module, bucket_cap_mb: float) -> DDP:
    """DDP without a hook, to compare with."""
    return DDP(net, bucket_cap_mb=bucket_cap_mb)


@dataclass(frozen=True)
class GilCallsPerBucket:
    """What this rank's threads took.

    Attributes:
        few: how often the GIL was taken in ``STEPS`` backwards with ``FEW`` buckets, by library.
        many: the same with ``MANY`` buckets.
    """

    few: dict[str, int]
    many: dict[str, int]

    @property
    def per_bucket(self) -> float:
        """How often one bucket more takes the GIL, give or take half of ``NOISE``."""
        return (sum(self.many.values()) - sum(self.few.values())) / (MANY - FEW) / STEPS

    @property
    def per_bucket_by_library(self) -> dict[str, float]:
        """``per_bucket``, by the library that asked for the GIL; those of 0 are left out."""
        libraries = {*self.few, *self.many}
        slopes = {
            library: (self.many.get(library, 0) - self.few.get(library, 0)) / (MANY - FEW) / STEPS
            for library in sorted(libraries)
        }
        return {library: slope for library, slope in slopes.items() if slope}


def gil_calls_per_bucket(make_hooked_ddp: MakeHookedDdp) -> GilCallsPerBucket:
    """Measures a hook; every rank of the group must call it.

    Args:
        make_hooked_ddp: gets a model and ``bucket_cap_mb``, and returns what is to be trained.

    Raises:
        CannotCountError: see `gil_calls`.
        AssertionError: DDP has formed another number of buckets than it was asked to.
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
        loss = loss_of_a_step()  # kept as below: when it goes decides who drops what it holds
        loss.backward()
    if isinstance(model, DDP):
        sizes = str(model._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")
        if len(sizes) != buckets:
            raise AssertionError(f"the model must have {buckets} buckets, got {len(sizes)}")

    # This thread counts within backward alone, where the hook runs. Others count all the time: a
    # thread that completes a bucket's work may drop the hook's objects after the backward. Those
    # of the last step may come too late, as those of the warm-up are counted here.
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
