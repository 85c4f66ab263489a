"""Which groups share memory for their compressed sums, and how their ranks agree on it.

The ranks are processes over Gloo. Files that they map stand in for the memory of GPUs. Ranks try
the memory out before they use it, and use collectives where a trial fails.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all_ranks, on_pool, on_processes
from symmetric_ranks import CODEC, of_each_block_codec, shared_memories
from torch import Tensor, nn

from torch_commhook import _C, PeerError, ProcessGroup, attach, hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives import (
    compressed,
    compressed_all_reduce,
    symmetric,
    symmetric_memory,
)
from torch_commhook.collectives.compressed_call import MessageBuffers
from torch_commhook.collectives.gloo_groups import state_of
from torch_commhook.collectives.symmetric_memory import (
    SymmetricBuffers,
    control_words,
    trial_segments,
    try_out,
)
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.step import attached_hook
from torch_commhook.step.step_group import StepGroup

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OTHER = CODECS["blockwise"](bits=4, block_size=64)
SHORT = timedelta(seconds=0.3)
on_three = on_pool("three_ranks")


def summed(
    rank: int,
    buffers: MessageBuffers | None = None,
    group: dist.ProcessGroup | None = None,
    codec: Codec = CODEC,
    numel: int = 1000,
) -> Tensor:
    """The compressed sum of values that depend on the rank."""
    x, out = torch.randn(numel, generator=torch.Generator().manual_seed(rank)), torch.zeros(numel)
    compressed_all_reduce(x, codec, out=out, buffers=buffers, group=group).wait()
    return out


class Files:
    """A double of PyTorch's symmetric memory."""

    def __init__(self, rank: int, folder: Path, fails: str) -> None:
        # rank: this rank; folder: for the files; fails: the operation that raises an error:
        # "allocate" or "share"
        self.rank, self.folder, self.fails = rank, folder, fails
        self.numbers = count()
        #: This rank's memories that are still in use.
        self.alive: weakref.WeakSet[_Memory] = weakref.WeakSet()

    def allocate(self, nbytes: int, _device: object, group: dist.ProcessGroup) -> Any:
        if self.fails == "allocate":
            raise MemoryError("there is none left")
        number = next(self.numbers)

        def of_rank(rank: int) -> Tensor:
            path = f"{self.folder}/{number} of rank {rank}"
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

        memory = _Memory(of_rank(self.rank))
        self.alive.add(memory)

        def share() -> tuple[list[Tensor], object]:
            if self.fails == "share":
                raise RuntimeError("the driver shares nothing")
            return [of_rank(rank) for rank in range(group.size())], memory

        return share


class _Memory:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def with_files(
    rank: int, folder: Path, *, obstacle: str = "", machine: str = "m", gpu: str = "", **more: str
) -> Iterator[Files]:
    files = Files(rank, folder, more.get("fails", ""))
    place = symmetric._Place(obstacle, machine, gpu or f"gpu {rank}", more.get("torch", "2"))
    with ExitStack() as stack:
        for name, double in [
            ("_may_share", lambda *_: True),
            ("_own_place", lambda _: place),
            ("_missing_link", lambda *_: more.get("link", "")),
            ("_allocate", files.allocate),
        ]:
            stack.enter_context(mock.patch.object(symmetric, name, double))
        for module in (compressed, attached_hook):
            stack.enter_context(mock.patch.object(module, "SHARING_DEVICES", ("cpu",)))
        yield files


# ---- groups --------------------------------------------------------------------------------------


@on_three
def test_buckets_of_several_sizes(rank: int, tmp_path: Path) -> None:
    buffers = MessageBuffers()
    meters = WireMeter(), WireMeter()
    with with_files(rank, tmp_path) as files:
        for numel in (1000, 5000, 300, 5000, 0):
            with counting(meters[0]):
                got = summed(rank, buffers, numel=numel)
            with counting(meters[1]):
                right = summed(rank, numel=numel)
            assert torch.equal(got, right), numel
        assert symmetric.obstacle_of(dist.group.WORLD) == ""
        assert next(files.numbers) == 2  # a message of 5,000 values has outgrown the first
    assert meters[0].bytes_sent == meters[1].bytes_sent > 0
    found = weakref.ref(state_of(dist.group.WORLD).shared_memory[buffers])
    del buffers
    gc.collect()
    assert found() is None


