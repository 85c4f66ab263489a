"""Hierarchical hooks: with groups that are given or found, on two levels or more."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all_ranks, on_processes, on_ranks
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import Elastic, GradBucket, PeerError, attach, codecs, hooks
from torch_commhook.collectives import hierarchical_all_reduce
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.process_group import WrapperProcessGroup
from torch_commhook.testing import run_ranks, simulate

# The package's names for the modules are those of the class and the function.
_module = importlib.import_module("torch_commhook.hooks.hierarchical")
_collective = importlib.import_module("torch_commhook.collectives.hosts")

EXACT = codecs.topk(1.0)


@contextmanager
def hosts(*of_rank: int) -> Iterator[None]:
    """Let ranks be on these hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_module, "label_of_host", lambda: f"host {of_rank[dist.get_rank()]}")
        yield


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


# ---- the mean ------------------------------------------------------------------------------------


def gradients(ranks: int, numel: int = 1000) -> list[list[Tensor]]:
    return [[torch.randn(numel, generator=torch.Generator().manual_seed(r))] for r in range(ranks)]


HOSTS = [
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 0, 0),
    (0, 1, 2, 3),
    (0, 0, 1, 1, 1, 1),
    (1, 0, 0, 0),
    (0, 0, 0, 1, 1, 1, 2, 2, 2),
]


@pytest.mark.parametrize("of_rank", HOSTS)
@pytest.mark.parametrize("numel", [1, 7, 1000])
@pytest.mark.filterwarnings("ignore:.*has units of")
@pytest.mark.filterwarnings("ignore:.*take more bytes than cast")
def test_the_mean_over_hosts(of_rank: tuple[int, ...], numel: int) -> None:
    every = gradients(len(of_rank), numel)
    with hosts(*of_rank):
        exact = simulate(hooks.hierarchical(EXACT), every)
        lossy = simulate(hooks.error_feedback(hooks.hierarchical(codecs.blockwise())), every)
    plain = simulate(hooks.allreduce(), every)
    assert exact.error <= max(1e-6, 2 * plain.error)
    assert lossy.error <= 0.02
    # The bits of all ranks are the same.
    assert torch.equal(exact.result[0], exact.results[-1][0])
    assert torch.equal(lossy.result[0], lossy.results[-1][0])


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize("numel", [1, 5, 1000])
def test_the_mean_over_nodes(nodes: int, ranks: int, numel: int) -> None:
    world = nodes * ranks
    values = [one for (one,) in gradients(world, numel)]

    def on_rank(rank: int) -> Tensor:
        return hierarchical_all_reduce(
            values[rank].clone(), codecs.blockwise(), scale=1 / world, **_nodes(nodes, ranks)
        ).wait()

    results, mean = run_ranks(on_rank, world), torch.stack(values).mean(0)
    for result in results:
        assert torch.equal(result, results[0])
        assert float((result - mean).abs().max()) <= 0.02 * float(mean.abs().max() + 1)


LEVELS = [
    ([2, 2], 8, (2, 2, 2)),
    ([2, 3], 12, (2, 3, 2)),
    ([3, 1, 2], 12, (3, 2, 2)),
    ([2, 2, 2], 16, (2, 2, 2, 2)),
    ([2, 4], 8, (2, 4, 1)),
    ([1, 1], 4, (4,)),
]


def _run(hook: hooks.Hook, gradient: Tensor) -> Tensor:
    bucket = GradBucket([torch.zeros_like(gradient, requires_grad=True)], [gradient])
    result: Tensor = hook(None, bucket).wait()
    return result


@pytest.mark.parametrize(("levels", "ranks", "sizes"), LEVELS)
@pytest.mark.parametrize("numel", [1, 5, 1001])
@pytest.mark.filterwarnings("ignore:.*take more bytes than cast")
def test_more_levels(levels: list[int], ranks: int, sizes: tuple[int, ...], numel: int) -> None:
    every = [one for (one,) in gradients(ranks, numel)]
    mean = torch.stack(every).double().mean(0)

    def on_rank(rank: int) -> Tensor:
        hook = hooks.hierarchical(EXACT, levels=levels)
        result = _run(hook, every[rank])
        assert hook.sizes == sizes
        return result

    found = run_ranks(on_rank, ranks)
    for result in found:
        assert torch.equal(result, found[0])
        assert float((result - mean).norm()) <= 1e-6 * float(mean.norm())


