"""benchmarks/netlab: links carry no more than their rate, and nothing of a lab outlives it.

What needs no namespaces runs everywhere, ranks among it: an ``ip`` of this file's own starts them
where they are.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from netlab_hosts import LIMIT_SECONDS, left, lines_of, namespaces, transfer  # noqa: F401
from repository import ROOT
from train_processes import wait_for

from benchmarks.netlab import (
    TIMED_OUT,
    Lab,
    LabError,
    Stopped,
    format_rate,
    lab,
    parse_rate,
    remove_leftovers,
    stopped_by_signals,
    tools,
    why_impossible,
)
from benchmarks.netlab.cli import main
from benchmarks.netlab.ranks import run_ranks
from benchmarks.netlab.signals import undisturbed

PROGRAM = [sys.executable, "-m", "benchmarks.netlab"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")

# ---- rates and arguments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200mbit", 200_000_000),
        ("1gbit", 10**9),
        ("1.5Gbit", 1_500_000_000),
        (" 200 Mbit/s ", 200_000_000),
        (".5gbit", 500_000_000),
        ("64kbit", 64_000),
        ("20000bit", 20_000),
        (2e8, 200_000_000),
        (200_000_000, 200_000_000),
    ],
)
def test_rates(text: str | float, bits: int) -> None:
    assert parse_rate(text) == bits
    assert parse_rate(format_rate(bits)) == bits


@pytest.mark.parametrize(
    "rate",
    [
        *("", "200", "200mb", "200mbps", "mbit", "-1gbit", "1e3mbit", "nan", "9kbit", "2tbit"),
        *("1 2mbit", True, None, 0, -1.0, float("nan"), float("inf")),
    ],
)
def test_other_rates_are_refused(rate: str | float) -> None:
    with pytest.raises(ValueError, match=r"rate must be 10kbit to 1tbit, .*got "):
        parse_rate(rate)


def test_rates_are_written_short() -> None:
    found = [format_rate(bits) for bits in (200_000_000, 10**9, 1_500_000, 64_000)]
    assert found == ["200mbit", "1gbit", "1.5mbit", "64kbit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast", "--", "true"], "argument --rate: rate must be 10kbit to 1tbit"),
        (["--hosts", "1", "--", "true"], "hosts must be 2 to 250, got 1"),
        (["--hosts", "251", "--", "true"], "hosts must be 2 to 250, got 251"),
        (["--burst", "100", "--", "true"], "burst must be 2000 bytes"),
        (["--queue-ms", "0", "--", "true"], "queue_seconds must be 0.001 to 10 seconds, got 0"),
        (["--timeout", "0", "--", "true"], "argument --timeout: must be above 0, got 0"),
        (["--grace", "nan", "--", "true"], "argument --grace: must be above 0, got nan"),
        (["--delay", "-1", "--", "true"], "delay must be 0 to 10 seconds, got -0.001"),
        (["--delay", "nan", "--", "true"], "delay must be 0 to 10 seconds, got nan"),
        (["--delay", "1e6", "--", "true"], "delay must be 0 to 10 seconds, got 1000"),
        (["--loss", "100", "--", "true"], "loss must be at least 0 and below 1, got 1"),
        (["--loss", "-1", "--", "true"], "loss must be at least 0 and below 1, got -0.01"),
        (["--hosts", "2"], "COMMAND"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_lab_has_hosts_only_inside_of_its_block() -> None:
    outside = Lab(hosts=2, rate="1gbit")
    with pytest.raises(LabError, match="has no hosts outside of its with block"):
        outside.link_bytes()
    outside.close()


# ---- what is needed ------------------------------------------------------------------------------


def test_it_says_which_programs_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--", "true"]) == 2
    assert "needs the programs ip and tc: install iproute2" in capsys.readouterr().err


def test_it_says_which_rights_it_needs(
    monkeypatch: pytest.MonkeyPatch, fake_ip: Callable[[str], None]
) -> None:
    fake_ip("exit 0")
    monkeypatch.setattr(tools, "_effective_capabilities", lambda: ~(1 << 12))
    with pytest.raises(LabError, match=r"needs CAP_NET_ADMIN to make .* as root"):
        tools.check_prerequisites()
    monkeypatch.setattr(tools, "_effective_capabilities", lambda: 0)
    assert "CAP_NET_ADMIN and CAP_SYS_ADMIN" in str(why_impossible())


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("Error: Specified qdisc kind is unknown.", "CONFIG_NET_SCH_TBF"),
        ("Error: Unknown device type.", "CONFIG_VETH"),
        ("mount --make-shared failed: Operation not permitted", "may not make network namespaces"),
    ],
)
def test_it_says_what_the_kernel_lacks(
    said: str, meaning: str, fake_ip: Callable[[str], None]
) -> None:
    fake_ip(f"echo '{said}' >&2; exit 2")
    with pytest.raises(LabError, match=f"ip netns add x failed: {said}.*{meaning}"):
        tools.call("ip", "netns", "add", "x")


def test_a_tool_that_hangs_is_an_error(
    monkeypatch: pytest.MonkeyPatch, fake_ip: Callable[[str], None]
) -> None:
    fake_ip("exec sleep 60")
    monkeypatch.setattr(tools, "_SECONDS", 0.1)
    with pytest.raises(LabError, match="timed out"):
        tools.call("ip", "netns")


# ---- leftovers -----------------------------------------------------------------------------------


def test_only_the_hosts_of_processes_that_are_gone_are_leftovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = lab._owner(os.getpid())
    _, space, pid, started = alive.split("-")
    reused = f"netlab-{space}-{pid}-{int(started) - 1}"  # an earlier process of this number
    gone = f"netlab-{space}-{_ended_pid()}-{started}"
    elsewhere = f"netlab-{int(space) + 1}-{_ended_pid()}-{started}"
    names = [f"{owner}-0-h0" for owner in (alive, reused, gone, elsewhere)]
    names += [f"{gone}-0-switch", "netlab", "netlab-mine", f"{gone}-h0"]
    monkeypatch.setattr(lab, "_namespaces", lambda prefix: names)
    removed: list[str] = []
    monkeypatch.setattr(lab, "_remove", removed.append)
    expected = [f"{reused}-0-h0", f"{gone}-0-h0", f"{gone}-0-switch"]
    assert remove_leftovers() == expected
    assert removed == expected


def test_a_leftover_that_another_lab_removes_meanwhile_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = ["netlab-1-1-1-0-h0"]
    monkeypatch.setattr(lab, "_namespaces", lambda prefix: list(there))

    def refuse(*command: str) -> str:
        there.clear()
        raise LabError("No such file or directory")

    monkeypatch.setattr(lab, "call", refuse)
    lab._remove("netlab-1-1-1-")
    there.append("netlab-1-1-1-0-h0")
    monkeypatch.setattr(lab, "call", lambda *command: "")
    with pytest.raises(LabError, match="can't remove netlab-1-1-1-0-h0"):
        lab._remove("netlab-1-1-1-")


def _ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


# ---- signals -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def hangup_is_not_ignored() -> Iterator[None]:
    """As it is under nohup, which processes that are started from here would take over."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before or signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped, stopped_by_signals():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
    assert stopped.value.number == number
    assert signal.getsignal(number) == before


