"""Collectives on tensors that depend on the rank, by all ways of calling them.

Each case is called as ``case(rank, world_size, group)`` and returns tensors. The group is None for
the default one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from torch_commhook.codecs import CODECS

Case = Callable[[int, int, Any], list[Tensor]]
SUM = dist.ReduceOp.SUM

#: The error of each for an argument that is not a group.
NO_GROUP = TypeError, "process_group must be a ProcessGroup, got int"

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
REDUCED_BY_GLOO = (
    (("SUM", "AVG", "PRODUCT", "MIN", "MAX"), FLOATS),
    (("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"), (*INTEGERS, torch.bool)),
    (("SUM", "AVG"), (torch.complex64,)),
)

#: Settings for compilation of calls with a codec, with the codec.
COMPILED_CODECS = [
    *(("aot_eager", cls.examples()[-1]) for cls in CODECS.values()),
    *(("inductor", CODECS[name]()) for name in ("blockwise", "topk")),
]

# Their names depend on torch; the old ones warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def all_reduce_case(op: str, dtype: torch.dtype) -> Case:
    def run(rank: int, size: int, group: Any) -> list[Tensor]:
        x = values(rank, 3, 5, dtype=dtype)
        dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group)
        return [x]

    return run


def into(output: Tensor, collective: Callable[..., Any], *given: Any) -> list[Tensor]:
    collective(output, *given)
    return [output]


def _all_reduce_coalesced(rank: int, size: int, group: Any) -> list[Tensor]:
    tensors = [values(rank, 4), values(rank, 2, 3)]
    opts = dist.AllreduceCoalescedOptions()
    (group or dist.group.WORLD).allreduce_coalesced(tensors, opts).wait()
    return tensors


def _all_reduce_sparse(rank: int, size: int, group: Any) -> list[Tensor]:
    indices = [[0, rank + 1, 0]]
    x = torch.sparse_coo_tensor(indices, values(rank, 3, 2), (size + 2, 2), check_invariants=True)
    dist.all_reduce(x, group=group)
    assert x.is_coalesced()
    return [x.indices(), x.values()]


def _broadcast(rank: int, size: int, group: Any) -> list[Tensor]:
    x, y = values(rank, 4), values(rank, 3, dtype=torch.bool)
    dist.broadcast(x, src=size - 1, group=group)
    dist.broadcast(y, src=0, group=group)
    return [x, y]


def _reduce(rank: int, size: int, group: Any) -> list[Tensor]:
    x = values(rank, 5)
    dist.reduce(x, dst=size - 1, op=dist.ReduceOp.MAX, group=group)
    return [x] if rank == size - 1 else []


def _all_gather(rank: int, size: int, group: Any) -> list[Tensor]:
    outputs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(outputs, values(rank, 2, 3), group=group)
    return outputs


def _all_gather_in_place(rank: int, size: int, group: Any) -> list[Tensor]:
    output = torch.zeros(size * 3)
    own = output[3 * rank : 3 * rank + 3]
    own.copy_(values(rank, 3))
    all_gather_single(output, own, group=group)
    return [output]


def _all_gather_coalesced(rank: int, size: int, group: Any) -> list[Tensor]:
    outputs = [[torch.empty(4), torch.empty(2, 3)] for _ in range(size)]
    inputs = [values(rank, 4), values(rank, 2, 3)]
    (group or dist.group.WORLD).allgather_coalesced(outputs, inputs).wait()
    return [tensor for tensors in outputs for tensor in tensors]


def _gather(rank: int, size: int, group: Any) -> list[Tensor]:
    outputs = [torch.empty(4) for _ in range(size)] if rank == 0 else None
    dist.gather(values(rank, 4), outputs, dst=0, group=group)
    return outputs or []


def _scatter(rank: int, size: int, group: Any) -> list[Tensor]:
    output = torch.empty(4)
    inputs = [values(10 + i, 4) for i in range(size)] if rank == size - 1 else None
    dist.scatter(output, inputs, src=size - 1, group=group)
    return [output]


def _reduce_scatter(rank: int, size: int, group: Any) -> list[Tensor]:
    output = torch.empty(3)
    dist.reduce_scatter(output, [values(10 * rank + i, 3) for i in range(size)], group=group)
    return [output]


def _all_to_all(rank: int, size: int, group: Any) -> list[Tensor]:
    inputs = [values(10 * rank + i, 3) for i in range(size)]
    outputs = [torch.empty(3) for _ in range(size)]
    dist.all_to_all(outputs, inputs, group=group)
    return outputs


def _all_to_all_single(rank: int, size: int, group: Any) -> list[Tensor]:
    equal, uneven = torch.empty(2 * size, 3), torch.empty((rank + 1) * size, 3)
    dist.all_to_all_single(equal, values(rank, 2 * size, 3), group=group)
    sends = [i + 1 for i in range(size)]
    dist.all_to_all_single(
        uneven, values(rank, sum(sends), 3), [rank + 1] * size, sends, group=group
    )
    return [equal, uneven]


def _ring(rank: int, size: int, group: Any) -> list[Tensor]:
    output = torch.empty(4)
    sent = dist.isend(values(rank, 4), (rank + 1) % size, group=group)
    received = dist.irecv(output, (rank - 1) % size, group=group)
    sent.wait()
    received.wait()
    return [output]


def _tags(rank: int, size: int, group: Any) -> list[Tensor]:
    """Receives messages in the reverse order of their sending."""
    first, second = torch.empty(4), torch.empty(4)
    other = rank ^ 1
    if other >= size:
        return []
    if rank % 2 == 0:
        works = [dist.isend(values(tag, 4), other, group=group, tag=tag) for tag in (1, 2)]
    else:
        works = [dist.irecv(x, other, group, tag) for x, tag in ((second, 2), (first, 1))]
    for work in works:
        work.wait()
    return [first, second] if rank % 2 else []


def _any_source(rank: int, size: int, group: Any) -> list[Tensor]:
    if rank:
        dist.send(values(rank, 4), 0, group=group)
        return []
    received = {}
    for _ in range(size - 1):
        x = torch.empty(4)
        source = dist.recv(x, None, group=group)
        received[source] = x
    return [received[source] for source in sorted(received)]


def _objects(rank: int, size: int, group: Any) -> list[Tensor]:
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "more": "x" * rank}, group=group)
    one = [rank if rank == 0 else None]
    dist.broadcast_object_list(one, src=0, group=group)
    return [torch.tensor([each["rank"] + len(each["more"]) for each in every] + one)]


def _batch_isend_irecv(rank: int, size: int, group: Any) -> list[Tensor]:
    output = torch.empty(4)
    ops = [
        dist.P2POp(dist.irecv, output, (rank - 1) % size, group),
        dist.P2POp(dist.isend, values(rank, 4), (rank + 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [output]


def _futures(rank: int, size: int, group: Any) -> list[Tensor]:
    first, second = values(rank, 4), values(rank, 2)
    works = [dist.all_reduce(x, group=group, async_op=True) for x in (first, second)]
    futures = [work.get_future().then(lambda f: f.value()[0] * 2) for work in works]
    return [futures[1].wait(), futures[0].wait()]


def _coalescing_manager(rank: int, size: int, group: Any) -> list[Tensor]:
    first, second = values(rank, 4), values(rank, 2)
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_reduce(first, group=group)
        dist.all_reduce(second, group=group)
    return [first, second]


def _barriers(rank: int, size: int, group: Any) -> list[Tensor]:
    dist.barrier(group=group)
    (group or dist.group.WORLD).monitored_barrier()
    return []


#: By name. Gloo supports all of these.
CASES: dict[str, Case] = {
    case.__name__.removeprefix("_"): case
    for case in (
        *(_all_reduce_coalesced, _all_reduce_sparse, _broadcast, _reduce),
        *(_all_gather, _all_gather_in_place, _all_gather_coalesced),
        *(_gather, _scatter, _reduce_scatter),
        *(_all_to_all, _all_to_all_single, _ring, _tags, _any_source, _objects),
        *(_batch_isend_irecv, _futures, _coalescing_manager, _barriers),
    )
} | {
    "all_reduce_empty": lambda rank, size, group: into(torch.empty(0), dist.all_reduce, SUM, group),
    "broadcast_empty": lambda rank, size, group: into(torch.empty(0), dist.broadcast, 0, group),
    "all_reduce_not_contiguous": lambda rank, size, group: into(
        values(rank, 4, 6).t(), dist.all_reduce, SUM, group
    ),
    "all_gather_single": lambda rank, size, group: into(
        torch.empty(size * 2, 3), all_gather_single, values(rank, 2, 3), group
    ),
    "reduce_scatter_single": lambda rank, size, group: into(
        torch.empty(2, 3), reduce_scatter_single, values(rank, size * 2, 3), SUM, group
    ),
}

REDUCTIONS: dict[str, Case] = {
    f"all_reduce {op} {dtype}": all_reduce_case(op, dtype)
    for ops, dtypes in REDUCED_BY_GLOO
    for op in ops
    for dtype in dtypes
}

#: Functional collectives of two ranks, called as ``function(tensor, name of the group)``.
FUNCTIONAL: dict[str, Callable[[Tensor, str], Tensor]] = {
    "all_reduce": lambda x, name: functional.all_reduce(x, "sum", name),
    "all_gather": lambda x, name: functional.all_gather_tensor(x, 0, name),
    "reduce_scatter": lambda x, name: functional.reduce_scatter_tensor(x, "sum", 0, name),
    "all_to_all": lambda x, name: functional.all_to_all_single(x, None, None, name),
    "broadcast": lambda x, name: functional.broadcast(x, 1, name),
    "coalesced": lambda x, name: torch.cat(
        functional.all_reduce_coalesced([x, x + 1], "max", name)
    ),
    "gathered coalesced": lambda x, name: torch.cat(
        functional.all_gather_into_tensor_coalesced([x, x + 1], name)
    ),
    "scattered coalesced": lambda x, name: torch.cat(
        functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], name)
    ),
}


def assert_the_bits_of_eager(results: list[tuple[list[Tensor], list[Tensor], int]]) -> None:
    """Compares each rank's results in eager and compiled mode; all calls share one graph."""
    for eager, compiled, graphs in results:
        assert all(map(torch.equal, eager, compiled))
        assert graphs == 1
