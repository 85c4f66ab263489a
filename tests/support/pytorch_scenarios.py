"""PyTorch's own tests of ``fully_shard``, with the models in its wheel; each file is an area.

The tests themselves are not in the wheel. Each scenario covers a test that ``sharded_scenarios.py``
does not cover.
"""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sharded_models import Mesh, Scenario, Step, Training, by_layer, local_part
from sharded_scenarios import BF16, F16, F32, SHARDED, in_groups, shard_each
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.nn import functional
from torch.testing._internal.common_fsdp import MLP, DoubleLinear, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

from torch_commhook import attach, hooks

# ---- training ------------------------------------------------------------------------------------

#: A scenario that is compared with ``fully_shard`` alone.
PytorchScenario = partial(Scenario, meshes=SHARDED, averages=False, backwards=None, count=4)


def sum_of(at: Training, inputs: Tensor) -> Tensor:
    """Forward and backward of the sum of a model's outputs, which is the loss."""
    loss = at.model(inputs).sum()
    loss.backward()
    return loss


def sum_of_tokens(at: Training) -> Tensor:
    return sum_of(at, at.tokens())


def sum_of_inputs(columns: int) -> Step:
    return lambda at: sum_of(at, at.batch(0, 4, columns))


def transformer(layers: int = 3, **args: Any) -> Transformer:
    """Its embedding and its output share a weight."""
    return Transformer(ModelArgs(**{"n_layers": layers, "dropout_p": 0.0, **args}))


#: Shards each block of a transformer, and the model.
by_block = partial(shard_each, of="layers")
mlps = partial(MLPStack, 5)


def _tied_unevenly() -> nn.Module:
    """Has a number of rows that the ranks do not divide."""
    model = nn.Sequential(nn.Embedding(17, 16), nn.Linear(16, 17, bias=False))
    model[1].weight = model[0].weight
    return model


def _cross_entropy(at: Training) -> Tensor:
    tokens = at.tokens()
    loss = functional.cross_entropy(at.model(tokens).view(-1, 17).float(), tokens.view(-1))
    loss.backward()
    return loss


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


def _root_then_a_part(at: Training) -> list[Tensor]:
    """The part's forward and backward are separate from the root's."""
    losses = []
    for module in (at.model, at.model[0], at.model[1]):
        losses.append(module(at.batch(0, 4)).sum())
        losses[-1].backward()
    return losses


class _Repeated(nn.Module):
    """Runs layers three times, once without gradients, and has a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
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


_norm_with_head = partial(in_groups, "embedding", "body", "norm head")


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


def _unsharded_by_hand(at: Training) -> Any:
    """``unshard``, waited for or not, and ``reshard`` before backward, which gathers again."""
    waited = [part.unshard(async_op=True) for part in at.model]  # before the first forward, too
    shapes = [[tuple(p.shape) for p in part.parameters()] for part in at.model]
    for each in waited[:2]:
        each.wait()
    loss = at.model(at.batch(0, 4)).sum()
    for part in at.model:
        part.reshard()
    loss.backward()
    return loss, shapes


# ---- autograd ------------------------------------------------------------------------------------


class _Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DoubleLinear(5), DoubleLinear(5)

    def forward(self, inputs: Tensor) -> Any:
        return self.second(self.first(inputs)[0])


def _one_output_by_turns(at: Training) -> Tensor:
    """The loss depends on one or both of two outputs."""
    outputs = at.model(at.batch(0, 4))
    if at.number % 2:
        loss = outputs[0].sum() * outputs[1].sum()
    else:
        loss = outputs[at.number // 2 % 2].sum()
    loss.backward()
    return loss


_Named = namedtuple("_Named", ["tensor", "text"])


@dataclass
class _Record:
    tensor: Tensor
    number: int


class _Nested(nn.Module):
    """Takes and returns tensors in containers, together with other values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mlp = MLP(5)

    def forward(self, inputs: Any) -> Any:
        output = self.mlp(_tensor_in(inputs))
        if self.kind == "list":
            return [output, 1, None]
        if self.kind == "dict":
            return {"tensors": [output, (output,)], "text": "some"}
        if self.kind == "named tuple":
            return _Named(output, "some")
        return _Record(output, 3)


def _tensor_in(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        return value["tensors"][1][0]
    return value.tensor if isinstance(value, (_Named, _Record)) else value[0]


def _nested_step(at: Training) -> Tensor:
    loss = _tensor_in(at.model(at.batch(0, 4))).sum()
    loss.backward()
    return loss


def _steps_in_hooks(at: Training) -> tuple[Tensor, list[int]]:
    """An optimizer for each parameter, which steps as soon as the gradient exists."""
    calls = at.memory.setdefault("calls", [0] * len(list(at.model.parameters())))
    if at.number == 0:
        for number, parameter in enumerate(at.model.parameters()):
            own = torch.optim.AdamW([parameter], lr=1e-2)

            def hook(ready: Tensor, number: int = number, own: Any = own) -> None:
                calls[number] += 1
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)
    return sum_of(at, at.batch(0, 4)), list(calls)