def test_what_tidies_up_is_not_disturbed() -> None:
    done = False
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
    try:
        with pytest.raises(KeyboardInterrupt), undisturbed():
            signal.raise_signal(signal.SIGINT)
            done = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert done


# ---- ranks, wherever -----------------------------------------------------------------------------


@pytest.fixture
def fake_ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put an ``ip`` and a ``tc`` that do what they are given in place of the system's."""

    def put(body: str) -> None:
        for name in ("ip", "tc"):
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/sh\n{body}\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return put


@pytest.fixture
def run_here(
    fake_ip: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Two ranks of a shell's script, in no namespace."""
    fake_ip('shift 3; exec "$@"')
    monkeypatch.chdir(tmp_path)

    def run(script: str, timeout: float | None = LIMIT_SECONDS, grace: float = 0.2) -> int:
        places = [(f"host {rank}", {**os.environ, "RANK": str(rank)}) for rank in range(2)]
        command = ["sh", "-c", script]
        return run_ranks(command, places, timeout=timeout, grace=grace, output=None)

    return run


def test_output_names_its_rank(
    run_here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("echo out of $RANK; echo no newline >&2; printf 'the end'") == 0
    printed = capsys.readouterr()
    lines = ["[0] out of 0", "[0] the end", "[1] out of 1", "[1] the end"]
    assert sorted(printed.out.splitlines()) == lines
    assert sorted(printed.err.splitlines()) == ["[0] no newline", "[1] no newline"]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("exit $RANK", 1),
        ("exit $((7 * (1 - RANK)))", 7),
        ("kill -KILL $$", 128 + 9),
        ("test $RANK = 1 && exit 3; exec sleep 60", 3),  # the other one is ended
        ("test $RANK = 0 && exit 3; sleep 0.1; exit 4", 3),
    ],
)
def test_the_status_is_that_of_the_first_that_failed(
    script: str, status: int, run_here: Callable[..., int]
) -> None:
    assert run_here(script) == status


