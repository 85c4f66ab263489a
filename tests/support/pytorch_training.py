"""The training of PyTorch's own tests of ``fully_shard``, with the models in its wheel.

The tests themselves are not in the wheel. Each scenario covers a test that ``sharded_scenarios.py``
does not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sharded_models import Mesh, local, reshard
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import (
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.testing._internal.common_fsdp import MLP, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import (
    ModelArgs,
    Transformer,
)

SHARDED = ("fsdp-3", "hsdp-4")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

Optimizer = torch.optim.Optimizer


@dataclass
class Training:
    """The arguments of a step.

    Attributes:
        model: the sharded model.
        optimizer: for its parameters.
        rank: selects the data.
        number: the step's, from 0.
        memory: values that a scenario keeps from one step to the next.
    """

    model: Any
    optimizer: Optimizer
    rank: int
    number: int
    memory: dict[str, Any]

    def tokens(self, number: int = 0) -> Tensor:
        """Indices into a vocabulary of 8: two sequences of 16."""
        return torch.randint(0, 8, (2, 16), generator=self._generator(number))

    def inputs(self, columns: int, number: int = 0) -> Tensor:
        """Four rows of inputs."""
        return torch.randn(4, columns, generator=self._generator(number))

    def _generator(self, number: int) -> torch.Generator:
        seed = 10_000 * self.number + 100 * number + self.rank
        return torch.Generator().manual_seed(seed)


Step = Callable[[Training], Any]


@dataclass(frozen=True)
class PytorchScenario:
    """A model and its steps.

    Attributes:
        build: makes the model, sharded over a mesh.
        step: runs forward and backward; its result is compared, too. The default is the sum of a
            forward of tokens.
        places: the meshes.
        steps: the number of steps.
        steps_itself: whether ``step`` calls the optimizer.
        in_all: whether all versions of ``fully_shard`` support it; else those from torch 2.13 on.
    """

    build: Callable[[Mesh], nn.Module]
    step: Step
    places: tuple[str, ...] = SHARDED
    steps: int = 4
    steps_itself: bool = False
    in_all: bool = True


def train(
    scenario: PytorchScenario, place: str, rank: int, attach_to: Callable[[nn.Module], Any] | None
) -> tuple[list[Any], int]:
    """All results of a training, in order, and the number of steps that the hook has counted.

    Args:
        scenario: the scenario.
        place: the mesh.
        rank: selects the data.
        attach_to: attaches a hook, and returns its handle; or None.
    """
    torch.manual_seed(0)
    model = scenario.build(Mesh.of(place))
    handle = None if attach_to is None else attach_to(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found: list[Any] = []
    memory: dict[str, Any] = {}
    for number in range(scenario.steps):
        torch.manual_seed(100 * number + rank)  # for dropout
        found.append(scenario.step(Training(model, optimizer, rank, number, memory)))
        reshard(model)
        found += [local_part(each.grad) for each in model.parameters()]
        if not scenario.steps_itself:
            optimizer.step()
        # Zeroed gradients are added to.
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    found += [local_part(each) for each in model.parameters()]
    steps = 0
    if handle is not None:
        steps = handle.stats().steps
        handle.remove()
    return found, steps


def local_part(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a tensor, if it is sharded."""
    return None if tensor is None else local(tensor)


