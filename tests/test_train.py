"""``python -m torch_commhook train``: whole runs, and the options with their errors."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from train_processes import TINY, TrainProcess, read_metrics, start_train

from torch_commhook.cli import train
from torch_commhook.cli.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from torch_commhook.cli.main import main
from torch_commhook.cli.train_options import TrainConfig, parse_options
from torch_commhook.cli.transformer import ByteTransformer

processes = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


# ---- whole runs ----------------------------------------------------------------------------------


@processes
def test_a_run_reports_and_compares(tmp_path: Path) -> None:
    arguments = ("--steps", "5", "--compare", "--log-every", "2", "--bucket-cap-mb", "0.02")
    with start_train(*arguments, folder=tmp_path) as run:
        assert run.wait() == 0, run.stderr
        run.assert_all_end(0.5)
    out = tmp_path / "out"
    assert run.stderr == ""
    numel = ByteTransformer(1, 32, 2).parameter_count()

    metrics = read_metrics(out / "metrics.jsonl")
    plain = read_metrics(out / "metrics-none.jsonl")
    assert [line["step"] for line in metrics] == [line["step"] for line in plain] == [1, 2, 3, 4, 5]
    for step, (cast_line, plain_line) in enumerate(zip(metrics, plain, strict=True), start=1):
        assert cast_line["bytes_sent"] == 2 * numel * step  # ring, W = 2: 2 bytes an element
        assert plain_line["bytes_sent"] == plain_line["fp32_bytes"] == 4 * numel * step
        assert cast_line["tokens"] == step * 2 * 4 * 32
        assert cast_line["loss"] == pytest.approx(plain_line["loss"], abs=0.01)
    assert metrics[0]["loss"] == plain[0]["loss"]  # the same seed: the same start
    assert metrics[-1]["loss"] != plain[-1]["loss"]  # and bfloat16 is not fp32

    summary = json.loads((out / "summary.json").read_text())
    assert [entry["hook"] for entry in summary["runs"]] == ["cast(bfloat16)", "none"]
    assert [entry["fp32_ratio"] for entry in summary["runs"]] == [2.0, 1.0]
    assert summary["config"]["dim"] == 32

    lines = run.stdout.splitlines()
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


@processes
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    for folder in (straight, resumed):
        folder.mkdir()
    # What this hook gives depends on what shares a bucket, which must be the same in both.
    hooks = tmp_path / "my_hooks.py"
    hooks.write_text(
        "import torch\n"
        "from torch_commhook.collectives import all_reduce\n"
        "def coarse(state, bucket):\n"
        "    mean = bucket.buffer() / 2\n"
        "    all_reduce(mean).wait()\n"
        "    step = mean.abs().max() / 100\n"
        "    future = torch.futures.Future()\n"
        "    future.set_result((mean / step).round() * step)\n"
        "    return future\n"
    )
    arguments = ("--steps", "6", "--save-every", "3", "--bucket-cap-mb", "0.02", "--seed", "7")
    hook = ("--hook", f"{hooks}:coarse", "--save", "step-{step}.pt")
    with start_train(*arguments, *hook, folder=straight) as run:
        assert run.wait() == 0, run.stderr
    arguments = ("--resume", straight / "step-3.pt", "--save", "last.pt")
    with start_train(*arguments, folder=resumed) as run:
        assert run.wait() == 0, run.stderr
    middle = read_checkpoint(straight / "step-3.pt")
    expected, got = read_checkpoint(straight / "step-6.pt"), read_checkpoint(resumed / "last.pt")
    assert (middle.step, expected.step, got.step) == (3, 6, 6)
    assert expected.config == got.config
    numel = ByteTransformer(1, 32, 2).parameter_count()
    assert expected.bytes_sent == got.bytes_sent == 4 * numel * 6
    assert len(got.rank_states) == 2
    for name, tensor in expected.model.items():
        assert torch.equal(tensor, got.model[name]), name
        if tensor.dim() > 1:
            assert not torch.equal(tensor, middle.model[name]), f"{name} did not train"
    for index, state in expected.optimizer["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, got.optimizer["state"][index][name])
    lines = read_metrics(straight / "out" / "metrics.jsonl")
    again = read_metrics(resumed / "out" / "metrics.jsonl")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[3:]]
    assert [line["bytes_sent"] for line in again] == [line["bytes_sent"] for line in lines[3:]]


@processes
def test_under_torchrun_it_joins_the_world_with_a_hook_of_a_file(tmp_path: Path) -> None:
    hooks = tmp_path / "my_hooks.py"
    hooks.write_text(
        "import torch.distributed as dist\n"
        "def mean(state, bucket):\n"
        "    buffer = bucket.buffer()\n"
        "    dist.all_reduce(buffer)\n"
        "    future = __import__('torch').futures.Future()\n"
        "    future.set_result(buffer / dist.get_world_size())\n"
        "    return future\n"
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
    assert [line["bytes_sent"] for line in metrics] == [None] * 3  # it went past the library
    for line, plain_line in zip(metrics, plain, strict=True):
        assert line["loss"] == pytest.approx(plain_line["loss"], abs=1e-5)
    assert run.stdout.count("final loss") == 1 + run.stdout.count("hook  ")


@processes
def test_a_failing_hook_is_one_message_with_its_rank(tmp_path: Path) -> None:
    hooks = tmp_path / "my_hooks.py"
    hooks.write_text(
        "import torch.distributed as dist\n"
        "def broken(state, bucket):\n"
        "    if dist.get_rank() == 1:\n"
        "        raise OverflowError('no room for the gradients')\n"
        "    buffer = bucket.buffer()\n"
        "    work = dist.all_reduce(buffer, async_op=True)\n"
        "    return work.get_future().then(lambda future: future.value()[0])\n"
    )
    with start_train("--hook", f"{hooks}:broken", folder=tmp_path) as run:
        assert run.wait() == 1
        run.assert_all_end(0.5)
    assert run.stderr.startswith("commhook train: rank 1 failed: ")
    assert "no room for the gradients" in run.stderr
    assert run.stderr.count("commhook train:") == 1
    assert "Traceback" not in run.stderr
    assert "OverflowError" in (tmp_path / "out" / "rank1.log").read_text()


# ---- options -------------------------------------------------------------------------------------


@pytest.fixture
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is started."""
    from torch_commhook.cli import launcher

    def launch(*arguments: object) -> int:
        raise AssertionError("a wrong command line must not start ranks")

    monkeypatch.setattr(launcher, "launch", launch)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "COMMHOOK_LAUNCHER_PID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_launch")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps -3", "argument --steps: must be at least 1, got -3"),
        ("--steps 2.5", "argument --steps: must be a whole number, got '2.5'"),
        ("--lr 0", "argument --lr: must be more than 0"),
        ("--lr nan", "argument --lr: must be more than 0"),
        ("--seed -1", "argument --seed: must be from 0"),
        ("--ranks 0", "argument --ranks: must be at least 1"),
        ("--dim 100 --heads 3", "argument --dim: must be a multiple of 2 * heads = 6, got 100"),
        ("--data missing.txt", "argument --data: missing.txt can't be read: No such file"),
        ("--data empty.txt", "argument --data: the data is empty"),
        ("--data ten.txt --seq 10", "must be longer than a sequence (10 bytes), got 10"),
        ("--data .", "argument --data: . can't be read: Is a directory"),
        ("--hook casst(bfloat16)", "argument --hook: hook 'casst(bfloat16)' names the unknown"),
        ("--hook missing.py:hook", "there is no file missing.py"),
        ("--hook none --compare", "argument --compare"),
        ("--save-every 2", "argument --save-every: needs --save"),
        ("--steps 4 --stop-after 5", "argument --stop-after: must be at most --steps 4, got 5"),
        ("--resume missing.pt", "argument --resume: there is no file missing.pt"),
        ("--resume ten.txt", "argument --resume: ten.txt is not a whole checkpoint"),
        ("--resume other.pt", "argument --resume: other.pt is not a checkpoint of commhook train"),
        ("--resume cut.pt", "argument --resume: cut.pt is not a whole checkpoint"),
        ("--resume good.pt --dim 64", "argument --dim: must be 32 as in the checkpoint good.pt"),
        ("--resume good.pt --seq 8", "argument --seq: must be 16 as in the checkpoint good.pt"),
        ("--resume good.pt", "argument --steps: must be more than the 4 steps of the checkpoint"),
        ("--resume good.pt --steps 9 --ranks 3", "holds the hook's state of 2 ranks"),
        ("--backend nccl --device cpu", "argument --backend: nccl needs --device cuda"),
        ("--out ten.txt", "argument --out: ten.txt is not a directory"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("ten.txt").write_bytes(b"0123456789")
    torch.save({"model": {}}, "other.pt")
    write_checkpoint(Path("good.pt"), _checkpoint())
    Path("cut.pt").write_bytes(Path("good.pt").read_bytes()[:-500])
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("commhook train: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_world_that_is_there_decides_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options([], world_size=5).config.ranks == 5
    with pytest.raises(SystemExit):
        parse_options(["--ranks", "2"], world_size=5)
    assert "must be the 5 of the world that is there, got 2" in capsys.readouterr().err


def test_what_is_not_given_comes_from_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    write_checkpoint(path, _checkpoint())
    options = parse_options(["--resume", str(path), "--steps", "9", "--batch", "5"])
    assert (options.config.dim, options.config.seq, options.config.ranks) == (32, 16, 2)
    assert (options.config.steps, options.config.batch) == (9, 5)
    assert len(options.notes) == 2
    assert any("--batch is 5, it was 4" in note for note in options.notes)
    assert parse_options(["--resume", str(path), "--steps", "9"]).config.batch == 4


def test_by_default_the_ranks_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert parse_options(["--ranks", "1"]).threads == cores
    assert parse_options(["--ranks", "1000"]).threads == 1
    assert parse_options(["--threads", "3"]).threads == 3


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "train" in capsys.readouterr().out


def test_an_unknown_command_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'trian'" in error and "train" in error.replace("trian", "")


def test_ctrl_c_before_the_ranks_start_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "main", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "commhook train: interrupted\n"


def _checkpoint() -> Checkpoint:
    config = TrainConfig(layers=1, dim=32, heads=2, seq=16, steps=4)
    return Checkpoint(
        config=config.to_plain(),
        step=4,
        model={"weight": torch.arange(1000.0)},
        optimizer={"state": {}, "param_groups": [{"lr": 0.1}]},
        rank_states=[{"hook": {"error": torch.ones(3)}, "rng": torch.get_rng_state()}] * 2,
        data_fingerprint="00",
        bytes_sent=None,
        seconds=1.5,
    )