@hosts(0, 0, 1, 1, 2, 2, 3, 3)
@on_ranks(8)
def test_labels_of_racks(rank: int) -> None:
    """Hosts of two ranks; racks of two hosts, which lie between each other."""
    hook = hooks.hierarchical(EXACT, levels=["host", f"rack={rank // 2 % 2}"])
    handle = attach(nn.Linear(2, 2), hook)
    groups = of_all_ranks([dist.get_process_group_ranks(group) for group in hook.own_groups()])
    handle.remove()
    assert str(hook) == "hierarchical(topk(density=1.0), levels=['host', 'rack'])"
    assert hook.sizes == (2, 2, 2)
    assert groups[0] == [[0, 1], [0, 4], [0, 2]]
    assert groups[7] == [[6, 7], [3, 7], [5, 7]]


@on_ranks(4)
def test_nodes_remember_what_they_lose(rank: int) -> None:
    """Constant gradients: the mean of many results comes as near as one likes."""
    every = [one for (one,) in gradients(4, 333)]
    hook = hooks.error_feedback(hooks.hierarchical(codecs.sign(), **_nodes(2, 2)))
    total = torch.zeros(333)
    parameter = torch.zeros(333, requires_grad=True)
    for _ in range(200):
        bucket = GradBucket([parameter], [every[rank].clone()])
        total += hook(None, bucket).wait()
    mean = torch.stack(every).mean(0)
    assert float((total / 200 - mean).norm() / mean.norm()) < 0.1


@pytest.mark.parametrize(("levels", "ranks"), [([2], 8), ([4], 8), ([2, 2], 8), ([8, 4], 128)])
def test_traffic_of_each_level(levels: list[int], ranks: int) -> None:
    """Messages of a share once for each level, exact inside and encoded between the last units."""
    numel, codec = 1 << 12, codecs.blockwise()

    def on_rank(rank: int) -> list[int]:
        hook = hooks.hierarchical(codec, levels=levels)
        _run(hook, torch.ones(numel))
        return [_simulated(group).bytes_sent for group in hook.own_groups()]

    wanted, share = [], 4 * numel
    for size in levels:
        share //= size
        wanted.append(2 * share * (size - 1))
    nodes = ranks // math.prod(levels)
    elements = numel // math.prod(levels)
    sizes = [segment.nbytes for segment in codec.segments(elements, nodes)]
    for rank, sent in enumerate(run_ranks(on_rank, ranks, timeout=120)):
        assert sent[:-1] == wanted, rank
        # To each of the other nodes its segment, and to all of them the own sum, padded alike.
        place = rank // math.prod(levels)
        assert sent[-1] == sum(sizes) - sizes[place] + max(sizes) * (nodes - 1)


def _simulated(group: Any) -> Any:
    return group if hasattr(group, "bytes_sent") else group._get_backend(torch.device("cpu"))


# ---- what it becomes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_rank", "plain"),
    [((0, 0, 0, 0), "allreduce()"), ((0, 1, 2, 3), "error_feedback(blockwise())")],
    ids=["one host", "one rank a host"],
)
@pytest.mark.parametrize("kind", ["module", "ddp"])
def test_one_host_or_one_rank_a_host(kind: str, of_rank: tuple[int, ...], plain: str) -> None:
    with hosts(*of_rank):
        found = run_ranks(_steps, 4, "error_feedback(hierarchical(blockwise()))", kind)
    for (own, state), (wanted, wanted_state) in zip(
        found, run_ranks(_steps, 4, plain, kind), strict=True
    ):
        assert all(map(torch.equal, own, wanted))
        assert _kinds(state) == _kinds(wanted_state)


def _kinds(state: dict[str, Any]) -> set[str]:
    """The kinds of memory in a hook's state."""
    return {kind for value in state.values() if isinstance(value, dict) for kind in value}


