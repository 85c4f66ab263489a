"""``python -m torch_commhook train``: whole runs, and the options with their errors."""

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
from train_errors import train_error
from train_processes import TINY, TrainProcess, hooks_file, read_metrics, start_train

from torch_commhook import hooks as library_hooks
from torch_commhook.cli import train
from torch_commhook.cli.checkpoint import Checkpoint, read_checkpoint
from torch_commhook.cli.hook_expression import HookExpressionError, check_hook
from torch_commhook.cli.main import main
from torch_commhook.cli.outputs import checkpoint_path
from torch_commhook.cli.place import Place, read_place
from torch_commhook.cli.train_config import MOST_RANKS
from torch_commhook.cli.train_options import available_cores, parse_options
from torch_commhook.cli.transformer import ByteTransformer

processes = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

_INT4 = "error_feedback(blockwise(bits=4))"
_WHOLE = f"local_sgd(4, outer=outer_sgd(1.0, 0.0), hook={_INT4})"
#: Has a fragment on its way where training is saved.
_FRAGMENTS = f"local_sgd(10, outer=outer_sgd(1.0, 0.0), hook={_INT4}, fragments=2, delay=3)"


# ---- whole runs ----------------------------------------------------------------------------------


@processes
def test_a_run_reports_and_compares(tmp_path: Path) -> None:
    arguments = ("--steps", "5", "--compare", "--log-every", "2", "--bucket-cap-mb", "0.02")
    with start_train(*arguments, folder=tmp_path) as run:
        assert run.wait() == 0, run.stderr
        run.assert_all_end()
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
    _assert_same_weights(expected, got)
    for name, tensor in expected.model.items():
        if tensor.dim() > 1:
            assert not torch.equal(tensor, middle.model[name]), f"{name} did not train"
    lines = read_metrics(straight / "out" / "metrics.jsonl")
    again = read_metrics(resumed / "out" / "metrics.jsonl")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[3:]]
    assert [line["bytes_sent"] for line in again] == [line["bytes_sent"] for line in lines[3:]]


@processes
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """``make kill-and-resume`` does so for each hook."""
    row = killed_and_resumed(_INT4, 1, tmp_path, steps=60)
    assert row["different"] == []
    assert 0 < row["resumed_from"] < row["steps"]


def _assert_same_weights(expected: Checkpoint, got: Checkpoint) -> None:
    assert different_paths(expected.model, got.model) == []
    assert different_paths(expected.optimizer["state"], got.optimizer["state"]) == []


@processes
@pytest.mark.parametrize("hook", [_WHOLE, _FRAGMENTS], ids=["whole", "fragments"])
def test_ranks_that_are_apart_go_on_as_they_were(tmp_path: Path, hook: str) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    for folder in (straight, resumed):
        folder.mkdir()
    arguments = ("--steps", "10", "--save-every", "5", "--bucket-cap-mb", "0.02", "--lr", "0.01")
    with start_train(*arguments, "--hook", hook, "--save", "s-{step}.pt", folder=straight) as run:
        assert run.wait() == 0, run.stderr
    with start_train("--resume", straight / "s-5.pt", "--save", "last.pt", folder=resumed) as run:
        assert run.wait() == 0, run.stderr
    # Where ranks are apart in the end, the hook says so when it is taken off.
    said = run.stderr + "".join(log.read_text() for log in (resumed / "out").glob("rank*.log"))
    assert "were together" not in said
    expected, got = read_checkpoint(straight / "s-10.pt"), read_checkpoint(resumed / "last.pt")
    _assert_same_weights(expected, got)
    first, second = (state["optimizer"] for state in expected.rank_states)
    assert not torch.equal(first[0]["exp_avg"], second[0]["exp_avg"])
    for own, other in zip(expected.rank_states, got.rank_states, strict=True):
        assert different_paths(own["optimizer"], other["optimizer"]) == []
    for rank, state in enumerate(got.rank_states):
        apart = state["hook"][f"rank{rank}"]["local_sgd_parameter"]["head.weight"]
        assert torch.equal(apart, got.model["head.weight"]) == (rank == 0)
    lines = read_metrics(straight / "out" / "metrics.jsonl")
    again = read_metrics(resumed / "out" / "metrics.jsonl")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[5:]]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    sent = [line["bytes_sent"] for line in lines]
    if hook == _FRAGMENTS:
        assert sent[6] == 0 < sent[7] == sent[9]  # counted where it ends
        return
    assert sent[2] == 0 < sent[3] == sent[6] and sent[7] == sent[9] == 2 * sent[3]
    assert lines[7]["fp32_bytes"] > 20 * sent[7]


