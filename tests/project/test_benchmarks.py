"""What benchmarks make of their runs, and what they refuse; the runs need hosts and hours."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_codec
import bench_link
import bench_loss_local
import bench_measured_link
import bench_plan
import bench_sharded
import bench_wan
import elastic_figures as figures
import hook_choice
import pytest
from harness import Row, merged

from torch_commhook.hooks.expressions import check_hook

# ---- the harness ---------------------------------------------------------------------------------


def test_figures_of_several_processes_are_their_medians() -> None:
    blank: dict[str, Any] = dict.fromkeys(Row.__dataclass_fields__)
    own = {"group": "a", "job": "b", "details": {}, "samples": 3, "target": ">= 0.9"}
    quartiles = {"first_quartile": 1.0, "third_quartile": 1.0, "gigabytes_per_second": 8.0}
    row = Row(**{**blank, **own, **quartiles})
    runs = [
        [replace(row, seconds=seconds, ratio=ratio, holds=holds)]
        for seconds, ratio, holds in ((1.0, 0.95, True), (3.0, 0.8, False), (2.0, 0.85, False))
    ]
    [result] = merged(runs)
    assert result.seconds == 2.0 and result.samples == 9
    assert result.ratio == 0.85 and result.holds is False
    assert result.details == {"least": 0.8, "most": 0.95}
    with pytest.raises(ValueError, match="other jobs"):
        merged([runs[0], [replace(runs[0][0], job="c")]])


def test_a_run_that_measured_nothing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results of an earlier run stay."""
    out = tmp_path / "results.json"
    out.write_text("earlier")
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench_codec.main(["--quick", "--memory-gib", "1e-6", "--out", str(out)])
    assert "not even its first tensor fits into memory" in capsys.readouterr().err
    assert out.read_text() == "earlier"


# ---- links ---------------------------------------------------------------------------------------


def test_only_links_without_a_delay_are_drawn_unasked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for bench, delay in ((bench_link, ["0.5", "5"]), (bench_sharded, ["5"])):
        assert bench.options_of([]).plot == bench.PICTURE
        assert bench.options_of(["--delay", *delay]).plot is None
        assert bench.options_of(["--out", str(tmp_path / "results.json")]).plot is None
        asked = tmp_path / "picture.png"
        assert bench.options_of(["--delay", "5", "--plot", str(asked)]).plot == asked
    with pytest.raises(SystemExit):
        bench_link.options_of(["--delay", "0.5", "5", "--plot", "picture.png"])
    assert "--plot draws over rates, for one --delay" in capsys.readouterr().err


def test_background_exchanges_are_compared_with_no_communication() -> None:
    alone, streamed = bench_link.jobs_on(
        (200_000_000, 0.025), [bench_link.ALONE, bench_link.STREAMED]
    )
    assert alone.against is None  # DDP is not there
    assert streamed.against is not None
    assert (streamed.against.baseline, streamed.against.at_most) == (bench_link.ALONE, 1.05)


@pytest.mark.parametrize(
    ("round_trip", "rates", "trips", "holds"),
    [
        (50.0, [109e6, 91e6], [54.9, 45.1], True),
        (50.0, [111e6, 100e6], [50.0, 50.0], False),
        (50.0, [100e6, 89e6], [50.0, 50.0], False),
        (50.0, [100e6, 100e6], [50.0, 55.1], False),
        (0.0, [100e6], [0.9], True),
        (0.0, [100e6], [1.1], False),
    ],
)
def test_all_measurements_of_a_link_must_be_near_the_truth(
    round_trip: float, rates: list[float], trips: list[float], holds: bool
) -> None:
    row = bench_measured_link.Row(2, 100_000_000, round_trip, rates, trips)
    assert row.holds is holds


def test_the_worst_measurement_of_a_link_is_shown() -> None:
    row = bench_measured_link.Row(4, 200_000_000, 10.0, [199e6, 170e6], [10.1, 9.5])
    rate, trip = "199.0, 170.0 Mbit/s (-15.0%)", "10.10, 9.50 ms (-0.50 ms)"
    shown = bench_measured_link.cells(vars(row))
    assert shown == ["4", "200mbit", rate, "10 ms", trip, "**no**"]


def test_only_slow_links_of_many_hosts_are_measured() -> None:
    options = SimpleNamespace(hosts=[2, 8], rates=[10**8, 10**9], round_trips=[0.0, 50.0])
    cases = bench_measured_link.cases(options)
    assert [(case.hosts, case.rate, case.round_trip_ms) for case in cases] == [
        (hosts, rate, trip)
        for hosts, rate in ((2, 10**8), (2, 10**9), (8, 10**8))
        for trip in (0.0, 50.0)
    ]