# ---- mixed precision -----------------------------------------------------------------------------


class _Casts(nn.Module):
    """Two layers, with a cast between them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).to(self.dtype)).float()


def _one_in_half(model: Any, mesh: Mesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=F16, cast_forward_inputs=False)
    mesh.apply(model.second, mp_policy=policy)
    mesh.apply(model)


class _Norms(nn.Module):
    """Norms with their own precision between layers with another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.BatchNorm1d(6)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            inputs = norm(layer(inputs))
        return inputs


def _norms(model: Any, mesh: Mesh) -> None:
    for norm in model.norms:
        mesh.apply(norm, mp_policy=MixedPrecisionPolicy(output_dtype=BF16))
    for layer in model.layers:
        mesh.apply(layer, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32))
    mesh.apply(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32))


# ---- gradient scaler, clipping -------------------------------------------------------------------


def _scaled(at: Training) -> list[Any]:
    """In the third step a value overflows on one rank; then no rank steps."""
    scaler = at.memory.setdefault(
        "scaler", torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    )
    loss = at.model(at.batch(0, 4)).sum()
    if at.number == 2 and at.rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(at.optimizer)
    gradients = [local_part(each.grad) for each in at.model.parameters()]
    # NaN does not equal itself.
    gradients = [each.nan_to_num() for each in gradients if each is not None]
    scaler.step(at.optimizer)
    scaler.update()
    at.optimizer.zero_grad()
    return [loss.nan_to_num(), scaler.get_scale(), gradients]


# ---- extensions ----------------------------------------------------------------------------------


def _before_gather(
    shard: Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
) -> tuple[tuple[Tensor, ...], Any]:
    return (shard.to(BF16),), None


