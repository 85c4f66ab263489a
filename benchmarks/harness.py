"""Runs, names and stores measurements, in the same way for every bench_*.py in this folder.

A benchmark makes jobs, including baselines, and measures those that it compares together.
:func:`measure` runs all of them in turn, round after round, so that each figure and its baseline
come from the same minutes of the same machine. :class:`Report` prints the table and stores it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from machine import FOLDER, as_lines, environment, processors

#: A sample lasts at least this long; a short job is called several times for one.
SAMPLE_SECONDS = 2e-3
MIN_ROUNDS = 5
#: On CUDA, seconds that the device waits for each call of a sample: more than the host takes.
WAIT_FOR_CALL = 150e-6
#: On CUDA, the most calls in a sample: their launches must fit into the device's queue.
MOST_CALLS_ON_CUDA = 50
CYCLES_OF_A_SECOND = 2e9
#: The most copies of data that take turns: many small tensors take longer to make than to measure.
MOST_COPIES = 100

#: The job that measures the memory, if there is one.
COPY = "plain copy"


# ---- jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Against:
    """A job's baseline, and its target if there is one.

    The ratio compares speeds: bytes per second if both jobs give their bytes, else calls per
    second. With ``at_most``, ``beyond`` or ``times`` it compares times, after subtracting the time
    of the job ``beyond``: a hook's cost is its time less the time of training without a hook.
    """

    baseline: str
    at_least: float | None = None
    at_most: float | None = None
    beyond: str | None = None
    times: bool = False

    @property
    def of_times(self) -> bool:
        """Whether the ratio compares times."""
        return self.times or self.at_most is not None or self.beyond is not None


@dataclass(frozen=True)
class Job:
    """Something to time.

    Attributes:
        name: unique among jobs that are measured together.
        call: the timed function.
        bytes_moved: the fewest bytes that one call must read and write, for GB/s.
        against: its baseline; None for a baseline.
        prepare: called before each sample, untimed; a sample is then a single call.
    """

    name: str
    call: Callable[[], object]
    bytes_moved: int | None = None
    against: Against | None = None
    prepare: Callable[[], object] | None = None


def rotated(copies: Sequence[Sequence[Job]]) -> list[Job]:
    """The same jobs over several copies of their data, which take turns from call to call.

    So no cache holds the data of the call before.
    """
    if len(copies) == 1:
        return list(copies[0])
    jobs = []
    for same in zip(*copies, strict=True):
        calls = itertools.cycle([job.call for job in same])
        jobs.append(replace(same[0], call=lambda calls=calls: next(calls)()))
    return jobs


def copies_of(device: torch.device, nbytes: int) -> int:
    """The number of copies of data that exceed a device's cache.

    On the CPU one copy: hooks work there on data that has just been written.
    """
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_COPIES, -(-4 * cache // max(nbytes, 1))))


@dataclass
class Samples:
    """The times of one job, in seconds per call, one for each round.

    ``details`` are further figures of the job; each is a column of the table.
    """

    calls: int = 1
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    details: dict[str, float] = field(default_factory=dict)


def measure(
    jobs: Sequence[Job], *, rounds: int, seconds: float, device: torch.device
) -> dict[str, Samples]:
    """Runs the jobs in turn, in a different order each round.

    Args:
        rounds: the number of samples of each job, unless ``seconds`` end them (after 5 rounds).
        seconds: when to stop.
        device: on ``cuda``, times are measured between events on the current stream, and
            ``cpu_seconds`` is the CPU's time for the calls.
    """
    samples = {job.name: Samples() for job in jobs}
    if len(samples) != len(jobs):
        raise ValueError(f"jobs must have different names, got {[job.name for job in jobs]}")
    for job in jobs:  # warms up, and chooses the calls of a sample
        time_once(job, 1, device)
        if job.prepare is None:
            took, _ = time_once(job, 1, device)
            most = MOST_CALLS_ON_CUDA if device.type == "cuda" else 1000
            samples[job.name].calls = max(1, min(most, int(SAMPLE_SECONDS / max(took, 1e-7))))
    order = list(jobs)
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    for number in range(rounds):
        if number >= MIN_ROUNDS and time.perf_counter() > end:
            break
        shuffle(order)
        for job in order:
            sample = samples[job.name]
            took, cpu = time_once(job, sample.calls, device)
            sample.seconds.append(took)
            if cpu is not None:
                sample.cpu_seconds.append(cpu)
    return samples


def time_once(job: Job, calls: int, device: torch.device) -> tuple[float, float | None]:
    """Seconds per call; on CUDA the device's and the CPU's."""
    if job.prepare is not None:
        job.prepare()
    call = job.call
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls, None
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    # The calls queue behind a waiting kernel, so that the device never waits for the host.
    torch.cuda._sleep(int(CYCLES_OF_A_SECOND * WAIT_FOR_CALL * calls))
    start = time.perf_counter()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    cpu = (time.perf_counter() - start) / calls
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / calls, cpu


# ---- results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The stored figures of one job."""

    group: str
    job: str
    threads: int
    seconds: float  # the median
    first_quartile: float
    third_quartile: float
    samples: int
    calls_per_sample: int
    cpu_seconds: float | None
    bytes_moved: int | None
    gigabytes_per_second: float | None
    baseline: str | None
    ratio: float | None
    target: str | None
    holds: bool | None
    details: dict[str, float] = field(default_factory=dict)


