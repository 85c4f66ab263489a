"""Training that is killed at a random step and goes on, against training that is not.

For each hook that remembers something: a run of ``train`` to the end; one that is killed, a rank of
it with SIGKILL, at a step that is drawn; and one that goes on from the last checkpoint that the
second has left. Weights, the optimizer's state and what the hooks remember must be the same bits in
the end.

Run with ``make kill-and-resume ARGS="[--seed N] [HOOK ...]"``. Exits with 1 where they differ.
Without arguments it writes ``kill_and_resume.json`` beside this file.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from long_run_results import store
from nested_values import different_paths
from train_processes import start_train

from torch_commhook.cli.checkpoint import read_checkpoint

TABLE = Path(__file__).with_suffix(".json")
STEPS = 150
HOOKS = [
    "error_feedback(blockwise(bits=4))",
    "error_feedback(blockwise(bits=4, rounding='stochastic', seed=3))",
    "blockwise(rounding='stochastic')",
    "error_feedback(fp8())",
    "error_feedback(sign())",
    "error_feedback(topk(0.01))",
    "error_feedback(chunk_topk(16, 1024))",
    "error_feedback(randomk(0.05))",
    "error_feedback(powersgd(rank=2))",
    "momentum(topk(0.05), beta=0.9, dtype=bfloat16)",
    "after(15, error_feedback(blockwise(bits=4)))",
    "after(15, error_feedback(topk(0.05)), before=error_feedback(blockwise(bits=4)))",
    "policy()",
    "clip(0.5, error_feedback(blockwise()))",
    "adaptive(20000, every=6)",
    "local_sgd(4, hook=error_feedback(blockwise(bits=4)))",
    "local_sgd(1, outer=outer_sgd(1.4, 0.0), hook=error_feedback(topk(0.1)), error_reset=True)",
]
_WHOLE = ("--bucket-cap-mb", "0.02")
_REPLICAS = ("--parallel", "hsdp", "--ranks", "4")
#: On models in shards: hooks, and further arguments of ``train``.
SHARDED = [
    ("error_feedback(blockwise(bits=4))", ("--parallel", "fsdp", "--weights", "blockwise()")),
    ("error_feedback(sign())", ("--parallel", "fsdp", "--ranks", "3")),
    ("error_feedback(blockwise(bits=4))", (*_REPLICAS, "--shard-hook", "blockwise()")),
    ("error_feedback(powersgd(rank=2))", _REPLICAS),
    ("local_sgd(4, hook=error_feedback(blockwise(bits=4)))", _REPLICAS),
]


def killed_and_resumed(
    hook: str, seed: int, folder: Path, *, steps: int = STEPS, how: Sequence[str] = _WHOLE
) -> dict[str, Any]:
    """Where it was killed, from where it went on, and whether all is the same in the end.

    ``how`` are further arguments of ``train``.
    """
    dice = random.Random(f"{hook} {seed}")
    arguments = ("--hook", hook, "--steps", str(steps), "--seed", str(seed), *how)
    folders = {name: folder / name for name in ("straight", "killed", "resumed")}
    for each in folders.values():
        each.mkdir(parents=True)
    with start_train(*arguments, "--save", "end.pt", folder=folders["straight"]) as run:
        assert run.wait() == 0, run.stderr
    kill_at = dice.randrange(2, steps // 2)  # long before the end: training goes on meanwhile
    saving = ("--save", "step-{step}.pt", "--save-every", "1")
    with start_train(*arguments, *saving, folder=folders["killed"]) as run:
        run.wait_for_steps(folders["killed"] / "out" / "metrics.jsonl", kill_at)
        os.kill(run.rank_pid(dice.randrange(2)), signal.SIGKILL)
        assert run.wait() != 0
    saved = max(folders["killed"].glob("step-*.pt"), key=lambda p: int(p.stem.partition("-")[2]))
    from_step = int(saved.stem.partition("-")[2])
    with start_train("--resume", saved, "--save", "end.pt", folder=folders["resumed"]) as run:
        assert run.wait() == 0, run.stderr
    straight, resumed = (
        read_checkpoint(folders[name] / "end.pt") for name in ("straight", "resumed")
    )
    different = [
        *(f"weights {name}" for name in different_paths(straight.model, resumed.model)),
        *(f"optimizer {name}" for name in different_paths(straight.optimizer, resumed.optimizer)),
        *(f"ranks {name}" for name in different_paths(straight.rank_states, resumed.rank_states)),
    ]
    assert any(state["hook"] for state in resumed.rank_states), "the hook remembers nothing"
    return {
        "hook": hook,
        "options": list(how),
        "killed_at": kill_at,
        "resumed_from": from_step,
        "steps": steps,
        "different": different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hooks", nargs="*", metavar="HOOK", help="all that remember something")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows, begun = [], time.monotonic()
    runs = [(hook, _WHOLE) for hook in options.hooks or HOOKS]
    runs += [] if options.hooks else SHARDED
    for hook, how in runs:
        with tempfile.TemporaryDirectory() as folder:
            row = killed_and_resumed(hook, options.seed, Path(folder), how=how)
        rows.append(row)
        verdict = "the same bits" if not row["different"] else f"differs: {row['different'][:3]}"
        print(
            f"{hook} {' '.join(how)}: killed after step {row['killed_at']}, resumed from "
            f"{row['resumed_from']}, {STEPS} steps: {verdict}",
            flush=True,
        )
    if not options.hooks and options.seed == 0:
        store(TABLE, begun, rows=rows)
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
