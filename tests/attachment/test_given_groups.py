"""Hooks over process groups that a user gave them, after a step that failed; names of groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from launched_ranks import launched
from mode_cases import Mode, OwnError, batch, equal, gradients, module, outcome
from on_ranks import on_processes
from torch import nn
from torch.distributed import distributed_c10d

from torch_commhook import GradBucket, PeerError, attach, collectives, hooks
from torch_commhook.codecs import CODECS


class Failure:
    """Raises in one call of :func:`may_fail`, when it is told to."""

    calls = -1


@torch.library.custom_op("commhook_tests::may_fail", mutates_args=())
def may_fail(x: torch.Tensor) -> torch.Tensor:
    # An operator, so that compiled code does it when it runs, not when it is traced.
    Failure.calls -= 1
    if Failure.calls == 0:
        raise OwnError("boo")
    return x.clone()


@may_fail.register_fake
def _may_fail_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _over_given_groups(kind: str) -> hooks.Hook:
    if kind == "one stage":
        return hooks.cast(process_group=dist.new_group())
    if kind == "two stages":
        return hooks.blockwise(process_group=dist.new_group())
    if kind == "nodes":
        alone, everybody = dist.new_subgroups(1)[0], dist.new_group()
        return hooks.hierarchical(CODECS["blockwise"](), intra_group=alone, inter_group=everybody)
    if kind == "C++":
        return hooks.cpp("cast", process_group=dist.new_group())
    assert kind == "policy", kind
    rules = [("dim <= 1", hooks.allreduce(process_group=dist.new_group()))]
    return hooks.policy(rules, hooks.blockwise(process_group=dist.new_group()))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("one stage", Mode("ddp", "eager")),
        ("two stages", Mode("ddp", "eager")),
        ("C++", Mode("ddp", "eager")),
        ("nodes", Mode("module", "eager")),
        ("C++", Mode("module", "eager")),
        ("policy", Mode("module", "eager")),
        ("two stages", Mode("module", "context", backend="aot_eager")),
        ("nodes", Mode("module", "context", backend="aot_eager")),
    ],
    ids=str,
)
@on_processes
def test_hooks_over_groups_that_they_were_given(rank: int, kind: str, mode: Mode) -> None:
    """Groups of a user's: the library has others in their place, and connects these anew."""
    torch._dynamo.reset()
    model = mode.wrap(module())
    handle = attach(model, _over_given_groups(kind), **mode.attach_options)
    handle.register_prehook(lambda gradients: tuple(map(may_fail, gradients)))
    # What compiled code waits for may fail with the backend's own error.
    ended = {"PeerError", "RuntimeError"} if mode.compiles_backward else {"PeerError"}
    with mode.step_function(model) as step:
        for _ in range(2):
            model.zero_grad()
            step(batch(rank, 1))
        want = gradients(model)
        # Of compiled code that has sent something, PyTorch keeps what it has not waited for.
        calls = (1, 1, 1) if mode.compiles_backward else (2, 1, 4)
        for fails, call in zip((0, 1, 1), calls, strict=True):
            Failure.calls = call if rank == fails else -1
            model.zero_grad()
            raised = outcome(lambda: step(batch(rank, 1))).partition(":")[0]
            assert raised in ({"OwnError"} if rank == fails else ended), fails
            model.zero_grad()
            step(batch(rank, 1))
            assert equal(gradients(model), want), fails
    handle.remove()


@pytest.mark.parametrize("on", ["DDP", "module"])
@on_processes
def test_a_group_that_was_destroyed(rank: int, on: str) -> None:
    """It is refused, and the model takes another hook afterwards."""
    group = dist.new_group()
    model = torch.nn.Linear(3, 2)
    if on == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    hook = hooks.cast(process_group=group)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="has been destroyed"):
        attach(model, hook)
    if on == "module":
        with pytest.raises(ValueError, match="has been destroyed"):
            attach(model, hooks.allreduce(), process_group=group)
    attach(model, hooks.allreduce())
    model(torch.full((1, 3), float(rank))).sum().backward()
    (weight, _) = model.parameters()
    assert (weight.grad == 0.5).all()


# ---- the descriptions of groups ------------------------------------------------------------------

BLOCKWISE = hooks.blockwise()


def described(rank: int) -> set[str]:
    """The descriptions of all groups after two steps, between which one has failed."""
    dist.init_process_group("gloo")
    own = dist.new_group(group_desc="a group of mine")
    collectives.compressed_all_reduce(torch.ones(500), BLOCKWISE.codec, group=own).wait()
    fails = False

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if fails and rank == 0:
            raise ValueError("on purpose")
        return BLOCKWISE(None, bucket)

    model = nn.Linear(20, 20)
    handle = attach(model, hook)
    for fails in (False, True, False):
        if fails:
            with pytest.raises(ValueError if rank == 0 else PeerError):
                model(torch.ones(2, 20)).sum().backward()
        else:
            model(torch.ones(2, 20)).sum().backward()
    known = {group.group_desc for group in distributed_c10d._world.pg_map}
    handle.remove()
    dist.barrier()
    dist.destroy_process_group()
    return known


def test_groups_have_descriptions() -> None:
    for known in launched(described):
        own = {each for each in known if each.startswith("commhook")}
        assert own == {"commhook: gradients over default_pg"}
