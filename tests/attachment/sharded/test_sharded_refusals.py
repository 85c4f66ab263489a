"""What hooks cannot do on sharded models, and what must not change under them: errors say so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from sharded_models import (
    Layers,
    Mesh,
    at_once,
    batch,
    by_layer,
    layers,
    local,
    loss_of,
    reshard,
    two_axes,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from torch_commhook import attach, codecs, hooks


def _new_model(place: str) -> nn.Module:
    model = layers()
    by_layer(model, Mesh.of(place))
    return model


def _step(model: nn.Module, rank: int, number: int = 0) -> list[Tensor]:
    model.zero_grad()
    loss_of(model(batch(rank, number))).backward()
    reshard(model)
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def _error(function: Callable[[], Any]) -> str:
    """The error that a function raises, with its kind."""
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _still_plain(model: nn.Module, rank: int) -> bool:
    """Whether a model that has refused a hook is what it was, and takes another."""
    expected = _step(_new_model("fsdp-2"), rank)
    first = _step(model, rank)
    handle = attach(model, hooks.allreduce())
    second = _step(model, rank)
    handle.remove()
    return all(a.equal(b) and b.equal(c) for a, b, c in zip(first, second, expected, strict=True))


# ---- hooks on the shards' axis -------------------------------------------------------------------


def _own(state: object, bucket: Any) -> Tensor:
    return bucket.buffer()


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
    "local_sgd": (lambda: hooks.local_sgd(4), "sharded"),
    "policy": (hooks.policy, "each rank needs its shard alone"),
    "adaptive": (lambda: hooks.adaptive(1000), "each rank needs its shard alone"),
    "hierarchical": (lambda: _hierarchical(), "each rank needs its shard alone"),
    "a function": (lambda: _own, "average_shard()"),
    "a hook of a user's": (_Own, "averages whole gradients"),
}


def _refused(rank: int, name: str) -> tuple[str, bool]:
    model = _new_model("fsdp-2")
    hook = REFUSED[name][0]()
    return _error(lambda: attach(model, hook)), _still_plain(model, rank)


@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_cannot_average_shards(two_ranks: RankPool, name: str) -> None:
    for message, works in two_ranks.run(_refused, name):
        assert message.startswith("TypeError: ")
        assert REFUSED[name][1] in message
        assert works


def _replaced_by_refused(rank: int) -> tuple[str, list[bool]]:
    model = _new_model("fsdp-2")
    expected = _step(model, rank)
    handle = attach(model, hooks.allreduce())
    message = _error(lambda: handle.replace(hooks.topk(0.5)))
    got = _step(model, rank)
    handle.remove()
    return message, [a.equal(b) for a, b in zip(got, expected, strict=True)]


def test_replaced_by_a_hook_that_cannot(two_ranks: RankPool) -> None:
    for message, same in two_ranks.run(_replaced_by_refused):
        assert "needs the gradients of all ranks" in message
        assert all(same)


def _across_replicas(rank: int, name: str) -> list[str]:
    """Hooks of whole gradients work where they average what each replica has whole."""
    hook = {
        "topk": lambda: hooks.topk(0.5),
        "powersgd": lambda: hooks.powersgd(rank=2),
        "a function": lambda: _mean,
        "policy": hooks.policy,
        "adaptive": lambda: hooks.adaptive(1000),
    }[name]()
    model = _new_model("hsdp-4")
    handle = attach(model, hook)
    got = _step(model, rank)
    numbers = handle.stats()
    handle.remove()
    found = [] if numbers.steps == 1 else [f"{numbers.steps} steps"]
    others: list[Any] = [None] * 4
    dist.all_gather_object(others, got)
    for mine, other in zip(got, others[(rank + 2) % 4], strict=True):
        if not mine.equal(other):
            found.append("replicas differ")
    return found if any(bool(each.any()) for each in got) else [*found, "no gradient"]


def _mean(state: object, bucket: Any) -> Tensor:
    group = bucket.process_group()
    dist.all_reduce(bucket.buffer(), group=group)
    return bucket.buffer() / group.size()


@pytest.mark.parametrize("name", ["topk", "powersgd", "a function", "policy", "adaptive"])
@pytest.mark.parametrize("place", ["hsdp-4"])
def test_hooks_that_average_replicas(ranks: RankPool, place: str, name: str) -> None:
    assert ranks.run(_across_replicas, name) == [[]] * 4


def _refused_across_replicas(rank: int, name: str) -> str:
    model = _new_model("hsdp-4")
    return _error(lambda: attach(model, REFUSED[name][0]()))


@pytest.mark.parametrize("name", ["clip", "clip inside"])
@pytest.mark.parametrize("place", ["hsdp-4"])
def test_hooks_that_see_all_gradients(ranks: RankPool, place: str, name: str) -> None:
    for message in ranks.run(_refused_across_replicas, name):
        assert "TypeError" in message and "clip_grad_norm_" in message


# ---- models and settings -------------------------------------------------------------------------


def _on_meta(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    model.to("meta")
    by_layer(model, mesh)
    return {}


def _custom_before(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    by_layer(model, mesh)
    model[0].set_custom_reduce_scatter(_Custom())
    return {}


def _custom_gather_before(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    by_layer(model, mesh)
    model[0].set_custom_all_gather(_Custom())
    return {}


class _Custom:
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> None:
        raise AssertionError("it is not called")


def _two_meshes(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    pairs = two_axes(("a", "b")) if dist.get_world_size() == 4 else None
    assert pairs is not None
    fully_shard(model[0], mesh=pairs["a"])
    fully_shard(model[2], mesh=pairs["b"])
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
    "nothing to train": (_all_frozen, "fsdp-2", "FSDPLayers has no parameter that requires grad"),
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
        "needs the gradients of all ranks",
    ),
    "weights of replicate": (
        _settings(weights=codecs.blockwise),
        "replicate-2",
        "not by replicate()",
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
    "weights in two dtypes": (_gathered_in_two_dtypes, "fsdp-2", "are gathered in one dtype"),
}


def _bad(rank: int, name: str) -> str:
    shard, place, _ = BAD[name]
    model = layers()
    settings = shard(model, Mesh.of(place))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _error(lambda: attach(model, hooks.allreduce(), **settings))


@pytest.mark.parametrize(("name", "place"), [(name, each[1]) for name, each in BAD.items()])
def test_what_attach_refuses(ranks: RankPool, name: str, place: str) -> None:
    for message in ranks.run(_bad, name):
        assert BAD[name][2] in message


def _part_of_a_group(rank: int) -> str:
    model = layers()
    mesh = Mesh.of("fsdp-2")
    mesh.apply([model[0], model[2]])
    return _error(lambda: attach(model[0], hooks.allreduce()))


def test_a_part_of_a_group(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_part_of_a_group):
        assert "formed of several modules" in message


def _several_groups(rank: int) -> str:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    axes = two_axes(("a", "b"))
    one, other = FSDPMeshInfo(axes["a"], 0), FSDPMeshInfo(axes["b"], 0)
    model = layers()

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), one if parameter.dim() == 1 else other)

    fully_shard(model, mesh=axes["a"], shard_placement_fn=place)
    return _error(lambda: attach(model, hooks.allreduce()))


@pytest.mark.parametrize("place", ["fsdp-4"])
def test_several_groups_of_a_module_over_several_meshes(ranks: RankPool, place: str) -> None:
    for message in ranks.run(_several_groups):
        assert "are sharded over different meshes" in message


# ---- what changes under a hook -------------------------------------------------------------------


def _shard_more(model: nn.Module) -> None:
    model.add_module("more", Layers(1, 4, 1))
    fully_shard(model.more, mesh=Mesh.of("fsdp-2").mesh)


def _shard_around(model: nn.Module) -> None:
    fully_shard(model, mesh=Mesh.of("fsdp-2").mesh)


def _custom_later(model: nn.Module) -> None:
    model[0].set_custom_reduce_scatter(_Custom())


def _custom_gather_later(model: nn.Module) -> None:
    model[2].set_custom_all_gather(_Custom())


def _unfreeze(model: nn.Module) -> None:
    model[2].bias.requires_grad_(True)


def _first_two(model: nn.Module) -> None:
    mesh = Mesh.of("fsdp-2")
    model[2].bias.requires_grad_(False)
    for layer in (model[0], model[2]):
        mesh.apply(layer)


CHANGES: dict[str, tuple[Callable[[nn.Module], None], Callable[[nn.Module], None], str]] = {
    "fully_shard of more": (
        lambda model: by_layer(model, Mesh.of("fsdp-2")),
        _shard_more,
        "fully_shard() was applied",
    ),
    "fully_shard of the rest": (_first_two, _shard_around, "fully_shard() was applied"),
    "set_custom_reduce_scatter": (
        lambda model: by_layer(model, Mesh.of("fsdp-2")),
        _custom_later,
        "remove() the hook first",
    ),
    "set_custom_all_gather": (
        lambda model: by_layer(model, Mesh.of("fsdp-2")),
        _custom_gather_later,
        "remove() the hook first",
    ),
    "unfrozen": (_first_two, _unfreeze, "remove() the hook and attach it again"),
}


def _changed(rank: int, name: str, stepped: bool) -> list[str]:
    shard, change, message = CHANGES[name]
    model = layers()
    shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that nobody has sharded
        handle = attach(model, hooks.blockwise())
    if stepped:
        _step(model, rank)
    found = []
    try:
        change(model)
    except Exception as error:  # PyTorch refuses it, once a forward has run
        return [] if stepped else [f"{type(error).__name__}: {error}"]
    error = _error(lambda: _step(model, rank))
    if stepped and "requires running forward through the root" in error:
        return []  # by PyTorch
    if message not in error or "RuntimeError" not in error:
        found.append(error)
    handle.remove()
    return found


@pytest.mark.parametrize("stepped", [False, True], ids=["before a step", "after a step"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changes(two_ranks: RankPool, name: str, stepped: bool) -> None:
    assert two_ranks.run(_changed, name, stepped) == [[], []]


# ---- ranks that differ ---------------------------------------------------------------------------


def _differ_in_hook(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return _new_model("fsdp-2"), {"hook": hooks.allreduce() if rank else hooks.blockwise()}


def _differ_in_settings(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return _new_model("fsdp-2"), {"hook": hooks.blockwise(bits=4 if rank else 8)}


def _differ_in_weights(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return _new_model("fsdp-2"), {"weights": codecs.blockwise() if rank else None}


def _differ_in_groups(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = layers()
    (by_layer if rank else at_once)(model, Mesh.of("fsdp-2"))
    return model, {}


def _differ_in_parameters(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = Layers(5, 7, 1) if rank else Layers(5, 6, 1)
    by_layer(model, Mesh.of("fsdp-2"))
    return model, {}


def _differ_in_frozen(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = _new_model("fsdp-2")
    model[0].bias.requires_grad_(rank == 0)
    return model, {}


def _differ_in_reduce_dtype(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = layers()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if rank else torch.float32)
    by_layer(model, Mesh.of("fsdp-2"), mp_policy=policy)
    return model, {}


def _differ_in_refusal(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    """One rank's hook is refused."""
    return _new_model("fsdp-2"), {"hook": hooks.allreduce() if rank else _own}


