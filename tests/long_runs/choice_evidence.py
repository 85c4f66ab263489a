"""Compares the tests that ``tests/check.py`` chooses for a change with the whole suite.

    python tests/long_runs/choice_evidence.py reach          # half an hour
    python tests/long_runs/choice_evidence.py changes        # hours; it can be interrupted
    python tests/long_runs/choice_evidence.py faults FOLDER  # patches that undo what mended a fault

``reach`` runs each file of tests alone, and notes which lines of the package it reaches.
``changes`` makes random changes of one operator or constant in lines that tests reach. A change
that the chosen tests do not notice is tried with the others that reach its line. ``faults`` applies
each patch, and runs the chosen tests that its line in ``faults.jsonl`` names. Each writes its part
of ``choice_evidence.json``. They change the sources of this checkout: run them in a clone of its
own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from repository import ROOT

sys.path.append(str(ROOT / "tests"))

import check
import durations

RESULTS = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "build" / "choice_evidence"
REACHED = FOLDER / "reached.json"
CHANGES = FOLDER / "changes.jsonl"
#: Ranks that are spawned are measured as well, and those that end by ``os._exit`` or a signal.
COVERAGE = """
[run]
source = torch_commhook
parallel = true
data_file = {folder}/data/.coverage
context = ${{REACHED_BY}}
patch = subprocess, _exit
sigterm = true
disable_warnings = no-data-collected, module-not-measured
"""
#: The change is in one of the files that have changed most often.
MOST_CHANGED = 20
#: Files of tests that one change is tried with, at most, before the others that reach its line.
MOST_FILES = 12
#: For a change that makes tests run without end.
SECONDS = 900
SWAPS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+", "<": "<=", "<=": "<", ">": ">=",
    ">=": ">", "==": "!=", "!=": "==", "and": "or", "or": "and", "is": "is not", "is not": "is",
    "in": "not in", "not in": "in", "|": "&", "&": "|", "<<": ">>", ">>": "<<",
}  # fmt: skip
OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.And: "and", ast.Or: "or", ast.Is: "is", ast.IsNot: "is not", ast.In: "in",
    ast.NotIn: "not in", ast.BitOr: "|", ast.BitAnd: "&", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip


def store(part: str, found: dict[str, Any]) -> None:
    whole = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    commit = check.git("rev-parse", "HEAD").strip()
    whole[part] = {"commit": commit, **found}
    RESULTS.write_text(json.dumps(whole, indent=1) + "\n")


def run_tests(tests: list[str], *options: str) -> tuple[int, str]:
    """Run short cases of files of tests up to the first failure; returns pytest's status and it."""
    paths = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "--disable-warnings", *paths]
    with subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            output = run.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, 9)
            return 1, "no end"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return run.returncode, failed[0].split(" - ")[0] if failed else ""


# ---- reach ---------------------------------------------------------------------------------------


def reach() -> None:
    """Run each file of tests under coverage, and store which lines only left-out tests reach."""
    import coverage

    sources = check.Sources()
    (FOLDER / "data").mkdir(parents=True, exist_ok=True)
    (FOLDER / "coveragerc").write_text(COVERAGE.format(folder=FOLDER))
    tests = [test for test in sources.tests if not test.startswith("integrations/")]
    known = durations.load()
    tests.sort(key=lambda test: -known[test].short if test in known else 0)

    def measure(test: str) -> None:
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={FOLDER / 'coveragerc'}"]
        command += ["-m", "pytest", "-q", "--disable-warnings", "--timeout=600", f"tests/{test}"]
        environment = {**os.environ, "REACHED_BY": test}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        print(test, done.stdout.strip().rpartition("\n")[2], flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(measure, tests))
    whole = coverage.Coverage(config_file=str(FOLDER / "coveragerc"))
    whole.combine(keep=True)
    data = whole.get_data()
    reached: dict[str, dict[int, list[str]]] = {}
    for path in sorted(data.measured_files()):
        lines = data.contexts_by_lineno(path)
        own = {line: sorted(set(found) - {""}) for line, found in sorted(lines.items())}
        reached[str(Path(path).relative_to(ROOT))] = own
    REACHED.write_text(json.dumps(reached))
    only_left_out = defaultdict(dict)
    lines = 0
    for path, found in reached.items():
        areas = sources.areas(path)
        for line, by in found.items():
            lines += bool(by)
            if by and not any(is_chosen(sources, test, areas) for test in by):
                only_left_out[path][line] = by
    print(json.dumps(only_left_out, indent=1))
    counts = {path: len(found) for path, found in only_left_out.items()}
    store("coverage", {"lines_reached": lines, "lines_of_left_out_tests_alone": counts})


def is_chosen(sources: check.Sources, test: str, areas: set[str]) -> bool:
    """Whether a change in these areas calls for a file of tests."""
    return "everything" in areas or not areas.isdisjoint(sources.uses(test))


# ---- random changes ------------------------------------------------------------------------------


