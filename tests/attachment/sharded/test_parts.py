"""Hooks on parts of a sharded model, on models around it, on compiled ones, and across replicas."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpp_libraries import library
from on_ranks import of_all_ranks
from sharded_models import (
    Failing,
    Layers,
    Mesh,
    batch,
    check_outcome,
    device_mesh,
    far,
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
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed.fsdp import fully_shard

from torch_commhook import attach, codecs, hooks, load_cpp_hooks, parse_hook

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


# ---- across replicas alone -----------------------------------------------------------------------

REPLICA_PLACES = ["hsdp-4", "replicate-2"]
STEPS = 5


def _gradients(place: str, rank: int, hook: Any) -> list[list[Tensor]]:
    """Of steps that leave the parameters where they are."""
    model = sharded(place)
    handle = None if hook is None else attach(model, hook)
    found = [gradients_of_step(model, rank, number) for number in range(STEPS)]
    if handle is not None:
        handle.remove()
    return found


def _check_near(got: list[Tensor], expected: list[Tensor], part: float) -> None:
    largest = torch.cat([each.abs().flatten() for each in expected]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # a block has what other ranks' shards do not
    bound = part * float(largest)
    assert far(got, [each.double() for each in expected], bound, "gradients") == []


@on_processes(*REPLICA_PLACES)
def test_policy(rank: int, place: str) -> None:
    """Rules see the shapes of parameters, and their names."""
    expected = _gradients(place, rank, None)
    rules = [("dim <= 1", hooks.allreduce()), ("2.*", hooks.cast())]
    got = _gradients(place, rank, hooks.policy(rules, hooks.blockwise()))
    names = [name for name, _ in layers().named_parameters()]
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for name, one, other in zip(names, ours, theirs, strict=True):
            where = f"step {number}, {name}"
            if name.endswith("bias"):
                assert one.equal(other), where
            elif name == "2.weight":  # each of two ranks rounds its own, and the sum is rounded
                tolerance = 2.0**-7 * float(other.abs().max() + 1) if other.numel() else 0.0
                assert far([one], [other.double()], tolerance, where) == []
                assert one.equal(one.bfloat16().float()), where
        _check_near(ours, theirs, 0.05)


@on_processes(*REPLICA_PLACES)
def test_adaptive(rank: int, place: str) -> None:
    """Ranks of a shard settle on the same bits, under the budget."""
    expected = _gradients(place, rank, None)
    model = sharded(place)
    handle = attach(model, hooks.adaptive(80, every=2))
    got = [gradients_of_step(model, rank, number) for number in range(STEPS)]
    total, exact = (
        [torch.stack(each).sum(0) for each in zip(*steps, strict=True)] for steps in (got, expected)
    )
    # What a step has lost comes with the next one, so that a sum has lost but once.
    _check_near(total, exact, 0.25)
    state = handle.state_dict()
    handle.remove()
    shards = 2 if place == "hsdp-4" else 1
    own = state[f"choices{rank % 2}" if shards == 2 else "choices"]
    assert own and all(each == own for each in of_all_ranks(own)[rank % shards :: shards])


@on_processes(*REPLICA_PLACES)
def test_after(rank: int, place: str) -> None:
    expected = _gradients(place, rank, None)
    got = _gradients(place, rank, hooks.after(2, hooks.blockwise()))
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if any(each.numel() > 1 for each in theirs):
            assert same_bits(ours, theirs) == (number < 2), number
        _check_near(ours, theirs, 0.02)


@on_ranks("replicate-4")
def test_hierarchical(rank: int, place: str) -> None:
    """Four replicas on two nodes."""
    nodes = [dist.new_group(list(pair)) for pair in ((0, 1), (2, 3))]
    across = [dist.new_group(list(pair)) for pair in ((0, 2), (1, 3))]
    expected = _gradients(place, rank, None)
    hook = hooks.hierarchical(
        codecs.blockwise(), intra_group=nodes[rank // 2], inter_group=across[rank % 2]
    )
    got = _gradients(place, rank, hook)
    assert not same_bits(got[0], expected[0]), "nothing is compressed"
    for ours, theirs in zip(got, expected, strict=True):
        _check_near(ours, theirs, 0.02)


@on_processes("hsdp-4")
def test_hierarchical_over_other_ranks(rank: int, place: str) -> None:
    """Groups of all ranks, where replicas of a shard are half of these."""
    alone = [dist.new_group([each]) for each in range(4)][rank]
    hook = hooks.hierarchical(codecs.blockwise(), intra_group=alone, inter_group=dist.group.WORLD)
    model = sharded(place)
    with pytest.raises((RuntimeError, ValueError), match="hierarchical"):
        attach(model, hook)


@pytest.fixture
def comm_hooks() -> str:
    return library("comm_hooks")


@pytest.mark.parametrize("name", ["allreduce", "cast"])
@on_processes(*REPLICA_PLACES)
def test_hooks_in_cpp(rank: int, place: str, comm_hooks: str, name: str) -> None:
    load_cpp_hooks(comm_hooks)
    beside = None if name == "allreduce" else hooks.cast()
    expected = _gradients(place, rank, beside)
    got = _gradients(place, rank, hooks.cpp(name))
    for number in range(STEPS):
        assert same_bits(got[number], expected[number]), number
