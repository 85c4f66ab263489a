"""The hook that ``commhook plan`` recommends, and its warnings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from torch_commhook.cli.bench.options import parse_options
from torch_commhook.cli.default_hooks import DEFAULT_HOOKS, DEFAULT_SHARD_HOOKS
from torch_commhook.cli.main import main
from torch_commhook.cli.plan_advice import Loss, advise, judge, judge_row
from torch_commhook.cli.plan_numbers import (
    format_count,
    format_rate,
    format_seconds,
    parse_count,
    parse_rate,
    say_seconds,
)
from torch_commhook.cli.plan_parser import build_parser
from torch_commhook.hooks.expressions import parse_hook

UPDATES = "local_sgd(1, outer=outer_sgd(1.0, 0.0), hook={}, error_reset=True)"


@dataclass(frozen=True)
class Row:
    hook: str
    step_seconds: float
    wire_seconds: float = 0.0


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
    optimizer = build_parser().parse_args([]).optimizer
    assert parse_options(["--elements", "10k"]).hooks == DEFAULT_HOOKS[optimizer]


def taken(optimizer: str = "adamw", **seconds: float) -> str:
    names = {"plain": "allreduce()", "cast": "cast()", "four": "blockwise(bits=4)"}
    names |= {"feedback": "error_feedback(topk(0.01))", "local": "local_sgd(30)"}
    rows = [Row(names[name], step) for name, step in seconds.items()]
    return advise(rows, [1.0] * len(rows), 0.1, optimizer).hook


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
        Row("allreduce()", 1.9, 1.8),
        Row("cast()", 0.95, 0.9),
        Row("error_feedback(sign())", 0.3, 0.06),
    ]
    found = advise(rows, [43e6, 21.5e6, 1e6], 0.225, "adamw")
    slow = advise([Row("allreduce()", 9.0, 0.2), Row("cast()", 3.0, 0.1)], [2e6, 1e6], 0.2, "sgd")
    assert "all-reduce. Most of the difference is delays or computing; a rank sends" in slow.reason
    assert found.reason == (
        "Take cast(): a step of 0.95 s instead of 1.9 s with a plain all-reduce, since a rank "
        "sends 21.5 MB in a step instead of 43.0 MB: 0.90 s on the link instead of 1.8 s. Without "
        "communication a step takes 0.23 s."
    )
    (warning,) = found.warnings
    assert warning.startswith("error_feedback(sign()): below four bits error feedback on")
    assert advise(rows, [43e6, 21.5e6, 1e6], 0.225, "sgd").warnings == []
    stays = advise(rows[:1] + rows[2:], [43e6, 1e6], 0.225, "adamw").reason
    assert stays.startswith("Take allreduce(), the plain all-reduce: a step takes 1.9 s. Only")
    assert stays.endswith("error_feedback(sign()) takes 0.30 s.")
    alone = advise([rows[0], Row("cast()", 1.85)], [43e6, 2e7], 0.225, "adamw").reason
    assert alone.endswith("0.23 s of it computing, and no hook makes it much shorter.")
    alone = advise(rows[:1], [43e6], 0.225, "adamw").reason
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


def test_no_two_lines_of_a_picture_share_a_color() -> None:
    from torch_commhook.cli.plan_plot import line_colors

    for count in (1, 16, 17, 60):
        colors = line_colors(count)
        assert len(set(colors)) == len(colors) == count


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
