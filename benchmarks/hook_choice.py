"""Tabulates the hooks that ``commhook plan`` recommends, by optimizer, link and number of ranks.

``python benchmarks/hook_choice.py`` writes the table into docs/choose_a_hook.md. With ``--measure``
it first measures the hooks' computing times, in as many processes as ``train`` has ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from bench_plan import measure_hooks, model_of
from machine import FOLDER, as_lines, environment

from torch_commhook.cli.plan_advice import advise
from torch_commhook.cli.plan_parser import format_rate, say_seconds
from torch_commhook.cli.train_config import DEFAULT_HOOKS, TrainConfig
from torch_commhook.planning import measure, plan

RESULTS = FOLDER / "results" / "hook_choice.json"
PAGE = FOLDER.parent / "docs" / "choose_a_hook.md"
BEGIN, END = "<!-- table of hook_choice.py -->", "<!-- end of the table -->"
#: bench_link's step without communication.
COMPUTE_SECONDS = 0.225
RANKS = (2, 8, 64)
#: Bits per second, and the delay of a message one way in seconds.
LINKS = (
    (100e9, 0.0),
    (10e9, 0.0),
    (1e9, 0.0),
    (200e6, 0.0),
    (50e6, 0.0),
    (200e6, 0.025),
    (200e6, 0.1),
)
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


def measured_seconds() -> dict[str, float]:
    """The stored computing times of hooks in a step, in seconds."""
    found: dict[str, float] = json.loads(RESULTS.read_text())["compute_seconds"]
    return found


def lines_of(known: dict[str, float]) -> Iterator[str]:
    """The lines of the table.

    Args:
        known: the computing time of each hook, in seconds.
    """
    model = model_of({})
    yield f"| optimizer, link | {' | '.join(f'{ranks} ranks' for ranks in RANKS)} |"
    yield f"|{'---|' * (1 + len(RANKS))}"
    for optimizer, name in OPTIMIZERS.items():
        hooks = DEFAULT_HOOKS[optimizer]
        # With one rank on each node, formulas give the bytes.
        measured = {
            ranks: measure(hooks, model=model, world_size=ranks, nodes=ranks, known_seconds=known)
            for ranks in RANKS
        }
        for rate, delay in LINKS:
            cells = []
            for ranks in RANKS:
                costs = plan(
                    measured[ranks],
                    bits_per_second=rate,
                    compute_seconds=COMPUTE_SECONDS,
                    buckets=model.bucket_sizes(),
                    delay_seconds=delay,
                )
                take = advise(costs, COMPUTE_SECONDS, optimizer).hook
                (step,) = (cost.step_seconds for cost in costs if cost.hook == take)
                plain = say_seconds(costs[0].step_seconds)
                text = f"{say_seconds(step)} of {plain}" if take != costs[0].hook else plain
                cells.append(f"{short(take)}: {text}")
            far = f" and {delay * 1e3:g} ms" if delay else ""
            yield f"| {name}, {format_rate(rate)}{far} | {' | '.join(cells)} |"


def short(hook: str) -> str:
    """A hook's text. That of ``local_sgd`` has only its first argument; the page has the others."""
    if hook.startswith("local_sgd("):
        return f"`local_sgd({hook.partition('(')[2].partition(',')[0]}, ...)`"
    return f"`{hook}`"


def page(text: str, table: Sequence[str]) -> str:
    """The page with the new table in place of the old one."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}", "", *table, "", f"{END}{after}"])


def measure_all() -> dict[str, Any]:
    """The computing times of the table's hooks, with all ranks on this machine at the same time."""
    hooks = list(dict.fromkeys(hook for found in DEFAULT_HOOKS.values() for hook in found))
    found = {each.hook: each.compute_seconds for each in measure_hooks(hooks, {}, TrainConfig())}
    return {"name": "hook_choice", "environment": environment("cpu"), "compute_seconds": found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure the hooks anew")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.measure:
        RESULTS.write_text(as_lines(measure_all()))
    PAGE.write_text(page(PAGE.read_text(), list(lines_of(measured_seconds()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