def _steps(
    rank: int, hook: hooks.Hook | str, kind: str, steps: int = 3
) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 30))
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.003)
        handle = attach(model, hook)
    else:
        handle = attach(model, hook, bucket_cap_mb=0.003)
    forward: Any = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
    found = []
    for step in range(steps):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        forward(torch.randn(4, 40, generator=generator)).square().sum().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    state = handle.state_dict()
    handle.remove()
    return found, state


# ---- on processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["module", "ddp", "compiled"])
def test_hosts_of_processes(four_ranks: RankPool, kind: str) -> None:
    """The same bits as with groups that are given."""
    every = four_ranks.run(_on_two_hosts, kind)
    for found in every:
        assert all(map(torch.equal, found, every[0]))


def _on_two_hosts(rank: int, kind: str) -> list[Tensor]:
    with hosts(0, 1, 0, 1):
        own = hooks.error_feedback(hooks.hierarchical(codecs.blockwise()))
        found, _ = _steps(rank, own, kind)
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    given = hooks.hierarchical(
        codecs.blockwise(), intra_group=groups[rank % 2], inter_group=groups[2 + rank // 2]
    )
    wanted, _ = _steps(rank, hooks.error_feedback(given), kind)
    assert all(map(torch.equal, found, wanted))
    mean, _ = _steps(rank, hooks.allreduce(), kind, steps=1)
    for one, other in zip(found, mean, strict=False):
        assert float((one - other).norm()) <= 0.02 * float(other.norm())
    return found


@on_processes
def test_processes_of_one_machine(rank: int) -> None:
    hook = hooks.hierarchical(codecs.blockwise())
    attach(nn.Linear(2, 2), hook).remove()
    assert hook.sizes == (2, 1)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    ranks = RankPool(8)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("kind", ["module", "ddp", "compiled"])
def test_three_levels_of_processes(eight_ranks: RankPool, kind: str) -> None:
    every = eight_ranks.run(_of_three_levels, kind)
    for found in every:
        assert all(map(torch.equal, found, every[0]))


def _of_three_levels(rank: int, kind: str) -> list[Tensor]:
    hook = hooks.hierarchical(EXACT, levels=[2, 2])
    found, _ = _steps(rank, hook, kind, steps=2)
    mean, _ = _steps(rank, hooks.allreduce(), kind, steps=2)
    for one, other in zip(found, mean, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return found


# ---- under way at once ---------------------------------------------------------------------------

CODECS = [
    codecs.blockwise(),
    codecs.sign(),
    codecs.topk(0.1),
    codecs.randomk(0.1),
    codecs.chunk_topk(),
]


def _both_ways(rank: int, shape: tuple[int, int] | None) -> None:
    """Compare sums under way at once with sums that wait for each stage.

    Args:
        rank: this process's.
        shape: the number of nodes and of ranks on each; None for three levels.
    """
    if shape is None:
        hook = hooks.hierarchical(CODECS[0], levels=[2, 2])
        attach(nn.Linear(2, 2), hook).remove()
        groups: Any = {"intra_group": hook.intra_groups, "inter_group": hook.inter_group}
    else:
        groups = _nodes(*shape)
    generator = torch.Generator().manual_seed(rank)
    values = [torch.randn(numel, generator=generator) for numel in (1000, 3, 5000, 1, 700)]
    for codec in CODECS[:1] if shape is None else CODECS:
        rounding = torch.full((2, 2), 7) if codec.is_random else None
        found, sent = [], []
        for waits in (False, True, False):
            meter = WireMeter()
            with pytest.MonkeyPatch.context() as patch, counting(meter):
                if waits:
                    patch.setattr(_collective, "_waits_for_nothing", lambda *_: False)
                started = [
                    hierarchical_all_reduce(each.clone(), codec, **groups, rounding=rounding)
                    for each in values
                ]
                found.append([future.wait() for future in started])
            sent.append((meter.bytes_sent, meter.bytes_received))
        for results in found[1:]:
            assert all(map(torch.equal, results, found[0])), codec
        assert sent[0] == sent[1] == sent[2], codec


@pytest.mark.parametrize(
    ("pool", "shape"),
    [("two_ranks", (2, 1)), ("two_ranks", (1, 2)), ("four_ranks", (2, 2)), ("eight_ranks", None)],
)
def test_sums_under_way_at_once(
    request: pytest.FixtureRequest, pool: str, shape: tuple[int, int] | None
) -> None:
    """Sums under way at once have the bits and bytes of sums that wait for each stage."""
    request.getfixturevalue(pool).run(_both_ways, shape)


def _raise(*args: object, **keywords: object) -> None:
    raise ValueError("no sum")


def _fails(rank: int, levels: list[int] | None) -> None:
    """A step in which rank 2 cannot add the other nodes' messages, and the next step."""
    groups = _nodes(2, 2) if levels is None else {"levels": levels}
    hook = hooks.hierarchical(codecs.blockwise(), **groups)
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(5)))
    handle = attach(model, hook, bucket_cap_mb=40 * 40 * 4 / (1 << 20))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(type(hook.codec), "reduce", _raise)
        with pytest.raises(ValueError if rank == 2 else PeerError):
            model(torch.full((1, 40), 1.0)).sum().backward()
    model.zero_grad()
    model(torch.full((1, 40), 1.0)).sum().backward()
    handle.remove()


