"""Runs the checks that a change needs: ``make check``.

    python3 tests/check.py                   # the change since the merge base with main
    python3 tests/check.py --base HEAD~3
    python3 tests/check.py --all             # everything
    python3 tests/check.py --dry-run         # list the checks, and the reasons

A changed file belongs to an area: a layer of ``torch_commhook``, or a folder of ``csrc`` that
serves one. The change calls for the files of tests that use this area: the file or its helpers
import the layer, or a layer above it. A path without an area calls for everything.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "long_runs")]

import called_for  # noqa: E402
import durations  # noqa: E402
from source_code import code_of  # noqa: E402

#: The layer whose Python modules call a folder of native code.
NATIVE = {
    "csrc/ops/bucket/": "buckets",
    "csrc/ops/codecs/": "codecs",
    "csrc/ops/low_rank/": "hooks",
    "csrc/ops/symmetric/": "collectives",
    "csrc/runtime/autograd/": "autograd",
    "csrc/runtime/collectives/": "collectives",
    "csrc/runtime/cpp_hooks/": "hooks",
    "csrc/runtime/membership/": "elastic",
    "csrc/runtime/process_group/": "process_group",
    "csrc/runtime/profiling/": "spans",
    "csrc/runtime/reducer/": "reducer",
    "csrc/runtime/wire/": "collectives",
}
#: Folders whose files tests and each other name by their stems.
HELPERS = ("tests/support", "tests/long_runs", "benchmarks", "examples")
#: Beginnings of the paths of words and stored results.
DOCS = ("docs/", "benchmarks/results/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
#: Beginnings of paths that only services and editors read.
READ_BY_OTHERS = (".github/", ".gitignore", ".pre-commit-config.yaml", "_typos.toml", "MANIFEST.in")
#: One in so many of the long cases that a change does not call for runs all the same, in turn.
TURNS = 16
#: The tests that decide whether the library works on a torch: doctor, the README's script, attach()
#: with each hook on DDP, plain and sharded models, eager and compiled, groups, autograd hooks,
#: states.
ON_ANOTHER_TORCH = (
    "cli/test_doctor.py",
    "project/test_readme.py",
    *(f"attachment/test_{name}.py" for name in ("attach", "modes", "recovery", "reducer")),
    *(
        f"attachment/sharded/test_{name}.py"
        for name in ("fsdp_features", "parts", "sharded_states")
    ),
    "process_group/test_process_group.py",
    "process_group/test_process_group_wrapper.py",
    "process_group/test_group_table.py",
    *(f"autograd/test_autograd_{name}.py" for name in ("hooks", "hook_dispatch", "suite_compiled")),
    "hooks/test_hook_state.py",
)
#: The oldest and the newest torch. What has changed since it passed runs on the one that has not
#: passed for longer.
OTHER_TORCHES = ("2.11.0", "2.15.0")
#: What frameworks call.
FOR_FRAMEWORKS = ("attachment", "integrations")
#: Of the long cases that a change calls for, as many run in turn as fit into this time.
MOST_LONG_MINUTES = 3
CHOSEN = "build/chosen.json"
CHOSEN_ON_TORCH = "build/chosen_on_torch.json"
#: The last page of the output shows the failures.
SHORT_OUTPUT = "--disable-warnings --tb=short"
#: The number of files that make test runs at once.
PROCESSES = 2
#: The environments of other torches stay here: PyTorch's builds for CUDA take 5 GB each.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_commhook"


class Sources:
    """The files of the project, and which of them use which.

    An area is a layer of ``torch_commhook``, ``helper:`` with the stem of a file that others name,
    ``ops``, ``cuda``, ``docs``, ``tests``, or ``everything``. A file of tests is one by itself.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.package = root / "torch_commhook"
        folder = root / "tests"
        #: The files of tests, by path relative to tests/.
        self.tests = {
            str(path.relative_to(folder)): path for path in sorted(folder.rglob("test_*.py"))
        }

    @cached_property
    def layers(self) -> dict[str, frozenset[str]]:
        """Each layer with those that it imports, and those that they import."""
        direct: dict[str, set[str]] = {}
        for path in self.package.iterdir():
            if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
                direct[path.stem] = _imported(path)
            elif (path / "__init__.py").exists():
                direct[path.name] = {
                    each for file in path.rglob("*.py") for each in _imported(file)
                }
        return {name: _reached(name, direct) for name in direct}

    @cached_property
    def public(self) -> dict[str, str]:
        """The layer of each name that ``torch_commhook`` itself has."""
        found = {name: name for name in self.layers}
        for node in ast.walk(ast.parse((self.package / "__init__.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "torch_commhook."
            ):
                layer = str(node.module).split(".")[1]
                found |= {alias.asname or alias.name: layer for alias in node.names}
        return found

    @cached_property
    def helpers(self) -> dict[str, list[Path]]:
        """The sources of helpers, by the stem of a file or the name of a folder of them."""
        found: dict[str, list[Path]] = {}
        for path in (each for folder in HELPERS for each in sorted((self.root / folder).iterdir())):
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            files = [each for each in files if each.suffix in (".py", ".cpp", ".h")]
            if files:
                found.setdefault(path.stem, []).extend(files)
        return found

    @cached_property
    def shared(self) -> frozenset[str]:
        """The helpers of all tests."""
        return self._named(self.root / "tests" / "conftest.py")

    def _named(self, path: Path) -> frozenset[str]:
        """The helpers that a file names, and those that these name."""
        found: set[str] = set()
        paths = [path]
        while paths:
            new = self._own_names[paths.pop()] - found
            found |= new
            paths += (each for name in new for each in self.helpers[name])
        return frozenset(found)

    @cached_property
    def _own_names(self) -> dict[Path, set[str]]:
        helpers = self.helpers
        paths = {*self.tests.values(), self.root / "tests" / "conftest.py"}
        paths.update(each for files in helpers.values() for each in files)
        words = {path: set(re.findall(r"\w+", path.read_text())) for path in paths}
        return {path: words[path] & helpers.keys() for path in paths}

    @cache  # noqa: B019 (the program makes one object)
    def _own_layers(self, path: Path) -> frozenset[str]:
        """The layers that a file names."""
        if path.suffix != ".py":
            return frozenset()
        text = path.read_text()
        names = set(re.findall(r"\btorch_commhook[./](\w+)", text)) | _imported(path)
        found = {self.public[name] for name in names & self.public.keys()}
        if re.search(r"""["']torch_commhook["']""", text):  # python -m torch_commhook
            found.add("cli")
        return frozenset(found)

    @cache  # noqa: B019
    def uses(self, test: str) -> frozenset[str]:
        """The areas that a file of tests uses."""
        folder, path = test.partition("/")[0], self.tests[test]
        named = self._named(path) - self.shared
        found = {f"helper:{name}" for name in named}
        if re.search(r"\bdocs\b|\.md\b", path.read_text()):
            found.add("docs")
        if re.search(r"\bTESTS\b", path.read_text()):  # it reads others
            found.add("tests")
        if folder == "cuda":  # kernels, which no layer changes
            return frozenset({*found, "cuda"})
        own = set({folder} & self.layers.keys())
        for each in (path, *(each for name in named for each in self.helpers[name])):
            own |= self._own_layers(each)
        for layer in own:
            found |= self.layers[layer]
        return frozenset({*found, "ops"} if folder == "ops" else found)

    def has_limits(self, test: str) -> bool:
        """Whether some of a file's cases have limits on real time."""
        return "mark.real_time" in self.tests[test].read_text()

    def areas(self, path: str, only_words: bool = False) -> set[str]:
        """The areas of a changed file.

        Args:
            path: of the file, from the root.
            only_words: whether comments and docstrings are all that has changed.
        """
        folder, _, rest = path.partition("/")
        if path.startswith(READ_BY_OTHERS) or path == "tests/durations.json":
            return set()
        if path.startswith(DOCS) or only_words:
            return {"docs"}
        native = {layer for beginning, layer in NATIVE.items() if path.startswith(beginning)}
        if folder == "cuda":
            return {"cuda"}
        if native:
            return native | ({"cuda", "ops"} if path.startswith("csrc/ops/") else set())
        layer = rest.partition("/")[0].removesuffix(".py")
        if folder == "torch_commhook" and layer in self.layers and layer != "native":
            return {layer}
        if folder == "tests" and rest in self.tests:
            return {path, "tests"}
        for beginning in HELPERS:
            if path.startswith(f"{beginning}/"):
                name = path.removeprefix(f"{beginning}/").partition("/")[0].partition(".")[0]
                return {"everything"} if name in self.shared else {f"helper:{name}"}
        name = path.rpartition("/")[2]
        beside = {
            test: file
            for test, file in self.tests.items()
            if test.startswith(f"{rest.partition('/')[0]}/")
        }
        readers = {f"tests/{test}" for test, file in beside.items() if name in file.read_text()}
        if folder == "tests" and readers:  # what a test beside it reads
            return readers
        return {"everything"}


def _imported(path: Path) -> set[str]:
    """The modules, one level below the package, that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch_commhook":
            found |= {f"torch_commhook.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {each.split(".")[1] for each in found if each.startswith("torch_commhook.")}


def _reached(name: str, direct: Mapping[str, set[str]]) -> frozenset[str]:
    found, left = {name}, [name]
    while left:
        new = (direct[left.pop()] & direct.keys()) - found
        found |= new
        left += new
    return frozenset(found)


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def changed_files(sources: Sources, base: str) -> dict[str, set[str]]:
    """The areas of each file that differs from a commit, committed or not."""
    paths = git("diff", "--name-only", "--no-renames", base, "--").splitlines()
    paths += git("ls-files", "--others", "--exclude-standard").splitlines()
    return {path: sources.areas(path, _only_words(base, path)) for path in sorted(paths)}


def _only_words(base: str, path: str) -> bool:
    """Whether only comments and docstrings of a source differ from a commit."""
    before = subprocess.run(["git", "show", f"{base}:{path}"], cwd=ROOT, capture_output=True)
    if before.returncode or not (ROOT / path).is_file():
        return False
    return code_of(Path(path), before.stdout) == code_of(Path(path), (ROOT / path).read_bytes())


@dataclass
class Cases:
    """Cases for pytest's ``--chosen``: files whose short cases run, and the long cases that run."""

    short: list[str]
    long: dict[str, float]

    def minutes(self, known: Mapping[str, durations.Durations]) -> str:
        """How long they take."""
        short = (known[test].short for test in self.short if test in known)
        return _minutes(sum(short) + sum(self.long.values()))

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        short = [f"tests/{test}" for test in self.short]
        path.write_text(json.dumps({"short": short, "long": sorted(self.long)}))


class Plan:
    """The checks that a change needs."""

    def __init__(
        self,
        sources: Sources,  # the files of the project
        areas: set[str],  # those of the changed files. With ``everything``, all of it
        number: int,  # chooses the turns of long cases
        torch: str = "",  # the other torch to run on; empty for none
        all_long: bool = False,  # whether to run all long cases
        # the areas of the files that have changed since the other torch has passed; by default
        # ``areas``
        on_torch: set[str] | None = None,
    ) -> None:
        self.sources = sources
        self.areas = areas
        self.number = number
        self.torch = torch
        self.all_long = all_long
        self.known = durations.load()
        # targets of make with their variables, each with what to say about it
        self.runs: list[tuple[list[str], str]] = []
        self.left_out: list[str] = []  # what does not run, each with its reason
        self.changed = [test for test in sources.tests if self._is_changed(test, areas)]
        self.cases = self._cases()
        self.on_torch = self._on_another_torch(areas if on_torch is None else on_torch)
        self._add("lint", "always")
        if areas:
            self._add("docs", "documents show docstrings and stored figures")
        self._tests()
        self._frameworks()
        self._torch()
        self._cuda()

    def _add(self, target: str, why: str, **variables: str) -> None:
        self.runs.append(([target, *(f"{k}={v}" for k, v in variables.items())], why))

    def _is_changed(self, test: str, areas: set[str]) -> bool:
        """Whether a file of tests, or something that it uses, has changed."""
        if "everything" in areas or f"tests/{test}" in areas:
            return True
        return not areas.isdisjoint(self.sources.uses(test))

    def _is_near(self, test: str) -> bool:
        """Whether a file of tests, or the layer that it belongs to, has changed."""
        folder = test.partition("/")[0]
        return not {"everything", folder, f"tests/{test}"}.isdisjoint(self.areas)

    def _cases(self) -> Cases:
        """The cases that run on the project's torch."""
        near, others = {}, {}
        for test in sorted(self.known.keys() & self.sources.tests.keys()):
            long = {f"tests/{test}::{name}": s for name, s in self.known[test].long.items()}
            if test.startswith("integrations/"):
                continue
            if self._is_near(test):
                near |= long
            elif not test.startswith("cuda/"):  # compiling the kernels for the host takes minutes
                others |= long
        most = math.inf if self.all_long else MOST_LONG_MINUTES * 60 * PROCESSES
        near = self._in_turn(near, max(1, math.ceil(sum(near.values()) / most)))
        short = [test for test in self.changed if not test.startswith("integrations/")]
        return Cases(short, near | self._in_turn(others, TURNS))

    def _in_turn(self, cases: dict[str, float], turns: int) -> dict[str, float]:
        turn = self.number % turns
        return {n: s for n, s in cases.items() if zlib.crc32(n.encode()) % turns == turn}

    def _on_another_torch(self, areas: set[str]) -> Cases:
        if self.areas <= {"docs"}:  # for words alone it would be installed and built
            return Cases([], {})
        short = [test for test in ON_ANOTHER_TORCH if self._is_changed(test, areas)]
        compiled = {
            f"tests/{test}::{name}": seconds
            for test in short
            for name, seconds in self.known.get(test, durations.Durations()).long.items()
            if "fullgraph" in name or "compiled" in name
        }
        return Cases(short, compiled)

    def _tests(self) -> None:
        long = sum(len(each.long) for each in self.known.values())
        why = (
            f"short cases of {len(self.cases.short)} of {len(self.sources.tests)} files and "
            f"{len(self.cases.long)} of {long} long cases, {self.cases.minutes(self.known)}"
        )
        # Whoever runs everything looks for what no seed has shown yet.
        seed = f"--seed={secrets.randbelow(1 << 32)} " if self.all_long else ""
        self._add("test", why, ARGS=f"{seed}--chosen={ROOT / CHOSEN} {SHORT_OUTPUT}")
        timed = [
            f"tests/{test}"
            for test in self.sources.tests
            if self._is_near(test) and self.sources.has_limits(test)
        ]
        if timed:
            arguments = f"-m real_time --numprocesses 0 {' '.join(timed)} {SHORT_OUTPUT}"
            self._add(
                "test", f"cases with limits on real time, of {len(timed)} files", ARGS=arguments
            )
        else:
            self.left_out.append("cases with limits on real time: of layers that have not changed")
        left = [test for test in self.sources.tests if test not in self.changed]
        if left:
            folders = Counter(test.partition("/")[0] for test in left)
            of = ", ".join(f"{count} of {folder}" for folder, count in sorted(folders.items()))
            self.left_out.append(f"files of tests that use nothing that has changed: {of}")
        if long > len(self.cases.long):
            why = "of layers that have not changed, or not in their turn"
            self.left_out.append(f"{long - len(self.cases.long)} long cases: {why}")

    def _frameworks(self) -> None:
        changed = any(
            test.startswith("integrations/") and f"tests/{test}" in self.areas
            for test in self.changed
        )
        if changed or not self.areas.isdisjoint({"everything", *FOR_FRAMEWORKS}):
            self._add("test-integrations", "what frameworks call has changed", ARGS=SHORT_OUTPUT)
        else:
            of = " nor ".join(FOR_FRAMEWORKS)
            self.left_out.append(f"make test-integrations: neither {of} has changed")

    def _torch(self) -> None:
        if not (self.torch and self.on_torch.short):
            why = "no file for it has changed" if self.torch else "no other torch was given"
            self.left_out.append(f"make test-torch: {why}")
            return
        files, minutes = len(self.on_torch.short), self.on_torch.minutes(self.known)
        arguments = f"--chosen={ROOT / CHOSEN_ON_TORCH} {SHORT_OUTPUT}"
        variables = {"TORCH": self.torch, "TORCH_VENVS": str(CACHE), "ARGS": arguments}
        self._add("test-torch", f"{files} files on torch {self.torch}, {minutes}", **variables)

    def _cuda(self) -> None:
        if not called_for.has_changed("cuda-compile"):
            self.left_out.append("make cuda-compile: it has passed with these sources")
        elif shutil.which("nvcc") is None:
            self.left_out.append("make cuda-compile: there is no nvcc here")
        else:
            self._add("cuda-compile", "the kernels have changed since it last passed")

    def run(self) -> int:
        self.cases.save(ROOT / CHOSEN)
        self.on_torch.save(ROOT / CHOSEN_ON_TORCH)
        CACHE.mkdir(parents=True, exist_ok=True)
        commit, uncommitted = git("rev-parse", "HEAD"), git("diff", "--name-only", "HEAD")
        for command, _ in self.runs:
            begin = time.monotonic()
            with (CACHE / "lock").open("w") as lock:
                if command[0] == "test-torch":  # its environment can be only in one checkout's use
                    fcntl.flock(lock, fcntl.LOCK_EX)
                done = subprocess.run(["make", "--no-print-directory", *command], cwd=ROOT)
            print(f"make {command[0]}: {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
            if done.returncode:
                return 1
            if command[0] == "test-torch" and not uncommitted:
                passed_on(self.torch).write_text(commit)
        return 0


def passed_on(torch: str) -> Path:
    """The file with the commit that has last passed on another torch."""
    return CACHE / f"passed-{torch}"


def _longest_ago() -> str:
    """The other torch that has not passed for longer, or never."""
    files = {torch: passed_on(torch) for torch in OTHER_TORCHES}
    return min(files, key=lambda each: files[each].stat().st_mtime if files[each].exists() else 0)


def _minutes(seconds: float) -> str:
    """Minutes of ``make test``, which runs two files at a time."""
    return f"about {seconds / PROCESSES / 60:.1f} minutes"


def _changed(sources: Sources, base: str | None, where: str = "") -> set[str]:
    """The areas of the change; everything if they cannot be found."""
    try:
        base = base or git("merge-base", "HEAD", "main").strip()
        files = changed_files(sources, base)
    except (subprocess.CalledProcessError, OSError, SyntaxError, UnicodeDecodeError) as error:
        print(f"everything runs{where}: the change cannot be read ({error})")
        return {"everything"}
    print(f"{len(files)} files have changed since {base[:8]}:")
    for path, areas in files.items():
        print(f"  {path}: {', '.join(sorted(areas)) or 'nothing'}")
    return {area for areas in files.values() for area in areas}


def _changed_since_passed(sources: Sources, torch: str) -> set[str]:
    """The areas that have changed since another torch has passed; everything if it never has."""
    file = passed_on(torch)
    base = file.read_text().strip() if file.exists() else ""
    if not base:
        print(f"everything runs on torch {torch}: it has not passed yet")
        return {"everything"}
    return _changed(sources, base, f" on torch {torch}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", help="the commit before the change (the merge base with main)")
    parser.add_argument("--all", action="store_true", help="run everything, and all long cases")
    parser.add_argument(
        "--torch", help="the other torch; empty for none (the one that has not passed for longer)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the checks")
    options = parser.parse_args(arguments)
    number = int(git("rev-parse", "HEAD")[:7], 16)
    torch = _longest_ago() if options.torch is None else options.torch
    sources = Sources()
    areas = on_torch = {"everything"}
    if not options.all:
        areas = _changed(sources, options.base)
        on_torch = _changed_since_passed(sources, torch) if torch else areas
    plan = Plan(sources, areas, number, torch, options.all, on_torch)
    print("runs:", *(f"make {command[0]}: {why}" for command, why in plan.runs), sep="\n  ")
    print("leaves out:", *plan.left_out, sep="\n  ", flush=True)
    return 0 if options.dry_run else plan.run()


if __name__ == "__main__":
    sys.exit(main())
