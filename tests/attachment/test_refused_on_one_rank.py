"""A hook that one rank refuses, or attaches with buffers of any strides: all ranks hear of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import of_all_ranks, on_processes, on_ranks
from sharded_models import Mesh, by_layer, device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, codecs, hooks


class _Refused(hooks.allreduce):
    rank = 0

    def check_parameters(self, named: object) -> None:
        if self.rank == 1:
            raise ZeroDivisionError("here")


@pytest.mark.parametrize("replaces", [False, True])
@on_processes
def test_all_ranks_hear_why_one_refuses_a_hook(rank: int, replaces: bool) -> None:
    hook = _Refused()
    hook.rank = rank
    model = nn.Linear(4, 4)
    with pytest.raises((RuntimeError, ZeroDivisionError)) as raised:
        if replaces:
            with attach(model, hooks.allreduce()) as handle:
                handle.replace(hook)
        else:
            attach(model, hook)
    with attach(model, hooks.allreduce()):
        model(torch.full((1, 4), float(rank))).sum().backward()
    said = f"{raised.type.__name__}: {raised.value}"
    if rank == 0:
        assert "it failed on rank 1: ZeroDivisionError: here" in said
    else:
        assert said == "ZeroDivisionError: here"
    assert float(model.weight.grad[0, 0]) == 0.5  # type: ignore[index]


@on_processes
def test_buffers_that_are_not_contiguous(rank: int) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("strided", (torch.arange(24.0) + rank).view(4, 6)[:, ::2])
    with attach(model, hooks.allreduce()):
        model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
    for first, second in zip(*of_all_ranks(list(model.state_dict().values())), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(model.strided, torch.arange(24.0).view(4, 6)[:, ::2])


class _Fixed(torch.Tensor):
    """Refuses to be written, as the weights of some quantisation libraries."""

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def, override]
        if function is torch.ops.aten.copy_.default:
            raise TypeError("cannot copy a tensor to _Fixed")
        with torch._C._DisableTorchDispatch():
            result = function(*arguments, **(options or {}))
        is_alias = function is torch.ops.aten.detach.default
        return result.as_subclass(cls) if is_alias else result


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


TENSORS = {
    "expanded": lambda: torch.ones(1).expand(3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "fixed": lambda: torch.ones(3).as_subclass(_Fixed),
    "inference": _inference,
}


@pytest.mark.parametrize("only_on_one", [False, True])
@pytest.mark.parametrize("kind", TENSORS)
@on_ranks(2)
def test_a_tensor_that_cannot_be_written(rank: int, kind: str, only_on_one: bool) -> None:
    """All ranks hear its name before anything is written; with other settings it stays."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    is_there = rank == 1 or not only_on_one
    model.register_buffer("odd", TENSORS[kind]() if is_there else torch.ones(3))
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"(?s)attach: .*buffer 'odd' cannot get rank 0's val"):
        attach(model, hooks.allreduce())
    assert torch.equal(model.weight, before)
    with attach(model, hooks.allreduce(), init_sync=False, broadcast_buffers=False):
        model(torch.full((1, 4), float(rank))).sum().backward()
    assert float(model.weight.grad[0, 0]) == 0.5  # type: ignore[index]


@pytest.mark.parametrize("what", ["shape", "dtype", "name", "frozen"])
@on_ranks(2)
def test_buffers_that_differ(rank: int, what: str) -> None:
    model = nn.Linear(4, 4)
    if what == "frozen":
        model.more = nn.Parameter(torch.ones(3 + rank), requires_grad=False)
    else:
        dtype = torch.float64 if what == "dtype" and rank else torch.float32
        size = 3 + (what == "shape") * rank
        model.register_buffer(
            "b" if what == "name" and rank else "a", torch.ones(size, dtype=dtype)
        )
    message = "the parameters and buffers to send must be the same on all ranks: rank 0 has '"
    with pytest.raises(RuntimeError, match=message):
        attach(model, hooks.allreduce())
    again = nn.Linear(4, 4)
    with attach(again, hooks.allreduce()) as handle:
        assert handle.is_attached


def _model(kind: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "ddp":
        return DDP(model)
    if kind == "replicate":
        by_layer(model, Mesh.of("replicate-2"))
    elif kind != "module":
        sizes, names = ((2,), ("s",)) if kind == "fully_shard" else ((2, 1), ("r", "s"))
        fully_shard(model, mesh=device_mesh(sizes, names))
    return model


WRONG: dict[str, Any] = {
    "hook": lambda model, options: options.update(hook="no_such_hook()"),
    "connections": lambda model, options: options.update(connections=99),
    "scaler": lambda model, options: options.update(scaler=3),
    "setting": lambda model, options: options.update(bucket_cap_mb=-1),
    "weights": lambda model, options: options.update(weights=codecs.topk(0.5)),
    "shard_hook": lambda model, options: options.update(shard_hook="no_such_hook()"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["module", "ddp", "fully_shard", "hsdp", "replicate"])
@on_processes
def test_what_one_rank_alone_refuses(rank: int, kind: str, wrong: str) -> None:
    model = _model(kind)
    options: dict[str, Any] = {"model": model, "hook": hooks.allreduce()}
    if rank == 1:
        WRONG[wrong](model, options)
    with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
        attach(**options)
    if rank == 0:
        assert "attach: it failed on rank 1: " in str(raised.value)
    again = _model(kind)
    with attach(again, hooks.allreduce()) as handle:
        assert handle.is_attached


@on_processes
def test_a_hook_that_one_rank_has_already(rank: int) -> None:
    model = DDP(nn.Linear(4, 4))
    handle = attach(model, hooks.allreduce())
    if rank == 0:
        handle.remove()
    with pytest.raises(RuntimeError, match="is attached to this model already"):
        attach(model, hooks.allreduce())
