"""What must not change under a hook on a sharded model, or differ between ranks: errors say so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from sharded_models import (
    Custom,
    Layers,
    Mesh,
    at_once,
    by_layer,
    error_of,
    gradients_of_step,
    layers,
    local,
    on_ranks,
    own_hook,
    sharded,
    still_plain,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torch_commhook import attach, codecs, hooks

# ---- what changes under a hook -------------------------------------------------------------------


def _shard_more(model: nn.Module) -> None:
    model.add_module("more", Layers(1, 4, 1))
    fully_shard(model.more, mesh=Mesh.of("fsdp-2").mesh)


def _shard_around(model: nn.Module) -> None:
    fully_shard(model, mesh=Mesh.of("fsdp-2").mesh)


def _custom_later(model: nn.Module) -> None:
    model[0].set_custom_reduce_scatter(Custom())


def _custom_gather_later(model: nn.Module) -> None:
    model[2].set_custom_all_gather(Custom())


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
if hasattr(FSDPModule, "set_manual_backward_finalization"):
    CHANGES["finalized by hand"] = (
        lambda model: by_layer(model, Mesh.of("fsdp-2")),
        lambda model: model.set_manual_backward_finalization(True),
        "set it to False, or remove() the hook",
    )


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
        return
    error = error_of(lambda: gradients_of_step(model, rank))
    if stepped and "requires running forward through the root" in error:
        return  # by PyTorch
    assert message in error and "RuntimeError" in error, error
    handle.remove()


# ---- ranks that differ ---------------------------------------------------------------------------


def _differ_in_hook(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return sharded("fsdp-2"), {"hook": hooks.allreduce() if rank else hooks.blockwise()}


def _differ_in_settings(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return sharded("fsdp-2"), {"hook": hooks.blockwise(bits=4 if rank else 8)}


def _differ_in_weights(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return sharded("fsdp-2"), {"weights": codecs.blockwise() if rank else None}


def _differ_in_groups(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = layers()
    (by_layer if rank else at_once)(model, Mesh.of("fsdp-2"))
    return model, {}


def _differ_in_parameters(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = Layers(5, 7, 1) if rank else Layers(5, 6, 1)
    by_layer(model, Mesh.of("fsdp-2"))
    return model, {}


def _differ_in_frozen(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = sharded("fsdp-2")
    model[0].bias.requires_grad_(rank == 0)
    return model, {}


def _differ_in_reduce_dtype(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = layers()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if rank else torch.float32)
    by_layer(model, Mesh.of("fsdp-2"), mp_policy=policy)
    return model, {}


def _differ_in_refusal(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    """One rank's hook is refused."""
    return sharded("fsdp-2"), {"hook": hooks.allreduce() if rank else own_hook}


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
    return error_of(lambda: attach(model, hook, **settings)), still_plain(sharded("fsdp-2"), rank)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_attach_differently(two_ranks: RankPool, name: str) -> None:
    for rank, (message, works) in enumerate(two_ranks.run(_different, name)):
        assert message.count("torch.float32") <= 2  # the first difference alone
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
    return error_of(lambda: attach(model, hooks.allreduce()))


@pytest.mark.parametrize("place", ["fsdp-4"])
def test_meshes_that_differ(ranks: RankPool, place: str) -> None:
    for message in ranks.run(_different_meshes):
        assert "reshard_after_forward must be the same on all ranks" in message


def _replica_differs(rank: int) -> str:
    """What differs on another replica, at another place, is found across both axes."""
    model = sharded("hsdp-4")
    return error_of(lambda: attach(model, hooks.blockwise(bits=4 if rank == 3 else 8)))


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
    model = sharded(place)
    handle = attach(model, hooks.allreduce())
    message = error_of(lambda: getattr(handle, name)(lambda *arguments: None))
    gradients_of_step(model, rank)
    handle.remove()
    return message


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("register_buffer_prehook", "attach a torch_commhook.hooks.Hook of your own"),
        ("register_prehook", "attach a torch_commhook.hooks.Hook of your own"),
        ("register_posthook", "use Tensor.register_post_accumulate_grad_hook"),
        ("register_post_accumulate_hook", "use Tensor.register_post_accumulate_grad_hook"),
    ],
)
def test_hooks_around_a_reduce_scatter(two_ranks: RankPool, name: str, advice: str) -> None:
    for message in two_ranks.run(_stage, "fsdp-2", name):
        assert f"HookHandle.{name}: " in message and advice in message


def _hooks_of_parameters(rank: int) -> list[bool]:
    """What they find and write, with the library's hook and with none."""
    found = []
    for hook in (None, hooks.allreduce()):
        model = sharded("fsdp-2")
        handle = None if hook is None else attach(model, hook)
        means: list[Tensor] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, means=means: (
                    means.append(local(parameter.grad).clone()),
                    parameter.grad.mul_(3),
                )
            )
        found.append([*gradients_of_step(model, rank), *means])
        if handle is not None:
            handle.remove()
    plain, hooked = found
    return [one.equal(other) for one, other in zip(hooked, plain, strict=True)]


def test_hooks_of_parameters_get_the_mean(two_ranks: RankPool) -> None:
    assert two_ranks.run(_hooks_of_parameters) == [[True] * 12] * 2


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
    handle = attach(sharded("fsdp-2"), hooks.allreduce())
    message = error_of(handle.join)
    handle.remove()
    return message


def test_join(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_join):
        assert "all ranks must take equally many steps" in message


def _attached_twice(rank: int) -> list[str]:
    model = sharded("fsdp-2")
    handle = attach(model, hooks.allreduce())
    found = [error_of(lambda: attach(model, hooks.allreduce()))]
    found.append(error_of(lambda: attach(model[0], hooks.allreduce())))
    found.append(error_of(lambda: attach(nn.Sequential(model), hooks.allreduce())))
    handle.remove()
    return found


def test_attached_twice(two_ranks: RankPool) -> None:
    for same, part, around in two_ranks.run(_attached_twice):
        assert "is attached to this model already" in same
        for message in (part, around):
            assert message.startswith("RuntimeError: ") and "allreduce" in message
