"""What ``Elastic`` refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

import torch_commhook as commhook
from torch_commhook.elastic.settings import host_and_port


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"straggler": "2"}, TypeError, "straggler must be a number or None, got str"),
        ({"straggler": True}, TypeError, "straggler must be a number or None, got bool"),
        ({"straggler": 1.0}, ValueError, "straggler must be a number above 1, got 1.0"),
        ({"straggler": float("nan")}, ValueError, "straggler must be a number above 1, got nan"),
        ({"straggler_steps": 0}, ValueError, "straggler_steps must be at least 1, got 0"),
        ({"straggler_steps": 2.0}, TypeError, "straggler_steps must be an int, got float"),
        (
            {"straggler": 2.0, "leave_out_stragglers": 1},
            TypeError,
            "leave_out_stragglers must be a bool, got int",
        ),
        (
            {"leave_out_stragglers": True},
            ValueError,
            "leave_out_stragglers needs straggler, got None",
        ),
        ({"name": ""}, ValueError, "name must be a text that only this training has, got ''"),
        ({"store": "nohost"}, ValueError, "store must be 'host:port', got 'nohost'"),
        ({"store": "host:99999"}, ValueError, "store must be 'host:port', got 'host:99999'"),
        ({"store": "[host]:29400"}, ValueError, "store must be 'host:port', or '[address]:port'"),
        ({"store": "a:b:29400"}, ValueError, "store must be 'host:port', or '[address]:port'"),
        ({"store": "[::1]"}, ValueError, "store must be 'host:port', got '[::1]'"),
        ({"store": ""}, ValueError, "store must be 'host:port', got ''"),
    ],
)
def test_settings_that_are_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^Elastic: {re.escape(text)}"):
        commhook.Elastic(**{"min_ranks": 1, "name": "run", **settings})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("localhost:29400", "localhost"),
        ("10.0.0.1:29400", "10.0.0.1"),
        ("[::1]:29400", "::1"),
        ("fd00::1:29400", "fd00::1"),
        ("[fe80::1%eth0]:29400", "fe80::1%eth0"),
    ],
)
def test_hosts_of_stores(text: str, host: str) -> None:
    assert host_and_port(text) == (host, 29400)
