"""Hooks whose collectives follow one another, on Gloo, with delays in every stage.

A run attaches a hook to a small model in several buckets and makes some steps. Each rank sleeps
for up to 3 ms, drawn from a seed, before its backward and in each method of a codec: where a hook
starts and in callbacks, so that first stages end in another order on each rank. The gradients must
have the same bits on all ranks, and those of the same run without delays. Every other run sends
its messages point to point, as long ones are. In one run of four a
method raises on one rank at a place that is drawn; that step must fail on all ranks, on this one
with the error itself, and is made again. What a hook remembers may then be other than without the
failure, so that such runs are held against the other ranks alone.

``make soak-hooks`` makes 200 runs of each hook on 2 and on 3 ranks, and writes ``soak_hooks.json``
beside this file. A rank that ends, or that gives no answer in time, is a run that has failed. Exits
with 1 where one has. ``test_soak_hooks.py`` makes a few.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from long_run_results import store
from rank_pool import RankPool
from staged_steps import Around
from torch import nn

from torch_commhook import PeerError, attach, hooks
from torch_commhook.codecs import CODECS, Codec

TABLE = Path(__file__).with_suffix(".json")
RUNS = 200
STEPS = 3
RUNS_PER_CALL = 10
LONGEST_DELAY = 0.003
METHODS = ("encode", "reduce", "decode")

#: One run in so many has a step that fails.
FAILING = 4

#: Runs that are so many seeds apart have the same inputs.
INPUTS = 7

#: Of a hook and the number of its inputs, the gradients of a run without delays, on this rank.
_calm: dict[tuple[str, int], str] = {}


class OwnError(Exception):
    """What a codec raises here."""


class Disturbed:
    """Sleeps before a codec's methods, and raises before one of them.

    Args:
        seed: of the delays; None for none.
    """

    def __init__(self, seed: int | None) -> None:
        self._dice = None if seed is None else random.Random(seed)
        self.method, self.calls = "", 0

    def fail(self, method: str, calls: int) -> None:
        """Raise in the method's call after so many."""
        self.method, self.calls = method, calls

    def __call__(self, method: str) -> None:
        self.sleep()
        if method == self.method:
            self.calls -= 1
            if self.calls < 0:
                self.method = ""
                raise OwnError("boo")

    def sleep(self) -> None:
        """Up to 3 ms."""
        if self._dice is not None:
            time.sleep(self._dice.random() * LONGEST_DELAY)


def staged_codecs() -> list[Codec]:
    return [
        codec
        for cls in CODECS.values()
        for codec in cls.examples()
        if codec.exchange == "all_to_all"
    ]


def hooks_of(disturbed: Disturbed) -> dict[str, Callable[[], hooks.Hook]]:
    """Every hook with stages, disturbed."""
    around = {str(codec): Around(codec, disturbed) for codec in staged_codecs()}
    plain = {name: partial(hooks.compressed, codec, seed=5) for name, codec in around.items()}
    first, *_, last = around.values()

    def policy() -> hooks.Hook:
        rules: list[Any] = [("dim <= 1", hooks.allreduce()), ("0.*", hooks.compressed(last))]
        return hooks.policy(rules, hooks.error_feedback(hooks.compressed(first)))

    def adaptive() -> hooks.Hook:
        hook = hooks.adaptive(20_000, every=2)
        for bits, each in hook._hooks.items():
            hook._hooks[bits] = hooks.compressed(Around(each.codec, disturbed))
        return hook

    def hierarchical() -> hooks.Hook:
        alone, everybody = dist.new_subgroups(1)[0], dist.new_group()  # each rank is a node
        return hooks.hierarchical(first, intra_group=alone, inter_group=everybody)

    return {
        **{f"plain {name}": make for name, make in plain.items()},
        **{
            f"feedback {name}": lambda make=make: hooks.error_feedback(make())
            for name, make in plain.items()
        },
        "powersgd": lambda: hooks.powersgd(rank=2),
        "powersgd-feedback": lambda: hooks.error_feedback(hooks.powersgd(rank=2)),
        "hierarchical": hierarchical,
        "policy": policy,
        "after": lambda: hooks.after(1, hooks.compressed(first), hooks.compressed(last)),
        "clip": lambda: hooks.clip(0.5, hooks.compressed(first)),
        "adaptive": adaptive,
    }


def disturb_low_rank(disturbed: Disturbed) -> AbstractContextManager[Any]:
    """Disturb PowerSGD, which has no codec, in what it does for one."""
    module = sys.modules[hooks.powersgd.__module__]
    functions = {"left_factors": "encode", "right_factors": "reduce", "restore": "decode"}

    def before(method: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            disturbed(method)
            function(*args, **options)

        return call

    patches = {name: before(method, getattr(module, name)) for name, method in functions.items()}
    return patch.multiple(module, **patches)


def hook_names() -> list[str]:
    return list(hooks_of(Disturbed(None)))


def remembers(name: str) -> bool:
    return name.startswith(("feedback", "powersgd", "policy", "adaptive"))


def module() -> nn.Module:
    torch.manual_seed(0)
    sizes = [40, 60, 40, 30, 50, 40]
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))