def _differ_in_meta(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = layers()
    if rank:
        model.to("meta")
    by_layer(model, Mesh.of("fsdp-2"))
    return model, {}


DIFFERENT = {
    "hook": _differ_in_hook,
    "settings": _differ_in_settings,
    "weights": _differ_in_weights,
    "groups": _differ_in_groups,
    "parameters": _differ_in_parameters,
    "frozen": _differ_in_frozen,
    "reduce_dtype": _differ_in_reduce_dtype,
    "refused on one rank": _differ_in_refusal,
    "on the meta device on one rank": _differ_in_meta,
}


def _different(rank: int, name: str) -> tuple[str, bool]:
    model, settings = DIFFERENT[name](rank)
    hook = settings.pop("hook", hooks.allreduce())
    return _error(lambda: attach(model, hook, **settings)), _still_plain(_new_model("fsdp-2"), rank)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_attach_differently(two_ranks: RankPool, name: str) -> None:
    for rank, (message, works) in enumerate(two_ranks.run(_different, name)):
        own = rank == (0 if name == "refused on one rank" else 1) and "one rank" in name
        expected = "attach" if own else "it failed on rank" if "one rank" in name else "must be"
        assert expected in message
        assert works


def _different_meshes(rank: int) -> str:
    """Two ranks reshard among two after forward, two among all."""
    model = layers()
    if rank < 2:
        by_layer(model, Mesh.of("fsdp-4"), reshard_after_forward=False)
    else:
        by_layer(model, Mesh.of("fsdp-4"), reshard_after_forward=True)
    return _error(lambda: attach(model, hooks.allreduce()))


@pytest.mark.parametrize("place", ["fsdp-4"])
def test_meshes_that_differ(ranks: RankPool, place: str) -> None:
    for message in ranks.run(_different_meshes):
        assert "reshard_after_forward must be the same on all ranks" in message


def _replica_differs(rank: int) -> str:
    """What differs on another replica, at another place, is found across both axes."""
    model = _new_model("hsdp-4")
    return _error(lambda: attach(model, hooks.blockwise(bits=4 if rank == 3 else 8)))


@pytest.mark.parametrize("place", ["hsdp-4"])
def test_one_rank_of_a_mesh_differs(ranks: RankPool, place: str) -> None:
    for message in ranks.run(_replica_differs):
        assert "the hook must be the same on all ranks" in message


def _with_ignored(rank: int) -> list[str]:
    model = layers()
    fully_shard(model, mesh=Mesh.of("fsdp-2").mesh, ignored_params=set(model[2].parameters()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = attach(model, hooks.allreduce())
    handle.remove()
    return [str(each.message) for each in said if "attach:" in str(each.message)]


def test_parameters_that_nobody_averages_are_named(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_with_ignored):
        assert len(said) == 2
        assert "parameter '2.weight' is in no module that fully_shard()" in said[0]


# ---- the handle ----------------------------------------------------------------------------------


def _stage(rank: int, place: str, name: str) -> str:
    model = _new_model(place)
    handle = attach(model, hooks.allreduce())
    message = _error(lambda: getattr(handle, name)(lambda *arguments: None))
    _step(model, rank)
    handle.remove()
    return message


@pytest.mark.parametrize(
    "name",
    [
        "register_buffer_prehook",
        "register_prehook",
        "register_posthook",
        "register_post_accumulate_hook",
    ],
)
def test_hooks_around_a_reduce_scatter(two_ranks: RankPool, name: str) -> None:
    for message in two_ranks.run(_stage, "fsdp-2", name):
        assert f"HookHandle.{name}: " in message and "use Tensor.register" in message.replace(
            "\n", " "
        )


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("register_buffer_prehook", True),
        ("register_prehook", True),
        ("register_posthook", True),
        ("register_post_accumulate_hook", False),
    ],
)
def test_hooks_around_an_all_reduce(two_ranks: RankPool, name: str, works: bool) -> None:
    for message in two_ranks.run(_stage, "replicate-2", name):
        assert (message == "no error") == works


def _join(rank: int) -> str:
    handle = attach(_new_model("fsdp-2"), hooks.allreduce())
    message = _error(handle.join)
    handle.remove()
    return message


def test_join(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_join):
        assert "all ranks must take equally many steps" in message


def _attached_twice(rank: int) -> list[str]:
    model = _new_model("fsdp-2")
    handle = attach(model, hooks.allreduce())
    found = [_error(lambda: attach(model, hooks.allreduce()))]
    found.append(_error(lambda: attach(model[0], hooks.allreduce())))
    found.append(_error(lambda: attach(nn.Sequential(model), hooks.allreduce())))
    handle.remove()
    return found


def test_attached_twice(two_ranks: RankPool) -> None:
    for same, part, around in two_ranks.run(_attached_twice):
        assert "is attached to this model already" in same
        for message in (part, around):
            assert message.startswith("RuntimeError: ") and "allreduce" in message
