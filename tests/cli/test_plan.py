"""``commhook plan``: its table, options, predictions for sharded models, and recommended hook."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from train_processes import finished

from torch_commhook.cli import plan_advice
from torch_commhook.cli.bench.options import parse_options
from torch_commhook.cli.main import main
from torch_commhook.cli.plan_advice import Loss, advise, judge, judge_row
from torch_commhook.cli.plan_parser import (
    PlanOptions,
    format_count,
    format_rate,
    format_seconds,
    parse_count,
    parse_rate,
    say_seconds,
)
from torch_commhook.cli.report import line_styles
from torch_commhook.cli.train_config import DEFAULT_HOOKS, DEFAULT_SHARD_HOOKS
from torch_commhook.hooks.expressions import parse_hook

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
    assert [cost["round_trips"] for cost in costs] == [1, 1, 1.5, 1]
    assert all(cost["step_seconds"] > 0.05 * cost["round_trips"] for cost in costs)
    assert main([*arguments, "--delay", "25"]) == 0
    lines = table_of(capsys.readouterr().out)
    assert "1 Gbit/s and 25 ms each way" in lines[0] and "round trips" in lines[1]
    assert main(["plan", "--parallel", "fsdp", "--delay", "1"]) == 2
    assert "--delay: is for --parallel ddp alone" in capsys.readouterr().err


def test_a_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model-size", "10M", "--world", "1000", "--nodes", "125"]
    arguments += ["--compute-ms", "0", "--hooks", "allreduce()", "hierarchical(blockwise())"]
    assert main([*arguments, "--json"]) == 0
    flat, nested = json.loads(capsys.readouterr().out)["hooks"]
    assert flat["bytes_sent"] == pytest.approx(2 * 40_000_000 * 0.999, rel=1e-3)
    # A bucket of 25 MiB goes around a ring, the rest to ranks at doubled distances.
    around, doubled = 25 << 20, 40_000_000 - (25 << 20)
    assert flat["node_bytes"] == pytest.approx(2 * around * 0.999 + 10 * doubled, rel=1e-3)
    assert flat["connections"] == 20 and nested["connections"] == 124
    assert nested["node_bytes"] < flat["node_bytes"] / 2
    assert nested["round_trips"] < flat["round_trips"] / 10
    assert nested["messages"] < flat["messages"]
    assert main(arguments) == 0
    lines = table_of(capsys.readouterr().out)
    assert lines[0].startswith("10 M parameters, 1000 ranks on 125 nodes, 1 Gbit/s each way")
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


def layout(shards: int, replicas: int | None = None, **more: int) -> plan_advice.Layout:
    settings = {"elements": 1 << 20, "after_forward": shards, **more}
    return plan_advice.Layout(shards=shards, replicas=replicas, **settings)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("hook", "each"), MESSAGE.items())
def test_a_reduce_scatter_sends_one_encoding(hook: str, each: float, ranks: int) -> None:
    (found,) = plan_advice.measure_sharded([hook], layout(ranks))
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
    (found,) = plan_advice.measure_sharded([hook], layout(shards, replicas))
    shard = (1 << 20) / shards
    expected = 2 * each * shard * (replicas - 1) / replicas
    assert found.reduced_bytes == pytest.approx(expected, rel=1e-3)  # blocks of matrices end
    assert found.scattered_bytes == 4 * shard * (shards - 1)
    remembered = 4 * shard * (1 + 1 / replicas) if "error" in hook else 0
    assert found.error_bytes == pytest.approx(remembered, rel=1e-2)


def test_replicas_that_are_apart_send_once_in_a_round() -> None:
    inner = "error_feedback(blockwise(bits=4))"
    texts = [inner, f"local_sgd(8, hook={inner})"]
    each, apart = plan_advice.measure_sharded(texts, layout(2, 2))
    assert apart.reduced_bytes == each.reduced_bytes / 8
    assert apart.scattered_bytes == each.scattered_bytes
    assert apart.forward_bytes == each.forward_bytes
    assert apart.error_bytes == each.error_bytes


def test_low_rank_factors_are_those_of_shards_of_matrices() -> None:
    shape = layout(2, 2, elements=480_000)
    (found,) = plan_advice.measure_sharded(["powersgd(rank=2)"], shape)
    assert found.reduced_bytes == 48 * 2 * (50 + 100) * 4


@pytest.mark.parametrize(
    ("after_forward", "backward"), [(4, (1 + 4 / 256) * 3 / 4), (2, 4 * 1 / 2), (1, 0.0)]
)
def test_weights_are_compressed_among_all_shards(after_forward: int, backward: float) -> None:
    """In the backward, ``reshard_after_forward=2`` gathers uncompressed among two ranks."""
    shape = layout(4, after_forward=after_forward)
    plain, found = plan_advice.measure_sharded(["cast()"], shape, weights="blockwise()")
    assert (plain.hook, found.hook) == ("cast()", "cast(), weights=blockwise()")
    assert plain.forward_bytes == 4 * (1 << 20) * 3 / 4
    assert found.forward_bytes == (1 + 4 / 256) * (1 << 20) * 3 / 4
    assert found.backward_bytes == backward * (1 << 20)
    assert found.scattered_bytes == plain.scattered_bytes
    assert found.compute_seconds > plain.compute_seconds


def test_a_shard_hook_is_of_the_reduce_scatters() -> None:
    plain, found = plan_advice.measure_sharded(
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
def test_what_stays_within_takes_the_inner_link(shape: plan_advice.Layout, seconds: float) -> None:
    """The inner link is ten times as fast. Nothing overlaps the 3 seconds of computation."""
    reduced = 0.0 if shape.replicas is None else 1e6
    sizes = [8e6, 4e6, 2e6, reduced]
    measured = plan_advice.Cost("a", *[each * PAYLOAD for each in sizes], 0.5, 0.0, 0.0)
    (cost,) = plan_advice.plan_sharded(
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
        (found,) = plan_advice.measure_sharded(["cast()"], shape)
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


# ---- advice --------------------------------------------------------------------------------------

UPDATES = "local_sgd(1, outer=outer_sgd(1.0, 0.0), hook={}, error_reset=True)"


@dataclass(frozen=True)
class Row:
    hook: str
    step_seconds: float
    wire_seconds: float = 0.0
    bytes_sent: float = 1.0


@pytest.mark.parametrize(
    ("hook", "adamw", "sgd"),
    [
        ("none", Loss.AS_PLAIN, Loss.AS_PLAIN),
        ("cast()", Loss.AS_PLAIN, Loss.AS_PLAIN),
        ("hierarchical(fp8())", Loss.AS_PLAIN, Loss.AS_PLAIN),
        ("blockwise(bits=4)", Loss.MILD, Loss.MILD),
        ("error_feedback(blockwise(bits=4))", Loss.AS_PLAIN, Loss.AS_PLAIN),
        ("powersgd(rank=2)", Loss.MILD, Loss.HURTS),
        ("error_feedback(powersgd(rank=2))", Loss.HURTS, Loss.MILD),
        ("topk(0.01)", Loss.HURTS, Loss.HURTS),
        ("after(100, error_feedback(sign()))", Loss.HURTS, Loss.MILD),
        ("error_feedback(blockwise(bits=2))", Loss.HURTS, Loss.MILD),
        (UPDATES.format("error_feedback(topk(0.01))"), Loss.MILD, Loss.MILD),
        ("local_sgd(30, hook=error_feedback(sign()))", Loss.APART, Loss.APART),
        ("local_sgd(30, hook=sign())", Loss.HURTS, Loss.HURTS),
        ("policy([('dim <= 1', allreduce())], cast())", Loss.AS_PLAIN, Loss.AS_PLAIN),
        ("policy()", Loss.HURTS, Loss.MILD),  # error_feedback(topk()) of embeddings
        ("my_hooks.py:hook", Loss.UNKNOWN, Loss.UNKNOWN),
    ],
)
def test_what_is_known_of_a_hook(hook: str, adamw: Loss, sgd: Loss) -> None:
    assert judge(hook, "adamw").loss is adamw
    assert judge(hook, "sgd").loss is sgd


def test_a_hook_of_reduce_scatters_counts_too() -> None:
    label = "cast(), shard_hook=error_feedback(sign()), weights=blockwise()"
    assert judge_row(label, "adamw").loss is Loss.HURTS
    assert judge_row(label, "sgd").loss is Loss.MILD
    assert judge_row("cast(), weights=blockwise()", "adamw").loss is Loss.AS_PLAIN


def test_defaults_do_no_harm() -> None:
    for optimizer in ("adamw", "sgd"):
        for hook in (*DEFAULT_HOOKS[optimizer], *DEFAULT_SHARD_HOOKS[optimizer]):
            assert judge(hook, optimizer).loss < Loss.UNKNOWN
            parse_hook(hook)
        assert DEFAULT_HOOKS[optimizer][0] == "allreduce()"


def test_bench_measures_the_hooks_that_plan_compares() -> None:
    optimizer = PlanOptions().optimizer
    assert parse_options(["--elements", "10k"]).hooks == DEFAULT_HOOKS[optimizer]


def taken(optimizer: str = "adamw", **seconds: float) -> str:
    names = {"plain": "allreduce()", "cast": "cast()", "four": "blockwise(bits=4)"}
    names |= {"feedback": "error_feedback(topk(0.01))", "local": "local_sgd(30)"}
    rows = [Row(names[name], step) for name, step in seconds.items()]
    return advise(rows, 0.1, optimizer).hook


def test_the_mildest_hook_that_is_clearly_faster_is_taken() -> None:
    assert taken(plain=1.0, cast=0.99, four=0.98) == "allreduce()"
    assert taken(plain=1.0, cast=0.6, four=0.58) == "cast()"
    assert taken(plain=1.0, cast=0.6, four=0.47) == "cast()"  # 1.28 times as fast
    assert taken(plain=1.0, cast=0.6, four=0.3, local=0.21) == "blockwise(bits=4)"
    assert taken(plain=1.0, cast=0.6, four=0.3, local=0.19) == "local_sgd(30)"
    # A hook that is not clearly faster than a milder one does not matter for the next hooks.
    assert taken(plain=1.0, cast=0.9, four=0.88, local=0.5) == "local_sgd(30)"


def test_a_hook_that_hurts_is_not_taken() -> None:
    assert taken(plain=1.0, feedback=0.1) == "allreduce()"
    assert taken("sgd", plain=1.0, feedback=0.1) == "error_feedback(topk(0.01))"


def test_what_is_said() -> None:
    rows = [
        Row("allreduce()", 1.9, 1.8, 43e6),
        Row("cast()", 0.95, 0.9, 21.5e6),
        Row("error_feedback(sign())", 0.3, 0.06, 1e6),
    ]
    found = advise(rows, 0.225, "adamw")
    slow = advise([Row("allreduce()", 9.0, 0.2), Row("cast()", 3.0, 0.1)], 0.2, "sgd")
    assert "all-reduce. Most of the difference is delays or computing; a rank sends" in slow.reason
    assert found.reason == (
        "Take cast(): a step of 0.95 s instead of 1.9 s with a plain all-reduce, since a rank "
        "sends 21.5 MB in a step instead of 43.0 MB: 0.90 s on the link instead of 1.8 s. Without "
        "communication a step takes 0.23 s."
    )
    (warning,) = found.warnings
    assert warning.startswith("error_feedback(sign()): below four bits error feedback on")
    assert advise(rows, 0.225, "sgd").warnings == []
    stays = advise(rows[:1] + rows[2:], 0.225, "adamw").reason
    assert stays.startswith("Take allreduce(), the plain all-reduce: a step takes 1.9 s. Only")
    assert stays.endswith("error_feedback(sign()) takes 0.30 s.")
    alone = advise([rows[0], Row("cast()", 1.85)], 0.225, "adamw").reason
    assert alone.endswith("0.23 s of it computing, and no hook makes it much shorter.")
    alone = advise(rows[:1], 0.225, "adamw").reason
    assert alone.endswith("0.23 s of it computing. No other hook was compared.")


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (["cast()"], ["allreduce()", "cast()"]),
        (["cast()", "none"], ["none", "cast()"]),
        (["cast()", "allreduce()", "cast()"], ["allreduce()", "cast()"]),
    ],
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_it_always_compares_with_the_plain_one(
    capsys: pytest.CaptureFixture[str], parallel: str, given: list[str], rows: list[str]
) -> None:
    arguments = ["plan", "--model-size", "10k", "--compute-ms", "0", "--parallel", parallel]
    assert main([*arguments, "--json", "--hooks", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["hook"] for each in found["hooks"]] == rows
    assert found["hooks"][0]["ratio"] == 1.0


def test_warnings_follow_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model-size", "10k", "--compute-ms", "0"]
    arguments += ["--hooks", "error_feedback(topk(0.01))"]
    assert main(arguments) == 0
    *_, last = capsys.readouterr().out.partition("Warning: ")
    assert "5.00 with error_feedback(topk(0.01))" in " ".join(last.split())
    assert main([*arguments, "--optimizer", "sgd"]) == 0
    assert "Warning" not in capsys.readouterr().out


def test_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.png"
    arguments = ["plan", "--model-size", "10k", "--compute-ms", "1", "--plot", str(path)]
    assert main([*arguments, "--hooks", "cast()", "topk(0.01)"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "--compute-ms", "0", "--plot", str(tmp_path / "no" / "a.png")]) == 2
    assert "argument --plot:" in capsys.readouterr().err
    assert main(["plan", "--compute-ms", "0", "--plot", str(tmp_path / "a.pdf")]) == 2
    assert "a.pdf must end in .png" in capsys.readouterr().err


def test_no_two_lines_of_a_picture_look_the_same() -> None:
    styles = [tuple(style.values()) for style in islice(line_styles(), 32)]
    assert len(set(styles)) == 32


# ---- numbers -------------------------------------------------------------------------------------


def test_counts_and_rates() -> None:
    for text, count in {"7B": 7e9, "7 B": 7e9, "124M": 124e6, "10k": 1e4, "3": 3}.items():
        assert parse_count(text) == count, text
    rates = {"200mbit": 2e8, "10gbit": 1e10, "100G": 1e11, "100 Gbit/s": 1e11, "1Gb/s": 1e9}
    for text, rate in {**rates, "25gbps": 25e9, "56kbit": 56e3}.items():
        assert parse_rate(text) == rate, text


@pytest.mark.parametrize("text", ["1GB/s", "100GB", "10", "fast", "-1gbit", "1e9bit", "g", "1gg"])
def test_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match="must be a rate such as 200mbit, 10gbit or 100G, in bits"):
        parse_rate(text)


def test_numbers_as_people_read_them() -> None:
    counts = [999, 10_000, 10_830_000, 124_439_808, 999_990_000, 7e9, 1e13]
    assert [format_count(count) for count in counts] == [
        *("999", "10 k", "10.83 M", "124.4 M", "1 B", "7 B", "10 T")
    ]
    rates = [56e3, 2e8, 1e9, 1e11, 1.5e12]
    assert [format_rate(rate) for rate in rates] == [
        *("56 kbit/s", "200 Mbit/s", "1 Gbit/s", "100 Gbit/s", "1.5 Tbit/s")
    ]
    assert [format_seconds(each) for each in (1.9, 0.42)] == ["1.90 s", "420.0 ms"]
    seconds = (123.4, 1.94, 0.999, 0.424, 0.0423, 0.00042, 0.0)
    assert [say_seconds(each) for each in seconds] == [
        *("123 s", "1.9 s", "1.0 s", "0.42 s", "42 ms", "0.4 ms", "0 ms")
    ]
