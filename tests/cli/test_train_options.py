"""``python -m torch_commhook train``: options, environment, Slurm, and early errors."""

from __future__ import annotations

import os
import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from launched_ranks import free_port
from repository import ROOT
from train_processes import TINY, finished, forbid_launch, read_metrics, train_error

from torch_commhook import hooks as library_hooks
from torch_commhook.cli import outputs, train
from torch_commhook.cli.launch_environment import (
    LaunchEnvironment,
    LaunchError,
    first_host,
    read_launch_environment,
    slurm_variables,
)
from torch_commhook.cli.main import main
from torch_commhook.cli.outputs import checkpoint_path
from torch_commhook.cli.train_config import MOST_RANKS
from torch_commhook.cli.train_options import available_cores, parse_options
from torch_commhook.hooks.expressions import HookExpressionError, check_hook
from torch_commhook.integrations import slurm

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

_WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launch(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps -3", "argument --steps: must be at least 1, got -3"),
        ("--steps 99999999999999999999", "argument --steps: must be at most 1000000000, got"),
        ("--batch 99999999999999999999", "argument --batch: must be at most 1000000, got"),
        ("--out=", "argument --out: must be a path, got ''"),
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
        ("--compare casst()", "argument --compare: hook 'casst()' names the unknown hook 'casst'"),
        ("--compare cast() sgn()", "argument --compare: hook 'sgn()' names the unknown hook 'sgn'"),
        ("--hook cast() --compare none cast()", "--compare: the hook cast() is there twice"),
        ("--compare sign() fp8() fp8()", "argument --compare: the hook fp8() is there twice"),
        (
            "--parallel fsdp --hook cast() --compare topk(0.1)",
            "argument --compare: topk(density=0.1): needs the gradients of all ranks in one place",
        ),
        ("--log csv", "argument --log: invalid choice: 'csv'"),
        ("--save-every 2", "argument --save-every: needs --save"),
        ("--steps 4 --stop-after 5", "argument --stop-after: must be at most --steps 4, got 5"),
        ("--backend nccl --device cpu", "argument --backend: nccl needs --device cuda"),
        ("--out ten.txt", "argument --out: ten.txt is not a directory"),
        ("--out ten.txt/new/out", "argument --out: ten.txt is not a directory"),
        ("--out taken", "argument --out: taken/metrics.jsonl is a directory"),
        ("--out ten.txt --data missing.txt --hook casst()", "--out: ten.txt is not a directory"),
        ("--out taken-2 --compare cast() sign()", "taken-2/metrics-2.jsonl is a directory"),
        (
            "--out new --save new/metrics-2.jsonl --compare cast() sign()",
            "argument --save: new/metrics-2.jsonl collides with new/metrics-2.jsonl, which the run",
        ),
        pytest.param("--out /proc/out", "--out: /proc takes no new files", marks=needs_proc),
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
        ("--out new --save new/rank1.log", "--save: new/rank1.log collides with new/rank1"),
        ("--out new/out --save new", "argument --save: new collides with new/out/metrics.jsonl"),
        ("--out new --save new/loss.png/c", "argument --save: new/loss.png/c collides with new/lo"),
        ("--out at-3 --save at-{step}/loss.png --steps 3", "at-3/loss.png collides with at-3/loss"),
        ("--out at-3 --save at-{step}/loss.png --save-every 2", "at-3/loss.png collides with at-3"),
        ("--out at-3 --save link{step}/loss.png --steps 9", "link9/loss.png collides with at-3/lo"),
        (
            "--out at-3 --save at-{step}/loss.png --save-every 1 --steps 1000000000",
            "argument --save: at-3/loss.png collides with at-3/loss.png",
        ),
        pytest.param("--save /proc/new/c.pt", "--save: /proc takes no new files", marks=needs_proc),
        ("--nonsense", "unrecognized arguments: --nonsense"),
        # Of models in shards.
        ("--parallel tensor", "argument --parallel: invalid choice: 'tensor'"),
        ("--weights blockwise()", "argument --weights: needs --parallel fsdp or hsdp, got ddp"),
        ("--shards 2", "argument --shards: needs --parallel hsdp, got ddp"),
        ("--parallel fsdp --shards 2", "argument --shards: needs --parallel hsdp, got fsdp"),
        ("--parallel fsdp --shard-hook cast()", "argument --shard-hook: needs --parallel hsdp, go"),
        ("--parallel fsdp --bucket-cap-mb 1", "argument --bucket-cap-mb: needs --parallel ddp, go"),
        (
            "--parallel hsdp --ranks 3",
            "argument --shards: is half of the ranks by default, got 3 ranks; give a number that d",
        ),
        ("--parallel hsdp --ranks 4 --shards 3", "--shards: must divide the 4 ranks, got 3"),
        ("--parallel hsdp --ranks 4 --shards 8", "--shards: must divide the 4 ranks, got 8"),
        ("--parallel fsdp --hook topk(0.1)", "argument --hook: topk(density=0.1): needs the gra"),
        ("--parallel fsdp --hook powersgd()", "argument --hook: powersgd"),
        ("--parallel fsdp --hook error_feedback(topk(0.1))", "argument --hook: topk(density=0.1)"),
        ("--parallel fsdp --hook clip(1.0)", "--hook: clip(1) scales all gradients of a step"),
        ("--parallel fsdp --hook local_sgd(4)", "--hook: local_sgd(4) keeps replicas apar"),
        ("--parallel hsdp --hook clip(1.0)", "argument --hook: clip(1) scales all gradients of a"),
        (
            "--parallel hsdp --ranks 4 --shard-hook topk(0.1)",
            "argument --shard-hook: topk(density=0.1): needs the gradients of all ranks",
        ),
        ("--parallel hsdp --shard-hook castt()", "argument --shard-hook: hook 'castt()' names the"),
        ("--parallel hsdp --shard-hook no.py:x", "argument --shard-hook: hook 'no.py:x': there is"),
        ("--parallel fsdp --weights int8()", "argument --weights: codec 'int8()' names the unknow"),
        (
            "--parallel fsdp --weights randomk(0.1)",
            "argument --weights: weights must be a codec that sends all values",
        ),
        ("--parallel fsdp --hook none --weights fp8()", "--weights: needs a --hook, got none"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").touch()
    Path("ten.txt").write_bytes(b"0123456789")
    Path("taken", "metrics.jsonl").mkdir(parents=True)
    Path("taken-2", "metrics-2.jsonl").mkdir(parents=True)
    Path("at-3").mkdir()
    Path("link").symlink_to("at-3")
    Path("link9").symlink_to("at-3")
    os.mkfifo("pipe")
    pipe = os.open("pipe", os.O_RDWR)  # with 1 kB in it, so that a read of 1 kB does not wait
    os.write(pipe, bytes(1000))
    before = sorted(Path().iterdir())
    try:
        error = train_error(arguments.split(), capsys)
    finally:
        os.close(pipe)
    assert (f"argument {message}" if message.startswith("--") else message) in error
    assert sorted(Path().iterdir()) == before


def test_places_that_can_be_written_are_left_as_they_are() -> None:
    Path("old.pt").write_text("old")
    for save in (
        *("new/folder/{step}.pt", "old.pt", "out/new/c.pt", "out/metrics.jsonl"),
        *("out/new/metrics-{step}.jsonl", "out/{step}/metrics.jsonl"),
    ):
        options = parse_options(["--out", "out/new", "--save", save])
        assert options.out == Path("out/new")
    # The run has fewer steps.
    parse_options(["--out", "at-300", "--save", "at-{step}/loss.png", "--save-every", "2"])
    assert list(Path().iterdir()) == [Path("old.pt")]
    assert Path("old.pt").read_text() == "old"


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_log_needs_its_package(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "is_installed", lambda name: False)
    error = train_error(["--log", "jsonl", package], capsys)
    assert f"argument --log: {package} needs the package {package}: pip install {package}" in error
    assert list(Path().iterdir()) == []
    monkeypatch.setattr(outputs, "is_installed", lambda name: True)
    assert parse_options(["--log", package, package]).log == (package,)
    if package == "tensorboard":
        Path("out").mkdir()
        Path("out/tensorboard").touch()
        error = train_error(["--log", package, "--out", "out"], capsys)
        assert "argument --out: out/tensorboard is not a directory" in error


@pytest.mark.parametrize(
    ("arguments", "hooks"),
    [
        ("", ["cast(bfloat16)"]),
        ("--compare", ["cast(bfloat16)", "none"]),
        ("--compare none", ["cast(bfloat16)", "none"]),
        ("--compare sign()", ["sign()", "none"]),
        ("--compare sign() fp8()", ["sign()", "fp8()", "none"]),
        ("--hook cast() --compare sign() fp8()", ["cast()", "sign()", "fp8()", "none"]),
        ("--hook none --compare sign()", ["none", "sign()"]),
    ],
)
def test_the_runs_of_a_comparison(arguments: str, hooks: list[str]) -> None:
    options = parse_options(arguments.split())
    assert [config.hook for config in (options.config, *options.others)] == hooks


def test_what_else_compresses_is_left_out_of_the_plain_run() -> None:
    options = parse_options("--parallel fsdp --weights fp8() --compare sign() cast()".split())
    weights = [config.weights for config in (options.config, *options.others)]
    assert weights == ["fp8()", "fp8()", None]


def test_the_step_in_a_checkpoints_path() -> None:
    assert checkpoint_path(Path("a/c-{step}.pt"), 12) == Path("a/c-12.pt")
    assert checkpoint_path(Path("a/c.pt"), 12) == Path("a/c.pt")


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
    assert read_launch_environment(_WORLD) == LaunchEnvironment(1, 2, 1, 2)
    assert read_launch_environment(
        {**_WORLD, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ) == LaunchEnvironment(1, 2, 0, 1)
    ours = {"RANK": "0", "WORLD_SIZE": "3", "COMMHOOK_LAUNCHER_PID": "77"}
    assert read_launch_environment(ours) == LaunchEnvironment(0, 3, 0, 3, launcher_pid=77)
    assert read_launch_environment({"WORLD_SIZE": "x", "RANK": "0"}) is None


def test_a_world_that_is_there_decides_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    place = LaunchEnvironment(0, 5, 0, 5)
    assert parse_options([], place).config.ranks == 5
    with pytest.raises(SystemExit):
        parse_options(["--ranks", "2"], place)
    assert "must be 5, the ranks of the launcher, got 2" in capsys.readouterr().err
    many = MOST_RANKS + 1  # on many machines
    assert parse_options([], LaunchEnvironment(0, many, 0, 1)).config.ranks == many


def test_ranks_that_share_cores_are_a_note() -> None:
    cores = available_cores()
    assert parse_options(["--ranks", str(cores)]).notes == ()
    (note,) = parse_options(["--ranks", str(cores + 1)]).notes
    assert note.startswith(f"{cores + 1} ranks share {cores} core")


def test_only_hooks_that_can_be_made_are_offered() -> None:
    with pytest.raises(
        HookExpressionError, match=r"is one of .*allreduce, auto, blockwise, cast"
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


# ---- ranks under Slurm ---------------------------------------------------------------------------

#: The variables of the fourth task of a step on three hosts.
TASK = {
    "SLURM_JOB_ID": "7041234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODELIST": "node[08-09,11]",
}
PLACE = {
    "RANK": "3",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node08",
    "MASTER_PORT": "16236",
}

TRAIN = (sys.executable, "-m", "torch_commhook", "train")


def test_a_task_of_srun_finds_its_place() -> None:
    assert slurm_variables(TASK) == PLACE
    place = read_launch_environment({**TASK, **PLACE})
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 5, 1, 2)


def test_a_step_on_a_part_of_the_job_goes_before_the_job() -> None:
    step = {"SLURM_STEP_NODELIST": "node09", "SLURM_STEP_NUM_TASKS": "4"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "4"
    found = slurm_variables({**TASK, **step, "SLURM_NODEID": "0"})
    assert found == {**PLACE, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node09"}


def test_steps_of_a_job_have_ports_of_their_own() -> None:
    ports = {slurm_variables({**TASK, "SLURM_STEP_ID": step})["MASTER_PORT"] for step in "012"}
    assert len(ports) == 3
    highest = slurm_variables({**TASK, "SLURM_JOB_ID": "9999", "SLURM_STEP_ID": "0"})
    assert highest["MASTER_PORT"] == "24999"


def test_what_is_set_already_stays() -> None:
    given = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "WORLD_SIZE": "5"}
    assert slurm_variables({**TASK, **given}) == {**PLACE, **given}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"},  # sbatch's script
        {name: value for name, value in TASK.items() if name != "SLURM_PROCID"},
        {**TASK, "SLURM_NTASKS": "1"},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**TASK, "RANK": "0"},  # torchrun's
        {**TASK, "COMMHOOK_LAUNCHER_PID": "1"},
    ],
)
def test_other_processes_are_left_alone(environment: dict[str, str]) -> None:
    assert slurm_variables(environment) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[01-04,7]", "node01"),
        ("node[7,01-04]", "node7"),
        ("gpu3,node[01-04]", "gpu3"),
        ("rack[2-3]n[10-12],x", "rack2n10"),
        ("a-b.c[005]-ib0", "a-b.c005-ib0"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "node[", "node[1", "node[]", "a b"])