@on_three
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([{}, {"obstacle": "it is off"}, {}], "rank 1: it is off"),
        ([{}, {}, {"machine": "other"}], "the ranks are on several machines"),
        ([{"gpu": "a"}, {"gpu": "a"}, {}], "several ranks have one GPU"),
        ([{"torch": "1"}, {}, {}], "the ranks have different releases of torch"),
        ([{}, {}, {"link": "no NVLink"}], "rank 2: no NVLink"),
        ([{}, {"fails": "allocate"}, {}], "rank 1: MemoryError: there is none left"),
        ([{"fails": "share"}, {}, {}], "rank 0: RuntimeError: the driver shares nothing"),
    ],
)
def test_one_rank_that_cannot(
    rank: int, options: list[dict[str, str]], reason: str, tmp_path: Path
) -> None:
    """All ranks use collectives, and know why."""
    group = dist.new_group()
    with with_files(rank, tmp_path, **options[rank]):
        buffers = MessageBuffers()
        for _ in range(2):
            assert torch.equal(summed(rank, buffers, group), summed(rank))
        assert buffers not in state_of(group).shared_memory
        assert symmetric.obstacle_of(group) == reason
    dist.destroy_process_group(group)


@on_three
@pytest.mark.parametrize("fails_a_step", [False, True])
def test_a_rank_that_gives_up(rank: int, fails_a_step: bool, tmp_path: Path) -> None:
    """The others do not wait for it."""
    group = dist.new_group()
    buffers = [MessageBuffers(), MessageBuffers()]
    step = StepGroup(devices=())
    assert step.private_group(group, CUDA) is group  # as for a group that cannot connect anew

    step.begin()
    with with_files(rank, tmp_path):
        assert all(summed(rank, each, group).isfinite().all() for each in buffers)
        if rank != 1:
            assert all(summed(rank, each, group).isnan().all() for each in buffers)
        elif fails_a_step:
            step.fail("something is wrong here")
        else:
            symmetric.give_up(group)
        for each in buffers:
            with pytest.raises(RuntimeError, match=r"rank [012] of the group did not reach"):
                summed(rank, each, group)
    step.fail("this step has failed")
    dist.destroy_process_group(group)


@on_processes
@pytest.mark.parametrize(("models", "fails_at"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_fails_in_its_first_step(
    rank: int, models: int, fails_at: int, tmp_path: Path
) -> None:
    """The others ask it for its memory, and do not wait until the group's timeout."""
    group = dist.new_group(timeout=timedelta(hours=1))  # far more than the test has
    nets = [nn.Linear(300, 30) for _ in range(models)]
    own_group = StepGroup.group_for

    def as_of_a_device(self: StepGroup, _device: torch.device) -> dist.ProcessGroup:
        return own_group(self, torch.device("meta"))  # which has no backend of Gloo

    with mock.patch.object(StepGroup, "group_for", as_of_a_device), with_files(rank, tmp_path):
        handles = [attach(net, hooks.blockwise(8), process_group=group) for net in nets]
        if rank == 1:
            handles[fails_at].register_prehook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError if rank == 1 else PeerError, match="division"):
            torch.stack([net(torch.ones(2, 300)).sum() for net in nets]).sum().backward()


class Group(ProcessGroup):
    """One of Python."""


@on_processes
def test_groups_and_codecs_that_may(rank: int) -> None:
    world = dist.group.WORLD

    def may(codec: Codec = CODEC, device: torch.device = CUDA, group: Any = world) -> bool:
        return symmetric._may_share(codec, device, group)

    assert not may()  # Gloo
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        alone = dist.new_group([0]), dist.new_group([1])
    finally:
        dist.set_debug_level(level)
    assert symmetric._sends_through_host(alone[rank], torch.device("cpu"))  # Gloo, wrapped
    compiled = mock.patch.object(
        _C, "has_compiled_backend", lambda group, _: not isinstance(group, Group)
    )
    with compiled, mock.patch.object(symmetric, "_sends_through_host", lambda *_: False):
        assert may()
        assert may(CODECS["sign"]())
        assert not may(CODECS["topk"]())
        assert not may(device=torch.device("cpu"))
        assert not may(group=alone[rank])
        assert not may(group=Group(rank, 2))
    dist.destroy_process_group(alone[rank])


def test_where_this_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    place = symmetric._own_place(torch.device("cpu"))
    assert place.machine
    if not torch.ops.commhook.has_cuda_kernels():
        assert place.obstacle == "torch_commhook was built without CUDA kernels"
    monkeypatch.setenv("COMMHOOK_SYMMETRIC_MEMORY", "0")
    assert symmetric._own_place(CUDA).obstacle == "COMMHOOK_SYMMETRIC_MEMORY is 0"


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = ["a", "b", "c"]

    class Properties:
        def __init__(self, index: int) -> None:
            self.uuid = gpus[index]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other != 2)
    monkeypatch.setattr(symmetric, "_nvlinks", lambda: None)
    assert symmetric._missing_link(CUDA, ["a", "b"]) == ""
    assert symmetric._missing_link(CUDA, ["a", "one that is not visible here"]) == ""
    assert symmetric._missing_link(CUDA, gpus) == "GPU 0 cannot read the memory of GPU 2"
    monkeypatch.setattr(symmetric, "_nvlinks", lambda: [[0, 0, 4]] * 3)
    assert symmetric._missing_link(CUDA, ["a", "b"]) == "there is no NVLink between GPU 0 and GPU 1"


