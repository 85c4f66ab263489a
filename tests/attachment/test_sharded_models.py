"""attach() and models whose gradients something else communicates: FSDP, DTensor, replicate()."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_releases import FLATTENED_GOES_ON

from torch_commhook import attach, hooks
from torch_commhook.attachment.parameters import why_replaced


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def _step(model: nn.Module, rank: int = 0) -> None:
    model(torch.full((2, 4), rank + 1.0)).sum().backward()


def _flattened(model: nn.Module, strategy: str, use_orig_params: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not the newest, says PyTorch
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )


def _message(kind: type[Exception], function: Callable[[], Any]) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")  # pytest's own would end a rank's process


# ---- refused by attach ---------------------------------------------------------------------------

PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "it": lambda model: model,
    "around it": lambda model: nn.Sequential(nn.Linear(4, 4), model),
    "inside it": lambda model: model.module[0],
}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
@pytest.mark.parametrize("place", PLACES)
@on_processes
def test_flattened(rank: int, place: str, strategy: str, use_orig_params: bool) -> None:
    model = PLACES[place](_flattened(_net(), strategy, use_orig_params))
    message = _message(TypeError, lambda: attach(model, hooks.allreduce()))
    assert "flattened by FullyShardedDataParallel" in message
    assert "whole on each rank" in message


@on_ranks(2)
def test_attached_between_forward_and_backward(rank: int) -> None:
    model, plain = _net(), _net()
    for each in (model, plain):
        fully_shard(each)
    _step(plain, rank)
    output = model(torch.full((2, 4), rank + 1.0))  # parameters are whole until backward
    handle = attach(model, hooks.allreduce())
    output.sum().backward()
    assert handle.stats().steps == 1
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())


def _assert_averaged(gradient: torch.Tensor) -> None:
    first, second = of_all_ranks(gradient)
    assert torch.equal(first, second) and first.any()


@on_ranks(2)
def test_parameters_that_fully_shard_ignores(rank: int) -> None:
    model = _net()
    model[0].requires_grad_(False)
    fully_shard(model, ignored_params=set(model[2].parameters()))
    model(torch.ones(2, 4))
    attach(model, hooks.allreduce())
    _step(model, rank)
    _assert_averaged(model[2].weight.grad)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("place", ["it", "around it"])
@on_ranks(2)
def test_replicate(rank: int, place: str, stepped: bool) -> None:
    model = replicate(_net())
    if stepped:
        _step(model, rank)
    if place == "around it":
        model = nn.Sequential(nn.Linear(4, 4), model)
    message = _message(RuntimeError, lambda: attach(model, hooks.allreduce()))
    assert "attach: replicate() was applied to" in message
    assert "register_comm_hook(None, hook)" in message
    assert "the newer replicate() of torch.distributed._composable.replicate_with" in message
    assert "torch.distributed._composable.replicate.DDP" not in message


@on_ranks(2)
def test_replicate_takes_a_hook_itself(rank: int) -> None:
    model = replicate(_net())
    model.register_comm_hook(None, hooks.allreduce())
    _step(model, rank)
    _assert_averaged(model[0].weight.grad)


# ---- applied after attach ------------------------------------------------------------------------


def _shard(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def _shard_one(model: nn.Module) -> nn.Module:
    fully_shard(model[2])
    return model


def _replicate_newer(model: nn.Module) -> nn.Module:
    replicate_with_fsdp.replicate(model)
    return model


def _flatten_one(model: nn.Module, use_orig_params: bool) -> nn.Module:
    model[2] = _flattened(model[2], "FULL_SHARD", use_orig_params)
    return model


def _parallelize(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    return model


LATER: dict[str, tuple[Callable[[nn.Module], nn.Module], str, str]] = {
    "fully_shard": (_shard, "0.weight", "fully_shard()"),
    "fully_shard of a part": (_shard_one, "2.weight", "fully_shard()"),
    "replicate as fully_shard": (_replicate_newer, "0.weight", "replicate()"),
    "parallelize_module": (_parallelize, "0.weight", "a sharding by DTensor"),
    **{
        f"FSDP1, {strategy}, {orig}": (
            lambda model, strategy=strategy, orig=orig: _flattened(model, strategy, orig),
            "0.weight",
            "FullyShardedDataParallel",
        )
        for strategy in ("NO_SHARD", "FULL_SHARD")
        for orig in (False, True)
    },
    **{
        f"FSDP1 of a part, {orig}": (
            lambda model, orig=orig: _flatten_one(model, orig),
            "2.weight",
            "FullyShardedDataParallel",
        )
        for orig in (False, True)
    },
}


@pytest.mark.parametrize("name", LATER)
@on_processes
def test_applied_after_attach(rank: int, name: str) -> None:
    apply, parameter_name, sharding = LATER[name]
    model = _net()
    parameter = model.get_parameter(parameter_name)
    assert why_replaced(model, parameter_name, parameter) is None
    handle = attach(model, hooks.allreduce())
    outer = apply(model)
    message = _message(RuntimeError, lambda: _step(outer, rank))
    handle.remove()
    advice = "attach takes models whose parameters are whole on each rank; remove() the hook"
    if sharding.endswith("()"):
        advice = f"remove() the hook, and attach it again after {sharding}"
        handle = attach(outer, hooks.allreduce())
        _step(outer, rank)
        assert handle.stats().steps == 1
        handle.remove()
    goes_on = FLATTENED_GOES_ON or name != "FSDP1, NO_SHARD, True"
    if goes_on and name != "parallelize_module":  # the rest of this one wants other shapes
        _step(outer, rank)
    assert f"parameter '{parameter_name}'" in message
    assert message.endswith(f"{sharding} has been applied since the hook was attached; {advice}")
    why = why_replaced(model, parameter_name, parameter)
    assert why is not None and why in message
    assert not handle.is_attached


@pytest.mark.parametrize("compiled_first", [False, True])
@pytest.mark.parametrize("name", ["fully_shard", "fully_shard of a part"])
@on_processes
def test_applied_after_attach_compiled(rank: int, name: str, compiled_first: bool) -> None:
    torch._dynamo.reset()
    apply, parameter, sharding = LATER[name]
    model = _net()
    attach(model, hooks.allreduce())
    compiled = torch.compile(model, backend="aot_eager")
    if compiled_first:
        _step(compiled, rank)
    apply(model)
    message = _message(RuntimeError, lambda: _step(compiled, rank))
    assert f"parameter '{parameter}' was replaced: {sharding} has been applied" in message


def test_a_parameter_that_no_sharding_has_replaced() -> None:
    model = _net()
    parameter = model[0].weight
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    assert why_replaced(model, "0.weight", parameter) is None
    del model[0]
    assert why_replaced(model, "5.weight", parameter) is None


@pytest.mark.parametrize(
    ("around", "place"),
    [
        ("DDP", "2.weight"),
        ("replicate", "0.weight"),
        ("replicate, a part", "2.weight"),
        ("replicate, before", "weight"),
    ],
)
@on_ranks(2)
def test_averaged_after_attach(rank: int, around: str, place: str) -> None:
    model = _net()
    is_before = around == "replicate, before"  # its DDP is made in the first forward
    if is_before:
        replicate(model)
    handle = attach(model[0] if is_before else model, hooks.allreduce())
    if around == "DDP":
        model[2] = DDP(model[2])
    elif not is_before:
        replicate(model[2] if around == "replicate, a part" else model)
    message = _message(RuntimeError, lambda: _step(model, rank))
    handle.remove()
    assert f"averages the gradient of parameter '{place}' too" in message
    assert "remove() the hook" in message
