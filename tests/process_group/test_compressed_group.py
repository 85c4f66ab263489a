"""CompressedProcessGroup: what it compresses, how exactly, what it leaves alone, who calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from chunk_cases import FIRST, SUMS, group_of, int8, issue_sum, options, values
from group_doubles import Alike, completed, registered_mesh
from layered_net import Net, batch, gradients_of
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks
from torch_commhook.codecs import Codec
from torch_commhook.collectives import compressed_all_reduce, compressed_reduce_scatter
from torch_commhook.process_group import (
    CompressedProcessGroup,
    ProcessGroup,
    RecordingProcessGroup,
    WrapperProcessGroup,
)
from torch_commhook.testing import run_ranks

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


class Twice(ProcessGroup):
    """Two ranks that hold the same; keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.sent: list[torch.Tensor] = []

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        assert opts is None or opts.reduceOp == SUM or opts.reduceOp == MAX
        self.sent += [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.mul_(2)
        return completed(tensors)

    allreduce_coalesced = allreduce

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        self.sent.append(input.clone())
        output.copy_(2 * input.view(2, -1)[0].view_as(output))
        return completed([output])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self.sent += inputs[0]
        outputs[0].copy_(2 * inputs[0][0])
        return completed(outputs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input)
        return completed(outputs)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return completed(tensors)


def reduce_options(op: Any = SUM) -> Any:
    return options(dist.AllreduceOptions, op)


def scatter_options(op: Any = SUM) -> Any:
    return options(dist.ReduceScatterOptions, op)


@pytest.mark.parametrize("codec", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [SUM, AVG], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by_future", [False, True])
def test_allreduce(codec: Any, op: Any, dtype: Any, by_future: bool) -> None:
    parent = Twice()
    group = CompressedProcessGroup(parent, codec, min_numel=4)
    x = torch.randn(5, 3, dtype=dtype)
    given = x.clone()
    work = group.allreduce([x], reduce_options(op))
    if by_future:
        assert work.get_future().wait()[0] is x
    else:
        assert work.wait()
    (sent,) = parent.sent
    assert sent.dtype == codec
    torch.testing.assert_close(sent, (given / 2).to(codec).flatten(), rtol=0, atol=0)
    exact = given * 2 if op == SUM else given
    # One rounding of each value; the parent's doubling is exact.
    roundoff = 2.0**-8 if codec == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(x, exact, rtol=roundoff, atol=1e-7)
    assert not torch.equal(x, exact) and group.compressed == 1


def test_a_sum_of_finite_values_stays_in_range() -> None:
    group = CompressedProcessGroup(Twice(), torch.float16, min_numel=0)
    x = torch.full((4,), 40000.0)  # its sum is beyond float16
    group.allreduce([x], reduce_options()).wait()
    assert x.tolist() == [80000.0] * 4


def test_several_tensors() -> None:
    parent = Twice()
    group = CompressedProcessGroup(parent, min_numel=0)
    tensors = [torch.ones(3), torch.full((2, 2), 2.0)]
    group.allreduce_coalesced(tensors, options(dist.AllreduceCoalescedOptions, SUM)).wait()
    assert len(parent.sent) == 1 and parent.sent[0].numel() == 7
    assert [tensor.unique().tolist() for tensor in tensors] == [[2.0], [4.0]]


def test_reduce_scatter_in_all_forms() -> None:
    parent = Twice()
    group = CompressedProcessGroup(parent, min_numel=0)
    x = torch.arange(8.0).view(4, 2)
    out = torch.empty(2, 2)
    for op, factor in ((SUM, 2), (AVG, 1)):
        group.reduce_scatter_single(out, x, scatter_options(op)).wait()
        assert torch.equal(out, factor * x[:2])
        group.reduce_scatter([out], [[x[:2], x[2:]]], scatter_options(op)).wait()
        assert torch.equal(out, factor * x[:2])
        outs = [out.zero_(), torch.empty(1)]
        group.reduce_scatter_single_coalesced(
            outs, [x, torch.ones(2)], scatter_options(op)
        ).get_future().wait()
        assert torch.equal(out, factor * x[:2]) and outs[1].item() == factor
    assert {sent.dtype for sent in parent.sent} == {torch.bfloat16}
    assert group.compressed == 6


@pytest.mark.parametrize(
    "tensor, op",
    [
        (torch.ones(4), SUM),  # small
        (torch.ones(50), MAX),
        (torch.ones(50, dtype=torch.int64), SUM),
        (torch.ones(50, dtype=torch.bfloat16), SUM),
        (torch.ones(50).to_sparse(), SUM),
        (torch.ones(10, 10).t()[:, :5], SUM),
    ],
    ids=["small", "max", "int64", "bfloat16", "sparse", "strided"],
)
def test_what_passes_as_it_is(tensor: torch.Tensor, op: Any) -> None:
    parent = Twice()
    group = CompressedProcessGroup(parent, min_numel=20)
    group.allreduce([tensor], reduce_options(op)).wait()
    assert parent.sent[0].dtype == tensor.dtype and parent.sent[0].shape == tensor.shape
    assert group.compressed == 0
    group.broadcast([torch.ones(50)], dist.BroadcastOptions()).wait()
    assert group.compressed == 0


# ---- among many ranks ----------------------------------------------------------------------------

#: Sizes that no number of ranks divides, and those of a rank's share.
SIZES = (37, 501)
SHARES = (3, 17)


def _given(rank: int, ranks: int, name: str, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    sizes = SIZES if name.startswith("allreduce") else [ranks * share for share in SHARES]
    # All of one sign: none of the sum cancels, so that an error of it is one of its own size.
    return [0.5 + torch.rand(size, generator=generator) for size in sizes[:count]]


def _call_on(
    rank: int, name: str, count: int, op: Any, codec: torch.dtype
) -> tuple[list[torch.Tensor], int]:
    group = group_of(codec)
    work, results = issue_sum(group, name, op, _given(rank, group.size(), name, count))
    assert work.wait() and work.is_completed() and work.is_success()
    return results, group.compressed


@pytest.mark.parametrize("codec", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(("name", "count"), [*SUMS.items(), ("reduce_scatter", 2)])
def test_the_error_does_not_grow_with_the_ranks(
    name: str, count: int, ranks: int, codec: torch.dtype
) -> None:
    given = [_given(rank, ranks, name, count) for rank in range(ranks)]
    sums = [torch.stack(each).double().sum(0) for each in zip(*given, strict=True)]
    is_for_all = name.startswith("allreduce")
    rtol = 2.0**-8 if codec == torch.bfloat16 else 2.0**-11
    rtol *= 1 + is_for_all  # whose sum is rounded, too
    for op, factor in ((SUM, 1), (AVG, ranks)):
        results = run_ranks(_call_on, ranks, name, count, op, codec)
        for rank, (tensors, compressed) in enumerate(results):
            assert compressed == 1
            for i, (got, exact) in enumerate(zip(tensors, sums, strict=True)):
                if is_for_all:
                    assert torch.equal(got, results[0][0][i])
                else:
                    exact = exact.chunk(ranks)[rank]
                torch.testing.assert_close(got.double(), exact / factor, rtol=rtol, atol=0)


def _bytes(rank: int) -> None:
    recording = RecordingProcessGroup(dist.group.WORLD)
    group = CompressedProcessGroup(recording, min_numel=10)
    ranks = group.size()
    group.allreduce([torch.ones(160)], reduce_options()).wait()
    output = torch.empty(160 // ranks)
    group.reduce_scatter_single(output, torch.ones(160), scatter_options()).wait()
    recorded = sum(each.bytes_sent for each in recording.counters.values())
    group.allreduce([torch.ones(8)], reduce_options()).wait()  # passes as it is
    assert group.bytes_sent == recorded == 2 * (3 * 160 * (ranks - 1) // ranks)


@pytest.mark.parametrize("ranks", [2, 8])
def test_bytes_of_what_is_compressed(ranks: int) -> None:
    run_ranks(_bytes, ranks)


@contextmanager
def _in_float32() -> Iterator[None]:
    """Two ranks add their values as many do: each rank its part, in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_commhook.process_group.compressed.LEAST_RANKS", 2)
        yield


@on_processes
def test_bytes_on_a_second_group(rank: int) -> None:
    with _in_float32():
        group = group_of()
        group.allreduce([torch.ones(160)], reduce_options()).wait()
        assert group.bytes_sent == 2 * 160


@on_ranks(8)
def test_lists_of_uneven_parts(rank: int) -> None:
    group = group_of()
    parts = [torch.full((place,), rank + 10.0 * place) for place in range(8)]
    output = torch.empty(rank, dtype=torch.float64)
    group.reduce_scatter([output], [parts], scatter_options()).get_future().wait()
    assert output.tolist() == [28.0 + 80.0 * rank] * rank


def test_works_that_have_no_future() -> None:
    parent = Alike(8)
    group = CompressedProcessGroup(parent, min_numel=0)
    x = torch.ones(16)
    given = reduce_options(SUM)
    given.timeout = timedelta(seconds=7)
    assert group.allreduce([x], given).wait() and x.tolist() == [8.0] * 16
    output = torch.empty(2)
    assert group.reduce_scatter_single(output, x, scatter_options(AVG)).wait()
    assert output.tolist() == [8.0] * 2
    names = ["all_to_all_single", "all_gather_single", "all_to_all_single"]
    assert [name for name, _ in parent.called] == names
    assert [timeout for _, timeout in parent.called[:2]] == [timedelta(seconds=7)] * 2


@on_processes
def test_several_at_once_over_gloo(rank: int) -> None:
    """Waited for in another order than that of the calls, and by another one on a rank."""
    with _in_float32():
        group = group_of()
        tensors = [torch.full((1001 * (9 - i),), rank + i + 1.0) for i in range(9)]
        works = [group.allreduce([tensor], reduce_options()) for tensor in tensors]
        output = torch.empty(3)
        works.append(group.reduce_scatter_single(output, torch.ones(6), scatter_options()))
        futures = [work.get_future() for work in works[3:6]]
        for work in works if rank else reversed(works):
            assert work.wait() and work.is_success()
        assert [each.unique().tolist() for each in tensors] == [[2.0 * i + 3.0] for i in range(9)]
        assert output.unique().tolist() == [2.0]
        assert all(future.wait()[0] is tensors[i + 3] for i, future in enumerate(futures))
        empty = torch.empty(0)
        group.allreduce([empty], reduce_options()).wait()


@on_processes
@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_models_send_half(rank: int, kind: str, in_float32: bool) -> None:
    recording = RecordingProcessGroup(dist.group.WORLD)
    compressed = CompressedProcessGroup(recording, min_numel=100)
    plain = RecordingProcessGroup(dist.group.WORLD)
    found, sent = [], []
    for group, counted in ((plain, plain), (compressed, recording)):
        with (
            registered_mesh(group, f"compressed {kind} {len(found)}") as mesh,
            _in_float32() if in_float32 else nullcontext(),
        ):
            torch.manual_seed(0)
            model: Any = Net()
            if kind == "ddp":
                model = DDP(model, process_group=group)
            else:
                for layer in (*model.layers, model):
                    fully_shard(layer, mesh=mesh)
            counted.clear()
            model(batch(rank)).square().sum().backward()
            operations = ["allreduce"] if kind == "ddp" else ["reduce_scatter_single"]
            if "all_to_all_single" in counted.counters:
                operations = ["all_to_all_single"] + ["all_gather_single"] * (kind == "ddp")
            sent.append(sum(counted.counters[name].bytes_sent for name in operations))
            gradients = gradients_of(model)
            if kind != "ddp":
                gradients = [gradient.full_tensor() for gradient in gradients]
            found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert sent[1] == sent[0] / 2
    assert 0 < (found[0] - found[1]).norm() / found[0].norm() < 2**-8


@on_processes
def test_dtensor(rank: int) -> None:
    compressed = group_of()
    with registered_mesh(compressed, "compressed tensors") as mesh:
        x = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        local = x.to_local() * (rank + 1)
        summed = type(x).from_local(local, mesh, [Partial()]).redistribute(mesh, [Replicate()])
        assert compressed.compressed == 1
        assert summed.to_local().sum().item() == 12.0


# ---- who calls it with codecs --------------------------------------------------------------------


@on_processes
@pytest.mark.parametrize("codec", [codec for codec in FIRST if not codec.is_random], ids=repr)
def test_dtensor_with_codecs(rank: int, codec: Codec) -> None:
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
