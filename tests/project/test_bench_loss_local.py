"""benchmarks/bench_loss_local.py: which runs it compares, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_loss_local as bench
import pytest

from torch_commhook.hooks.expressions import check_hook


def _run(hook: str, seed: int, loss: float) -> dict[str, Any]:
    return {"hook": hook, "seed": seed, "held_out_loss": loss, "bytes_per_step": 10.0}


def test_its_hooks_can_be_written_so() -> None:
    for H in bench.ROUNDS:  # noqa: N806
        for job in bench.JOBS:
            check_hook(job.hook(H, 1800))


def test_a_run_is_compared_with_the_plain_one_of_its_seed() -> None:
    int2_with_reset = next(job for job in bench.JOBS if job.at_most is not None)
    jobs = (bench.PLAIN, int2_with_reset, bench.JOBS[-1])
    plain, int2, last = (job.hook(15, 60) for job in jobs)
    runs = [_run(plain, 1, 2.0), _run(plain, 2, 4.0)]
    runs += [_run(int2, 1, 2.02), _run(int2, 2, 4.12), _run(int2, 3, 9.0), _run(last, 2, 5.0)]
    rows = bench.table(runs, 60)
    assert [(row["H"], row["hook"], row["seeds"]) for row in rows] == [
        (15, plain, 2),
        (15, int2, 2),
        (15, last, 1),
    ]
    assert [row["bytes per round"] for row in rows] == [150, 150, 600]
    assert rows[1]["ratio"] == pytest.approx(6.14 / 6)
    assert rows[1]["range"] == pytest.approx((1.01, 1.03))
    assert rows[2]["ratio"] == pytest.approx(1.25)
    assert [bench.holds(row) for row in rows] == [True, False, True]
    assert bench.cells(rows[1])[-3:] == ["+2.3 %", "+1.0 to +3.0 %", "at most +1.0 %, **missed**"]


def test_what_is_stored_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def train(hook: str, seed: int, *of_size: Any) -> dict[str, Any]:
        ran.append((hook, seed))
        return _run(hook, seed, 2.0)

    monkeypatch.setattr(bench, "train", train)
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.json")

    def main(*options: str) -> int:
        ran.clear()
        monkeypatch.setattr("sys.argv", ["bench_loss_local.py", "--steps", "60", *options])
        return int(bench.main())

    assert main("--seeds", "1", "--only", "chunk_topk(64))") == 0
    assert len(ran) == 2 * 3  # plain, and two hooks with that text
    assert main("--seeds", "1", "2") == 0
    hooks = 2 * (len(bench.JOBS) - 1) + 1  # one that is the same for each H
    assert len(ran) == len(set(ran)) == 2 * hooks - 6
    assert len(json.loads(bench.RESULTS.read_text())["runs"]) == 2 * hooks
    assert main("--seeds", "1", "2") == 0
    assert ran == []
