"""Eight ranks, of which one after another is killed, stopped or cut off, and comes back.

``python benchmarks/bench_elastic.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import elastic_rank
import torch
from elastic_figures import (
    Line,
    Log,
    common_step_after,
    join_seconds,
    other_bits,
    out_of_order,
    seconds_of_other_changes,
    step_times,
    steps_per_second,
    usual_step,
)
from elastic_rank import Plan
from lab_bench import check_hooks, finish, rate_argument
from machine import FOLDER, environment
from netlab import Lab, LabError, parse_rate
from netlab.lab import INTERFACE

from torch_commhook.cli.text_data import TextData, held_out_windows, read_text, split_text

RESULTS = FOLDER / "results" / "bench_elastic.json"
#: Of the steps per second of ranks that nothing happens to.
KEPT_AT_LEAST = 0.977
#: Of the loss of an undisturbed run.
LOSS_WITHIN = 0.01
KINDS = ("kill", "stop", "cut")
#: Two hosts that cannot reach each other, though both reach the store.
APART = "apart"
_STORE_PORT = 29400
#: No new step for so long is a hang.
_HANG = 60.0
#: A rank that the others have left out has so long to notice that, when it can.
_NOTICES_WITHIN = 30.0
_SETTLES = 1.0  # after a rank's first step, the others may still be writing that down
_POLL = 0.02
_COUNTED_FROM = 20  # the steps before are a warm-up
_TEXT_BYTES = 16_000_000


class HangError(LabError):
    """No rank has done a step for too long."""


@dataclass
class Process:
    """A rank's process.

    Attributes:
        number: that no other process of the training has.
        host: on which it runs.
        pid: its process id.
        log: its steps, as far as they have been read.
        has_ended: whether it has.
    """

    number: int
    host: int
    pid: int
    log: Log
    has_ended: bool = False
    read: int = 0  # bytes of its log


@dataclass
class Fault:
    """What has happened to a rank.

    Attributes:
        kind: one of ``KINDS``, or ``APART``.
        host: the rank's.
        at: seconds since the training's first step.
        held: seconds for which it was stopped or cut off.
        lost: seconds from the fault to the end of the next common step; None if there was none.
        said: by which error its process has ended; empty where it was killed.
        noticed: seconds from the end of the fault to that of the process.
        away: seconds from the fault to its new process's first step.
        joining: seconds by which that step and the one before took longer than usual.
    """

    kind: str
    host: int
    at: float
    held: float = 0.0
    lost: float | None = None
    said: str = ""
    noticed: float | None = None
    away: float | None = None
    joining: float | None = None


class Training:
    """The processes of one training, on the hosts of a lab.

    Args:
        lab: the hosts; the last one has the store.
        plan: of the training.
        data: to train on.
    """

    def __init__(self, lab: Lab, plan: Plan, data: TextData) -> None:
        self.lab = lab
        self.plan = plan
        self.folder = Path(plan.folder)
        self.processes: list[Process] = []
        #: Processes that have ended though nothing happened to them: host and error.
        self.unexpected: list[tuple[int, str]] = []
        self._data = data
        self._last_new = time.monotonic()
        self.folder.mkdir()

    def start(self, host: int) -> Process:
        """Start a rank on a host."""
        number = len(self.processes)
        pid = elastic_rank.start(self.plan, self._data, self.lab.namespace(host), host, number)
        process = Process(number, host, pid, Log(host))
        self.processes.append(process)
        return process

    def of_host(self, host: int) -> Process:
        """The last process of a host."""
        return [each for each in self.processes if each.host == host][-1]

    @property
    def logs(self) -> list[Log]:
        """Of all processes."""
        return [process.log for process in self.processes]

    def training(self) -> list[Process]:
        """The processes that take part."""
        return [each for each in self.processes if not each.has_ended and each.log.lines]

    def poll(self) -> None:
        """Read what is new.

        Raises:
            HangError: nothing has been, for too long.
        """
        for process in self.processes:
            if self._read(process):
                self._last_new = time.monotonic()
            if not process.has_ended:
                ended, _ = os.waitpid(process.pid, os.WNOHANG)
                process.has_ended = ended != 0
        if time.monotonic() - self._last_new > _HANG:
            self.dump()
            raise HangError(f"bench_elastic: no step for {_HANG:g} s; see {self.folder}")

    def _read(self, process: Process) -> bool:
        with suppress(FileNotFoundError):
            with elastic_rank.log_of(self.folder, process.number).open("rb") as file:
                file.seek(process.read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            process.read += len(whole)
            process.log.lines += [Line(*json.loads(line)) for line in whole.splitlines()]
            return bool(whole)
        return False

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, or for so many seconds; whether it does."""
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if condition():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)

    def said(self, process: Process) -> str:
        """How a process has ended by itself."""
        with suppress(FileNotFoundError):
            return elastic_rank.said_of(self.folder, process.number).read_text()
        return ""

    def dump(self) -> None:
        """Have all ranks write where their threads are."""
        for process in self.processes:
            if not process.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                    os.kill(process.pid, elastic_rank.DUMP_SIGNAL)
        time.sleep(2.0)

    def end_at(self, step: int) -> None:
        """Let all ranks end after a step that none has come to yet."""
        path = self.folder / elastic_rank.END
        part = path.with_name(f"{path.name}.part")
        part.write_text(str(step))
        part.replace(path)

    def restart_ended(self, spared: int | None = None) -> None:
        """Start ranks again that have ended though nothing has happened to them.

        Args:
            spared: a host whose rank is somebody else's business.
        """
        for host in range(self.plan.ranks):
            process = self.of_host(host)
            if process.has_ended and host != spared:
                said = self.said(process) or "killed"
                print(f"  host {host}: ended by itself: {said}", flush=True)
                self.unexpected.append((host, said))
                self.start(host)

    def kill_all(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if not process.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                    os.waitpid(process.pid, 0)
                process.has_ended = True


# ---- faults --------------------------------------------------------------------------------------


class Faults:
    """What happens to the ranks of a training, drawn by chance.

    Args:
        training: of which all ranks take part.
        options: the command line.
    """

    def __init__(self, training: Training, options: argparse.Namespace) -> None:
        self._training = training
        self._options = options
        self._chance = random.Random(options.seed)
        self._begun = time.monotonic()
        self.found: list[Fault] = []

    def run(self) -> None:
        """All faults, spread over the time, and then its rest."""
        options, training = self._options, self._training
        interval = options.minutes * 60 / options.faults
        for number in range(options.faults):
            at = (number + self._chance.uniform(0.05, 0.4)) * interval
            while not training.wait(lambda at=at: self._now() >= at, 1.0):
                training.restart_ended()
            kind = self._chance.choice(options.kinds)
            host = self._chance.randrange(training.plan.ranks)
            self._one(kind, host)
        while not training.wait(lambda: self._now() >= options.minutes * 60, 1.0):
            training.restart_ended()

    def _now(self) -> float:
        return time.monotonic() - self._begun

    def _one(self, kind: str, host: int) -> None:
        training, victim = self._training, self._training.of_host(host)
        members = training.training()
        fault = Fault(kind, host, round(self._now(), 3))
        self.found.append(fault)
        stays = self._chance.uniform(*self._options.held) * self._options.grace
        begun = time.monotonic()
        victim = self._do(kind, victim, stays)
        ended = time.monotonic()
        fault.host, fault.held = victim.host, round(ended - begun, 3)
        if kind != "kill":
            if not training.wait(lambda: victim.has_ended, _NOTICES_WITHIN):
                fault.said = "did not notice it"
                os.kill(victim.pid, elastic_rank.DUMP_SIGNAL)
                time.sleep(1.0)
                os.kill(victim.pid, signal.SIGKILL)
                training.wait(lambda: victim.has_ended, 5.0)
            fault.noticed = round(time.monotonic() - ended, 3)
            fault.said = fault.said or training.said(victim)
        training.wait(lambda: False, self._options.restart_after)
        others = [each for each in members if each is not victim]
        self._follow(fault, begun, others, training.start(victim.host))

    def _do(self, kind: str, victim: Process, stays: float) -> Process:
        """Do it, and undo it; gives the rank without which the others go on."""
        training = self._training
        if kind == "kill":
            os.kill(victim.pid, signal.SIGKILL)
            training.wait(lambda: victim.has_ended, 5.0)
        elif kind == "stop":
            os.kill(victim.pid, signal.SIGSTOP)
            training.wait(lambda: False, stays)
            os.kill(victim.pid, signal.SIGCONT)
        elif kind == "cut":
            training.lab.set_link(victim.host, up=False)
            training.wait(lambda: False, stays)
            training.lab.set_link(victim.host, up=True)
        else:
            other = training.of_host((victim.host + 1) % training.plan.ranks)
            with training.lab.apart(victim.host, other.host):
                training.wait(lambda: victim.has_ended or other.has_ended, _NOTICES_WITHIN)
            victim = other if other.has_ended else victim
        return victim

    def _follow(self, fault: Fault, begun: float, others: list[Process], new: Process) -> None:
        """Wait until the ranks are all there again, and measure what that took."""
        training = self._training

        def lost() -> float | None:
            logs = [each.log for each in others if not each.has_ended]
            return common_step_after(logs, begun)

        def is_back() -> bool:
            training.restart_ended(spared=fault.host)
            return lost() is not None and (bool(new.log.lines) or new.has_ended)

        training.wait(is_back, _HANG)
        common = lost()
        fault.lost = None if common is None else round(common - begun, 3)
        if new.log.lines:
            fault.away = round(new.log.lines[0].time - begun, 3)
            joined = new.log.lines[0].step
            training.wait(lambda: joined in step_times(training.logs), 5.0)
            times = step_times(training.logs)
            joining = join_seconds(new.log, training.logs, usual_step(times))
            fault.joining = None if joining is None else round(joining, 3)
        print(
            f"{len(self.found):3d}. at {fault.at:6.1f} s, {fault.kind}, host {fault.host}, "
            f"{fault.held:.1f} s: {_seconds(fault.lost)} lost, back after {_seconds(fault.away)} "
            f"({_seconds(fault.joining)} for joining) {fault.said[:100]}",
            flush=True,
        )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


# ---- runs ----------------------------------------------------------------------------------------


@contextmanager
def store_on(lab: Lab, host: int) -> Iterator[subprocess.Popen[str]]:
    """A store in a process of its own on a host."""
    command = ["ip", "netns", "exec", lab.namespace(host), sys.executable, "-m", "torch_commhook"]
    command += ["store", "--port", str(_STORE_PORT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        if "listening" not in process.stdout.readline():
            raise LabError("bench_elastic: the store does not start")
        yield process
    finally:
        process.kill()
        process.wait()


def _begin(training: Training) -> None:
    """Start all ranks, and wait until each has done some steps.

    Raises:
        LabError: one has not.
    """
    for host in range(training.plan.ranks):
        training.start(host)

    def all_train() -> bool:
        return all(
            each.log.lines and each.log.lines[-1].step >= _COUNTED_FROM
            for each in training.processes
        )

    if not training.wait(all_train, _HANG):
        said = [training.said(each) for each in training.processes]
        raise LabError(f"bench_elastic: not all ranks train: {said}; see {training.folder}")


def _finish(training: Training) -> None:
    """Wait until all ranks that are left have done the last step."""

    def all_ended() -> bool:
        return all(process.has_ended for process in training.processes)

    training.wait(all_ended, 2 * _HANG)
    training.poll()
    training.kill_all()


def _steps_done(training: Training) -> int:
    return max(each.log.lines[-1].step for each in training.processes if each.log.lines)


def undisturbed(lab: Lab, plan: Plan, data: TextData, options: argparse.Namespace) -> Training:
    """Train with nothing happening: so fast as is measured, and then as fast as it goes."""
    training = Training(lab, plan, data)
    try:
        _begin(training)
        training.wait(lambda: False, options.calm_minutes * 60)
        rate = steps_per_second(step_times(training.logs), _COUNTED_FROM)
        # The next copy that both runs have is that of the last step that this one has.
        wanted = options.loss_steps or int(rate * options.minutes * 60)
        last = wanted + 2 * _COUNTED_FROM + plan.every
        training.end_at(max(last, _steps_done(training) + 2 * _COUNTED_FROM))
        (training.folder / elastic_rank.FREE).touch()
        training.wait(lambda: all(each.has_ended for each in training.processes), 3600.0)
        _finish(training)
    finally:
        training.kill_all()
    return training


def disturbed(
    lab: Lab, plan: Plan, data: TextData, options: argparse.Namespace
) -> tuple[Training, list[Fault], float, float]:
    """Train with faults; gives the beginning of the time that counts, too, and its seconds."""
    training = Training(lab, plan, data)
    try:
        _begin(training)
        faults = Faults(training, options)
        begun = time.monotonic()
        faults.run()
        seconds = time.monotonic() - begun
        training.end_at(_steps_done(training) + 2 * _COUNTED_FROM)
        _finish(training)
    finally:
        training.kill_all()
    return training, faults.found, begun, seconds


def held_out_losses(plan: Plan, data: TextData) -> dict[int, float]:
    """The loss on held-out text of each copy of the parameters, by its step."""
    windows = held_out_windows(data, rank=0, world_size=1, seq=plan.seq)
    model = elastic_rank.model_of(plan)
    losses = {}
    for path in Path(plan.folder).glob("parameters-*.pt"):
        model.load_state_dict(torch.load(path))
        with torch.no_grad():
            loss = model(windows[:, :-1], windows[:, 1:])
        losses[int(path.stem.partition("-")[2])] = float(loss)
    return dict(sorted(losses.items()))


def rates_of(
    times: dict[int, float], begun: float, seconds: float, faults: Sequence[Fault]
) -> tuple[float, float]:
    """Steps per second over the time that counts, and over its stretches without a fault.

    Args:
        times: of all steps.
        begun: when that time began.
        seconds: how long it was.
        faults: in it. A stretch begins when the lost rank has done a step again.
    """
    within = {step: t - begun for step, t in times.items() if 0 <= t - begun <= seconds}
    quiet_steps, quiet_seconds, since = 0, 0.0, 0.0
    for until, then in [(each.at, each.at + (each.away or _HANG)) for each in faults] + [
        (seconds, seconds)
    ]:
        stretch = [t for t in within.values() if since <= t <= until]
        if len(stretch) > 1:
            quiet_steps += len(stretch) - 1
            quiet_seconds += stretch[-1] - stretch[0]
        since = then
    return steps_per_second(within), quiet_steps / quiet_seconds if quiet_seconds else 0.0


def figures_of(
    faults: Sequence[Fault],
    seconds: float,
    rates: tuple[float, float, float],
    losses: tuple[dict[int, float], dict[int, float]],
    training: Training,
    begun: float,
) -> dict[str, Any]:
    """What is measured, and whether it is good enough.

    Args:
        faults: all of them.
        seconds: of the disturbed run.
        rates: steps per second: undisturbed, disturbed, and in the stretches without a fault.
        losses: on held-out text, undisturbed and disturbed.
        training: the disturbed one.
        begun: when the time that counts began.
    """
    episodes = [(0.0, begun)]  # the beginning, and faults with all that follows from them
    episodes += [
        (begun + each.at, begun + each.at + (each.away or _HANG) + _SETTLES) for each in faults
    ]
    usual = usual_step(step_times(training.logs))
    other = seconds_of_other_changes(training.logs, episodes, usual)
    lost = sum(fault.lost or 0.0 for fault in faults)
    joining = sum(fault.joining or 0.0 for fault in faults)
    common = sorted(losses[0].keys() & losses[1].keys())
    step = common[-1] if common else None
    apart = abs(losses[1][step] / losses[0][step] - 1) if step is not None else None
    wrong = other_bits(training.logs)
    kept = 1 - (lost + joining + other) / seconds
    never = [fault for fault in faults if fault.lost is None or fault.away is None]
    return {
        "seconds": round(seconds, 1),
        "seconds_lost": round(lost, 2),
        "seconds_joining": round(joining, 2),
        "seconds_lost_without_a_fault": round(other, 2),
        "kept": round(kept, 5),
        "steps_per_second_undisturbed": round(rates[0], 4),
        "steps_per_second": round(rates[1], 4),
        "steps_per_second_between_faults": round(rates[2], 4),
        "ratio_to_undisturbed": round(rates[1] / rates[0], 5),
        "ratio_to_between_faults": round(rates[1] / rates[2], 5),
        "loss_step": step,
        "loss_undisturbed": None if step is None else losses[0][step],
        "loss": None if step is None else losses[1][step],
        "loss_apart_by": apart,
        "steps_with_other_bits": len(wrong),
        "steps_out_of_order": out_of_order(training.logs),
        "faults_without_end": len(never),
        "unexpected_ends": training.unexpected,
        "holds": {
            "steps per second kept": kept >= KEPT_AT_LEAST,
            "loss": apart is not None and apart <= LOSS_WITHIN,
            "no hang": not never,
            "no rank with other bits": not wrong,
        },
    }


def table_of(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """For each kind of fault: how often, and the times that it took."""
    rows = []
    for kind in dict.fromkeys(fault.kind for fault in faults):
        own = [fault for fault in faults if fault.kind == kind]
        row: dict[str, Any] = {"kind": kind, "faults": len(own)}
        for name in ("lost", "joining", "noticed"):
            values = [getattr(each, name) for each in own if getattr(each, name) is not None]
            row[name] = round(statistics.median(values), 3) if values else None
            row[f"most_{name}"] = max(values, default=None)
        rows.append(row)
    return rows


def print_summary(figures: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Print the tables; whether all targets are met."""
    print("| fault | times | seconds lost: median | most | seconds of joining: median | most |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        names = ("kind", "faults", "lost", "most_lost", "joining", "most_joining")
        print(f"| {' | '.join(str(row[name]) for name in names)} |")
    for name, value in figures.items():
        if name != "holds":
            print(f"{name.replace('_', ' ')}: {value}")
    for name, holds in figures["holds"].items():
        print(f"{name}: {'ok' if holds else 'MISSED'}")
    return all(figures["holds"].values())


# ---- the command line ----------------------------------------------------------------------------


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--faults", type=int, default=60, help="default: 60")
    add("--minutes", type=float, default=30.0, help="of the run with faults (default: 30)")
    add(
        "--calm-minutes",
        type=float,
        default=5.0,
        help="over which the steps of the undisturbed run are timed; it goes on as fast as it can "
        "until it has as many as the other (default: 5)",
    )
    add(
        "--loss-steps",
        type=int,
        metavar="N",
        help="compare the losses after about so many steps (default: after all)",
    )
    add("--seed", type=int, default=1, help="of the faults (default: 1)")
    add("--kinds", nargs="+", choices=(*KINDS, APART), default=list(KINDS))
    add("--ranks", type=int, default=8, help="default: 8")
    add("--grace", type=float, default=0.7, help="as of Elastic, in seconds (default: 0.7)")
    add(
        "--held",
        type=float,
        nargs=2,
        default=(1.5, 4.0),
        metavar="X",
        help="for how many times the grace a rank is stopped or cut off, at least and at most "
        "(default: 1.5 4)",
    )
    add(
        "--restart-after",
        type=float,
        default=3.0,
        metavar="S",
        help="seconds until a new process begins, for its imports (default: 3)",
    )
    add("--pace", type=float, default=0.1, help="seconds of a step's computation (default: 0.1)")
    add("--hook", default="error_feedback(blockwise(bits=4))", help="default: %(default)s")
    add("--rate", type=rate_argument, default=parse_rate("1gbit"), help="default: 1gbit")
    add("--keep", type=Path, metavar="FOLDER", help="where to keep what the ranks write")
    add("--out", type=Path, default=RESULTS, help="where to store the results as JSON")
    parsed = parser.parse_args(arguments)
    if parsed.faults < 1 or parsed.ranks < 3:
        parser.error("--faults must be at least 1, --ranks at least 3")
    for name in ("minutes", "calm_minutes", "grace", "pace"):
        if not 0 < getattr(parsed, name) < 1e4:
            parser.error(f"argument --{name.replace('_', '-')}: must be above 0")
    check_hooks(parser, [parsed.hook], "--hook")
    return parsed


def plan_of(options: argparse.Namespace, lab: Lab, folder: Path) -> Plan:
    steps = int(options.minutes * 60 / options.pace)
    return Plan(
        folder=str(folder / "undisturbed"),
        name="undisturbed",
        store=f"{lab.address(options.ranks)}:{_STORE_PORT}",
        interface=INTERFACE,
        ranks=options.ranks,
        grace=options.grace,
        hook=options.hook,
        pace=options.pace,
        steps=steps,
        every=max(10, min(250, steps // 20)),
    )


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both trainings; what is stored of them."""
    torch.set_num_threads(1)
    where = environment("cpu")
    data = split_text(read_text(None, _TEXT_BYTES, 64), 64)
    with Lab(options.ranks + 1, options.rate) as lab, store_on(lab, options.ranks):
        plan = plan_of(options, lab, folder)
        calm = undisturbed(lab, plan, data, options)
        times = step_times(calm.logs)
        until = times[_COUNTED_FROM] + options.calm_minutes * 60
        paced = {step: when for step, when in times.items() if when <= until}
        calm_rate = steps_per_second(paced, _COUNTED_FROM)
        print(f"undisturbed: {calm_rate:.2f} steps per second, {len(times)} steps", flush=True)
        other = replace(plan, folder=str(folder / "disturbed"), name="disturbed")
        training, faults, begun, seconds = disturbed(lab, other, data, options)
    losses = held_out_losses(plan, data), held_out_losses(other, data)
    rates = rates_of(step_times(training.logs), begun, seconds, faults)
    figures = figures_of(faults, seconds, (calm_rate, *rates), losses, training, begun)
    kept = {k: v for k, v in vars(options).items() if not isinstance(v, Path) and k != "keep"}
    return {
        "name": "bench_elastic",
        "environment": where,
        "options": kept,
        "figures": figures,
        "kinds": table_of(faults),
        "faults": [asdict(fault) for fault in faults],
        "losses": {"undisturbed": losses[0], "disturbed": losses[1]},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)

    def then(found: dict[str, Any]) -> int:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        return 0 if print_summary(found["figures"], found["kinds"]) else 1

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.keep is None else options.keep
        folder.mkdir(parents=True, exist_ok=True)
        return finish("bench_elastic", lambda: run(options, folder), then)


if __name__ == "__main__":
    sys.exit(main())
