"""Finds the long runs whose files have changed since the run last passed.

    python tests/long_runs/called_for.py                  # a line for each
    python tests/long_runs/called_for.py --run --minutes 20
    python tests/long_runs/called_for.py --passed modes   # the Makefile says so after a run

``make long-runs`` calls the second. CI asks with the first whether to compile the CUDA kernels.
``passed.json`` beside this file holds a digest of each run's files when it last passed; it is
committed with the run's results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from repository import ROOT
from source_code import code_of

PASSED = Path(__file__).with_name("passed.json")

STEPS = tuple(
    f"torch_commhook/{layer}"
    for layer in ("attachment", "buckets", "collectives", "hooks", "memory", "reducer", "step")
)


class LongRun(NamedTuple):
    """A target of the Makefile.

    Attributes:
        minutes: roughly how long it takes on 2 cores.
        files: files and folders; a change of one calls for the run.
    """

    minutes: int
    files: tuple[str, ...]

    def paths(self) -> Iterator[Path]:
        """The files and those in its folders, in order."""
        for name in self.files:
            path = ROOT / name
            if path.is_dir():
                yield from sorted(each for each in path.rglob("*") if is_source(each))
            elif path.is_file():
                yield path
            else:
                raise FileNotFoundError(f"called_for.py: {name} does not exist")

    def digest(self) -> str:
        """A digest of the files' names and code. Comments and docstrings do not change it."""
        digest = hashlib.sha256()
        for path in self.paths():
            content = code_of(path)
            digest.update(f"{path.relative_to(ROOT)} {len(content)} ".encode() + content)
        return digest.hexdigest()


def is_source(path: Path) -> bool:
    """Whether a file is a source, not a build's output."""
    return path.is_file() and path.suffix not in (".so", ".pyc")


#: The runs by target, in the order in which they are run.
RUNS = {
    "cuda-compile": LongRun(
        15, ("csrc/include", "csrc/ops", "cuda", "setup.py", "build_support.py")
    ),
    "modes": LongRun(
        12,
        (
            *STEPS,
            "torch_commhook/autograd",
            "csrc/runtime",
            "tests/attachment/test_modes.py",
            "tests/long_runs/all_modes.py",
        ),
    ),
    "kill-and-resume": LongRun(
        8,
        (
            "torch_commhook/attachment",
            "torch_commhook/cli",
            "torch_commhook/hooks",
            "torch_commhook/memory",
            "tests/long_runs/kill_and_resume.py",
        ),
    ),
    "elastic-histories": LongRun(
        5,
        (
            "torch_commhook/attachment/elastic.py",
            "torch_commhook/attachment/new_ranks.py",
            "torch_commhook/attachment/training_state.py",
            "torch_commhook/elastic",
            "torch_commhook/reducer",
            "torch_commhook/step",
            "tests/long_runs/elastic_histories.py",
            "tests/support/elastic_checks.py",
            "tests/support/elastic_history.py",
            "tests/support/virtual_elastic.py",
            "tests/support/virtual_training.py",
            "tests/support/virtual_world.py",
        ),
    ),
    "error-feedback": LongRun(
        6,
        (
            "torch_commhook/codecs",
            "torch_commhook/hooks",
            "torch_commhook/memory",
            "csrc/ops/codecs",
            "csrc/ops/cpu",
            "tests/long_runs/error_feedback_runs.py",
        ),
    ),
    "wrapper-suite": LongRun(
        4,
        (
            "torch_commhook/process_group",
            "csrc/runtime/process_group",
            "tests/long_runs/distributed_suite.py",
            "tests/long_runs/distributed_suite_cases.py",
            "tests/long_runs/distributed_suite_wrapper.py",
        ),
    ),
    "distributed-suite": LongRun(
        10,
        (
            "torch_commhook/attachment",
            "torch_commhook/step",
            "csrc/runtime/hooks",
            "tests/long_runs/distributed_suite.py",
            "tests/long_runs/distributed_suite_cases.py",
            "tests/long_runs/distributed_suite_hook.py",
        ),
    ),
    "soak": LongRun(
        5,
        (
            "torch_commhook/autograd",
            "csrc/runtime/autograd",
            "tests/long_runs/soak_autograd_hooks.py",
        ),
    ),
    "test-asan": LongRun(10, ("csrc", "cuda", "tests/long_runs/sanitizers")),
    "test-tsan": LongRun(10, ("csrc/runtime", "tests/long_runs/sanitizers")),
    "soak-hooks": LongRun(
        40,
        (
            "torch_commhook/collectives",
            "torch_commhook/hooks",
            "torch_commhook/step",
            "csrc/runtime/collectives",
            "tests/long_runs/soak_hooks.py",
        ),
    ),
    "balance": LongRun(
        50,
        (
            *STEPS,
            "csrc/runtime/reducer",
            "csrc/ops/codecs",
            "tests/long_runs/balance.py",
            "tests/long_runs/local_balance.py",
        ),
    ),
}


def passed() -> dict[str, str]:
    """The digest with which each run last passed, by target."""
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def note_passed(target: str) -> None:
    """Note that all cases of a run have passed with the present files."""
    noted = {**passed(), target: RUNS[target].digest()}
    PASSED.write_text(json.dumps(dict(sorted(noted.items())), indent=1) + "\n")


def called_for() -> dict[str, LongRun]:
    """The runs whose files have changed since they last passed."""
    noted = passed()
    return {name: run for name, run in RUNS.items() if noted.get(name) != run.digest()}


def run_within(minutes: int) -> int:
    """Run those called for that fit into so many minutes in all.

    Returns:
        1 if one of them fails, else 0.
    """
    left, failed = minutes, []
    for name, run in called_for().items():
        if run.minutes > left:
            print(f"make {name}: called for, but left out: {run.minutes} of {left} minutes left")
            continue
        left -= run.minutes
        print(f"make {name}: about {run.minutes} minutes", flush=True)
        # The ARGS of `make long-runs` would reach it through MAKEFLAGS.
        if subprocess.run(["make", "--no-print-directory", name, "ARGS="], cwd=ROOT).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run them")
    parser.add_argument("--minutes", type=int, default=20, help="in all (%(default)s)")
    parser.add_argument("--passed", choices=RUNS, help="note that this one has passed")
    options = parser.parse_args(arguments)
    if options.passed:
        note_passed(options.passed)
        return 0
    if options.run:
        return run_within(options.minutes)
    for name, run in called_for().items():
        print(f"make {name}: about {run.minutes} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
