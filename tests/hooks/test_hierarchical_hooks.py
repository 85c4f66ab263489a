"""Hooks between and within nodes: values, error feedback, copies, and the groups that they take."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_reduce import fails_between
from rank_pool import RankPool
from torch import nn

from torch_commhook import GradBucket, attach, codecs, hooks
from torch_commhook.collectives import hierarchical, hierarchical_all_reduce
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.process_group import WrapperProcessGroup
from torch_commhook.testing import run_ranks


def _nodes(nodes: int, ranks: int) -> dict[str, Any]:
    rank = dist.get_rank()
    intra = inter = None
    for node in range(nodes):
        members = [node * ranks + place for place in range(ranks)]
        group = dist.new_group(members)
        intra = group if rank in members else intra
    for place in range(ranks):
        members = [node * ranks + place for node in range(nodes)]
        group = dist.new_group(members)
        inter = group if rank in members else inter
    return {"intra_group": intra, "inter_group": inter}


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize("numel", [1, 5, 1000])
def test_nodes(nodes: int, ranks: int, numel: int) -> None:
    world = nodes * ranks
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world)]

    def on_rank(rank: int) -> torch.Tensor:
        groups = _nodes(nodes, ranks)
        return hierarchical_all_reduce(
            values[rank].clone(), codecs.blockwise(), scale=1 / world, **groups
        ).wait()

    results = run_ranks(on_rank, world)
    mean = torch.stack(values).mean(0)
    for result in results:
        assert torch.equal(result, results[0])
        assert float((result - mean).abs().max()) <= 0.02 * float(mean.abs().max() + 1)


CODECS = [
    codecs.blockwise(),
    codecs.sign(),
    codecs.topk(0.1),
    codecs.randomk(0.1),
    codecs.chunk_topk(),
]


def _both_ways(rank: int, nodes: int, ranks: int) -> None:
    """Sums under way at once have the bits and bytes of such as wait for each stage."""
    groups = _nodes(nodes, ranks)
    generator = torch.Generator().manual_seed(rank)
    for codec in CODECS:
        values = [torch.randn(numel, generator=generator) for numel in (1000, 3, 5000, 1, 700)]
        found, sent = [], []
        for waits in (False, True):
            meter = WireMeter()
            with pytest.MonkeyPatch.context() as patch, counting(meter):
                if waits:
                    patch.setattr(hierarchical, "_waits_for_nothing", lambda *_: False)
                for _ in range(2):
                    started = [
                        hierarchical_all_reduce(
                            each.clone(),
                            codec,
                            **groups,
                            rounding=torch.full((2, 2), 7) if codec.is_random else None,
                        )
                        for each in values
                    ]
                    found.append([future.wait() for future in started])
            sent.append((meter.bytes_sent, meter.bytes_received))
        for results in found[1:]:
            assert all(map(torch.equal, results, found[0])), codec
        assert sent[0] == sent[1], codec


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (1, 2)])
def test_sums_under_way_at_once(two_ranks: RankPool, nodes: int, ranks: int) -> None:
    two_ranks.run(_both_ways, nodes, ranks)


def test_sums_of_two_nodes_under_way_at_once(four_ranks: RankPool) -> None:
    four_ranks.run(_both_ways, 2, 2)


def _fails_between(rank: int) -> list[str]:
    return fails_between(rank, hooks.hierarchical(codecs.blockwise(), **_nodes(2, 2)))


def test_a_rank_that_fails_between_nodes(four_ranks: RankPool) -> None:
    found = four_ranks.run(_fails_between)
    assert found.pop(2) == ["ValueError", "right"]
    assert found == [["PeerError", "right"]] * 3


def test_nodes_remember_what_they_lose() -> None:
    """Constant gradients: the mean of many results comes as near as one likes."""
    gradients = [torch.randn(333, generator=torch.Generator().manual_seed(r)) for r in range(4)]

    def on_rank(rank: int) -> torch.Tensor:
        hook = hooks.error_feedback(hooks.hierarchical(codecs.sign(), **_nodes(2, 2)))
        total = torch.zeros(333)
        parameter = torch.zeros(333, requires_grad=True)
        for _ in range(200):
            bucket = GradBucket([parameter], [gradients[rank].clone()])
            total += hook(None, bucket).wait()
        return total / 200

    mean = torch.stack(gradients).mean(0)
    for result in run_ranks(on_rank, 4):
        assert float((result - mean).norm() / mean.norm()) < 0.1


def test_copies_of_hierarchical_hooks() -> None:
    def on_rank(rank: int) -> None:
        groups = _nodes(1, 2)
        hook = hooks.error_feedback(hooks.hierarchical(codecs.sign(), **groups))
        for made in (copy.copy(hook), copy.deepcopy(hook)):
            assert str(made) == str(hook)
            assert made.hook.intra_group is groups["intra_group"]
        with pytest.raises(TypeError, match=r"hierarchical\(sign\(\).*cannot be pickled"):
            pickle.dumps(hook)

    run_ranks(on_rank, 2)


def test_groups_of_hierarchical_hooks_are_checked() -> None:
    def on_rank(rank: int) -> None:
        groups = _nodes(2, 2)
        alone = [dist.new_group([other]) for other in range(4)][rank]
        message = "must share this rank only"
        world = dist.group.WORLD
        for inter in (groups["intra_group"], world, WrapperProcessGroup(world)):
            with pytest.raises(ValueError, match=message):
                hooks.hierarchical(
                    codecs.sign(), intra_group=groups["intra_group"], inter_group=inter
                )
        with pytest.raises(TypeError, match="seed must be an int"):
            hooks.hierarchical(codecs.sign(), **groups, seed="a")
        some = hooks.hierarchical(
            codecs.sign(), intra_group=groups["intra_group"], inter_group=alone
        )
        with pytest.raises(ValueError, match=r"must have all 4 ranks .* got 1 nodes of 2 ranks"):
            attach(nn.Linear(3, 2), some)

    run_ranks(on_rank, 4)


def _as_it_is(group: Any) -> Any:
    return group


@pytest.mark.parametrize("around", [_as_it_is, WrapperProcessGroup])
def test_groups_of_hierarchical_hooks_must_be_rows_and_columns(around: Any) -> None:
    def crossed(rank: int) -> None:
        made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 3], [1, 2])]
        intra, inter = around(made[rank // 2]), around(made[2 if rank in (0, 3) else 3])
        hook = hooks.hierarchical(codecs.sign(), intra_group=intra, inter_group=inter)
        with pytest.raises(ValueError, match="must have the ranks of one position in their nodes"):
            attach(nn.Linear(3, 2), hooks.clip(1.0, hook))

    def beyond(rank: int) -> None:
        halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        alone = [dist.new_group([other]) for other in range(4)][rank]
        hook = hooks.hierarchical(
            codecs.sign(), intra_group=around(alone), inter_group=around(halves[2 + rank % 2])
        )
        with pytest.raises(ValueError, match=r"of the model only, \[.*\], got \[.*\] too"):
            attach(nn.Linear(3, 2), hook, process_group=halves[rank // 2])

    run_ranks(crossed, 4)
    run_ranks(beyond, 4)


@pytest.mark.parametrize("on_ddp", [False, True])
def test_a_hook_that_is_refused_late_leaves_the_one_before(
    two_ranks: RankPool, on_ddp: bool
) -> None:
    assert two_ranks.run(_refused_late, on_ddp) == [1.5, 1.5]


def _refused_late(rank: int, on_ddp: bool) -> float:
    alone = [dist.new_group([other]) for other in range(2)][rank]
    model = nn.Linear(1, 1, bias=False)
    made = nn.parallel.DistributedDataParallel(model) if on_ddp else model
    small = hooks.hierarchical(codecs.sign(), intra_group=alone, inter_group=alone)
    for hook in (small, hooks.local_sgd(2, hook=small)):
        with pytest.raises(ValueError, match="must have all 2 ranks"):
            attach(made, hook)
    handle = attach(made, hooks.allreduce())
    for hook in (small, hooks.local_sgd(2, hook=small)):
        with pytest.raises(ValueError, match="must have all 2 ranks"):
            handle.replace(hook)
    assert handle.is_attached and repr(handle) == "HookHandle(allreduce(), attached)"
    made(torch.full((1, 1), rank + 1.0)).sum().backward()
    handle.remove()
    assert model.weight.grad is not None
    return model.weight.grad.item()
