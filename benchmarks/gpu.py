"""What only a GPU can show: the tests marked ``cuda``, sanitizers over the kernels, the benchmarks.

    python benchmarks/gpu.py [--minutes 8.5] [--only build tests ...] [--commit HASH]

Builds in place with the Python, torch and nvcc that are there, and needs no network. Stores
``results/gpu/<card>-<date>.json`` and ``.md``, prints a short table last, and exits with 1 if a
part failed. A part that fails does not keep the others from running. Logs go to ``build/gpu``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import COPY
from machine import FOLDER, environment
from model_shapes import ONE_BUCKET

ROOT = FOLDER.parent
LOGS = ROOT / "build" / "gpu"
PARTS = ("build", "tests", "sanitizers", "benchmarks")
TOOLS = ("memcheck", "racecheck", "initcheck")

#: Seconds that a part may take, if the parts after it are left theirs.
LIMITS = {"build": 300.0, "tests": 200.0, "sanitizers": 200.0, "benchmarks": 240.0}
#: Seconds that are kept for the benchmarks.
RESERVE = 150.0
#: Seconds of the CPU for a call on a bucket of 25 MiB.
MOST_CPU_SECONDS = 15e-6


@dataclass
class Outcome:
    """What became of a part, or of one of several commands of it.

    Attributes:
        passed: None where it could not run here.
        text: a line on it.
    """

    name: str
    passed: bool | None
    seconds: float
    text: str

    @property
    def word(self) -> str:
        return {True: "ok", False: "FAILED", None: "not run"}[self.passed]


# ---- commands ------------------------------------------------------------------------------------


class Command:
    """A command in a process group of its own, whose output goes to a log."""

    def __init__(self, name: str, command: Sequence[str | Path], **variables: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.path = LOGS / f"{name}.log"
        self.begun = time.monotonic()
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        with self.path.open("w") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables},
            )

    def wait(self, seconds: float) -> int | None:
        """The exit status; None if it had to be killed. Nothing of it is left running."""
        try:
            status: int | None = self.process.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            status = None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.seconds = time.monotonic() - self.begun
        return status

    def log(self) -> str:
        return self.path.read_text(errors="replace")

    def last_line(self) -> str:
        lines = [line.strip() for line in self.log().splitlines() if line.strip()]
        return lines[-1][-200:] if lines else "no output"

    def outcome(self, seconds: float, name: str | None = None) -> Outcome:
        """Waits; the last line of the log tells how it went."""
        status = self.wait(seconds)
        text = self.last_line()
        if status is None:
            text = f"ended after {self.seconds:.0f} s: {text}"
        elif status != 0:
            text = f"exit status {status}: {text}"
        return Outcome(name or self.name, status == 0, self.seconds, text)


# ---- parts ---------------------------------------------------------------------------------------


def build(seconds: float) -> Outcome:
    """In place, for this card alone."""
    major, minor = torch.cuda.get_device_capability()
    command = Command(
        "build",
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        COMMHOOK_CUDA="1",
        TORCH_CUDA_ARCH_LIST=f"{major}.{minor}",
        MAX_JOBS=str(len(os.sched_getaffinity(0))),
    )
    return command.outcome(seconds)


def cuda_tests() -> list[str]:
    """The files with tests marked ``cuda``: others need packages that may not be there."""
    found = (ROOT / "tests" / "cuda").glob("test_*.py")
    return sorted(str(file.relative_to(ROOT)) for file in found)


def begin_tests() -> Command:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "cuda",
        "-q",
        "-rfEs",
        "-p",
        "no:cacheprovider",
    ]
    if importlib.util.find_spec("xdist") is not None:
        command += ["--numprocesses", "4", "--dist", "loadfile"]
    return Command("tests", [*command, *cuda_tests()])


def tests_outcome(command: Command, seconds: float) -> Outcome:
    """Not passed where all were skipped, as those of a build without CUDA kernels."""
    outcome = command.outcome(seconds)
    if outcome.passed and re.search(r"\b\d+ passed", outcome.text) is None:
        outcome.passed = False
    return outcome


def find_sanitizer() -> str | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        path = Path(os.environ.get(variable, ""), "bin", "compute-sanitizer")
        if variable in os.environ and os.access(path, os.X_OK):
            return str(path)
    found = shutil.which("compute-sanitizer")
    if found is None and os.access("/usr/local/cuda/bin/compute-sanitizer", os.X_OK):
        found = "/usr/local/cuda/bin/compute-sanitizer"
    return found


def begin_sanitizers() -> list[Command]:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return []
    return [
        Command(
            tool,
            # What torch asks the driver for at its start may be missing, and that is no error.
            [
                *(sanitizer, "--tool", tool),
                *(("--report-api-errors", "no") if tool == "memcheck" else ()),
                *(sys.executable, "tests/long_runs/cuda_sanitized.py"),
            ],
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",  # each tensor's bounds are those of its memory
        )
        for tool in TOOLS
    ]


def sanitizer_outcome(command: Command, seconds: float) -> Outcome:
    """Passed only where the program ended and the tool's own summary counts nothing."""
    status = command.wait(seconds)
    log = command.log()
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", log)
    if re.search(r"Device not supported|not supported on this device", log):
        return Outcome(command.name, None, command.seconds, "refuses this device")
    if status is None:
        text = f"ended after {command.seconds:.0f} s: {command.last_line()}"
        return Outcome(command.name, False, command.seconds, text)
    is_clean = status == 0 and bool(summary) and re.search(r": 0 (errors|hazards)", summary[-1])
    text = summary[-1] if summary else command.last_line()
    return Outcome(command.name, bool(is_clean), command.seconds, text)