def test_hung_ranks_are_ended_with_what_they_have_started(
    run_here: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.netlab.ranks._TERMINATE_SECONDS", 0.2)
    script = "trap '' TERM; sleep 10 & echo $! > child-$RANK; wait; touch lingered-$RANK"
    assert run_here(script, timeout=1.0) == TIMED_OUT
    for rank in range(2):
        _wait_until_ended(int((tmp_path / f"child-{rank}").read_text()))
    assert list(tmp_path.glob("lingered-*")) == []


def test_an_unknown_program_is_an_error(run_here: Callable[..., int]) -> None:
    with pytest.raises(LabError, match="there is no program does-not-exist"):
        run_ranks(["does-not-exist"], [], timeout=1.0, grace=1.0, output=None)
    with pytest.raises(ValueError, match="command must name a program"):
        run_ranks([], [], timeout=1.0, grace=1.0, output=None)


def _wait_until_ended(pid: int) -> None:
    wait_for(lambda: lab._started(pid) is None, f"process {pid} still runs")


# ---- hosts and links -----------------------------------------------------------------------------


needs_namespaces = pytest.mark.usefixtures("namespaces")


@needs_namespaces
@pytest.mark.parametrize("hosts", [2, 3])
def test_links_carry_no_more_than_their_rate_and_count_it(hosts: int) -> None:
    count = 4_000_000
    with Lab(hosts=hosts, rate="40mbit") as made:
        assert transfer(made, count)[0] < 1.3 * 40e6
        links = made.link_bytes()
        assert count <= links[1].sent < 1.1 * count
        assert links[0].sent < 0.1 * count
        # A bridge floods what it knows no port for, and may take bundles of packets apart.
        tolerance = {"rel": 0, "abs": 0} if hosts == 2 else {"rel": 0.1, "abs": 2000}
        assert links[0].received == pytest.approx(links[1].sent, **tolerance)
        assert links[1].received == pytest.approx(links[0].sent, **tolerance)
        if hosts == 3:
            assert links[2].sent + links[2].received < 0.01 * count
        made.set_rate("20mbit")
        assert transfer(made, count)[0] < 1.3 * 20e6
        assert made.link_bytes()[1].sent >= 2 * count


@needs_namespaces
def test_the_congestion_algorithm_is_the_hosts_alone() -> None:
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    before = Path(setting).read_text()
    lines: list[bytes] = []
    with Lab(hosts=2, rate="1gbit", congestion="reno") as made:
        made.run(["cat", setting], output=lambda rank, is_error, line: lines.append(line))
    assert lines == [b"reno\n"] * 2
    assert Path(setting).read_text() == before
    refused = Lab(hosts=2, rate="1gbit", congestion="none such")
    with (
        pytest.raises(LabError, match=r"congestion must be one of .*reno.* got none such"),
        refused,
    ):
        pass
    assert left() == set()


@needs_namespaces
def test_gloo_finds_its_ranks() -> None:
    script = (
        "import torch, torch.distributed as dist; dist.init_process_group('gloo');"
        "t = torch.full((3,), dist.get_rank() + 1.0); dist.all_reduce(t); print(t.tolist());"
        "dist.barrier(); dist.destroy_process_group()"
    )
    with Lab(hosts=2, rate="1gbit") as made:
        lines = lines_of(made, script)
    assert lines.count("[3.0, 3.0, 3.0]") == 2


def _reaches(made: Lab, host: int, other: int) -> bool:
    """Whether a host gets an answer of another one: here, that nobody listens."""
    script = (
        "import socket, sys; end = socket.socket(); end.settimeout(1.0);"
        f"sys.exit(end.connect_ex(({made.address(other)!r}, 9)) != {errno.ECONNREFUSED})"
    )
    command = ["ip", "netns", "exec", made.namespace(host), sys.executable, "-c", script]
    return subprocess.run(command, timeout=LIMIT_SECONDS).returncode == 0


@needs_namespaces
def test_hosts_are_cut_off_and_come_back() -> None:
    with Lab(hosts=3, rate="1gbit") as made:
        assert _reaches(made, 0, 1)
        made.set_link(1, up=False)
        assert not _reaches(made, 0, 1) and not _reaches(made, 1, 2) and _reaches(made, 0, 2)
        made.set_link(1, up=True)
        wait_for(lambda: _reaches(made, 0, 1), "host 1 does not come back")
        with made.apart(0, 1):
            assert not _reaches(made, 0, 1) and not _reaches(made, 1, 0)
            assert _reaches(made, 0, 2) and _reaches(made, 2, 1)
        assert _reaches(made, 0, 1)
    with Lab(hosts=2, rate="1gbit") as made, pytest.raises(LabError, match="more than two hosts"):
        made.set_link(0, up=False)


@needs_namespaces
def test_labs_stand_beside_each_other() -> None:
    with Lab(hosts=2, rate="1gbit") as first, Lab(hosts=3, rate="1gbit") as second:
        assert left() == {first.namespace(0), first.namespace(1)} | {
            *(second.namespace(host) for host in range(3)),
            second._switch,
        }
        run = subprocess.run([*PROGRAM, "--", "true"], cwd=ROOT, timeout=LIMIT_SECONDS)
        assert run.returncode == 0
        assert first.run(["true"]) == second.run(["true"]) == 0
    assert left() == set()


# ---- nothing stays -------------------------------------------------------------------------------


@needs_namespaces
def test_nothing_stays_after_an_exception() -> None:
    with pytest.raises(ArithmeticError), Lab(hosts=2, rate="1gbit"):
        assert len(left()) == 2
        raise ArithmeticError
    assert left() == set()


@needs_namespaces
def test_nothing_stays_where_making_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Lab, rate: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "set_rate", refuse)
    with pytest.raises(KeyboardInterrupt), Lab(hosts=3, rate="1gbit"):
        pass
    assert left() == set()


