"""Parameters gathered through a codec: the same on all ranks, from shards that stay exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from on_ranks import of_all_ranks
from sharded_models import (
    Layers,
    Mesh,
    batch,
    by_layer,
    gradients_of_step,
    local,
    loss_of,
    on_processes,
    on_ranks,
    reshard,
    run_on,
    same_bits,
)
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


def _check_restored(module: _Watching, exact: Tensor, part: float) -> Tensor:
    """Forward and backward use the same weights, near the exact ones and not equal to them."""
    forward, backward = module.seen
    assert forward.equal(backward), "backward sees other weights"
    distance = float((forward - exact).abs().max())
    assert 0 < distance <= part * float(exact.abs().max()), f"{distance}"
    return forward


def _gather(rank: int, place: str, codec: str, reshard_after_forward: bool | int | None) -> None:
    model = _net()
    whole = model[2].weight.detach().clone()
    by_layer(model, Mesh.of(place), reshard_after_forward=reshard_after_forward)
    exact = [local(parameter) for parameter in model.parameters()]
    weights, part = CODECS[codec]
    handle = attach(model, hooks.allreduce(), weights=weights())
    loss_of(model(batch(rank, 0))).backward()
    reshard(model)
    assert same_bits([local(parameter) for parameter in model.parameters()], exact)
    restored = _check_restored(model[2], whole, part)
    assert all(each.equal(restored) for each in of_all_ranks(restored)), "ranks have others"
    handle.remove()
    loss_of(model(batch(rank, 0)))
    assert model[2].seen[-1].equal(whole), "removed, the weights are not exact"


@pytest.mark.parametrize(
    ("place", "codec", "reshard_after_forward"),
    [
        *((place, codec, None) for place in PLACES for codec in CODECS),
        ("fsdp-3", "int8", False),
        ("fsdp-3", "int8", True),
        ("fsdp-4", "int8", 2),
    ],
)
def test_weights_through_a_codec(
    request: pytest.FixtureRequest,
    place: str,
    codec: str,
    reshard_after_forward: bool | int | None,
) -> None:
    run_on(request, place, _gather, codec, reshard_after_forward)


@pytest.mark.parametrize(
    "policy",
    [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}],
    ids=["float32", "bfloat16"],
)
@on_ranks(*PLACES, "gloo-hsdp-4")
def test_gradients_are_those_at_the_restored_weights(
    rank: int, place: str, policy: dict[str, Any]
) -> None:
    """Those at the weights that were gathered, to the bits."""
    model = _net()
    by_layer(model, Mesh.of(place), mp_policy=MixedPrecisionPolicy(**policy))
    handle = attach(model, hooks.allreduce(), weights=codecs.blockwise())
    got = gradients_of_step(model, rank)
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
    assert same_bits(got, gradients_of_step(plain, rank))


@on_ranks("fsdp-3")
def test_columns(rank: int, place: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), _Watching(6, 6, bias=False), nn.Linear(6, 1))
    whole = model[2].weight.detach().clone()
    by_layer(
        model,
        Mesh.of(place),
        shard_placement_fn=lambda p: Shard(1) if tuple(p.shape) == (6, 6) else None,
    )
    handle = attach(model, hooks.blockwise(), weights=codecs.blockwise())
    loss_of(model(batch(rank, 0))).backward()
    handle.remove()
    _check_restored(model[2], whole, CODECS["int8"][1])


@on_ranks("fsdp-2")
def test_frozen_modules_are_gathered_through_the_codec(rank: int, place: str) -> None:
    """Modules of which nothing is trained are gathered as well."""
    model = _net()
    whole = model[2].weight.detach().clone()
    model[2].requires_grad_(False)
    by_layer(model, Mesh.of(place))
    handle = attach(model, hooks.allreduce(), weights=codecs.blockwise())
    loss_of(model(batch(rank, 0))).backward()
    handle.remove()
    _check_restored(model[2], whole, CODECS["int8"][1])


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_processes("fsdp-2", "hsdp-4")
def test_evaluations(rank: int, place: str, reshard_after_forward: bool) -> None:
    """They are through the codec, also in inference mode, and exact after the hook is gone."""
    model = _net()
    exact = model(batch(rank, 0)).detach()
    by_layer(model, Mesh.of(place), reshard_after_forward=reshard_after_forward)
    handle = attach(model, hooks.allreduce(), weights=codecs.blockwise(bits=4))
    with torch.no_grad():
        through_codec = model(batch(rank, 0))
    assert not torch.allclose(through_codec, exact)
    with torch.inference_mode():
        assert torch.equal(model(batch(rank, 0)), through_codec)
    loss_of(model(batch(rank, 1))).backward()
    with torch.inference_mode():
        assert torch.equal(model(batch(rank, 0)), through_codec)
    handle.remove()
    with torch.no_grad():
        assert torch.allclose(model(batch(rank, 0)), exact)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_processes("fsdp-2")
def test_removed_in_forward(rank: int, place: str, reshard_after_forward: bool) -> None:
    """The module that runs keeps its parameters; the next forward has exact ones."""
    model = _net()
    exact = model(batch(rank, 0)).detach()
    by_layer(model, Mesh.of(place), reshard_after_forward=reshard_after_forward)
    handle = attach(model, hooks.allreduce(), weights=codecs.blockwise(bits=4))
    hidden = model[2].register_forward_pre_hook(lambda *_: handle.remove())
    output = model(batch(rank, 0))
    hidden.remove()
    loss_of(output).backward()
    assert output.isfinite().all()
    assert torch.allclose(model(batch(rank, 0)), exact)
