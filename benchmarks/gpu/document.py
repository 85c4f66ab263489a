"""A run's document: the stored results, the targets, and the page made of them."""

from __future__ import annotations

import json
import os
import re
import site
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import as_lines

from .commands import ROOT, write_whole

WORDS = {True: "ok", False: "**FAILED**", None: "not run"}
#: The tensors for which the host's time has targets.
ONE_BUCKET = "161x40704"
#: The most bytes of all logs together that are stored with the document.
LONGEST_LOGS = 12 << 20


class Store:
    """Stores a document in several folders, whenever it changes.

    Args:
        document: must be serialisable as JSON.
        folders: for ``<name>.json`` and ``<name>.md``.
        state: a file for the document alone, which a later run can continue.
    """

    def __init__(self, document: dict[str, Any], folders: Sequence[Path], state: Path) -> None:
        self.document = document
        self.folders = folders
        self.state = state
        self._stored = ""

    def save(self) -> None:
        """Writes the document and its page, each whole. Skips a folder that fails."""
        text = without_folders(as_lines(self.document))
        if text == self._stored:
            return
        name = name_of(self.document)
        files = {self.state: text}
        for folder in self.folders:
            files |= {
                folder / f"{name}.json": text,
                folder / f"{name}.md": page(json.loads(text)),  # of the rounded figures
            }
        for path, content in files.items():
            try:
                write_whole(path, content)
            except OSError as error:
                print(f"cannot write {path}: {error}", file=sys.stderr)
        self._stored = text

    def save_logs(self, logs: Path) -> None:
        """Writes the ends of all logs into one file, for transfer from this machine."""
        paths = sorted(logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
        share = LONGEST_LOGS // max(len(paths), 1)
        text = "".join(
            f"==== {path.name}\n{path.read_text(errors='replace')[-share:]}\n" for path in paths
        )
        out = os.environ.get("OUT")
        if out:
            write_whole(Path(out, f"{name_of(self.document)}-logs.txt"), text)


def without_folders(text: str) -> str:
    """The text without this machine's folders: names of files begin at the tree, or at packages."""
    for folder in (str(ROOT), *site.getsitepackages()):
        text = text.replace(f"{folder}/", "")
    return text


def name_of(document: dict[str, Any]) -> str:
    """The name of the files: the card and the day."""
    card = "dry-run" if document["dry_run"] else document["machine"].get("card", "unknown-card")
    return f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}-{document['date'][:10]}"


# ---- targets -------------------------------------------------------------------------------------


