"""PyTorch's own tests of ``fully_shard`` beyond training; each of their files is an area."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pytorch_training import (
    TRAINING,
    PytorchScenario,
    Repeated,
    by_block,
    mlps,
    recomputed,
    sum_of_inputs,
    transformer,
)
from sharded_models import Mesh, Scenario, Step, Training, by_layer, local_part
from sharded_scenarios import BF16, F16, F32, places_of, policy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.common_fsdp import MLP, DoubleLinear, MLPStack

# ---- autograd ------------------------------------------------------------------------------------


class _Pairs(nn.Module):
    """Modules with two outputs, or with an unused layer."""

    def __init__(self, use_second: bool) -> None:
        super().__init__()
        self.first = DoubleLinear(5, use_second_linear=use_second)
        self.second = DoubleLinear(5, use_second_linear=use_second)

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.first(inputs)
        return self.second(hidden[0] if isinstance(hidden, tuple) else hidden)


def _pairs_by_layer(model: Any, mesh: Mesh) -> None:
    for pair in (model.first, model.second):
        mesh.apply(pair.lin1)
        mesh.apply(pair.lin2)
    mesh.apply(model)


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


def _three_nested(kind: str) -> nn.Module:
    return nn.Sequential(*(_Nested(kind) for _ in range(3)))


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
    loss = at.model(at.batch(0, 4)).sum()
    loss.backward()
    return loss, list(calls)


# ---- mixed precision -----------------------------------------------------------------------------


class _Casts(nn.Module):
    """Layers of one group, with float32 between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).float())


def _grouped_casts(model: Any, mesh: Mesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=True)
    mesh.apply([model.first, model.second], mp_policy=policy)
    mesh.apply(model, mp_policy=policy)


class _TwoPrecisions(nn.Module):
    """A layer in float32 and a layer in float16 that casts its own inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).to(F16)).float()


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


def _micro_batches(at: Training) -> list[Tensor]:
    losses = []
    for number in range(3):
        at.model.set_requires_gradient_sync(number == 2)
        losses.append(at.model(at.batch(number, 4)).sum())
        losses[-1].backward()
    return losses


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


def _clipped(norm: float) -> Step:
    def step(at: Training) -> list[Tensor]:
        loss = at.model(at.tokens()).sum()
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(at.model.parameters(), 0.5, norm_type=norm)
        assert isinstance(total, DTensor)
        return [loss, total.full_tensor()]

    return step


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


def _three_mlps(freeze: bool) -> nn.Module:
    model = nn.Sequential(*(MLP(6) for _ in range(3)))
    if freeze:
        _only_biases(model)
    return model


def _six_layers() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.ReLU())))


def _every_other(model: Any, mesh: Mesh) -> None:
    for layer in model[::2]:
        mesh.apply(layer)
    for layer in model[::4]:
        layer.requires_grad_(False)


def _evaluated_between(at: Training) -> Tensor:
    if at.number == 1:
        with torch.no_grad():
            return at.model(at.batch(0, 4, 6)).sum()
    return sum_of_inputs(6)(at)


class _Between(nn.Module):
    """A sharded part; another library averages its inner part."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(5, 5)
        self.inner = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(functional.relu(self.outer(inputs)))


def _ignoring_ddp(model: Any, mesh: Mesh) -> None:
    model.inner = nn.parallel.DistributedDataParallel(model.inner)
    mesh.apply(model, ignored_params=set(model.inner.parameters()))


# ---- initialisation ------------------------------------------------------------------------------


def _on_meta() -> nn.Module:
    """With a buffer; the modules' own methods set the values."""
    with torch.device("meta"):
        return nn.Sequential(MLP(6, with_buffer=True), MLP(6, bias=False), nn.Linear(6, 3))


