"""Compares predicted step times of ``commhook plan`` with measured ones.

``python benchmarks/bench_plan.py`` plans for the models, buckets and links in the stored results of
bench_link and bench_wan. It must run on the machine of these results; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench_link import BASELINE, format_caps
from lab_bench import format_link, parse_link
from link_rank import ALONE, PYTORCH
from machine import FOLDER, as_lines, environment
from netlab import Lab, LabError
from step_alone import on_all_ranks, step_alone
from wan_rank import TORCHFT

from torch_commhook.cli.text_model import ByteTransformer
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import NO_HOOK
from torch_commhook.planning import LinkFile, Measured, Model, measure, plan
from torch_commhook.planning.measured import with_bench_times

RESULTS = FOLDER / "results"
LINKS = RESULTS / "links"
#: The allowed deviation from the measured time, and the required share of rows within it.
NEAR, AT_LEAST = 0.15, 1.0
_BATCH = 2  # bench_link's
_BENCH_SECONDS = 20.0


@dataclass(frozen=True)
class Row:
    """A measured step.

    Attributes:
        source: the name of the benchmark.
        link: the link, in the form of :func:`lab_bench.format_link`.
        hook: the hook, in the form of ``train``.
        seconds: the time of the step.
        compute_seconds: the time of a step without communication.
    """

    source: str
    link: str
    hook: str
    seconds: float
    compute_seconds: float


# ---- measured steps ------------------------------------------------------------------------------


def link_rows(results: dict[str, Any]) -> list[Row]:
    """The rows of bench_link's results with its first buckets, without PyTorch's own hooks."""
    caps = results["options"]["bucket_cap_mb"][0]
    groups: dict[str, dict[str, float]] = {}
    for row in results["rows"]:
        if f" {format_caps(caps)} MiB" in row["group"]:
            groups.setdefault(row["group"], {})[row["job"]] = row["seconds"]
    return [
        Row(
            results["name"],
            group.split(",")[0],
            NO_HOOK if job == BASELINE else job,
            seconds,
            times[ALONE],
        )
        for group, times in groups.items()
        for job, seconds in times.items()
        if job not in (ALONE, *PYTORCH)
    ]


def wan_rows(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each hook of bench_wan, and for none: the median step over seeds."""
    compute_seconds = statistics.median(run["compute_seconds"] for run in runs)
    steps: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["way"] not in PYTORCH and run["way"] not in TORCHFT:
            link = format_link(run["rate"], run["delay"])
            took = run["seconds"][-1] / run["steps"][-1]
            steps.setdefault((link, run["way"]), []).append(took)
    return [
        Row("bench_wan", link, way, statistics.median(took), compute_seconds)
        for (link, way), took in steps.items()
    ]


# ---- hooks on as many processes as there were ranks ----------------------------------------------


def _computing_of_hooks(
    barrier: Any, hooks: Sequence[str], shape: dict[str, int], caps: Sequence[float]
) -> list[float]:
    model = model_of(shape)
    found = []
    for hook in hooks:
        barrier.wait()
        (each,) = measure([hook], model=model, world_size=2, bucket_cap_mb=caps)
        found.append(each.compute_seconds)
    return found


def measure_hooks(
    hooks: Sequence[str], shape: dict[str, int], config: TrainConfig
) -> list[Measured]:
    """The figures of hooks, with the mean computing time over the ranks."""
    caps = config.bucket_cap_mb
    every = on_all_ranks(config.ranks, _computing_of_hooks, list(hooks), shape, caps)
    measured = measure(hooks, model=model_of(shape), world_size=config.ranks, bucket_cap_mb=caps)
    return [
        replace(each, compute_seconds=statistics.fmean(own))
        for each, own in zip(measured, zip(*every, strict=True), strict=True)
    ]


def model_of(shape: dict[str, int]) -> Model:
    """The transformer of ``train``, with these fields of its configuration."""
    config = TrainConfig(**shape)
    with torch.device("meta"):
        return Model.of(ByteTransformer(config.layers, config.dim, config.heads))


# ---- links ---------------------------------------------------------------------------------------


def bench_link_file(link: str, folder: Path) -> LinkFile | None:
    """The file of ``commhook bench`` for a lab's link. A missing file is measured and stored.

    Returns:
        None if this machine cannot make a lab, or bench fails.
    """
    path = folder / f"{link.replace(' ', '_')}.json"
    if path.exists():
        return LinkFile.read(path)
    rate, delay = parse_link(link)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch_commhook", "bench", "--parts", "link,hooks"]
    command += ["--threads", "1", "--seconds", f"{_BENCH_SECONDS:g}", "--out", str(path)]
    try:
        with Lab(TrainConfig().ranks, rate, delay=delay) as lab:
            if lab.run(command, timeout=600.0) != 0:
                return None
    except LabError as error:
        print(f"bench_plan: no link of {link}: {error}", file=sys.stderr)
        return None
    return LinkFile.read(path)


# ---- the comparison ------------------------------------------------------------------------------


