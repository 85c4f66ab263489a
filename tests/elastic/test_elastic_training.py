"""Training goes on when ranks are lost, and lets new ones in: all members hold the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from repository import SUPPORT

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
    "in pieces: a new rank is let in": {
        "ranks": 2,
        "steps": 80,
        "hook": "powersgd",
        "events": [],
        "late": [5],
        "pause": 0.02,
        "in_pieces": 300,
    },
    "in pieces: a killed rank's process starts anew": {
        "said": {1: "killed"},
        "ranks": 3,
        "steps": 80,
        "hook": "with error",
        "events": [{"rank": 1, "step": 5, "do": "kill"}],
        "late": [8],
        "pause": 0.02,
        "in_pieces": 300,
    },
    "in pieces: the rank that gives a new one its state is killed while it does": {
        "ranks": 3,
        "steps": 80,
        "hook": "topk",
        "events": [{"rank": rank, "step": 2, "do": "kill in a piece"} for rank in range(3)],
        "late": [5],
        "pause": 0.02,
        "in_pieces": 300,
    },
    "a new rank attaches the hook that the others have since": {
        "ranks": 2,
        "steps": 60,
        "hook": "blockwise",
        "late_hook": "topk",
        "events": [{"rank": rank, "step": 3, "do": "replace"} for rank in range(2)],
        "late": [5],
        "pause": 0.02,
    },
    "auto: a rank is killed in the step that chooses": {
        "said": {1: "killed"},
        "ranks": 3,
        "steps": 12,
        "hook": "auto",
        "events": [{"rank": 1, "step": 6, "do": "kill"}],
    },
    "auto: a new rank gets the choice": {
        "ranks": 2,
        "steps": 60,
        "hook": "auto",
        "events": [],
        "late": [10],
        "pause": 0.02,
    },
    "in pieces: auto, and a new rank gets the choice": {
        "ranks": 2,
        "steps": 80,
        "hook": "auto",
        "events": [],
        "late": [10],
        "pause": 0.02,
        "in_pieces": 300,
    },
    "auto: ranks measure": {
        "ranks": 2,
        "steps": 8,
        "hook": "auto that measures",
        "events": [],
    },
    "in pieces: the mean": {
        "ranks": 2,
        "steps": 60,
        "hook": "allreduce",
        "events": [],
        "late": [5],
        "pause": 0.02,
        "in_pieces": 300,
        "counts": [3.0, 1.0, 8.0],
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
    "local steps are counted": {
        "said": {1: "killed"},
        "ranks": 4,
        "steps": 13,
        "hook": "local mean",
        "counts": [3.0, 2.0, 6.0, 0.0],
        "events": [{"rank": 1, "step": 6, "do": "kill"}],
    },
    "local steps: errors are those of before the exchange": {
        "said": {0: "killed"},
        "ranks": 3,
        "steps": 2,
        "hook": "local largest",
        "counts": [5.0, 3.0, 1.0],
        "events": [{"rank": 0, "step": 1, "do": "kill in its exchange"}],
    },
    "local steps: ranks that differ after each exchange come together": {
        "said": {0: "killed"},
        "ranks": 3,
        "steps": 40,
        "hook": "local with error reset",
        "events": [{"rank": 0, "step": 8, "do": "kill"}],
        "late": [6],
        "pause": 0.02,
        "together": 6,
    },
    "streaming: the lost rank does not count": {
        "said": {0: "killed"},
        "ranks": 3,
        "steps": 5,
        "hook": "in background",
        "counts": [6.0, 3.0, 1.0],
        "events": [{"rank": 0, "step": 3, "do": "kill"}],
        "pause": 0.1,
    },
    "streaming: a rank is killed": {
        "said": {1: "killed"},
        "ranks": 4,
        "steps": 20,
        "hook": "streaming",
        "events": [{"rank": 1, "step": 7, "do": "kill"}],
        "together": 10,
    },
    "streaming: a rank is killed while an exchange is under way": {
        "said": {0: "killed"},
        "ranks": 3,
        "steps": 20,
        "hook": "streaming with error",
        "events": [{"rank": 0, "step": 5, "do": "kill"}],
        "together": 10,
    },
    "streaming: a rank is killed in the end of an exchange": {
        "said": {0: "killed"},
        "ranks": 3,
        "steps": 20,
        "hook": "streaming with error",
        "events": [{"rank": 0, "step": 4, "do": "kill in its exchange"}],
        "together": 10,
    },
    "streaming: a rank is stopped": {
        "said": {2: "LeftOutError"},
        "ranks": 3,
        "steps": 12,
        "hook": "streaming",
        "events": [{"rank": 2, "step": 5, "do": "stop"}],
        "together": 6,
    },
    "streaming: a killed rank's process starts anew": {
        "said": {1: "killed"},
        "ranks": 3,
        "steps": 60,
        "hook": "streaming with error",
        "events": [{"rank": 1, "step": 5, "do": "kill"}],
        "late": [8],
        "pause": 0.02,
        "together": 10,
    },
    "fragments: a killed rank's process starts anew": {
        "said": {1: "killed"},
        "ranks": 3,
        "steps": 60,
        "hook": "fragments",
        "events": [{"rank": 1, "step": 5, "do": "kill"}],
        "late": [8],
        "pause": 0.02,
        "together": 10,
    },
    "a slow rank is named": {
        "ranks": 3,
        "steps": 12,
        "hook": "allreduce",
        "events": [{"rank": 1, "step": 3, "do": "slow"}],
        "pause": 0.03,
        "straggler": {"straggler": 3.0, "straggler_steps": 4},
    },
    "a slow rank is left out": {
        "said": {1: "LeftOutError"},
        "ranks": 3,
        "steps": 20,
        "hook": "with error",
        "events": [{"rank": 1, "step": 3, "do": "slow"}],
        "pause": 0.03,
        "straggler": {"straggler": 3.0, "straggler_steps": 4, "leave_out_stragglers": True},
    },
    "local steps: a slow rank is left out": {
        "said": {2: "LeftOutError"},
        "ranks": 3,
        "steps": 20,
        "hook": "local powersgd",
        "events": [{"rank": 2, "step": 2, "do": "slow"}],
        "pause": 0.03,
        "straggler": {"straggler": 3.0, "straggler_steps": 2, "leave_out_stragglers": True},
    },
    "too few would be left without the slow rank": {
        "ranks": 2,
        "min_ranks": 2,
        "steps": 12,
        "hook": "allreduce",
        "events": [{"rank": 0, "step": 2, "do": "slow"}],
        "pause": 0.03,
        "straggler": {"straggler": 3.0, "straggler_steps": 3, "leave_out_stragglers": True},
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
            if values[0] == "joining":
                assert number >= case["ranks"] and of_step[step][1:] == values[1:]
                continue
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


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("late")])
def test_new_ranks_begin_as_the_others_do(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    began = outcomes[name]["stats"][-1]["began"]
    # With fragments, a new rank begins where another one is.
    is_at_anchor = "fragments" not in name and "streaming" not in name
    assert began["remembers"] and (began["at_anchor"] or not is_at_anchor)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("in pieces")])
def test_a_new_rank_has_all_after_some_steps(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    case, found = CASES[name], outcomes[name]
    steps = found["steps"][-1]
    partial = [step for step, digest, *_ in steps if digest == "joining"]
    first = steps[0][0]
    # The last of them tells that it has all.
    pieces = 1 if "counts" in case else 3
    assert len(partial) > pieces and partial == list(range(first, first + len(partial)))
    assert len(partial) < len(steps)
    if "counts" not in case:
        return
    values = {step: value for step, value, *_ in found["steps"][0]}
    for step in range(2, case["steps"] + 1):
        moved = values[step - 1][0] - values[step][0]
        mean = 2.0 if step <= partial[-1] else 4.0
        assert moved == mean, step


@pytest.mark.parametrize("name", [name for name in CASES if "auto" in CASES[name]["hook"]])
def test_auto_chooses_alike(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    choices = [each["choice"] for each in outcomes[name]["stats"] if each is not None]
    assert len(choices) == outcomes[name]["said"].count("done") > 1
    assert len(set(choices)) == 1
    if CASES[name]["hook"] == "auto":
        assert choices[0] == "powersgd(rank=4)"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("together")])
def test_synchronize_brings_all_members_together(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    seen = [dict(each["together"]) for each in outcomes[name]["stats"] if each is not None]
    assert len(seen) == outcomes[name]["said"].count("done") > 1
    of_step: dict[int, set[str]] = {}
    for each in seen:
        for step, digest in each.items():
            of_step.setdefault(step, set()).add(digest)
    assert all(len(digests) == 1 for digests in of_step.values()), of_step
    assert len({next(iter(digests)) for digests in of_step.values()}) == len(of_step) > 2
    assert all(CASES[name]["steps"] in each for each in seen)


def test_a_lost_rank_costs_its_round_only(outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes["local steps are counted"]
    values = {step: value for step, value, *_ in found["steps"][0] if value is not None}
    # A round of four steps by (3 + 2 + 6 + 0) / 4, then two by (3 + 6 + 0) / 3.
    assert values == {4: [-11.0, -8.25], 8: [-23.0, -17.25], 12: [-35.0, -26.25]}
    # The rank's steps on its own in between, and no more.
    assert [step for step, *_ in found["steps"][3]] == list(range(1, 14))


def test_a_repeated_exchange_begins_with_the_errors_of_before(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    found = outcomes["local steps: errors are those of before the exchange"]
    for number in (1, 2):
        values = [value for _, value, *_ in found["steps"][number]]
        # The larger number in the first step, and in the second twice the smaller one.
        assert values == [[-2.0, 0.0], [-2.0, -3.0]]


def test_an_exchange_in_background_is_repeated_at_once(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    found = outcomes["streaming: the lost rank does not count"]
    for number in (1, 2):
        values = {step: value for step, value, *_ in found["steps"][number] if value is not None}
        # Three steps by (3 + 1) / 2, though the exchange had begun after two. Then one, whose
        # exchange ends in the next step, and takes that back.
        assert values == {3: [-6.0, -4.5], 5: [-8.0, -6.0]}


@pytest.mark.parametrize(
    ("name", "error_lost"),
    [("a rank is killed in its backward", False), ("the first rank is killed", True)],
)
def test_stats_tell_who_was_lost(
    outcomes: dict[str, dict[str, Any]], name: str, error_lost: bool
) -> None:
    case, found = CASES[name], outcomes[name]
    (killed,) = case["events"]
    for said, stats in zip(found["said"], found["stats"], strict=True):
        if said == "done":
            (event,) = stats["membership"]
            assert event.pop("reason")
            assert event == {
                "steps": killed["step"] - 1,
                "size": case["ranks"] - 1,
                "lost": [found["own"][killed["rank"]]],
                "joined": [],
                "error_lost": error_lost,
            }


def test_a_callback_is_told_of_the_ranks_and_of_their_changes(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    found = outcomes["a killed rank's process starts anew"]
    for number, expected in ((0, [3, 2, 3]), (2, [3, 2, 3]), (3, [3])):
        *_, sizes = found["steps"][number][-1]
        assert sizes == expected


def test_stats_tell_who_has_joined(outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes["a killed rank's process starts anew"]
    for number in (0, 2):
        lost, joined = found["stats"][number]["membership"]
        assert lost["lost"] == [found["own"][1]] and not lost["joined"]
        assert joined["joined"] == [found["own"][3]] and not joined["lost"]
        assert lost["error_lost"] and not joined["error_lost"] and not joined["reason"]
    assert found["stats"][3]["membership"] == [], "from when it has joined"


@pytest.mark.parametrize(
    "name", ["a slow rank is named", "too few would be left without the slow rank"]
)
def test_a_slow_rank_is_named(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    (slow,), found = CASES[name]["events"], outcomes[name]
    for stats in found["stats"]:
        ((rank, ratio),) = stats["stragglers"].items()
        assert int(rank) == found["own"][slow["rank"]] and 3.0 < ratio < 20.0
        assert stats["membership"] == []


@pytest.mark.parametrize(
    "name", ["a slow rank is left out", "local steps: a slow rank is left out"]
)
def test_a_slow_rank_is_left_out(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    (slow,), found = CASES[name]["events"], outcomes[name]
    rank = found["own"][slow["rank"]]
    assert f"(rank {rank}), because it was too slow in" in found["said"][slow["rank"]]
    for said, stats in zip(found["said"], found["stats"], strict=True):
        if said == "done":
            (event,) = stats["membership"]
            assert event["lost"] == [rank] and event["reason"] == f"rank {rank}: too slow"
            assert not stats["stragglers"], "it is no member any more"