def _reset(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _load_another(model: nn.Module, mesh: Mesh) -> None:
    """A sharded model gets another one's state."""
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


SCENARIOS: dict[str, Scenario] = {
    **TRAINING,
    # test_fully_shard_autograd.py
    "autograd: one output of two": PytorchScenario(
        partial(_Pairs, True), step=_one_output_by_turns, count=6
    ),
    "autograd: one output of two, by layers": PytorchScenario(
        partial(_Pairs, True), _pairs_by_layer, step=_one_output_by_turns, count=6
    ),
    "autograd: an unused layer": PytorchScenario(partial(_Pairs, False), step=sum_of_inputs(5)),
    "autograd: an unused module": PytorchScenario(
        partial(_Pairs, False), _pairs_by_layer, step=sum_of_inputs(5)
    ),
    **{
        f"autograd: a {kind}": PytorchScenario(
            partial(_three_nested, kind),
            step=_nested_step,
            meshes=("fsdp-3",),
            needs="reset_iter_state" if kind == "record" else "reshard",
        )
        for kind in ("list", "dict", "named tuple", "record")
    },
    "autograd: optimizers in hooks": PytorchScenario(mlps, step=_steps_in_hooks, steps_itself=True),
    # test_fully_shard_mixed_precision.py
    "mixed precision: inputs of a group": PytorchScenario(
        _Casts, _grouped_casts, step=sum_of_inputs(5), needs="reset_iter_state"
    ),
    "mixed precision: one module in float16": PytorchScenario(
        _TwoPrecisions, _one_in_half, step=sum_of_inputs(5)
    ),
    "mixed precision: norms in float32": PytorchScenario(_Norms, _norms, step=sum_of_inputs(6)),
    "mixed precision: reduced in the parameters' dtype": PytorchScenario(
        mlps, policy(F32, F32), step=sum_of_inputs(5)
    ),
    **{
        f"mixed precision: {name} adds up": PytorchScenario(
            mlps, policy(BF16, reduce), step=_micro_batches
        )
        for name, reduce in (("bfloat16", None), ("float32", F32))
    },
    # test_fully_shard_grad_scaler.py, test_fully_shard_clip_grad_norm_.py
    "scaler": PytorchScenario(mlps, step=_scaled, count=5, steps_itself=True),
    **{
        f"clip: {norm}": PytorchScenario(transformer, by_block, step=_clipped(norm))
        for norm in (1.0, 2.0, float("inf"))
    },
    # test_fully_shard_extensions.py
    "extensions": PytorchScenario(
        partial(MLPStack, 12), prepare=_gather_in_half, step=sum_of_inputs(12)
    ),
    # test_fully_shard_frozen.py, test_fully_shard_ignore_params.py
    "frozen: biases alone": PytorchScenario(partial(_three_mlps, True), step=sum_of_inputs(6)),
    "frozen: biases alone, since sharding": PytorchScenario(
        partial(_three_mlps, False), prepare=_only_biases, step=sum_of_inputs(6)
    ),
    "frozen: biases alone, recomputed": PytorchScenario(
        partial(_three_mlps, True), recomputed, step=sum_of_inputs(6)
    ),
    "frozen: every other layer": PytorchScenario(
        _six_layers, _every_other, step=_evaluated_between
    ),
    "frozen: layers that run again": PytorchScenario(
        partial(Repeated, True), step=sum_of_inputs(5)
    ),
    "ignored: DDP inside": PytorchScenario(
        _Between, _ignoring_ddp, step=sum_of_inputs(5), meshes=("fsdp-2",)
    ),
    # test_fully_shard_init.py, test_fully_shard_state_dict.py
    "init: from the meta device": PytorchScenario(_on_meta, prepare=_reset, step=sum_of_inputs(6)),
    "init: in float64": PytorchScenario(mlps, prepare=nn.Module.double, step=sum_of_inputs(5)),
    "state dict: loaded": PytorchScenario(mlps, _load_another, step=sum_of_inputs(5)),
    "state dict: back to before a step": PytorchScenario(
        mlps, step=_saved_between, steps_itself=True
    ),
}

PLACES = places_of(SCENARIOS)
