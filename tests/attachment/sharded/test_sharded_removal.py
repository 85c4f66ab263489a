"""Hooks that are removed from a sharded model or that fail there, and the steps after that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_models import (
    TRAPS,
    Failing,
    Mesh,
    batch,
    by_layer,
    check_outcome,
    gradients_of_step,
    local,
    loss_of,
    new_model,
    on_processes,
    on_ranks,
    one_step,
    reshard,
    same_bits,
    sharded,
    sharded_modules,
    trap_of,
    with_traps,
)
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_commhook import attach, codecs, hooks
from torch_commhook.attachment.sharded.fsdp import param_groups

PLACES = ["fsdp-2", "hsdp-4", "replicate-2"]


def _settings(place: str) -> dict[str, Any]:
    """All that can be attached."""
    found: dict[str, Any] = {}
    if not place.startswith("replicate"):
        found["weights"] = codecs.blockwise()
    if place.startswith("hsdp"):
        found["shard_hook"] = hooks.error_feedback(hooks.blockwise())
    return found


def _form(value: Any) -> Any:
    """By which an attribute is compared: PyTorch makes some of them anew in each step."""
    named = type(value).__module__, type(value).__qualname__
    return named if isinstance(value, (list, Tensor)) or named[0].startswith("torch") else value


def _attributes(model: nn.Module) -> list[dict[str, Any]]:
    found = [{name: _form(value) for name, value in vars(g).items()} for g in param_groups(model)]
    found += [{n: id(v) for n, v in vars(g.mesh_info).items()} for g in param_groups(model)]
    for module in sharded_modules(model):
        state = vars(module._get_fsdp_state())
        found.append({name: _form(value) for name, value in state.items()})
        found.append({"hooks": len(module._forward_pre_hooks), "after": len(module._forward_hooks)})
        found.append({name: _form(value) for name, value in vars(module).items()})
    return found


def _world() -> dict[str, set[str]]:
    """The names of groups that ``torch.distributed`` knows."""
    world = distributed_c10d._world
    return {
        "names": set(world.pg_names.values()),
        "ranks": {world.pg_names.get(g, "?") for g in world.pg_group_ranks},
        "map": {world.pg_names.get(g, "?") for g in world.pg_map},
        "configs": {world.pg_names.get(g, "?") for g in world.pg_backend_config},
        "tags": {
            world.pg_names.get(g, "?") for groups in world.tags_to_pg.values() for g in groups
        },
    }


def _changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    found = []
    for one, other in zip(before, after, strict=True):
        for name in one.keys() | other.keys():
            if one.get(name) != other.get(name):
                found.append(f"{name}: {one.get(name)} has become {other.get(name)}")
    return found


@on_ranks(*PLACES, "gloo-hsdp-4")
def test_nothing_is_left_on_torchs_objects(rank: int, place: str) -> None:
    model = sharded(place)
    expected = gradients_of_step(model, rank)
    before, world = _attributes(model), _world()
    handle = attach(model, hooks.error_feedback(hooks.blockwise()), **_settings(place))
    gradients_of_step(model, rank)
    handle.remove()
    assert _changes(before, _attributes(model)) == []
    assert _world() == world
    assert same_bits(gradients_of_step(model, rank), expected)


@on_ranks(*PLACES)
def test_hooks_in_turn(rank: int, place: str) -> None:
    """Hooks one after another, and none between them."""
    model = sharded(place)
    expected = gradients_of_step(model, rank)
    handle = attach(model, hooks.blockwise(), **_settings(place))
    assert not same_bits(gradients_of_step(model, rank), expected), "the hook does nothing"
    handle.remove()
    assert same_bits(gradients_of_step(model, rank), expected), "removed"
    handle = attach(model, hooks.allreduce())
    assert same_bits(gradients_of_step(model, rank), expected), "attached again"
    handle.replace(hooks.cast())
    assert not same_bits(gradients_of_step(model, rank), expected), "replaced, and nothing done"
    handle.replace(hooks.allreduce())
    assert same_bits(gradients_of_step(model, rank), expected), "replaced"
    handle.remove()
    assert same_bits(gradients_of_step(model, rank), expected)
    assert not handle.is_attached


@pytest.mark.parametrize("remove", [True, False], ids=["removed", "attached"])
@on_processes(*PLACES)
def test_model_and_hook_are_collected(rank: int, place: str, remove: bool) -> None:
    model, hook = sharded(place), hooks.error_feedback(hooks.blockwise())
    world = _world()  # with the groups of a mesh, which the tests keep
    handle = attach(model, hook, **_settings(place))
    gradients_of_step(model, rank)
    if remove:
        handle.remove()
    road = weakref.ref(handle._first_road)
    left = {"model": weakref.ref(model), "hook": weakref.ref(hook), "road": road}
    memory = weakref.ref(handle._attached.memory)
    del model, hook, handle
    gc.collect()
    gc.collect()  # what the table of models had, which has lost the model now
    assert [name for name, each in {**left, "memory": memory}.items() if each() is not None] == []
    dist.barrier()
    assert _world() == world


class _Custom:
    """A reduce-scatter of the user's own."""

    calls = 0

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self.calls += 1
        options.pop("async_op", None)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, **options)


