"""The compressed sum over all ranks: values, memory, bytes on the wire, and its groups.

Values are those of the codec's own methods, called one after another by hand. Simulated groups take
the way on which the call waits for the first stage; Gloo the one with a second group.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_cases import RANKS, STEPS, Modes, bytes_of_value, counted_bytes, in_both_modes
from codec_examples import of_each_codec
from collective_cases import COMPILED_CODECS, assert_the_bits_of_eager
from on_ranks import on_processes
from rank_pool import RankPool
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_commhook import hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives import compressed_all_reduce
from torch_commhook.collectives.compressed_call import MessageBuffers, segment_range
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.testing import run_ranks, simulate

# ---- by hand -------------------------------------------------------------------------------------


class Memory:
    """What a caller keeps for one rank between calls, with some error in it at first."""

    def __init__(self, codec: Codec, numel: int, rank: int, world_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + 100 + rank)
        begin, end = segment_range(codec, numel, rank=rank, world_size=world_size)
        staged = codec.exchange == "all_to_all"
        self.error = self.sum_error = self.rounding = None
        if codec.takes_error:
            self.error = torch.randn(numel, generator=generator) * 0.01
            if staged:
                self.sum_error = torch.randn(end - begin, generator=generator) * 0.01
        if codec.is_random:
            own = rank if codec.exchange != "all_reduce" else 0
            self.rounding = torch.tensor([[seed + own, 5], [seed + 50 + rank, 5]])

    def row(self, number: int) -> Tensor | None:
        return None if self.rounding is None else self.rounding[number]

    def advance(self) -> None:
        if self.rounding is not None:
            self.rounding[:, 1] += 1

    def options(self) -> dict[str, Any]:
        return {"error": self.error, "sum_error": self.sum_error, "rounding": self.rounding}

    def state(self) -> list[Tensor]:
        kept = (self.error, self.sum_error)
        return [tensor.clone() for tensor in kept if tensor is not None]


def by_hand(
    codec: Codec,
    sources: list[list[Tensor]],
    out: list[Tensor],
    scale: float,
    memories: list[Memory],
) -> None:
    """What the sum must be, of all ranks' tensors, and what the ranks then remember."""
    numel = sum(tensor.numel() for tensor in sources[0])
    staged = codec.exchange == "all_to_all"
    segments = codec.segments(numel, len(sources) if staged else 1)
    messages = []
    for tensors, memory in zip(sources, memories, strict=True):
        messages.append(torch.empty(sum(segment.nbytes for segment in segments), dtype=torch.uint8))
        options = {"error": memory.error, "rounding": memory.row(0)}
        codec.encode(tensors, messages[-1], segments=len(segments), **options)
    if codec.exchange == "all_gather":
        codec.decode_sum(torch.stack(messages), out, scale=scale)
        return
    if codec.exchange == "all_reduce":
        total = torch.stack([message.view(torch.float32) for message in messages]).sum(0) * scale
        codec.decode(total.view(torch.uint8), out, rounding=memories[0].row(0))
        return
    pieces = [message.split([segment.nbytes for segment in segments]) for message in messages]
    sums = []
    for owner, (segment, memory) in enumerate(zip(segments, memories, strict=True)):
        received = torch.stack([own[owner] for own in pieces])
        sums.append(torch.empty(segment.nbytes, dtype=torch.uint8))
        codec.reduce(
            received,
            sums[-1],
            segment.numel,
            scale=scale,
            error=memory.sum_error,
            rounding=memory.row(1),
        )
    codec.decode(torch.cat(sums), out, segments=len(sources))


# ---- what is summed ------------------------------------------------------------------------------

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16

