"""2,000 random histories of training with a hook, and what they find of planted faults.

``training_history.py`` says what a history is. Each is compared with a plain calculation. For each
of the faults of ``training_faults.py``, the first history that finds it is stored, as small as it
can be.

Run with ``make training-histories ARGS="[--count N] [--first SEED]"``. Prints the seed and the
smallest form of each history that fails, and exits with 1. Without arguments it writes
``training_histories.json`` beside this file.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from machine import as_lines
from training_faults import FAULTS
from training_history import draw, problems, smallest

TABLE = Path(__file__).with_suffix(".json")
COUNT = 2_000
#: So many histories a process runs before it gives their figures.
_PART = 50


def be_quiet() -> None:
    """Histories raise many errors, and warn of many."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def run_some(seeds: range) -> tuple[Counter[str], list[dict[str, Any]]]:
    """The number of histories of each model, and what is wrong in them."""
    models: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        history = draw(seed)
        models[history.model] += 1
        if problems(history):
            wrong.append(found_by(seed))
            print(f"seed {seed}: {wrong[-1]['problem']}\n  {wrong[-1]['history']}", flush=True)
    return models, wrong


def found_by(seed: int) -> dict[str, Any]:
    """The smallest form of a history that fails, and how it does."""
    history = smallest(draw(seed))
    return {"seed": seed, "history": repr(history), "problem": problems(history)[0]}


def find(fault: str) -> dict[str, Any]:
    """The first history that finds a planted fault."""
    with FAULTS[fault]():
        seed = next((each for each in range(COUNT) if problems(draw(each))), None)
        found = {} if seed is None else found_by(seed)
    print(f"{fault}: {found or 'no history finds it'}", flush=True)
    return {"fault": fault, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT, help="%(default)s")
    parser.add_argument("--first", type=int, default=0, help="seed (%(default)s)")
    options = parser.parse_args()
    begun = time.monotonic()
    seeds = range(options.first, options.first + options.count)
    parts = [seeds[first : first + _PART] for first in range(0, len(seeds), _PART)]
    models: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    planted = []
    with ProcessPoolExecutor(2, initializer=be_quiet) as pool:
        for of_part, wrong_in_part in pool.map(run_some, parts):
            models += of_part
            wrong += wrong_in_part
        if len(sys.argv) == 1:
            planted = list(pool.map(find, FAULTS))
    missed = [each["fault"] for each in planted if "seed" not in each]
    print(f"{len(seeds):,} histories: {len(wrong)} wrong; {len(missed)} faults missed")
    if len(sys.argv) == 1:
        result = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seconds": round(time.monotonic() - begun),
            "histories": len(seeds),
            "models": dict(sorted(models.items())),
            "wrong": wrong,
            "planted": planted,
        }
        TABLE.write_text(as_lines(result))
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