@on_ranks("fsdp-2")
def test_remove_leaves_what_was_set_later(rank: int, place: str) -> None:
    model = sharded("fsdp-2")
    expected = gradients_of_step(model, rank)
    handle = attach(model, hooks.blockwise())
    custom = _Custom()
    model[0].set_custom_reduce_scatter(custom)
    with pytest.raises(RuntimeError, match=r"remove\(\) the hook"):
        gradients_of_step(model, rank)
    handle.remove()
    assert same_bits(gradients_of_step(model, rank), expected)
    assert custom.calls == 1


@on_ranks(*PLACES)
def test_removed_in_backward(rank: int, place: str) -> None:
    model = sharded(place)
    expected = gradients_of_step(model, rank)
    handle = attach(model, hooks.allreduce())
    model.zero_grad()
    output = model(batch(rank, 0))
    output.register_hook(lambda gradient: handle.remove())
    loss_of(output).backward()
    reshard(model)
    got = [local(p.grad) for p in model.parameters()]
    assert same_bits(got, expected), "in that backward"
    assert same_bits(gradients_of_step(model, rank), expected), "in the next"


@on_ranks(*PLACES)
def test_state_dict_of_a_model_with_a_hook(rank: int, place: str) -> None:
    """The model's own state, which ranks save and load as without a hook."""
    model = sharded(place)
    names = list(model.state_dict())
    settings = _settings(place)
    settings.pop("shard_hook", None)  # which would remember what it has lost
    handle = attach(model, hooks.error_feedback(hooks.blockwise()), **settings)
    expected = gradients_of_step(model, rank)
    state = {name: local(value) for name, value in model.state_dict().items()}
    assert list(state) == names
    values = model.state_dict()
    values = {name: value.detach().clone() for name, value in values.items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_state_dict(values)
    handle.replace(handle.hook)
    assert same_bits(gradients_of_step(model, rank), expected)
    handle.remove()


# ---- steps that fail on one rank -----------------------------------------------------------------

FAILING_PLACES = ["fsdp-2", "fsdp-3", "hsdp-4", "replicate-2"]


def _in_turn(
    rank: int, place: str, model: Any, set_trap: Callable[[bool], None], **settings: Any
) -> None:
    """Each rank fails in a step of its own, between two that work."""
    expected = [one_step(new_model(place), rank, number) for number in range(2)]
    handle = attach(model, **settings)
    for fails in range(int(place[-1])):
        set_trap(rank == fails)
        check_outcome(model, rank, 5, fails)
        set_trap(False)
        for number in range(2):
            got = one_step(model, rank, number)
            assert same_bits(got, expected[number]), f"after rank {fails} has failed, {number}"
    handle.remove()
    assert same_bits(one_step(model, rank, 0), expected[0]), "removed"


@pytest.mark.parametrize("calls", range(3))
@on_processes(*FAILING_PLACES)
def test_a_hook_that_fails(rank: int, place: str, calls: int) -> None:
    hook = Failing()
    _in_turn(rank, place, new_model(place), partial(hook.set, calls), hook=hook)


@on_processes("hsdp-4")
def test_a_shard_hook_that_fails(rank: int, place: str) -> None:
    beside = Failing()
    hook = hooks.allreduce()
    _in_turn(rank, place, new_model(place), partial(beside.set, 1), hook=hook, shard_hook=beside)


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("where", TRAPS)
@on_processes(*FAILING_PLACES)
def test_an_exception_in_the_model(rank: int, place: str, where: str, what: str) -> None:
    model = new_model(place)
    _in_turn(rank, place, model, partial(trap_of(model, where).set, what), hook=Failing())


@pytest.mark.parametrize(("where", "what"), [("middle", "forward"), ("last", "backward")])
@on_processes("fsdp-2", "hsdp-4")
def test_asynchronous_unshard(rank: int, place: str, where: str, what: str) -> None:
    """As the other ranks wait for the parameters in a Work that FSDP has been given."""
    for settings in ({}, {"weights": codecs.blockwise()} if place.startswith("fsdp") else {}):
        model = new_model(place)
        model._set_unshard_async_op(True)
        handle = attach(model, hooks.allreduce(), **settings)
        for fails in range(int(place[-1])):
            before = one_step(model, rank, 1)
            trap_of(model, where).raises_in = what if rank == fails else ""
            check_outcome(model, rank, 5, fails)
            trap_of(model, where).raises_in = ""
            assert same_bits(one_step(model, rank, 1), before), f"after rank {fails}"
        handle.remove()


@on_processes(*FAILING_PLACES)
def test_a_hook_removed_after_a_failure(rank: int, place: str) -> None:
    model, hook = new_model(place), Failing()
    handle = attach(model, hook)
    hook.fails_in = 1 if rank == 0 else None
    check_outcome(model, rank, 0, 0)
    handle.remove()
    expected = one_step(new_model(place), rank, 0)
    assert same_bits(one_step(model, rank, 0), expected), "removed"
    handle = attach(model, hooks.allreduce())
    assert same_bits(one_step(model, rank, 0), expected), "attached again"
    handle.remove()


@pytest.mark.parametrize("has_stages", [False, True])
@on_processes(*FAILING_PLACES)
def test_a_hook_replaced_after_a_failure(rank: int, place: str, has_stages: bool) -> None:
    model, hook = new_model(place), Failing()
    handle = attach(model, hook)
    hook.fails_in = 1 if rank == 0 else None
    check_outcome(model, rank, 0, 0)
    if has_stages:  # for which connections are made, while the others are lost
        handle.replace(hooks.blockwise())
        one_step(model, rank, 0)
    handle.replace(hooks.allreduce())
    assert same_bits(one_step(model, rank, 0), one_step(new_model(place), rank, 0))
    handle.remove()


@pytest.mark.parametrize("in_float32", [False, True])
@on_processes(*FAILING_PLACES)
def test_gradients_that_had_added_up(rank: int, place: str, in_float32: bool) -> None:
    """What had added up on some rank does not come into the next step."""
    model, plain, hook = with_traps(), with_traps(), Failing()
    dtypes = (torch.bfloat16, torch.float32) if in_float32 else ()
    for each in (model, plain):
        by_layer(each, Mesh.of(place), mp_policy=MixedPrecisionPolicy(*dtypes))
    handle = attach(model, hook)
    with handle.no_sync():
        one_step(model, rank, 3)
    hook.fails_in = 1 if rank == 1 else None
    check_outcome(model, rank, 0, 1)
    hook.fails_in = None
    assert same_bits(one_step(model, rank, 0), one_step(plain, rank, 0))
    handle.remove()
