"""Finds the long runs whose files have changed since the run last passed.

    python tests/long_runs/called_for.py                  # a line for each
    python tests/long_runs/called_for.py --run --minutes 20
    python tests/long_runs/called_for.py --passed modes   # the Makefile says so after a run

``make long-runs`` calls the second. ``passed.json`` beside this file holds the commit at which each
run last passed, and a digest of what it passed with; it is committed with the run's results.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from repository import ROOT, TESTS
from source_code import code_of

PASSED = Path(__file__).with_name("passed.json")

#: Commits after which a run must have passed again, if its files have changed.
LARGEST_AGE = 200


def layers(*names: str) -> list[str]:
    """The folders of layers of the package."""
    return [f"torch_commhook/{name}" for name in names]


def own(*names: str) -> list[str]:
    """The scripts of a run."""
    return [f"tests/long_runs/{name}.py" for name in names]


#: What each step of training goes through.
STEPS = layers("attachment", "buckets", "collectives", "hooks", "memory", "reducer", "step")


class LongRun(NamedTuple):
    """A target of the Makefile."""

    minutes: int  # roughly how long it takes on 2 cores
    # files and folders; a change of one calls for the run. So does a change of the modules that
    # they import from tests/support and tests/long_runs, of torch and of the compiler
    files: tuple[str, ...]

    def paths(self) -> list[Path]:
        """The files and those in its folders, in order, and then what they import of the tests."""
        found: dict[Path, None] = {}
        for name in self.files:
            path = ROOT / name
            if path.is_dir():
                found |= dict.fromkeys(sorted(each for each in path.rglob("*") if is_source(each)))
            elif path.is_file():
                found[path] = None
            else:
                raise FileNotFoundError(f"called_for.py: {name} does not exist")
        left = [path for path in found if path.suffix == ".py" and TESTS in path.parents]
        while left:
            new = dict.fromkeys(each for each in _imported(left.pop()) if each not in found)
            found |= new
            left += new
        return list(found)

    def digest(self) -> str:
        """A digest of torch, the compiler, and the files' names and code.

        Comments and docstrings do not change it.
        """
        digest = hashlib.sha256(f"{_made_with()}".encode())
        for path in self.paths():
            content = code_of(path)
            digest.update(f"{path.relative_to(ROOT)} {len(content)} ".encode() + content)
        return digest.hexdigest()


def is_source(path: Path) -> bool:
    """Whether a file is a source, not a build's output."""
    return path.is_file() and path.suffix not in (".so", ".pyc")


def _imported(path: Path) -> list[Path]:
    """The modules of tests/support and tests/long_runs that a module imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for folder in ("support", "long_runs"):
            found += [TESTS / folder / f"{name}.py" for name in names]
    return [each for each in found if each.is_file()]


@cache
def _made_with() -> list[str]:
    """The torches that the Makefile installs, and the compiler."""
    torches = re.findall(r"^\w*TORCH \?= .*", (ROOT / "Makefile").read_text(), re.M)
    compiler = subprocess.run(["c++", "-dumpfullversion"], capture_output=True, text=True)
    return [*torches, compiler.stdout.strip()]


#: The runs by target, in the order in which they are run.
RUNS = {
    "cuda-compile": LongRun(
        15, ("csrc/include", "csrc/ops", "cuda", "setup.py", "build_support.py")
    ),
    "modes": LongRun(
        12,
        (
            *STEPS,
            *layers("autograd"),
            "csrc/runtime",
            "tests/attachment/test_modes.py",
            *own("all_modes"),
        ),
    ),
    "kill-and-resume": LongRun(
        8, (*layers("attachment", "cli", "hooks", "memory"), *own("kill_and_resume"))
    ),
    "elastic-histories": LongRun(
        5,
        (
            *(f"torch_commhook/attachment/{name}.py" for name in ("elastic", "training_state")),
            *layers("elastic", "reducer", "step"),
            *own("elastic_histories"),
        ),
    ),
    "wire-histories": LongRun(
        65,
        (
            *(
                f"csrc/runtime/wire/{name}.{end}"
                for name in ("frame", "rail", "link")
                for end in ("h", "cpp")
            ),
            "tests/support/wire_histories.cpp",
            *own("wire_histories"),
        ),
    ),
    "training-histories": LongRun(
        10,
        (
            *STEPS,
            "torch_commhook/autograd",
            "csrc/runtime/reducer",
            "tests/long_runs/training_histories.py",
        ),
    ),
    "error-feedback": LongRun(
        6,
        (
            *layers("codecs", "hooks", "memory"),
            *("csrc/ops/codecs", "csrc/ops/cpu"),
            *own("error_feedback_runs"),
        ),
    ),
    "wrapper-suite": LongRun(
        4, (*layers("process_group"), "csrc/runtime/process_group", *own("distributed_suite"))
    ),
    "transport-suite": LongRun(
        5, ("torch_commhook/collectives/wire.py", "csrc/runtime/wire", *own("distributed_suite"))
    ),
    "distributed-suite": LongRun(
        10, (*layers("attachment", "step"), "csrc/runtime/hooks", *own("distributed_suite"))
    ),
    "soak": LongRun(5, (*layers("autograd"), "csrc/runtime/autograd", *own("soak_autograd_hooks"))),
    "test-asan": LongRun(10, ("csrc", "cuda", "tests/long_runs/sanitizers")),
    "test-tsan": LongRun(10, ("csrc/runtime", "tests/long_runs/sanitizers")),
    "soak-hooks": LongRun(
        40,
        (*layers("collectives", "hooks", "step"), "csrc/runtime/collectives", *own("soak_hooks")),
    ),
    "balance": LongRun(
        50, (*STEPS, "csrc/runtime/reducer", "csrc/ops/codecs", *own("balance", "local_balance"))
    ),
}


def passed() -> dict[str, dict[str, str]]:
    """The digest and the commit with which each run last passed, by target."""
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def note_passed(target: str) -> None:
    """Note that all cases of a run have passed with the present files."""
    entry = {"commit": _git("rev-parse", "HEAD"), "digest": RUNS[target].digest()}
    noted = sorted({**passed(), target: entry}.items())
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(each)}" for name, each in noted)
    PASSED.write_text(f"{{\n{lines}\n}}\n")


def has_changed(name: str) -> bool:
    """Whether a run's files have changed since it last passed."""
    return passed().get(name, {}).get("digest") != RUNS[name].digest()


def called_for() -> dict[str, LongRun]:
    """The runs whose files have changed since they last passed, the one that passed first first."""
    found = {name: run for name, run in RUNS.items() if has_changed(name)}
    return dict(sorted(found.items(), key=lambda each: -age(each[0])))


def age(name: str) -> float:
    """How many commits ago a run has passed; infinite if it never has, or not in this history."""
    try:
        return int(_git("rev-list", "--count", f"{passed()[name]['commit']}..HEAD"))
    except (KeyError, subprocess.CalledProcessError):
        return math.inf


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run_within(minutes: int) -> int:
    """Run those called for that fit into so many minutes in all, the oldest first.

    Returns:
        1 if one of them fails, or is older than LARGEST_AGE and does not fit; else 0.
    """
    left, failed = minutes, []
    for name, run in called_for().items():
        if run.minutes > left:
            print(f"make {name}: called for, but left out: {run.minutes} of {left} minutes left")
            if age(name) > LARGEST_AGE:
                failed.append(f"{name} (it passed over {LARGEST_AGE} commits ago)")
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
        print(f"make {name}: about {run.minutes} minutes; passed {age(name)} commits ago")
    return 0


if __name__ == "__main__":
    sys.exit(main())