def run_benchmarks(seconds: float) -> tuple[list[Outcome], dict[str, Any]]:
    """The bucket operators and the codecs, one after the other."""
    outcomes, documents = [], {}
    end = time.monotonic() + seconds
    for name, script, table_seconds in (
        ("bucket", "bench_bucket.py", 5.0),
        ("codec", "bench_codec.py", 8.0),
    ):
        out = LOGS / f"{name}.json"
        out.unlink(missing_ok=True)
        command = Command(
            f"bench_{name}",
            [
                *(sys.executable, FOLDER / script, "--device", "cuda"),
                *("--seconds", str(table_seconds), "--out", out),
            ],
        )
        share = (end - time.monotonic()) * (0.6 if name == "bucket" else 1.0)
        outcome = command.outcome(share)
        if out.exists():  # with the groups that there was time for
            documents[name] = json.loads(out.read_text())
            rows = [row for row in documents[name]["rows"] if row["holds"] is not None]
            held = sum(row["holds"] for row in rows)
            counted = f"{held} of {len(rows)} targets hold"
            outcome.text = counted if outcome.passed else f"{counted}; {outcome.text}"
        else:
            outcome.passed = False
        outcomes.append(outcome)
    return outcomes, documents


# ---- results -------------------------------------------------------------------------------------


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip()


def slow_calls(documents: dict[str, Any]) -> list[str]:
    """Calls of ours on one bucket that keep the CPU longer than they may."""
    rows = documents.get("bucket", {}).get("rows", [])
    return [
        f"{row['group']}, {row['job']}: {row['cpu_seconds'] * 1e6:.1f} us of the CPU, at most "
        f"{MOST_CPU_SECONDS * 1e6:.0f}"
        for row in rows
        if row["group"].startswith(ONE_BUCKET)
        and re.match(r"(flatten, scale|flatten$|unflatten)", row["job"])
        and row["cpu_seconds"] > MOST_CPU_SECONDS
    ]


def missed(documents: dict[str, Any]) -> list[str]:
    return [
        f"{row['group']}, {row['job']}: {row['ratio']:.3f} x {row['baseline']}, "
        f"target {row['target']}"
        for document in documents.values()
        for row in document["rows"]
        if row["holds"] is False
    ]


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for cells in body:
        yield f"| {' | '.join(cells)} |"
    yield ""


