"""Shards the model of ``train``: its traffic without a hook, and its state in whole tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_commhook.cli.report import fp32_bytes_per_step
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.transformer import ByteTransformer
from torch_commhook.hooks.expressions import parse_codec, parse_hook
from torch_commhook.metrics import HookStats, ring_all_reduce_bytes

_FP32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends.

    Attributes:
        gradients: bytes of the hook's messages: in all-reduces, in the reduce-scatters of ``fsdp``,
            or between the replicas of ``hsdp``. None if the hook does not tell.
        scattered: bytes of reduce-scatters of gradients within a replica of ``hsdp``.
        gathered: bytes of all-gathers of parameters.
    """

    gradients: int | None = 0
    scattered: int = 0
    gathered: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        unknown = self.gradients is None or other.gradients is None
        return Traffic(
            None if unknown else (self.gradients or 0) + (other.gradients or 0),
            self.scattered + other.scattered,
            self.gathered + other.gathered,
        )

    def times(self, count: int) -> Traffic:
        """The traffic of ``count`` steps like this one."""
        gradients = None if self.gradients is None else count * self.gradients
        return Traffic(gradients, count * self.scattered, count * self.gathered)

    @classmethod
    def of_hook(cls, stats: HookStats) -> Traffic:
        """The traffic of a hook and its model since the hook was attached."""
        return cls(stats.bytes_sent, stats.bytes_scattered, stats.bytes_gathered)


def plain_traffic(model: ByteTransformer, config: TrainConfig) -> Traffic:
    """The traffic of a step without a hook, in float32 and with ring collectives.

    ``fully_shard`` pads each parameter to equal shards. It gathers the parameters of a block in the
    forward and again in the backward, and the others once.
    """
    ranks, replicas = config.shard_ranks, config.replicas
    if config.parallel == "ddp":
        return Traffic(fp32_bytes_per_step(model.parameter_count(), config.ranks))
    blocks = [_shard_bytes(block.parameters(), ranks) for block in model.blocks]
    in_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    others = (each for each in model.parameters() if id(each) not in in_blocks)
    rest = _shard_bytes(others, ranks)
    scattered = (sum(blocks) + rest) * (ranks - 1)
    gathered = (2 * sum(blocks) + rest) * (ranks - 1)
    if config.parallel == "fsdp":
        return Traffic(scattered, 0, gathered)
    reduced = sum(ring_all_reduce_bytes(each, replicas) for each in (*blocks, rest))
    return Traffic(reduced, scattered, gathered)


def _shard_bytes(parameters: Iterable[Tensor], ranks: int) -> int:
    """The bytes of a rank's padded shards."""
    shapes = [tuple(parameter.shape) for parameter in parameters]
    return sum(_FP32_BYTES * -(-rows // ranks) * math.prod(rest) for rows, *rest in shapes)


def shard(model: ByteTransformer, config: TrainConfig, device: torch.device) -> None:
    """Apply ``fully_shard`` to each block, and to the model for its other parameters."""
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(config, device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _mesh(config: TrainConfig, device: torch.device) -> DeviceMesh:
    if config.parallel == "fsdp":
        return init_device_mesh(device.type, (config.ranks,))
    return init_device_mesh(
        device.type,
        (config.replicas, config.shard_ranks),
        mesh_dim_names=("replicas", "shards"),  # FSDP2 requires names
    )


def attach_hook(model: nn.Module, config: TrainConfig) -> Any:
    """Attach the configuration's hook, shard hook and codec; returns the handle, or None."""
    hook = parse_hook(config.hook)
    if hook is None:
        return None
    from torch_commhook import attach

    options = {}
    if config.shard_hook is not None:
        options["shard_hook"] = parse_hook(config.shard_hook)
    if config.weights is not None:
        options["weights"] = parse_codec(config.weights)
    return attach(model, hook, **options)


# ---- the whole state -----------------------------------------------------------------------------


def whole_state(state: Any) -> Any:
    """A copy of a state with whole tensors instead of shards. All ranks must call this function.

    Without shards it sends nothing and copies no tensor.
    """
    if isinstance(state, Mapping):
        return {key: whole_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole_state(value) for value in state]
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def whole_model(model: ByteTransformer, config: TrainConfig) -> ByteTransformer:
    """The model with whole parameters on each rank. All ranks must call this function."""
    if config.parallel == "ddp":
        return model
    with torch.device("meta"):
        whole = ByteTransformer(config.layers, config.dim, config.heads)
    whole.load_state_dict(whole_state(model.state_dict()), assign=True)
    return whole


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[int, Any]) -> None:
    """Load the state of whole parameters into an optimizer, which keeps its settings.

    Args:
        optimizer: an optimizer of sharded or whole parameters.
        state: the state by the number of each parameter. The function does not change it.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    own = {
        number: {name: _like(value, parameters[number]) for name, value in values.items()}
        for number, values in state.items()
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def _like(value: Any, parameter: Tensor) -> Any:
    """Copy a tensor of a state. The copy is sharded as its parameter if it has the same shape."""
    if not isinstance(value, Tensor):
        return value
    if not hasattr(parameter, "full_tensor") or value.shape != parameter.shape:
        return value.clone()
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    whole = value.to(mesh.device_type, copy=True)
    # Each rank has the whole tensor, so no rank sends it.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
