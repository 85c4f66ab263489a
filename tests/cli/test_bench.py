"""``python -m torch_commhook bench``: its options, its tables, its picture, and runs of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from train_processes import TrainProcess, error_of, forbid_launch

from torch_commhook.cli.bench import measurements as bench_hooks
from torch_commhook.cli.bench import rank
from torch_commhook.cli.bench.measurements import LINK_SIZES, LinkPart, measure_link_part
from torch_commhook.cli.bench.options import BASELINE, PARTS, parse_options
from torch_commhook.cli.launch_environment import LaunchEnvironment
from torch_commhook.planning import LinkFile, MeasuredLink
from torch_commhook.planning.link_file import CollectiveTime, HookTime, Message
from torch_commhook.step.link import Link, Wire

MODEL = """
import torch
from torch import nn

def make():
    assert torch.zeros(1).is_meta
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2, bias=False))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    return model

def number():
    return 3

def broken():
    raise OSError("no weights")

def frozen():
    return nn.Linear(4, 4).requires_grad_(False)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forbid_launch(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bench_models", raising=False)
    (tmp_path / "bench_models.py").write_text(MODEL)
    (tmp_path / "folder").mkdir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 0", "argument --ranks: must be at least 1, got 0"),
        ("--ranks 1025", "argument --ranks: must be at most 1024, got 1025"),
        ("--parts link,hook", "argument --parts: must be of link, collectives, codecs, hooks, got"),
        ("--parts link", "argument --parts: link needs two or more ranks; give --ranks 2"),
        ("--hooks auto(0.1)", "argument --hooks: auto(0.1) chooses one of several hooks"),
        ("--parts collectives,link", "argument --parts: link and collectives need two or more ra"),
        ("--seconds 0", "argument --seconds: must be more than 0"),
        ("--seconds nan", "argument --seconds: must be more than 0"),
        ("--seconds 1e9", "argument --seconds: must be at most 86400, got 1e9"),
        ("--elements 0", "argument --elements: must be a number such as"),
        ("--elements 1e6", "argument --elements: must be a number such as"),
        ("--elements 1M --model a:b", "argument --model: not allowed with argument --elements"),
        ("--elements 9T", "argument --parts: hooks need about "),
        ("--model make", "argument --model: 'make' must be MODULE:FACTORY"),
        ("--model missing_models:make", "No module named 'missing_models'"),
        ("--model bench_models:none", "has no attribute 'none'"),
        ("--model bench_models:number", "must return a torch.nn.Module, got int"),
        ("--model bench_models:broken", "OSError: no weights"),
        ("--model bench_models:frozen", "must have a parameter with elements that gets a gradient"),
        ("--hooks casst()", "argument --hooks: hook 'casst()' names the unknown hook 'casst'"),
        ("--hooks none", "argument --hooks: none names no hook"),
        ("--out folder", "argument --out: folder is a directory"),
        ("--plot missing.py/a.png", None),
        ("--out same.png --plot same.png", "--plot: must be another file than that of --out"),
        ("--backend nccl --device cpu", "argument --backend: nccl needs --device cuda, got cpu"),
        ("--threads 0", "argument --threads: must be at least 1"),
        ("--timeout 0", "argument --timeout: must be more than 0"),
    ],
)
def test_wrong_options(
    arguments: str, message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if message is None:
        Path("missing.py").write_text("")
        message = "argument --plot: missing.py is not a directory"
    assert message in error_of("bench", arguments.split(), capsys)


def test_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = error_of("bench", ["--plot", "picture.png"], capsys)
    assert "argument --plot: matplotlib is missing (pip install" in error


def test_the_gradients_of_a_model() -> None:
    options = parse_options(["--model", "bench_models:make"])
    assert options.shapes == ((4, 8), (4,), (2, 4))
    assert options.description == "44 elements of bench_models:make"


def test_other_gradients_are_mostly_square_matrices() -> None:
    options = parse_options(["--elements", "4801"])
    assert options.shapes == (*[(10, 10)] * 48, (1,))
    assert options.description == "4.801 k elements"


def test_the_baseline_is_the_first_hook() -> None:
    options = parse_options(["--hooks", "cast()", BASELINE, "cast()"])
    assert options.hooks == (BASELINE, "cast()")


def test_parts_share_the_time() -> None:
    options = parse_options(["--ranks", "2", "--parts", "hooks,link", "--seconds", "50"])
    assert options.parts == ("link", "hooks")
    assert [options.seconds_of(part) for part in options.parts] == [20, 30]
    assert set(PARTS) == {"link", "collectives", "codecs", "hooks"}


def test_the_world_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    place = LaunchEnvironment(rank=0, size=4, local_rank=0, local_size=2)
    assert parse_options([], place).ranks == 4
    with pytest.raises(SystemExit):
        parse_options(["--ranks", "2"], place)
    assert "--ranks: must be 4, the ranks of the launcher, got 2" in capsys.readouterr().err


# ---- messages ------------------------------------------------------------------------------------


class MadeUpWire(Wire):
    """A simulated link of 8 Mbit/s. Its messages take no real time."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks, self.group = ranks, dist.ProcessGroup(0, ranks)
        self.device, self.distances = torch.device("cpu"), [1]

    def seconds(self, nbytes: int) -> float:
        return 0.01 + nbytes * (self.ranks - 1) / 1e6

    def trip(self, first: int, others: Sequence[int], quiet_seconds: float) -> float:
        return 0.01

    def arrivals(self, nbytes: int, count: int) -> list[float]:
        return [nbytes * (number + 1) / 1e6 for number in range(count)]

    def shared(self, *values: float) -> torch.Tensor:
        return torch.tensor([values] * self.ranks, dtype=torch.float64)


def test_messages_that_would_take_too_long_are_left_out() -> None:
    part = measure_link_part(MadeUpWire(), 10.0)
    assert [each.bytes for each in part.messages] == [
        size for size in LINK_SIZES if size <= 1 << 20
    ]
    assert part.messages[0].seconds == pytest.approx(0.01 + 1024 / 1e6)
    assert list(part.left_out) == [size for size in LINK_SIZES if size > 1 << 20]
    assert "more --seconds" in part.left_out[1 << 26]
    assert measure_link_part(MadeUpWire(), 1e4).left_out == {}


def test_messages_to_many_ranks_do_not_fill_the_memory() -> None:
    part = measure_link_part(MadeUpWire(8), 1e6)
    assert list(part.left_out) == [1 << 24, 1 << 26]
    assert "too much memory" in part.left_out[1 << 24]


# ---- what is shown -------------------------------------------------------------------------------

HOOKS = [
    HookTime(bench_hooks.ALONE, 0.01, 0.0, 0.1),
    HookTime("allreduce()", 0.1, 1e6, 1.0),
    HookTime("error_feedback(powersgd(rank=2))", 0.05, 1e4, 0.5),
]
FILE = LinkFile(
    ranks=3,
    backend="gloo",
    device="cpu",
    link=MeasuredLink(200e6, 0.025),
    messages=[Message(1024, 0.05), Message(1 << 20, 0.1)],
    hooks=HOOKS,
)


def test_the_table_of_a_link() -> None:
    figures = Link(0.05, {1: 90e6, 4: 200e6})
    part = LinkPart(figures, FILE.messages, {1 << 26: "one takes about 2.7 s; give more --seconds"})
    assert rank.link_text(part, 3).splitlines() == [
        "link: 200.0 Mbit/s each way with headers, round trip 50.00 ms",
        "one connection carries 90.0 Mbit/s, 4 carry 200.0: attach() takes 4",
        "",
        "message to each of 2 ranks     ms  Mbit/s each way",
        "1 KiB                       50.00             0.33",
        "1 MiB                         100            167.8",
        "64 MiB: left out, one takes about 2.7 s; give more --seconds",
    ]


def test_the_tables_of_collectives_and_hooks() -> None:
    found = [
        CollectiveTime("all_reduce", 1 << 16, 0.001),
        CollectiveTime("all_to_all", 1 << 16, 0.0005),
        CollectiveTime("all_reduce", 1 << 20, 0.1),
    ]
    assert rank.collectives_text(found).splitlines() == [
        "collective    64 KiB   1 MiB",
        "all_reduce   1.00 ms  100 ms",
        "all_to_all  0.500 ms",
    ]
    assert rank.hooks_text(HOOKS, "25 M elements").splitlines() == [
        "steps that average 25 M elements, and compute next to nothing",
        "hook                              step ms  x allreduce()  sent per step",
        "no communication                    10.00           0.10",
        "allreduce()                           100           1.00        1.00 MB",
        "error_feedback(powersgd(rank=2))    50.00           0.50        10.0 kB",
    ]


@pytest.mark.parametrize(
    "found",
    [FILE, LinkFile(1, "gloo", "cpu", hooks=HOOKS), LinkFile(2, "gloo", "cpu")],
    ids=["all", "alone", "codecs alone"],
)
def test_the_picture(tmp_path: Path, found: LinkFile) -> None:
    pytest.importorskip("matplotlib")
    from torch_commhook.cli.bench.rank import draw

    draw(tmp_path / "picture", found)
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")


# ---- runs ----------------------------------------------------------------------------------------

SHORT = ("--elements", "10k", "--seconds", "1", "--threads", "1")


def bench(*arguments: str | Path, folder: Path) -> str:
    """Run ``bench``, which must succeed; returns its stdout."""
    command = ("-m", "torch_commhook", "bench", *SHORT, *arguments)
    with TrainProcess(*command, folder=folder) as process:
        assert process.wait() == 0, process.stderr
        process.assert_all_end()
        assert process.stderr == ""
        return process.stdout


def test_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "new" / "link.json", tmp_path / "link.png"
    streamed = "local_sgd(4, delay=2, mix=0.5)"
    hooks = ("--hooks", "cast()", "local_sgd(4)", streamed)
    printed = bench("--ranks", "2", "--out", out, "--plot", plot, *hooks, folder=tmp_path)
    assert printed.startswith("commhook bench: 2 ranks over gloo, 1 thread each, torch ")
    assert "link: " in printed and "steps that average 10 k elements" in printed
    found = LinkFile.read(out)
    assert found.ranks == 2 and found.backend == "gloo" and found.device == "cpu"
    assert found.link is not None and found.link.bits_per_second > 1e6
    assert found.messages[0].bytes == 1 << 10
    names = {each.name for each in found.collectives}
    assert names == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert {each.codec.partition("(")[0] for each in found.codecs} >= {"blockwise", "topk", "fp8"}
    sent = {each.hook: each.bytes for each in found.hooks}
    expected = {bench_hooks.ALONE: 0, "allreduce()": 40_000, "cast()": 20_000}
    expected |= {"local_sgd(4)": 10_000, streamed: 10_000}
    assert list(sent.items()) == list(expected.items())
    assert found.hooks[1].to_allreduce == 1.0
    assert found.machine["torch"] == torch.__version__
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_alone(tmp_path: Path) -> None:
    printed = bench("--hooks", "blockwise()", folder=tmp_path)
    assert rank.NO_LINK in printed
    assert "blockwise()" in printed and "collective" not in printed


def test_json_of_a_part(tmp_path: Path) -> None:
    found = json.loads(bench("--parts", "codecs", "--json", folder=tmp_path))
    assert found["format"] == "commhook bench 1"
    assert found["link"] is None and found["hooks"] == [] and found["codecs"]


def test_a_hook_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def hook(state, bucket):\n    raise OSError('no luck')\n")
    command = ("-m", "torch_commhook", "bench", *SHORT, "--ranks", "2", "--parts", "hooks")
    with TrainProcess(*command, "--hooks", "mine.py:hook", folder=tmp_path) as process:
        assert process.wait() == 1
        process.assert_all_end()
        assert "commhook bench: rank " in process.stderr
        assert "the hook 'mine.py:hook' can't be measured: OSError: no luck" in process.stderr
        assert process.stdout.startswith("commhook bench: 2 ranks")
    logs = [path for path in tmp_path.iterdir() if path.name.startswith("commhook-bench-")]
    assert len(logs) == 1 and os.listdir(logs[0])
