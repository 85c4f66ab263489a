"""Compares measurements of ``commhook bench`` with links of given rates and round trips.

``python benchmarks/bench_measured_link.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab_bench import congestion_control, finish, rate_argument
from machine import FOLDER, as_lines, environment
from netlab import Lab, LabError, format_rate, parse_rate

from torch_commhook.planning import LinkFile

RESULT = FOLDER / "results" / "bench_measured_link.json"
#: The allowed deviation of a rate or a round trip, as a share of the true value.
MOST_OFF = 0.10
#: The allowed deviation of a round trip in milliseconds for each host, if that is more. Messages
#: take some time in the hosts, which all share this machine's processors.
MOST_LONGER_MS = 0.5
RATES = ("100mbit", "200mbit", "1gbit")
ROUND_TRIPS_MS = (0.0, 10.0, 50.0)
#: The most bits per second of more than two hosts' links together: this machine carries them all.
MOST_CARRIED = 10**9
HOSTS = (2, 4, 8)
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Case:
    """Links to measure.

    Attributes:
        hosts: the number of hosts, each with a link and a rank.
        rate: the links' rate, each way, in bits per second.
        round_trip_ms: the round trip between two hosts, in milliseconds.
    """

    hosts: int
    rate: int
    round_trip_ms: float


@dataclass(frozen=True)
class Row(Case):
    """The measurements of links.

    Attributes:
        measured_rates: the rate of each run, in bits per second.
        measured_round_trips_ms: the round trip of each run, in milliseconds.
    """

    measured_rates: list[float]
    measured_round_trips_ms: list[float]

    @property
    def rate_off(self) -> float:
        """The largest deviation of a rate, as a share of the true rate."""
        return max((found / self.rate - 1 for found in self.measured_rates), key=abs)

    @property
    def round_trip_off_ms(self) -> float:
        """The largest deviation of a round trip, in milliseconds."""
        return max((found - self.round_trip_ms for found in self.measured_round_trips_ms), key=abs)

    @property
    def holds(self) -> bool:
        """Whether all deviations are small enough."""
        most = max(MOST_OFF * self.round_trip_ms, MOST_LONGER_MS * self.hosts)
        return abs(self.rate_off) <= MOST_OFF and abs(self.round_trip_off_ms) <= most


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All links, those of two hosts first."""
    for hosts in options.hosts:
        for rate in options.rates:
            if hosts > 2 and hosts * rate > MOST_CARRIED:
                continue
            for round_trip in options.round_trips:
                yield Case(hosts, rate, round_trip)


def measure(case: Case, options: argparse.Namespace) -> Row:
    """Run ``bench`` over links several times, with new hosts each time.

    Raises:
        LabError: this machine cannot make the hosts, or a rank failed and has printed the reason.
    """
    found = [_run(case, options.seconds) for _ in range(options.rounds)]
    rates = [link.bits_per_second for link in found]
    return Row(
        **asdict(case),
        measured_rates=rates,
        measured_round_trips_ms=[2e3 * link.delay_seconds for link in found],
    )


def _run(case: Case, seconds: float) -> Any:
    delay = case.round_trip_ms / 2e3 or None
    with tempfile.TemporaryDirectory() as folder, Lab(case.hosts, case.rate, delay=delay) as lab:
        out = Path(folder) / "link.json"
        command = [sys.executable, "-m", "torch_commhook", "bench", "--parts", "link"]
        command += ["--threads", "1", "--seconds", f"{seconds:g}", "--out", str(out)]
        status = lab.run(command, timeout=_LIMIT_SECONDS, output=_print_errors)
        if status != 0:
            raise LabError(f"bench_measured_link: bench ended with exit status {status}")
        return LinkFile.read(out).link


def _print_errors(rank: int, is_error: bool, line: bytes) -> None:
    """Print errors of bench only: not its tables, and not c10d's warning of hosts without names."""
    if is_error and b"[W" not in line[:4]:
        print(f"[{rank}] {line.decode(errors='replace').rstrip()}", file=sys.stderr)


def run(options: argparse.Namespace) -> list[Row]:
    """Measure all links. Prints and stores each at once, so that a run can end early."""
    print("| hosts | rate | measured | round trip | measured | near |")
    print("|---|---|---|---|---|---|")
    rows = []
    for case in cases(options):
        rows.append(measure(case, options))
        print("| " + " | ".join(cells(asdict(rows[-1]))) + " |", flush=True)
        store(rows, options)
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a stored row in the table."""
    found = Row(**{name: row[name] for name in Row.__dataclass_fields__})
    rates = [f"{rate / 1e6:.1f}" for rate in found.measured_rates]
    trips = [f"{trip:.2f}" for trip in found.measured_round_trips_ms]
    return [
        str(found.hosts),
        format_rate(found.rate),
        f"{', '.join(rates)} Mbit/s ({found.rate_off:+.1%})",
        f"{found.round_trip_ms:g} ms",
        f"{', '.join(trips)} ms ({found.round_trip_off_ms:+.2f} ms)",
        "yes" if found.holds else "**no**",
    ]


def store(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write the rows measured so far."""
    document = {
        "name": "bench_measured_link",
        "environment": {**environment("cpu"), "congestion_control": congestion_control()},
        "options": {"seconds": options.seconds, "rounds": options.rounds},
        "rows": [asdict(row) for row in rows],
    }
    options.out.write_text(as_lines(document))


def judge(rows: Sequence[Row]) -> int:
    """Print the number of links that hold. Returns the exit status: 1 if one does not hold."""
    right = sum(row.holds for row in rows)
    print(f"{right} of {len(rows)} links are measured within the allowed deviations.")
    return 0 if right == len(rows) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--hosts",
        type=int,
        nargs="+",
        default=list(HOSTS),
        help="numbers of hosts (default: 2 4 8)",
    )
    add(
        "--rates",
        type=rate_argument,
        nargs="+",
        default=[parse_rate(rate) for rate in RATES],
        help="rates of the links, each way; with more than two hosts, only those of at most "
        f"1 Gbit/s for all hosts together (default: {' '.join(RATES)})",
    )
    add(
        "--round-trips",
        type=float,
        nargs="+",
        default=list(ROUND_TRIPS_MS),
        metavar="MS",
        help="round trips of the links (default: 0 10 50)",
    )
    add("--seconds", type=float, default=10.0, help="time of bench on each link (default: 10)")
    add("--rounds", type=int, default=2, help="runs on each link (default: 2)")
    add("--out", type=Path, default=RESULT, metavar="FILE", help="where to store the results")
    options = parser.parse_args(arguments)
    return finish("bench_measured_link", lambda: run(options), judge)


if __name__ == "__main__":
    sys.exit(main())
