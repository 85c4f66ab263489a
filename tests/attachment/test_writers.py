"""What a hook has sent, in logs of several kinds."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest
from mode_cases import batch, module
from on_ranks import on_processes

from torch_commhook import attach, hooks
from torch_commhook.attachment.writers import write


def test_writers_of_all_kinds() -> None:
    values = {"a": 1.0, "b": 2.0}
    board, metrics, log = (Mock(spec=[name]) for name in ("add_scalar", "log_metrics", "log"))
    plain: list[dict[str, float]] = []
    write(board, values, 7)
    write(metrics, values, None)
    write(log, values, 7)
    write(log, values, None)
    write(plain.append, values, 7)
    assert board.add_scalar.mock_calls == [call("a", 1.0, 7), call("b", 2.0, 7)]
    assert metrics.log_metrics.mock_calls == [call(values, step=None)]
    assert log.log.mock_calls == [call(values, step=7), call(values)]
    assert plain == [values]


def test_something_that_writes_nothing() -> None:
    with pytest.raises(TypeError, match=r"must have add_scalar\(\), log_metrics\(\) or log\(\)"):
        write(object(), {}, None)


@on_processes
def test_what_a_log_gets(rank: int) -> None:
    model = module()
    handle = attach(model, hooks.blockwise())
    found: list[dict[str, float]] = []
    handle.log_to(found.append)
    for number in range(3):
        model(batch(rank, number)).sum().backward()
        if number != 1:
            handle.log_to(found.append, prefix="")
    assert found[-1]["bytes_sent"] == handle.stats().bytes_sent
    for step in ("a", True, 1.0):
        with pytest.raises(TypeError, match="log_to: step must be an int or None, got"):
            handle.log_to(found.append, step)
    handle.remove()
    before, first, last = found
    assert before == {
        f"commhook/{name}": 0
        for name in ("steps", "bytes_sent", "bytes_sent_last_step", "bytes_received_last_step")
    }
    assert [first["steps"], last["steps"]] == [1, 3]
    assert last["bytes_sent"] == 3 * first["bytes_sent"] == 3 * last["bytes_sent_last_step"] > 0
    assert last["compression_ratio"] > 3
    assert 0 < last["relative_error"] < 0.1
    assert all(last[f"{stage}_seconds"] > 0 for stage in ("encode", "wire", "decode"))
