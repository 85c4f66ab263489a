"""CompressedProcessGroup with codecs: errors of results, what passes, bytes, order, failures."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_cases import FIRST, SUMS, group_of, int8, issue_sum, most_lost, options, premul, values
from codec_examples import of_each_codec
from group_doubles import Alike
from on_ranks import of_all_ranks, on_processes, on_ranks
from rank_pool import RankPool
from refusals import assert_refused
from staged_steps import Around as SlowCodec
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch_releases import WORKS_HAVE_ERRORS

from torch_commhook import hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import compressed_all_reduce, compressed_reduce_scatter, plain
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.process_group import CompressedProcessGroup, RecordingProcessGroup, compressed
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


def _seed() -> int:
    return 4 * random.randrange(1 << 18) + 2


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(4, torch.float32), (8, torch.float32), (4, torch.bfloat16)], ids=str
)
@of_each_codec
def test_sums_simulated(codec: Codec, world_size: int, dtype: torch.dtype) -> None:
    seed = _seed()
    check_sums(codec, run_ranks(_sums, world_size, codec, seed, dtype, seed=seed), seed, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
def test_sums_on_gloo(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    seed, dtype = _seed(), torch.float64
    check_sums(codec, pools[world_size].run(_sums, codec, seed, dtype), seed, dtype)


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
    seed = _seed()
    check_gathers(codec, run_ranks(_gathers, world_size, codec, seed, seed=seed), seed)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
def test_gathers_on_gloo(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    seed = _seed()
    check_gathers(codec, pools[world_size].run(_gathers, codec, seed), seed)


# ---- what passes as it is ------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("codec", "tensor", "op", "compressed"),
    [
        (int8, torch.full((9,), 3.1), SUM, 0),
        (int8, torch.full((600,), 3.1), MAX, 1),  # the all-gather is compressed
        (int8, torch.full((600,), 3), SUM, 0),
        (int8, torch.full((600,), 3.1 + 1j), SUM, 0),
        (int8, torch.full((600,), 3.1).to_sparse(), SUM, 0),
        (int8, torch.full((60, 20), 3.1).t()[:, :50], SUM, 0),
        # Messages that are no shorter.
        (CODECS["topk"](1.0), torch.full((600,), 3.1), SUM, 0),
        (CODECS["randomk"](1.0), torch.full((600,), 3.1), SUM, 0),
    ],
    ids=["small", "max", "int64", "complex", "sparse", "strided", "topk", "randomk"],
)
def test_what_passes_as_it_is(
    rank: int, codec: Codec, tensor: Tensor, op: Any, compressed: int
) -> None:
    group = CompressedProcessGroup(dist.group.WORLD, codec, min_numel=20, gathers=codec)
    got = tensor.clone()
    group.allreduce([got], options(dist.AllreduceOptions, op)).wait()
    assert torch.equal(got.to_dense(), (tensor if op == MAX else 2 * tensor).to_dense())
    if tensor.layout is torch.strided and tensor.is_contiguous():
        outputs = torch.empty(2, *tensor.shape, dtype=tensor.dtype)
        group.all_gather_single(outputs, tensor, AllgatherOptions()).wait()
        assert torch.equal(outputs, torch.stack([tensor] * 2))
    assert group.compressed == compressed


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_lost_on_one_rank() -> None:
    group = group_of(int8, gathers=int8)
    for name, op in itertools.product(SUMS, OPS):
        x = values(0, 3000, 1)
        work, (got,) = issue_sum(group, name, OPS[op](), [x.clone()])
        work.wait()
        assert torch.equal(got, x * (0.25 if op == "premul" else 1.0)), (name, op)
    assert group.compressed == 0


@on_ranks(4)
def test_lists_of_uneven_parts(rank: int) -> None:
    group = group_of(int8, gathers=int8)
    parts = [torch.full((300 * place,), rank + 10.0 * place) for place in range(4)]
    output = torch.full((300 * rank,), 7.0)
    group.reduce_scatter([output], [parts], options(dist.ReduceScatterOptions, SUM)).wait()
    gathered = [torch.full((300 * place,), 7.0) for place in range(4)]
    group.allgather([gathered], [output], AllgatherOptions()).wait()
    assert group.compressed == 2
    for place, got in enumerate(gathered):
        assert got.tolist() == pytest.approx([6.0 + 40.0 * place] * (300 * place))


# ---- PREMUL_SUM ----------------------------------------------------------------------------------


@on_processes
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("numel", [8, 2000])
def test_factors_of_ranks(rank: int, numel: int, as_tensor: bool) -> None:
    """Each rank multiplies its own terms, also a few elements over Gloo, which has no such sum."""
    group = group_of(int8, min_numel=100)
    factor: Any = float(10**rank)
    op = premul(torch.tensor(factor)) if as_tensor else premul(factor)
    for name in ("allreduce", "reduce_scatter_single", "reduce_scatter"):
        work, (result,) = issue_sum(group, name, op, [torch.ones(numel)])
        work.wait()
        assert result.unique().tolist() == [11.0]
    assert group.compressed == (0 if numel < 100 else 3)


@on_ranks(2)
def test_factors_of_integers_are_the_parents(rank: int) -> None:
    x = torch.full((600,), 4)
    group_of(int8).allreduce([x], options(dist.AllreduceOptions, premul(0.5))).wait()
    assert x.unique().tolist() == [4]


# ---- random numbers ------------------------------------------------------------------------------


@on_ranks(2)
def test_random_numbers(rank: int) -> None:
    """Each sum, scatter and gather draws its own; a seed repeats them."""

    def drawn(group: Any) -> list[Tensor]:
        x, gathered = values(rank, 3000, 1), torch.empty(6000)
        results = []
        for name in ("allreduce", "reduce_scatter_single"):
            work, (result,) = issue_sum(group, name, SUM, [x.clone()])
            work.wait()
            results.append(result)
        group.all_gather_single(gathered, x, AllgatherOptions()).wait()
        return [*results, gathered]

    group, again, other = (
        group_of(random_int8, seed=seed, gathers=random_int8) for seed in (1, 1, 2)
    )
    first, second = drawn(group), drawn(group)
    assert all(map(torch.equal, first, drawn(again)))
    for different in (second, drawn(other)):
        assert not any(map(torch.equal, first, different))


@on_ranks(2)
def test_places_are_the_same_on_all_ranks(rank: int) -> None:
    codec = CODECS["randomk"](0.25)
    group = group_of(codec, gathers=codec)
    x, gathered = torch.ones(1000), torch.empty(2000)
    group.allreduce([x], options(dist.AllreduceOptions, SUM)).wait()
    group.all_gather_single(gathered, torch.ones(1000), AllgatherOptions()).wait()
    assert sorted(x.unique().tolist()) == [0.0, 2.0] and int(x.sum()) == 500
    assert torch.equal(*gathered.chunk(2)) and int(gathered.sum()) == 500
    assert torch.equal(*of_all_ranks(x))


# ---- the same bits as the collectives ------------------------------------------------------------


@on_processes
@pytest.mark.parametrize("codec", [codec for codec in FIRST if not codec.is_random], ids=repr)
def test_bits_of_the_collectives(rank: int, codec: Codec) -> None:
    group, world = group_of(codec), dist.group.WORLD
    x = values(rank, 3000, 1)
    got = x.clone()
    dist.all_reduce(got, dist.ReduceOp.AVG, group=group)
    assert torch.equal(got, compressed_all_reduce(x, codec, scale=1 / 2, group=world).wait())
    shares = list(torch.full((3000,), 7.0).chunk(2))
    dist.reduce_scatter(shares[rank], list(x.chunk(2)), group=group)
    assert torch.equal(shares[rank], compressed_reduce_scatter(x, codec, group=world).wait())


# ---- bytes ---------------------------------------------------------------------------------------


@on_ranks(4)
@of_each_codec
def test_bytes_are_counted(rank: int, codec: Codec) -> None:
    ranks, numel = 4, 4096 * 4
    recording = RecordingProcessGroup(dist.group.WORLD)
    group = CompressedProcessGroup(recording, codec, min_numel=0, gathers=codec)
    x = values(rank, numel, 1)
    of_hook = WireMeter()
    with counting(of_hook):
        for name in SUMS:
            work, _ = issue_sum(group, name, SUM, [x.clone()])
            work.wait()
        group.all_gather_single(torch.empty(ranks * numel), x, AllgatherOptions()).wait()
    assert of_hook.collectives == 0, "they are counted where they are issued"
    chunks = sum(part.nbytes for part in codec.chunks([4096] * ranks))
    scatters = 3 * chunks * (ranks - 1) // ranks
    gather = codec.nbytes(numel) * (ranks - 1)
    if codec.exchange == "all_to_all":
        sums = 2 * 2 * codec.nbytes(numel, ranks) * (ranks - 1) // ranks
    elif codec.exchange == "all_gather":
        sums = 2 * codec.nbytes(numel) * (ranks - 1)
    else:
        sums = 2 * round(2 * codec.nbytes(numel) * (ranks - 1) / ranks)
    recorded = sum(each.bytes_sent for each in recording.counters.values())
    assert group.bytes_sent == recorded == scatters + gather + sums


# ---- order, errors and times ---------------------------------------------------------------------


def _in_flight(rank: int, seed: int) -> None:
    """Sums of all kinds that nobody waits for until all are on their way."""
    dice = random.Random(seed * 10 + rank)
    slow = SlowCodec(int8, lambda method: time.sleep(dice.random() * 0.003))
    group = group_of(slow, gathers=slow, min_numel=300)
    works, results = [], []
    for number in range(12):
        x = torch.full((400 * (number % 5 + 1),), float(rank + number))
        if number % 4 == 3:
            result = torch.empty(2 * len(x))
            work = group.all_gather_single(result, x, AllgatherOptions())
        else:
            name = ("allreduce", "reduce_scatter_single", "allreduce")[number % 4]
            if number == 6:
                x = x[:200]  # which passes as it is
            work, (result,) = issue_sum(group, name, SUM, [x])
        works.append(work)
        results.append(result)
    for number in dice.sample(range(12), 12):
        assert works[number].wait()
    for number, result in enumerate(results):
        want = [number, number + 1.0] if number % 4 == 3 else [2 * number + 1.0]
        assert result.unique().tolist() == pytest.approx(want), number


def test_several_in_flight(two_ranks: RankPool) -> None:
    two_ranks.run(_in_flight, random.randrange(1 << 20))


@on_processes
@pytest.mark.parametrize("codec", [torch.bfloat16, int8], ids=["bfloat16", "int8"])
def test_a_rank_that_fails_between_the_stages(rank: int, codec: Any) -> None:
    def fail(*arguments: Any) -> Any:
        raise ArithmeticError("between the stages")

    def before(method: str) -> None:
        if rank == 0 and method == "reduce":
            fail()

    ranks = dist.new_group(timeout=timedelta(seconds=3))
    with pytest.MonkeyPatch.context() as patch:
        if codec != torch.bfloat16:
            codec = SlowCodec(int8, before)
        else:
            patch.setattr(compressed, "LEAST_RANKS", 2)
            patch.setattr(plain, "sum_rows", fail if rank == 0 else plain.sum_rows)
        group = CompressedProcessGroup(ranks, codec, min_numel=0)
        work = group.allreduce([torch.ones(900)], dist.AllreduceOptions())
        with pytest.raises((RuntimeError, ArithmeticError)) as caught:
            work.wait()
    assert not work.is_success()
    if WORKS_HAVE_ERRORS or codec == torch.bfloat16:
        assert rank == 1 or isinstance(work.exception(), ArithmeticError)
        assert work.exception() is not None
    said = str(caught.value).splitlines()[0]
    assert said == "between the stages" if rank == 0 else re.search("(?i)timed? ?out", said)


#: Operation and codec, and whether a rank comes that fails between the stages.
TIMED: dict[str, tuple[str, Codec, bool]] = {
    "second stage": ("allreduce", int8, True),
    "first stage": ("allreduce", int8, False),
    "gathered": ("allreduce", CODECS["topk"](), False),
    "added up": ("allreduce", CODECS["randomk"](), False),
    "reduce-scatter": ("reduce_scatter_single", int8, False),
    "all-gather": ("all_gather_single", int8, False),
}


@on_processes
@pytest.mark.parametrize("own_timeout", [False, True])
@pytest.mark.parametrize("name", TIMED)
def test_a_rank_that_does_not_come(rank: int, name: str, own_timeout: bool) -> None:
    """Rank 0 waits as long as the call says, or else the group.

    Rank 1 comes to none of the stages, or only to the first one.
    """
    calls = itertools.count()

    def before(method: str) -> None:
        if rank == 1 and method == "reduce" and next(calls) == 1:
            raise ArithmeticError("between the stages")

    seconds = timedelta(seconds=1)
    ranks = dist.new_group(timeout=timedelta(seconds=20) if own_timeout else seconds)
    operation, codec, comes = TIMED[name]
    codec = SlowCodec(codec, before)
    group = CompressedProcessGroup(ranks, codec, min_numel=0, gathers=codec)
    group.allreduce([torch.ones(900)], dist.AllreduceOptions()).wait()  # makes the connections
    given = {"allreduce": dist.AllreduceOptions, "all_gather_single": AllgatherOptions}
    made = given.get(operation, dist.ReduceScatterOptions)()
    if own_timeout:
        made.timeout = seconds
    # Long ones go point to point over Gloo.
    x = torch.ones(900 if own_timeout else 600_000)
    out = {"all_gather_single": torch.empty(2 * len(x)), "reduce_scatter_single": x[::2].clone()}
    tensors: Any = (out[operation], x) if operation in out else ([x],)
    if rank == 1 and not comes:
        return
    with pytest.raises((RuntimeError, ArithmeticError)) as caught:
        getattr(group, operation)(*tensors, made).wait()
    # Of messages that go point to point Gloo does not say for how long.
    message = "(?i)timed out.*1000 ?ms" if own_timeout else "(?i)time(d )?out"
    assert rank == 1 or re.search(message, str(caught.value)), caught.value


@pytest.mark.parametrize("codec", FIRST, ids=repr)
def test_works_that_have_no_future(codec: Codec) -> None:
    group = CompressedProcessGroup(Alike(4), codec, min_numel=0, gathers=codec)
    x = torch.ones(4 * 4096)
    group.allreduce([x], options(dist.AllreduceOptions, SUM)).wait()
    assert x.unique().tolist()[-1] == pytest.approx(4.0)
    for name in ("reduce_scatter_single", "reduce_scatter"):
        work, (output,) = issue_sum(group, name, SUM, [torch.ones(4 * 4096)])
        assert work.wait() and output.unique().tolist()[-1] == pytest.approx(4.0)
    output = torch.empty(4 * 4096)
    group.all_gather_single(output, torch.ones(4096), AllgatherOptions()).wait()
    assert output.unique().tolist()[-1] == pytest.approx(1.0)


@on_ranks(2)
@pytest.mark.parametrize("codec", [torch.bfloat16, int8], ids=str)
def test_coalesced_operations_are_done(rank: int, codec: Any) -> None:
    group = CompressedProcessGroup(dist.group.WORLD, codec, min_numel=0)
    x = torch.full((600,), rank + 1.0)
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([x], options(dist.AllreduceOptions, SUM))
    group._end_coalescing(torch.device("cpu")).wait()
    inside = group.compressed
    assert x.unique().tolist() == [3.0]
    group.allreduce([x], options(dist.AllreduceOptions, SUM)).wait()
    assert group.compressed == inside + 1


REFUSED = """\
CompressedProcessGroup(None, int8)
    TypeError: CompressedProcessGroup: parent must be a ProcessGroup, got None
