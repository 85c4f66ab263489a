"""What a handle tells of what its hook has sent, and writes to logs of several kinds."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest
import torch
from mode_cases import batch, module
from on_ranks import on_processes, on_ranks
from torch import nn

from torch_commhook import HookStats, attach, hooks
from torch_commhook.attachment.handle import write


def _stats(rank: int, text: str, steps: int, together: bool = True) -> HookStats:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, text) as handle:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 300)).sum().backward()
            optimizer.step()
        if together:
            handle.synchronize()
        return handle.stats()


@on_processes
def test_a_whole_run(rank: int) -> None:
    stats = _stats(rank, "blockwise(bits=4)", 5)
    assert stats.gradient_bytes == 5 * 91203 * 4 and not stats.local_steps
    # Of two ranks a plain all-reduce sends as many bytes as the gradients have.
    assert stats.total_ratio == stats.gradient_bytes / stats.bytes_sent
    assert 7 < stats.total_ratio < 8


@pytest.mark.parametrize("text", ["local_sgd(4)", "local_sgd(4, fragments=2, delay=1)"])
@on_ranks(2)
def test_local_steps_are_counted(rank: int, text: str) -> None:
    stats = _stats(rank, text, 12, together=False)
    assert stats.local_steps == 12 and stats.gradient_bytes == 12 * 91203 * 4
    exchanges = 3 if "fragments" not in text else 5  # the sixth is under way
    assert stats.steps == exchanges
    assert stats.total_ratio == pytest.approx(4, rel=1e-3 if exchanges == 3 else 0.3)


@on_ranks(2)
def test_a_table(rank: int) -> None:
    first, header, row = str(_stats(rank, "allreduce", 3)).splitlines()
    assert first == (
        "3 steps on 2 ranks: this rank sent 1.09 MB, 1.0 times less than plain all-reduces; in the "
        "last step:"
    )
    assert header.split() == ["bucket", "elements", "dtype", "sent", "received"]
    assert row.split() == ["0", "91,203", "float32", "365", "kB", "365", "kB"]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (1400, "1.4 kB, 1.4 times as many bytes as plain all-reduces"),
        (None, "an unknown number of bytes"),
    ],
)
def test_more_than_plain_all_reduces_or_nothing_that_is_counted(
    sent: int | None, text: str
) -> None:
    stats = HookStats(steps=2, bytes_sent=sent, gradient_bytes=1000, world_size=2)
    assert str(stats) == f"2 steps on 2 ranks: this rank sent {text}"


@pytest.mark.usefixtures("one_rank")
def test_a_policy_whose_pattern_meets_nothing() -> None:
    rules = [("*.weihgt", hooks.cast(torch.bfloat16)), ("dim <= 1", hooks.allreduce())]
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError) as raised:
        attach(model, hooks.policy(rules, hooks.blockwise()))
    assert str(raised.value) == (
        "policy: no parameter matches '*.weihgt'; the model has 'weight', 'bias'"
    )
    attach(model, hooks.policy()).remove()  # the default rules are for any model
    attach(model, hooks.policy([("weigh*", hooks.allreduce())])).remove()


# ---- logs ----------------------------------------------------------------------------------------


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