# ---- hooks over links ----------------------------------------------------------------------------


def test_the_page_has_the_table_of_hooks_that_plan_makes() -> None:
    """``python benchmarks/hook_choice.py`` writes it."""
    text = hook_choice.PAGE.read_text()
    table = list(hook_choice.lines_of(hook_choice.measured_seconds()))
    assert len(table) == 2 + len(hook_choice.OPTIMIZERS) * len(hook_choice.LINKS)
    assert hook_choice.page(text, table) == text


def test_rows_that_plan_is_compared_with() -> None:
    jobs = {"no communication": 0.2, "DDP": 0.5, "pytorch-fp16": 0.4, "cast()": 0.3}
    group = "1gbit, buckets of 2 MiB, batches of 2"
    rows = [{"group": group, "job": job, "seconds": each} for job, each in jobs.items()]
    results = {"name": "bench_link", "options": {"bucket_cap_mb": [[2.0]]}, "rows": rows}
    assert bench_plan.link_rows(results) == [
        bench_plan.Row("bench_link", "1gbit", "none", 0.5, 0.2),
        bench_plan.Row("bench_link", "1gbit", "cast()", 0.3, 0.2),
    ]

    def run(way: str, seconds: float, alone: float) -> dict[str, Any]:
        found = {"seconds": [1.0, seconds], "steps": [5, 10], "compute_seconds": alone}
        return {"way": way, "rate": 200_000_000, "delay": 0.025, **found}

    runs = [run("none", 2.0, 0.05), run("torchft DiLoCo(10)", 1.0, 0.01)]
    runs += [run("cast()", 1.0, 0.09), run("none", 4.0, 0.05)]
    assert bench_plan.wan_rows(runs) == [
        bench_plan.Row("bench_wan", "200mbit and 25 ms", "none", pytest.approx(0.3), 0.05),
        bench_plan.Row("bench_wan", "200mbit and 25 ms", "cast()", 0.1, 0.05),
    ]


def test_the_share_of_rows_that_are_near(capsys: pytest.CaptureFixture[str]) -> None:
    own = {"source": "bench_link", "link": "1gbit", "hook": "cast()", "measured_seconds": 1.0}
    rows = [{**own, "planned_seconds": 1.0 + off, "off": off} for off in (0.1, -0.14, 0.3, -0.2)]
    assert not bench_plan.print_rows(rows)
    assert capsys.readouterr().out.endswith("2 of 4 (50%) within 15%.\n")
    assert bench_plan.print_rows(rows[:2])


# ---- losses --------------------------------------------------------------------------------------


def _local_run(hook: str, seed: int, loss: float) -> dict[str, Any]:
    return {"hook": hook, "seed": seed, "held_out_loss": loss, "bytes_per_step": 10.0}


def test_a_local_run_is_compared_with_the_plain_one_of_its_seed() -> None:
    bench = bench_loss_local
    for H, job in product(bench.ROUNDS, bench.JOBS):  # noqa: N806
        check_hook(job.hook(H, 1800))
    int2_with_reset = next(job for job in bench.JOBS if job.at_most is not None)
    jobs = (bench.PLAIN, int2_with_reset, bench.JOBS[-1])
    plain, int2, last = (job.hook(15, 60) for job in jobs)
    losses = [(plain, 1, 2.0), (plain, 2, 4.0), (int2, 1, 2.02), (int2, 2, 4.12), (int2, 3, 9.0)]
    rows = bench.table([_local_run(*each) for each in [*losses, (last, 2, 5.0)]], 60)
    found = [(row["H"], row["hook"], row["seeds"], row["bytes per round"]) for row in rows]
    assert found == [(15, plain, 2, 150), (15, int2, 2, 150), (15, last, 1, 600)]
    assert rows[1]["ratio"] == pytest.approx(6.14 / 6)
    assert rows[1]["range"] == pytest.approx((1.01, 1.03))
    assert rows[2]["ratio"] == pytest.approx(1.25)
    assert [bench.holds(row) for row in rows] == [True, False, True]
    assert bench.cells(rows[1])[-3:] == ["+2.3 %", "+1.0 to +3.0 %", "at most +1.0 %, **missed**"]


def test_local_runs_that_are_stored_are_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench, ran = bench_loss_local, []

    def train(hook: str, seed: int, *of_size: Any) -> dict[str, Any]:
        ran.append((hook, seed))
        return _local_run(hook, seed, 2.0)

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


