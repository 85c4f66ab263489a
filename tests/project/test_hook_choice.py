"""The table of which hook to take, and what ``bench_plan`` compares."""

from __future__ import annotations

from typing import Any

import bench_plan
import hook_choice
import pytest


def test_the_page_has_the_table_that_plan_makes() -> None:
    """``python benchmarks/hook_choice.py`` writes it."""
    text = hook_choice.PAGE.read_text()
    table = list(hook_choice.lines_of(hook_choice.measured_seconds()))
    assert len(table) == 2 + len(hook_choice.OPTIMIZERS) * len(hook_choice.LINKS)
    assert hook_choice.page(text, table) == text


def test_rows_of_bench_link() -> None:
    rows: list[dict[str, Any]] = [
        {"group": "1gbit, buckets of 2 MiB, batches of 2", "job": job, "seconds": seconds}
        for job, seconds in (
            ("no communication", 0.2),
            ("DDP", 0.5),
            ("pytorch-fp16", 0.4),
            ("cast()", 0.3),
        )
    ]
    results = {"name": "bench_link", "options": {"bucket_cap_mb": [[2.0]]}, "rows": rows}
    assert bench_plan.link_rows(results) == [
        bench_plan.Row("bench_link", "1gbit", "none", 0.5, 0.2),
        bench_plan.Row("bench_link", "1gbit", "cast()", 0.3, 0.2),
    ]


def test_rows_of_bench_wan() -> None:
    def run(way: str, seconds: float, alone: float) -> dict[str, Any]:
        return {
            "way": way,
            "rate": 200_000_000,
            "delay": 0.025,
            "seconds": [1.0, seconds],
            "steps": [5, 10],
            "compute_seconds": alone,
        }

    runs = [run("none", 2.0, 0.05), run("torchft DiLoCo(10)", 1.0, 0.01)]
    runs += [run("cast()", 1.0, 0.09), run("none", 4.0, 0.05)]
    assert bench_plan.wan_rows(runs) == [
        bench_plan.Row("bench_wan", "200mbit and 25 ms", "none", pytest.approx(0.3), 0.05),
        bench_plan.Row("bench_wan", "200mbit and 25 ms", "cast()", 0.1, 0.05),
    ]


def test_the_share_of_rows_that_are_near(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "source": "bench_link",
            "link": "1gbit",
            "hook": "cast()",
            "measured_seconds": 1.0,
            "planned_seconds": 1.0 + off,
            "off": off,
        }
        for off in (0.1, -0.14, 0.3, -0.2)
    ]
    assert not bench_plan.print_rows(rows)
    assert capsys.readouterr().out.endswith("2 of 4 (50%) within 15%.\n")
    assert bench_plan.print_rows(rows[:2])
