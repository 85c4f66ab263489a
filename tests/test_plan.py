"""``commhook plan``: what hooks would cost."""

from __future__ import annotations

import json

import pytest

from torch_commhook.cli.main import main
from torch_commhook.cli.plan import plan

HOOKS = ["allreduce()", "cast()", "blockwise()", "topk(0.01)"]


def test_bytes_and_times() -> None:
    costs = plan(HOOKS, elements=1_000_000, bits_per_second=1e8, world_size=2, compute_seconds=0.1)
    sent = [cost.bytes_sent for cost in costs]
    assert sent[:2] == [4_000_000, 2_000_000]
    assert sent[2] == pytest.approx(1_016_000, rel=0.01)
    assert sent[3] == pytest.approx(80_000, rel=0.01)
    for cost in costs:
        assert cost.wire_seconds == pytest.approx(cost.bytes_sent * 8 / 1e8)
        assert cost.compute_seconds >= 0
        total = 0.1 + cost.wire_seconds + cost.compute_seconds
        assert cost.step_seconds == pytest.approx(total)
        assert cost.ratio == pytest.approx(cost.step_seconds / costs[0].step_seconds)


def test_gathered_messages_grow_with_the_ranks() -> None:
    two, eight = (
        plan(["topk(0.01)"], elements=100_000, bits_per_second=1e9, world_size=ranks)[0]
        for ranks in (2, 8)
    )
    assert eight.bytes_sent == 7 * two.bytes_sent


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model-size", "10k", "--link", "1gbit", "--hooks", *HOOKS]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0.01 M elements, 2 ranks, 1000 Mbit/s each way")
    assert [line.split()[0] for line in lines[2:]] == HOOKS
    assert main([*arguments, "--json"]) == 0
    assert [cost["hook"] for cost in json.loads(capsys.readouterr().out)] == HOOKS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-size", "many"], "must be a number such as 124M"),
        (["--link", "fast"], "must be a rate such as 200mbit"),
        (["--link", "0gbit"], "must be a rate such as 200mbit"),
        (["--world", "0"], "must be a number from 1 to 1024"),
        (["--compute-ms", "nan"], "must be a number of milliseconds"),
        (["--hooks", "nothing()"], "names the unknown hook 'nothing'"),
        (["--model-size", "1k", "--hooks", "clip(1.0)"], "the norm is that of all buckets"),
        (["--model-size", "1k", "--hooks", "local_sgd(4)"], "local_sgd"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = main(["plan", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
