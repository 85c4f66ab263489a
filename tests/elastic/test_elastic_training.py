"""Training goes on when ranks are lost, and lets new ones in: all members hold the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from repository import SUPPORT

pytestmark = pytest.mark.skipif(
    "COMMHOOK_ELASTIC" not in os.environ,
    reason="one of about twenty runs did not end in time, for a cause that is not known yet: "
    "COMMHOOK_ELASTIC=1 runs it",
)

#: ``said``: how processes end, where not with "done". The rest is for ``elastic_ranks.py``.
CASES: dict[str, dict[str, Any]] = {
    "a rank is killed in its backward": {
        "said": {1: "killed"},
        "ranks": 4,
        "steps": 12,
        "hook": "allreduce",
        "events": [{"rank": 1, "step": 5, "do": "kill"}],
    },
    "the first rank is killed": {
        "said": {0: "killed"},
        "ranks": 3,
        "steps": 10,
        "hook": "with error",
        "events": [{"rank": 0, "step": 5, "do": "kill"}],
    },
    "a rank is killed at the end of a step": {
        "said": {2: "killed"},
        "ranks": 4,
        "steps": 10,
        "hook": "topk",
        "events": [{"rank": 2, "step": 5, "do": "kill at the end"}],
    },
    "two ranks are killed, one after the other, until one is left": {
        "said": {1: "killed", 2: "killed"},
        "ranks": 3,
        "steps": 12,
        "hook": "blockwise",
        "events": [
            {"rank": 1, "step": 4, "do": "kill"},
            {"rank": 2, "step": 8, "do": "kill"},
        ],
    },
    "a rank is stopped, and goes on when the others have done without it": {
        "said": {1: "LeftOutError"},
        "ranks": 3,
        "steps": 10,
        "hook": "powersgd",
        "events": [{"rank": 1, "step": 5, "do": "stop"}],
    },
    "a rank's hook raises": {
        "said": {2: "ZeroDivisionError"},
        "ranks": 3,
        "steps": 10,
        "hook": "allreduce",
        "events": [{"rank": 2, "step": 5, "do": "raise"}],
    },
    "a rank leaves": {
        "said": {0: "left"},
        "ranks": 3,
        "steps": 10,
        "hook": "with error",
        "events": [{"rank": 0, "step": 5, "do": "leave"}],
    },
    "a new rank is let in": {
        "ranks": 2,
        "steps": 60,
        "hook": "powersgd",
        "events": [],
        "late": [5],
        "pause": 0.02,
    },
    "a killed rank's process starts anew": {
        "said": {1: "killed"},
        "ranks": 3,
        "steps": 60,
        "hook": "with error",
        "events": [{"rank": 1, "step": 5, "do": "kill"}],
        "late": [8],
        "pause": 0.02,
    },
    "the rank that gives a new one its state is killed while it does": {
        "ranks": 3,
        "steps": 60,
        "hook": "allreduce",
        "events": [
            {"rank": rank, "step": 2, "do": "kill the first that sends"} for rank in range(3)
        ],
        "late": [5],
        "pause": 0.02,
    },
    "local steps: a rank is killed between two exchanges": {
        "said": {1: "killed"},
        "ranks": 4,
        "steps": 16,
        "hook": "local",
        "events": [{"rank": 1, "step": 6, "do": "kill"}],
    },
    "local steps: the first rank is killed in an exchange": {
        "said": {0: "killed"},
        "ranks": 3,
        "steps": 12,
        "hook": "local with error",
        "events": [{"rank": 0, "step": 6, "do": "kill in its exchange"}],
    },
    "local steps: a rank is killed at the end of an exchange": {
        "said": {2: "killed"},
        "ranks": 4,
        "steps": 12,
        "hook": "local powersgd",
        "events": [{"rank": 2, "step": 6, "do": "kill at the end"}],
    },
    "local steps: a rank is stopped": {
        "said": {1: "LeftOutError"},
        "ranks": 3,
        "steps": 9,
        "hook": "local with error",
        "events": [{"rank": 1, "step": 5, "do": "stop"}],
    },
    "local steps: a rank leaves": {
        "said": {1: "left"},
        "ranks": 3,
        "steps": 16,
        "hook": "local",
        "events": [{"rank": 1, "step": 6, "do": "leave"}],
    },
    "local steps: a killed rank's process starts anew": {
        "said": {1: "killed"},
        "ranks": 3,
        "steps": 60,
        "hook": "local powersgd",
        "events": [{"rank": 1, "step": 5, "do": "kill"}],
        "late": [8],
        "pause": 0.02,
    },
    "local steps: the rank that gives a new one its state is killed while it does": {
        "ranks": 3,
        "steps": 60,
        "hook": "local",
        "events": [
            {"rank": rank, "step": 2, "do": "kill the first that sends"} for rank in range(3)
        ],
        "late": [5],
        "pause": 0.02,
    },
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the ranks of each case have seen."""
    folder = tmp_path_factory.mktemp("elastic")
    script = SUPPORT / "elastic_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(list(CASES.values()))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_all_that_go_on_hold_the_same(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    case, found = CASES[name], outcomes[name]
    if "the rank that gives" in name:  # whichever of them that is
        found["said"].remove("killed")
        found["steps"].remove(min(found["steps"][: case["ranks"]], key=len))
        case = {**case, "ranks": case["ranks"] - 1}
    for number, said in enumerate(found["said"]):
        expected = case.get("said", {}).get(number, "done")
        assert said == expected or said.startswith(f"{expected}:"), (number, said)
    of_step: dict[int, list[Any]] = {}
    for number, steps in enumerate(found["steps"]):
        for step, *values, _ in steps:
            assert of_step.setdefault(step, values) == values, (number, step)
    # Each step counts once, on each rank that is there to its end.
    assert sorted(of_step) == list(range(1, case["steps"] + 1))
    for said, steps in zip(found["said"], found["steps"], strict=True):
        numbers = [step for step, *_ in steps]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        if said == "done":
            assert numbers[-1] == case["steps"]
    if case.get("late"):
        late = found["steps"][case["ranks"]]
        assert 1 < late[0][0] < case["steps"], "the new rank was let in in between"
