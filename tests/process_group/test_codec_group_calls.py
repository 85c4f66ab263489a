"""CompressedProcessGroup with codecs: who calls it, order, errors and times."""

from __future__ import annotations

import itertools
import random
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from chunk_cases import FIRST, group_of, int8, issue_sum, options, values
from group_doubles import Alike, registered_mesh
from layered_net import Net, batch
from on_ranks import of_all_ranks, on_processes, on_ranks
from rank_pool import RankPool
from refusals import assert_refused
from staged_steps import Around as SlowCodec
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_releases import WORKS_HAVE_ERRORS

from torch_commhook import attach, hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import compressed_all_reduce, compressed_reduce_scatter
from torch_commhook.process_group import (
    CompressedProcessGroup,
    RecordingProcessGroup,
    WrapperProcessGroup,
    compressed,
)

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


# ---- who calls it --------------------------------------------------------------------------------


@on_processes
@pytest.mark.parametrize("codec", [codec for codec in FIRST if not codec.is_random], ids=repr)
def test_dtensor(rank: int, codec: Codec) -> None:
    ranks = dist.get_world_size()
    x = values(rank, 600 * ranks, 2).view(ranks, 600)
    group = group_of(codec)
    with registered_mesh(group, "codec partial") as mesh:
        partial = DTensor.from_local(x, mesh, [Partial()])
        replicated = partial.redistribute(mesh, [Replicate()]).to_local()
        shard = partial.redistribute(mesh, [Shard(0)]).to_local()
    assert group.compressed == 2
    want = compressed_all_reduce(x, codec, group=dist.group.WORLD).wait()
    assert torch.equal(replicated.flatten(), want)
    want = compressed_reduce_scatter(x, codec, group=dist.group.WORLD).wait()
    assert torch.equal(shard.flatten(), want)


