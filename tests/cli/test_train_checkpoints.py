"""Checkpoints of ``train``: atomic writes, reads, and the errors of ``--resume`` on bad ones."""

from __future__ import annotations

import io
import os
import pickle
import resource
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from nested_values import different_paths
from train_processes import train_error

from torch_commhook.cli.checkpoint import (
    Checkpoint,
    CheckpointError,
    read_checkpoint,
    to_cpu,
    write_checkpoint,
)
from torch_commhook.cli.text_model import ByteTransformer, Traffic
from torch_commhook.cli.train import Run, _restore, _save, make_optimizer
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.train_options import parse_options
from torch_commhook.cli.world import World
from torch_commhook.testing import run_ranks

_CONFIG = TrainConfig(layers=1, dim=32, heads=2, seq=16, steps=4)


def _model_and_optimizer() -> tuple[ByteTransformer, torch.optim.Optimizer]:
    """As they are after a step."""
    model = ByteTransformer(_CONFIG.layers, _CONFIG.dim, _CONFIG.heads)
    optimizer = make_optimizer(model, _CONFIG)
    windows = torch.arange(17)[None]
    model(windows[:, :-1], windows[:, 1:]).backward()
    optimizer.step()
    return model, optimizer


def _checkpoint() -> Checkpoint:
    model, optimizer = _model_and_optimizer()
    return Checkpoint(
        config=_CONFIG.to_plain(),
        step=4,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        rank_states=[{"hook": {"error": torch.ones(3)}, "rng": torch.get_rng_state()}] * 2,
        data_fingerprint="00",
        bytes_sent=None,
        seconds=1.5,
    )


# ---- writing and reading -------------------------------------------------------------------------


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "c.pt"
    written = _checkpoint()
    write_checkpoint(path, written)
    loaded = read_checkpoint(path)
    assert TrainConfig.from_plain(loaded.config) == TrainConfig.from_plain(written.config)
    for part in ("model", "optimizer", "rank_states"):
        assert different_paths(getattr(written, part), getattr(loaded, part)) == []
    assert loaded.has_hook_state
    assert list(path.parent.iterdir()) == [path]
    assert set(torch.load(path, weights_only=True)) > {"model", "optimizer", "step", "config"}


