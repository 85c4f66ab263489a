"""Hooks on parts of a sharded model, on models around it, and on models that are compiled."""

from __future__ import annotations

import re

import pytest
import torch
from sharded_models import (
    Failing,
    Layers,
    Mesh,
    batch,
    check_outcome,
    device_mesh,
    gradients_of_step,
    layers,
    local,
    loss_of,
    on_processes,
    on_ranks,
    reshard,
    same_bits,
    sharded,
)
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.fsdp import fully_shard

from torch_commhook import attach, hooks, parse_hook

PLACES = ["fsdp-2", "hsdp-4", "replicate-2"]


def _halves(place: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layers(5, 7, 6), Layers(6, 5, 1))
    mesh = Mesh.of(place)
    for layer in (*model[0], *model[1], model):
        if any(True for _ in layer.parameters()):
            mesh.apply(layer)
    return model


@on_ranks(*PLACES)
def test_a_hook_on_each_half(rank: int, place: str) -> None:
    expected = [gradients_of_step(_halves(place), rank, number) for number in range(2)]
    model = _halves(place)
    handles = [
        attach(half, hook)
        for half, hook in zip(model, (hooks.allreduce(), hooks.cast()), strict=True)
    ]
    for number in range(2):
        got = gradients_of_step(model, rank, number)
        assert same_bits(got[:4], expected[number][:4]), number
        assert not same_bits(got[4:], expected[number][4:]), number  # rounded by its hook
    assert [handle.stats().steps for handle in handles] == [2, 2]
    handles[1].replace(hooks.allreduce())
    assert same_bits(gradients_of_step(model, rank, 0), expected[0])
    for handle in handles:
        handle.remove()
    assert same_bits(gradients_of_step(model, rank, 1), expected[1])


@pytest.mark.parametrize("which", [0, 1])
@on_processes(*PLACES)
def test_a_hook_on_a_half_that_fails(rank: int, place: str, which: int) -> None:
    """The model's root is around the part, which hears of its forward from the second one on."""
    expected = [gradients_of_step(_halves(place), rank, number) for number in range(2)]
    model = _halves(place)
    failing = [Failing(), Failing()]
    handles = [attach(half, hook) for half, hook in zip(model, failing, strict=True)]
    assert same_bits(gradients_of_step(model, rank, 0), expected[0]), "first"
    for fails in range(int(place[-1])):
        failing[which].fails_in = 0 if rank == fails else None
        check_outcome(model, rank, 3, fails)
        failing[which].fails_in = None
        for number in range(2):
            assert same_bits(gradients_of_step(model, rank, number), expected[number]), fails
    for handle in handles:
        handle.remove()


@on_ranks(*PLACES)
def test_a_model_around_a_sharded_one(rank: int, place: str) -> None:
    """The model itself is not sharded, its parts are."""
    inner = _halves(place)
    expected = gradients_of_step(_halves(place), rank)
    model = nn.Sequential(inner, nn.Identity())
    handle = attach(model, hooks.allreduce())
    assert same_bits(gradients_of_step(model, rank), expected)
    assert handle.stats().steps == 1
    handle.remove()


@on_ranks(*PLACES)
def test_a_part_that_is_called_alone(rank: int, place: str) -> None:
    """A part is called without the rest of the model."""
    model, plain = sharded(place), sharded(place)
    handle = attach(model, hooks.allreduce())
    model(batch(rank, 0))
    model[0](batch(rank, 1)).square().sum().backward()
    model.zero_grad()
    assert same_bits(gradients_of_step(model, rank), gradients_of_step(plain, rank))
    handle.remove()


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = [expert(x) for expert in self.each]
        return weights[..., :1] * found[0] + weights[..., 1:] * found[1]


