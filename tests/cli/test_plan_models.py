"""The models that ``commhook plan`` takes, and the measured time of their steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from train_processes import error_of

from torch_commhook.cli import plan, plan_advice, plan_parser
from torch_commhook.cli.main import main
from torch_commhook.cli.plan_parser import (
    ModelError,
    model_of_factory,
    model_of_shapes,
    parse_input,
    train_transformer,
)
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.planning import HookError, LinkFile, MeasuredLink, Model, Parameter
from torch_commhook.planning.link_file import HookTime
from torch_commhook.planning.model import measure_step

MODELS = """
import torch
from torch import nn

def linear():
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8, bias=False))

def with_inputs():
    return linear()

with_inputs.example_inputs = torch.ones(2, 64)

def with_made_inputs():
    return linear()

with_made_inputs.example_inputs = lambda: (torch.ones(3, 64),)

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, words):
        return {"words": self.embedding(words)}

def no_model():
    return {"a": 1}

def fails():
    raise OSError("no disk")

def reads_values():
    found = nn.Linear(2, 2)
    if found.weight.sum() > 0:
        return found

def empty():
    return nn.Identity()

number = 3
"""
SHAPES = [
    Parameter((128, 64), "0.weight"),
    Parameter((128,), "0.bias"),
    Parameter((8, 128), "1.weight"),
]


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "some_models.py"
    path.write_text(MODELS)
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", "--hooks", "cast()", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_factory_gives_shapes(models: str) -> None:
    found = model_of_factory(f"{models}:linear", None)
    assert found.model.parameters == tuple(SHAPES)
    assert found.model.elements == 128 * 64 + 128 + 8 * 128
    assert not found.is_runnable  # its inputs are unknown


def test_a_factory_of_a_module(monkeypatch: pytest.MonkeyPatch, models: str) -> None:
    """Python finds the module in the current folder."""
    monkeypatch.chdir(Path(models).parent)
    monkeypatch.setattr("sys.path", [each for each in __import__("sys").path if each])
    assert model_of_factory("some_models:Table", None).model.elements == 40


@pytest.mark.parametrize(
    ("factory", "inputs"),
    [
        ("linear", ["2x64"]),
        ("with_inputs", None),
        ("with_made_inputs", None),
        ("Table", ["2x5:int64"]),
    ],
)
def test_a_step_is_measured(models: str, factory: str, inputs: Sequence[str] | None) -> None:
    made = None if inputs is None else [parse_input(text) for text in inputs]
    found = model_of_factory(f"{models}:{factory}", made)
    assert found.is_runnable and 0 < found.compute_seconds("adamw") < 60


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no_such_module:make", "can't be loaded: ModuleNotFoundError"),
        ("no_such.py:make", "there is no file no_such.py"),
        ("make", "must be MODULE:FACTORY"),
        ("{models}:no_model", "must return a torch.nn.Module, got dict"),
        ("{models}:fails", "can't be built on the meta device.*: OSError: no disk"),
        ("{models}:reads_values", "can't be built on the meta device"),
        ("{models}:empty", "a model must have a parameter"),
        ("{models}:number", "must be a function, got int"),
        ("{models}:no_such", "can't be loaded: AttributeError"),
    ],
)
def test_a_place_without_a_model(models: str, place: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_of_factory(place.format(models=models), None)


def test_a_step_that_fails(models: str) -> None:
    wrong = model_of_factory(f"{models}:linear", [parse_input("2x3")])
    with pytest.raises(ModelError, match=r"a step of .*linear can't be measured: RuntimeError"):
        wrong.compute_seconds("adamw")


def test_a_step_leaves_the_parameters() -> None:
    model = torch.nn.Linear(4, 4)
    before = [parameter.clone() for parameter in model.parameters()]
    for optimizer in ("adamw", "sgd"):
        assert measure_step(model, [torch.ones(2, 4)], optimizer) > 0
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(ValueError, match="must be adamw or sgd, got 'lion'"):
        measure_step(model, [torch.ones(2, 4)], "lion")
    detached = torch.nn.Linear(4, 4)
    detached.register_forward_hook(lambda *given: given[-1].detach())
    with pytest.raises(ValueError, match="must return a tensor with a gradient"):
        measure_step(detached, [torch.ones(2, 4)], "sgd")
    with pytest.raises(ValueError, match="must have a parameter that gets a gradient"):
        measure_step(torch.nn.ReLU(), [torch.ones(2)], "sgd")


@pytest.mark.parametrize("text", ["4y3", "", "x", "4x3:nn", "4x-3", "1x" * 20 + "1"])
def test_wrong_inputs(text: str) -> None:
    with pytest.raises(ValueError, match="must be a shape such as"):
        parse_input(text)


def test_inputs() -> None:
    assert parse_input("4x3")().shape == (4, 3)
    assert parse_input("4x3:float")().dtype is torch.float32
    words = parse_input("4,3:int64")()
    assert words.dtype is torch.int64 and not words.any()


# ---- files of shapes -----------------------------------------------------------------------------

TEXT = """# a model
0.weight 128x64
0.bias: 128  # a vector
1.weight 8 128
"""


NAMELESS = [Parameter(each.shape) for each in SHAPES]


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (TEXT, SHAPES),
        (json.dumps([{"name": each.name, "shape": each.shape} for each in SHAPES]), SHAPES),
        (json.dumps({"parameters": [{"name": e.name, "shape": e.shape} for e in SHAPES]}), SHAPES),
        ("128x64\n128\n8,128x", NAMELESS),  # an x at the end does not matter
        ("[[128, 64], [128], [8, 128]]", NAMELESS),
    ],
)
def test_shapes_of_a_file(tmp_path: Path, text: str, shapes: list[Parameter]) -> None:
    path = tmp_path / "shapes"
    path.write_text(text)
    assert model_of_shapes(path).model == Model.of_parameters(shapes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must list shapes of 1 to"),
        ("0.weight 4x4\nmany words here", "line 2: must be a shape such as 768x2304"),
        ('{"shapes": [[1]]}', "must have a list of shapes"),
        ("[[1, 2], [1.5]]", "entry 1 must be a shape"),
        ('[{"name": 3, "shape": [1]}]', "entry 0 must be a shape"),
        ("[[true]]", "entry 0 must be a shape"),
        ("[[1, 2]", "is no JSON"),
        ("99999999x99999999", "must list shapes of 1 to"),
    ],
)
def test_files_without_shapes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "shapes"
    path.write_text(text)
    with pytest.raises(ModelError, match=message):
        model_of_shapes(path)
    with pytest.raises(ModelError, match="can't be read: FileNotFoundError"):
        model_of_shapes(tmp_path / "no_such")


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_takes_a_model(capsys: pytest.CaptureFixture[str], models: str) -> None:
    found = planned(capsys, "--model", f"{models}:with_inputs")
    assert found["elements"] == 128 * 64 + 128 + 8 * 128
    assert found["is_measured"] and found["compute_seconds"] > 0
    assert [each["hook"] for each in found["hooks"]] == ["allreduce()", "cast()"]
    given = planned(capsys, "--model", f"{models}:linear", "--input", "1x64")
    assert given["is_measured"]
    told = planned(capsys, "--model", f"{models}:linear", "--compute-ms", "7")
    assert (told["is_measured"], told["compute_seconds"]) == (False, 0.007)


def test_the_command_takes_shapes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    path.write_text(TEXT)
    rules = "policy([('dim <= 1', allreduce()), ('1.*', cast())], powersgd(rank=2))"
    assert (
        main(["plan", "--json", "--compute-ms", "0", "--shapes", str(path), "--hooks", rules]) == 0
    )
    _, policy = json.loads(capsys.readouterr().out)["hooks"]
    # The vector in float32, the second matrix in 16 bits, two factors of the first.
    assert policy["bytes_sent"] == 4 * 128 + 2 * 8 * 128 + 4 * 2 * (128 + 64)


def test_a_model_that_is_not_measured(capsys: pytest.CaptureFixture[str], models: str) -> None:
    assert main(["plan", "--model", f"{models}:linear"]) == 2
    said = capsys.readouterr().err
    assert "argument --compute-ms: how long does a step take without communication?" in said
    assert main(["plan", "--model", f"{models}:fails"]) == 2
    assert "can't be built on the meta device" in capsys.readouterr().err


def test_it_announces_each_measurement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, models: str
) -> None:
    said = []

    def stop(*arguments: Any, **options: Any) -> None:
        said.append(capsys.readouterr().err.splitlines()[-1])
        raise HookError("stopped")

    monkeypatch.setattr(plan_parser, "measure_step", stop)
    monkeypatch.setattr(plan, "measure", stop)
    monkeypatch.setattr(plan_advice, "measure_sharded", stop)
    model = f"{models}:with_inputs"
    sharded = ["--parallel", "hsdp", "--world", "4", "--shard-hook", "fp8()", "--weights", "fp8()"]
    for arguments in ([], ["--compute-ms", "7"], ["--compute-ms", "7", *sharded]):
        assert main(["plan", "--model", model, "--hooks", "cast()", *arguments]) == 2
    begin = "commhook plan: measuring on this machine:"
    assert said == [
        f"{begin} a step of {model}, 2 hooks",
        f"{begin} 2 hooks",
        f"{begin} 2 hooks, --shard-hook fp8(), --weights fp8()",
    ]


def test_without_a_model_it_is_that_of_train() -> None:
    found = train_transformer()
    config = TrainConfig()
    assert found.model.elements == pytest.approx(10.83e6, rel=1e-2)
    assert found.inputs is not None
    assert [each.shape for each in found.inputs()] == [(config.batch, config.seq)] * 2


# ---- a file of bench -----------------------------------------------------------------------------


def test_a_link_of_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    file = LinkFile(
        ranks=4,
        backend="gloo",
        device="cpu",
        link=MeasuredLink(2e9, 0.01),
        hooks=[HookTime("allreduce()", 5.0, 1.0, 1.0), HookTime("cast()", 5.0, 1.0, 1.0)],
        machine={"elements": 10_000},
    )
    file.write(path)
    arguments = ["--model-size", "10k", "--compute-ms", "0", "--link", str(path)]
    arguments += ["--hooks", "cast()"]
    found = planned(capsys, *arguments)
    assert (found["world"], found["bits_per_second"], found["delay_seconds"]) == (4, 2e9, 0.01)
    assert found["link_file"] == str(path)
    _, cast = found["hooks"]
    # bench says that it computes for seconds.
    assert cast["compute_seconds"] == pytest.approx(5.0, rel=0.05)
    other = planned(capsys, *arguments, "--delay", "0", "--world", "2")
    assert (other["world"], other["delay_seconds"]) == (2, 0.0)
    assert other["hooks"][1]["compute_seconds"] < 1.0
    assert main(["plan", *arguments]) == 0
    said = capsys.readouterr().out
    assert f"4 ranks, 2 Gbit/s and 10 ms each way ({path})" in said


def test_files_that_are_no_links(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    LinkFile(ranks=1, backend="gloo", device="cpu").write(path)
    parts = LinkFile(ranks=2, backend="gloo", device="cpu").text()
    for text, message in (
        (None, "has no link: one rank has none"),
        (parts, "has no link: bench measured other --parts"),
        ("{}", "its format must be"),
    ):
        if text is not None:
            path.write_text(text)
        assert message in error_of("plan", ["--link", str(path)], capsys)