def test_a_failed_write_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.pt"
    write_checkpoint(path, _checkpoint())
    before = path.read_bytes()

    def save(content: object, stream: io.BufferedWriter) -> None:
        stream.write(b"half")
        raise OSError("no space")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(path, _checkpoint())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_the_disk_refuses_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """torch.save raises an error of its own instead."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint(tmp_path / "c.pt", _checkpoint())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_to_cpu_copies_tensors_in_any_nesting() -> None:
    tensor = torch.ones(2)
    copied = to_cpu({"a": [tensor, (tensor, 3)], "b": None})
    tensor.zero_()
    assert torch.equal(copied["a"][0], torch.ones(2))
    assert torch.equal(copied["a"][1][0], torch.ones(2))
    assert copied["a"][1][1] == 3 and copied["b"] is None


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("inline_container.cc:672")])
def test_a_failed_periodic_checkpoint_warns_and_the_last_one_raises(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "--save c.pt --save-every 2 --steps 4 --ranks 1"
    options = parse_options(arguments.split())
    model, optimizer = _model_and_optimizer()
    run = Run(model, types.SimpleNamespace(), optimizer, None, step=2)  # type: ignore[arg-type]
    data: Any = types.SimpleNamespace(fingerprint="00")
    world = World(0, 1, torch.device("cpu"), "gloo")
    save = partial(_save, run, options, world, data, Traffic(None))
    assert save() == Path("c.pt")
    before = Path("c.pt").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("torch_commhook.cli.train.write_checkpoint", Mock(side_effect=error))
        run.step = 3
        assert save() is None and Path("c.pt").read_bytes() == before
        said = f"warning: no checkpoint of step 3: {error}"
        assert f"{said}; c.pt has an earlier one\n" in capsys.readouterr().err
        Path("c.pt").unlink()
        assert save() is None and capsys.readouterr().err.endswith(f"{said}\n")
        run.step = 4
        with pytest.raises(type(error)):
            save()


def _save_on(rank: int, path: Path) -> str:
    options = parse_options(["--save", str(path), "--ranks", "2"])
    model, optimizer = _model_and_optimizer()
    hook_state = {"object": types.SimpleNamespace(a=1)} if rank == 1 else {}
    handle = types.SimpleNamespace(state_dict=lambda: hook_state)
    run = Run(model, model, optimizer, handle, step=options.last_step)
    data: Any = types.SimpleNamespace(fingerprint="00")
    try:
        _save(run, options, World(rank, 2, torch.device("cpu"), "gloo"), data, Traffic(None))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "saved"


def test_a_state_of_one_rank_that_cannot_be_saved_is_an_error_on_all(tmp_path: Path) -> None:
    for error in run_ranks(partial(_save_on, path=tmp_path / "c.pt"), 2):
        assert "a rank sends objects of types.SimpleNamespace" in error


# ---- going on from one ---------------------------------------------------------------------------


def test_what_is_not_given_comes_from_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    write_checkpoint(path, _checkpoint())
    options = parse_options(["--resume", str(path), "--steps", "9", "--batch", "5"])
    assert (options.config.dim, options.config.seq, options.config.ranks) == (32, 16, 2)
    assert (options.config.steps, options.config.batch) == (9, 5)
    assert len(options.notes) == 2
    assert any("--batch is 5, but was 4" in note for note in options.notes)
    assert parse_options(["--resume", str(path), "--steps", "9"]).config.batch == 4


@pytest.mark.parametrize("name", ["hook", "shard_hook"])
def test_a_file_that_a_checkpoint_names_is_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("raise AssertionError('it runs')\nhook = print")
    config = {**_CONFIG.to_plain(), "parallel": "hsdp", "shards": 1, name: "own.py:hook"}
    write_checkpoint(Path("c.pt"), replace(_checkpoint(), config=config))
    error = train_error(["--resume", "c.pt", "--steps", "9"], capsys)
    option = f"--{name.replace('_', '-')}"
    assert "argument --resume: c.pt names the hook own.py:hook, and a checkpoint must" in error
    assert f"if you trust that file, give it: {option} own.py:hook" in error
    given = parse_options(["--resume", "c.pt", "--steps", "9", option, "own.py:hook"]).config
    assert getattr(given, name) == "own.py:hook"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dim 64", "argument --dim: must be 32 as in the checkpoint good.pt, got 64"),
        ("--seq 8", "argument --seq: must be 16 as in the checkpoint good.pt, got 8"),
        ("", "argument --steps: must be more than the 4 steps of the checkpoint good.pt"),
        ("--steps 9 --ranks 3", "good.pt holds the hook's state of 2 ranks"),
    ],
)
def test_options_that_do_not_suit_the_checkpoint_are_named(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("good.pt"), _checkpoint())
    error = train_error(["--resume", "good.pt", *arguments.split()], capsys)
    assert error.startswith("commhook train: error: argument ") and message in error


# ---- bad files -----------------------------------------------------------------------------------


def _assert_refused(path: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = train_error(["--resume", str(path), "--steps", "9"], capsys)
    assert error.startswith("commhook train: error: argument ")
    assert f"argument --resume: {message}" in error


def test_a_path_that_is_no_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _assert_refused(tmp_path / "none.pt", f"there is no file {tmp_path}/none.pt", capsys)
    _assert_refused(tmp_path, f"{tmp_path} is not a regular file", capsys)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)  # so that opening it doesn't wait
    os.write(pipe, b"some text")
    _assert_refused(tmp_path / "pipe", f"{tmp_path}/pipe is not a regular file", capsys)
    os.close(pipe)


def test_a_part_of_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.pt"
    write_checkpoint(path, _checkpoint())
    whole = path.read_bytes()
    legacy = io.BytesIO()
    torch.save({"a": 1}, legacy, _use_new_zipfile_serialization=False)
    weights = whole.index(read_checkpoint(path).model["head.weight"].numpy().tobytes())
    for content in (
        b"",
        whole[:10],
        whole[: len(whole) // 2],
        whole[:-500],
        whole[:weights] + bytes(100) + whole[weights + 100 :],
        b"\x80" + bytes(range(256)) * 4,
        b"just a text\n",
        pickle.dumps({"a": 1}),
        pickle.dumps(types.SimpleNamespace(a=1)),
        legacy.getvalue(),
    ):
        path.write_bytes(content)
        _assert_refused(path, f"{path} is not a", capsys)
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "evil"),))

    torch.save({"format": "torch_commhook.train", "version": 1, "x": Evil()}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "c.pt")
    assert not (tmp_path / "evil").exists()


def test_a_checkpoint_that_asks_for_more_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Huge:
        def __reduce__(self) -> tuple[object, ...]:
            return bytearray, (1 << 20,)

    path = tmp_path / "c.pt"
    torch.save({"format": "torch_commhook.train", "version": 1, "x": Huge()}, path)
    message = f"{path} is not a whole checkpoint of commhook train: its pickle asks for "
    _assert_refused(path, message, capsys)


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], object]:
    """A function that sets ``content[keys[0]][keys[1]]...``, or removes it for ``...``."""

    def change(content: dict[str, Any]) -> None:
        inner: Any = reduce(getitem, keys[:-1], content)
        if to is ...:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = to

    return change


_without = partial(_set, to=...)


DAMAGED = [
    (_set("step", to="four"), "its step can't be read"),
    (_set("step", to=-1), "its step can't be read"),
    (_set("config", to=[1]), "its config can't be read"),
    (_set("model", to={"a": 1}), "its model can't be read"),
    (_set("optimizer", to={}), "its optimizer can't be read"),
    (_set("rank_states", to=[1]), "its rank_states can't be read"),
    (_set("rank_states", 0, "rng", to=torch.zeros(3).byte()), "its rank_states can't be read"),
    (_set("bytes_sent", to="many"), "its bytes_sent can't be read"),
    (_set("seconds", to=float("nan")), "its seconds can't be read"),
    (_set("config", "dim", to="wide"), "its dim can't be 'wide'"),
    (_set("config", "layers", to=0), "its layers can't be 0"),
    (_set("config", "lr", to=float("inf")), "its lr can't be inf"),
    (_set("config", "data", to=[3]), "its data can't be [3]"),
    (_set("config", "data_cap_mb", to=1e13), "its data_cap_mb can't be 1000"),
    (_set("config", "bucket_cap_mb", to=1e300), "its bucket_cap_mb can't be 1e"),
    (_set("config", "heads", to=3), "ByteTransformer: dim must be a multiple of"),
    (_set("config", "layers", to=10**4), "it has no weights for 10000 layers"),
    (_set("config", "dim", to=10**6), "its model: embedding.weight must be float32 [256, 1000000]"),
    (_set("config", "dim", to=10**9), "its dim can't be 1000000000"),
    (_without("model", "norm.weight"), "its model: norm.weight must be float32 [32], got missing"),
    (_set("model", "more", to=torch.zeros(3)), "its model: more must be missing, got float32 [3]"),
    (
        _set("model", "head.weight", to=torch.zeros(32, 256)),
        "its model: head.weight must be float32 [256, 32], got float32 [32, 256]",
    ),
    (
        _set("model", "norm.bias", to=torch.zeros(32, dtype=torch.int64)),
        "its model: norm.bias must be float32 [32], got int64 [32]",
    ),
    (_without("optimizer", "state", 0), "its optimizer must have the state of 12 parameters, got"),
    (
        _without("optimizer", "state", 2, "exp_avg"),
        "its optimizer, parameter 2: exp_avg must be float32 [32, 32], got missing",
    ),
    (
        _set("optimizer", "state", 0, "exp_avg_sq", to=torch.zeros(3)),
        "its optimizer, parameter 0: exp_avg_sq must be float32 [256, 32], got",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.clear(), "is not a checkpoint of commhook train"),
        (_set("format", to="torch_other"), "is not a checkpoint of commhook train"),
        (lambda content: content.pop("version"), "is a checkpoint of version None, this is for 1"),
        (_set("version", to=torch.ones(2)), "is a checkpoint of version"),
        (_set("version", to=2), "is a checkpoint of version 2, this is for 1"),
        (lambda content: (content.pop("step"), content.pop("model")), "lacks step, model"),
        *((change, f"is damaged: {message}") for change, message in DAMAGED),
    ],
)
def test_a_checkpoint_with_other_content_is_refused(
    change: Callable[[dict[str, Any]], object],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "c.pt"
    write_checkpoint(path, _checkpoint())
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    _assert_refused(path, f"{path} {message}", capsys)


def test_a_hook_that_refuses_its_state_is_an_error_of_the_checkpoint() -> None:
    handle = Mock(load_state_dict=Mock(side_effect=KeyError("residual")))
    model, optimizer = _model_and_optimizer()
    run: Any = types.SimpleNamespace(model=model, optimizer=optimizer, handle=handle)
    world = World(0, 2, torch.device("cpu"), "gloo")
    with pytest.raises(CheckpointError, match=r"the hook cast\(bfloat16\) refuses its state"):
        _restore(run, _CONFIG, world, _checkpoint(), main_run=True)