# ---- the trial, of threads -----------------------------------------------------------------------


def try_out_in_threads(
    codec: Codec, ranks: int, timeout: timedelta = timedelta(seconds=30)
) -> list[Exception | None]:
    """What the trial raises on each rank."""
    assert isinstance(codec, BlockCodec)
    sizes = [segment.nbytes for segment in trial_segments(codec, ranks)]
    capacity = sum(sizes), max(sizes)
    memories = shared_memories(ranks, SymmetricBuffers.bytes_for(ranks, *capacity))

    def of_rank(rank: int) -> Exception | None:
        memory = SymmetricBuffers(memories, rank, *capacity)
        try:
            try_out(memory, codec, ranks, CPU, timeout=timeout)
        except RuntimeError as error:
            return error
        words = memories[rank][: 8 * control_words(ranks)].view(torch.int64).tolist()
        assert words[ranks:] == [4, 0]  # two sums have two barriers each, and nobody gave up
        return None

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(of_rank, range(ranks)))


@of_each_block_codec
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_memory_that_is_right(codec: Codec, ranks: int) -> None:
    assert try_out_in_threads(codec, ranks) == [None] * ranks


@of_each_block_codec
def test_what_the_values_cover(codec: Codec) -> None:
    """Ranks, steps and blocks differ, and the last block is cut short."""
    assert isinstance(codec, BlockCodec)
    ranks = 3
    numels = [segment.numel for segment in trial_segments(codec, ranks)]
    assert numels[:2] == [3 * codec.block_size] * 2
    assert 2 * codec.block_size < numels[2] < 3 * codec.block_size
    results = [
        symmetric_memory._expected(codec, rank, ranks, step, CPU)
        for rank in range(ranks)
        for step in range(2)
    ]
    totals = [result.total for result in results]
    assert all(
        torch.equal(totals[step], totals[2 * rank + step]) for rank in (1, 2) for step in (0, 1)
    )
    assert not torch.equal(totals[0], totals[1])
    for values in (*totals, *(result.sum_error for result in results)):
        assert values.isfinite().all()
        assert values.count_nonzero() > len(values) // 2
    assert len({tuple(each.tolist()) for each in totals[0].split(codec.block_size)}) == 9


def flipped(nth: int, rank: int) -> Callable[..., None]:
    """A gather that gives a rank one wrong bit in its nth call."""
    gather, calls = SymmetricBuffers.gather, iter(range(1000))

    def double(self: SymmetricBuffers, segments: Any, message: Tensor) -> None:
        gather(self, segments, message)
        if self.rank == rank and next(calls) == nth:
            message[-40 if len(message) > 40 else 0] ^= 1

    return double