def test_what_is_no_list_of_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(LaunchError, match=r"like node\[01-04,7\], got '"):
        first_host(hosts)


@pytest.mark.parametrize("missing", ["NTASKS", "LOCALID", "NODELIST", "JOB_ID"])
def test_what_is_missing_is_named(missing: str) -> None:
    environment = {name: value for name, value in TASK.items() if name != f"SLURM_{missing}"}
    with pytest.raises(LaunchError, match=rf"srun has started .*SLURM_{missing}\b.* is missing"):
        slurm_variables(environment)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"SLURM_LOCALID must be a whole number, got 'x'"):
        slurm_variables({**TASK, "SLURM_LOCALID": "x"})
    with pytest.raises(LaunchError, match=r"WORLD_SIZE: must be the 5 tasks .* got '8'"):
        slurm_variables({**TASK, "WORLD_SIZE": "8"})


def test_a_script_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(TASK))
    assert slurm.set_variables()
    assert os.environ == {**TASK, **PLACE}
    assert not slurm.set_variables()  # with the variables that it has set


# ---- processes -----------------------------------------------------------------------------------

_SRUN = """#!/bin/bash
# Two tasks on this host, as srun starts them.
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2 SLURM_NODEID=0
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
wait -n && wait -n
"""


@pytest.fixture
def slurm_host(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on a host with ``srun``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", _SRUN), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    return environment | {
        "PATH": f"{folder}:{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(_job_of_a_free_port()),
        "SLURM_NODELIST": "localhost",
        "SLURM_PROCID": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _job_of_a_free_port() -> int:
    for _ in range(100):
        job = random.randrange(10000)
        with suppress(OSError):
            return free_port(15000 + job) - 15000
    raise AssertionError("no port is free")


def test_the_example_trains_as_on_one_host(tmp_path: Path, slurm_host: dict[str, str]) -> None:
    arguments = (*TINY, "--steps", "4")
    script = ROOT / "examples" / "slurm_training.sbatch"
    printed = finished("bash", script, *arguments, folder=tmp_path, environment=slurm_host)
    assert "2 ranks (gloo on cpu" in printed.stdout
    hook = ("--hook", "error_feedback(blockwise(bits=4))", "--out", "alone")
    finished(*TRAIN, *hook, *arguments, "--ranks", "2", folder=tmp_path, environment=slurm_host)
    of_slurm, alone = (
        [(x["loss"], x["bytes_sent"]) for x in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("results", "alone")
    )
    assert of_slurm == alone and len(alone) == 4


def test_train_says_what_is_missing(tmp_path: Path, slurm_host: dict[str, str]) -> None:
    task = {**slurm_host, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    del task["SLURM_NODELIST"]
    done = finished(*TRAIN, folder=tmp_path, environment=task, code=2)
    assert "SLURM_STEP_NODELIST or SLURM_NODELIST or SLURM_JOB_NODELIST is missing" in done.stderr
