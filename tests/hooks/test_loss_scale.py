"""Hooks under a GradScaler: what is remembered and clipped follows the scale of the gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nested_values import different_paths
from on_ranks import on_processes, on_ranks
from scaled_training import SCALES, Counted, Steps, attached, batch, gradients

from torch_commhook import codecs, hooks
from torch_commhook.hooks.expressions import parse_hook

CODECS = (
    "error_feedback(sign())",
    "error_feedback(topk(0.05))",
    "error_feedback(chunk_topk(8, 256))",
    "error_feedback(powersgd(rank=2))",
    "error_feedback(blockwise(bits=4))",
)

OTHERS = (
    "policy([('dim <= 1', allreduce()), ('0.*', error_feedback(topk(0.1)))])",
    "adaptive(20000, every=2)",
    "after(3, error_feedback(sign()), before=error_feedback(blockwise(4, 64)))",
    "momentum(topk(0.05), beta=0.9)",
)

EAGER = ("module", "views", "ddp")


def _same(found: Any, wanted: Any) -> bool:
    return not different_paths(found, wanted)


def _differing(rank: int, hook: Any, road: str, told: bool = True) -> list[str]:
    """In what a run with a scaler differs from one in eager without."""
    if road == "compiled":
        torch._dynamo.reset()
    run = Steps(road, hook, rank, scaled=True, told=told)
    plain_road = "module" if road == "compiled" else road
    plain = Steps(plain_road, hook, rank, scaled=False, told=False)
    found = []
    for number, scale in enumerate(SCALES):
        if not _same(run(scale), plain(scale)):
            found.append(f"gradients of step {number}")
    if not _same(run.handle.state_dict(), plain.handle.state_dict()):
        found.append("state")
    run.handle.remove()
    plain.handle.remove()
    return found


@pytest.mark.parametrize("road", EAGER)
@pytest.mark.parametrize("hook", CODECS + OTHERS)
@on_processes
def test_a_scale_that_changes_changes_no_bit(rank: int, hook: str, road: str) -> None:
    assert _differing(rank, hook, road) == []


@pytest.mark.parametrize("hook", [*CODECS[:4], "clip(0.5, error_feedback(blockwise(bits=4)))"])
@on_processes
def test_nor_in_compiled_autograd(rank: int, hook: str) -> None:
    assert _differing(rank, hook, "compiled") == []


@pytest.mark.parametrize("hook", CODECS)
@on_processes
def test_a_scaler_that_nobody_told_of_would_show(rank: int, hook: str) -> None:
    wrong = [f"gradients of step {number}" for number in (2, 3, 4, 5)]
    assert _differing(rank, hook, "module", False) == [*wrong, "state"]


@on_processes
def test_where_ddp_gives_way(rank: int) -> None:
    """DDP's C++ reducer gives way in the third step, in which the scale falls."""
    torch._dynamo.reset()
    hook = parse_hook("error_feedback(topk(0.05))")
    run = Steps("ddp", hook, rank, scaled=True, told=True)
    plain = Steps("ddp", hook, rank, scaled=False, told=False)
    for number, scale in enumerate(SCALES):
        run.road = plain.road = "compiled" if number > 1 else "ddp"
        assert _same(run(scale), plain(scale)), number
    assert _same(run.handle.state_dict(), plain.handle.state_dict())


