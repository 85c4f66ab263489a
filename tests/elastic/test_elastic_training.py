"""Training goes on when ranks are lost, and lets new ones in: all members hold the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import stream_groups
import torch
from cpp_libraries import library
from repository import SUPPORT

#: The reports of the ranks of each case.
Outcomes = dict[str, dict[str, Any]]

#: How a process ends after an event; after any other it ends with "done".
ENDS = {
    "kill": "killed",
    "kill at the end": "killed",
    "kill in its exchange": "killed",
    "stop": "LeftOutError",
    "raise": "ZeroDivisionError",
    "leave": "left",
    "leave in order": "left",
}


def _case(
    hook: str, ranks: int, steps: int, *events: tuple[int, int, str], **others: Any
) -> dict[str, Any]:
    """A case of ``elastic_ranks.py``. An event has a rank, a step, and what happens."""
    return {
        "hook": hook,
        "ranks": ranks,
        "steps": steps,
        "events": [{"rank": rank, "step": step, "do": do} for rank, step, do in events],
        "said": {rank: ENDS[do] for rank, _, do in events if do in ENDS},
        **others,
    }


def _on_each(ranks: int, step: int, do: str) -> list[tuple[int, int, str]]:
    return [(rank, step, do) for rank in range(ranks)]


def _joins_after(steps: int, **others: Any) -> dict[str, Any]:
    """A new rank starts after this many steps."""
    return {"late": [steps], "pause": 0.02, **others}


def _named_after(steps: int, **others: Any) -> dict[str, Any]:
    """Ranks name a member that is slow in this many steps."""
    return {"straggler": {"straggler": 3.0, "straggler_steps": steps, **others}}


def _left_out_after(steps: int) -> dict[str, Any]:
    return _named_after(steps, leave_out_stragglers=True)


CASES: dict[str, dict[str, Any]] = {
    "a rank is killed in its backward": _case("allreduce", 4, 12, (1, 5, "kill")),
    "the first rank is killed": _case("with error", 3, 10, (0, 5, "kill")),
    "a hook in C++: a rank is killed in its backward": _case("in C++", 3, 10, (1, 5, "kill")),
    "a rank is killed at the end of a step": _case("topk", 4, 10, (2, 5, "kill at the end")),
    "two ranks are killed, one after the other, until one is left": _case(
        "blockwise", 3, 12, (1, 4, "kill"), (2, 8, "kill")
    ),
    "a rank is stopped, and goes on when the others have done without it": _case(
        "powersgd", 3, 10, (1, 5, "stop")
    ),
    "a rank's hook raises": _case("allreduce", 3, 10, (2, 5, "raise")),
    "a rank leaves": _case("with error", 3, 10, (0, 5, "leave")),
    "a rank leaves in order": _case("with error", 3, 10, (1, 5, "leave in order")),
    "two ranks leave in order": _case(
        "topk", 4, 10, (0, 5, "leave in order"), (3, 5, "leave in order")
    ),
    "in order: errors are handed over": _case(
        "largest", 2, 4, (1, 2, "leave in order"), counts=[4.0, 8.0]
    ),
    "local steps: a rank leaves in order": _case(
        "local with error", 3, 12, (1, 5, "leave in order")
    ),
    "a new rank is let in": _case("powersgd", 2, 60, **_joins_after(5)),
    "a killed rank's process starts anew": _case(
        "with error", 3, 60, (1, 5, "kill"), **_joins_after(8)
    ),
    "the rank that gives a new one its state is killed while it does": _case(
        "allreduce", 3, 60, *_on_each(3, 2, "kill the first that sends"), **_joins_after(5)
    ),
    "in pieces: a new rank is let in": _case("powersgd", 2, 80, **_joins_after(5, in_pieces=300)),
    "in pieces: a killed rank's process starts anew": _case(
        "with error", 3, 80, (1, 5, "kill"), **_joins_after(8, in_pieces=300)
    ),
    "in pieces: a rank leaves in order": _case(
        "with error", 3, 80, (1, 20, "leave in order"), **_joins_after(5, in_pieces=300)
    ),
    "in pieces: the rank that gives a new one its state is killed while it does": _case(
        "topk", 3, 80, *_on_each(3, 2, "kill in a piece"), **_joins_after(5, in_pieces=300)
    ),
    "a new rank attaches the hook that the others have since": _case(
        "blockwise", 2, 60, *_on_each(2, 3, "replace"), **_joins_after(5), late_hook="topk"
    ),
    "auto: a rank is killed in the step that chooses": _case("auto", 3, 12, (1, 6, "kill")),
    "auto: a new rank gets the choice": _case("auto", 2, 60, **_joins_after(10)),
    "in pieces: auto, and a new rank gets the choice": _case(
        "auto", 2, 80, **_joins_after(10, in_pieces=300)
    ),
    "auto: ranks measure": _case("auto that measures", 2, 8),
    "in pieces: the mean": _case(
        "allreduce", 2, 60, **_joins_after(5, in_pieces=300), counts=[3.0, 1.0, 8.0]
    ),
    "local steps: a rank is killed between two exchanges": _case("local", 4, 16, (1, 6, "kill")),
    "local steps: the first rank is killed in an exchange": _case(
        "local with error", 3, 12, (0, 6, "kill in its exchange")
    ),
    "local steps: a rank is killed at the end of an exchange": _case(
        "local powersgd", 4, 12, (2, 6, "kill at the end")
    ),
    "local steps: a rank is stopped": _case("local with error", 3, 9, (1, 5, "stop")),
    "local steps: a rank leaves": _case("local", 3, 16, (1, 6, "leave")),
    "local steps: a killed rank's process starts anew": _case(
        "local powersgd", 3, 60, (1, 5, "kill"), **_joins_after(8)
    ),
    "local steps: the rank that gives a new one its state is killed while it does": _case(
        "local", 3, 60, *_on_each(3, 2, "kill the first that sends"), **_joins_after(5)
    ),
    "local steps are counted": _case(
        "local mean", 4, 13, (1, 6, "kill"), counts=[3.0, 2.0, 6.0, 0.0]
    ),
    "local steps: errors are those of before the exchange": _case(
        "local largest", 3, 2, (0, 1, "kill in its exchange"), counts=[5.0, 3.0, 1.0]
    ),
    "local steps: ranks that differ after each exchange come together": _case(
        "local with error reset", 3, 40, (0, 8, "kill"), **_joins_after(6), together=6
    ),
    "streaming: the lost rank does not count": _case(
        "in background", 3, 5, (0, 3, "kill"), pause=0.1, counts=[6.0, 3.0, 1.0]
    ),
    "streaming: a rank is killed": _case("streaming", 4, 20, (1, 7, "kill"), together=10),
    "streaming: a rank is killed while an exchange is under way": _case(
        "streaming with error", 3, 20, (0, 5, "kill"), together=10
    ),
    "streaming: a rank is killed in the end of an exchange": _case(
        "streaming with error", 3, 20, (0, 4, "kill in its exchange"), together=10
    ),
    "streaming: a rank is stopped": _case("streaming", 3, 12, (2, 5, "stop"), together=6),
    "streaming: a killed rank's process starts anew": _case(
        "streaming with error", 3, 60, (1, 5, "kill"), **_joins_after(8), together=10
    ),
    "fragments: a killed rank's process starts anew": _case(
        "fragments", 3, 60, (1, 5, "kill"), **_joins_after(8), together=10
    ),
    "a slow rank is named": _case("allreduce", 3, 12, (1, 3, "slow"), **_named_after(4)),
    "a slow rank is left out": _case(
        "with error", 3, 20, (1, 3, "slow"), said={1: "LeftOutError"}, **_left_out_after(4)
    ),
    "local steps: a slow rank is left out": _case(
        "local powersgd", 3, 20, (2, 2, "slow"), said={2: "LeftOutError"}, **_left_out_after(2)
    ),
    "too few would be left without the slow rank": _case(
        "allreduce", 2, 12, (0, 2, "slow"), min_ranks=2, **_left_out_after(3)
    ),
}


#: Also with models on a device, whose values come late.
ON_A_DEVICE = (
    "a rank is killed in its backward",
    "the first rank is killed",
    "a rank is killed at the end of a step",
    "a rank's hook raises",
    "a rank leaves in order",
    "a killed rank's process starts anew",
    "in pieces: a killed rank's process starts anew",
    "auto: a rank is killed in the step that chooses",
    "local steps: a rank is killed between two exchanges",
    "local steps: a killed rank's process starts anew",
    "streaming: a killed rank's process starts anew",
)
CASES |= {
    f"on {kind}: {name}": {**CASES[name], "device": device}
    for name in ON_A_DEVICE
    for kind, device in (("a device", "streams:0"), ("CUDA", "cuda:0"))
}

#: A case of each kind. ``make test`` runs these alone, each in a second or two.
SHORT = (
    "the first rank is killed",
    "in order: errors are handed over",
    "a new rank is let in",
    "auto: ranks measure",
    "in pieces: the mean",
    "local steps are counted",
    "streaming: the lost rank does not count",
    "a slow rank is named",
    "on a device: the first rank is killed",
)


def of(*names: str) -> pytest.MarkDecorator:
    """A test of these cases."""
    marks: dict[str, Any] = {name: () if name in SHORT else pytest.mark.long for name in names}
    marks |= {name: pytest.mark.cuda for name in names if name.startswith("on CUDA")}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What the cases came to that this run's tests have."""
    items = [each for each in request.session.items if isinstance(each, pytest.Function)]
    names = {each.callspec.params["name"] for each in items if each.module is request.module}
    folder = tmp_path_factory.mktemp("elastic")
    script = SUPPORT / "elastic_ranks.py"
    if not torch.cuda.is_available():
        names = {name for name in names if not name.startswith("on CUDA")}
    cases = [CASES[name] for name in names]
    if any(case.get("device") == stream_groups.DEVICE for case in cases):
        path = library("stream_device")
        cases = [{**case, "device_library": path} for case in cases]
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(names, lines, strict=True))


