"""Parameters gathered through a codec: the same on all ranks, from shards that stay exact."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from sharded_models import Layers, Mesh, batch, by_layer, local, loss_of, on_ranks, reshard, run_on
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from torch_commhook import attach, codecs, hooks

PLACES = ["fsdp-2", "fsdp-3", "hsdp-4"]


class _Watching(nn.Linear):
    """Notes its weight in forward, and as its gradient of the input has it in backward."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = getattr(self, "seen", [])
        self.seen.append(self.weight.detach().float().clone())
        return _Product.apply(inputs, self.weight, self)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, module: Any) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.module = module
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        ctx.module.seen.append(weight.detach().float().clone())
        return gradient @ weight, gradient.t() @ inputs, None


def _net() -> nn.Module:
    torch.manual_seed(0)
    parts = list(Layers(5, 7, 1))
    return nn.Sequential(*parts[:2], _Watching(7, 7, bias=False), nn.Tanh(), parts[2])


CODECS: dict[str, tuple[Callable[[], Any], float]] = {
    "int8": (codecs.blockwise, 0.51 / 127),
    "int4": (partial(codecs.blockwise, bits=4), 0.51 / 7),
    "fp8": (codecs.fp8, 0.07),
}


def _gather(rank: int, place: str, codec: str, settings: dict[str, Any]) -> None:
    model = _net()
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    by_layer(model, Mesh.of(place), **settings)
    exact = [local(parameter) for parameter in model.parameters()]
    weights, part = CODECS[codec]
    handle = attach(model, hooks.allreduce(), weights=weights())
    loss_of(model(batch(rank, 0))).backward()
    reshard(model)
    after = [local(parameter) for parameter in model.parameters()]
    assert all(a.equal(b) for a, b in zip(after, exact, strict=True)), "a shard has changed"
    forward, backward = model[2].seen
    assert forward.equal(backward), "backward sees other weights"
    distance = float((forward - whole[2]).abs().max())
    bound = part * float(whole[2].abs().max())
    assert 0 < distance <= bound, f"{distance} is none, or more than {bound}"
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(forward.numpy().tobytes()).hexdigest())
    assert len(set(digests)) == 1, "ranks have restored other weights"
    handle.remove()
    loss_of(model(batch(rank, 0)))
    assert model[2].seen[-1].equal(whole[2]), "removed, the weights are not exact"


@pytest.mark.parametrize("codec", CODECS)
@on_ranks(*PLACES)
def test_weights_through_a_codec(rank: int, place: str, codec: str) -> None:
    _gather(rank, place, codec, {})


SETTINGS: dict[str, dict[str, Any]] = {
    "whole after forward": {"reshard_after_forward": False},
    "sharded after forward": {"reshard_after_forward": True},
    "sharded among two after forward": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ("whole after forward", "fsdp-3"),
        ("sharded after forward", "fsdp-3"),
        ("sharded among two after forward", "fsdp-4"),
    ],
)
def test_backward_sees_the_same_weights(
    request: pytest.FixtureRequest, place: str, settings: str
) -> None:
    run_on(request, place, _gather, "int8", SETTINGS[settings])


@pytest.mark.parametrize(
    "policy",
    [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}],
    ids=["float32", "bfloat16"],
)
@on_ranks(*PLACES, "gloo-hsdp-4")
def test_gradients_are_those_at_the_restored_weights(
    rank: int, place: str, policy: dict[str, Any]
) -> list[str]:
    """Those at the weights that were gathered, to the bits."""
    model = _net()
    by_layer(model, Mesh.of(place), mp_policy=MixedPrecisionPolicy(**policy))
    handle = attach(model, hooks.allreduce(), weights=codecs.blockwise())
    loss_of(model(batch(rank, 0))).backward()
    reshard(model)
    got = [local(parameter.grad) for parameter in model.parameters()]
    model.unshard()
    for layer in model:
        if hasattr(layer, "unshard"):
            layer.unshard()
    restored = [parameter.detach().float().clone() for parameter in model.parameters()]
    handle.remove()
    plain = _net()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), restored, strict=True):
            parameter.copy_(value)
    by_layer(plain, Mesh.of(place), mp_policy=MixedPrecisionPolicy(**policy))
    loss_of(plain(batch(rank, 0))).backward()
    reshard(plain)
    expected = [local(parameter.grad) for parameter in plain.parameters()]
    return [
        f"gradient {number}"
        for number, (a, b) in enumerate(zip(got, expected, strict=True))
        if not a.equal(b)
    ]


