"""benchmarks/harness.py: figures of several processes, and runs without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_figures_of_several_processes_are_their_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from harness import Row, merged

    blank: dict[str, Any] = dict.fromkeys(Row.__dataclass_fields__)
    one = Row(
        **{
            **blank,
            **{"group": "a", "job": "b", "details": {}, "seconds": 1.0, "samples": 3},
            **{"first_quartile": 1.0, "third_quartile": 1.0, "gigabytes_per_second": 8.0},
            **{"ratio": 0.95, "target": ">= 0.9", "holds": True},
        }
    )
    runs = [
        [one],
        [replace(one, seconds=3.0, ratio=0.8, holds=False)],
        [replace(one, seconds=2.0, ratio=0.85, holds=False)],
    ]
    [result] = merged(runs)
    assert result.seconds == 2.0 and result.samples == 9
    assert result.ratio == 0.85 and result.holds is False
    assert result.details == {"least": 0.8, "most": 0.95}
    with pytest.raises(ValueError, match="other jobs"):
        merged([[one], [replace(one, job="c")]])


def test_a_run_that_measured_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results of an earlier run stay."""
    import bench_codec

    out = tmp_path / "results.json"
    out.write_text("earlier")
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench_codec.main(["--quick", "--memory-gib", "1e-6", "--out", str(out)])
    assert "not even its first tensor fits into memory" in capsys.readouterr().err
    assert out.read_text() == "earlier"


def test_only_links_without_a_delay_are_drawn_unasked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import bench_link
    import bench_sharded

    for bench, delay in ((bench_link, ["0.5", "5"]), (bench_sharded, ["5"])):
        assert bench.options_of([]).plot == bench.PICTURE
        assert bench.options_of(["--delay", *delay]).plot is None
        assert bench.options_of(["--out", str(tmp_path / "results.json")]).plot is None
        asked = tmp_path / "picture.png"
        assert bench.options_of(["--delay", "5", "--plot", str(asked)]).plot == asked
    with pytest.raises(SystemExit):
        bench_link.options_of(["--delay", "0.5", "5", "--plot", "picture.png"])
    assert "--plot draws over rates, for one --delay" in capsys.readouterr().err


def test_background_exchanges_are_compared_with_no_communication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import bench_link

    alone, streamed = bench_link.jobs_on(
        (200_000_000, 0.025), [bench_link.ALONE, bench_link.STREAMED]
    )
    assert alone.against is None  # DDP is not there
    assert streamed.against is not None
    assert (streamed.against.baseline, streamed.against.at_most) == (bench_link.ALONE, 1.05)