@needs_namespaces
def test_what_a_rank_leaves_behind_ends_with_its_run(tmp_path: Path) -> None:
    file = tmp_path / "left"
    script = f"test $RANK = 0 || exit 0; setsid sleep 60 > /dev/null 2>&1 & echo $! > {file}"
    with Lab(hosts=2, rate="1gbit") as made:
        assert made.run(["sh", "-c", script], timeout=LIMIT_SECONDS) == 0
        _wait_until_ended(int(file.read_text()))
    assert left() == set()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The program with two ranks that would go on for a minute, and the ranks' process ids."""
    script = f"echo $$ > {tmp_path}/$RANK.part; mv {tmp_path}/$RANK.part {tmp_path}/$RANK; sleep 60"
    process = subprocess.Popen(
        [*PROGRAM, "--", "sh", "-c", script], cwd=ROOT, text=True, stderr=subprocess.PIPE
    )
    files = [tmp_path / str(rank) for rank in range(2)]
    wait_for(
        lambda: all(file.exists() for file in files) or process.poll() is not None,
        "the ranks do not start",
    )
    with process:
        yield process, [int(file.read_text()) for file in files]
        process.kill()


Running = tuple[subprocess.Popen[str], list[int]]


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_stays_after_a_signal(number: signal.Signals, running: Running) -> None:
    process, pids = running
    process.send_signal(number)
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + number
    assert said == f"netlab: stopped by {number.name}, all ranks ended\n"
    for pid in pids:
        assert lab._started(pid) is None
    assert left(process.pid) == set()


@needs_namespaces
def test_what_was_killed_leaves_no_ranks_and_is_removed_by_the_next(running: Running) -> None:
    process, pids = running
    assert len(left(process.pid)) == 2
    process.kill()
    process.wait(LIMIT_SECONDS)
    for pid in pids:
        _wait_until_ended(pid)
    assert len(left(process.pid)) == 2
    ends: list[threading.Thread] = []  # several at once, as when a machine is back
    for _ in range(2):
        ends.append(threading.Thread(target=why_impossible))
        ends[-1].start()
    for end in ends:
        end.join()
    assert left(process.pid) == left() == set()
