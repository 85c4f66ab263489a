"""``train --parallel fsdp|hsdp``: models in shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nested_values import different_paths
from torch.distributed.tensor import DTensor

from torch_commhook.cli import text_model
from torch_commhook.cli.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from torch_commhook.cli.launch_environment import LaunchEnvironment
from torch_commhook.cli.text_model import ByteTransformer
from torch_commhook.cli.train import make_optimizer
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.train_options import parse_options
from torch_commhook.hooks.expressions import HookExpressionError, parse_codec
from torch_commhook.testing import run_ranks

CPU = torch.device("cpu")
TINY = TrainConfig(layers=2, dim=12, heads=2, seq=8)
FSDP = replace(TINY, parallel="fsdp", hook="allreduce()")
HSDP = replace(TINY, parallel="hsdp", hook="allreduce()")


def _model(config: TrainConfig) -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(config.layers, config.dim, config.heads)


def _step(model: ByteTransformer, rank: int, optimizer: torch.optim.Optimizer) -> None:
    windows = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(rank))
    model(windows[:, :-1], windows[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(replace(base, ranks=ranks, shards=shards), id=f"{base.parallel} {ranks}")
        for base, ranks, shards in [(FSDP, 2, None), (FSDP, 3, None), (HSDP, 4, 2), (HSDP, 6, 2)]
    ],
)
def test_without_a_hook_as_much_is_sent_as_the_plain_mean_sends(config: TrainConfig) -> None:
    """3 ranks do not divide the rows of these 2 layers; the count of ``none`` is a formula."""

    def of_rank(rank: int) -> None:
        model = _model(config)
        text_model.shard(model, config, CPU)
        handle = text_model.attach_hook(model, config)
        _step(model, rank, make_optimizer(model, config))
        counted = text_model.Traffic.of(handle.stats())
        assert text_model.plain_traffic(model, config) == counted
        assert min(counted.bytes_sent or 0, counted.bytes_gathered) > 0
        assert (counted.bytes_scattered > 0) == (config.parallel == "hsdp")

    run_ranks(of_rank, config.ranks)


def test_traffic_adds_up() -> None:
    sum_ = text_model.Traffic(1, 2, 3).times(3) + text_model.Traffic(10, 20, 30)
    assert sum_ == text_model.Traffic(13, 26, 39)
    assert (
        text_model.Traffic(None, 2, 3).times(2) + text_model.Traffic(1, 1, 1)
    ).bytes_sent is None


# ---- whole states --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [replace(FSDP, ranks=3), replace(HSDP, ranks=4, shards=2)])
def test_states_are_whole_and_go_back_into_shards(config: TrainConfig) -> None:
    def of_rank(rank: int) -> None:
        model = _model(config)
        text_model.shard(model, config, CPU)
        optimizer = make_optimizer(model, config)
        text_model.attach_hook(model, config)
        _step(model, rank, optimizer)
        saved = text_model.whole_state(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        )
        other = _model(config)
        other.load_state_dict(saved["model"])
        text_model.shard(other, config, CPU)
        again = make_optimizer(other, config)
        text_model.load_optimizer(again, saved["optimizer"]["state"])
        for p, values in again.state.items():
            assert isinstance(values["exp_avg"], DTensor)
            assert values["exp_avg"].placements == p.placements
        twice = text_model.whole_state(
            {"model": other.state_dict(), "optimizer": again.state_dict()}
        )
        plain = text_model.whole_model(model, config).state_dict()
        assert different_paths(saved, twice) == different_paths(saved["model"], plain) == []
        assert not any(isinstance(value, DTensor) for value in saved["model"].values())

    run_ranks(of_rank, config.ranks)


def test_an_optimizer_leaves_the_state_that_it_goes_on_from() -> None:
    """``--compare`` trains from the same checkpoint a second time."""
    model = _model(TINY)
    optimizer = make_optimizer(model, TINY)
    _step(model, 0, optimizer)
    state = text_model.whole_state(optimizer.state_dict()["state"])
    before = {name: value.clone() for name, value in state[0].items()}
    again = make_optimizer(model, TINY)
    text_model.load_optimizer(again, state)
    _step(model, 0, again)
    assert different_paths(before, state[0]) == []


# ---- options -------------------------------------------------------------------------------------


def test_a_codec_is_read_like_a_hook() -> None:
    assert repr(parse_codec("blockwise(bits=4)")) == "blockwise(bits=4)"
    assert repr(parse_codec("fp8")) == repr(parse_codec("fp8()"))
    assert parse_codec(" None ") is None
    for text, message in [
        ("blockwisse()", "the unknown codec 'blockwisse' (did you mean 'blockwise'?); a codec is "),
        ("cast()", "names the unknown codec 'cast'"),
        ("3", "is not a codec expression; a codec is one of "),
        ("blockwise(bits=3)", "is refused by blockwise: ValueError"),
    ]:
        with pytest.raises(HookExpressionError) as caught:
            parse_codec(text)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "shard_ranks", "replicas"),
    [
        ("--ranks 4", 1, 4),
        ("--ranks 4 --parallel fsdp --hook sign() --weights none", 4, 1),
        ("--ranks 4 --parallel hsdp --hook topk(0.1) --shard-hook cast()", 2, 2),
        ("--ranks 6 --parallel hsdp --hook powersgd() --shards 3", 3, 2),
        ("--ranks 4 --parallel hsdp --hook local_sgd(8,hook=topk(0.1))", 2, 2),
    ],
)
def test_where_the_ranks_go(arguments: str, shard_ranks: int, replicas: int) -> None:
    config = parse_options(arguments.split()).config
    assert (config.shard_ranks, config.replicas) == (shard_ranks, replicas)
    assert config.weights is None
    assert TrainConfig.from_plain(config.to_plain()) == config


def test_a_world_that_is_there_is_halved() -> None:
    config = parse_options(["--parallel", "hsdp"], LaunchEnvironment(0, 6, 0, 6)).config
    assert (config.shards, config.replicas) == (3, 2)


def _checkpoint(**changes: Any) -> Checkpoint:
    config = replace(HSDP, ranks=4, shards=2, weights="blockwise()", steps=4, **changes)
    model = _model(config)
    optimizer = make_optimizer(model, config)
    _step(model, 0, optimizer)
    return Checkpoint(
        config=config.to_plain(),
        step=1,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        rank_states=[{"hook": {"error": torch.ones(3)}, "rng": torch.get_rng_state()}] * 4,
        data_fingerprint="00",
        bytes_sent=1,
        seconds=1.5,
        bytes_scattered=2,
        bytes_gathered=3,
    )


@pytest.mark.parametrize(
    ("arguments", "config", "drops_memory"),
    [
        ("", ("hsdp", 2, "cast()", "blockwise()"), False),
        ("--weights none", ("hsdp", 2, "cast()", None), False),
        ("--shards 1", ("hsdp", 1, "cast()", "blockwise()"), True),
        ("--parallel fsdp", ("fsdp", None, None, "blockwise()"), True),
        ("--parallel ddp", ("ddp", None, None, None), True),
        ("--hook none", ("hsdp", 2, None, None), True),
    ],
)
def test_what_is_not_given_comes_from_the_checkpoint(
    arguments: str, config: tuple[object, ...], drops_memory: bool, tmp_path: Path
) -> None:
    path = tmp_path / "c.pt"
    write_checkpoint(path, _checkpoint(shard_hook="cast()"))
    options = parse_options(["--resume", str(path), *arguments.split()])
    got = options.config
    assert (got.parallel, got.shards, got.shard_hook, got.weights) == config
    said = [note for note in options.notes if "the state of the hook allreduce()" in note]
    assert len(said) == drops_memory


def test_a_checkpoint_of_an_older_version_has_gathered_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    write_checkpoint(path, _checkpoint())
    assert read_checkpoint(path).bytes_gathered == 3
    content = torch.load(path, weights_only=True)
    del content["bytes_scattered"], content["bytes_gathered"]
    for name in ("parallel", "shards", "shard_hook", "weights"):
        del content["config"][name]
    torch.save(content, path)
    found = read_checkpoint(path)
    assert (found.bytes_scattered, found.bytes_gathered) == (0, 0)
    assert TrainConfig.from_plain(found.config).parallel == "ddp"
    content["bytes_gathered"] = -1
    torch.save(content, path)
    with pytest.raises(ValueError, match="its bytes_gathered can't be read"):
        read_checkpoint(path)