def unlike(one: Any, other: Any, place: str = "") -> list[str]:
    """The differences in bits between two trainings."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = local(one), local(other)
        if one.dtype == other.dtype and torch.equal(one, other):
            return []
        return [f"{place}: {one.dtype} {one.flatten()[:4]} and {other.dtype} {other.flatten()[:4]}"]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{place}: {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [text for i, pair in pairs for text in unlike(*pair, f"{place}[{i}]")]
    return [] if one == other else [f"{place}: {one} and {other}"]


# ---- training ------------------------------------------------------------------------------------


def transformer(mesh: Mesh, *, args: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    """Shards each block and the model; embedding and output share a weight."""
    model = Transformer(ModelArgs(**{"n_layers": 3, "dropout_p": 0.0, **(args or {})}))
    for block in model.layers:
        mesh.apply(block, **settings)
    mesh.apply(model, **settings)
    return model


def sum_of_tokens(at: Training) -> Tensor:
    """A step of a model with tokens as inputs."""
    loss = at.model(at.tokens()).sum()
    loss.backward()
    return loss


def sum_of_inputs(columns: int) -> Step:
    """A step of a model with numbers as inputs."""

    def step(at: Training) -> Tensor:
        loss = at.model(at.inputs(columns)).sum()
        loss.backward()
        return loss

    return step


def _checkpointed_transformer(mesh: Mesh, **settings: Any) -> nn.Module:
    model = Transformer(ModelArgs(n_layers=3, dropout_p=0.0))
    for block in model.layers:
        checkpoint(block)
        mesh.apply(block, **settings)
    mesh.apply(model, **settings)
    return model


def _prefetched_transformer(mesh: Mesh) -> nn.Module:
    model: Any = transformer(mesh)
    blocks = list(model.layers)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])
    model._set_unshard_async_op(True)
    return model


def _nested_transformer(mesh: Mesh) -> nn.Module:
    model = Transformer(ModelArgs(n_layers=2, dropout_p=0.0))
    for block in model.layers:
        checkpoint(block)
        for part in (block.attention, block.feed_forward, block):
            mesh.apply(part)
    mesh.apply(model)
    return model


def _difference_of_two_forwards(at: Training) -> Tensor:
    """Both forwards precede the backward, as in preference training."""
    first, second = at.model(at.tokens(0)), at.model(at.tokens(1))
    loss = (first.sum() - second.sum()).square() / 1000
    loss.backward()
    return loss


def _largest_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.shape.index(max(parameter.shape)))


class _TiedUnevenly(nn.Module):
    """Has a number of rows that the ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.output = nn.Linear(16, 17, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


def _tied_unevenly(mesh: Mesh) -> nn.Module:
    model = _TiedUnevenly()
    mesh.apply([model.embedding, model.output])
    mesh.apply(model)
    return model


def _cross_entropy(at: Training) -> Tensor:
    tokens = at.tokens()
    loss = functional.cross_entropy(at.model(tokens).view(-1, 17).float(), tokens.view(-1))
    loss.backward()
    return loss


def mlps(mesh: Mesh, *, dim: int = 5, recompute: bool = False, **settings: Any) -> nn.Module:
    """Three sharded MLPs of uneven sizes."""
    model = MLPStack(dim)
    for part in model:
        if recompute:
            checkpoint(part)
        mesh.apply(part, **settings)
    mesh.apply(model, **settings)
    return model


def _one_mlp(mesh: Mesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3, bias=False))
    mesh.apply(model)
    return model


def _root_then_a_part(at: Training) -> list[Tensor]:
    """The part's forward and backward are separate from the root's."""
    losses = []
    for module in (at.model, at.model[0], at.model[1]):
        losses.append(module(at.inputs(5)).sum())
        losses[-1].backward()
    return losses


class _Repeated(nn.Module):
    """Runs layers three times, once without gradients, and has a frozen layer."""

    def __init__(self, has_frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(not has_frozen)
        self.repeated = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(3):
            hidden = self.frozen(functional.relu(self.repeated(hidden)))
            with torch.no_grad():
                hidden += functional.relu(self.repeated(hidden))
        return hidden


def repeated(has_frozen: bool, mesh: Mesh, **settings: Any) -> nn.Module:
    """Sharded layers that run repeatedly in one forward."""
    model = _Repeated(has_frozen)
    for layer in model.children():
        mesh.apply(layer, **settings)
    mesh.apply(model, **settings)
    return model


def _forwards_before_backwards(at: Training) -> list[Tensor]:
    """Micro-batches as in a pipeline: two forwards precede the first backward."""
    model, count = at.model, 4
    losses: list[Tensor] = []
    pending: list[Tensor] = []

    def backward(number: int) -> None:
        is_last = number == count - 1
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        pending.pop(0).backward()

    for number in range(count):
        pending.append(model(at.inputs(5, number)).sum())
        losses.append(pending[-1])
        if number >= 2:
            backward(number - 2)
    backward(count - 2)
    backward(count - 1)
    return losses


class _OwnMethods(nn.Module):
    """Callers use a method other than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 6, kernel_size=2, stride=2)
        self.mlp = MLP(6)

    def features(self, inputs: Tensor) -> Tensor:
        return self.mlp(self.patches(inputs).flatten(2).transpose(1, 2))


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _OwnMethods()
        self.output = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.encoder.features(inputs))


def _own_methods(mesh: Mesh) -> nn.Module:
    model = _Encoder()
    mesh.apply(model.encoder.mlp)
    mesh.apply(model.encoder)
    register_fsdp_forward_method(model.encoder, "features")
    mesh.apply(model)
    return model


def _image_step(at: Training) -> Tensor:
    loss = at.model(at.inputs(16).view(4, 1, 4, 4)).sum()
    loss.backward()
    return loss


class _ChunkedHead(nn.Module):
    """The loss can compute its head, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.body = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)

    def forward(self, tokens: Tensor, skip_head: bool = False) -> Tensor:
        hidden = self.norm(self.body(self.embedding(tokens)))
        return hidden if skip_head else self.head(hidden)


