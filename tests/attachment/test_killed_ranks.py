"""A rank's process ends in the middle of a step: the others raise PeerError, and blame no other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from repository import SUPPORT

WHEN = ("before", "in a bucket", "at the end")
#: Of a layer whose messages are large enough for connections of their own, which name the rank.
WIDE = 1024
CASES: list[dict[str, Any]] = [
    {
        "hook": hook,
        "model": model,
        "when": when,
        "size": size,
        "victim": victim,
        "store": store,
        "width": 64,
    }
    for hook, model, size, victim, store in (
        ("allreduce", "module", 4, 1, "file"),
        ("allreduce", "ddp", 4, 0, "tcp"),
        ("blockwise", "module", 4, 1, "file"),
        ("blockwise", "ddp", 3, 0, "file"),
        ("cpp('allreduce')", "module", 4, 3, "file"),
        ("cpp('allreduce')", "ddp", 3, 0, "tcp"),
        ("powersgd(1)", "module", 3, 0, "tcp"),
        ("local_sgd(1)", "module", 3, 1, "file"),
    )
    for when in WHEN
    if (hook, when) != ("local_sgd(1)", "in a bucket")
]
CASES += [{**CASES[-1], "hook": "local_sgd(2, delay=1)", "when": "where an exchange begins"}]
CASES += [
    {**CASES[0], "hook": "blockwise", "when": "in a bucket", "size": size, "width": WIDE}
    for size in (2, 3)
]
CASES += [
    {**CASES[-1], "victim": victim, "store": store, "worker": "with a worker"}
    for victim, store in ((0, "tcp"), (1, "file"))
]


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def _param(case: dict[str, Any]) -> Any:
    """``make test`` runs one case of each hook alone."""
    is_short = (case["when"] == "in a bucket" and case["width"] != WIDE) or case is CASES[-1]
    return pytest.param(case, id=_name(case), marks=() if is_short else pytest.mark.long)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[str]]]:
    """What each rank raised, in each case of this run."""
    items = [each for each in request.session.items if isinstance(each, pytest.Function)]
    cases = [each.callspec.params["case"] for each in items if each.module is request.module]
    folder = tmp_path_factory.mktemp("killed")
    script = SUPPORT / "killed_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(map(_name, cases), lines, strict=True))


@pytest.mark.parametrize("case", map(_param, CASES))
def test_a_rank_that_is_killed(
    outcomes: dict[str, dict[str, list[str]]], case: dict[str, Any]
) -> None:
    found = outcomes[_name(case)]
    assert found.pop(str(case["victim"])) == ["killed", ""]
    for kind, message in found.values():
        assert kind == "PeerError", message
        blamed = re.findall(r"on rank (\d)|process of rank (\d)", message)
        assert {int(a or b) for a, b in blamed} <= {case["victim"]}, message
        if case["width"] == WIDE:
            assert f"the process of rank {case['victim']} ended" in message