@pytest.mark.parametrize(("pool", "levels"), [("four_ranks", None), ("eight_ranks", [2, 2])])
def test_a_rank_that_fails_between_nodes(
    request: pytest.FixtureRequest, pool: str, levels: list[int] | None
) -> None:
    request.getfixturevalue(pool).run(_fails, levels)


# ---- copies --------------------------------------------------------------------------------------


@on_ranks(2)
def test_copies(rank: int) -> None:
    hook = hooks.error_feedback(hooks.hierarchical(codecs.sign(), levels=[1, "a=b"], seed=3))
    for made in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert str(made) == str(hook)
        assert made.hook.levels == (1, "a=b") and made.hook.seed == 3
    attach(nn.Linear(2, 2), hook).remove()
    for made in (copy.copy(hook), copy.deepcopy(hook)):
        assert made.hook.sizes == hook.hook.sizes == (2, 1)
    assert pickle.loads(pickle.dumps(hook)).hook.sizes is None


@on_ranks(2)
def test_copies_with_groups(rank: int) -> None:
    groups = _nodes(1, 2)
    hook = hooks.error_feedback(hooks.hierarchical(codecs.sign(), **groups))
    for made in (copy.copy(hook), copy.deepcopy(hook)):
        assert str(made) == str(hook)
        assert made.hook.intra_group is groups["intra_group"]
    with pytest.raises(TypeError, match=r"hierarchical\(sign\(\).*cannot be pickled"):
        pickle.dumps(hook)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "error", "message"),
    [
        ("host", TypeError, r"levels must be 'auto' or a list .* got 'host'"),
        (3, TypeError, r"levels must be 'auto' or a list .* got 3"),
        ([], ValueError, "levels must have an entry for each level, got none"),
        (["hosts"], ValueError, "a level must be 'host', .* got 'hosts'"),
        (["rack="], ValueError, "a level must be 'host', .* got 'rack='"),
        ([0], ValueError, "a level must be 'host', .* got 0"),
        ([True], TypeError, "levels must hold texts and numbers, got bool"),
        ([1.5], TypeError, "levels must hold texts and numbers, got float"),
    ],
)
def test_levels_that_are_refused(levels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^hierarchical: {message}"):
        hooks.hierarchical(codecs.sign(), levels=levels)


@hosts(0, 0, 1, 1)
@on_ranks(4)
def test_what_is_refused_when_attached(rank: int) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"levels\[0\] must divide the 4 units .*, got 3"):
        attach(model, hooks.hierarchical(codecs.sign(), levels=[3]))
    hook = hooks.hierarchical(codecs.sign(), levels=["host", f"rack={rank}"])
    with pytest.raises(ValueError, match=r"levels\[1\] must have whole units"):
        attach(model, hook)
    hook = hooks.hierarchical(codecs.sign(), levels=["a=b"])
    attach(model, hook).remove()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    with pytest.raises(RuntimeError, match="make one hook for each process group"):
        attach(model, hook, process_group=half)
    other = hooks.hierarchical(codecs.sign(), levels=["a=b"][: rank + 1] * (1 + (rank == 3)))
    with pytest.raises(RuntimeError, match="hook must be the same on all ranks"):
        attach(model, other)
    groups = {"intra_group": half, "inter_group": half}
    with pytest.raises(ValueError, match="levels must be left out where groups are given"):
        hooks.hierarchical(codecs.sign(), **groups, levels=["host"])
    with pytest.raises(TypeError, match="inter_group must be a ProcessGroup, got None"):
        hooks.hierarchical(codecs.sign(), intra_group=half)