def _chunked(grouped: bool, mesh: Mesh, **settings: Any) -> nn.Module:
    model = _ChunkedHead()
    mesh.apply(model.embedding, **settings)
    mesh.apply(model.body, **settings)
    if grouped:
        mesh.apply([model.norm, model.head], **settings)
    else:
        mesh.apply(model.norm, **settings)
        mesh.apply(model.head, **settings)
    mesh.apply(model, **settings)
    return model


def _backward_in_chunks(model: Any, tokens: Tensor) -> list[Tensor]:
    hidden = model(tokens, skip_head=True)
    found, gradients = [], []
    for chunk in hidden.detach().chunk(4, dim=1):
        chunk = chunk.contiguous().requires_grad_(True)
        loss = model.head(chunk).square().sum()
        loss.backward()
        gradients.append(chunk.grad)
        found += [loss, local_part(model.head.weight.grad)]
    hidden.backward(torch.cat(gradients, dim=1))
    return found


def _loss_in_chunks(at: Training) -> list[Tensor]:
    return _backward_in_chunks(at.model, at.tokens())


def _loss_in_chunks_of_a_whole_head(at: Training) -> list[Tensor]:
    """The head stays whole over its chunks, and a call shards it again."""
    head = at.model.head
    hidden = at.model(at.tokens(), skip_head=True)
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    found, gradients = [], []
    for chunk in hidden.detach().chunk(4, dim=1):
        chunk = chunk.contiguous().requires_grad_(True)
        loss = head(chunk).square().sum()
        loss.backward()
        gradients.append(chunk.grad)
        found.append(loss)
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()
    hidden.backward(torch.cat(gradients, dim=1))
    return found


def _chunks_that_add_up(at: Training) -> list[Tensor]:
    found = []
    for number in range(3):
        at.model.set_requires_gradient_sync(number == 2)
        at.model.set_is_last_backward(number == 2)
        found += _backward_in_chunks(at.model, at.tokens(number))
    return found


#: By the files of PyTorch's tests.
TRAINING: dict[str, PytorchScenario] = {
    # test_fully_shard_training.py
    "training: one uneven group": PytorchScenario(_one_mlp, sum_of_inputs(7)),
    "training: a transformer": PytorchScenario(transformer, sum_of_tokens),
    "training: a transformer, kept whole": PytorchScenario(
        partial(transformer, reshard_after_forward=False), sum_of_tokens, places=SHARDED
    ),
    "training: a transformer, among two": PytorchScenario(
        partial(transformer, reshard_after_forward=2), sum_of_tokens, places=("fsdp-4",)
    ),
    "training: a transformer with dropout": PytorchScenario(
        partial(transformer, args={"dropout_p": 0.1}), sum_of_tokens, places=("fsdp-3",)
    ),
    "training: untied": PytorchScenario(
        partial(transformer, args={"weight_tying": False}), sum_of_tokens, places=("fsdp-3",)
    ),
    "training: the largest dimension": PytorchScenario(
        partial(transformer, shard_placement_fn=_largest_dimension),
        sum_of_tokens,
        places=("fsdp-2", "fsdp-4", "hsdp-4"),
    ),
    "training: tied, uneven": PytorchScenario(_tied_unevenly, _cross_entropy),
    "training: recomputed": PytorchScenario(_checkpointed_transformer, sum_of_tokens),
    "training: recomputed by the model": PytorchScenario(
        partial(transformer, args={"checkpoint_activations": True}), sum_of_tokens
    ),
    "training: nested, two forwards": PytorchScenario(
        _nested_transformer, _difference_of_two_forwards
    ),
    "training: the root, then parts": PytorchScenario(mlps, _root_then_a_part),
    "training: layers that run again": PytorchScenario(partial(repeated, False), sum_of_inputs(5)),
    "training: forwards before backwards": PytorchScenario(mlps, _forwards_before_backwards),
    "training: methods that are forwards": PytorchScenario(_own_methods, _image_step),
    "training: a loss in chunks": PytorchScenario(partial(_chunked, False), _loss_in_chunks),
    "training: a loss in chunks of a group": PytorchScenario(
        partial(_chunked, True), _loss_in_chunks, in_all=False
    ),
    "training: a loss in chunks of a whole head": PytorchScenario(
        partial(_chunked, True, reshard_after_forward=False),
        _loss_in_chunks_of_a_whole_head,
        in_all=False,
    ),
    "training: losses in chunks add up": PytorchScenario(
        partial(_chunked, False), _chunks_that_add_up
    ),
    # test_fully_shard_comm.py
    "comm: prefetching far ahead": PytorchScenario(
        _prefetched_transformer, sum_of_tokens, places=SHARDED
    ),
}