@pytest.mark.parametrize("nth", [0, 1])
def test_one_wrong_bit(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SymmetricBuffers, "gather", flipped(nth, 1))
    found = try_out_in_threads(CODEC, 3)
    assert found[0] is found[2] is None
    assert "of 2173 values of a sum with blockwise" in str(found[1])


def test_an_error_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = BlockCodec.reduce_segments

    def double(self: BlockCodec, segments: Any, message: Tensor, *args: Any, **more: Any) -> None:
        reduce(self, segments, message, *args, **more)
        more["error"][5] += 1

    monkeypatch.setattr(BlockCodec, "reduce_segments", double)
    for found in try_out_in_threads(CODEC, 2):
        assert "1 of 768 errors of a sum" in str(found) or "1 of 637 errors" in str(found)


# ---- groups whose ranks try it out ---------------------------------------------------------------


def assert_right_sums(rank: int, group: Any, buffers: MessageBuffers, codec: Codec = CODEC) -> None:
    right = summed(rank, None, group, codec)
    assert torch.equal(summed(rank, buffers, group, codec), right)
    assert right.count_nonzero() > 500


def wrong_bit(rank: int, at_fault: int) -> Any:
    return mock.patch.object(SymmetricBuffers, "gather", flipped(0, at_fault))


def wrong_sum(rank: int, at_fault: int) -> Any:
    reduce = BlockCodec.reduce_segments

    def double(self: BlockCodec, segments: Any, message: Tensor, *args: Any, **more: Any) -> None:
        reduce(self, segments, message, *args, **more)
        message[3] ^= 16

    if rank != at_fault:
        return nullcontext()
    return mock.patch.object(BlockCodec, "reduce_segments", double)


def waits_in_vain(rank: int, at_fault: int) -> Any:
    """One rank's barrier times out at once, and the others come late."""
    barrier = SymmetricBuffers.barrier

    def double(self: SymmetricBuffers, timeout: timedelta) -> None:
        if rank != at_fault:
            time.sleep(0.3)
        barrier(self, timedelta(seconds=0.01) if rank == at_fault else timeout)

    return mock.patch.object(SymmetricBuffers, "barrier", double)


def comes_late(rank: int, at_fault: int) -> Any:
    """The other ranks' barriers time out."""
    barrier = SymmetricBuffers.barrier
    slept: list[int] = []

    def double(self: SymmetricBuffers, timeout: timedelta) -> None:
        if rank == at_fault and rank not in slept:
            slept.append(rank)
            time.sleep(1)
        barrier(self, SHORT)

    return mock.patch.object(SymmetricBuffers, "barrier", double)


def raises(rank: int, at_fault: int) -> Any:
    if rank != at_fault:
        return nullcontext()
    error = RuntimeError("no kernel image is available")
    return mock.patch.object(BlockCodec, "reduce_segments", mock.Mock(side_effect=error))


@on_three
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        (wrong_bit, ["rank 1: RuntimeError: ", "values of a sum", "differ from those"]),
        (wrong_sum, ["rank 0: RuntimeError: ", "values of a sum", "differ from those"]),
        (waits_in_vain, ["rank 1: it missed rank 0 at a barrier", "rank 2: it missed rank 1"]),
        (comes_late, ["rank 0: it missed rank", "rank 2: it missed rank"]),
        (raises, ["rank 1: RuntimeError: no kernel image is available"]),
    ],
)
def test_a_trial_that_fails(
    rank: int, fault: Any, reasons: list[str], is_known: bool, tmp_path: Path
) -> None:
    """On one rank: all use collectives, and one of them says why.

    It is a trial with the second codec if the first is known.
    """
    group = dist.new_group()
    with mock.patch.object(symmetric._log, "handle") as handled:
        with with_files(rank, tmp_path) as files:
            buffers, others = MessageBuffers(), MessageBuffers()
            if is_known:
                assert_right_sums(rank, group, buffers)
                assert symmetric.obstacle_of(group) == ""
            no_help = mock.patch.object(symmetric, "TRIAL_TIMEOUT", timedelta(hours=1))
            with no_help, fault(rank, 1):
                assert_right_sums(rank, group, buffers, OTHER if is_known else CODEC)
            for each in (buffers, others, buffers):  # and nobody tries it again
                assert_right_sums(rank, group, each)
                assert_right_sums(rank, group, each, OTHER)
                segments = CODEC.segments(1000, 3)
                assert symmetric.symmetric_buffers(each, CODEC, segments, CPU, group) is None
            assert next(files.numbers) == 1 + is_known
            gc.collect()
            assert len(files.alive) == is_known  # the memory that has proven right stays
            assert (buffers in state_of(group).shared_memory) == is_known
        obstacle = symmetric.obstacle_of(group)
    texts = [call.args[0].getMessage() for call in handled.call_args_list]
    assert len(texts) == (rank == 0), texts
    assert rank != 0 or texts[0].endswith(f"a test of that memory failed on {obstacle}")
    dist.destroy_process_group(group)
    assert len(set(of_all_ranks(obstacle))) == 1
    assert all(reason in obstacle for reason in reasons), obstacle