CompressedProcessGroup(parent, blockwise)
    TypeError: CompressedProcessGroup: codec must be torch.bfloat16, torch.float16 or a codec of torch_commhook.codecs, got <class 'torch_commhook.codecs.block_codec.blockwise'>
CompressedProcessGroup(parent, torch.float32)
    TypeError: CompressedProcessGroup: codec must be torch.bfloat16, torch.float16 or a codec of torch_commhook.codecs, got torch.float32
CompressedProcessGroup(parent, hooks.topk(0.1))
    TypeError: CompressedProcessGroup: codec must be torch.bfloat16, torch.float16 or a codec of torch_commhook.codecs, got a hook; use codecs.topk(density=0.1)
CompressedProcessGroup(parent, "int8")
    TypeError: CompressedProcessGroup: codec must be torch.bfloat16, torch.float16 or a codec of torch_commhook.codecs, got 'int8'
CompressedProcessGroup(parent, int8, min_numel=-1)
    ValueError: CompressedProcessGroup: min_numel must be an int of at least 0, got -1
CompressedProcessGroup(parent, int8, min_numel=True)
    ValueError: CompressedProcessGroup: min_numel must be an int of at least 0, got True
CompressedProcessGroup(parent, int8, seed=1.0)
    TypeError: CompressedProcessGroup: seed must be an int, got float
CompressedProcessGroup(parent, int8, seed=True)
    TypeError: CompressedProcessGroup: seed must be an int, got bool
CompressedProcessGroup(parent, int8, gathers=torch.bfloat16)
    TypeError: CompressedProcessGroup: gathers must be a codec of torch_commhook.codecs or None, got torch.bfloat16
CompressedProcessGroup(parent, int8, gathers=int8, seed=-1)
    is accepted
"""  # noqa: E501


def test_bad_arguments() -> None:
    parent = dist.ProcessGroup(0, 2)
    given = {"CompressedProcessGroup": CompressedProcessGroup, "parent": parent, "int8": int8}
    given |= {"torch": torch, "blockwise": CODECS["blockwise"], "hooks": hooks}
    assert_refused(given, REFUSED)
