"""What bench_wan makes of its runs; the runs themselves need hosts and hours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import bench_wan as bench
import pytest


def _run(way: str, seed: int, seconds: list[float], losses: list[float]) -> dict[str, Any]:
    steps = [25 * (i + 1) for i in range(len(seconds))]
    figures = {"steps": steps, "seconds": seconds, "losses": losses, "link_bytes": 10**6}
    return {"way": way, "seed": seed, **figures}


def test_time_to_the_loss_of_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for seed, speed in ((1, 1.0), (2, 2.0), (3, 3.0)):
        # DDP's own time is that to its last loss, too: here it comes to that early, and again.
        runs.append(_run("none", seed, [100 * speed, 110 * speed, 120 * speed], [2.9, 3.1, 3.0]))
        # A loss that was reached once is reached, wherever it goes then.
        runs.append(_run(bench.STREAMED, seed, [1.0, 6 * speed, 8 * speed], [4.0, 3.0, 3.1]))
        runs.append(
            _run("torchft DiLoCo(10)", seed, [9 * speed, 18 * speed], [4.0, 2.0 + seed / 2])
        )
    plain, streamed, torchft = bench.table(runs)
    assert (plain["way"], plain["reached"], plain["seconds"], plain["ratio"]) == ("DDP", 3, 200, 1)
    assert (streamed["reached"], streamed["seconds"], streamed["ratio"]) == (3, 12, 0.06)
    assert (torchft["reached"], torchft["seconds"], torchft["ratio"]) == (2, 27, 0.18)
    assert bench.print_table([plain, torchft, streamed])
    assert "<= 0.10 ok" in capsys.readouterr().out
    never = _run(bench.STREAMED, 1, [1.0], [3.5])
    assert not bench.print_table(bench.table([runs[0], never]))
    assert "never" in capsys.readouterr().out


def test_runs_with_other_settings_are_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = []

    def run_plan(plan: Any, rate: int, delay: float) -> dict[str, Any]:
        ran.append((plan.way, plan.seed, plan.steps, rate, delay))
        return {"steps": [plan.steps], "seconds": [1.0], "losses": [3.0], "link_bytes": 0}

    monkeypatch.setattr(bench, "run_plan", run_plan)
    arguments = ["--out", str(tmp_path / "wan.json"), "--picture", str(tmp_path / "wan.png")]
    arguments += ["--seeds", "1", "--ways", "none", bench.STREAMED]
    first = [("none", 1, 1000, 200_000_000, 0.025), (bench.STREAMED, 1, 1500, 200_000_000, 0.025)]
    for _ in range(2):
        assert bench.main(arguments) == 1  # the target is missed
    assert ran == first and (tmp_path / "wan.png").stat().st_size > 0
    bench.main([*arguments, "--delay", "5"])
    assert ran[2:] == [(*each[:-1], 0.005) for each in first]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "none", "bogus"], "argument --ways: .*bogus"),
        (["--ways", "allreduce"], "--ways: must have none"),
        (["--more-steps", "nan"], "--more-steps: must be 1 to 100"),
        (["--more-local-steps", "0"], "--more-local-steps: must be 1 to 100"),
        (["--steps", "4"], "give 30 steps or more"),
        (["--batch", "0"], "--batch: must be above 0"),
        (["--dim", "241"], "--dim: must be a multiple of 12"),
    ],
)
def test_what_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert re.search(message, capsys.readouterr().err)
