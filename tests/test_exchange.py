"""Exchanges of messages: of any lengths, in any order of stages, and what ends them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.exchange import exchange
from torch_commhook.gloo_groups import second_group


def message(source: int, destination: int, length: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10000 * number + 100 * source + destination)
    return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)


def _exchange(rank: int, lengths: list[list[int]], two_groups: bool) -> list[Tensor]:
    """``lengths[a][b]`` bytes go from rank a to rank b."""
    size = dist.get_world_size()
    inputs = [message(rank, to, lengths[rank][to]) for to in range(size)]
    outputs = [torch.zeros(lengths[source][rank], dtype=torch.uint8) for source in range(size)]
    result = torch.ones(3)
    up = dist.group.WORLD
    down = dist.new_group() if two_groups else up
    found = _C.Exchanges(False).start(up, down, inputs, outputs, result).wait()
    assert found.data_ptr() == result.data_ptr()
    if two_groups:
        dist.barrier()
        dist.destroy_process_group(down)
    return outputs


@pytest.mark.parametrize("two_groups", [False, True])
@pytest.mark.parametrize("factor", [1, 100_000])
def test_messages_of_all_lengths(three_ranks: RankPool, factor: int, two_groups: bool) -> None:
    lengths = [[factor * n for n in row] for row in ([5, 30, 0], [10, 10, 21], [1, 0, 20])]
    found = three_ranks.run(_exchange, lengths, two_groups)
    for rank, outputs in enumerate(found):
        for source, got in enumerate(outputs):
            if source == rank:
                assert not got.any()  # its own is the caller's to copy
            else:
                assert torch.equal(got, message(source, rank, lengths[source][rank]))


def _in_another_order(rank: int) -> bool:
    first = dist.new_group()
    stages = [first, second_group(first)]
    length, waiting = 300_000, {}
    for number in range(4):
        # The stages of one rank are not in step with the other's; those of each stage are.
        for stage in (0, 1) if rank == 0 else (1, 0):
            seed = 2 * number + stage
            inputs = [message(rank, to, length, seed) for to in range(2)]
            outputs = [torch.zeros(length, dtype=torch.uint8) for _ in range(2)]
            result = torch.tensor(seed)
            waiting[seed] = exchange(inputs, outputs, result, stages[stage]), outputs
    right = []
    for seed, (future, outputs) in waiting.items():
        right.append(int(future.wait()) == seed)
        for source, got in enumerate(outputs):
            right.append(torch.equal(got, message(source, rank, length, seed)))
    dist.barrier()
    dist.destroy_process_group(first)
    return all(right)


def test_stages_in_another_order_on_each_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run(_in_another_order) == [True, True]


def _stopped(rank: int) -> list[str]:
    up, down = dist.new_group(), dist.new_group()
    said = []
    if rank == 0:  # nobody answers
        exchanges = _C.Exchanges(False)
        messages = [torch.zeros(10, dtype=torch.uint8) for _ in range(2)]
        futures = [exchanges.start(up, down, messages, messages, torch.ones(1)) for _ in range(3)]
        ended: list[bool] = []
        futures[2].add_done_callback(lambda future: ended.append(True))
        exchanges.stop()
        assert ended  # what waits for them has run
        for future in futures:
            with pytest.raises(RuntimeError, match="the process group was closed") as error:
                future.wait()
            said.append(str(error.value))
        with pytest.raises(RuntimeError, match="the process group was closed"):
            exchanges.start(up, down, messages, messages, torch.ones(1))
        exchanges.stop()
    dist.barrier()
    dist.destroy_process_group(up)
    dist.destroy_process_group(down)
    return said


def test_those_that_are_stopped_fail(two_ranks: RankPool) -> None:
    assert len(two_ranks.run(_stopped, timeout=60)[0]) == 3


def _left(rank: int) -> str:
    up, down = dist.new_group(), dist.new_group()
    said = ""
    if rank == 0:
        messages = [torch.zeros(10, dtype=torch.uint8) for _ in range(2)]
        exchanges = _C.Exchanges(False)
        future = exchanges.start(up, down, messages, messages, torch.ones(1))
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(up)
        dist.destroy_process_group(down)
    else:
        with pytest.raises(RuntimeError, match="gloo") as error:
            future.wait()
        said = str(error.value)
        later = exchanges.start(up, down, messages, messages, torch.ones(1))
        with pytest.raises(RuntimeError, match="gloo"):
            later.wait()
        dist.destroy_process_group(up)
        dist.destroy_process_group(down)
    return said


def test_a_rank_that_leaves_ends_them(two_ranks: RankPool) -> None:
    assert two_ranks.run(_left, timeout=60)[0]


def test_one_rank_and_nothing_to_send(one_rank: None) -> None:
    nothing, result = torch.empty(0, dtype=torch.uint8), torch.ones(2)
    group = dist.group.WORLD
    exchanges = _C.Exchanges(False)
    assert exchanges.start(group, group, [nothing], [nothing], result).wait().sum() == 2


def test_what_is_refused(one_rank: None) -> None:
    byte, group, result = torch.zeros(1, dtype=torch.uint8), dist.group.WORLD, torch.ones(1)
    for arguments, said in (
        ((None, group, [], [], result), "there must be process groups"),
        ((group, None, [], [], result), "there must be process groups"),
        ((group, group, [], [], result), "flat bytes on the CPU for each rank"),
        ((group, group, [byte], [byte.view(1, 1)], result), "flat bytes"),
        ((group, group, [torch.zeros(1)], [byte], result), "flat bytes"),
    ):
        with pytest.raises(ValueError, match=said):
            _C.Exchanges(False).start(*arguments)