#: Shapes and dtypes of the tensors, and what they are written into: ``new`` is up to the call,
#: ``same`` are they themselves, else shapes and dtypes.
Form = list[tuple[tuple[int, ...], torch.dtype]]
CASES: dict[str, tuple[Form, str | Form]] = {
    **{f"{n} values": ([((n,), F32)], "new") for n in (0, 1, 2, 7, 255, 256, 257, 1000, 2049)},
    "many values": ([((9000,), F32)], "same"),
    "long messages": ([((600_000,), F32)], "same"),  # point to point among 2 and 3 ranks
    "several": ([((7, 50), F32), ((), F32), ((0,), F32), ((300,), F32)], "same"),
    "strides": ([((50, 70), F32), ((3, 40, 9), F32)], [((90, 50), F32), ((80,), F32)]),
    "float64": ([((1500,), F64)], "new"),
    "float16": ([((1500,), F16)], "new"),
    "bfloat16": ([((1500,), BF16)], "same"),
    "dtypes": (
        [((40, 40), BF16), ((33,), F64), ((700,), F32), ((67,), F16)],
        [((800,), F64), ((20, 80), BF16)],
    ),
}


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor whose values do not follow each other, where it has two dimensions."""
    return torch.empty(shape[::-1], dtype=dtype).permute(list(reversed(range(len(shape)))))


def tensors_of(name: str, rank: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    magnitude = 10.0 ** (seed % 4 - 2)
    return [
        strided(shape, dtype).copy_(torch.randn(shape, generator=generator) * magnitude)
        for shape, dtype in CASES[name][0]
    ]


def outputs_of(name: str, sources: list[Tensor]) -> list[Tensor] | None:
    form = CASES[name][1]
    if isinstance(form, str):
        return sources if form == "same" else None
    return [strided(shape, dtype).fill_(77) for shape, dtype in form]


def _sums(rank: int, codec: Codec, names: Sequence[str], seed: int) -> list[Any]:
    """Each case, some calls after another with the same memory."""
    world_size = dist.get_world_size()
    found = []
    for name in names:
        numel = sum(tensor.numel() for tensor in tensors_of(name, rank, seed))
        memory = Memory(codec, numel, rank, world_size, seed)
        buffers = MessageBuffers()
        for step in range(STEPS):
            sources = tensors_of(name, rank, seed + step)
            before = [tensor.clone() for tensor in sources]
            out = outputs_of(name, sources)
            meter = WireMeter()
            with counting(meter):
                future = compressed_all_reduce(
                    sources if len(sources) > 1 else sources[0],
                    codec,
                    scale=1 / world_size,
                    out=out if out is None or len(out) > 1 else out[0],
                    buffers=buffers,
                    **memory.options(),
                )
            got = future.wait()
            if out is not sources:
                assert all(map(torch.equal, sources, before)), "what is summed was written"
            assert out is None or got is out[0]
            memory.advance()
            results = [tensor.clone() for tensor in (out or [got])]
            found.append((results, memory.state(), meter.bytes_sent))
    return found


def is_sum(codec: Codec, world_size: int, got: Tensor, right: Tensor) -> bool:
    """The same bits; where a group adds numbers up, in an order of its own, nearly."""
    if codec.exchange != "all_reduce" or world_size <= 2 or not right.numel():
        return torch.equal(got, right)
    # In float32, whatever the dtype; and of those that cancel each other little is left.
    bound = 1e-6 * world_size * (1 + float(right.abs().amax()))
    rounding = 2 * torch.finfo(right.dtype).eps * right.abs()
    return bool(((got - right).abs() <= bound + rounding).all())


def check_sums(codec: Codec, ranks: list[list[Any]], names: Sequence[str], seed: int) -> None:
    world_size = len(ranks)
    place = 0
    for name in names:
        numel = sum(tensor.numel() for tensor in tensors_of(name, 0, seed))
        memories = [Memory(codec, numel, rank, world_size, seed) for rank in range(world_size)]
        for step in range(STEPS):
            sources = [tensors_of(name, rank, seed + step) for rank in range(world_size)]
            out = outputs_of(name, [tensor.clone() for tensor in sources[0]])
            if out is None:
                out = [sources[0][0].new_empty(numel)]
            by_hand(codec, sources, out, 1 / world_size, memories)
            what = f"{name} in call {step} over {world_size} ranks, seed {seed}"
            for rank, (memory, found) in enumerate(zip(memories, ranks, strict=True)):
                results, state, _ = found[place]
                assert len(results) == len(out) and len(state) == len(memory.state())
                for i, (got, right) in enumerate(zip(results, out, strict=True)):
                    assert got.dtype == right.dtype and got.shape == right.shape
                    assert is_sum(codec, world_size, got, right), f"{what}: rank {rank}"
                    assert torch.equal(got, ranks[0][place][0][i]), what
                for got, right in zip(state, memory.state(), strict=True):
                    assert torch.equal(got, right), f"{what}: memory of rank {rank}"
                memory.advance()
            place += 1


@pytest.mark.parametrize("world_size", RANKS)
@of_each_codec
def test_simulated(codec: Codec, world_size: int) -> None:
    seed = random.randrange(1 << 20)
    names = list(CASES)
    check_sums(codec, run_ranks(_sums, world_size, codec, names, seed, seed=seed), names, seed)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
def test_on_gloo(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    seed = random.randrange(1 << 20)
    names = list(CASES)
    check_sums(codec, pools[world_size].run(_sums, codec, names, seed), names, seed)


# ---- what it waits for ---------------------------------------------------------------------------


@on_processes
@pytest.mark.parametrize("codec", [CODECS["blockwise"](), CODECS["topk"](1.0)], ids=repr)
def test_the_call_waits_for_nobody(rank: int, codec: Codec) -> None:
    """Rank 1 calls when rank 0's call has returned."""
    store = distributed_c10d._get_default_store()
    key = f"returned {codec}"
    if rank == 1:
        store.wait([key], timedelta(seconds=20))
    future = compressed_all_reduce(torch.full((600,), float(rank)), codec)
    if rank == 0:
        store.set(key, "")
    result = future.wait()
    store.delete_key(key)
    assert torch.equal(result, torch.ones(600))