@on_ranks(4)
def test_what_nodes_remember_follows_the_scale(rank: int) -> None:
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    places = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = {"intra_group": nodes[rank // 2], "inter_group": places[rank % 2]}
    hook = hooks.error_feedback(hooks.hierarchical(codecs.blockwise(4), **groups))
    assert _differing(rank, hook, "module") == []


@pytest.mark.parametrize("scaled_later", [True, False], ids=["another", "none"])
@pytest.mark.parametrize("hook", CODECS)
@on_processes
def test_a_state_is_of_no_scale(rank: int, hook: str, scaled_later: bool) -> None:
    """Steps with a scaler, and the rest under another one that begins elsewhere, or none."""
    plain = Steps("module", hook, rank, scaled=False, told=False)
    first = Steps("module", hook, rank, scaled=True, told=True)
    second = Steps("module", hook, rank, scaled=scaled_later, told=scaled_later)
    for scale in SCALES[:3]:
        plain(scale)
        first(scale)
    second.number = 3
    second.handle.load_state_dict(first.handle.state_dict())
    assert _same(second.handle.state_dict(), plain.handle.state_dict())
    second.scaler.scale(torch.zeros(()))  # which makes its scale
    for scale in (2.0**5, 2.0**7):
        assert _same(second(scale), plain(scale))


@pytest.mark.usefixtures("one_rank")
def test_a_scale_of_one_after_a_state_was_loaded() -> None:
    scaler = Counted(8.0)
    hook = parse_hook("clip(0.5, error_feedback(blockwise()))")
    model, handle = attached("module", hook, scaler=scaler)
    for scale in (8.0, 1.0):
        scaler.scale = scale
        model.zero_grad()
        (scale * model(batch(0, 0)).square().sum()).backward()
        norm = torch.cat([g.view(-1) for g in gradients(model, scale)]).norm()
        handle.load_state_dict(handle.state_dict())
    handle.remove()
    assert (norm - 0.5).abs() < 1e-3


@on_processes
def test_training_in_which_the_scaler_skips_a_step(rank: int) -> None:
    """One rank's gradients are infinite in the third step."""
    ends = []
    for scaled in (True, False):
        run = Steps("module", "error_feedback(sign())", rank, scaled=scaled, told=scaled)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.01)
        for number in range(6):
            optimizer.zero_grad()
            loss = run.model(batch(rank, number)).square().sum()
            run.scaler.scale(loss * (math.inf if number == 2 and rank == 1 else 1.0)).backward()
            if scaled or number != 2:
                run.scaler.step(optimizer)
            run.scaler.update()
        assert run.scaler.get_scale() == (SCALES[0] / 2 if scaled else 1.0)
        run.handle.remove()
        ends.append([p.detach() for p in run.model.parameters()])
    assert _same(*ends)


@on_processes
def test_a_hook_that_replaces_another_knows_the_scaler(rank: int) -> None:
    hook = parse_hook("error_feedback(topk(0.05))")
    run = Steps("module", "cast(float16)", rank, scaled=True, told=True)
    plain = Steps("module", hook, rank, scaled=False, told=False)
    run.handle.replace(hook)
    for scale in SCALES:
        assert _same(run(scale), plain(scale))


@on_ranks(2)
def test_what_local_sgd_remembers_has_no_scale(rank: int) -> None:
    """Distances between parameters have no scale."""
    states = []
    for told in (True, False):
        hook = hooks.local_sgd(2, hook=parse_hook("clip(0.1, error_feedback(topk(0.05)))"))
        run = Steps("module", hook, rank, scaled=True, told=told)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.01)
        for scale in SCALES:
            run(scale)
            run.scaler.step(optimizer)
        states.append(run.handle.state_dict())
        run.handle.remove()
    assert any(error.any() for error in states[0][f"rank{rank}"]["error"].values())
    assert _same(*states)


@pytest.mark.parametrize("road", ["module", "ddp"])
@on_processes
def test_a_rank_that_has_joined_takes_the_others_scale(rank: int, road: str) -> None:
    """Rank 0 has run out of inputs when the scale falls."""
    delivered, states = [], []
    for scaled in (True, False):
        run = Steps(road, "error_feedback(topk(0.05))", rank, scaled=scaled, told=scaled)
        with run.handle.join():
            delivered.append([run(scale) for scale in (SCALES if rank else SCALES[:2])])
        states.append(run.handle.state_dict())
    assert _same(*delivered)
    assert _same(*states)


@pytest.mark.parametrize("road", [*EAGER, "compiled"])
@on_processes
def test_clip_takes_the_norm_of_unscaled_gradients(rank: int, road: str) -> None:
    bites = Steps("module", "clip(0.5)", rank, scaled=False, told=False)
    norm = torch.cat([g.view(-1) for g in bites(1.0)]).norm()
    assert (norm - 0.5).abs() < 1e-3
    assert _differing(rank, "clip(0.5)", road) == []