@on_processes
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(
    ("factor", "dtype"), [(None, torch.float32), (None, torch.bfloat16), (1.0, torch.float32)]
)
def test_fully_shard(rank: int, factor: float | None, dtype: torch.dtype, gathers: bool) -> None:
    found, sent = [], []
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    for min_numel in (10**9, 500):
        recording = RecordingProcessGroup(dist.group.WORLD)
        group = CompressedProcessGroup(
            recording, int8, min_numel=min_numel, gathers=int8 if gathers else None
        )
        with registered_mesh(group, f"codec shards {min_numel}") as mesh:
            torch.manual_seed(0)
            model: Any = Net(32)
            for layer in (*model.layers, model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            for layer in model.layers:
                if factor is not None:
                    layer.set_gradient_divide_factor(factor)
            model(batch(rank, 0, 32)).square().sum().backward()
            sent.append(sum(each.bytes_sent for each in recording.counters.values()))
            gradients = [parameter.grad.to_local().flatten() for parameter in model.parameters()]
            found.append(torch.cat(gradients))
    # Of each layer a reduce-scatter, and all-gathers in forward and backward.
    assert group.compressed == 6 + (12 if gathers else 0)
    value = int8.nbytes(528) / 528  # of a rank's share of a layer
    share = ((2 * value if gathers else 8) + value) / (8 + dtype.itemsize)
    assert sent[1] == pytest.approx(share * sent[0])
    plain, encoded = found
    assert 0 < float((plain - encoded).norm() / plain.norm()) < 0.02


@on_processes
@pytest.mark.parametrize("kind", ["ddp", "attach"])
def test_replicas(rank: int, kind: str) -> None:
    """The gradients of DDP or of a module with a hook, on a plain group and on one with a codec."""
    found = []
    group = group_of(int8, min_numel=500)
    for own in (dist.group.WORLD, group):
        torch.manual_seed(0)
        model: Any = Net(32)
        if kind == "ddp":
            model = DDP(model, process_group=own, bucket_cap_mb=0.01)
        else:
            attach(model, hooks.allreduce(), process_group=own, bucket_cap_mb=0.01)
        for number in range(2):  # DDP forms its buckets anew after the first step
            model.zero_grad()
            model(batch(rank, number, 32)).square().sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert group.compressed >= 2, "at least one in each step"
    plain, encoded = found
    assert 0 < float((plain - encoded).norm() / plain.norm()) < 0.02
    first, second = of_all_ranks(encoded)
    assert torch.equal(first, second)


@on_processes
def test_functional_collectives_by_name(rank: int) -> None:
    group = group_of(int8, gathers=int8)
    x = values(rank, 4000, 2)
    with registered_mesh(group, "codec by name"):

        def run(x: Tensor) -> list[Tensor]:
            summed = functional.all_reduce(x, "avg", "codec by name")
            share = functional.reduce_scatter_tensor(x * 2, "sum", 0, "codec by name")
            return [summed + 1, share + 1, functional.all_gather_tensor(x, 0, "codec by name") + 1]

        eager = run(x)
        before = group.compressed
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
        assert before == 3 and group.compressed == 6
    assert len(eager) == len(compiled) and all(map(torch.equal, eager, compiled))
    want = compressed_all_reduce(x, int8, scale=0.5, group=dist.group.WORLD).wait()
    assert torch.equal(eager[0], want + 1)


@on_processes
def test_wrappers_around_and_inside(rank: int) -> None:
    """Between wrappers, whose seams all operations pass once."""
    seen: list[str] = []

    class Around(CompressedProcessGroup):
        def change_arguments(self, operation: str, arguments: Any) -> Any:
            seen.append(f"arguments of {operation}")
            return super().change_arguments(operation, arguments)

        def context(self, operation: str, arguments: Any) -> Any:
            seen.append(f"context of {operation}")
            return super().context(operation, arguments)

        def wrap_work(self, operation: str, arguments: Any, work: Any) -> Any:
            seen.append(f"work of {operation}")
            return super().wrap_work(operation, arguments, work)

    group = Around(WrapperProcessGroup(dist.group.WORLD), int8, min_numel=100)
    outer = RecordingProcessGroup(group)
    for numel in (50, 3000):
        seen.clear()
        x = torch.full((numel,), rank + 1.0)
        dist.all_reduce(x, group=outer)
        assert seen == [f"{one} of allreduce" for one in ("arguments", "context", "work")]
        assert x.unique().tolist() == [3.0]
    assert group.compressed == 1 and outer.counters["allreduce"].calls == 2


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


def _fails_between_the_stages(rank: int, codec: Any) -> str:
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
            patch.setattr(compressed, "sum_rows", fail if rank == 0 else compressed.sum_rows)
        group = CompressedProcessGroup(ranks, codec, min_numel=0)
        work = group.allreduce([torch.ones(900)], dist.AllreduceOptions())
        with pytest.raises((RuntimeError, ArithmeticError)) as caught:
            work.wait()
    assert not work.is_success()
    if WORKS_HAVE_ERRORS or codec == torch.bfloat16:
        assert rank == 1 or isinstance(work.exception(), ArithmeticError)
        assert work.exception() is not None
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("codec", [torch.bfloat16, int8], ids=["bfloat16", "int8"])
def test_a_rank_that_fails_between_the_stages(two_ranks: RankPool, codec: Any) -> None:
    own, other = two_ranks.run(_fails_between_the_stages, codec)
    assert own == "between the stages"
    assert re.search("(?i)timed? ?out", other)


def _alone(rank: int, name: str, own_timeout: bool) -> str:
    """Rank 1 comes to none of the stages, or only to the first one."""

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
        return ""
    with pytest.raises((RuntimeError, ArithmeticError)) as caught:
        getattr(group, operation)(*tensors, made).wait()
    return str(caught.value)


#: Operation and codec, and whether a rank comes that fails between the stages.
TIMED: dict[str, tuple[str, Codec, bool]] = {
    "second stage": ("allreduce", int8, True),
    "first stage": ("allreduce", int8, False),
    "gathered": ("allreduce", CODECS["topk"](), False),
    "added up": ("allreduce", CODECS["randomk"](), False),
    "reduce-scatter": ("reduce_scatter_single", int8, False),
    "all-gather": ("all_gather_single", int8, False),
}


@pytest.mark.parametrize("own_timeout", [False, True])
@pytest.mark.parametrize("name", TIMED)
def test_a_rank_that_does_not_come(two_ranks: RankPool, name: str, own_timeout: bool) -> None:
    """It is waited for as long as the call says, or else the group."""
    error = two_ranks.run(_alone, name, own_timeout)[0]
    # Of messages that go point to point Gloo does not say for how long.
    assert re.search("(?i)timed out.*1000 ?ms" if own_timeout else "(?i)time(d )?out", error), error


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
    TypeError: CompressedProcessGroup: codec must be torch.bfloat16, torch.float16 or a codec of torch_commhook.codecs, got <class 'torch_commhook.codecs.blockwise.blockwise'>
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