def compare(
    rows: Sequence[Row],
    measured: Sequence[Measured],
    model: Model,
    copy_seconds: float,
    folder: Path | None,
) -> Iterator[dict[str, Any]]:
    """Compare each row with the prediction of plan.

    Args:
        rows: the measured steps of one model.
        measured: the figures of its hooks.
        model: the model.
        copy_seconds: the time of copying gradients into DDP's buckets, which steps without DDP
            lack.
        folder: the folder of files of ``commhook bench``; None to plan with the links' settings.
    """
    config = TrainConfig()
    sizes = model.bucket_sizes(config.bucket_cap_mb)
    by_hook = {each.hook: each for each in measured}
    for row in rows:
        rate, delay = parse_link(row.link)
        found, bits, seconds = [by_hook[row.hook]], float(rate), delay or 0.0
        file = None if folder is None else bench_link_file(row.link, folder)
        if file is not None and file.link is not None:
            bits, seconds = file.link.bits_per_second, file.link.delay_seconds
            found = with_bench_times(found, file, elements=model.elements, world_size=config.ranks)
        (cost,) = plan(
            found,
            bits_per_second=bits,
            delay_seconds=seconds,
            compute_seconds=row.compute_seconds + copy_seconds,
            buckets=sizes,
        )
        yield {
            "source": row.source,
            "link": row.link,
            "hook": row.hook,
            "compute_seconds": row.compute_seconds,
            "copy_seconds": copy_seconds,
            "hook_seconds": cost.compute_seconds,
            "measured_seconds": row.seconds,
            "planned_seconds": cost.step_seconds,
            "off": cost.step_seconds / row.seconds - 1,
        }


def compare_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare all stored steps with the predictions of plan."""
    config, found = TrainConfig(), []
    folder = options.links if options.from_bench else None
    of_links = [row for path in options.link_results for row in link_rows(_read(path))]
    runs = _read(options.wan_results)["runs"]
    names = ("layers", "dim", "seq", "batch")
    plans = [{name: run["plan"][name] for name in names} for run in runs]
    if any(each != plans[0] for each in plans):
        raise ValueError(f"{options.wan_results} has runs of several models or batches")
    small_copy = statistics.median(run["copy_seconds"] for run in runs)
    _, copy = step_alone({}, _BATCH)
    of_wan = wan_rows(runs)
    for shape, rows, copies in (({}, of_links, copy), (plans[0], of_wan, small_copy)):
        hooks = list(dict.fromkeys(row.hook for row in rows))
        measured = measure_hooks(hooks, shape, config)
        found += compare(rows, measured, model_of(shape), copies, folder)
    return found


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def print_rows(rows: Sequence[dict[str, Any]]) -> bool:
    """Print the table. Returns whether enough rows are near."""
    print("| link | hook | measured | planned | off |")
    print("|---|---|---|---|---|")
    for row in rows:
        measured, planned = row["measured_seconds"] * 1e3, row["planned_seconds"] * 1e3
        name = f"{row['link']} | `{row['hook']}`"
        print(f"| {name} | {measured:.0f} ms | {planned:.0f} ms | {row['off']:+.0%} |")
    for source in dict.fromkeys(row["source"] for row in rows):
        own = [row for row in rows if row["source"] == source]
        near = sum(abs(row["off"]) <= NEAR for row in own)
        print(f"{source}: {near} of {len(own)} within {NEAR:.0%}.")
    near = sum(abs(row["off"]) <= NEAR for row in rows)
    print(f"{near} of {len(rows)} ({near / len(rows):.0%}) within {NEAR:.0%}.")
    return near >= AT_LEAST * len(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    stored = [RESULTS / f"bench_link{part}.json" for part in ("", "_far", "_far_streamed")]
    add("--link-results", type=Path, nargs="+", default=stored, metavar="FILE")
    add("--wan-results", type=Path, default=RESULTS / "bench_wan.json", metavar="FILE")
    add(
        "--from-bench",
        action="store_true",
        help="use links and hooks' times that commhook bench measures in a lab",
    )
    add(
        "--links",
        type=Path,
        default=LINKS,
        metavar="FOLDER",
        help="the folder of files of commhook bench; missing ones are measured",
    )
    add("--out", type=Path, default=RESULTS / "bench_plan.json", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    here = environment("cpu")
    try:
        stored_environments = [
            *(_read(path)["environment"] for path in options.link_results),
            *(run["environment"] for run in _read(options.wan_results)["runs"]),
        ]
    except OSError as error:
        print(f"bench_plan: {error}", file=sys.stderr)
        return 1
    for there in stored_environments:
        differ = [key for key in ("processor", "processors", "torch") if here[key] != there[key]]
        if differ:
            said = "; ".join(f"{key} {there[key]}, here {here[key]}" for key in differ)
            print(f"bench_plan: the results are from another machine: {said}", file=sys.stderr)
            return 1
    rows = compare_all(options)
    held = print_rows(rows)
    document = {"name": "bench_plan", "environment": here, "from_bench": options.from_bench}
    options.out.write_text(as_lines({**document, "rows": rows}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