def rows_of(group: str, jobs: Sequence[Job], samples: dict[str, Samples]) -> list[Row]:
    """The figures of jobs that were measured together."""
    medians = {name: statistics.median(sample.seconds) for name, sample in samples.items()}
    # In bytes, or in calls if a job gives no bytes.
    speeds = {job.name: (job.bytes_moved or 1) / medians[job.name] for job in jobs}
    rows = []
    for job in jobs:
        sample, against = samples[job.name], job.against
        ratio = target = holds = None
        if against is not None and against.of_times:
            alone = medians[against.beyond] if against.beyond is not None else 0.0
            ratio = (medians[job.name] - alone) / (medians[against.baseline] - alone)
            if against.at_most is not None:
                target, holds = f"<= {against.at_most:g}", ratio <= against.at_most
        elif against is not None:
            ratio = speeds[job.name] / speeds[against.baseline]
            if against.at_least is not None:
                target, holds = f">= {against.at_least:g}", ratio >= against.at_least
        ordered = sorted(sample.seconds)
        cpu = statistics.median(sample.cpu_seconds) if sample.cpu_seconds else None
        rows.append(
            Row(
                group=group,
                job=job.name,
                threads=torch.get_num_threads(),
                seconds=medians[job.name],
                first_quartile=ordered[len(ordered) // 4],
                third_quartile=ordered[(3 * len(ordered)) // 4],
                samples=len(ordered),
                calls_per_sample=sample.calls,
                cpu_seconds=cpu,
                bytes_moved=job.bytes_moved,
                gigabytes_per_second=speeds[job.name] / 1e9 if job.bytes_moved else None,
                baseline=against.baseline if against is not None else None,
                ratio=ratio,
                target=target,
                holds=holds,
                details=sample.details,
            )
        )
    return rows


class Report:
    """Collects rows, prints each group as a table, and stores all with the machine's data.

    Args:
        name: the benchmark's, and that of its file in ``results``.
        options: the parsed command line.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.environment = environment(options.device)
        load = self.environment["load_average"]
        if load is not None and load > 0.5:
            self.note(f"The machine is not calm (load average {load:.1f}).")

    def note(self, text: str) -> None:
        """Prints a remark and stores it with the figures."""
        self.notes.append(text)
        print(text, file=sys.stderr)

    def run(self, group: str, jobs: Sequence[Job], title: str) -> None:
        """Measures jobs together, prints their table and keeps their rows."""
        samples = measure(
            jobs,
            rounds=self.options.rounds,
            seconds=self.options.seconds,
            device=torch.device(self.options.device),
        )
        self.add(group, jobs, samples, title)

    def add(self, group: str, jobs: Sequence[Job], samples: dict[str, Samples], title: str) -> None:
        """Prints the table of jobs that were measured elsewhere, and keeps their rows."""
        rows = rows_of(group, jobs, samples)
        self.rows += rows
        print_table(title, rows)
        if self.options.out is not None:  # so that results are not lost if the next job fails
            self._store()

    def finish(self) -> None:
        """Prints the missed targets, and stores the results.

        Ends the program if nothing was measured: earlier results stay.
        """
        if not self.rows:
            sys.exit(f"{self.name}: nothing was measured")
        checked = [row for row in self.rows if row.holds is not None]
        missed = [row for row in checked if not row.holds]
        if checked:
            print(f"{len(checked) - len(missed)} of {len(checked)} targets hold.")
        for row in missed:
            print(f"  missed: {row.group}, {row.job}: {row.ratio:.3f}, target {row.target}")
        self._store()

    def _store(self) -> None:
        """Writes the file whole or not at all, since others may read it at any time."""
        path = self.options.out
        if path is None and not self.options.quick:
            path = FOLDER / "results" / f"{self.name}.json"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The places of files do not affect the figures.
            options = {k: v for k, v in vars(self.options).items() if not isinstance(v, Path)}
            options.pop("out", None)
            document = {
                "name": self.name,
                "environment": self.environment,
                "options": options,
                "notes": self.notes,
                "rows": [asdict(row) for row in self.rows],
            }
            part = path.with_name(f"{path.name}.part")
            part.write_text(as_lines(document))
            part.replace(path)


# ---- the same in several processes ---------------------------------------------------------------


def merged(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """One row for each job, from the same jobs measured in several processes.

    Times, speeds and ratios are medians over the processes, with the least and the greatest ratio.
    """
    rows = []
    for same in zip(*runs, strict=True):
        first = same[0]
        if any((row.group, row.job) != (first.group, first.job) for row in same):
            raise ValueError("the processes measured other jobs")

        def middle(name: str, same: Sequence[Row] = same) -> float | None:
            values = [getattr(row, name) for row in same]
            return None if None in values else statistics.median(values)

        ratio, holds = middle("ratio"), None
        details = {
            name: statistics.median(row.details[name] for row in same) for name in first.details
        }
        if ratio is not None:
            details["least"] = min(row.ratio for row in same)
            details["most"] = max(row.ratio for row in same)
        if ratio is not None and first.target is not None:
            relation, bound = first.target.split()
            holds = ratio >= float(bound) if relation == ">=" else ratio <= float(bound)
        rows.append(
            replace(
                first,
                seconds=middle("seconds"),
                first_quartile=middle("first_quartile"),
                third_quartile=middle("third_quartile"),
                samples=sum(row.samples for row in same),
                cpu_seconds=middle("cpu_seconds"),
                gigabytes_per_second=middle("gigabytes_per_second"),
                ratio=ratio,
                holds=holds,
                details=details,
            )
        )
    return rows


def run_in_processes(report: Report, arguments: Sequence[str] | None, count: int) -> None:
    """Runs the benchmark ``count`` times, one after another, each in a separate process.

    The speed of memory depends on the places of a process's pages. It varies more between processes
    than between the rounds of one. Each process prints its tables to stderr; ``report`` gets the
    rows of :func:`merged`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            out = Path(folder) / f"{i}.json"
            command = [sys.executable, sys.argv[0], *arguments, "--processes=1", f"--out={out}"]
            subprocess.run(command, check=True, stdout=sys.stderr)
            runs.append([Row(**row) for row in json.loads(out.read_text())["rows"]])
    report.rows += merged(runs)
    for group in dict.fromkeys(row.group for row in report.rows):
        same = [row for row in report.rows if row.group == group]
        print_table(f"{group}, medians of {count} processes", same)


# ---- tables --------------------------------------------------------------------------------------

COLUMNS = ("job", "time", "GB/s", "ratio", "to", "target", "holds")


def cells(row: Row, details: Sequence[str]) -> tuple[str, ...]:
    speed = row.gigabytes_per_second
    took = duration(row.seconds)
    if row.cpu_seconds is not None:
        took += f" (CPU {duration(row.cpu_seconds)})"
    return (
        row.job,
        took,
        "" if speed is None else f"{speed:.1f}",
        *(f"{row.details[name]:.3g}" if name in row.details else "" for name in details),
        "" if row.ratio is None else f"{row.ratio:.3f}",
        row.baseline or "",
        row.target or "",
        "" if row.holds is None else ("yes" if row.holds else "NO"),
    )


def duration(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Prints with rich if it is installed, else as plain columns."""
    details = list(dict.fromkeys(name for row in rows for name in row.details))
    columns = (*COLUMNS[:3], *details, *COLUMNS[3:])
    lines = [cells(row, details) for row in rows]
    told = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    columns = tuple(columns[i] for i in told)
    lines = [tuple(line[i] for i in told) for line in lines]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        widths = [max(len(line[i]) for line in [columns, *lines]) for i in range(len(columns))]
        for line in [columns, *lines]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        print()
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_text = column in ("job", "to", "target", "holds")
        # A long job's name is wrapped, to leave room for the figures.
        wraps = column == "job"
        table.add_column(
            column,
            justify="left" if is_text else "right",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    for row, line in zip(rows, lines, strict=True):
        style = None if row.holds is None else ("green" if row.holds else "red")
        table.add_row(*line, style=style)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)


# ---- the command line ----------------------------------------------------------------------------


def parser(description: str) -> argparse.ArgumentParser:
    """The options of all benchmarks. Read them with :func:`parse`."""
    options = argparse.ArgumentParser(description=description)
    add = options.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="the tensors' device")
    add("--threads", type=int, nargs="+", metavar="N", help="CPU threads, one table for each")
    add("--rounds", type=int, default=40, help="samples of each job (default: 40)")
    add(
        "--seconds",
        type=float,
        default=60.0,
        help=f"end of a table's rounds, after {MIN_ROUNDS} of them (default: 60)",
    )
    add("--out", type=Path, metavar="FILE", help="where to store the results as JSON")
    add(
        "--quick",
        action="store_true",
        help="few rounds and cases, to check that it works; stored only with --out",
    )
    return options


def parse(options: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with --quick and the defaults applied."""
    parsed = options.parse_args(arguments)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        options.error("--device cuda: no CUDA device is available")
    if parsed.threads is None:
        parsed.threads = [1, 2] if parsed.device == "cpu" and processors() > 1 else [1]
    if min(parsed.threads) < 1 or parsed.rounds < 1:
        options.error("--threads and --rounds must be at least 1")
    if parsed.quick:
        parsed.rounds = min(parsed.rounds, MIN_ROUNDS)
        parsed.seconds = min(parsed.seconds, 5.0)
    return parsed
