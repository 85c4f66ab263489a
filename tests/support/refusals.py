"""Calls that raise errors, and their errors as text."""

from __future__ import annotations

import re
from typing import Any

import expecttest


def refusals(calls: str, names: dict[str, Any]) -> str:
    """Each of the calls, one on a line, and below it its error: the type and the first line."""
    lines = []
    for call in filter(None, map(str.strip, calls.splitlines())):
        try:
            eval(call, dict(names))
        except Exception as error:
            first = str(error).splitlines()[0]
            said = f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', '0x...', first)}"
        else:
            said = "is accepted"
        lines += [call, f"    {said}"]
    return "\n".join(lines) + "\n"


def calls_in(expected: str) -> str:
    """The lines of an expected text that are not indented."""
    calls = [line for line in expected.splitlines() if line and not line.startswith(" ")]
    assert calls
    return "\n".join(calls)


def assert_refused(names: dict[str, Any], expected: str) -> None:
    """Makes the calls of an expected text, which has the error of each."""
    assert refusals(calls_in(expected), names) == expected


class RefusalCase(expecttest.TestCase):
    """Tests of calls whose errors are texts in the test."""

    def assert_refused(self, names: dict[str, Any], expected: str) -> None:
        """Makes the calls of an expected text."""
        self.assertExpectedInline(refusals(calls_in(expected), names), expected, skip=1)