def possible(path: str, lines: set[int]) -> Iterator[tuple[int, int, str, str]]:
    """Line, column, old and new text of each change of one operator or constant."""
    text = (ROOT / path).read_text()
    rows = text.splitlines()
    tree = ast.parse(text)
    annotations = {  # they are not evaluated
        id(inner)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if getattr(node, field, None) is not None
        for inner in ast.walk(getattr(node, field))
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        operators: list[tuple[ast.expr, ast.AST, ast.expr]] = []
        if isinstance(node, ast.BinOp):
            operators = [(node.left, node.op, node.right)]
        elif isinstance(node, ast.Compare):
            lefts = [node.left, *node.comparators[:-1]]
            operators = list(zip(lefts, node.ops, node.comparators, strict=True))
        elif isinstance(node, ast.BoolOp):
            operators = [(a, node.op, b) for a, b in zip(node.values, node.values[1:])]  # noqa: B905
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool, float):
            old = rows[node.lineno - 1][node.col_offset : node.end_col_offset]
            new = str(not node.value) if isinstance(node.value, bool) else f"({old} + 1)"
            if node.lineno in lines:
                yield node.lineno, node.col_offset, old, new
        for left, operator, right in operators:
            old = OPERATORS.get(type(operator), "")
            if not old or left.end_lineno != right.lineno or left.end_lineno not in lines:
                continue
            between = rows[right.lineno - 1][left.end_col_offset : right.col_offset]
            if between.count(old) == 1:
                column = left.end_col_offset + between.index(old)
                yield right.lineno, column, old, SWAPS[old]


def most_changed(paths: list[str]) -> list[str]:
    """Of these files, those in the most commits."""
    names = check.git("log", "--name-only", "--format=", "--", "torch_commhook").splitlines()
    counts = Counter(name for name in names if name in paths)
    return [name for name, _ in counts.most_common(MOST_CHANGED)]


def changes(number: int) -> None:
    """Make random changes, and store how many the chosen tests and the whole suite notice."""
    reached = {
        path: {int(line): by for line, by in lines.items() if by}
        for path, lines in json.loads(REACHED.read_text()).items()
    }
    sources, known = check.Sources(), durations.load()
    files = most_changed(list(reached))
    drawn = [(path, each) for path in files for each in possible(path, set(reached[path]))]
    random.Random(0).shuffle(drawn)
    done = CHANGES.read_text().splitlines() if CHANGES.exists() else []
    for path, (line, column, old, new) in drawn[len(done) : number]:
        layer = path.split("/")[1].removesuffix(".py")

        def nearest(test: str, layer: str = layer) -> tuple[bool, float]:
            return not test.startswith(f"{layer}/"), known[test].short if test in known else 60.0

        by = sorted(reached[path][line], key=nearest)
        chosen = [test for test in by if is_chosen(sources, test, sources.areas(path))]
        others = [test for test in by if test not in chosen]
        text = (ROOT / path).read_text()
        rows = text.splitlines(keepends=True)
        row = rows[line - 1]
        rows[line - 1] = row[:column] + new + row[column + len(old) :]
        try:
            (ROOT / path).write_text("".join(rows))
            noticed = _noticed(chosen[:MOST_FILES]) or (others and _noticed(chosen[MOST_FILES:]))
            by_others = _noticed(others) if others and not noticed else ""
        finally:
            (ROOT / path).write_text(text)
        found = {"file": path, "line": line, "old": old, "new": new, "row": row.strip()}
        found |= {"chosen": noticed or "", "others": by_others, "left_out": len(others)}
        with CHANGES.open("a") as out:
            out.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)
    made = [json.loads(line) for line in CHANGES.read_text().splitlines()]
    counts = {
        "made": len(made),
        "files": files,
        "noticed_by_chosen": sum(bool(each["chosen"]) for each in made),
        "noticed_by_others_alone": [each for each in made if each["others"]],
        "lines_that_left_out_tests_reach": sum(bool(each["left_out"]) for each in made),
        "files_of_tests_tried": MOST_FILES,
    }
    store("changes", counts)


def _noticed(tests: list[str], *more_marks: str) -> str:
    """The case that fails, if one does."""
    for marks in ("not long and not real_time", *more_marks) if tests else ():
        status, failed = run_tests(tests, "-m", marks)
        if status not in (0, 5):
            return failed or f"status {status}"
    return ""


# ---- faults of the history -----------------------------------------------------------------------


def faults(folder: Path) -> None:
    """Put mended faults back, one at a time, and store which chosen test notices each."""
    sources = check.Sources()
    rows = []
    for line in (folder / "faults.jsonl").read_text().splitlines():
        fault = json.loads(line)
        areas = {area for file in fault["files"] for area in sources.areas(file)}
        tests = [test for test in fault["tests"] if test in sources.tests]
        chosen = [test for test in tests if is_chosen(sources, test, areas)]
        builds = [[sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]]
        builds = builds if fault["kind"] == "cpp" else []
        subprocess.run(["git", "apply", fault["patch"]], cwd=ROOT, check=True)
        try:
            for build in builds:
                subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
            noticed = _noticed(chosen, "long")
        finally:
            subprocess.run(["git", "apply", "-R", fault["patch"]], cwd=ROOT, check=True)
            for build in builds:
                subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        row = {key: fault[key] for key in ("commit", "files", "what")}
        rows.append({**row, "noticed_by": noticed, "left_out": sorted({*tests} - {*chosen})})
        print(json.dumps(rows[-1]), flush=True)
    store(
        "faults",
        {
            "put_back": len(rows),
            "noticed": sum(bool(row["noticed_by"]) for row in rows),
            "faults": rows,
        },
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("reach")
    parts.add_parser("changes").add_argument("--number", type=int, default=300)
    parts.add_parser("faults").add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.part == "reach":
        reach()
    elif options.part == "changes":
        changes(options.number)
    else:
        faults(options.folder)


if __name__ == "__main__":
    main()