@on_three
def test_each_memory_and_codec_is_tried_once(rank: int, tmp_path: Path) -> None:
    group = dist.new_group()
    tried: list[str] = []

    def noted(memory: Any, codec: Any, *args: Any, **more: Any) -> None:
        tried.append(repr(codec))
        assert more["timeout"] == timedelta(seconds=10)
        try_out(memory, codec, *args, **more)

    with with_files(rank, tmp_path) as files, mock.patch.object(symmetric, "try_out", noted):
        buffers = MessageBuffers(), MessageBuffers()
        for each in buffers:
            assert_right_sums(rank, group, each)
        assert tried == [repr(CODEC)] * 2  # the memory of each bucket
        memory = [state_of(group).shared_memory[each] for each in buffers]
        for each in (*buffers, *buffers):
            assert_right_sums(rank, group, each, OTHER)
            assert_right_sums(rank, group, each)
        assert tried[2:] == [repr(OTHER)]
        assert [state_of(group).shared_memory[each] for each in buffers] == memory
        gc.collect()
        assert len(files.alive) == 2  # that of the third trial is gone
        assert symmetric.obstacle_of(group) == ""
    dist.destroy_process_group(group)


@on_three
def test_no_trial_while_a_graph_is_captured(rank: int, tmp_path: Path) -> None:
    group = dist.new_group()
    with with_files(rank, tmp_path) as files:
        buffers = MessageBuffers()

        def captured(codec: Codec) -> bool:
            segments = codec.segments(1000, 3)
            with (
                mock.patch.object(symmetric, "is_capturing", lambda _: True),
                mock.patch.object(
                    symmetric, "gather_in_step", mock.Mock(side_effect=AssertionError)
                ),
            ):
                found = symmetric.symmetric_buffers(buffers, codec, segments, CPU, group)
                return found is not None

        assert not captured(CODEC)
        assert symmetric.obstacle_of(group) is None
        assert_right_sums(rank, group, buffers)
        assert captured(CODEC)
        assert not captured(OTHER)  # nobody has tried it out
        assert_right_sums(rank, group, buffers, OTHER)
        assert captured(OTHER)
        assert next(files.numbers) == 2
    dist.destroy_process_group(group)


@on_three
def test_a_new_group_finds_no_memory_of_an_old_one(rank: int, tmp_path: Path) -> None:
    """A step fails, and the same hook goes on with a new group."""
    buffers = MessageBuffers()
    with with_files(rank, tmp_path) as files:
        for step in range(3):
            group = dist.new_group()
            assert symmetric.obstacle_of(group) is None
            assert_right_sums(rank, group, buffers)
            memory = state_of(group).shared_memory[buffers]
            assert next(files.numbers) == 2 * step + 1
            assert memory._controls[rank][-2:].tolist() == [6, 0]  # 4 barriers are the trial's
            if rank == step % 3:
                symmetric.give_up(group)
            with pytest.raises(RuntimeError, match="did not reach"):
                for _ in range(2):
                    summed(rank, buffers, group)
            dist.destroy_process_group(group)
        del memory, group
        gc.collect()
        assert len(files.alive) == 0
