"""The launcher and the ranks' processes: if one ends, all end, with one message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from train_processes import LIMIT_SECONDS, TINY, TrainProcess, start_train, wait_for

from torch_commhook.cli import launcher
from torch_commhook.cli.launcher import launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

_RANK_PROCESS = Path(launcher.__file__)

# A rank without torch: it starts in 0.1 s, and writes its process id to a file.
_CHILD = f"""
import importlib.util, os, pathlib, signal, sys, time
spec = importlib.util.spec_from_file_location("rank_process", {str(_RANK_PROCESS)!r})
rank_process = importlib.util.module_from_spec(spec)
sys.modules["rank_process"] = rank_process
spec.loader.exec_module(rank_process)
rank_process.watch_parent(int(os.environ["COMMHOOK_LAUNCHER_PID"]))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
part = pathlib.Path(f"pid-{{rank}}.part")
part.write_text(str(os.getpid()))
part.rename(f"pid-{{rank}}")
while not all(os.path.exists(f"pid-{{other}}") for other in range(size)):
    time.sleep(0.01)  # all ranks continue at about the same time
def linger():
    time.sleep(60)
    pathlib.Path(f"lingered-{{rank}}").touch()  # the launcher has not ended this rank
"""


def _command(body: str) -> list[str]:
    script = Path("child.py").absolute()
    script.write_text(_CHILD + body)
    return [sys.executable, str(script)]


def _launch(
    body: str, ranks: int, action: Callable[[list[int]], object] | None = None, **more: float
) -> int:
    """The exit code of the launcher whose ranks run the code of a body.

    Once all run, ``action(pids)`` is called in a thread.
    """
    thread = threading.Thread(target=lambda: action and action(_pids(ranks)))
    thread.start()
    code = launch(_command(body), ranks, Path("out").absolute(), 1, **more)
    thread.join()
    return code


def _pids(ranks: int) -> list[int]:
    """The process ids of all ranks, once all run."""
    files = [Path(f"pid-{rank}") for rank in range(ranks)]
    wait_for(lambda: all(file.exists() for file in files), "the ranks did not start")
    return [int(file.read_text()) for file in files]


def _assert_were_ended(ranks: int) -> None:
    """Fail if a rank still runs, or has ended by itself in ``linger``."""
    for pid in _pids(ranks):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(Path().glob("lingered-*")) == []


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_ranks_that_end_well_are_a_success(capfd: pytest.CaptureFixture[str]) -> None:
    # One write each: the ranks share a file, and print may write piece by piece.
    body = "os.write(1, f'rank {rank} of {size} {os.environ[\"LOCAL_RANK\"]}\\n'.encode())"
    assert _launch(body, 3) == 0
    output = capfd.readouterr()
    assert sorted(output.out.splitlines()) == [f"rank {rank} of 3 {rank}" for rank in range(3)]
    assert output.err == ""
    assert not Path("out").exists()


def test_a_rank_that_says_why_is_blamed_before_silent_ones(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert _launch("rank == 0 and print('no such file', file=sys.stderr)\nsys.exit(2)", 2) == 1
    assert "rank 0 ended with exit code 2; the other ended too\n  no such file\n" in (
        capfd.readouterr().err
    )


def test_a_reason_counts_however_much_follows_it(capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        "said = 'lost another rank: gone' if rank == 0 else 'failed: ValueError: the cause'\n"
        "print(f'commhook train: rank {rank} {said}', *9 * ['frame'], sep='\\n', file=sys.stderr)\n"
        "sys.exit(1)"
    )
    assert _launch(body, 2) == 1
    assert "rank 1 failed: ValueError: the cause; the other ended too" in capfd.readouterr().err


def test_a_rank_that_sigterm_ends_before_a_step_ends_all(
    capfd: pytest.CaptureFixture[str],
) -> None:
    begun = time.monotonic()
    assert _launch("rank == 1 and os._exit(143)\nlinger()", 2) == 1
    assert time.monotonic() - begun < 30.0
    assert "rank 1 was stopped by SIGTERM (15); the other ended too" in capfd.readouterr().err
    _assert_were_ended(2)


def test_warnings_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    body = "rank == 1 and print('careful', file=sys.stderr)"
    assert _launch(body, 2) == 0
    assert Path("out/rank1.log").read_text() == "careful\n"
    assert "rank1.log" in capfd.readouterr().err
    assert not Path("out/rank0.log").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "rank == 1 and sys.exit('the disk is on fire')\nlinger()",
            "rank 1 ended with exit code 1; the other 2 ended too\n  the disk is on fire\n",
        ),
        (
            "rank == 2 and os.kill(os.getpid(), signal.SIGKILL)\nlinger()",
            "rank 2 was killed by SIGKILL (9)",
        ),
        (
            "rank == 0 and os.kill(os.getpid(), signal.SIGSEGV)\nlinger()",
            "rank 0 was killed by SIGSEGV (11)",
        ),
        (  # rank 0 reports first, but rank 1 is the cause
            "error = RuntimeError('Connection closed by peer') if rank == 0 else ValueError('mine')"
            "\nrank < 2 and rank_process.fail(error, rank)\nlinger()",
            "rank 1 failed: ValueError: mine; the other 2 ended too\n  full output:",
        ),
        (  # a rank killed by a signal is the cause, even if it is noticed a little later
            "rank == 0 and rank_process.fail(RuntimeError('Broken pipe'), rank)\n"
            "first = pathlib.Path(os.environ['COMMHOOK_LAUNCHER_FOLDER']) / 'rank0.log'\n"
            "while 'Broken pipe' not in first.read_text(): time.sleep(0.01)\n"
            "time.sleep(0.1)\nrank == 1 and os.kill(os.getpid(), signal.SIGKILL)\nlinger()",
            "rank 1 was killed by SIGKILL (9)",
        ),
        (
            "rank == 0 and rank_process.fail(RuntimeError('Timed out after 5 s'), rank)\nlinger()",
            "rank 0 lost another rank: RuntimeError: Timed out after 5 s",
        ),
    ],
)
def test_one_failing_rank_ends_all_with_its_message(
    body: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _launch(body, 3) == 1
    _assert_were_ended(3)
    error = capfd.readouterr().err
    assert error.startswith(f"commhook train: {message}")
    assert error.count("commhook train:") == 1


@pytest.mark.parametrize(
    "text",
    [
        "rank 1: its process has ended (in exchange 3 of order 0)",
        "rank 1: no sign of its host for 15 s",
        "rank 1 has left the group",
        "rank 1: it counts this process as lost",
        "rank 0: timeout after 3 s in barrier 2, which waits for rank 1",
    ],
)
def test_errors_of_the_transport_blame_another_rank(text: str) -> None:
    assert launcher.describe(dist.DistBackendError(text)).startswith("lost another rank: ")


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(f'ready-{rank}').touch()\n"
        "while not pathlib.Path('ready-0').exists(): time.sleep(0.02)\n"
        "rank == 1 and sys.exit(3)\nlinger()"
    )
    assert _launch(body, 2) == 1
    _assert_were_ended(2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    code = _launch("linger()", 2, lambda pids: os.kill(os.getpid(), number))
    assert code == 128 + number
    _assert_were_ended(2)
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "all 2 ranks ended" in error
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("steps", [False, True])
def test_only_the_steps_of_this_run_are_claimed(
    steps: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    out, told = Path("out").absolute(), Path("told")
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1}\n')  # of an earlier run
    tell = "rank == 0 and rank_process.tell_first_step()\n" if steps else ""

    def interrupt(pids: list[int]) -> None:
        wait_for(told.exists, "rank 0 did not come so far")
        os.kill(os.getpid(), signal.SIGINT)

    body = f"{tell}rank == 0 and pathlib.Path('told').touch()\nlinger()"
    assert _launch(body, 2, interrupt, timeout=0.2) == 130
    assert (f"; the steps so far are in {out}" in capfd.readouterr().err) == steps


_TOLD = (
    "rank_process.end_on_signals(rank)\nrank_process.stop_in_order()\n"
    "rank == 0 and rank_process.tell_first_step()\n"
    "pathlib.Path(f'ready-{rank}').touch()\n"
)


def _launch_and_signal(body: str, number: signal.Signals, timeout: float) -> int:
    """The exit code after a signal that comes when both ranks are ready."""

    def send(pids: list[int]) -> None:
        wait_for(lambda: len(list(Path().glob("ready-*"))) == 2, "the ranks are not ready")
        os.kill(os.getpid(), number)

    return _launch(_TOLD + body, 2, send, timeout=timeout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_ranks_end_their_step(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    body = (
        "while not rank_process.is_asked_to_stop(): time.sleep(0.01)\n"
        "pathlib.Path(f'saved-{rank}').touch()"
    )
    assert _launch_and_signal(body, number, LIMIT_SECONDS) == 128 + number
    assert Path("saved-0").exists() and Path("saved-1").exists()
    assert capfd.readouterr().err.endswith(f"the steps so far are in {Path('out').absolute()}\n")


def test_a_rank_that_does_not_stop_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    body = "rank == 1 and linger()"
    assert _launch_and_signal(body, signal.SIGINT, 0.5) == 130
    _assert_were_ended(2)
    assert capfd.readouterr().err.endswith(", without checkpoint and summary of the last one\n")


def test_a_rank_that_fails_while_it_stops_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        "while not rank_process.is_asked_to_stop(): time.sleep(0.01)\n"
        "rank == 0 and rank_process.fail(OSError('no space'), rank)\nlinger()"
    )
    assert _launch_and_signal(body, signal.SIGINT, LIMIT_SECONDS) == 130
    _assert_were_ended(2)
    assert capfd.readouterr().err.endswith("; rank 0 failed: OSError: no space\n")
    assert "no space" in Path("out/rank0.log").read_text()


def test_a_machine_without_room_for_a_rank_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start = subprocess.Popen

    def popen(*arguments: object, env: dict[str, str], **more: object) -> object:
        if env["RANK"] == "2":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*arguments, env=env, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert _launch("linger()", 3) == 1
    assert list(Path().glob("lingered-*")) == []
    error = capfd.readouterr().err
    assert error.startswith("commhook train: rank 2 of 3 can't be started: ")
    assert error.count("\n") == 1


def test_ctrl_c_does_not_reach_the_ranks_themselves() -> None:
    body = (
        "while not pathlib.Path('interrupted').exists(): time.sleep(0.01)\n"
        "pathlib.Path(f'done-{rank}').touch()"
    )

    def interrupt(pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        Path("interrupted").touch()

    assert _launch(body, 2, interrupt) == 0
    assert Path("done-0").exists() and Path("done-1").exists()


def test_the_ranks_end_when_their_launcher_is_killed() -> None:
    command = _command("linger()")
    script = Path("driver.py").absolute()
    script.write_text(
        "import pathlib\nfrom torch_commhook.cli.launcher import launch\n"
        f"launch({command!r}, 2, pathlib.Path('out'), 1)\n"
    )
    with TrainProcess(script, folder=Path.cwd()) as driver:
        _pids(2)
        os.kill(driver.process.pid, signal.SIGKILL)
        driver.wait()
        driver.assert_all_end()


def test_a_late_rank_notices_that_its_launcher_is_gone_already(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(_CHILD + "time.sleep(60)")
    environment = {"RANK": "0", "WORLD_SIZE": "1", "COMMHOOK_LAUNCHER_PID": "1"}
    code = os.spawnve(os.P_WAIT, sys.executable, [sys.executable, str(script)], environment)
    assert code == 1
    assert not Path("pid-0").exists()


# ---- the whole command ---------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["-m", "commhook"])
def test_ctrl_c_while_torch_is_imported_is_one_line(start: str, tmp_path: Path) -> None:
    torch = tmp_path / "torch.py"  # found before the real one
    torch.write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(60)\n")
    script = tmp_path / "commhook"  # as pip makes it
    script.write_text("from torch_commhook.cli.main import main\nmain()\n")
    arguments = ("-m", "torch_commhook") if start == "-m" else (script,)
    with TrainProcess(*arguments, "train", folder=tmp_path) as run:
        wait_for((tmp_path / "importing").exists, "torch is not imported")
        while run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
            time.sleep(0.02)
        assert run.wait() == 130
        run.assert_all_end()
        assert run.stderr == "commhook: interrupted (Ctrl-C)\n"


def test_importing_the_package_leaves_ctrl_c_as_it_is(tmp_path: Path) -> None:
    code = (
        "import signal\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "import torch_commhook\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
    )
    with TrainProcess("-c", code, "train", folder=tmp_path) as run:
        assert run.wait() == 0, run.stderr


@pytest.mark.parametrize("when", ["before there are ranks", "when they have ended"])
def test_more_than_one_ctrl_c_is_one_line_and_exit_code_130(when: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    if when == "before there are ranks":
        body = f"pathlib.Path({str(ready)!r}).touch()\n    time.sleep(60)"
        message = "commhook: interrupted (Ctrl-C)\n"
    else:
        command = _command("linger()")
        body = f"return launch({command!r}, 1, pathlib.Path('out'), 1)"
        ready = tmp_path / "pid-0"
        message = "commhook train: interrupted (Ctrl-C), the rank ended\n"
    script = tmp_path / "driver.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "from torch_commhook.cli import train\n"
        "from torch_commhook.cli.launcher import launch\n"
        "from torch_commhook.cli.main import main\n"
        f"def run(argv):\n    {body}\n"
        "train.main = run\n"
        "sys.exit(main())\n"
    )
    with TrainProcess(script, "train", folder=tmp_path) as run:
        wait_for(ready.exists, "it did not start")
        while run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
            time.sleep(0.02)
        assert run.wait() == 130
        run.assert_all_end()
        assert run.stderr == message


_LONG = ("--hook", "none", "--steps", "1000000", "--log-every", "1000000")


def test_an_interrupted_run_saves_only_where_it_should(tmp_path: Path) -> None:
    with start_train(*_LONG, folder=tmp_path) as run:
        run.wait_for_steps(tmp_path / "out" / "metrics.jsonl", 2)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
    assert "\ninterrupted at step " in run.stdout and "\ncheckpoint: " not in run.stdout


def test_a_second_ctrl_c_does_not_wait_for_a_rank_that_is_stuck(tmp_path: Path) -> None:
    with start_train(*_LONG, "--save", "c.pt", folder=tmp_path) as run:
        run.wait_for_steps(tmp_path / "out" / "metrics.jsonl", 2)
        os.kill(run.rank_pid(1), signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGINT)
        wait_for(lambda: "a second signal ends them" in run.stderr, "the first one was not taken")
        assert run.process.poll() is None
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
        run.assert_all_end()
        assert run.stderr.endswith(", without checkpoint and summary of the last one\n")
        assert not (tmp_path / "c.pt").exists()


def test_a_killed_rank_ends_a_training_run(tmp_path: Path) -> None:
    with start_train(*_LONG, folder=tmp_path) as run:
        run.wait_for_steps(tmp_path / "out" / "metrics.jsonl")
        os.kill(run.rank_pid(1), signal.SIGKILL)
        assert run.wait() == 1
        run.assert_all_end()
        assert run.stderr.startswith("commhook train: rank 1 was killed by SIGKILL (9)")
        assert "Traceback" not in run.stderr


def test_under_torchrun_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    train = ("-m", "torch_commhook", "train", *TINY, *_LONG, "--out", tmp_path / "out")
    with TrainProcess(*arguments, *train, folder=tmp_path) as run:
        run.wait_for_steps(tmp_path / "out" / "metrics.jsonl")
        os.kill(run.rank_pid(1), signal.SIGKILL)
        assert run.wait(10) != 0
        run.assert_all_end(2)
        lines = [line for line in run.stderr.splitlines() if line.startswith("commhook train:")]
        assert len(lines) == 1
        # torchrun may end rank 0 before it notices.
        ends = ("lost another rank: ", "stopped by SIGTERM")
        assert lines[0].startswith(tuple(f"commhook train: rank 0 {end}" for end in ends))


def test_under_torchrun_sigterm_saves_and_ends_in_order(tmp_path: Path) -> None:
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    files = ("--out", tmp_path / "out", "--save", tmp_path / "c.pt")
    train = ("-m", "torch_commhook", "train", *TINY, *_LONG, *files)
    with TrainProcess(*arguments, *train, folder=tmp_path) as run:
        run.wait_for_steps(tmp_path / "out" / "metrics.jsonl")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() != 0
        run.assert_all_end(2)
    assert (tmp_path / "c.pt").exists() and (tmp_path / "out" / "summary.json").exists()