def one_run(rank: int, world_size: int, name: str, seed: int, disturb: bool) -> dict[str, Any]:
    """What became of a run on this rank: its gradients, as a hash, and how steps have failed."""
    disturbed = Disturbed(seed * 100 + rank if disturb else None)
    plan = random.Random(seed)  # the same on all ranks
    fails_at = plan.randrange(STEPS) if disturb and seed % FAILING == 0 else -1
    fails_on, method = plan.randrange(world_size), plan.choice(METHODS)
    # Of two codecs one may do little in a step.
    calls = plan.randrange(2 if name in ("policy", "after") else 3)
    hook, model = hooks_of(disturbed)[name](), module()
    digest, outcomes, expected = hashlib.sha256(), [], []
    with disturb_low_rank(disturbed):
        handle = attach(model, hook, bucket_cap_mb=0.008)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * (seed % INPUTS) + 10 * step + rank)
            x = torch.randn(8, 40, generator=generator)
            for failing in [True, False] if step == fails_at else [False]:
                expected.append("done")
                if failing:
                    expected[-1] = "own" if rank == fails_on else "peer"
                if failing and rank == fails_on:
                    disturbed.fail(method, calls)
                disturbed.sleep()
                model.zero_grad()
                outcome = "done"
                try:
                    model(x).square().mean().backward()
                except OwnError:
                    outcome = "own"
                except PeerError as error:
                    is_right = f"on rank {fails_on}: OwnError: boo" in str(error)
                    outcome = "peer" if is_right else str(error)
                outcomes.append(outcome)
            for parameter in model.parameters():
                digest.update(parameter.grad.numpy().tobytes())
        buckets = len(handle.stats().buckets)
        handle.remove()
    return {
        "gradients": digest.hexdigest(),
        "outcomes": outcomes,
        "expected": expected,
        "failed": fails_at >= 0,
        "buckets": buckets,
    }


def some_runs(rank: int, world_size: int, name: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Each seed's run with delays, and without."""
    found = []
    for seed in seeds:
        result = one_run(rank, world_size, name, seed, disturb=True)
        inputs = name, seed % INPUTS
        if inputs not in _calm:
            _calm[inputs] = one_run(rank, world_size, name, seed, disturb=False)["gradients"]
        found.append({**result, "calm": _calm[inputs]})
    return found


def check(name: str, ranks: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a run."""
    wrong = []
    if len({found["gradients"] for found in ranks}) != 1:
        wrong.append("the ranks' gradients differ")
    if len({found["calm"] for found in ranks}) != 1:
        wrong.append("the ranks' gradients differ without delays")
    for rank, found in enumerate(ranks):
        if found["outcomes"] != found["expected"]:
            wrong.append(f"rank {rank} has {found['outcomes']} for {found['expected']}")
        if found["gradients"] != found["calm"] and not (found["failed"] and remembers(name)):
            wrong.append(f"rank {rank} has other gradients than without delays")
        if found["buckets"] < 3:
            wrong.append(f"rank {rank} has {found['buckets']} buckets")
    return wrong


def soak(pool: RankPool, name: str, runs: int, first_seed: int) -> dict[str, Any]:
    """One row of the table."""
    begin, wrong, failing = time.monotonic(), [], 0
    for start in range(0, runs, RUNS_PER_CALL):
        seeds = [first_seed + number for number in range(start, min(start + RUNS_PER_CALL, runs))]
        try:
            ranks = pool.run(some_runs, pool.world_size, name, seeds, timeout=120)
        except (AssertionError, TimeoutError) as error:
            wrong.append(f"seeds {seeds[0]} to {seeds[-1]}: {error}")
            continue
        for seed, *found in zip(seeds, *ranks, strict=True):
            failing += found[0]["failed"]
            wrong += [f"seed {seed}: {what}" for what in check(name, found)]
    return {
        "hook": name,
        "ranks": pool.world_size,
        "runs": runs,
        "runs_with_a_failure": failing,
        "seconds": round(time.monotonic() - begin, 1),
        "wrong": wrong,
    }


def main() -> int:
    """Make the runs; 1 where something was wrong in one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help="parts of names; all hooks where none is given")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each hook (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (%(default)s)")
    arguments = parser.parse_args()
    rows, begun = [], time.monotonic()
    for world_size in (2, 3):
        pool = RankPool(world_size)
        for name in hook_names():
            if arguments.parts and not any(part in name for part in arguments.parts):
                continue
            rows.append(soak(pool, name, arguments.runs, arguments.seed))
            print(rows[-1], flush=True)
        pool.stop()
    good = not any(row["wrong"] for row in rows)
    if arguments.runs == RUNS and not arguments.parts and not arguments.seed:
        about = {"steps": STEPS, "longest_delay_seconds": LONGEST_DELAY, "good": good}
        store(TABLE, begun, **about, rows=rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
