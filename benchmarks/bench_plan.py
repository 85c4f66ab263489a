"""Compares the step times that ``commhook plan`` predicts with those of ``bench_link``.

``python benchmarks/bench_plan.py`` plans for the models, buckets and links of bench_link's stored
results, on the machine that measured them; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_link import BASELINE, format_caps
from lab_bench import parse_link
from link_rank import ALONE, PYTORCH
from machine import FOLDER, environment

from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.transformer import ByteTransformer
from torch_commhook.planning import bucket_sizes, measure, plan

RESULTS = FOLDER / "results"
#: The most error, as a share of the measured time.
AT_MOST = 0.20


def compare(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured and the predicted step time for each link and hook of bench_link's results."""
    config = TrainConfig()
    elements = ByteTransformer(config.layers, config.dim, config.heads).parameter_count()
    caps = results["options"]["bucket_cap_mb"][0]
    groups: dict[str, dict[str, float]] = {}
    for row in results["rows"]:
        groups.setdefault(row["group"], {})[row["job"]] = row["seconds"]
    groups = {
        group: times for group, times in groups.items() if f" {format_caps(caps)} MiB" in group
    }
    hooks = [job for job in next(iter(groups.values())) if job not in (ALONE, BASELINE, *PYTORCH)]
    measured = measure(hooks, elements=elements, world_size=config.ranks, bucket_cap_mb=caps)
    rows = []
    for group, times in groups.items():
        link = group.split(",")[0]
        rate, delay = parse_link(link)
        costs = plan(
            measured,
            bits_per_second=rate,
            delay_seconds=delay or 0.0,
            compute_seconds=times[ALONE],
            buckets=bucket_sizes(elements, caps),
        )
        for cost in costs:
            seconds = times[cost.hook]
            rows.append(
                {
                    "link": link,
                    "hook": cost.hook,
                    "measured_seconds": seconds,
                    "planned_seconds": cost.step_seconds,
                    "off": cost.step_seconds / seconds - 1,
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--link-results", type=Path, default=RESULTS / "bench_link.json", metavar="FILE")
    add("--out", type=Path, default=RESULTS / "bench_plan.json", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        link = json.loads(options.link_results.read_text())
    except OSError as error:
        print(f"bench_plan: {error}", file=sys.stderr)
        return 1
    here, there = environment("cpu"), link["environment"]
    differ = [key for key in ("processor", "processors", "torch") if here[key] != there[key]]
    if differ:
        said = "; ".join(f"{key} {there[key]}, here {here[key]}" for key in differ)
        print(f"bench_plan: {options.link_results} is of another machine: {said}", file=sys.stderr)
        return 1
    rows = compare(link)
    print("| link | hook | measured | planned | off |")
    print("|---|---|---|---|---|")
    for row in rows:
        measured, planned = row["measured_seconds"] * 1e3, row["planned_seconds"] * 1e3
        name = f"{row['link']} | `{row['hook']}`"
        print(f"| {name} | {measured:.0f} ms | {planned:.0f} ms | {row['off']:+.0%} |")
    missed = [row for row in rows if abs(row["off"]) > AT_MOST]
    print(f"{len(rows) - len(missed)} of {len(rows)} within {AT_MOST:.0%}.")
    document = {"name": "bench_plan", "environment": here, "rows": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
