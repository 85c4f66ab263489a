"""The training of PyTorch's own tests of ``fully_shard``, with the models in its wheel.

The tests themselves are not in the wheel. Each scenario covers a test that ``sharded_scenarios.py``
does not cover.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sharded_models import Mesh, Scenario, Step, Training, at_once, by_layer, local_part
from sharded_scenarios import SHARDED, shard_each
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.testing._internal.common_fsdp import MLP, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

#: A scenario that is compared with ``fully_shard`` alone.
PytorchScenario = partial(Scenario, meshes=SHARDED, averages=False, backwards=None, count=4)


def sum_of(at: Training, inputs: Tensor) -> Tensor:
    """Forward and backward of the sum of a model's outputs, which is the loss."""
    loss = at.model(inputs).sum()
    loss.backward()
    return loss


def sum_of_tokens(at: Training) -> Tensor:
    """A step of a model with tokens as inputs."""
    return sum_of(at, at.tokens())


def sum_of_inputs(columns: int) -> Step:
    """A step of a model with numbers as inputs."""
    return lambda at: sum_of(at, at.batch(0, 4, columns))


def transformer(layers: int = 3, **args: Any) -> Transformer:
    """Its embedding and its output share a weight."""
    return Transformer(ModelArgs(**{"n_layers": layers, "dropout_p": 0.0, **args}))


#: Shards each block of a transformer, and the model.
by_block = partial(shard_each, of="layers")
mlps = partial(MLPStack, 5)


def recomputed(model: Any, mesh: Mesh) -> None:
    """Shards each part, whose activations are computed again in backward, and the model."""
    for part in model:
        checkpoint(part)
    by_layer(model, mesh)


def _recomputed_blocks(model: Any, mesh: Mesh) -> None:
    for block in model.layers:
        checkpoint(block)
    by_block(model, mesh)


def _prefetch(model: Any) -> None:
    blocks = list(model.layers)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])
    model._set_unshard_async_op(True)


def _nested(model: Any, mesh: Mesh) -> None:
    for block in model.layers:
        checkpoint(block)
        for part in (block.attention, block.feed_forward, block):
            mesh.apply(part)
    mesh.apply(model)


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


def _both_tied(model: Any, mesh: Mesh) -> None:
    mesh.apply([model.embedding, model.output])
    mesh.apply(model)


def _cross_entropy(at: Training) -> Tensor:
    tokens = at.tokens()
    loss = functional.cross_entropy(at.model(tokens).view(-1, 17).float(), tokens.view(-1))
    loss.backward()
    return loss


def _one_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3, bias=False))


def _root_then_a_part(at: Training) -> list[Tensor]:
    """The part's forward and backward are separate from the root's."""
    losses = []
    for module in (at.model, at.model[0], at.model[1]):
        losses.append(module(at.batch(0, 4)).sum())
        losses[-1].backward()
    return losses


class Repeated(nn.Module):
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
        pending.append(model(at.batch(number, 4)).sum())
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


def _own_methods(model: Any, mesh: Mesh) -> None:
    mesh.apply(model.encoder.mlp)
    mesh.apply(model.encoder)
    register_fsdp_forward_method(model.encoder, "features")
    mesh.apply(model)


def _image_step(at: Training) -> Tensor:
    return sum_of(at, at.batch(0, 4, 16).view(4, 1, 4, 4))


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


def _norm_with_head(model: Any, mesh: Mesh, **settings: Any) -> None:
    mesh.apply(model.embedding, **settings)
    mesh.apply(model.body, **settings)
    mesh.apply([model.norm, model.head], **settings)
    mesh.apply(model, **settings)


def _backward_in_chunks(at: Training, number: int = 0, keeps_head_whole: bool = False) -> Any:
    """A head that stays whole over its chunks is sharded again by a call."""
    head = at.model.head
    hidden = at.model(at.tokens(number), skip_head=True)
    if keeps_head_whole:
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
    found, gradients = [], []
    for chunk in hidden.detach().chunk(4, dim=1):
        chunk = chunk.contiguous().requires_grad_(True)
        loss = head(chunk).square().sum()
        loss.backward()
        gradients.append(chunk.grad)
        found.append(loss)
        if not keeps_head_whole:
            found.append(local_part(head.weight.grad))
    if keeps_head_whole:
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
        found += _backward_in_chunks(at, number)
    return found


#: By the files of PyTorch's tests.
TRAINING: dict[str, Scenario] = {
    # test_fully_shard_training.py
    "training: one uneven group": PytorchScenario(_one_mlp, at_once, step=sum_of_inputs(7)),
    "training: a transformer": PytorchScenario(transformer, by_block, step=sum_of_tokens),
    "training: a transformer, kept whole": PytorchScenario(
        transformer, partial(by_block, reshard_after_forward=False), step=sum_of_tokens
    ),
    "training: a transformer, among two": PytorchScenario(
        transformer,
        partial(by_block, reshard_after_forward=2),
        step=sum_of_tokens,
        meshes=("fsdp-4",),
    ),
    # Threads share the generator that dropout draws from.
    "training: a transformer with dropout": PytorchScenario(
        partial(transformer, dropout_p=0.1), by_block, step=sum_of_tokens, meshes=("gloo-fsdp-3",)
    ),
    "training: untied": PytorchScenario(
        partial(transformer, weight_tying=False), by_block, step=sum_of_tokens, meshes=("fsdp-3",)
    ),
    "training: the largest dimension": PytorchScenario(
        transformer,
        partial(by_block, shard_placement_fn=_largest_dimension),
        step=sum_of_tokens,
        meshes=("fsdp-2", "fsdp-4", "hsdp-4"),
    ),
    "training: tied, uneven": PytorchScenario(_TiedUnevenly, _both_tied, step=_cross_entropy),
    "training: recomputed": PytorchScenario(transformer, _recomputed_blocks, step=sum_of_tokens),
    "training: recomputed by the model": PytorchScenario(
        partial(transformer, checkpoint_activations=True), by_block, step=sum_of_tokens
    ),
    "training: nested, two forwards": PytorchScenario(
        partial(transformer, 2), _nested, step=_difference_of_two_forwards
    ),
    "training: the root, then parts": PytorchScenario(mlps, step=_root_then_a_part),
    "training: layers that run again": PytorchScenario(
        partial(Repeated, False), step=sum_of_inputs(5)
    ),
    "training: forwards before backwards": PytorchScenario(mlps, step=_forwards_before_backwards),
    "training: methods that are forwards": PytorchScenario(
        _Encoder, _own_methods, step=_image_step
    ),
    "training: a loss in chunks": PytorchScenario(_ChunkedHead, step=_backward_in_chunks),
    "training: a loss in chunks of a group": PytorchScenario(
        _ChunkedHead, _norm_with_head, step=_backward_in_chunks, needs="reset_iter_state"
    ),
    "training: a loss in chunks of a whole head": PytorchScenario(
        _ChunkedHead,
        partial(_norm_with_head, reshard_after_forward=False),
        step=partial(_backward_in_chunks, keeps_head_whole=True),
        needs="reset_iter_state",
    ),
    "training: losses in chunks add up": PytorchScenario(_ChunkedHead, step=_chunks_that_add_up),
    # test_fully_shard_comm.py
    "comm: prefetching far ahead": PytorchScenario(
        transformer, by_block, _prefetch, step=sum_of_tokens
    ),
}
