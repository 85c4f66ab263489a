"""The tables of PyTorch's own distributed tests: what counts as wrong."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_suite import SUITES, problems


def row(suite: str, case: str, plain: str, changed: str, **more: Any) -> dict[str, Any]:
    return {"case": case, "plain": plain, suite: changed, "groups": 1, **more}


@pytest.mark.parametrize("suite", SUITES)
def test_what_is_wrong(suite: str) -> None:
    known = [row(suite, name, "passed", "failed") for name in SUITES[suite].known]
    assert problems(SUITES[suite], [row(suite, "good", "passed", "passed"), *known]) == []
    both = row(suite, "both", "failed", "failed")
    assert problems(SUITES[suite], [row(suite, "bad", "passed", "failed"), both, *known]) == [
        "bad passes plain"
    ]
    for i, each in enumerate(known):
        others = known[:i] + known[i + 1 :]
        assert problems(SUITES[suite], others) == [f"{each['case']} no longer differs"]


def test_wrapped_groups_are_called() -> None:
    suite = SUITES["wrapper"]
    rows = [row("wrapper", name, "passed", "failed") for name in suite.known]
    rows.append(row("wrapper", "alone", "passed", "passed", groups=0))
    assert problems(suite, rows) == ["alone wraps no group"]
