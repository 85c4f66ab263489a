"""The parts of ``train``: text, the model, the schedule and the report."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from train_processes import read_metrics

from torch_commhook.cli import outputs, report, text_model
from torch_commhook.cli.outputs import MATPLOTLIB_IS_MISSING
from torch_commhook.cli.text_model import ByteTransformer, rotary_tables, rotate
from torch_commhook.cli.train import learning_rate
from torch_commhook.cli.train_config import TrainConfig

# ---- text ----------------------------------------------------------------------------------------


def test_batches_depend_on_seed_step_and_rank_alone() -> None:
    data = text_model.split_text(bytes(range(256)) * 2000, seq=16)

    def batch(seed: int, step: int, rank: int) -> torch.Tensor:
        return text_model.training_batch(data, seed=seed, step=step, rank=rank, batch=8, seq=16)

    first = batch(1, 2, 3)
    torch.rand(5)  # the global generator plays no part
    assert torch.equal(first, batch(1, 2, 3))
    assert first.shape == (8, 17) and first.dtype == torch.int64
    for other in (batch(2, 2, 3), batch(1, 3, 3), batch(1, 2, 4), batch(1, 23, 0)):
        assert not torch.equal(first, other)
    for row in first.tolist():  # each row is a piece of the text
        assert bytes(row) in bytes(range(256)) * 2


def test_the_shortest_text_gives_its_only_window() -> None:
    data = text_model.split_text(b"abcd", seq=3)
    batch = text_model.training_batch(data, seed=0, step=1, rank=0, batch=2, seq=3)
    assert batch.tolist() == [list(b"abcd")] * 2
    assert text_model.held_out_windows(data, rank=0, world_size=2, seq=3).shape == (0, 4)


def test_held_out_text_is_not_trained_on_and_is_shared_out() -> None:
    chunk = 16 * 1024
    text = b"".join(bytes([number]) * chunk for number in range(40))
    data = text_model.split_text(text, seq=16)
    assert sorted(set(data.held_out.tolist())) == [10, 30]
    assert set(data.train.tolist()) == set(range(40)) - {10, 30}
    assert len(data) == len(text)
    shares = [
        text_model.held_out_windows(data, rank=rank, world_size=3, seq=16) for rank in range(3)
    ]
    assert sorted(len(share) for share in shares) == [21, 21, 22]


def test_the_standard_library_is_text_without_its_tests() -> None:
    files = text_model.standard_library_files()
    assert any(file.name == "argparse.py" for file in files)
    assert not any({"test", "tests", "site-packages"} & set(file.parts[-3:-1]) for file in files)
    text = text_model.read_text(None, 300_000, seq=128)
    assert len(text) == 300_000
    assert text_model.read_text(None, 300_000, seq=128) == text


def test_files_are_read_in_order_up_to_the_cap(tmp_path: Path) -> None:
    files = [tmp_path / "b", tmp_path / "a"]
    files[0].write_bytes(b"12345")
    files[1].write_bytes(b"6789")
    names = [str(file) for file in files]
    assert text_model.read_text(names, None, seq=2) == b"123456789"
    for cap in (4, 5, 7, 9):
        assert text_model.read_text(names, cap, seq=2) == b"123456789"[:cap]
    assert text_model.read_text(names, 10**30, seq=2) == b"123456789"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all files")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789")
    path.chmod(0)
    with pytest.raises(text_model.DataError, match="secret can't be read: Permission denied"):
        text_model.read_text([str(path)], None, seq=2)


# ---- the model and the schedule ------------------------------------------------------------------


def test_the_default_model_has_about_ten_million_parameters() -> None:
    default = TrainConfig()
    with torch.device("meta"):
        model = ByteTransformer(default.layers, default.dim, default.heads)
    assert 9e6 < model.parameter_count() < 12e6


def test_the_model_starts_uniform_and_sees_no_future_byte() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(layers=2, dim=32, heads=2)
    inputs = torch.randint(256, (1, 12))
    assert model(inputs, torch.full((1, 12), 65)).item() == pytest.approx(math.log(256), abs=0.3)
    at_5 = torch.full((1, 12), -100)  # cross_entropy leaves these positions out
    at_5[0, 5] = 65
    loss = model(inputs, at_5).item()
    for position in range(12):
        changed = inputs.clone()
        changed[0, position] ^= 1
        assert (model(changed, at_5).item() == loss) == (position > 5), position


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    cosine, sine = rotary_tables(8, 10, torch.device("cpu"))
    query, key = torch.randn(8), torch.randn(8)
    turned_query = rotate(query.expand(1, 1, 10, 8), cosine, sine)[0, 0]
    turned_key = rotate(key.expand(1, 1, 10, 8), cosine, sine)[0, 0]
    scores = turned_query @ turned_key.T
    assert torch.allclose(scores[2, 1], scores[9, 8], atol=1e-5)
    assert torch.allclose(scores[7, 2], scores[5, 0], atol=1e-5)
    assert not torch.allclose(scores[2, 1], scores[2, 0], atol=1e-3)


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2 \\* heads = 6, got 32"):
        ByteTransformer(layers=1, dim=32, heads=3)


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    config = TrainConfig(steps=100, lr=1.0)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] > 0.97
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert learning_rate(TrainConfig(steps=1, lr=1.0), 1) == pytest.approx(1.0)


# ---- the report ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_", "value", "text"),
    [
        (report.format_bytes, 0, "0 B"),
        (report.format_bytes, 999, "999 B"),
        (report.format_bytes, 1000, "1.00 kB"),
        (report.format_bytes, 43_300_000, "43.3 MB"),
        (report.format_bytes, 999_900_000, "1.00 GB"),
        (report.format_bytes, 123_456_789_012_345, "123 TB"),
        (report.format_bytes, None, "unknown"),
        (report.format_duration, 0, "0:00"),
        (report.format_duration, 0.2, "0:01"),
        (report.format_duration, 187, "3:07"),
        (report.format_duration, 3723, "1:02:03"),
        (report.format_step_time, 4.65, "215 ms/step"),
        (report.format_step_time, 0.5, "2 s/step"),
        (report.format_step_time, 1.0001, "1 s/step"),
        (report.format_step_time, 1e-4, "10000 s/step"),
        (report.format_step_time, 0.0, "? s/step"),
        (report.format_ratio, 2.0, "2.00x smaller than fp32"),
        (report.format_ratio, 0.5, "2.00x larger than fp32"),
        (report.format_ratio, 1.0001, "the same as fp32"),
    ],
)
def test_numbers_as_text(format_: Callable[[Any], str], value: float | None, text: str) -> None:
    assert format_(value) == text


def test_ratios_to_fp32() -> None:
    assert report.fp32_ratio(2000, 4000) == 2.0
    assert report.fp32_ratio(0, 0) is None
    assert report.fp32_ratio(2000, 0) is None  # one rank resumes a run of several
    assert report.fp32_ratio(None, 4000) is None


def _record(step: int) -> report.StepRecord:
    return report.StepRecord(step, 1.0, 0.1, float(step), 10 * step, 20 * step, step)


def _report(path: Path, steps: Iterable[int], first_step: int = 0, logs: Any = ()) -> None:
    reporter = report.Reporter(path, report.PlainLine("x", 9, 1), first_step, logs=logs)
    for step in steps:
        reporter.step(_record(step))
    reporter.close()


def test_metrics_of_a_resumed_run_go_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _report(path, range(1, 6))
    # A run that was killed while it wrote a line.
    path.write_text(path.read_text() + '{"step": 6, "lo')
    _report(path, range(4, 8), 3)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 7]
    _report(path, range(1, 3))
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def _on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> io.StringIO:
    pytest.importorskip("rich")
    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    return stdout


def test_a_terminal_gets_a_line_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _on_a_terminal(monkeypatch, 120)
    line = report.make_live_line("cast(bfloat16)", 0, 4, 1)
    assert isinstance(line, report.RichLine)
    line.update(_record(4), 2.5)
    line.close()
    text = terminal.getvalue()
    assert "4/4" in text and "400 ms/step" in text and "2.00x smaller" in text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(report.make_live_line("x", 0, 4, 1), report.PlainLine)


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_the_bar_of_a_terminal_stays(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _on_a_terminal(monkeypatch, columns)
    hook = "local_sgd(10, delay=8, mix=0.5, hook=error_feedback(blockwise(bits=4))), weights=fp8()"
    line = report.RichLine(hook, 0, 1000)
    line.update(report.StepRecord(500, 12.3456, 0.1, 100.0, 21_600_000, 43_200_000, 1), 4.7)
    line.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    last = [shown for shown in text.splitlines() if shown.strip()][-1]
    assert len(last) <= columns
    assert last.startswith("local_s") == (columns > 60) and "500/1000" in last
    assert "loss 12.346" in last and "213 ms/step" in last and "21.6 MB" in last
    assert "1:47 left" in last
    bar = re.search("[━╸╺]+", last)
    assert bar is not None and len(bar[0]) >= (8 if columns > 60 else 1)
    assert ("smaller than fp32" in last) == (columns == 200)


def test_a_long_hook_leaves_room_for_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    codec = "error_feedback(powersgd(rank=2)), before=error_feedback(blockwise(bits=4))"
    hook = f"local_sgd(1, outer=outer_sgd(1.0, 0.0), hook=after(400, {codec}), error_reset=True)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.draw_loss(tmp_path / "loss.png", [_result(hook, 10, steps=2)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.draw_loss(tmp_path / "none.png", []) is False
    assert "pip install torch-commhook[train]" in MATPLOTLIB_IS_MISSING


def _result(hook: str, bytes_a_step: int | None, steps: int = 50) -> report.RunResult:
    records = tuple(
        replace(
            _record(step),
            loss=2.0 + 3.0 / step + 0.2 * (step % 2),
            seconds=0.1 * step,
            bytes_sent=None if bytes_a_step is None else bytes_a_step * step,
            fp32_bytes=4000 * step,
        )
        for step in range(1, steps + 1)
    )
    return report.RunResult(hook, steps, 2.0, 5, None, 10.0, bytes_a_step, 4000, records)


def _curves(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}


def test_the_picture_has_the_loss_by_step_bytes_and_time() -> None:
    pytest.importorskip("matplotlib")
    hooks = {"cast(bfloat16)": 2000, "blockwise(bits=4)": 500, "mine.py:hook": None, "none": 4000}
    results = [_result(hook, sent) for hook, sent in hooks.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = report.loss_figure(results, "a model, 2 ranks")
        figure.canvas.draw()
    by_step, by_bytes, by_time = figure.axes
    assert figure.get_suptitle() == "a model, 2 ranks"
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["loss by step", "loss by bytes sent", "loss by time"]
    assert by_bytes.get_xscale() == "log" and by_time.get_xscale() == "linear"
    ticks = [label.get_text() for label in by_bytes.get_xticklabels()]
    assert "10 kB" in ticks and len(ticks) >= 2

    curves = _curves(by_step)
    assert {*curves} == {"cast(bfloat16)", "blockwise(bits=4)", "mine.py:hook", "no hook"}
    colors = {label: line.get_color() for label, line in curves.items()}
    assert len({*colors.values()}) == 4 and colors["no hook"] == "#7f7f7f"
    assert len(by_step.lines) == 8  # a raw curve below each
    assert by_bytes.lines[0].get_xdata()[-1] == 100_000
    # Its bytes are unknown.
    assert len(_curves(by_bytes)["mine.py:hook"].get_xdata()) == 0

    renderer = figure.canvas.get_renderer()
    (legend,) = figure.legends
    box = legend.get_window_extent(renderer)
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= figure.bbox.y0
    assert not any(box.overlaps(axes.get_tightbbox(renderer)) for axes in figure.axes)


def test_without_bytes_there_is_no_panel_of_bytes() -> None:
    pytest.importorskip("matplotlib")
    figure = report.loss_figure([_result("none", 0, steps=1)], "")
    assert [axes.get_title() for axes in figure.axes] == ["loss by step", "loss by time"]


def test_many_hooks_are_told_apart() -> None:
    pytest.importorskip("matplotlib")
    results = [_result(f"topk(0.{number})", 100 + number, steps=3) for number in range(1, 20)]
    figure = report.loss_figure(results, "")
    lines = _curves(figure.axes[0]).values()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 19


def test_a_short_span_of_bytes_has_ticks() -> None:
    """Of a run that continues from a checkpoint."""
    pytest.importorskip("matplotlib")
    whole = _result("cast(bfloat16)", 2_000_000, steps=500)
    figure = report.loss_figure([replace(whole, records=whole.records[400:])], "")
    figure.canvas.draw()
    least, most = figure.axes[1].get_xlim()
    assert sum(least <= tick <= most for tick in figure.axes[1].get_xticks()) >= 2


def test_a_smoothed_curve() -> None:
    assert report.smoothed([]) == []
    assert report.smoothed([3.0]) == [3.0]
    assert report.smoothed([2.0] * 100) == pytest.approx([2.0] * 100)
    noisy = [2.0 + (-1.0) ** step for step in range(1000)]
    smooth = report.smoothed(noisy)
    assert smooth[0] == noisy[0]
    assert max(abs(value - 2.0) for value in smooth[25:]) < 0.05
    falling = [float(1000 - step) for step in range(1000)]
    # Not behind what it smooths.
    assert report.smoothed(falling)[:970] == pytest.approx(falling[:970])


# ---- other logs ----------------------------------------------------------------------------------


def test_steps_go_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    logs = outputs.open_logs(["jsonl", "tensorboard"], tmp_path, "metrics-2", "cast()", {}, 4)
    _report(tmp_path / "metrics.jsonl", (1, 2), logs=logs)
    folder = str(tmp_path / "tensorboard" / "metrics-2")
    module.SummaryWriter.assert_called_once_with(folder, purge_step=5)
    text, *_, last = module.SummaryWriter().method_calls
    assert (text, last) == (mock.call.add_text("hook", "cast()"), mock.call.close())
    module.SummaryWriter().add_scalar.assert_any_call("train/loss", 1.0, 1)
    for name, value in (("bytes_sent", 20), ("fp32_ratio", 2.0), ("seconds_per_step", 1.0)):
        module.SummaryWriter().add_scalar.assert_any_call(f"train/{name}", value, 2)


def test_steps_go_to_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = TrainConfig().to_plain()
    logs = outputs.open_logs(["wandb"], tmp_path, "metrics", "cast()", config, 0)
    _report(tmp_path / "metrics.jsonl", (1, 2), logs=logs)
    settings = module.init.call_args.kwargs
    assert settings["name"] == "cast()" and settings["config"]["dim"] == 384
    assert settings["dir"] == settings["group"] == str(tmp_path)
    first, second, finished = module.init().method_calls
    values = first.args[0]
    logged = [mock.call.log(values, step=1), mock.call.log(mock.ANY, step=2), mock.call.finish()]
    assert [first, second, finished] == logged
    assert (values["loss"], values["lr"], values["bytes_sent"]) == (1.0, 0.1, 10)


def test_jsonl_is_always_written(tmp_path: Path) -> None:
    assert outputs.open_logs(["jsonl"], tmp_path, "metrics", "cast()", {}, 0) == []
    _report(tmp_path / "metrics.jsonl", (1, 2))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    found = [(line["step"], line["loss"], line["seconds"]) for line in lines]
    assert found == [(1, 1.0, 1.0), (2, 1.0, 2.0)]
    assert {"lr", "bytes_sent", "fp32_bytes", "tokens"} < {*lines[0]}
