"""``python -m torch_commhook train``: whole runs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from kill_and_resume import killed_and_resumed
from nested_values import different_paths
from train_processes import TINY, TrainProcess, hooks_file, read_metrics, start_train, trained

from torch_commhook.cli import text_model
from torch_commhook.cli.checkpoint import read_checkpoint
from torch_commhook.cli.text_model import ByteTransformer
from torch_commhook.cli.train_config import TrainConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

METRICS = "metrics.jsonl"
_INT4 = "error_feedback(blockwise(bits=4))"
_WHOLE = f"local_sgd(4, outer=outer_sgd(1.0, 0.0), hook={_INT4})"
#: A fragment is on its way when training is saved.
_FRAGMENTS = f"local_sgd(10, outer=outer_sgd(1.0, 0.0), hook={_INT4}, fragments=2, delay=3)"


def test_a_run_reports_and_compares(tmp_path: Path) -> None:
    arguments = ("--steps", "5", "--log-every", "2", "--bucket-cap-mb", "0.02")
    arguments += ("--hook", "cast(bfloat16)", "--compare", "blockwise(bits=4)")
    run = trained(*arguments, folder=tmp_path)
    out = tmp_path / "out"
    assert run.stderr == ""
    numel = ByteTransformer(1, 32, 2).parameter_count()

    metrics = read_metrics(out / "metrics.jsonl")
    other = read_metrics(out / "metrics-2.jsonl")
    plain = read_metrics(out / "metrics-none.jsonl")
    assert [line["step"] for line in metrics] == [line["step"] for line in plain] == [1, 2, 3, 4, 5]
    assert 0 < other[-1]["bytes_sent"] < metrics[-1]["bytes_sent"] / 3
    assert other[0]["loss"] == metrics[0]["loss"] and other[-1]["loss"] != metrics[-1]["loss"]
    for step, (cast_line, plain_line) in enumerate(zip(metrics, plain, strict=True), start=1):
        assert cast_line["bytes_sent"] == 2 * numel * step  # ring, W = 2: 2 bytes an element
        assert plain_line["bytes_sent"] == plain_line["fp32_bytes"] == 4 * numel * step
        assert cast_line["tokens"] == step * 2 * 4 * 32
        assert cast_line["loss"] == pytest.approx(plain_line["loss"], abs=0.01)
    assert metrics[0]["loss"] == plain[0]["loss"]  # the same seed: the same start
    assert metrics[-1]["loss"] != plain[-1]["loss"]  # and bfloat16 is not fp32

    summary = json.loads((out / "summary.json").read_text())
    hooks = ["cast(bfloat16)", "blockwise(bits=4)", "none"]
    assert [entry["hook"] for entry in summary["runs"]] == hooks
    assert [entry["fp32_ratio"] for entry in summary["runs"][::2]] == [2.0, 1.0]
    files = ["metrics.jsonl", "metrics-2.jsonl", "metrics-none.jsonl"]
    assert [entry["metrics"] for entry in summary["runs"]] == files
    assert summary["config"]["dim"] == 32

    lines = run.stdout.splitlines()
    assert lines[1] == "then, for comparison: blockwise(bits=4), then none"
    live = [line for line in lines if line.startswith("cast(bfloat16)  step")]
    assert [line.split()[2] for line in live] == ["2/5", "4/5", "5/5"]
    assert live[-1].endswith("2.00x smaller than fp32")
    table = [line.split() for line in lines if line.startswith(("cast(bfloat16)  ", "none  "))]
    assert [row[-1] for row in table if row[1] != "step"] == ["2.00x", "1.00x"]
    final = [line for line in lines if line.startswith("final loss")]
    assert len(final) == 1
    assert f"final loss {metrics[-1]['loss']:.4f} nats per byte" in final[0]
    if importlib.util.find_spec("matplotlib") is not None:
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_in_shards_reports_and_compares(tmp_path: Path) -> None:
    arguments = ("--parallel", "fsdp", "--hook", "blockwise(bits=4)", "--weights", "blockwise()")
    run = trained(*arguments, "--steps", "3", "--compare", folder=tmp_path)
    assert run.stderr == ""
    plain = _plain_traffic()
    lines = read_metrics(tmp_path / "out" / "metrics-none.jsonl")
    for step, line in enumerate(lines, start=1):
        assert line["bytes_sent"] == line["fp32_bytes"] == (plain.bytes_sent or 0) * step
        assert line["bytes_gathered"] == plain.bytes_gathered * step
    last = read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]
    assert last["loss"] == pytest.approx(lines[-1]["loss"], abs=0.01)
    assert last["fp32_bytes"] == (plain.bytes_sent or 0) * 3
    assert 7.5 < last["fp32_bytes"] / last["bytes_sent"] < 8
    assert 3.8 < plain.bytes_gathered * 3 / last["bytes_gathered"] < 4
    first, second = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert first["hook"] == "blockwise(bits=4), weights=blockwise()"
    assert first["held_out_loss"] == pytest.approx(second["held_out_loss"], abs=0.01)
    assert "in shards on 2 ranks" in run.stdout
    (header,) = [line for line in run.stdout.splitlines() if line.startswith("hook  ")]
    assert header.endswith("fp32 / sent  gathered per step")


def _plain_traffic() -> text_model.Traffic:
    with torch.device("meta"):
        model = ByteTransformer(1, 32, 2)
    return text_model.plain_traffic(model, TrainConfig(parallel="fsdp", layers=1, dim=32, heads=2))


def test_auto_says_what_it_has_chosen(tmp_path: Path) -> None:
    hook = "auto(max_error=0.05)"
    run = trained("--steps", "8", "--hook", hook, folder=tmp_path)
    assert run.stderr == ""
    (line,) = [
        line for line in run.stdout.splitlines() if line.startswith(f"{hook} averaged with ")
    ]
    choice = line.removeprefix(f"{hook} averaged with ")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [entry["choice"] for entry in summary["runs"]] == [choice]
    name, _, reason = choice.partition(": ")
    assert name in {"allreduce()", "cast(bfloat16)", "blockwise()", "fp8()"}
    assert "over a link of " in reason


def _assert_went_on(straight: Path, resumed: Path, *, counts_alike: bool = True) -> None:
    """Runs that saved these checkpoints have the same end; one went on from the other's middle."""
    expected, got = read_checkpoint(straight), read_checkpoint(resumed)
    counts = ("bytes_sent", "bytes_scattered", "bytes_gathered") if counts_alike else ()
    for part in ("config", "step", *counts):
        assert getattr(expected, part) == getattr(got, part), part
    for part in ("model", "optimizer", "rank_states"):
        assert different_paths(getattr(expected, part), getattr(got, part)) == [], part
    lines, again = (read_metrics(each.parent / "out" / METRICS) for each in (straight, resumed))
    keys = ("step", "loss", *counts)
    for line, other in zip(lines[len(lines) // 2 :], again, strict=True):
        assert [line[key] for key in keys] == [other[key] for key in keys]


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    # This hook's result depends on the buckets, which must be the same in both runs.
    hooks = hooks_file(
        tmp_path,
        "from torch_commhook.collectives import all_reduce\n"
        "def coarse(state, bucket):\n"
        "    mean = bucket.buffer() / 2\n"
        "    all_reduce(mean).wait()\n"
        "    step = mean.abs().max() / 100\n"
        "    future = torch.futures.Future()\n"
        "    future.set_result((mean / step).round() * step)\n"
        "    return future\n",
    )
    arguments = ("--steps", "6", "--save-every", "3", "--bucket-cap-mb", "0.02", "--seed", "7")
    hook = ("--hook", f"{hooks}:coarse", "--save", "step-{step}.pt")
    trained(*arguments, *hook, folder=straight)
    again = ("--resume", straight / "step-3.pt", *hook[:2], "--save", "last.pt")
    trained(*again, folder=resumed)
    _assert_went_on(straight / "step-6.pt", resumed / "last.pt")
    middle, end = (read_checkpoint(straight / f"step-{step}.pt") for step in (3, 6))
    assert (middle.step, end.step) == (3, 6)
    assert end.bytes_sent == 4 * ByteTransformer(1, 32, 2).parameter_count() * 6
    assert len(end.rank_states) == 2
    for name, tensor in end.model.items():
        if tensor.dim() > 1:
            assert not torch.equal(tensor, middle.model[name]), f"{name} did not train"


@pytest.mark.parametrize("hook", [_WHOLE, _FRAGMENTS], ids=["whole", "fragments"])
def test_ranks_that_are_apart_go_on_as_they_were(tmp_path: Path, hook: str) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = ("--steps", "10", "--save-every", "5", "--bucket-cap-mb", "0.02", "--lr", "0.01")
    trained(*arguments, "--hook", hook, "--save", "s-{step}.pt", folder=straight)
    run = trained("--resume", straight / "s-5.pt", "--save", "last.pt", folder=resumed)
    # If ranks are apart at the end, the hook warns when it is removed.
    said = run.stderr + "".join(log.read_text() for log in (resumed / "out").glob("rank*.log"))
    assert "the ranks' last exchange" not in said
    # A resumed run does not count what was on its way.
    _assert_went_on(straight / "s-10.pt", resumed / "last.pt", counts_alike=hook == _WHOLE)
    got = read_checkpoint(resumed / "last.pt")
    first, second = (state["optimizer"] for state in got.rank_states)
    assert not torch.equal(first[0]["exp_avg"], second[0]["exp_avg"])
    for rank, state in enumerate(got.rank_states):
        apart = state["hook"][f"rank{rank}"]["local_sgd_parameter"]["head.weight"]
        assert torch.equal(apart, got.model["head.weight"]) == (rank == 0)
    lines = read_metrics(straight / "out" / METRICS)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    sent = [line["bytes_sent"] for line in lines]
    if hook == _FRAGMENTS:
        assert sent[6] == 0 < sent[7] == sent[9]  # counted when it ends
        return
    assert sent[2] == 0 < sent[3] == sent[6] and sent[7] == sent[9] == 2 * sent[3]
    assert lines[7]["fp32_bytes"] > 20 * sent[7]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ("--parallel", "fsdp", "--hook", "error_feedback(blockwise(bits=4))"),
        (
            *("--parallel", "hsdp", "--ranks", "4", "--threads", "1"),
            *("--hook", "local_sgd(3, hook=error_feedback(blockwise(bits=4)))"),
        ),
    ],
    ids=["fsdp", "replicas apart"],
)
def test_a_resumed_run_in_shards_ends_with_the_same_bits(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    options = (*options, "--weights", "blockwise()", "--steps", "4", "--save-every", "2")
    trained(*options, "--save", "{step}.pt", folder=straight)
    arguments = ("--resume", straight / "2.pt", "--save", "last.pt", "--compare")
    trained(*arguments, "--threads", "1", folder=resumed)
    _assert_went_on(straight / "4.pt", resumed / "last.pt")
    assert all(state["hook"] for state in read_checkpoint(resumed / "last.pt").rank_states)
    first, second = json.loads((resumed / "out" / "summary.json").read_text())["runs"]
    (line,) = read_metrics(straight / "out" / "metrics.jsonl")[3:]
    assert first["gathered_per_step"] == line["bytes_gathered"] / 4  # of its own steps alone
    assert second["gathered_per_step"] == _plain_traffic().bytes_gathered
    assert second["scattered_per_step"] == (
        0 if "fsdp" in options else first["fp32_bytes_per_step"]
    )


@pytest.mark.parametrize(
    ("hook", "how"),
    [
        pytest.param(_INT4, "--bucket-cap-mb 0.02", id="ddp"),
        pytest.param(_INT4, "--parallel fsdp --weights fp8()", id="fsdp", marks=pytest.mark.long),
        pytest.param(
            "error_feedback(powersgd(rank=2))",
            "--parallel hsdp --ranks 4 --shard-hook error_feedback(sign()) --weights blockwise()",
            id="hsdp",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(hook: str, how: str, tmp_path: Path) -> None:
    """``make kill-and-resume`` does so for each hook."""
    row = killed_and_resumed(hook, 1, tmp_path, steps=60, how=how.split())
    assert row["different"] == []
    assert 0 < row["resumed_from"] < row["steps"]


@pytest.mark.parametrize(
    ("hook", "to_all"), [(_INT4, True), pytest.param(_WHOLE, False, marks=pytest.mark.long)]
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    hook: str, to_all: bool, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("interrupted", "resumed", "straight")]
    own = ("--steps", "100000", "--log-every", "100000", "--bucket-cap-mb", "0.02", "--hook", hook)
    with start_train(*own, "--save", "c-{step}.pt", folder=folders[0]) as run:
        run.wait_for_steps(folders[0] / "out" / "metrics.jsonl", 3)
        if to_all:  # as a terminal does
            os.killpg(run.process.pid, signal.SIGINT)
        else:
            os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
        run.assert_all_end()
    out = folders[0] / "out"
    asked, ended = run.stderr.splitlines()
    assert asked.startswith("commhook train: interrupted (Ctrl-C): the ranks finish their step")
    assert ended == (
        f"commhook train: interrupted (Ctrl-C), all 2 ranks ended; the steps so far are in {out}"
    )
    lines = read_metrics(out / "metrics.jsonl")
    step = int(lines[-1]["step"])
    assert step == len(lines) < 100000
    (saved,) = folders[0].glob("c-*.pt")
    assert saved.name == f"c-{step}.pt"
    assert f"interrupted at step {step} of 100000\ncheckpoint: {saved.name}\n" in run.stdout
    (row,) = json.loads((out / "summary.json").read_text())["runs"]
    assert (row["steps"], row["is_interrupted"], row["checkpoint"]) == (step, True, saved.name)
    assert row["held_out_loss"] is None
    assert (out / "loss.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    until = ("--stop-after", str(step + 6), "--save", "last.pt")
    trained("--resume", saved, *until, folder=folders[1])
    trained(*own, *until, folder=folders[2])
    got, expected = (read_checkpoint(folder / "last.pt") for folder in folders[1:])
    for one, other in ((expected.model, got.model), (expected.optimizer, got.optimizer)):
        assert different_paths(one, other) == []
    again = read_metrics(folders[1] / "out" / "metrics.jsonl")
    straight = read_metrics(folders[2] / "out" / "metrics.jsonl")
    losses = [line["loss"] for line in (*lines, *again)]
    assert losses == [line["loss"] for line in straight]


def test_under_torchrun_it_joins_the_world_with_a_hook_of_a_file(tmp_path: Path) -> None:
    hooks = hooks_file(
        tmp_path,
        "def mean(state, bucket):\n"
        "    buffer = bucket.buffer()\n"
        "    dist.all_reduce(buffer)\n"
        "    future = torch.futures.Future()\n"
        "    future.set_result(buffer / dist.get_world_size())\n"
        "    return future\n",
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = ("-m", "torch_commhook", "train", *TINY, "--steps", "3", "--out", "out")
    hook = ("--hook", f"{hooks}:mean", "--compare")
    with TrainProcess(*torchrun, *arguments, *hook, folder=tmp_path) as run:
        assert run.wait() == 0, run.stderr
        run.assert_all_end(2)
    metrics = read_metrics(tmp_path / "out" / "metrics.jsonl")
    plain = read_metrics(tmp_path / "out" / "metrics-none.jsonl")
    assert len(metrics) == 3
    sent = [line["bytes_sent"] for line in metrics]  # by collectives of torch.distributed
    assert sent == [line["fp32_bytes"] for line in metrics] and sent[0] > 0
    for line, plain_line in zip(metrics, plain, strict=True):
        assert line["loss"] == pytest.approx(plain_line["loss"], abs=1e-5)
    assert run.stdout.count("final loss") == 1 + run.stdout.count("hook  ")


def test_a_failing_hook_is_one_message_with_its_rank(tmp_path: Path) -> None:
    hooks = hooks_file(
        tmp_path,
        "def broken(state, bucket):\n"
        "    if dist.get_rank() == 1:\n"
        "        raise OverflowError('no room for the gradients')\n"
        "    buffer = bucket.buffer()\n"
        "    work = dist.all_reduce(buffer, async_op=True)\n"
        "    return work.get_future().then(lambda future: future.value()[0])\n",
    )
    with start_train("--hook", f"{hooks}:broken", folder=tmp_path) as run:
        assert run.wait() == 1
        run.assert_all_end()
    assert run.stderr.startswith("commhook train: rank 1 failed: ")
    assert "no room for the gradients" in run.stderr
    assert run.stderr.count("commhook train:") == 1
    assert "Traceback" not in run.stderr
    assert "OverflowError" in (tmp_path / "out" / "rank1.log").read_text()


@pytest.mark.long
def test_a_function_that_averages_whole_gradients_is_one_message(tmp_path: Path) -> None:
    hooks = hooks_file(tmp_path, "def mean(state, bucket):\n    return bucket.buffer()\n")
    with start_train("--parallel", "fsdp", "--hook", f"{hooks}:mean", folder=tmp_path) as run:
        assert run.wait() == 1
        run.assert_all_end()
    assert run.stderr.count("commhook train:") == 1
    assert "mean' averages whole gradients" in run.stderr
    assert "Traceback" not in run.stderr