@processes
@pytest.mark.parametrize(
    ("hook", "to_all"),
    [
        (_INT4, True),
        pytest.param(_WHOLE, False, marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    hook: str, to_all: bool, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("interrupted", "resumed", "straight")]
    for folder in folders:
        folder.mkdir()
    own = ("--steps", "100000", "--log-every", "100000", "--bucket-cap-mb", "0.02", "--hook", hook)
    with start_train(*own, "--save", "c-{step}.pt", folder=folders[0]) as run:
        run.wait_for_steps(folders[0] / "out" / "metrics.jsonl", 3)
        if to_all:  # as a terminal does
            os.killpg(run.process.pid, signal.SIGINT)
        else:
            os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
        run.assert_all_end()
        assert "Traceback" not in run.stderr
    lines = read_metrics(folders[0] / "out" / "metrics.jsonl")
    step = int(lines[-1]["step"])
    assert step == len(lines) < 100000
    (saved,) = folders[0].glob("c-*.pt")
    assert saved.name == f"c-{step}.pt"
    assert f"interrupted at step {step} of 100000\ncheckpoint: {saved.name}\n" in run.stdout
    (row,) = json.loads((folders[0] / "out" / "summary.json").read_text())["runs"]
    assert (row["steps"], row["is_interrupted"], row["checkpoint"]) == (step, True, saved.name)
    until = ("--stop-after", str(step + 6), "--save", "last.pt")
    with start_train("--resume", saved, *until, folder=folders[1]) as run:
        assert run.wait() == 0, run.stderr
    with start_train(*own, *until, folder=folders[2]) as run:
        assert run.wait() == 0, run.stderr
    got, expected = (read_checkpoint(folder / "last.pt") for folder in folders[1:])
    _assert_same_weights(expected, got)
    again = read_metrics(folders[1] / "out" / "metrics.jsonl")
    straight = read_metrics(folders[2] / "out" / "metrics.jsonl")
    losses = [line["loss"] for line in (*lines, *again)]
    assert losses == [line["loss"] for line in straight]


@processes
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
    assert [line["bytes_sent"] for line in metrics] == [None] * 3  # it went past the library
    for line, plain_line in zip(metrics, plain, strict=True):
        assert line["loss"] == pytest.approx(plain_line["loss"], abs=1e-5)
    assert run.stdout.count("final loss") == 1 + run.stdout.count("hook  ")


@processes
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


# ---- options -------------------------------------------------------------------------------------


_WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is started, or this process becomes a rank."""
    from torch_commhook.cli import launcher, rank_process

    def launch(*arguments: object) -> int:
        raise AssertionError("a wrong command line must not start ranks")

    monkeypatch.setattr(launcher, "launch", launch)
    for name in ("tie_to_launcher", "end_on_signals"):
        monkeypatch.setattr(rank_process, name, launch)
    for name in (*_WORLD, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COMMHOOK_LAUNCHER_PID"):
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
        ("--ranks 1025", "argument --ranks: must be at most 1024, got 1025"),
        ("--timeout 1e300", "argument --timeout: must be at most 2592000, got 1e300"),
        ("--bucket-cap-mb 1e300", "argument --bucket-cap-mb: must be at most 1000000, got 1e300"),
        ("--threads 1000000000000", "argument --threads: must be at most 1024, got 1000000000000"),
        ("--data-cap-mb 1e13", "argument --data-cap-mb: must be at most 1000000, got 1e13"),
        ("--data-cap-mb 1e308", "argument --data-cap-mb: must be at most 1000000, got 1e308"),
        (
            "--data-cap-mb 1e-9",
            "argument --data-cap-mb: must be more than a sequence (128 bytes), got 1e-09 (0 bytes)",
        ),
        ("--data-cap-mb 0.000128", "argument --data-cap-mb: must be more than a sequence (128 by"),
        ("--dim 100 --heads 3", "argument --dim: must be a multiple of 2 * heads = 6, got 100"),
        ("--data missing.txt", "argument --data: missing.txt can't be read: No such file"),
        ("--data empty.txt", "argument --data: the data is empty"),
        ("--data ten.txt --seq 10", "must be longer than a sequence (10 bytes), got 10"),
        ("--data .", "argument --data: . can't be read: Is a directory"),
        ("--data pipe --data-cap-mb 0.001", "argument --data: pipe can't be read: it is not a reg"),
        ("--data /dev/zero --data-cap-mb 0.001", "argument --data: /dev/zero can't be read: it is"),
        ("--hook casst(bfloat16)", "argument --hook: hook 'casst(bfloat16)' names the unknown"),
        ("--hook missing.py:hook", "there is no file missing.py"),
        ("--hook cast(process_group=1)", "argument --hook: hook 'cast(process_group=1)' gives cas"),
        ("--hook none --compare", "argument --compare"),
        ("--save-every 2", "argument --save-every: needs --save"),
        ("--steps 4 --stop-after 5", "argument --stop-after: must be at most --steps 4, got 5"),
        ("--backend nccl --device cpu", "argument --backend: nccl needs --device cuda"),
        ("--out ten.txt", "argument --out: ten.txt is not a directory"),
        ("--out ten.txt/new/out", "argument --out: ten.txt is not a directory"),
        ("--out taken", "argument --out: taken/metrics.jsonl is a directory"),
        pytest.param(
            "--out /proc/out", "argument --out: /proc takes no new files", marks=processes
        ),
        ("--save taken", "argument --save: taken is a directory"),
        ("--save ten.txt/c.pt", "argument --save: ten.txt is not a directory"),
        ("--save pipe", "argument --save: pipe is not a regular file"),
        ("--save at-{step} --steps 3", "argument --save: at-3 is a directory"),
        (
            "--out new --save new/metrics.jsonl",
            "argument --save: new/metrics.jsonl collides with new/metrics.jsonl, which the run its",
        ),
        ("--out new --save at-3/../new/summary.json", "new/summary.json collides with new/summary"),
        ("--out new --save new/metrics-none.jsonl", "argument --save: new/metrics-none.jsonl coll"),
        ("--out link --save at-3/loss.png", "at-3/loss.png collides with link/loss.png, which"),
        (
            "--out new --save new/rank1.log",
            "argument --save: new/rank1.log collides with new/rank1",
        ),
        ("--out new/out --save new", "argument --save: new collides with new/out/metrics.jsonl"),
        ("--out new --save new/loss.png/c", "argument --save: new/loss.png/c collides with new/lo"),
        ("--out at-3 --save at-{step}/loss.png --steps 3", "at-3/loss.png collides with at-3/loss"),
        ("--out at-3 --save link{step}/loss.png --steps 9", "link9/loss.png collides with at-3/lo"),
        (
            "--out at-3 --save at-{step}/loss.png --save-every 1 --steps 1000000000000000",
            "argument --save: at-3/loss.png collides with at-3/loss.png",
        ),
        pytest.param(
            "--save /proc/new/c.pt", "argument --save: /proc takes no new files", marks=processes
        ),
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
    Path("taken", "metrics.jsonl").mkdir(parents=True)
    Path("at-3").mkdir()
    Path("link").symlink_to("at-3")
    Path("link9").symlink_to("at-3")
    os.mkfifo("pipe")
    pipe = os.open("pipe", os.O_RDWR)  # with 1 kB in it: who reads that much does not wait
    os.write(pipe, bytes(1000))
    before = sorted(Path().iterdir())
    try:
        error = train_error(arguments.split(), capsys)
    finally:
        os.close(pipe)
    assert message in error
    assert sorted(Path().iterdir()) == before


def test_places_that_can_be_written_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.pt").write_text("old")
    for save in (
        "new/folder/{step}.pt",
        "old.pt",
        "out/new/c.pt",
        "out/metrics.jsonl",
        "out/new/metrics-{step}.jsonl",
        "out/{step}/metrics.jsonl",
    ):
        options = parse_options(["--out", "out/new", "--save", save])
        assert options.out == Path("out/new")
    # No checkpoint of step 3 is written.
    parse_options(["--out", "at-3", "--save", "at-{step}/loss.png", "--save-every", "2"])
    parse_options(["--out", "at-300", "--save", "at-{step}/loss.png", "--save-every", "2"])
    assert list(Path().iterdir()) == [Path("old.pt")]
    assert Path("old.pt").read_text() == "old"


def test_the_step_in_a_checkpoints_path() -> None:
    assert checkpoint_path(Path("a/c-{step}.pt"), 12) == Path("a/c-12.pt")
    assert checkpoint_path(Path("a/c.pt"), 12) == Path("a/c.pt")


@pytest.mark.usefixtures("_no_launch")
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**_WORLD, "RANK": "abc"}, "RANK: must be a whole number from 0 to 1, got 'abc'"),
        ({**_WORLD, "RANK": "2"}, "RANK: must be a whole number from 0 to 1, got '2'"),
        ({**_WORLD, "WORLD_SIZE": "x"}, "WORLD_SIZE: must be a whole number of at least 1, got"),
        ({**_WORLD, "WORLD_SIZE": "0"}, "WORLD_SIZE: must be a whole number of at least 1, got"),
        ({**_WORLD, "LOCAL_RANK": "-1"}, "LOCAL_RANK: must be a whole number of at least 0, got"),
        ({**_WORLD, "LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE: must be a whole number of at le"),
        ({**_WORLD, "MASTER_PORT": "http"}, "MASTER_PORT: must be a whole number from 0 to 65535"),
        ({"COMMHOOK_LAUNCHER_PID": "abc"}, "COMMHOOK_LAUNCHER_PID: must be a whole num"),
        (
            {"COMMHOOK_LAUNCHER_PID": "1"},
            "WORLD_SIZE: must be a whole number of at least 1, got no",
        ),
    ],
)
def test_an_environment_that_describes_no_place_is_one_line(
    environment: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert f"environment variable {message}" in train_error([], capsys)


def test_the_environment_gives_the_place() -> None:
    assert read_place(_WORLD) == Place(1, 2, 1, 2)
    assert read_place({**_WORLD, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == Place(1, 2, 0, 1)
    ours = {"RANK": "0", "WORLD_SIZE": "3", "COMMHOOK_LAUNCHER_PID": "77"}
    assert read_place(ours) == Place(0, 3, 0, 3, launcher_pid=77)
    assert read_place({"WORLD_SIZE": "x", "RANK": "0"}) is None  # a world has an address as well


def test_a_world_that_is_there_decides_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(0, 5, 0, 5)
    assert parse_options([], place).config.ranks == 5
    with pytest.raises(SystemExit):
        parse_options(["--ranks", "2"], place)
    assert "must be the 5 of the world that is there, got 2" in capsys.readouterr().err
    many = MOST_RANKS + 1  # on many machines
    assert parse_options([], Place(0, many, 0, 1)).config.ranks == many


def test_ranks_that_share_cores_are_a_note() -> None:
    cores = available_cores()
    assert parse_options(["--ranks", str(cores)]).notes == ()
    (note,) = parse_options(["--ranks", str(cores + 1)]).notes
    assert note.startswith(f"{cores + 1} ranks share {cores} core")


def test_only_hooks_that_can_be_made_are_offered() -> None:
    with pytest.raises(
        HookExpressionError, match=r"is one of .*allreduce, blockwise, cast"
    ) as caught:
        check_hook("nonsense")
    assert "Hook," not in str(caught.value)
    assert "Hook" in library_hooks.__all__
    with pytest.raises(HookExpressionError, match="names the unknown hook 'Hook'"):
        check_hook("Hook")


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
