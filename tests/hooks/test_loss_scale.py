"""Hooks under a GradScaler: what is remembered and clipped follows the scale of the gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nested_values import different_paths
from on_ranks import on_ranks
from rank_pool import RankPool
from scaled_training import SCALES, Counted, Steps, attached, batch, gradients
from torch import Tensor

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
def test_a_scale_that_changes_changes_no_bit(two_ranks: RankPool, hook: str, road: str) -> None:
    assert two_ranks.run(_differing, hook, road) == [[], []]


@pytest.mark.parametrize("hook", [*CODECS[:4], "clip(0.5, error_feedback(blockwise(bits=4)))"])
def test_nor_in_compiled_autograd(two_ranks: RankPool, hook: str) -> None:
    assert two_ranks.run(_differing, hook, "compiled", timeout=120) == [[], []]


@pytest.mark.parametrize("hook", CODECS)
def test_a_scaler_that_nobody_told_of_would_show(two_ranks: RankPool, hook: str) -> None:
    wrong = [f"gradients of step {number}" for number in (2, 3, 4, 5)]
    assert two_ranks.run(_differing, hook, "module", False) == [[*wrong, "state"]] * 2


def _taken_over(rank: int) -> list[bool]:
    """DDP's C++ reducer gives way in the third step, in which the scale falls."""
    torch._dynamo.reset()
    hook = parse_hook("error_feedback(topk(0.05))")
    run = Steps("ddp", hook, rank, scaled=True, told=True)
    plain = Steps("ddp", hook, rank, scaled=False, told=False)
    found = []
    for number, scale in enumerate(SCALES):
        run.road = plain.road = "compiled" if number > 1 else "ddp"
        found.append(_same(run(scale), plain(scale)))
    return [*found, _same(run.handle.state_dict(), plain.handle.state_dict())]


def test_where_ddp_gives_way(two_ranks: RankPool) -> None:
    assert two_ranks.run(_taken_over) == [[True] * 7] * 2


@on_ranks(4)
def test_what_nodes_remember_follows_the_scale(rank: int) -> None:
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    places = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = {"intra_group": nodes[rank // 2], "inter_group": places[rank % 2]}
    hook = hooks.error_feedback(hooks.hierarchical(codecs.blockwise(4), **groups))
    assert _differing(rank, hook, "module") == []


def _in_halves(rank: int, hook: str, scaled_later: bool) -> list[bool]:
    """Steps with a scaler, and the rest under another one that begins elsewhere, or none."""
    plain = Steps("module", hook, rank, scaled=False, told=False)
    first = Steps("module", hook, rank, scaled=True, told=True)
    second = Steps("module", hook, rank, scaled=scaled_later, told=scaled_later)
    for scale in SCALES[:3]:
        plain(scale)
        first(scale)
    second.number = 3
    second.handle.load_state_dict(first.handle.state_dict())
    loaded = _same(second.handle.state_dict(), plain.handle.state_dict())
    second.scaler.scale(torch.zeros(()))  # which makes its scale
    same = [_same(second(scale), plain(scale)) for scale in (2.0**5, 2.0**7)]
    return [loaded, *same]


@pytest.mark.parametrize("scaled_later", [True, False], ids=["another", "none"])
@pytest.mark.parametrize("hook", CODECS)
def test_a_state_is_of_no_scale(two_ranks: RankPool, hook: str, scaled_later: bool) -> None:
    assert two_ranks.run(_in_halves, hook, scaled_later) == [[True] * 3] * 2


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


def _skipped(rank: int, scaled: bool) -> list[Tensor]:
    """Training in which one rank's gradients are infinite in the third step."""
    run = Steps("module", parse_hook("error_feedback(sign())"), rank, scaled=scaled, told=scaled)
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
    return [p.detach() for p in run.model.parameters()]


def test_training_in_which_the_scaler_skips_a_step(two_ranks: RankPool) -> None:
    scaled, plain = two_ranks.run(_skipped, True), two_ranks.run(_skipped, False)
    assert all(_same(*both) for both in zip(scaled, plain, strict=True))


def _replaced(rank: int) -> bool:
    hook = parse_hook("error_feedback(topk(0.05))")
    run = Steps("module", parse_hook("cast(float16)"), rank, scaled=True, told=True)
    plain = Steps("module", hook, rank, scaled=False, told=False)
    run.handle.replace(hook)
    return all([_same(run(scale), plain(scale)) for scale in SCALES])


def test_a_hook_that_replaces_another_knows_the_scaler(two_ranks: RankPool) -> None:
    assert two_ranks.run(_replaced) == [True, True]


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


def _joined(rank: int, road: str) -> bool:
    """Rank 0 has run out of inputs when the scale falls. What all ranks have yet to send."""
    run = Steps(road, parse_hook("error_feedback(topk(0.05))"), rank, scaled=True, told=True)
    delivered = []
    with run.handle.join():
        for scale in SCALES if rank else SCALES[:2]:
            delivered.append(run(scale))
    plain = Steps(road, parse_hook("error_feedback(topk(0.05))"), rank, scaled=False, told=False)
    with plain.handle.join():
        for number, scale in enumerate(SCALES if rank else SCALES[:2]):
            assert _same(plain(scale), delivered[number]), number
    return _same(run.handle.state_dict(), plain.handle.state_dict())


@pytest.mark.parametrize("road", ["module", "ddp"])
def test_a_rank_that_has_joined_takes_the_others_scale(two_ranks: RankPool, road: str) -> None:
    assert two_ranks.run(_joined, road) == [True, True]


def _clipped(rank: int, hook: str, road: str) -> tuple[list[str], bool]:
    bites = Steps("module", hook, rank, scaled=False, told=False)
    norm = torch.cat([g.view(-1) for g in bites(1.0)]).norm()
    return _differing(rank, hook, road), bool((norm - 0.5).abs() < 1e-3)


@pytest.mark.parametrize("road", [*EAGER, "compiled"])
def test_clip_takes_the_norm_of_unscaled_gradients(two_ranks: RankPool, road: str) -> None:
    assert two_ranks.run(_clipped, "clip(0.5)", road) == [([], True)] * 2