@on_ranks("fsdp-3")
def test_columns(rank: int, place: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), _Watching(6, 6, bias=False), nn.Linear(6, 1))
    whole = model[2].weight.detach().clone()
    by_layer(
        model,
        Mesh.of("fsdp-3"),
        shard_placement_fn=lambda p: Shard(1) if tuple(p.shape) == (6, 6) else None,
    )
    handle = attach(model, hooks.blockwise(), weights=codecs.blockwise())
    loss_of(model(batch(rank, 0))).backward()
    forward, backward = model[2].seen
    handle.remove()
    assert forward.equal(backward), "backward sees other weights"
    distance = float((forward - whole).abs().max())
    assert 0 < distance <= 0.51 / 127 * float(whole.abs().max()), f"{distance}"


@on_ranks("fsdp-2")
def test_frozen_modules_are_gathered_through_the_codec(rank: int, place: str) -> None:
    """Modules of which nothing is trained are gathered as well."""
    model = _net()
    whole = model[2].weight.detach().clone()
    model[2].requires_grad_(False)
    by_layer(model, Mesh.of("fsdp-2"))
    handle = attach(model, hooks.allreduce(), weights=codecs.blockwise())
    loss_of(model(batch(rank, 0))).backward()
    handle.remove()
    forward, backward = model[2].seen
    assert forward.equal(backward), "backward sees other weights"
    assert not forward.equal(whole), "gathered as they are"


def _evaluations(rank: int, place: str, settings: dict[str, Any]) -> list[bool]:
    """Whether a model is exact after the hook is gone, and what inference mode gives."""
    model = _net()
    exact = model(batch(rank, 0)).detach()
    by_layer(model, Mesh.of(place), **settings)
    handle = attach(model, hooks.allreduce(), weights=codecs.blockwise(bits=4))
    with torch.no_grad():
        through_codec = model(batch(rank, 0))
    with torch.inference_mode():
        inference = model(batch(rank, 0))
    loss_of(model(batch(rank, 1))).backward()
    with torch.inference_mode():
        again = model(batch(rank, 0))
    handle.remove()
    with torch.no_grad():
        after = model(batch(rank, 0))
    return [
        torch.allclose(after, exact),
        not torch.allclose(through_codec, exact),
        torch.equal(inference, through_codec),
        torch.equal(again, through_codec),
    ]


@pytest.mark.parametrize("place", ["fsdp-2", "hsdp-4"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_evaluations(ranks: RankPool, place: str, reshard_after_forward: bool) -> None:
    settings = {"reshard_after_forward": reshard_after_forward}
    assert ranks.run(_evaluations, place, settings) == [[True] * 4] * ranks.world_size


def _removed_in_forward(rank: int, settings: dict[str, Any]) -> list[bool]:
    """The module that runs keeps its parameters; the next forward has exact ones."""
    model = _net()
    exact = model(batch(rank, 0)).detach()
    by_layer(model, Mesh.of("fsdp-2"), **settings)
    handle = attach(model, hooks.allreduce(), weights=codecs.blockwise(bits=4))
    hidden = model[2].register_forward_pre_hook(lambda *_: handle.remove())
    output = model(batch(rank, 0))
    hidden.remove()
    loss_of(output).backward()
    return [bool(output.isfinite().all()), torch.allclose(model(batch(rank, 0)), exact)]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_removed_in_forward(two_ranks: RankPool, reshard_after_forward: bool) -> None:
    settings = {"reshard_after_forward": reshard_after_forward}
    assert two_ranks.run(_removed_in_forward, settings) == [[True] * 2] * 2
