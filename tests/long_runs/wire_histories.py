"""Random histories of the transport's links, with sanitizers, and planted bugs that they must find.

``tests/support/wire_histories.cpp`` has the histories: connections are cut, delayed and changed at
any byte, epochs end, channels are left; or another process sends any frames. Here they run with the
sanitizers for addresses and undefined behaviour for so many minutes, each time with new seeds.

Run with ``make wire-histories ARGS="[--minutes N] [--first SEED]"``. Exits with 1 if a history has
a problem, or a planted bug is not found. Without arguments it writes ``wire_histories.json`` beside
this file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpp_compiler import build_once, cpp_compiler
from long_run_results import store
from repository import ROOT, SUPPORT

TABLE = Path(__file__).with_suffix(".json")
NAMES = ("frame.h", "frame.cpp", "rail.h", "rail.cpp", "link.h", "link.cpp")
MINUTES = 60
#: Histories of a process, some ten seconds: of two links, and of a hostile process.
COUNTS = {"": 100, "hostile": 4000}

#: Changes of one place each: the file, what is there, and what takes its place.
BUGS = {
    "a frame is not sent again": ("rail.cpp", "  next_to_write_ = 0;\n", ""),
    "an acknowledgement moves too far": ("rail.cpp", "      --next_to_write_;\n", ""),
    "a changed payload counts": ("rail.cpp", "if (checksum_ != header_.checksum)", "if (false)"),
    "a frame is sent twice": (
        "rail.cpp",
        "  frame.header.received = received_;\n",
        "  frame.header.received = received_ - (received_ > 0 ? 1 : 0);\n",
    ),
    "a forgotten memory is written": (
        "link.cpp",
        "    forget(incoming.memory, incoming.shape.total);\n",
        "",
    ),
    "the last chunk is not copied": ("link.cpp", "  frame.payload.copy();\n", ""),
    "the first chunks are not copied": ("link.cpp", "      each->own(key);\n", ""),
    "more is sent than the credit": (
        "link.cpp",
        "return outgoing.is_ready || credit_used_",
        "return true || credit_used_",
    ),
    "more is kept than the credit": (
        "link.cpp",
        "if (kept_ + header.length + kMessageCost > credit_)",
        "if (false)",
    ),
    "credit of an ended epoch is lost": ("link.cpp", "    credit_used_ -= each->second;\n", ""),
    "credit of a left channel is lost": ("link.cpp", "  credit_used_ -= left->second;\n", ""),
    "only the receiver knows of a misfit": (
        "link.cpp",
        "    control(Kind::kMisfit, key, outgoing.shape);\n"
        '    notices_.push_back({Kind::kMisfit, key, "", true, outgoing.shape, shape});\n',
        "",
    ),
    "a chunk goes to the wrong place": (
        "link.cpp",
        "return {Rail::Place::Kind::kMemory, incoming.memory + offset};",
        "return {Rail::Place::Kind::kMemory, incoming.memory};",
    ),
}


def build(flags: list[str], folder: Path) -> Path:
    """The program of the sources in ``folder``, which ``build`` keeps."""
    sources = [folder / "runtime/wire" / name for name in NAMES]
    program = SUPPORT / "wire_histories.cpp"
    command = [*cpp_compiler(), "-std=c++17", "-O1", "-g", *flags, f"-I{folder}"]
    command += [str(each) for each in (*sources, program) if each.suffix == ".cpp"]
    return build_once("wire_histories", command, [*sources, program])


def run(program: Path, first: int, kind: str, count: int) -> str:
    """What is wrong in some histories; empty if nothing is."""
    command = [program, str(first), str(count), *([kind] if kind else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode == 0 and done.stdout == f"{count} histories\n":
        return ""
    return (done.stdout + done.stderr).strip()[-2000:] or f"exit {done.returncode}"


def not_found() -> list[str]:
    """The planted bugs that no history finds."""

    def is_found(bug: str) -> bool:
        name, before, after = BUGS[bug]
        with tempfile.TemporaryDirectory() as there:
            folder = Path(there)
            (folder / "runtime/wire").mkdir(parents=True)
            for each in NAMES:
                text = (ROOT / "csrc/runtime/wire" / each).read_text()
                if each == name:
                    if text.count(before) != 1:
                        raise ValueError(f"wire_histories.py: {bug}: {before!r} is not there once")
                    text = text.replace(before, after)
                (folder / "runtime/wire" / each).write_text(text)
            program = build(["-fsanitize=address,undefined"], folder)
        found = [run(program, 1, kind, 5 * count) for kind, count in COUNTS.items()]
        program.unlink()
        print(f"{bug}: {next((each.splitlines()[0] for each in found if each), 'NOT FOUND')}")
        return any(found)

    with ThreadPoolExecutor(2) as pool:
        return [bug for bug, found in zip(BUGS, pool.map(is_found, BUGS), strict=True) if not found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="%(default)s")
    parser.add_argument("--first", type=int, default=0, help="seed (%(default)s)")
    options = parser.parse_args()
    begun = time.monotonic()
    missed = not_found()
    program = build(["-fsanitize=address,undefined"], ROOT / "csrc")
    until = time.monotonic() + 60 * options.minutes
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    wrong: list[dict[str, Any]] = []

    def go_on(kind: str) -> None:
        first = options.first
        while time.monotonic() < until:
            found = run(program, first, kind, COUNTS[kind])
            if found:
                wrong.append({"kind": kind, "first": first, "found": found})
                print(f"{kind or 'histories'} from seed {first} on: {found}", flush=True)
            first += COUNTS[kind]
            counts[kind] += COUNTS[kind]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(go_on, COUNTS))
    print(
        f"{counts['']:,} histories of two links, {counts['hostile']:,} of a hostile process: "
        f"{len(wrong)} wrong; {len(BUGS) - len(missed)} of {len(BUGS)} planted bugs found"
    )
    if len(sys.argv) == 1:
        store(
            TABLE,
            begun,
            histories=counts[""],
            hostile_histories=counts["hostile"],
            wrong=wrong,
            planted_bugs=len(BUGS),
            planted_bugs_not_found=missed,
        )
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
