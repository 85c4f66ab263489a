"""What hooks cannot do on sharded models, and models that take none: errors say so."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from rank_pool import RankPool
from sharded_models import (
    Custom,
    Mesh,
    by_layer,
    error_of,
    gradients_of_step,
    layers,
    on_ranks,
    own_hook,
    sharded,
    still_plain,
    two_axes,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from torch_commhook import attach, codecs, hooks

# ---- hooks on the shards' axis -------------------------------------------------------------------


class _Own(hooks.Hook):
    def average(self, bucket: Any) -> Any:
        return hooks.allreduce().average(bucket)


def _hierarchical() -> Any:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return hooks.hierarchical(
        codecs.blockwise(), intra_group=alone[dist.get_rank()], inter_group=dist.group.WORLD
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "topk": (lambda: hooks.topk(0.5), "needs the gradients of all ranks in one place"),
    "topk inside": (
        lambda: hooks.error_feedback(hooks.topk(0.5)),
        "needs the gradients of all ranks",
    ),
    "powersgd": (lambda: hooks.powersgd(rank=2), "needs whole matrices"),
    "clip": (lambda: hooks.clip(1.0), "clip_grad_norm_"),
    "clip inside": (lambda: hooks.after(2, hooks.clip(1.0)), "clip_grad_norm_"),
    "local_sgd": (lambda: hooks.local_sgd(4), "shard over a mesh of two dimensions"),
    "policy": (hooks.policy, "a rank has only its shards"),
    "adaptive": (lambda: hooks.adaptive(1000), "a rank has only its shards"),
    "hierarchical": (lambda: _hierarchical(), "a rank has only its shards"),
    "a function": (lambda: own_hook, "average_shard()"),
    "a hook of a user's": (_Own, "averages whole gradients"),
}


def _refused(rank: int, name: str) -> tuple[str, bool]:
    model = sharded("fsdp-2")
    hook = REFUSED[name][0]()
    return error_of(lambda: attach(model, hook)), still_plain(model, rank)


@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_cannot_average_shards(two_ranks: RankPool, name: str) -> None:
    for message, works in two_ranks.run(_refused, name):
        assert message.startswith("TypeError: ")
        assert REFUSED[name][1] in message
        assert works


def _replaced_by_refused(rank: int) -> tuple[str, str, list[bool]]:
    model = sharded("fsdp-2")
    expected = gradients_of_step(model, rank)
    handle = attach(model, hooks.allreduce())
    message = error_of(lambda: handle.replace(hooks.topk(0.5)))
    apart = error_of(lambda: handle.replace(hooks.local_sgd(3)))
    got = gradients_of_step(model, rank)
    handle.remove()
    return message, apart, [a.equal(b) for a, b in zip(got, expected, strict=True)]


def test_replaced_by_a_hook_that_cannot(two_ranks: RankPool) -> None:
    for message, apart, same in two_ranks.run(_replaced_by_refused):
        assert "needs the gradients of all ranks" in message
        assert "TypeError: HookHandle.replace: local_sgd(3) keeps replicas apart" in apart
        assert all(same)


@pytest.mark.parametrize("name", ["topk", "powersgd", "a function", "policy", "adaptive"])
@on_ranks("hsdp-4")
def test_hooks_that_average_replicas(rank: int, place: str, name: str) -> None:
    """Hooks of whole gradients work where they average what each replica has whole."""
    hook = {
        "topk": lambda: hooks.topk(0.5),
        "powersgd": lambda: hooks.powersgd(rank=2),
        "a function": lambda: _mean,
        "policy": hooks.policy,
        "adaptive": lambda: hooks.adaptive(1000),
    }[name]()
    model = sharded("hsdp-4")
    handle = attach(model, hook)
    got = gradients_of_step(model, rank)
    numbers = handle.stats()
    handle.remove()
    assert numbers.steps == 1, f"{numbers.steps} steps"
    others: list[Any] = [None] * 4
    dist.all_gather_object(others, got)
    for mine, other in zip(got, others[(rank + 2) % 4], strict=True):
        assert mine.equal(other), "replicas differ"
    assert any(bool(each.any()) for each in got), "no gradient"


def _mean(state: object, bucket: Any) -> Tensor:
    group = bucket.process_group()
    dist.all_reduce(bucket.buffer(), group=group)
    return bucket.buffer() / group.size()


def _refused_across_replicas(rank: int, place: str, name: str) -> str:
    model = sharded(place)
    return error_of(lambda: attach(model, REFUSED[name][0]()))


@pytest.mark.parametrize("name", ["clip", "clip inside"])
@pytest.mark.parametrize("place", ["hsdp-4", "replicate-2"])
def test_hooks_that_see_all_gradients(ranks: RankPool, place: str, name: str) -> None:
    for message in ranks.run(_refused_across_replicas, place, name):
        assert message.startswith("TypeError: attach: ") and "clip_grad_norm_" in message
        assert "which no hook can do on a model with fully_shard() or replicate()" in message


# ---- models and settings -------------------------------------------------------------------------


def _on_meta(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    model.to("meta")
    by_layer(model, mesh)
    return {}


def _custom_before(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    by_layer(model, mesh)
    model[0].set_custom_reduce_scatter(Custom())
    return {}


def _custom_gather_before(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    by_layer(model, mesh)
    model[0].set_custom_all_gather(Custom())
    return {}


def _two_meshes(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    pairs = two_axes(("a", "b")) if dist.get_world_size() == 4 else None
    assert pairs is not None
    fully_shard(model[0], mesh=pairs["a"])
    fully_shard(model[2], mesh=pairs["b"])
    return {}


def _two_equal_meshes(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    another = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model[0], mesh=mesh.mesh)
    fully_shard(model[2], mesh=another)
    return {}


def _settings(**settings: Any) -> Callable[[nn.Module, Mesh], dict[str, Any]]:
    def shard(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
        by_layer(model, mesh)
        return {name: value() if callable(value) else value for name, value in settings.items()}

    return shard


def _all_frozen(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    model.requires_grad_(False)
    by_layer(model, mesh)
    return {}


def _gathered_in_two_dtypes(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    model[0].weight.data = model[0].weight.data.double()
    model[0].weight.requires_grad_(False)
    mesh.apply(model)
    return {"weights": codecs.blockwise()}


#: How a model is sharded, on what mesh, and what attach says.
BAD: dict[str, tuple[Callable[[nn.Module, Mesh], dict[str, Any]], str, str]] = {
    "on the meta device": (
        _on_meta,
        "fsdp-2",
        "ValueError: attach: parameter '0.weight' is on the",
    ),
    "custom reduce-scatter": (_custom_before, "fsdp-2", "RuntimeError: attach: a module's"),
    "custom all-gather": (_custom_gather_before, "fsdp-2", "RuntimeError: attach: a module's"),
    "two meshes": (_two_meshes, "fsdp-4", "over different meshes; attach a hook to each part"),
    "two equal meshes": (
        _two_equal_meshes,
        "hsdp-4",
        "attach: the modules of sharded_models.Layers are sharded over several meshes of the same "
        "ranks; make the mesh once, and give it to each fully_shard()",
    ),
    "nothing to train": (
        _all_frozen,
        "fsdp-2",
        "attach: sharded_models.Layers has no parameter that requires grad",
    ),
    "process_group": (
        _settings(process_group=lambda: dist.group.WORLD),
        "fsdp-2",
        "ValueError: attach: process_group must follow from how fully_shard() was applied",
    ),
    "bucket_cap_mb": (_settings(bucket_cap_mb=1), "fsdp-2", "bucket_cap_mb must follow from"),
    "init_sync": (_settings(init_sync=True), "fsdp-2", "init_sync must follow from"),
    "shard_hook on one dimension": (
        _settings(shard_hook=hooks.allreduce),
        "fsdp-2",
        "shard_hook is for models on a mesh of two",
    ),
    "shard_hook of replicate": (
        _settings(shard_hook=hooks.allreduce),
        "replicate-2",
        "leaves parameters whole",
    ),
    "shard_hook that cannot": (
        _settings(shard_hook=lambda: hooks.topk(0.5)),
        "hsdp-4",
        "attach: shard_hook takes part in reduce-scatters, but 'topk(density=0.5)' cannot; give it "
        "as hook=, which averages across replicas",
    ),
    "shard_hook that keeps replicas apart": (
        _settings(shard_hook=lambda: hooks.local_sgd(2)),
        "hsdp-4",
        "but 'local_sgd(2)' cannot; give it as hook=",
    ),
    "shard_hook that clips": (
        _settings(shard_hook=lambda: hooks.clip(1.0)),
        "hsdp-4",
        "call torch.nn.utils.clip_grad_norm_()",
    ),
    "weights of replicate": (
        _settings(weights=codecs.blockwise),
        "replicate-2",
        "not for replicate()",
    ),
    "weights of another kind": (
        _settings(weights="int8"),
        "fsdp-2",
        "weights must be one of torch_commhook.codecs, got str",
    ),
    "weights that are few": (
        _settings(weights=lambda: codecs.topk(0.5)),
        "fsdp-2",
        "must be a codec that sends all",
    ),
    "weights at random": (
        _settings(weights=lambda: codecs.blockwise(rounding="stochastic")),
        "fsdp-2",
        "the same ones each time",
    ),
    "weights in two dtypes": (
        _gathered_in_two_dtypes,
        "fsdp-2",
        "gather all their parameters in one dtype",
    ),
}


def _bad(rank: int, name: str) -> str:
    shard, place, _ = BAD[name]
    model = layers()
    settings = shard(model, Mesh.of(place))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return error_of(lambda: attach(model, hooks.allreduce(), **settings))


@pytest.mark.parametrize(("name", "place"), [(name, each[1]) for name, each in BAD.items()])
def test_what_attach_refuses(ranks: RankPool, name: str, place: str) -> None:
    for message in ranks.run(_bad, name):
        assert BAD[name][2] in message


def _part_of_a_group(rank: int) -> str:
    model = layers()
    mesh = Mesh.of("fsdp-2")
    mesh.apply([model[0], model[2]])
    return error_of(lambda: attach(model[0], hooks.allreduce()))


def test_a_part_of_a_group(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_part_of_a_group):
        assert "formed from several modules" in message


def _several_groups(rank: int) -> str:
    axes = two_axes(("a", "b"))
    one, other = (_fsdp_common.FSDPMeshInfo(axes[name], 0) for name in ("a", "b"))
    model = layers()

    def place(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), one if parameter.dim() == 1 else other)

    fully_shard(model, mesh=axes["a"], shard_placement_fn=place)
    return error_of(lambda: attach(model, hooks.allreduce()))


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="see docs/torch_versions.md"
)
@pytest.mark.parametrize("place", ["fsdp-4"])
def test_several_groups_of_a_module_over_several_meshes(ranks: RankPool, place: str) -> None:
    for message in ranks.run(_several_groups):
        assert "are sharded over different meshes" in message


def _warned(rank: int) -> list[tuple[str, str]]:
    """Where the warning of error memory points: file and line."""
    model = sharded("fsdp-2")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = attach(model, hooks.error_feedback(hooks.blockwise()))
        handle.replace(hooks.error_feedback(hooks.sign()))
    handle.remove()
    kept = [each for each in said if "keeps errors of whole gradients" in str(each.message)]
    return [(each.filename, linecache.getline(each.filename, each.lineno).strip()) for each in kept]


def test_warnings_point_at_the_call(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_warned):
        assert said == [
            (__file__, "handle = attach(model, hooks.error_feedback(hooks.blockwise()))"),
            (__file__, "handle.replace(hooks.error_feedback(hooks.sign()))"),
        ]
