"""Kinds of models that train on a group of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from layered_net import BUCKET_CAP_MB, Net, train
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks

#: The hooks of modules and of DDP that are attached.
ATTACHED: dict[str, Callable[[], Any]] = {
    "ddp attached": lambda: hooks.cast(torch.bfloat16),
    "module attached": hooks.allreduce,
    "module attached, cast": lambda: hooks.cast(torch.float16),
}
KINDS = ["ddp", "ddp with a hook of PyTorch", *ATTACHED, "fully_shard", "dtensor"]


def trained(rank: int, kind: str, group: Any = None) -> list[Any]:
    """The gradients after the last of five steps; for ``dtensor``, a product and a gradient."""
    if kind in ("fully_shard", "dtensor"):
        from_group = DeviceMesh.from_group
        mesh = init_device_mesh("cpu", (2,)) if group is None else from_group(group, "cpu")
        return _sharded(rank, mesh) if kind == "fully_shard" else _product(mesh)
    torch.manual_seed(0)
    model: Any = Net()
    of_module: dict[str, Any] = {"process_group": group, "bucket_cap_mb": BUCKET_CAP_MB}
    if kind.startswith("ddp"):
        model, of_module = DDP(model, **of_module), {}
    if kind in ATTACHED:
        attach(model, ATTACHED[kind](), **of_module)
    elif kind != "ddp":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return train(model, rank)


def _sharded(rank: int, mesh: DeviceMesh) -> list[Any]:
    torch.manual_seed(0)
    model = Net()
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)
    return [gradient.full_tensor() for gradient in train(model, rank)]


def _product(mesh: DeviceMesh) -> list[Tensor]:
    x = torch.arange(16.0).view(4, 4)
    rows = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    columns = distribute_tensor(x + 1, mesh, [Shard(1)])
    product = (rows @ columns).redistribute(mesh, [Replicate()])
    product.square().sum().backward()
    return [product.to_local().detach(), rows.grad.full_tensor()]