def targets(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with a measured time: its name, result and wanted value, and whether it is met.

    A dry run has none: its times are of small tensors on the CPU.
    """
    found: list[dict[str, Any]] = []
    if document["dry_run"]:
        return found
    for row in document["times"]:
        where = f"{row['work']}, {row['group']}, {shards_text(row['shards'])}"
        if row["least"] is not None:
            met = row["of_copy"] >= row["least"]
            reached, wanted = f"{row['of_copy']:.3f} x the copy", f"at least {row['least']:g}"
            found.append({"what": where, "reached": reached, "wanted": wanted, "met": met})
        host, most = row["host_seconds"], row["most_host_seconds"]
        if host is not None and most is not None and row["group"] == ONE_BUCKET:
            reached, wanted = f"{host * 1e6:.1f} us of the host", f"at most {most * 1e6:g}"
            found.append({"what": where, "reached": reached, "wanted": wanted, "met": host <= most})
    for name, results in document["benchmarks"].items():
        for row in results["rows"]:
            if row["holds"] is not None:
                found.append(
                    {
                        "what": f"bench_{name}: {row['group']}, {row['job']}",
                        "reached": f"{row['ratio']:.3f} x {row['baseline']}",
                        "wanted": row["target"],
                        "met": row["holds"],
                    }
                )
    return found


def shards_text(shards: int) -> str:
    return "1 shard" if shards == 1 else f"{shards} shards"


# ---- the page ------------------------------------------------------------------------------------


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for cells in body:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
    yield ""


def page(document: dict[str, Any]) -> str:
    """The document as a page in Markdown."""
    machine = document["machine"]
    title = "A dry run" if document["dry_run"] else machine.get("card", "unknown card")
    lines = [f"# {title}, {document['date'][:10]}", "", "Made by `make gpu`.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items() if value is not None]
    lines += [f"- {name}: {document[name]}" for name in ("commit", "sources", "date", "minutes")]
    lines += ["", *part_lines(document), *target_lines(document), *time_lines(document)]
    lines += [*counter_lines(document), *benchmark_lines(document), *clock_lines(document)]
    return "\n".join(lines).rstrip() + "\n"


def part_lines(document: dict[str, Any]) -> Iterator[str]:
    yield from ("## Parts", "")
    body = []
    for name, part in document["parts"].items():
        word = WORDS[part["passed"]] if part["finished"] else "unfinished"
        body.append((name, word, f"{part['seconds']:.0f}", part["text"]))
    yield from table(("part", "", "seconds", ""), body)
    bad = [
        f"- {name}: {item['name']}: {first_line(item['text'])}"
        for name, part in document["parts"].items()
        for item in part["items"]
        if item["passed"] is False
    ]
    if bad:
        yield from ("## Failures", "", *bad, "")


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""


def target_lines(document: dict[str, Any]) -> Iterator[str]:
    if document["dry_run"]:
        return
    all_targets = targets(document)
    missed = [each for each in all_targets if not each["met"]]
    yield from ("## Targets", "")
    yield f"{len(all_targets) - len(missed)} of {len(all_targets)} are met."
    yield ""
    ordered = [*missed, *(each for each in all_targets if each["met"])]
    if ordered:
        yield from table(
            ("", "reached", "wanted", "met"),
            [
                (each["what"], each["reached"], each["wanted"], "yes" if each["met"] else "**no**")
                for each in ordered
            ],
        )


def time_lines(document: dict[str, Any]) -> Iterator[str]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in document["times"]:
        others = ", without targets" if row["works"] == "rest" else ""
        title = f"{row['group']}, {shards_text(row['shards'])}{others}"
        groups.setdefault(title, []).append(row)
    for title, rows in groups.items():
        yield from (f"## Times: {title}", "")
        yield from table(
            ("work", "us", "quartiles", "samples", "how", "host us", "GB/s", "of the copy"),
            [time_cells(row) for row in rows],
        )


def time_cells(row: dict[str, Any]) -> list[str]:
    host = row["host_seconds"]
    return [
        row["work"],
        f"{row['seconds'] * 1e6:.2f}",
        f"{row['first_quartile'] * 1e6:.2f} to {row['third_quartile'] * 1e6:.2f}",
        str(row["samples"]),
        row["how"],
        "" if host is None else f"{host * 1e6:.1f}",
        f"{row['nbytes'] / row['seconds'] / 1e9:.0f}",
        f"{row['of_copy']:.3f}",
    ]


def counter_lines(document: dict[str, Any]) -> Iterator[str]:
    if not document["counters"]:
        return
    yield from ("## Counters", "")
    header = (
        *("work", "kernel", "us", "DRAM bytes of the fewest", "issue active"),
        *("instructions a value", "warps active", "registers", "conflicts: loads", "stores"),
    )
    yield from table(header, [counter_cells(row) for row in document["counters"]])


def counter_cells(row: dict[str, Any]) -> list[str]:
    def told(name: str, form: str = ".0f", factor: float = 1.0) -> str:
        value = row.get(name)
        return "" if value is None else format(value * factor, form)

    dram = None
    if None not in (row["dram_read"], row["dram_written"]):
        dram = (row["dram_read"] + row["dram_written"]) / row["nbytes"]
    instructions = row["warp_instructions"]
    return [
        f"{row['work']}, {shards_text(row['shards'])}",
        f"`{row['kernel'].split('(')[0][-60:]}`",
        told("nanoseconds", ".1f", 1e-3),
        "" if dram is None else f"{dram:.2f}",
        told("issue_active", ".2f"),
        "" if instructions is None else f"{32 * instructions / row['numel']:.1f}",
        told("warps_active_percent", ".0f"),
        told("registers"),
        told("load_conflicts"),
        told("store_conflicts"),
    ]


def clock_lines(document: dict[str, Any]) -> Iterator[str]:
    """The card's clocks and temperature after each part, which affect the results."""
    told = [each for each in document["clocks"] if len(each) > 1]
    if told:
        names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
        body = [[each["after"], *(each.get(name, "") for name in names)] for each in told]
        yield from ("## Clocks", "")
        yield from table(("after", *names), body)


def benchmark_lines(document: dict[str, Any]) -> Iterator[str]:
    for name, results in document["benchmarks"].items():
        for note in results["notes"]:
            yield from (note, "")
        for group in dict.fromkeys(row["group"] for row in results["rows"]):
            yield from (f"## bench_{name}: {group}", "")
            rows = [row for row in results["rows"] if row["group"] == group]
            yield from table(
                ("job", "us", "host us", "GB/s", "ratio", "target", "holds"),
                [benchmark_cells(row) for row in rows],
            )


def benchmark_cells(row: dict[str, Any]) -> list[str]:
    speed, host = row["gigabytes_per_second"], row["cpu_seconds"]
    return [
        row["job"],
        f"{row['seconds'] * 1e6:.1f}",
        "" if host is None else f"{host * 1e6:.1f}",
        "" if speed is None else f"{speed:.0f}",
        "" if row["ratio"] is None else f"{row['ratio']:.2f} x {row['baseline']}",
        row["target"] or "",
        "" if row["holds"] is None else ("yes" if row["holds"] else "**no**"),
    ]
