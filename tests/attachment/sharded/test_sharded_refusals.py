"""What ``attach`` and a handle refuse on sharded models, and models that change under a hook."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all_ranks
from rank_pool import KEPT_GROUPS
from sharded_models import (
    GLOO,
    Layers,
    Mesh,
    at_once,
    by_layer,
    device_mesh,
    gradients_of_step,
    layers,
    local,
    on_processes,
    on_ranks,
    run_on,
    same_bits,
    sharded,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from torch_commhook import attach, codecs, hooks


def _error_of(function: Callable[[], Any]) -> str:
    """The error that a function raises, with its kind."""
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _check_plain(model: nn.Module, rank: int) -> None:
    """A model that has refused a hook is unchanged, and accepts another hook."""
    expected = gradients_of_step(sharded("fsdp-2"), rank)
    assert same_bits(gradients_of_step(model, rank), expected)
    handle = attach(model, hooks.allreduce())
    assert same_bits(gradients_of_step(model, rank), expected)
    handle.remove()


# ---- hooks ---------------------------------------------------------------------------------------


class _Own(hooks.Hook):
    def average(self, bucket: Any) -> Any:
        return hooks.allreduce().average(bucket)


def _hierarchical() -> Any:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return hooks.hierarchical(
        codecs.blockwise(), intra_group=alone[dist.get_rank()], inter_group=dist.group.WORLD
    )


def _mean(state: object, bucket: Any) -> Tensor:
    group = bucket.process_group()
    dist.all_reduce(bucket.buffer(), group=group)
    return bucket.buffer() / group.size()


#: Hooks that cannot take part in reduce-scatters.
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
    "hierarchical": (_hierarchical, "a rank has only its shards"),
    "a function": (lambda: _mean, "average_shard()"),
    "a hook of a user's": (_Own, "averages whole gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_processes("fsdp-2")
def test_hooks_that_cannot_average_shards(rank: int, place: str, name: str) -> None:
    model = sharded(place)
    make, expected = REFUSED[name]
    hook = make()
    message = _error_of(lambda: attach(model, hook))
    assert message.startswith("TypeError: ") and expected in message
    _check_plain(model, rank)


@on_processes("fsdp-2")
def test_replaced_by_a_hook_that_cannot(rank: int, place: str) -> None:
    model = sharded(place)
    expected = gradients_of_step(model, rank)
    handle = attach(model, hooks.allreduce())
    message = _error_of(lambda: handle.replace(hooks.topk(0.5)))
    assert "needs the gradients of all ranks" in message
    message = _error_of(lambda: handle.replace(hooks.local_sgd(3)))
    assert "TypeError: HookHandle.replace: local_sgd(3) keeps replicas apart" in message
    assert same_bits(gradients_of_step(model, rank), expected)
    handle.remove()


@pytest.mark.parametrize("name", ["topk", "powersgd", "a function", "policy", "adaptive"])
@on_ranks("hsdp-4")
def test_hooks_that_average_replicas(rank: int, place: str, name: str) -> None:
    """Hooks of whole gradients work where they average what each replica has whole."""
    model = sharded(place)
    handle = attach(model, REFUSED[name][0]())
    got = gradients_of_step(model, rank)
    assert handle.stats().steps == 1
    handle.remove()
    assert same_bits(got, of_all_ranks(got)[(rank + 2) % 4]), "replicas differ"
    assert any(bool(each.any()) for each in got), "no gradient"


@pytest.mark.parametrize("name", ["clip", "clip inside"])
@on_processes("hsdp-4", "replicate-2")
def test_hooks_that_see_all_gradients(rank: int, place: str, name: str) -> None:
    message = _error_of(lambda: attach(sharded(place), REFUSED[name][0]()))
    assert message.startswith("TypeError: attach: ") and "clip_grad_norm_" in message
    assert "which no hook can do on a model with fully_shard() or replicate()" in message


# ---- models and settings -------------------------------------------------------------------------


class _Custom:
    """A reduce-scatter or an all-gather of the user's own."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> None:
        raise AssertionError("it is not called")