def figures(row: dict[str, Any], ceiling: float) -> list[str]:
    speed, cpu = row["gigabytes_per_second"], row["cpu_seconds"]
    return [
        row["job"],
        f"{row['seconds'] * 1e6:.1f}",
        "" if cpu is None else f"{cpu * 1e6:.1f}",
        "" if speed is None else f"{speed:.0f}",
        "" if speed is None else f"{speed / ceiling:.2f}",
        "" if row["ratio"] is None else f"{row['ratio']:.2f} x {row['baseline']}",
        row["target"] or "",
        "" if row["holds"] is None else ("yes" if row["holds"] else "**no**"),
    ]


def page(document: dict[str, Any]) -> str:
    """The results to read."""
    lines = [f"# {document['card']}, {document['date'][:10]}", ""]
    facts = ("card", "driver", "torch", "cuda", "python", "commit", "date")
    lines += [f"- {fact}: {document[fact]}" for fact in facts]
    lines += ["", "Made by `make gpu`.", "", "## Parts", ""]
    outcomes = [Outcome(**each) for each in document["parts"]]
    lines += table(
        ("part", "", "seconds", ""),
        [(each.name, each.word, f"{each.seconds:.0f}", each.text) for each in outcomes],
    )
    complaints = [*missed(document["benchmarks"]), *slow_calls(document["benchmarks"])]
    lines += ["## Targets that were missed", ""]
    lines += [*(f"- {line}" for line in complaints or ["none"]), ""]
    for name, results in document["benchmarks"].items():
        for note in results["notes"]:
            lines += [f"{note}", ""]
        for group in dict.fromkeys(row["group"] for row in results["rows"]):
            rows = [row for row in results["rows"] if row["group"] == group]
            ceiling = next(row["gigabytes_per_second"] for row in rows if row["job"] == COPY)
            lines += [f"## {name}: {group}", ""]
            lines += table(
                ("job", "us", "CPU us", "GB/s", "of the copy", "ratio", "target", "holds"),
                [figures(row, ceiling) for row in rows],
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.5, help="for all (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    parser.add_argument(
        "--results", type=Path, default=FOLDER / "results" / "gpu", metavar="FOLDER"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is available")
    end = time.monotonic() + 60 * arguments.minutes

    def left(part: str, reserve: float = 0.0) -> float:
        return min(LIMITS[part], end - time.monotonic() - reserve)

    outcomes: list[Outcome] = []
    documents: dict[str, Any] = {}
    if "build" in arguments.only:
        outcomes.append(build(left("build", RESERVE)))
    # Nothing is timed meanwhile, so that these run side by side.
    tests = begin_tests() if "tests" in arguments.only else None
    sanitizers = begin_sanitizers() if "sanitizers" in arguments.only else []
    if tests is not None:
        outcomes.append(tests_outcome(tests, left("tests", RESERVE)))
    outcomes += [sanitizer_outcome(tool, left("sanitizers", RESERVE)) for tool in sanitizers]
    if "sanitizers" in arguments.only and not sanitizers:
        outcomes.append(Outcome("sanitizers", None, 0.0, "compute-sanitizer is not installed"))
    if "benchmarks" in arguments.only:
        timed, documents = run_benchmarks(left("benchmarks"))
        outcomes += timed

    about = environment("cuda")
    document = {
        "card": about["gpu"],
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": about["torch"],
        "python": about["python"],
        "commit": arguments.commit or about["commit"],
        "date": about["date"],
        "parts": [asdict(outcome) for outcome in outcomes],
        "benchmarks": documents,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    stored = arguments.results / f"{card}-{about['date'][:10]}.json"
    stored.write_text(json.dumps(document, indent=1) + "\n")
    stored.with_suffix(".md").write_text(page(document))

    for outcome in outcomes:
        if outcome.passed is False:
            log = LOGS / f"{outcome.name}.log"
            print(
                f"---- {outcome.name}, the end of its log",
                *log.read_text().splitlines()[-25:],
                sep="\n",
            )
    for line in [*missed(documents), *slow_calls(documents)]:
        print("missed:", line)
    for outcome in outcomes:
        print(f"{outcome.name:14s} {outcome.word:8s} {outcome.seconds:5.0f} s  {outcome.text}")
    return 1 if any(outcome.passed is False for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
