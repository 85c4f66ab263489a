"""The model of ``train`` whole or in shards: what that sends, and its state as a whole."""

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
    """Bytes that a rank sends.

    Attributes:
        gradients: by the hook: in all-reduces, in the reduce-scatters of ``fsdp``, or between the
            replicas of ``hsdp``. None where the hook doesn't tell.
        scattered: in reduce-scatters of gradients within a replica of ``hsdp``.
        gathered: in all-gathers of parameters.
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
        """That of so many steps."""
        gradients = None if self.gradients is None else count * self.gradients
        return Traffic(gradients, count * self.scattered, count * self.gathered)

    @classmethod
    def of_hook(cls, stats: HookStats) -> Traffic:
        """What a hook and its model have sent while it was attached."""
        return cls(stats.bytes_sent, stats.bytes_scattered, stats.bytes_gathered)


def plain_traffic(model: ByteTransformer, config: TrainConfig) -> Traffic:
    """What a step sends without a hook, in float32 and around rings.

    ``fully_shard`` fills each parameter up to equal shards. It gathers those of a block in forward
    and in backward, and the others once.
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
    """Of each rank's shards, filled up."""
    shapes = [tuple(parameter.shape) for parameter in parameters]
    return sum(_FP32_BYTES * -(-rows // ranks) * math.prod(rest) for rows, *rest in shapes)


def shard(model: ByteTransformer, config: TrainConfig, device: torch.device) -> None:
    """Apply ``fully_shard`` to each block, and to the model for all else."""
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
        mesh_dim_names=("replicas", "shards"),  # FSDP2 asks for names
    )


def attach_hook(model: nn.Module, config: TrainConfig) -> Any:
    """Attach what the configuration describes; returns the handle, None without a hook."""
    hook = parse_hook(config.hook)
    if hook is None:
        return None
    from torch_commhook import attach

    beside = {}
    if config.shard_hook is not None:
        beside["shard_hook"] = parse_hook(config.shard_hook)
    if config.weights is not None:
        beside["weights"] = parse_codec(config.weights)
    return attach(model, hook, **beside)


# ---- the whole state -----------------------------------------------------------------------------


def whole_state(state: Any) -> Any:
    """A state with whole tensors in place of shards; dicts and lists stay. All ranks must call it.

    Where nothing is sharded it is the same state, and nothing is sent.
    """
    if isinstance(state, Mapping):
        return {key: whole_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole_state(value) for value in state]
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def whole_model(model: ByteTransformer, config: TrainConfig) -> ByteTransformer:
    """The model with whole parameters on each rank, for an evaluation. All ranks must call it."""
    if config.parallel == "ddp":
        return model
    with torch.device("meta"):
        whole = ByteTransformer(config.layers, config.dim, config.heads)
    whole.load_state_dict(whole_state(model.state_dict()), assign=True)
    return whole


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[int, Any]) -> None:
    """Have an optimizer go on from the state of whole parameters, which stays as it is.

    Args:
        optimizer: of parameters in shards, or whole.
        state: by the number of each parameter. Settings are the optimizer's own.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    own = {
        number: {name: _like(value, parameters[number]) for name, value in values.items()}
        for number, values in state.items()
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def _like(value: Any, parameter: Tensor) -> Any:
    """A copy of a state tensor, sharded as its parameter where it has the same shape."""
    if not isinstance(value, Tensor):
        return value
    if not hasattr(parameter, "full_tensor") or value.shape != parameter.shape:
        return value.clone()
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    whole = value.to(mesh.device_type, copy=True)
    # Each rank has read the whole of it: none sends anything.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
