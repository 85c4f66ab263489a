"""CompressedProcessGroup with codecs: how far results are off, what passes, and bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_cases import FIRST, SUMS, group_of, int8, issue_sum, most_lost, options, premul, values
from codec_examples import of_each_codec
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import compressed_all_reduce, compressed_reduce_scatter
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.process_group import CompressedProcessGroup, RecordingProcessGroup
from torch_commhook.testing import run_ranks

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX

random_int8 = next(
    codec
    for codec in CODECS["blockwise"].examples()
    if codec.is_random and "bits" not in repr(codec)
)


# ---- all operations on all codecs ----------------------------------------------------------------

#: Elements of a rank's share of each tensor: no multiple of a block.
SHARES = (1205, 433)

#: How many tensors each gets, and whether its outputs are lists.
GATHERS = {
    "all_gather_single": (1, False),
    "all_gather_single_coalesced": (2, False),
    "allgather": (1, True),
    "allgather_coalesced": (2, True),
}


def _given(rank: int, ranks: int, count: int, seed: int) -> list[Tensor]:
    return [values(rank, ranks * share, seed + i) for i, share in enumerate(SHARES[:count])]


def _message(name: str, tensors: list[Tensor], ranks: int, rank: int) -> Tensor:
    """The values that the result on a rank is of, in the order of a message."""
    if name.startswith("reduce_scatter"):
        tensors = [each.chunk(ranks)[rank] for each in tensors]
    return torch.cat(tensors)


OPS: dict[str, Callable[[], Any]] = {
    "sum": lambda: SUM,
    "avg": lambda: AVG,
    "premul": lambda: premul(0.25),
}


def _sums(rank: int, codec: Codec, seed: int, dtype: torch.dtype) -> dict[tuple[str, str], Tensor]:
    found = {}
    ranks = dist.get_world_size()
    group = group_of(codec, seed=seed)
    for (name, count), op in itertools.product(SUMS.items(), OPS):
        tensors = [each.to(dtype) for each in _given(rank, ranks, count, seed)]
        before = group.compressed
        work, results = issue_sum(group, name, OPS[op](), tensors)
        assert work.wait() and work.is_completed() and work.is_success()
        value = work.get_future().wait()
        assert len(value) == count and all(map(torch.equal, value, results))
        assert group.compressed == before + 1, "it passed as it is"
        found[name, op] = torch.cat(results)
    return found


def check_sums(
    codec: Codec, every: list[dict[tuple[str, str], Tensor]], seed: int, dtype: torch.dtype
) -> None:
    ranks = len(every)
    eps = max(torch.finfo(dtype).eps, 2.0**-23)
    scales = {"sum": 1.0, "avg": 1 / ranks, "premul": 0.25}
    for name, count in SUMS.items():
        given = [
            [each.to(dtype) for each in _given(rank, ranks, count, seed)] for rank in range(ranks)
        ]
        is_for_all = name.startswith("allreduce")
        for rank in [0] if is_for_all else range(ranks):
            terms = [_message(name, tensors, ranks, rank).double() for tensors in given]
            exact = torch.stack(terms).sum(0)
            bound = sum(most_lost(codec, each) for each in terms)
            if is_for_all and codec.exchange == "all_to_all":  # whose sum is encoded, too
                bound = 2 * bound + most_lost(codec, exact)
            bound += 4 * ranks * eps * sum(float(each.norm()) for each in terms)
            for op, scale in scales.items():
                got = every[rank][name, op]
                off = float((got.double() - scale * exact).norm())
                assert off <= scale * bound, (name, op, rank, seed)
                if is_for_all:
                    assert all(torch.equal(got, found[name, op]) for found in every)


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(4, torch.float32), (8, torch.float32), (4, torch.bfloat16)], ids=str
)
@of_each_codec
def test_sums_simulated(codec: Codec, world_size: int, dtype: torch.dtype) -> None:
    seed = 4 * random.randrange(1 << 18) + 2
    found = run_ranks(_sums, world_size, codec, seed, dtype, seed=seed)
    check_sums(codec, found, seed, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
def test_sums_on_gloo(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    seed = 4 * random.randrange(1 << 18) + 2
    found = pools[world_size].run(_sums, codec, seed, torch.float64)
    check_sums(codec, found, seed, torch.float64)


def _gathers(rank: int, codec: Codec, seed: int) -> dict[str, list[Tensor]]:
    found = {}
    ranks = dist.get_world_size()
    group = group_of(torch.bfloat16, gathers=codec, seed=seed)
    for name, (count, in_lists) in GATHERS.items():
        inputs = [values(rank, share, seed + i) for i, share in enumerate(SHARES[:count])]
        outputs: Any = [torch.full((ranks * len(each),), 7.0) for each in inputs]
        lists: Any = [list(each.chunk(ranks)) for each in outputs]
        if name == "allgather_coalesced":
            lists = [list(each) for each in zip(*lists, strict=True)]
        given: Any = (lists if in_lists else outputs, inputs)
        if name == "all_gather_single":
            given = outputs[0], inputs[0]
        work = getattr(group, name)(*given, AllgatherOptions())
        assert work.wait() and work.is_completed() and work.is_success()
        assert sum(each.numel() for each in work.get_future().wait()) == torch.cat(outputs).numel()
        found[name] = outputs
    assert group.compressed == len(GATHERS)
    return found


def check_gathers(codec: Codec, every: list[dict[str, list[Tensor]]], seed: int) -> None:
    ranks = len(every)
    for name, (count, _) in GATHERS.items():
        for found in every:
            for outputs, same in zip(found[name], every[0][name], strict=True):
                assert torch.equal(outputs, same), (name, seed)
        for rank in range(ranks):
            sent = [values(rank, share, seed + i) for i, share in enumerate(SHARES[:count])]
            got = torch.cat([each.chunk(ranks)[rank] for each in every[0][name]])
            exact = torch.cat(sent).double()
            bound = most_lost(codec, exact) * (1 + 1e-5) + 1e-4
            assert float((got - exact).norm()) <= bound, (name, rank, seed)


@pytest.mark.parametrize("world_size", [4, 8])
@of_each_codec
def test_gathers_simulated(codec: Codec, world_size: int) -> None:
    seed = 4 * random.randrange(1 << 18) + 2
    check_gathers(codec, run_ranks(_gathers, world_size, codec, seed, seed=seed), seed)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
def test_gathers_on_gloo(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    seed = 4 * random.randrange(1 << 18) + 2
    check_gathers(codec, pools[world_size].run(_gathers, codec, seed), seed)


# ---- what passes as it is ------------------------------------------------------------------------


def _passes(rank: int, codec: Codec, tensor: Tensor, op: Any) -> tuple[int, Tensor]:
    group = CompressedProcessGroup(dist.group.WORLD, codec, min_numel=20, gathers=codec)
    given = tensor.clone()
    group.allreduce([given], options(dist.AllreduceOptions, op)).wait()
    if tensor.layout is torch.strided and tensor.is_contiguous():
        outputs = torch.empty(dist.get_world_size(), *tensor.shape, dtype=tensor.dtype)
        group.all_gather_single(outputs, tensor, AllgatherOptions()).wait()
        assert torch.equal(outputs, torch.stack([tensor] * dist.get_world_size()))
    return group.compressed, given


@pytest.mark.parametrize(
    ("tensor", "op", "compressed"),
    [
        (torch.full((9,), 3.1), SUM, 0),
        (torch.full((600,), 3.1), MAX, 1),  # the all-gather is compressed
        (torch.full((600,), 3), SUM, 0),
        (torch.full((600,), 3.1 + 1j), SUM, 0),
        (torch.full((600,), 3.1).to_sparse(), SUM, 0),
        (torch.full((60, 20), 3.1).t()[:, :50], SUM, 0),
    ],
    ids=["small", "max", "int64", "complex", "sparse", "strided"],
)
def test_what_passes_as_it_is(tensor: Tensor, op: Any, compressed: int) -> None:
    for count, got in run_ranks(_passes, 2, int8, tensor, op):
        assert count == compressed
        assert torch.equal(got.to_dense(), (tensor if op == MAX else 2 * tensor).to_dense())


@pytest.mark.parametrize("codec", [CODECS["topk"](1.0), CODECS["randomk"](1.0)], ids=repr)
def test_messages_that_are_no_shorter(codec: Codec) -> None:
    for count, got in run_ranks(_passes, 2, codec, torch.full((600,), 3.1), SUM):
        assert count == 0 and torch.equal(got, torch.full((600,), 6.2))


@pytest.mark.usefixtures("one_rank")
class TestOneRank:
    def test_nothing_is_lost(self) -> None:
        group = group_of(int8, gathers=int8)
        for name, op in itertools.product(SUMS, OPS):
            x = values(0, 3000, 1)
            work, (got,) = issue_sum(group, name, OPS[op](), [x.clone()])
            work.wait()
            assert torch.equal(got, x * (0.25 if op == "premul" else 1.0)), (name, op)
        assert group.compressed == 0


def _uneven(rank: int) -> tuple[list[Tensor], int]:
    group = group_of(int8, gathers=int8)
    parts = [torch.full((300 * place,), rank + 10.0 * place) for place in range(4)]
    output = torch.full((300 * rank,), 7.0)
    group.reduce_scatter([output], [parts], options(dist.ReduceScatterOptions, SUM)).wait()
    gathered = [torch.full((300 * place,), 7.0) for place in range(4)]
    group.allgather([gathered], [output], AllgatherOptions()).wait()
    return gathered, group.compressed


def test_lists_of_uneven_parts() -> None:
    for gathered, compressed in run_ranks(_uneven, 4):
        assert compressed == 2
        for place, got in enumerate(gathered):
            assert got.tolist() == pytest.approx([6.0 + 40.0 * place] * (300 * place))


# ---- PREMUL_SUM ----------------------------------------------------------------------------------


def _own_factors(rank: int, numel: int, as_tensor: bool) -> tuple[list[Tensor], int]:
    """Each rank multiplies its own terms, whatever the others multiply theirs by."""
    group = group_of(int8, min_numel=100)
    factor: Any = float(10**rank)
    op = premul(torch.tensor(factor)) if as_tensor else premul(factor)
    found = []
    for name in ("allreduce", "reduce_scatter_single", "reduce_scatter"):
        work, results = issue_sum(group, name, op, [torch.ones(numel)])
        work.wait()
        found += [result.unique() for result in results]
    return found, group.compressed


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("numel", [8, 2000])
def test_factors_of_ranks(two_ranks: RankPool, numel: int, as_tensor: bool) -> None:
    """Also of few elements, over Gloo, which has no such sum."""
    for found, compressed in two_ranks.run(_own_factors, numel, as_tensor):
        assert [each.tolist() for each in found] == [[11.0]] * 3
        assert compressed == (0 if numel < 100 else 3)


def _integers(rank: int) -> list[int]:
    x = torch.full((600,), 4)
    group_of(int8).allreduce([x], options(dist.AllreduceOptions, premul(0.5))).wait()
    return x.unique().tolist()


def test_factors_of_integers_are_the_parents() -> None:
    assert run_ranks(_integers, 2) == [[4]] * 2


# ---- random numbers ------------------------------------------------------------------------------


def _drawn(rank: int, seeds: list[int]) -> list[list[Tensor]]:
    """Of each seed the same sum, scatter and gather twice."""
    found = []
    for seed in seeds:
        group = group_of(random_int8, seed=seed, gathers=random_int8)
        x = values(rank, 3000, 1)
        for _ in range(2):
            results = []
            for name in ("allreduce", "reduce_scatter_single"):
                work, (result,) = issue_sum(group, name, SUM, [x.clone()])
                work.wait()
                results.append(result)
            gathered = torch.empty(2 * len(x))
            group.all_gather_single(gathered, x, AllgatherOptions()).wait()
            found.append([*results, gathered])
    return found


def test_random_numbers() -> None:
    for first, second, again, _, other, _ in run_ranks(_drawn, 2, [1, 1, 2]):
        for one, next_one, same, of_other_seed in zip(first, second, again, other, strict=True):
            assert torch.equal(one, same)
            assert not torch.equal(one, next_one) and not torch.equal(one, of_other_seed)


def _places_sent(rank: int) -> tuple[Tensor, Tensor]:
    codec = CODECS["randomk"](0.25)
    group = group_of(codec, gathers=codec)
    x = torch.ones(1000)
    group.allreduce([x], options(dist.AllreduceOptions, SUM)).wait()
    gathered = torch.empty(2000)
    group.all_gather_single(gathered, torch.ones(1000), AllgatherOptions()).wait()
    return x, gathered


def test_places_are_the_same_on_all_ranks() -> None:
    (first, _), *others = every = run_ranks(_places_sent, 2)
    for x, gathered in every:
        assert sorted(x.unique().tolist()) == [0.0, 2.0] and int(x.sum()) == 500
        assert torch.equal(*gathered.chunk(2)) and int(gathered.sum()) == 500
    assert all(torch.equal(x, first) for x, _ in others)


# ---- the same bits as the collectives ------------------------------------------------------------


def _as_collectives(rank: int, codec: Codec) -> None:
    group, world = group_of(codec), dist.group.WORLD
    x = values(rank, 3000, 1)
    got = x.clone()
    dist.all_reduce(got, dist.ReduceOp.AVG, group=group)
    want = compressed_all_reduce(x, codec, scale=1 / dist.get_world_size(), group=world).wait()
    assert torch.equal(got, want)
    shares = list(torch.full((3000,), 7.0).chunk(dist.get_world_size()))
    dist.reduce_scatter(shares[rank], list(x.chunk(dist.get_world_size())), group=group)
    assert torch.equal(shares[rank], compressed_reduce_scatter(x, codec, group=world).wait())


@pytest.mark.parametrize("codec", [codec for codec in FIRST if not codec.is_random], ids=repr)
def test_bits_of_the_collectives(two_ranks: RankPool, codec: Codec) -> None:
    two_ranks.run(_as_collectives, codec)


# ---- bytes ---------------------------------------------------------------------------------------


def _bytes(rank: int, codec: Codec) -> tuple[int, int]:
    recording = RecordingProcessGroup(dist.group.WORLD)
    group = CompressedProcessGroup(recording, codec, min_numel=0, gathers=codec)
    x = values(rank, 4096 * dist.get_world_size(), 1)
    of_hook = WireMeter()
    with counting(of_hook):
        for name in SUMS:
            work, _ = issue_sum(group, name, SUM, [x.clone()])
            work.wait()
        group.all_gather_single(torch.empty(len(x) * 4), x, AllgatherOptions()).wait()
    assert of_hook.collectives == 0, "they are counted where they are issued"
    return group.bytes_sent, sum(each.bytes_sent for each in recording.counters.values())


@of_each_codec
def test_bytes_are_counted(codec: Codec) -> None:
    ranks, numel = 4, 4096 * 4
    chunks = sum(part.nbytes for part in codec.chunks([4096] * ranks))
    scatters = 3 * chunks * (ranks - 1) // ranks
    gather = codec.nbytes(numel) * (ranks - 1)
    if codec.exchange == "all_to_all":
        sums = 2 * 2 * codec.nbytes(numel, ranks) * (ranks - 1) // ranks
    elif codec.exchange == "all_gather":
        sums = 2 * codec.nbytes(numel) * (ranks - 1)
    else:
        sums = 2 * round(2 * codec.nbytes(numel) * (ranks - 1) / ranks)
    assert run_ranks(_bytes, ranks, codec) == [(scatters + gather + sums,) * 2] * ranks