def _after_gather(
    shard: Tensor,
    outputs: tuple[Tensor, ...],
    metadata: Any,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Any:
    (gathered,) = outputs
    if out is None:
        whole = gathered.to(F32)
        return whole, (gathered, whole)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(gathered)
    return None


def _gather_in_half(model: nn.Module) -> None:
    """The shards themselves control their all-gather, before the first forward."""
    for parameter in model.parameters():
        with torch.no_grad():
            shard: Any = parameter.to_local()
        shard.fsdp_pre_all_gather = partial(_before_gather, shard)
        shard.fsdp_post_all_gather = partial(_after_gather, shard)


# ---- frozen and ignored parameters ---------------------------------------------------------------


def _only_biases(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)


def _recomputed_biases(model: Any, mesh: Mesh) -> None:
    """Biases alone are trained, and backward computes each part's activations again."""
    _only_biases(model)
    for part in model:
        checkpoint(part)
    by_layer(model, mesh)


def _three_mlps() -> nn.Module:
    return nn.Sequential(*(MLP(6, with_buffer=True) for _ in range(3)))


def _every_other(model: Any, mesh: Mesh) -> None:
    """Each part is a root; only the middle one is trained."""
    for number, part in enumerate(model):
        mesh.apply(part)
        part.requires_grad_(number == 1)


def _evaluated_between(at: Training) -> Tensor:
    """An evaluation takes the place of the second step."""
    if at.number == 1:
        with torch.no_grad():
            return at.model(at.batch(0, 4, 6)).sum()
    return sum_of_inputs(6)(at)


def _unfrozen_later(at: Training) -> Tensor:
    """Where there is a hook, it is attached again then."""
    if at.number == 2:
        at.model[1].requires_grad_(True)
        if at.handle is not None:
            at.handle.remove()
            at.handle = attach(at.model, hooks.allreduce())
    return sum_of_inputs(5)(at)


def _ignoring_ddp(model: Any, mesh: Mesh) -> None:
    """A sharded part; another library averages its inner part."""
    model[2] = nn.parallel.DistributedDataParallel(model[2])
    mesh.apply(model, ignored_params=set(model[2].parameters()))


# ---- initialisation ------------------------------------------------------------------------------


def _load_another(model: nn.Module, mesh: Mesh) -> None:
    by_layer(model, mesh)
    other = mlps()
    by_layer(other, mesh)
    model.load_state_dict(other.state_dict(), assign=False)


def _saved_between(at: Training) -> Any:
    """The model and the optimizer continue from states that they have returned."""
    loss = sum_of_inputs(5)(at)
    state = {name: value.clone() for name, value in at.model.state_dict().items()}
    names = list(state)
    at.optimizer.step()
    if at.number == 1:  # back to the state before the step
        at.model.load_state_dict(state)
        at.optimizer.load_state_dict(copy.deepcopy(at.optimizer.state_dict()))
    return loss, names


#: By the files of PyTorch's tests.
SCENARIOS: dict[str, Scenario] = {
    # test_fully_shard_training.py
    "training: a transformer": PytorchScenario(transformer, by_block, step=sum_of_tokens),
    # Threads share the generator that dropout draws from.
    "training: a transformer with dropout": PytorchScenario(
        partial(transformer, dropout_p=0.1), by_block, step=sum_of_tokens, meshes=("gloo-fsdp-3",)
    ),
    "training: tied, uneven": PytorchScenario(
        _tied_unevenly, in_groups("0 1"), step=_cross_entropy
    ),
    "training: nested, two forwards": PytorchScenario(
        partial(transformer, 2), _nested, step=_difference_of_two_forwards
    ),
    "training: the root, then parts": PytorchScenario(mlps, step=_root_then_a_part),
    "training: forwards before backwards": PytorchScenario(mlps, step=_forwards_before_backwards),
    "training: methods that are forwards": PytorchScenario(
        _Encoder, _own_methods, step=lambda at: sum_of(at, at.batch(0, 4, 16).view(4, 1, 4, 4))
    ),
    "training: a loss in chunks of a group": PytorchScenario(
        _ChunkedHead, _norm_with_head(), step=_backward_in_chunks, needs="reset_iter_state"
    ),
    "training: a loss in chunks of a whole head": PytorchScenario(
        _ChunkedHead,
        _norm_with_head(reshard_after_forward=False),
        step=partial(_backward_in_chunks, keeps_head_whole=True),
        needs="reset_iter_state",
    ),
    "training: losses in chunks add up": PytorchScenario(_ChunkedHead, step=_chunks_that_add_up),
    # test_fully_shard_comm.py
    "comm: unsharded by hand": PytorchScenario(
        mlps,
        partial(by_layer, reshard_after_forward=False),
        step=_unsharded_by_hand,
        meshes=("fsdp-3",),
    ),
    # test_fully_shard_autograd.py
    "autograd: one output of two": PytorchScenario(_Pairs, step=_one_output_by_turns, count=6),
    **{
        f"autograd: a {kind}": PytorchScenario(
            lambda kind=kind: nn.Sequential(*(_Nested(kind) for _ in range(3))),
            step=_nested_step,
            meshes=("fsdp-3",),
            needs="reset_iter_state" if kind == "record" else "reshard",
        )
        for kind in ("list", "dict", "named tuple", "record")
    },
    "autograd: optimizers in hooks": PytorchScenario(mlps, step=_steps_in_hooks, steps_itself=True),
    # test_fully_shard_mixed_precision.py
    "mixed precision: inputs of a group": PytorchScenario(
        partial(_Casts, F32),
        in_groups(
            "first second",
            mp_policy=MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=True),
        ),
        step=sum_of_inputs(5),
        needs="reset_iter_state",
    ),
    "mixed precision: one module in float16": PytorchScenario(
        partial(_Casts, F16), _one_in_half, step=sum_of_inputs(5)
    ),
    "mixed precision: norms in float32": PytorchScenario(_Norms, _norms, step=sum_of_inputs(6)),
    # test_fully_shard_grad_scaler.py
    "scaler": PytorchScenario(mlps, step=_scaled, count=5, steps_itself=True),
    # test_fully_shard_extensions.py
    "extensions": PytorchScenario(
        partial(MLPStack, 12), prepare=_gather_in_half, step=sum_of_inputs(12)
    ),
    # test_fully_shard_frozen.py, test_fully_shard_ignore_params.py
    "frozen: biases alone, since sharding": PytorchScenario(
        _three_mlps, prepare=_only_biases, step=sum_of_inputs(6)
    ),
    "frozen: biases alone, recomputed": PytorchScenario(
        _three_mlps, _recomputed_biases, step=sum_of_inputs(6)
    ),
    "frozen: every other layer": PytorchScenario(
        _three_mlps, _every_other, step=_evaluated_between
    ),
    "frozen: layers that run again": PytorchScenario(_Repeated, step=sum_of_inputs(5)),
    "frozen: until the third step": PytorchScenario(
        mlps,
        prepare=lambda model: model[1].requires_grad_(False),
        step=_unfrozen_later,
        meshes=("fsdp-1", "fsdp-3"),
    ),
    "ignored: DDP inside": PytorchScenario(
        lambda: nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)),
        _ignoring_ddp,
        step=sum_of_inputs(5),
        meshes=("fsdp-2",),
    ),
    # test_fully_shard_init.py, test_fully_shard_state_dict.py
    "init: in float64": PytorchScenario(mlps, prepare=nn.Module.double, step=sum_of_inputs(5)),
    "state dict: loaded": PytorchScenario(mlps, _load_another, step=sum_of_inputs(5)),
    "state dict: back to before a step": PytorchScenario(
        mlps, step=_saved_between, steps_itself=True
    ),
}