# ---- bytes on the wire ---------------------------------------------------------------------------


def expected_bytes(codec: Codec, numel: int, world_size: int) -> tuple[float, float]:
    """What each rank sends by the formula, and how far padding may take it from there."""
    if codec.exchange == "all_gather":
        return codec.nbytes(numel) * (world_size - 1), 0
    if codec.exchange == "all_reduce":
        return 2 * codec.nbytes(numel) * (world_size - 1) / world_size, 1
    formula = 2 * bytes_of_value(codec) * numel * (world_size - 1) / world_size
    if not isinstance(codec, BlockCodec):
        return formula, 16 * (world_size - 1)
    # Segments have whole blocks, whose parameters are sent also where they are short. Values and
    # parameters fill up 16 bytes each; all send as much of the sum as the one with the longest
    # segment.
    return formula, 2 * (world_size - 1) * (codec.block_size * bytes_of_value(codec) + 8 + 27)


def _bytes(rank: int, codec: Codec, numel: int) -> tuple[int, int, int]:
    memory = Memory(codec, numel, rank, dist.get_world_size(), 3)
    return counted_bytes(compressed_all_reduce, numel, codec, memory.rounding)


@pytest.mark.parametrize("numel", [1 << 16, 10_001, 300])
@of_each_codec
def test_bytes(codec: Codec, numel: int) -> None:
    for world_size in (2, 3, 4, 8):
        formula, padding = expected_bytes(codec, numel, world_size)
        grads = [[torch.randn(numel)] for _ in range(world_size)]
        found = simulate(hooks.compressed(codec), grads)
        for sent, counts in zip(
            found.bytes_sent, run_ranks(_bytes, world_size, codec, numel), strict=True
        ):
            assert abs(sent - formula) <= padding
            assert counts == (sent, sent, sent)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
def test_bytes_on_gloo(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    """Ranks exchange messages as long as each is; through a group around theirs they fill up."""
    numel, others = 20_000, world_size - 1
    formula, padding = expected_bytes(codec, numel, world_size)
    if codec.exchange == "all_to_all":
        segments = [segment.nbytes for segment in codec.segments(numel, world_size)]
        exact = [sum(segments) - own + own * others for own in segments]
    else:  # what is added up is little enough for each rank to get it from all
        exact = [codec.nbytes(numel) * others] * world_size
    found = pools[world_size].run(_bytes, codec, numel)
    for own, (sent, through, counted) in zip(exact, found, strict=True):
        assert sent == own
        assert through == counted
        assert abs(through - formula) <= padding


# ---- compiled ------------------------------------------------------------------------------------


def _compiled(rank: int, codec: Codec, backend: str) -> Modes:
    def call(x: Tensor, y: Tensor, error: Any, sum_error: Any, rounding: Any) -> Tensor:
        summed = compressed_all_reduce(
            [x * 2, y.t() * 3],
            codec,
            scale=0.5,
            error=error,
            sum_error=sum_error,
            rounding=rounding,
        )
        return summed.then(lambda done: done.value() + 1).wait() * 3

    def new() -> Memory:
        return Memory(codec, 1301, rank, dist.get_world_size(), 8)

    def memory() -> list[Tensor | None]:
        return [new().error, new().sum_error]

    def rounding(step: int) -> Tensor | None:
        drawn = new().rounding
        return None if drawn is None else drawn + torch.tensor([0, step])

    return in_both_modes(rank, backend, call, memory, rounding)


@pytest.mark.parametrize(("backend", "codec"), COMPILED_CODECS, ids=repr)
def test_compiled(two_ranks: RankPool, backend: str, codec: Codec) -> None:
    assert_the_bits_of_eager(two_ranks.run(_compiled, codec, backend, timeout=180))
