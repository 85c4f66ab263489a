"""Hooks that fail on one rank: an exception on all ranks in that step, and the next one works."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from modes import BUCKET_CAP_MB, MODES, Mode
from rank_pool import RankPool
from test_modes import batch, module
from torch import nn

from torch_commhook import GradBucket, PeerError, attach, collectives, traceable

STEPS = 50


class OwnError(Exception):
    pass


class Flaky:
    """Averages, and raises on a bucket when it is told to."""

    def __init__(self) -> None:
        self.fails_on = -1

    def __call__(self, state: object, bucket: GradBucket) -> torch.Tensor:
        if bucket.index() == self.fails_on:
            raise OwnError("boo")
        group = bucket.process_group()
        return collectives.all_reduce(bucket.buffer() / group.size(), group=group).wait()


@traceable
class TracedFlaky(Flaky):
    pass


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def _flaky(rank: int, mode: Mode, traced: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    model = mode.wrap(module())
    hook = TracedFlaky() if traced else Flaky()
    options = {"bucket_cap_mb": BUCKET_CAP_MB} if mode.model == "module" else {}
    handle = attach(model, hook, **options)
    dice = random.Random(3)
    own, peers, slowest = 0, 0, 0.0
    with mode.step_function(model) as step:
        for number in range(2):
            model.zero_grad()
            step(batch(rank, number))
        buckets = len(handle.stats().buckets)
        for number in range(STEPS):
            fails, bucket = dice.randrange(2), dice.randrange(buckets)
            hook.fails_on = bucket if fails == rank else -1
            model.zero_grad()
            begin = time.monotonic()
            try:
                step(batch(rank, number))
                raise AssertionError("no exception")
            except OwnError as error:
                assert fails == rank, error
                own += 1
            except PeerError as error:
                assert fails != rank, error
                assert f"on rank {fails}: OwnError: boo" in str(error)
                peers += 1
            except RuntimeError as error:  # compiled code waits for the collective itself
                assert fails != rank and mode.compiles_backward and traced, error
                assert "by peer" in str(error)
                peers += 1
            slowest = max(slowest, time.monotonic() - begin)
            hook.fails_on = -1
            if number % 5 == 0 or number == STEPS - 1:
                model.zero_grad()
                step(batch(rank, 1))
                got = gradients(model)
    handle.remove()
    return {"own": own, "peers": peers, "gradients": got, "buckets": buckets, "slowest": slowest}


def _healthy(rank: int) -> list[torch.Tensor]:
    model = module()
    handle = attach(model, Flaky(), bucket_cap_mb=BUCKET_CAP_MB)
    model(batch(rank, 1)).square().sum().backward()
    got = gradients(model)
    handle.remove()
    return got


@pytest.mark.parametrize("traced", [False, True], ids=["plain", "traceable"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.fullgraph], ids=str)
def test_fifty_steps_that_fail(two_ranks: RankPool, mode: Mode, traced: bool) -> None:
    results = two_ranks.run(_flaky, mode, traced, timeout=180)
    print(mode, traced, [(r["own"], r["peers"], r["buckets"], r["slowest"]) for r in results])
    assert results[0]["own"] + results[1]["own"] == STEPS
    assert results[0]["peers"] + results[1]["peers"] == STEPS
    for result, want in zip(results, two_ranks.run(_healthy), strict=True):
        assert result["buckets"] > 2
        assert all(torch.equal(a, b) for a, b in zip(result["gradients"], want, strict=True))
