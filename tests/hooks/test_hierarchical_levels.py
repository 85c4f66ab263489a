"""Hierarchical hooks that find out which ranks share a host, and those of more than two levels."""

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
from failing_reduce import fails_between
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import Elastic, GradBucket, attach, codecs, hooks
from torch_commhook.collectives import hierarchical_all_reduce
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.testing import run_ranks, simulate

# The package's name for the module is that of the class.
_module = importlib.import_module("torch_commhook.hooks.hierarchical")

EXACT = codecs.topk(1.0)


@contextmanager
def hosts(*of_rank: int) -> Iterator[None]:
    """Let ranks be on these hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_module, "label_of_host", lambda: f"host {of_rank[dist.get_rank()]}")
        yield


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


LEVELS = [
    ([2, 2], 8, (2, 2, 2)),
    ([2, 3], 12, (2, 3, 2)),
    ([3, 1, 2], 12, (3, 2, 2)),
    ([2, 2, 2], 16, (2, 2, 2, 2)),
    ([2, 4], 8, (2, 4, 1)),
    ([1, 1], 4, (4,)),
]


def _levels(rank: int, levels: list[int], numel: int, codec: codecs.Codec) -> Any:
    hook = hooks.hierarchical(codec, levels=levels)
    result = _run(hook, gradients(dist.get_world_size(), numel)[rank][0])
    return hook.sizes, result


def _run(hook: hooks.Hook, gradient: Tensor) -> Tensor:
    bucket = GradBucket([torch.zeros_like(gradient, requires_grad=True)], [gradient])
    result: Tensor = hook(None, bucket).wait()
    return result


@pytest.mark.parametrize(("levels", "ranks", "sizes"), LEVELS)
@pytest.mark.parametrize("numel", [1, 5, 1001])
@pytest.mark.filterwarnings("ignore:.*take more bytes than cast")
def test_more_levels(levels: list[int], ranks: int, sizes: tuple[int, ...], numel: int) -> None:
    mean = torch.stack([one for (one,) in gradients(ranks, numel)]).double().mean(0)
    found = run_ranks(_levels, ranks, levels, numel, EXACT)
    for own_sizes, result in found:
        assert own_sizes == sizes
        assert torch.equal(result, found[0][1])
        assert float((result - mean).norm()) <= 1e-6 * float(mean.norm())


def test_labels_of_racks() -> None:
    """Hosts of two ranks; racks of two hosts, which lie between each other."""
    racks = [0, 0, 1, 1, 0, 0, 1, 1]

    def on_rank(rank: int) -> Any:
        hook = hooks.hierarchical(EXACT, levels=["host", f"rack={racks[rank]}"])
        handle = attach(nn.Linear(2, 2), hook)
        groups = [dist.get_process_group_ranks(group) for group in hook.own_groups()]
        handle.remove()
        return str(hook), hook.sizes, groups

    with hosts(0, 0, 1, 1, 2, 2, 3, 3):
        found = run_ranks(on_rank, 8)
    assert {(name, sizes) for name, sizes, _ in found} == {
        ("hierarchical(topk(density=1.0), levels=['host', 'rack'])", (2, 2, 2))
    }
    assert found[0][2] == [[0, 1], [0, 4], [0, 2]]
    assert found[7][2] == [[6, 7], [3, 7], [5, 7]]


# ---- traffic -------------------------------------------------------------------------------------


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
    sizes = [shard.nbytes for shard in codec.shards(elements, nodes)]
    for rank, sent in enumerate(run_ranks(on_rank, ranks, timeout=120)):
        assert sent[:-1] == wanted, rank
        # To each of the other nodes its shard, and to all of them the own sum, padded alike.
        place = rank // math.prod(levels)
        assert sent[-1] == sum(sizes) - sizes[place] + max(sizes) * (nodes - 1)


def _simulated(group: Any) -> Any:
    return group if hasattr(group, "bytes_sent") else group._get_backend(torch.device("cpu"))


# ---- what it becomes -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["module", "ddp"])
def test_one_host_or_one_rank_a_host(four_ranks: RankPool, kind: str) -> None:
    four_ranks.run(_becomes_plain, kind)


def _becomes_plain(rank: int, kind: str) -> None:
    cases: list[tuple[tuple[int, ...], hooks.Hook]] = [
        ((0, 0, 0, 0), hooks.allreduce()),
        ((0, 1, 2, 3), hooks.error_feedback(hooks.blockwise())),
    ]
    for of_rank, plain in cases:
        with hosts(*of_rank):
            own = hooks.error_feedback(hooks.hierarchical(codecs.blockwise()))
            found, state = _steps(own, kind, rank)
        wanted, wanted_state = _steps(plain, kind, rank)
        assert all(map(torch.equal, found, wanted))
        assert _kinds(state) == _kinds(wanted_state)


def _kinds(state: dict[str, Any]) -> set[str]:
    """The kinds of memory in a hook's state."""
    return {kind for value in state.values() if isinstance(value, dict) for kind in value}