def _run(way: str, seed: int, seconds: list[float], losses: list[float]) -> dict[str, Any]:
    steps = [25 * (i + 1) for i in range(len(seconds))]
    found = {"steps": steps, "seconds": seconds, "losses": losses, "link_bytes": 10**6}
    return {"way": way, "seed": seed, **found}


def test_time_to_the_loss_of_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    bench, runs = bench_wan, []
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
    bench, ran = bench_wan, []

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
        ("--ways none bogus", "argument --ways: .*bogus"),
        ("--ways allreduce", "--ways: must have none"),
        ("--more-steps nan", "--more-steps: must be 1 to 100"),
        ("--more-local-steps 0", "--more-local-steps: must be 1 to 100"),
        ("--steps 4", "give 30 steps or more"),
        ("--batch 0", "--batch: must be above 0"),
        ("--dim 241", "--dim: must be a multiple of 12"),
    ],
)
def test_what_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        bench_wan.main(arguments.split())
    assert re.search(message, capsys.readouterr().err)


# ---- elastic training ----------------------------------------------------------------------------


def _log(host: int, lines: list[tuple[float, int, str, int]]) -> Any:
    return figures.Log(host, [figures.Line(t, step, bits, 1.0, n) for t, step, bits, n in lines])


def test_the_first_step_of_all_ranks_after_a_fault() -> None:
    # The fault is at 2.5: rank 0 has done step 2; rank 1 ends it later, with the same ranks.
    one = _log(0, [(1.0, 1, "a", 0), (2.0, 2, "b", 0), (4.0, 3, "c", 1)])
    other = _log(1, [(1.0, 1, "a", 0), (2.6, 2, "b", 0)])
    assert figures.common_step_after([one, other], 2.5) is None
    other.lines.append(figures.Line(4.5, 3, "c", 1.0, 1))
    assert figures.common_step_after([one, other], 2.5) == 4.5
    assert figures.common_step_after([one, other], 4.2) is None
    assert figures.common_step_after([], 1.0) is None
    # A process that joined before the fault counts its own changes.
    old = _log(0, [(1.0, 1, "a", 3), (2.0, 2, "b", 4)])
    new = _log(1, [(1.0, 1, "a", 0), (2.2, 2, "b", 1)])
    assert figures.common_step_after([old, new], 1.5) == 2.2


def test_time_that_others_wait_for_a_rank_that_joins() -> None:
    old = _log(0, [(1.0, 1, "a", 0), (2.0, 2, "b", 0), (3.5, 3, "c", 1), (5.0, 4, "d", 1)])
    new = _log(1, [])
    assert figures.join_seconds(new, [old, new], 1.0) is None
    new.lines.append(figures.Line(5.1, 4, "d", 1.0, 0))
    # They connect in step 3, and wait for the new rank in step 4.
    assert figures.join_seconds(new, [old, new], 1.0) == pytest.approx(1.1)


def test_bits_and_order() -> None:
    one = _log(0, [(1.0, 1, "a", 0), (2.0, 2, "b", 0), (3.0, 3, "c", 0)])
    late = _log(1, [(2.0, 2, "b", 0), (3.0, 3, "c", 0)])
    assert figures.other_bits([one, late]) == [] and figures.out_of_order([one, late]) == 0
    twice = _log(2, [(2.0, 2, "b", 0), (2.5, 2, "x", 0), (3.0, 4, "d", 0)])
    assert figures.other_bits([one, late, twice]) == [2]
    assert figures.out_of_order([one, twice]) == 2


def test_rates_are_those_of_the_slowest_rank() -> None:
    one = _log(0, [(float(t), t, "a", 0) for t in range(1, 7)])
    slow = _log(1, [(t + 0.5, t, "a", 0) for t in range(1, 7)])
    times = figures.step_times([one, slow])
    assert times == {t: t + 0.5 for t in range(1, 7)}
    assert figures.steps_per_second(times, 3) == pytest.approx(1.0)
    assert figures.usual_step(times) == pytest.approx(1.0)


def test_changes_of_the_ranks_that_no_fault_explains_count() -> None:
    lines = [(1.0, 1, "a", 0), (2.0, 2, "b", 0), (4.0, 3, "c", 1), (7.0, 4, "d", 2)]
    logs = [_log(0, lines), _log(1, lines)]
    assert figures.seconds_of_other_changes(logs, [], 1.0) == pytest.approx(1.0 + 2.0)
    assert figures.seconds_of_other_changes(logs, [(3.5, 4.5)], 1.0) == pytest.approx(2.0)
    assert figures.seconds_of_other_changes(logs, [(3.5, 8.0)], 1.0) == 0.0