def _stats_of_done(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The ``stats()`` of the ranks that trained to the end; there are at least two."""
    pairs = zip(found["said"], found["stats"], strict=True)
    done = [stats for said, stats in pairs if said == "done"]
    assert len(done) > 1
    return done


@of(*CASES)
def test_all_that_go_on_hold_the_same(outcomes: Outcomes, name: str) -> None:
    case, found = CASES[name], outcomes[name]
    if "the rank that gives" in name:  # whichever of them that is
        found["said"].remove("killed")
        found["steps"].remove(min(found["steps"][: case["ranks"]], key=len))
        case = {**case, "ranks": case["ranks"] - 1}
    for number, said in enumerate(found["said"]):
        expected = case["said"].get(number, "done")
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


@of(*(name for name, case in CASES.items() if case.get("late")))
def test_new_ranks_begin_as_the_others_do(outcomes: Outcomes, name: str) -> None:
    began = outcomes[name]["stats"][-1]["began"]
    # With fragments, a new rank begins where another one is.
    is_at_anchor = "fragments" not in name and "streaming" not in name
    assert began["remembers"] and (began["at_anchor"] or not is_at_anchor)


@of(*(name for name in CASES if name.startswith("in pieces")))
def test_a_new_rank_has_all_after_some_steps(outcomes: Outcomes, name: str) -> None:
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


@of(*(name for name in CASES if "auto" in CASES[name]["hook"]))
def test_auto_chooses_alike(outcomes: Outcomes, name: str) -> None:
    choices = {each["choice"] for each in _stats_of_done(outcomes[name])}
    assert len(choices) == 1
    if CASES[name]["hook"] == "auto":
        assert choices == {"powersgd(rank=4)"}


@of(*(name for name, case in CASES.items() if case.get("together")))
def test_synchronize_brings_all_members_together(outcomes: Outcomes, name: str) -> None:
    seen = [dict(each["together"]) for each in _stats_of_done(outcomes[name])]
    of_step: dict[int, set[str]] = {}
    for each in seen:
        for step, digest in each.items():
            of_step.setdefault(step, set()).add(digest)
    assert all(len(digests) == 1 for digests in of_step.values()), of_step
    assert len({next(iter(digests)) for digests in of_step.values()}) == len(of_step) > 2
    assert all(CASES[name]["steps"] in each for each in seen)
    # A new rank that begins there would take part in the next exchange alone.
    assert not any(each["lets_in"] for each in _stats_of_done(outcomes[name]))


@of("local steps are counted")
def test_a_lost_rank_costs_its_round_only(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    values = {step: value for step, value, *_ in found["steps"][0] if value is not None}
    # A round of four steps by (3 + 2 + 6 + 0) / 4, then two by (3 + 6 + 0) / 3.
    assert values == {4: [-11.0, -8.25], 8: [-23.0, -17.25], 12: [-35.0, -26.25]}
    # The rank's steps on its own in between, and no more.
    assert [step for step, *_ in found["steps"][3]] == list(range(1, 14))


@of("local steps: errors are those of before the exchange")
def test_a_repeated_exchange_begins_with_errors_of_before(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    for number in (1, 2):
        values = [value for _, value, *_ in found["steps"][number]]
        # The larger number in the first step, and in the second twice the smaller one.
        assert values == [[-2.0, 0.0], [-2.0, -3.0]]


@of("streaming: the lost rank does not count")
def test_an_exchange_in_background_is_repeated_at_once(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    for number in (1, 2):
        values = {step: value for step, value, *_ in found["steps"][number] if value is not None}
        # Three steps by (3 + 1) / 2, though the exchange had begun after two. Then one, whose
        # exchange ends in the next step, and takes that back.
        assert values == {3: [-6.0, -4.5], 5: [-8.0, -6.0]}


@of("a rank is killed in its backward", "the first rank is killed")
def test_stats_tell_who_was_lost(outcomes: Outcomes, name: str) -> None:
    case, found = CASES[name], outcomes[name]
    (killed,) = case["events"]
    lost = [found["own"][killed["rank"]]]
    expected = {"steps": killed["step"] - 1, "size": case["ranks"] - 1, "lost": lost, "joined": []}
    for stats in _stats_of_done(found):
        (event,) = stats["membership"]
        assert event.pop("reason")
        assert event == {**expected, "error_lost": case["hook"] == "with error"}


@of(*(name for name in CASES if "in order" in name))
def test_who_leaves_in_order_saves_what_all_have(outcomes: Outcomes, name: str) -> None:
    case, found = CASES[name], outcomes[name]
    gone = {event["rank"] for event in case["events"]}
    left = sorted(found["own"][number] for number in gone)
    last = -(-case["events"][0]["step"] // 3) * 3 if "local" in name else case["events"][0]["step"]
    for number, (saved, steps) in enumerate(zip(found["saved"], found["steps"], strict=True)):
        assert (saved is not None) == (number in gone)
        if saved is not None:
            assert saved[0] == steps[-1][0] == last
            assert "counts" in case or saved[1] == steps[-1][1]
    for number, stats in enumerate(found["stats"][: case["ranks"]]):
        if number not in gone:
            (event,) = (each for each in stats["membership"] if each["lost"])
            assert event["lost"] == left and not event["error_lost"]
            assert event["reason"].endswith("left in order"), "no step has failed"


@of("in order: errors are handed over")
def test_errors_of_who_leaves_are_sent_by_others(outcomes: Outcomes, name: str) -> None:
    values = [value for _, value, *_ in outcomes[name]["steps"][0]]
    # The one that stays sends half of both ranks' errors, (4 + 8) / 2, in its third step.
    assert values == [[-6.0, 0.0], [-6.0, -9.0], [-16.0, -9.0], [-16.0, -15.0]]


@of("a killed rank's process starts anew")
def test_a_callback_is_told_of_ranks_and_their_changes(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    for number, expected in ((0, [3, 2, 3]), (2, [3, 2, 3]), (3, [3])):
        *_, sizes = found["steps"][number][-1]
        assert sizes == expected


@of("a killed rank's process starts anew")
def test_stats_tell_who_has_joined(outcomes: Outcomes, name: str) -> None:
    found = outcomes[name]
    for number in (0, 2):
        lost, joined = found["stats"][number]["membership"]
        assert lost["lost"] == [found["own"][1]] and not lost["joined"]
        assert joined["joined"] == [found["own"][3]] and not joined["lost"]
        assert lost["error_lost"] and not joined["error_lost"] and not joined["reason"]
    assert found["stats"][3]["membership"] == [], "from when it has joined"


@of("a slow rank is named", "too few would be left without the slow rank")
def test_a_slow_rank_is_named(outcomes: Outcomes, name: str) -> None:
    (slow,), found = CASES[name]["events"], outcomes[name]
    for stats in found["stats"]:
        ((rank, ratio),) = stats["stragglers"].items()
        assert int(rank) == found["own"][slow["rank"]] and ratio == pytest.approx(5.0, rel=1e-3)
        assert stats["membership"] == []


@of("a slow rank is left out", "local steps: a slow rank is left out")
def test_a_slow_rank_is_left_out(outcomes: Outcomes, name: str) -> None:
    (slow,), found = CASES[name]["events"], outcomes[name]
    rank = found["own"][slow["rank"]]
    assert f"(rank {rank}), because it was too slow in" in found["said"][slow["rank"]]
    for stats in _stats_of_done(found):
        (event,) = stats["membership"]
        assert event["lost"] == [rank] and event["reason"] == f"rank {rank}: too slow"
        assert not stats["stragglers"], "it is no member any more"