def _steps(hook: hooks.Hook, kind: str, rank: int, steps: int = 3) -> tuple[list[Tensor], Any]:
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
        found, _ = _steps(own, kind, rank)
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    given = hooks.hierarchical(
        codecs.blockwise(), intra_group=groups[rank % 2], inter_group=groups[2 + rank // 2]
    )
    wanted, _ = _steps(hooks.error_feedback(given), kind, rank)
    assert all(map(torch.equal, found, wanted))
    mean, _ = _steps(hooks.allreduce(), kind, rank, steps=1)
    for one, other in zip(found, mean, strict=False):
        assert float((one - other).norm()) <= 0.02 * float(other.norm())
    return found


def test_processes_of_one_machine(four_ranks: RankPool) -> None:
    assert four_ranks.run(_sizes) == [(4, 1)] * 4


def _sizes(rank: int) -> Any:
    hook = hooks.hierarchical(codecs.blockwise())
    attach(nn.Linear(2, 2), hook).remove()
    return hook.sizes


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
    found, _ = _steps(hook, kind, rank, steps=2)
    mean, _ = _steps(hooks.allreduce(), kind, rank, steps=2)
    for one, other in zip(found, mean, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return found


def test_three_levels_wait_for_nothing(eight_ranks: RankPool) -> None:
    eight_ranks.run(_both_ways)


def _both_ways(rank: int) -> None:
    """Sums under way at once have the bits and bytes of such as wait for each stage."""
    hook = hooks.hierarchical(codecs.blockwise(), levels=[2, 2])
    attach(nn.Linear(2, 2), hook).remove()
    groups = {"intra_group": hook.intra_groups, "inter_group": hook.inter_group}
    background = importlib.import_module("torch_commhook.collectives.hierarchical")
    generator = torch.Generator().manual_seed(rank)
    values = [torch.randn(numel, generator=generator) for numel in (1000, 3, 5000, 1, 700)]
    found, sent = [], []
    for waits in (False, True, False):
        meter = WireMeter()
        with pytest.MonkeyPatch.context() as patch, counting(meter):
            if waits:
                patch.setattr(background, "_waits_for_nothing", lambda *_: False)
            started = [
                hierarchical_all_reduce(each.clone(), codecs.blockwise(), **groups)
                for each in values
            ]
            found.append([future.wait() for future in started])
        sent.append((meter.bytes_sent, meter.bytes_received))
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))
    assert sent[0] == sent[1] == sent[2]


def test_a_rank_that_fails_between_levels(eight_ranks: RankPool) -> None:
    found = eight_ranks.run(_fails)
    assert found.pop(2) == ["ValueError", "right"]
    assert found == [["PeerError", "right"]] * 7


def _fails(rank: int) -> list[str]:
    return fails_between(rank, hooks.hierarchical(codecs.blockwise(), levels=[2, 2]))


# ---- copies and errors ---------------------------------------------------------------------------


def test_copies() -> None:
    def on_rank(rank: int) -> None:
        hook = hooks.error_feedback(hooks.hierarchical(codecs.sign(), levels=[1, "a=b"], seed=3))
        for made in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
            assert str(made) == str(hook)
            assert made.hook.levels == (1, "a=b") and made.hook.seed == 3
        attach(nn.Linear(2, 2), hook).remove()
        for made in (copy.copy(hook), copy.deepcopy(hook)):
            assert made.hook.sizes == hook.hook.sizes == (2, 1)
        assert pickle.loads(pickle.dumps(hook)).hook.sizes is None

    run_ranks(on_rank, 2)


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


def test_what_is_refused_when_attached() -> None:
    def on_rank(rank: int) -> None:
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

    with hosts(0, 0, 1, 1):
        run_ranks(on_rank, 4)


def test_a_warning_of_uneven_hosts() -> None:
    def on_rank(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            attach(nn.Linear(2, 2), hooks.hierarchical(codecs.sign())).remove()
        return [str(each.message) for each in found if "units" in str(each.message)]

    with hosts(0, 0, 1, 1, 1, 1):
        first, *others = run_ranks(on_rank, 6)
    assert first == [
        "hierarchical(sign(), levels=['host']): levels[0] has units of 2, 4 parts; it sums "
        "exactly among 2 of them at a time, which divides all these numbers"
    ]
    assert not any(others)


def test_elastic_training_refuses_it(one_rank: None) -> None:
    with pytest.raises(ValueError, match="process groups of its own"):
        attach(nn.Linear(2, 2), hooks.hierarchical(codecs.sign()), elastic=Elastic(min_ranks=1))


def test_one_rank(one_rank: None) -> None:
    hook = hooks.hierarchical(codecs.sign())
    model = nn.Linear(1, 1, bias=False)
    handle = attach(model, hook)
    model(torch.full((1, 1), 3.0)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.item() == 3.0
    assert hook.sizes == (1,)
    handle.remove()
