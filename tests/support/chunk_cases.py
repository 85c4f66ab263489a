"""Chunks of ranks, codecs, a rank's data in a call, and compressed sums of process groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.codecs.sparse_codec import OneSegmentCodec, SparseCodec
from torch_commhook.collectives.compressed import chunk_sizes
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.process_group import CompressedProcessGroup, RecordingProcessGroup

FIRST = [cls.examples()[0] for cls in CODECS.values()]

#: How many ranks simulated groups have, and how many calls follow one another.
RANKS = [1, 2, 3, 4, 8]
STEPS = 2

#: Elements of all chunks, or a function that returns each chunk's for a number of ranks.
Sizes = int | Callable[[int], list[int]]
CASES: dict[str, Sizes] = {
    **{f"{n} values": n for n in (0, 1, 2, 7, 257, 4000, 9001)},
    "unequal": lambda ranks: [700 * rank + 5 for rank in range(ranks)],
    "the first has none": lambda ranks: [0 if rank == 0 else 300 for rank in range(ranks)],
    "the last has all": lambda ranks: [1000 if rank == ranks - 1 else 0 for rank in range(ranks)],
}

#: Messages that go point to point over Gloo, with 2 and 3 ranks.
LONG: dict[str, Sizes] = {"long messages": 600_000}


def sizes_of(name: str, world_size: int) -> list[int]:
    case = {**CASES, **LONG}[name]
    return chunk_sizes(case, world_size) if isinstance(case, int) else case(world_size)


def options_of(name: str, world_size: int) -> dict[str, Any]:
    return {} if isinstance({**CASES, **LONG}[name], int) else {"sizes": sizes_of(name, world_size)}


def values(rank: int, numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    return torch.randn(numel, generator=generator) * 10.0 ** (seed % 4 - 2)


def rounding_of(codec: Codec, rank: int, seed: int) -> Tensor | None:
    own = 0 if codec.exchange == "all_reduce" else rank
    return torch.tensor([seed + own, 5]) if codec.is_random else None


def error_of(codec: Codec, rank: int, numel: int, seed: int) -> Tensor | None:
    return values(rank, numel, 4 * seed + 100) * 0.01 if codec.takes_error else None


def counted_bytes(
    call: Callable[..., Any], numel: int, codec: Codec, rounding: Tensor | None
) -> tuple[int, int, int]:
    """As the library counts them, by a group that is waited for, and by the way to that."""
    own, through = WireMeter(), WireMeter()
    x, group = torch.randn(numel), RecordingProcessGroup(dist.group.WORLD)
    with counting(own):
        call(x, codec, rounding=rounding).wait()
    with counting(through):
        call(x, codec, rounding=rounding, group=group).wait()
    return own.bytes_sent, through.bytes_sent, group.total.bytes_sent


def bytes_of_value(codec: Codec) -> float:
    if isinstance(codec, BlockCodec):
        form = codec._form
        return form.bits / 8 + 4 * form.parameters / form.block_size
    return codec.nbytes(1 << 20) / (1 << 20)  # of which nothing is known but what it says


#: Results in eager, results compiled, and the graphs that this took.
Modes = tuple[list[Tensor], list[Tensor], int]


def in_both_modes(
    rank: int,
    backend: str,
    call: Callable[..., Tensor],
    memory: Callable[[], list[Tensor | None]],
    rounding: Callable[[int], Tensor | None],
) -> Modes:
    """Three calls on 1301 values in each mode, with memory, which counts among the results."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    results: list[list[Tensor]] = []
    for function in (call, torch.compile(call, backend=backend, fullgraph=True)):
        kept, found = memory(), []
        for step in range(3):
            x, y = values(rank, 301, 4 * step + 2), values(rank, 1000, 4 * step + 2).view(100, 10)
            found.append(function(x, y, *kept, rounding(step)))
        results.append([*found, *(each for each in kept if each is not None)])
    return results[0], results[1], torch._dynamo.utils.counters["stats"]["unique_graphs"]


def most_lost(codec: Codec, x: Tensor) -> float:
    """The most that an encoding of a chunk may lose, as a norm in float64."""
    x = x.double()
    norm, count = float(x.norm()), x.numel()
    if isinstance(codec, SparseCodec):
        kept = codec.entries(count) / count
        if codec.exchange == "all_gather":
            return math.sqrt(1 - kept) * norm
        return norm * max(1.0, 1 / kept - 1)
    if isinstance(codec, OneSegmentCodec):
        return norm
    if not isinstance(codec, BlockCodec):
        return 2.0**-7 * norm
    squares = 0.0
    for block in x.split(codec._form.block_size):
        if codec._name == "sign":
            squares += float(block.square().sum() - block.abs().sum() ** 2 / block.numel())
            continue
        largest = float(block.abs().amax())
        if codec._name == "fp8":
            digits, least = (2, 2.0**-16) if "e5m2" in repr(codec) else (3, 2.0**-9)
            step = largest / (57344.0 if digits == 2 else 448.0)
            off = torch.maximum(block.abs() * 2.0 ** -(digits + 1), torch.tensor(step * least / 2))
        else:
            settings = codec._settings
            levels = 2 ** (settings["bits"] - settings["symmetric"]) - 1
            span = largest if settings["symmetric"] else float(block.amax() - block.amin())
            off = torch.full_like(block, span / levels * (1.0 if codec.is_random else 0.5))
        squares += float(off.square().sum())
    return math.sqrt(squares)


premul: Any = torch._C._distributed_c10d._make_nccl_premul_sum

int8 = CODECS["blockwise"]()


def options(make: Any, op: Any) -> Any:
    made = make()
    made.reduceOp = op
    return made


def group_of(*arguments: Any, **settings: Any) -> CompressedProcessGroup:
    return CompressedProcessGroup(dist.group.WORLD, *arguments, **{"min_numel": 0, **settings})


#: The group's sums, with the number of tensors that each gets in tests.
SUMS = {
    "allreduce": 1,
    "allreduce_coalesced": 2,
    "reduce_scatter_single": 1,
    "reduce_scatter": 1,
    "reduce_scatter_single_coalesced": 2,
}


def issue_sum(group: Any, name: str, op: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """The Work of a sum, and the tensors for its results."""
    ranks = group.size()
    if name == "allreduce":
        return group.allreduce(tensors, options(dist.AllreduceOptions, op)), tensors
    if name == "allreduce_coalesced":
        given = options(dist.AllreduceCoalescedOptions, op)
        return group.allreduce_coalesced(tensors, given), tensors
    outputs = [each.new_full((len(each) // ranks,), 7.0) for each in tensors]
    given = options(dist.ReduceScatterOptions, op)
    if name == "reduce_scatter_single":
        return group.reduce_scatter_single(outputs[0], tensors[0], given), outputs
    if name == "reduce_scatter":
        lists = [list(each.chunk(ranks)) for each in tensors]
        return group.reduce_scatter(outputs, lists, given), outputs
    return group.reduce_scatter_single_coalesced(outputs, tensors, given), outputs