def _on_meta(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    model.to("meta")
    by_layer(model, mesh)
    return {}


def _custom_scatter(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    by_layer(model, mesh)
    model[0].set_custom_reduce_scatter(_Custom())
    return {}


def _custom_gather(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    by_layer(model, mesh)
    model[0].set_custom_all_gather(_Custom())
    return {}


def _two_meshes(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    pairs = device_mesh((2, 2), ("a", "b"))
    fully_shard(model[0], mesh=pairs["a"])
    fully_shard(model[2], mesh=pairs["b"])
    return {}


def _two_equal_meshes(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    another = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    KEPT_GROUPS.update(group.group_name for group in another.get_all_groups())
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


#: By mesh and name: a function that shards a model and returns arguments of attach, and the error.
BAD: dict[str, dict[str, tuple[Callable[[nn.Module, Mesh], dict[str, Any]], str]]] = {
    "fsdp-2": {
        "on the meta device": (_on_meta, "ValueError: attach: parameter '0.weight' is on the"),
        "custom reduce-scatter": (_custom_scatter, "RuntimeError: attach: a module's"),
        "custom all-gather": (_custom_gather, "RuntimeError: attach: a module's"),
        "nothing to train": (
            _all_frozen,
            "attach: sharded_models.Layers has no parameter that requires grad",
        ),
        "process_group": (
            _settings(process_group=lambda: dist.group.WORLD),
            "ValueError: attach: process_group must follow from how fully_shard() was applied",
        ),
        "bucket_cap_mb": (_settings(bucket_cap_mb=1), "bucket_cap_mb must follow from"),
        "init_sync": (_settings(init_sync=True), "init_sync must follow from"),
        "shard_hook": (
            _settings(shard_hook=hooks.allreduce),
            "shard_hook is for models on a mesh of two",
        ),
        "weights of another kind": (
            _settings(weights="int8"),
            "weights must be one of torch_commhook.codecs, got str",
        ),
        "weights that are few": (
            _settings(weights=lambda: codecs.topk(0.5)),
            "must be a codec that sends all",
        ),
        "weights at random": (
            _settings(weights=lambda: codecs.blockwise(rounding="stochastic")),
            "the same ones each time",
        ),
        "weights in two dtypes": (
            _gathered_in_two_dtypes,
            "gather all their parameters in one dtype",
        ),
    },
    "fsdp-4": {
        "two meshes": (
            _two_meshes,
            "over different meshes, as parameters '0.weight' and '2.weight' are",
        ),
    },
    "hsdp-4": {
        "two equal meshes": (
            _two_equal_meshes,
            "attach: the modules of sharded_models.Layers are sharded over several meshes of the "
            "same ranks; make the mesh once, and give it to each fully_shard()",
        ),
        "shard_hook that cannot": (
            _settings(shard_hook=lambda: hooks.topk(0.5)),
            "attach: shard_hook takes part in reduce-scatters, but 'topk(density=0.5)' cannot; "
            "give it as hook=, which averages across replicas",
        ),
        "shard_hook that keeps replicas apart": (
            _settings(shard_hook=lambda: hooks.local_sgd(2)),
            "but 'local_sgd(2)' cannot; give it as hook=",
        ),
        "shard_hook that clips": (
            _settings(shard_hook=lambda: hooks.clip(1.0)),
            "call torch.nn.utils.clip_grad_norm_()",
        ),
    },
    "replicate-2": {
        "shard_hook": (_settings(shard_hook=hooks.allreduce), "leaves parameters whole"),
        "weights": (_settings(weights=codecs.blockwise), "not for replicate()"),
    },
}


def _bad(rank: int, place: str, name: str) -> None:
    shard, expected = BAD[place][name]
    model = layers()
    settings = shard(model, Mesh.of(place))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _error_of(lambda: attach(model, hooks.allreduce(), **settings))
        assert expected in found, found


@pytest.mark.parametrize(
    ("place", "name"), [(f"{GLOO}{place}", name) for place in BAD for name in BAD[place]]
)
def test_what_attach_refuses(request: pytest.FixtureRequest, place: str, name: str) -> None:
    run_on(request, place, _bad, name)


@on_processes("fsdp-2")
def test_a_part_of_a_group(rank: int, place: str) -> None:
    model = layers()
    Mesh.of(place).apply([model[0], model[2]])
    assert "formed from several modules" in _error_of(lambda: attach(model[0], hooks.allreduce()))


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="see docs/torch_versions.md"
)
@on_processes("fsdp-4")
def test_several_groups_of_a_module_over_several_meshes(rank: int, place: str) -> None:
    axes = device_mesh((2, 2), ("a", "b"))
    one, other = (_fsdp_common.FSDPMeshInfo(axes[name], 0) for name in ("a", "b"))
    model = layers()

    def place_of(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), one if parameter.dim() == 1 else other)

    fully_shard(model, mesh=axes["a"], shard_placement_fn=place_of)
    message = _error_of(lambda: attach(model, hooks.allreduce()))
    assert "are sharded over different meshes" in message


@on_processes("fsdp-2")
def test_warnings_point_at_the_call(rank: int, place: str) -> None:
    model = sharded(place)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = attach(model, hooks.error_feedback(hooks.blockwise()))
        handle.replace(hooks.error_feedback(hooks.sign()))
    handle.remove()
    kept = [each for each in said if "keeps errors of whole gradients" in str(each.message)]
    assert [each.filename for each in kept] == [__file__] * 2
    assert [linecache.getline(__file__, each.lineno).strip() for each in kept] == [
        "handle = attach(model, hooks.error_feedback(hooks.blockwise()))",
        "handle.replace(hooks.error_feedback(hooks.sign()))",
    ]


@on_processes("fsdp-2")
def test_parameters_that_nobody_averages_are_named(rank: int, place: str) -> None:
    model = layers()
    fully_shard(model, mesh=Mesh.of(place).mesh, ignored_params=set(model[2].parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach(model, hooks.allreduce()).remove()
    said = [str(each.message) for each in caught if "attach:" in str(each.message)]
    assert len(said) == 2
    assert "parameter '2.weight' is in no module that fully_shard()" in said[0]


@on_processes("fsdp-2")
def test_attached_twice(rank: int, place: str) -> None:
    model = sharded(place)
    handle = attach(model, hooks.allreduce())
    message = _error_of(lambda: attach(model, hooks.allreduce()))
    assert "is attached to this model already" in message
    for other in (model[0], nn.Sequential(model)):
        message = _error_of(lambda other=other: attach(other, hooks.allreduce()))
        assert message.startswith("RuntimeError: ") and "allreduce" in message
    handle.remove()


# ---- ranks that differ ---------------------------------------------------------------------------

#: The arguments of attach on each of two ranks, which have the same model.
DIFFERENT_ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "hook": [{"hook": hooks.blockwise()}, {"hook": hooks.allreduce()}],
    "settings": [{"hook": hooks.blockwise(bits=8)}, {"hook": hooks.blockwise(bits=4)}],
    "weights": [{"weights": None}, {"weights": codecs.blockwise()}],
    "refused on one rank": [{"hook": _mean}, {"hook": hooks.allreduce()}],
}
DIFFERENT_MODELS = (
    "groups",
    "parameters",
    "frozen",
    "reduce_dtype",
    "meta device on one rank",
)


def _different_model(rank: int, place: str, name: str) -> nn.Module:
    model = Layers(5, 7 if rank else 6, 1) if name == "parameters" else layers()
    if name == "meta device on one rank" and rank:
        model.to("meta")
    settings: dict[str, Any] = {}
    if name == "reduce_dtype":
        dtype = torch.bfloat16 if rank else torch.float32
        settings["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=dtype)
    shard = at_once if name == "groups" and not rank else by_layer
    shard(model, Mesh.of(place), **settings)
    if name == "frozen":
        model[0].bias.requires_grad_(rank == 0)
    return model


@pytest.mark.parametrize("name", [*DIFFERENT_ARGUMENTS, *DIFFERENT_MODELS])
@on_processes("fsdp-2")
def test_ranks_that_attach_differently(rank: int, place: str, name: str) -> None:
    model = _different_model(rank, place, name)
    arguments: dict[str, Any] = {"hook": hooks.allreduce()}
    if name in DIFFERENT_ARGUMENTS:
        arguments |= DIFFERENT_ARGUMENTS[name][rank]
    message = _error_of(lambda: attach(model, **arguments))
    assert message.count("torch.float32") <= 2  # the first difference alone
    own = rank == (0 if name == "refused on one rank" else 1) and "one rank" in name
    expected = "attach" if own else "it failed on rank" if "one rank" in name else "must be"
    assert expected in message
    _check_plain(sharded(place), rank)


@on_processes("fsdp-4")
def test_meshes_that_differ(rank: int, place: str) -> None:
    """Two ranks shard parameters after forward, two leave them whole."""
    model = layers()
    by_layer(model, Mesh.of(place), reshard_after_forward=rank >= 2)
    message = _error_of(lambda: attach(model, hooks.allreduce()))
    assert "reshard_after_forward must be the same on all ranks" in message


@on_processes("hsdp-4")
def test_one_rank_of_a_mesh_differs(rank: int, place: str) -> None:
    """Ranks of another replica and another shard notice it, too."""
    hook = hooks.blockwise(bits=4 if rank == 3 else 8)
    message = _error_of(lambda: attach(sharded(place), hook))
    assert "the hook must be the same on all ranks" in message


# ---- models that change under a hook -------------------------------------------------------------


def _by_layer(model: nn.Module) -> None:
    by_layer(model, Mesh.of("fsdp-2"))


def _first_two(model: nn.Module) -> None:
    model[2].bias.requires_grad_(False)
    for layer in (model[0], model[2]):
        Mesh.of("fsdp-2").apply(layer)


def _shard_more(model: nn.Module) -> None:
    model.add_module("more", Layers(1, 4, 1))
    Mesh.of("fsdp-2").apply(model.more)


def _finalize_by_hand(model: nn.Module) -> None:
    model.set_manual_backward_finalization(True)


#: How the model is sharded, how it changes, and what the next step says.
CHANGES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any], str]] = {
    "fully_shard of more": (_by_layer, _shard_more, "fully_shard() was applied"),
    "fully_shard of the rest": (
        _first_two,
        lambda model: Mesh.of("fsdp-2").apply(model),
        "fully_shard() was applied",
    ),
    "set_custom_reduce_scatter": (
        _by_layer,
        lambda model: model[0].set_custom_reduce_scatter(_Custom()),
        "remove() the hook first",
    ),
    "set_custom_all_gather": (
        _by_layer,
        lambda model: model[2].set_custom_all_gather(_Custom()),
        "remove() the hook first",
    ),
    "unfrozen": (
        _first_two,
        lambda model: model[2].bias.requires_grad_(True),
        "remove() the hook and attach it again",
    ),
}
if hasattr(FSDPModule, "set_manual_backward_finalization"):
    advice = "set it to False, or remove() the hook"
    CHANGES["finalized by hand"] = (_by_layer, _finalize_by_hand, advice)


@pytest.mark.parametrize("stepped", [False, True], ids=["before a step", "after a step"])
@pytest.mark.parametrize("name", CHANGES)
@on_ranks("fsdp-2")
def test_a_model_that_changes(rank: int, place: str, name: str, stepped: bool) -> None:
    shard, change, message = CHANGES[name]
    model = layers()
    shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that nobody has sharded
        handle = attach(model, hooks.blockwise())
    if stepped:
        gradients_of_step(model, rank)
    try:
        change(model)
    except Exception as error:  # PyTorch refuses it, once a forward has run
        assert stepped, f"{type(error).__name__}: {error}"
    error = _error_of(lambda: gradients_of_step(model, rank))
    if stepped and "requires running forward through the root" in error:
        return  # by PyTorch
    assert message in error and "RuntimeError" in error, error
    handle.remove()


# ---- the handle ----------------------------------------------------------------------------------

OWN_HOOK = "attach a torch_commhook.hooks.Hook of your own"
HOOK_OF_A_PARAMETER = "use Tensor.register_post_accumulate_grad_hook"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("register_buffer_prehook", OWN_HOOK),
        ("register_prehook", OWN_HOOK),
        ("register_posthook", HOOK_OF_A_PARAMETER),
        ("register_post_accumulate_hook", HOOK_OF_A_PARAMETER),
    ],
)
@on_processes("fsdp-2", "replicate-2")
def test_hooks_around_a_hook(rank: int, place: str, name: str, advice: str) -> None:
    """An all-reduce of ``replicate()`` takes hooks around it, a reduce-scatter takes none."""
    model = sharded(place)
    handle = attach(model, hooks.allreduce())
    message = _error_of(lambda: getattr(handle, name)(lambda *arguments: None))
    gradients_of_step(model, rank)
    handle.remove()
    if place == "replicate-2" and name != "register_post_accumulate_hook":
        assert message == "no error"
    else:
        assert f"HookHandle.{name}: " in message and advice in message


@on_processes("fsdp-2")
def test_hooks_of_parameters_get_the_mean(rank: int, place: str) -> None:
    """They find and write the same with the library's hook as with none."""
    found = []
    for hook in (None, hooks.allreduce()):
        model = sharded(place)
        handle = None if hook is None else attach(model, hook)
        means: list[Tensor] = []

        def triple(parameter: Tensor, means: list[Tensor] = means) -> None:
            means.append(local(parameter.grad))
            parameter.grad.mul_(3)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(triple)
        found.append([*gradients_of_step(model, rank), *means])
        if handle is not None:
            handle.remove()
    assert len(found[0]) == 12 and same_bits(*found)


@on_processes("fsdp-2")
def test_join(rank: int, place: str) -> None:
    handle = attach(sharded(place), hooks.allreduce())
    assert "all ranks must take equally many steps" in _error_of(handle.join)
    handle.remove()