@hosts(0, 0, 1, 1, 1, 1)
@on_ranks(6)
def test_a_warning_of_uneven_hosts(rank: int) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        attach(nn.Linear(2, 2), hooks.hierarchical(codecs.sign())).remove()
    said = [str(each.message) for each in found if "units" in str(each.message)]
    wanted = (
        "hierarchical(sign(), levels=['host']): levels[0] has units of 2, 4 parts; it sums "
        "exactly among 2 of them at a time, which divides all these numbers"
    )
    assert said == ([] if rank else [wanted])


def test_elastic_training_refuses_it(one_rank: None) -> None:
    with pytest.raises(ValueError, match="process groups of its own"):
        attach(
            nn.Linear(2, 2),
            hooks.hierarchical(codecs.sign()),
            elastic=Elastic(min_ranks=1, name="run"),
        )


def test_one_rank(one_rank: None) -> None:
    hook = hooks.hierarchical(codecs.sign())
    model = nn.Linear(1, 1, bias=False)
    handle = attach(model, hook)
    model(torch.full((1, 1), 3.0)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.item() == 3.0
    assert hook.sizes == (1,)
    handle.remove()


@on_ranks(4)
def test_groups_are_checked(rank: int) -> None:
    groups = _nodes(2, 2)
    intra, world = groups["intra_group"], dist.group.WORLD
    alone = [dist.new_group([other]) for other in range(4)][rank]
    for inter in (intra, world, WrapperProcessGroup(world)):
        with pytest.raises(ValueError, match="must share this rank only"):
            hooks.hierarchical(codecs.sign(), intra_group=intra, inter_group=inter)
    with pytest.raises(TypeError, match="seed must be an int"):
        hooks.hierarchical(codecs.sign(), **groups, seed="a")
    some = hooks.hierarchical(codecs.sign(), intra_group=intra, inter_group=alone)
    with pytest.raises(ValueError, match=r"must have all 4 ranks .* got 1 nodes of 2 ranks"):
        attach(nn.Linear(3, 2), some)


@pytest.mark.parametrize("wraps", [False, True])
@on_ranks(4)
def test_groups_of_hierarchical_hooks_must_be_rows_and_columns(rank: int, wraps: bool) -> None:
    around: Any = WrapperProcessGroup if wraps else lambda group: group
    halves, columns, crossed = (
        [dist.new_group(ranks) for ranks in pair]
        for pair in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]])
    )
    intra, inter = around(halves[rank // 2]), around(crossed[0 if rank in (0, 3) else 1])
    hook = hooks.hierarchical(codecs.sign(), intra_group=intra, inter_group=inter)
    with pytest.raises(ValueError, match="must have the ranks of one position in their nodes"):
        attach(nn.Linear(3, 2), hooks.clip(1.0, hook))

    alone = around([dist.new_group([other]) for other in range(4)][rank])
    beyond = hooks.hierarchical(
        codecs.sign(), intra_group=alone, inter_group=around(columns[rank % 2])
    )
    with pytest.raises(ValueError, match=r"of the model only, \[.*\], got \[.*\] too"):
        attach(nn.Linear(3, 2), beyond, process_group=halves[rank // 2])


@pytest.mark.parametrize("on_ddp", [False, True])
@on_ranks(2)
def test_a_hook_that_is_refused_late_leaves_the_one_before(rank: int, on_ddp: bool) -> None:
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
    assert model.weight.grad.item() == 1.5
