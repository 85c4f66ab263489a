"""Trains with eight ranks. One after another is killed, stopped or cut off, and comes back.

``python benchmarks/bench_elastic.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import elastic_rank
import torch
from elastic_faults import APART, KINDS, Fault, Faults
from elastic_figures import (
    other_bits,
    out_of_order,
    seconds_of_other_changes,
    step_times,
    steps_per_second,
    usual_step,
)
from elastic_processes import HANG, Training
from elastic_rank import Plan
from lab_bench import check_hooks, finish, rate_argument
from machine import FOLDER, as_lines, environment
from netlab import Lab, LabError, parse_rate
from netlab.lab import INTERFACE

from torch_commhook.cli.text_model import TextData, held_out_windows, read_text, split_text

RESULTS = FOLDER / "results" / "bench_elastic.json"
#: The least steps per second with faults, as a share of those without.
KEPT_AT_LEAST = 0.977
#: The most difference to the loss of an undisturbed run, as a share.
LOSS_WITHIN = 0.01
_STORE_PORT = 29400
_SETTLES = 1.0  # after a rank's first step, the others may still be writing theirs to the log
_COUNTED_FROM = 20  # earlier steps are a warm-up
_TEXT_BYTES = 16_000_000


# ---- runs ----------------------------------------------------------------------------------------


@contextmanager
def store_on(lab: Lab, host: int) -> Iterator[subprocess.Popen[str]]:
    """A store in a separate process on a host."""
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
        LabError: a rank has not done them.
    """
    for host in range(training.plan.ranks):
        training.start(host)

    def all_train() -> bool:
        return all(
            each.log.lines and each.log.lines[-1].step >= _COUNTED_FROM
            for each in training.processes
        )

    if not training.wait(all_train, HANG):
        said = [training.said(each) for each in training.processes]
        raise LabError(f"bench_elastic: not all ranks train: {said}; see {training.folder}")


def _finish(training: Training) -> None:
    """Wait until all remaining ranks have done the last step."""

    def all_ended() -> bool:
        return all(process.has_ended for process in training.processes)

    training.wait(all_ended, 2 * HANG)
    training.poll()
    training.kill_all()


def _steps_done(training: Training) -> int:
    return max(each.log.lines[-1].step for each in training.processes if each.log.lines)


def undisturbed(lab: Lab, plan: Plan, data: TextData, options: argparse.Namespace) -> Training:
    """Train without faults: first at the measured pace, then as fast as possible."""
    training = Training(lab, plan, data)
    try:
        _begin(training)
        training.wait(lambda: False, options.calm_minutes * 60)
        rate = steps_per_second(step_times(training.logs), _COUNTED_FROM)
        # The next copy that both runs have is after this one's last step.
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
    """Train with faults; also returns the beginning of the counted time, and its seconds."""
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
    """The held-out loss of each copy of the parameters, by step."""
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
    """Steps per second over the counted time, and over its stretches without a fault.

    Args:
        times: the times of all steps.
        begun: the beginning of the counted time.
        seconds: its length.
        faults: the faults in it. A stretch begins when the lost rank has done a step again.
    """
    within = {step: t - begun for step, t in times.items() if 0 <= t - begun <= seconds}
    quiet_steps, quiet_seconds, since = 0, 0.0, 0.0
    for until, then in [(each.at, each.at + (each.away or HANG)) for each in faults] + [
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
    """The results, each with whether it meets its target.

    Args:
        faults: all faults.
        seconds: the length of the disturbed run.
        rates: steps per second: undisturbed, disturbed, and in the stretches without a fault.
        losses: on held-out text, undisturbed and disturbed.
        training: the disturbed one.
        begun: the beginning of the counted time.
    """
    episodes = [(0.0, begun)]  # the beginning, and each fault until its effects end
    episodes += [
        (begun + each.at, begun + each.at + (each.away or HANG) + _SETTLES) for each in faults
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
    """For each kind of fault: the number of faults, and their durations."""
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
    """Print the tables; returns whether all targets are met."""
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
    add("--faults", type=int, default=60, help="number of faults (default: 60)")
    add("--minutes", type=float, default=30.0, help="length of the run with faults (default: 30)")
    add(
        "--calm-minutes",
        type=float,
        default=5.0,
        help="time over which the undisturbed run's steps are timed; it then goes on as fast as "
        "possible to the other run's number of steps (default: 5)",
    )
    add(
        "--loss-steps",
        type=int,
        metavar="N",
        help="compare the losses after about so many steps (default: after all)",
    )
    add("--seed", type=int, default=1, help="seed of the faults (default: 1)")
    add("--kinds", nargs="+", choices=(*KINDS, APART), default=list(KINDS))
    add("--ranks", type=int, default=8, help="number of ranks (default: 8)")
    add("--grace", type=float, default=0.7, help="Elastic's grace, in seconds (default: 0.7)")
    add(
        "--held",
        type=float,
        nargs=2,
        default=(1.5, 4.0),
        metavar="X",
        help="how long a rank is stopped or cut off: least and greatest multiple of the grace "
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
    add(
        "--hook",
        default="error_feedback(blockwise(bits=4))",
        help="the hook (default: %(default)s)",
    )
    add(
        "--rate",
        type=rate_argument,
        default=parse_rate("1gbit"),
        help="rate of the links (default: 1gbit)",
    )
    add("--keep", type=Path, metavar="FOLDER", help="where to keep the files of the ranks")
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
    """Runs both trainings; returns the results to store."""
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
        options.out.write_text(as_lines(found))
        return 0 if print_summary(found["figures"], found["kinds"]) else 1

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.keep is None else options.keep
        folder.mkdir(parents=True, exist_ok=True)
        return finish("bench_elastic", lambda: run(options, folder), then)


if __name__ == "__main__":
    sys.exit(main())
