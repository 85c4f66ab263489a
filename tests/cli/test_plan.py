"""``commhook plan``: its table, its options, and its predictions for sharded models."""

from __future__ import annotations

import json
import sys

import pytest
from train_processes import finished

from torch_commhook.cli import plan_sharded
from torch_commhook.cli.main import main

HOOKS = ["allreduce()", "cast()", "blockwise()", "topk(0.01)"]
PAYLOAD = 1448 / 1514


def table_of(printed: str) -> list[str]:
    """The lines from the question on, after the advice."""
    return printed.partition("\n\n")[2].splitlines()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model-size", "10k", "--link", "1gbit", "--compute-ms", "0"]
    arguments += ["--hooks", *HOOKS]
    assert main(arguments) == 0
    found = capsys.readouterr().out
    assert found.startswith("Take ")
    lines = table_of(found)
    assert lines[0].startswith("10 k parameters, 2 ranks, 1 Gbit/s each way")
    assert [line.split()[0] for line in lines[2:6]] == HOOKS
    assert "round trips" not in lines[1]
    assert "Warning: topk(0.01): most of each gradient is lost." in found
    assert main([*arguments, "--delay", "25", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["hooks"]
    assert [cost["hook"] for cost in costs] == HOOKS
    assert [cost["round_trips"] for cost in costs] == [1.5, 1.5, 2, 1.5]
    assert all(cost["step_seconds"] > 0.05 * cost["round_trips"] for cost in costs)
    assert main([*arguments, "--delay", "25"]) == 0
    lines = table_of(capsys.readouterr().out)
    assert "1 Gbit/s and 25 ms each way" in lines[0] and "round trips" in lines[1]
    assert main(["plan", "--parallel", "fsdp", "--delay", "1"]) == 2
    assert "--delay: is for --parallel ddp alone" in capsys.readouterr().err


def test_a_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model-size", "100k", "--world", "1000", "--nodes", "125"]
    arguments += ["--compute-ms", "0", "--hooks", "allreduce()", "hierarchical(blockwise())"]
    assert main([*arguments, "--json"]) == 0
    flat, nested = json.loads(capsys.readouterr().out)["hooks"]
    assert flat["bytes_sent"] == pytest.approx(2 * 400_000 * 0.999, rel=1e-3)
    assert flat["node_bytes"] == pytest.approx(flat["bytes_sent"])
    assert flat["connections"] == 30 and nested["connections"] == 218
    assert nested["node_bytes"] < flat["node_bytes"] / 2
    assert nested["round_trips"] < flat["round_trips"] / 10
    assert nested["messages"] < flat["messages"]
    assert main(arguments) == 0
    lines = table_of(capsys.readouterr().out)
    assert lines[0].startswith("100 k parameters, 1000 ranks on 125 nodes, 1 Gbit/s each way")
    for name in ("out of a node", "messages", "connections", "round trips"):
        assert name in lines[1]


# ---- models in shards ----------------------------------------------------------------------------

#: Bytes of an element's message, with a scale of 4 bytes for each block.
MESSAGE = {
    "allreduce()": 4.0,
    "cast()": 2.0,
    "blockwise()": 1 + 4 / 256,
    "blockwise(bits=4)": 0.5 + 4 / 256,
    "error_feedback(sign())": 1 / 8 + 4 / 1024,
    "after(5, fp8())": 1 + 4 / 256,
}


def layout(shards: int, replicas: int | None = None, **more: int) -> plan_sharded.Layout:
    settings = {"elements": 1 << 20, "after_forward": shards, **more}
    return plan_sharded.Layout(shards=shards, replicas=replicas, **settings)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("hook", "each"), MESSAGE.items())
def test_a_reduce_scatter_sends_one_encoding(hook: str, each: float, ranks: int) -> None:
    (found,) = plan_sharded.measure_sharded([hook], layout(ranks))
    elements = 1 << 20
    assert found.scattered_bytes == pytest.approx(each * elements * (ranks - 1) / ranks)
    assert found.forward_bytes == found.backward_bytes == 4 * elements * (ranks - 1) / ranks
    assert found.reduced_bytes == 0
    assert found.error_bytes == (4 * elements if "error_feedback" in hook else 0)
    assert found.compute_seconds >= 0


@pytest.mark.parametrize(("shards", "replicas"), [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize(
    ("hook", "each"), [("allreduce()", 4.0), ("error_feedback(blockwise(bits=4))", 0.5 + 4 / 256)]
)
def test_replicas_average_a_shard(hook: str, each: float, shards: int, replicas: int) -> None:
    (found,) = plan_sharded.measure_sharded([hook], layout(shards, replicas))
    shard = (1 << 20) / shards
    expected = 2 * each * shard * (replicas - 1) / replicas
    assert found.reduced_bytes == pytest.approx(expected, rel=1e-3)  # blocks of matrices end
    assert found.scattered_bytes == 4 * shard * (shards - 1)
    remembered = 4 * shard * (1 + 1 / replicas) if "error" in hook else 0
    assert found.error_bytes == pytest.approx(remembered, rel=1e-2)


def test_replicas_that_are_apart_send_once_in_a_round() -> None:
    inner = "error_feedback(blockwise(bits=4))"
    texts = [inner, f"local_sgd(8, hook={inner})"]
    each, apart = plan_sharded.measure_sharded(texts, layout(2, 2))
    assert apart.reduced_bytes == each.reduced_bytes / 8
    assert apart.scattered_bytes == each.scattered_bytes
    assert apart.forward_bytes == each.forward_bytes
    assert apart.error_bytes == each.error_bytes


def test_low_rank_factors_are_those_of_shards_of_matrices() -> None:
    shape = layout(2, 2, elements=480_000)
    (found,) = plan_sharded.measure_sharded(["powersgd(rank=2)"], shape)
    assert found.reduced_bytes == 48 * 2 * (50 + 100) * 4


@pytest.mark.parametrize(
    ("after_forward", "backward"), [(4, (1 + 4 / 256) * 3 / 4), (2, 4 * 1 / 2), (1, 0.0)]
)
def test_weights_are_compressed_among_all_shards(after_forward: int, backward: float) -> None:
    """In the backward, ``reshard_after_forward=2`` gathers uncompressed among two ranks."""
    shape = layout(4, after_forward=after_forward)
    plain, found = plan_sharded.measure_sharded(["cast()"], shape, weights="blockwise()")
    assert (plain.hook, found.hook) == ("cast()", "cast(), weights=blockwise()")
    assert plain.forward_bytes == 4 * (1 << 20) * 3 / 4
    assert found.forward_bytes == (1 + 4 / 256) * (1 << 20) * 3 / 4
    assert found.backward_bytes == backward * (1 << 20)
    assert found.scattered_bytes == plain.scattered_bytes
    assert found.compute_seconds > plain.compute_seconds


def test_a_shard_hook_is_of_the_reduce_scatters() -> None:
    plain, found = plan_sharded.measure_sharded(
        ["cast()"], layout(2, 2), shard_hook="error_feedback(blockwise())"
    )
    assert plain.reduced_bytes == found.reduced_bytes
    assert plain.scattered_bytes == 4 * (1 << 19)
    assert found.scattered_bytes == (1 + 4 / 256) * (1 << 19)
    assert (found.error_bytes, found.shard_error_bytes) == (0, 4 * (1 << 20))


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (layout(4), 8.0 + 4.0 + 2.0),
        (layout(4, after_forward=2), 8.0 + 4.0 + 0.2),
        (layout(2, 2), 1.0 + 0.8 + 0.4 + 0.2),
    ],
)
def test_what_stays_within_takes_the_inner_link(shape: plan_sharded.Layout, seconds: float) -> None:
    """The inner link is ten times as fast. Nothing overlaps the 3 seconds of computation."""
    reduced = 0.0 if shape.replicas is None else 1e6
    sizes = [8e6, 4e6, 2e6, reduced]
    measured = plan_sharded.Measured("a", *[each * PAYLOAD for each in sizes], 0.5, 0.0, 0.0)
    (cost,) = plan_sharded.plan_sharded(
        [measured],
        layout=shape,
        bits_per_second=8e6,
        inner_bits_per_second=8e7,
        compute_seconds=3.0,
    )
    assert cost.wire_seconds == pytest.approx(seconds)
    assert cost.step_seconds == pytest.approx(seconds + 3.5)


def test_one_rank_sends_nothing() -> None:
    for shape in (layout(1), layout(1, 1)):
        (found,) = plan_sharded.measure_sharded(["cast()"], shape)
        assert found.scattered_bytes == found.forward_bytes == found.reduced_bytes == 0


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
def test_the_command_lists_hooks_for_shards(
    parallel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model-size", "10k", "--parallel", parallel, "--world", "4"]
    arguments += ["--compute-ms", "0", "--optimizer", "sgd"]
    assert main([*arguments, "--json", "--reshard-after-forward", "no"]) == 0
    found = json.loads(capsys.readouterr().out)["hooks"]
    assert found[0]["hook"] == "allreduce()"
    assert [cost["backward_bytes"] for cost in found] == [0] * len(found)
    low_rank = [cost["hook"] for cost in found if "powersgd" in cost["hook"]]
    assert len(low_rank) == (parallel == "hsdp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delay", "1e30"], "must be a number of milliseconds from 0 to 3600000, got '1e30'"),
        (["--delay", "-1"], "must be a number of milliseconds from 0 to 3600000, got '-1'"),
        (["--compute-ms", "1e30"], "must be a number of milliseconds from 0 to 1000000000"),
        (["--connections", "17"], "must be at most 16, got 17"),
        (["--world", "10", "--nodes", "3"], "--nodes: must divide the 10 ranks, got 3"),
        (["--nodes", "0"], "argument --nodes: must be at least 1, got 0"),
        (["--parallel", "fsdp", "--nodes", "2"], "--nodes: is for --parallel ddp alone"),
        (["--parallel", "fsdp", "--connections", "2"], "--connections: is for --parallel ddp"),
        (["--model-size", "many"], "must be a number such as 124M"),
        (["--model-size", "7B"], "argument --compute-ms: how long does a step take without"),
        (["--model-size", "7B", "--model", "a:b"], "not allowed with argument --model-size"),
        (["--model-size", "7B", "--input", "4x8"], "argument --input: needs --model"),
        (["--link", "1GB/s"], "must be a rate such as 200mbit"),
        (["--link", "no_such.json"], "and there is none of this name"),
        (["--link", "-5mbit"], "argument --link: must be a rate such as 200mbit"),
        (["--link", "fast"], "must be a rate such as 200mbit"),
        (["--link", "0gbit"], "must be a rate such as 200mbit"),
        (["--link", "1bit"], "must be a rate such as 200mbit"),
        (["--link", ""], "must be a rate such as 200mbit"),
        (["--link", "."], "must be a rate such as 200mbit"),
        (["--world", "1025"], "argument --world: must be at most 1024, got 1025"),
        (["--bucket-cap-mb", "0"], "must be a number of MiB from 0.001 to 100000, got '0'"),
        (["--compute-ms", "nan"], "must be a number of milliseconds"),
        (["--hooks", "nothing()"], "names the unknown hook 'nothing'"),
        (
            ["--model-size", "1k", "--compute-ms", "0", "--hooks", "policy()"],
            "can't be planned: it needs the names of parameters, which are not known",
        ),
        (
            ["--parallel", "fsdp", "--compute-ms", "0", "--hooks", "topk(0.1)"],
            "error: topk(density=0.1): needs the gra",
        ),
        (
            ["--parallel", "hsdp", "--compute-ms", "0", "--hooks", "clip(1.0)"],
            "error: clip(1) scales all gradients of a step",
        ),
        (
            ["--parallel", "fsdp", "--compute-ms", "0", "--weights", "topk(0.1)"],
            "weights must be a codec that sends",
        ),
        (["--weights", "fp8()"], "argument --weights: needs --parallel fsdp or hsdp, got ddp"),
        (["--parallel", "hsdp", "--world", "3"], "--shards: is half of the ranks by default"),
        (["--parallel", "fsdp", "--reshard-after-forward", "1"], "must be yes, no or a number fr"),
        (
            ["--parallel", "fsdp", "--world", "4", "--reshard-after-forward", "3"],
            "must be yes, no or a number that divides the 4 shards, got 3",
        ),
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


def test_a_warning_of_a_command_is_one_line() -> None:
    command = [sys.executable, "-m", "torch_commhook", "plan", "--model-size", "1"]
    command += ["--compute-ms", "0", "--hooks", "topk(0.01)"]
    done = finished(*command)
    said = [line for line in done.stderr.splitlines() if "warning" in line.lower()]
    assert len(said) == 1 and said[0].startswith("commhook: warning: topk")
    assert "compressed.py" not in done.stderr