class _Moe(nn.Module):
    """A layer with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.router, self.experts = nn.Linear(5, 6), nn.Linear(6, 2), _Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return self.experts(x, self.router(x).softmax(-1))


def _moe(rank: int, kind: str) -> _Moe:
    """With the experts on another mesh than the rest, which all ranks shard."""
    torch.manual_seed(0)
    model = _Moe()
    mesh = device_mesh((4,), ("ranks",))
    axes = device_mesh((2, 2), ("a", "b"))
    if kind == "each pair has its own":  # expert parallelism
        torch.manual_seed(1 + rank % 2)
        for parameter in model.experts.parameters():
            nn.init.normal_(parameter)
    for part in (model.attention, model.router):
        fully_shard(part, mesh=mesh)
    fully_shard(model.experts, mesh=axes if kind == "hsdp" else axes["a"])
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.filterwarnings("ignore:.*keeps errors of whole gradients")
@pytest.mark.parametrize("kind", ["hsdp", "each pair has its own"])
@on_ranks("fsdp-4")
def test_experts_on_another_mesh(rank: int, place: str, kind: str) -> None:
    """As the error for a hook on the whole model says."""
    expected = [gradients_of_step(_moe(rank, kind), rank, number) for number in range(2)]
    model = _moe(rank, kind)
    with pytest.raises(ValueError, match="over different meshes, as parameters 'att") as raised:
        attach(model, hooks.allreduce())
    assert "for module in (attention, router, experts): attach(module, hook)" in str(raised.value)
    parts = (model.attention, model.router, model.experts)
    for text, bound in (("allreduce()", 0.0), ("error_feedback(blockwise(bits=8))", 1 / 64)):
        handles = [attach(module, parse_hook(text)) for module in parts]
        for number in range(2):
            got = gradients_of_step(model, rank, number)
            most = max(float(each.abs().sum()) for each in expected[number])
            torch.testing.assert_close(got, expected[number], rtol=0, atol=bound * most)
        for handle in handles:
            handle.load_state_dict(handle.state_dict())
            handle.remove()
    assert same_bits(gradients_of_step(model, rank, 1), expected[1])


@pytest.mark.parametrize("attach_compiled", [False, True], ids=["model", "compiled model"])
@on_processes("fsdp-2", "replicate-2")
def test_a_compiled_model(rank: int, place: str, attach_compiled: bool) -> None:
    """Forwards are cut at PyTorch's own hooks, in front of which the library's stands."""
    torch._dynamo.reset()
    plain, model = sharded(place), sharded(place)
    expected = [gradients_of_step(plain, rank, number) for number in range(3)]
    compiled = torch.compile(model, backend="aot_eager")
    handle = attach(compiled if attach_compiled else model, hooks.allreduce())
    for number in range(3):
        model.zero_grad()
        loss_of(compiled(batch(rank, number))).backward()
        reshard(model)
        got = [local(p.grad) for p in model.parameters()]
        torch.testing.assert_close(got, expected[number], rtol=1e-5, atol=1e-6)
    assert handle.stats().steps == 3
    handle.remove()


@on_processes(*PLACES)
def test_compiled_autograd_is_refused(rank: int, place: str) -> None:
    """There ``fully_shard`` gives other gradients, with a hook or without."""
    torch._dynamo.reset()
    plain, model = sharded(place), sharded(place)
    expected = gradients_of_step(plain, rank)
    handle = attach(model, hooks.blockwise())
    loss = loss_of(model(batch(rank, 1)))
    message = "torch_commhook: compiled autograd runs this backward, in "
    if torch.__version__ < "2.12":  # refuses it by itself
        message = "queue_callback() is only supported when Compiled Autograd"
    with compiled_autograd._enable(torch.compile(backend="eager")):
        for backward in (loss.backward, lambda: loss_of(model(batch(rank, 2))).backward()):
            with pytest.raises((RuntimeError, AssertionError), match=f"^{re.escape(message)}"):
                backward()
    handle.replace(hooks.allreduce())
    assert same_bits(gradients_of_step(model, rank), expected)
    handle.remove()


@on_ranks(*PLACES)
def test_attached_after_an_evaluation(rank: int, place: str) -> None:
    """After a forward without gradients the root's parameters are whole."""
    plain, model = layers(), layers()
    for each in (plain, model):
        Mesh.of(place).apply(each)
    with torch.no_grad():
        model(batch(rank, 0))
    handle = attach(model, hooks.allreduce())
    assert same_bits(gradients_of_step(model, rank), gradients_of_step(plain, rank))
    handle.remove()
