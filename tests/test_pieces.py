"""Exchanges in pieces: messages of any lengths, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor

from torch_commhook import _C


def message(source: int, destination: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * source + destination)
    return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)


def _exchange(rank: int, lengths: list[list[int]], piece: int) -> list[Tensor]:
    """``lengths[a][b]`` bytes go from rank a to rank b."""
    size = dist.get_world_size()
    inputs = [message(rank, to, lengths[rank][to]) for to in range(size)]
    outputs = [torch.zeros(lengths[source][rank], dtype=torch.uint8) for source in range(size)]
    longest = max(max(row) for row in lengths)
    ends = [*range(piece, longest, piece), longest]
    result = torch.ones(3)
    group = dist.group.WORLD
    found = _C.exchange_pieces(group, inputs, outputs, ends, result).wait()
    assert found.data_ptr() == result.data_ptr()
    return outputs


@pytest.mark.parametrize("piece", [1, 7, 10, 1000])
def test_messages_of_all_lengths(three_ranks: RankPool, piece: int) -> None:
    lengths = [[5, 30, 0], [10, 10, 21], [1, 0, 20]]
    found = three_ranks.run(_exchange, lengths, piece)
    for rank, outputs in enumerate(found):
        for source, got in enumerate(outputs):
            if source == rank:
                assert not got.any()  # its own is the caller's to copy
            else:
                assert torch.equal(got, message(source, rank, lengths[source][rank]))


def test_one_rank_and_nothing_to_send(one_rank: None) -> None:
    nothing, result = torch.empty(0, dtype=torch.uint8), torch.ones(2)
    group = dist.group.WORLD
    assert _C.exchange_pieces(group, [nothing], [nothing], [], result).wait().sum() == 2


def test_what_is_refused(one_rank: None) -> None:
    byte, group, result = torch.zeros(1, dtype=torch.uint8), dist.group.WORLD, torch.ones(1)
    for arguments, said in (
        ((None, [], [], [1], result), "there must be a process group"),
        ((group, [], [], [1], result), "flat bytes on the CPU for each rank"),
        ((group, [byte], [byte.view(1, 1)], [1], result), "flat bytes"),
        ((group, [torch.zeros(1)], [byte], [1], result), "flat bytes"),
        ((group, [byte], [byte], [0], result), "ends must ascend from 0, got 0 after 0"),
        ((group, [byte], [byte], [3, 2], result), "ends must ascend from 0, got 2 after 3"),
    ):
        with pytest.raises(ValueError, match=said):
            _C.exchange_pieces(*arguments)


def _too_short(rank: int) -> str:
    lengths = [0, 5, 3] if rank == 0 else [5, 0, 3]
    messages = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    with pytest.raises(ValueError, match="ends at 4, before a message of 5 bytes does") as refused:
        _C.exchange_pieces(dist.group.WORLD, messages, messages, [2, 4], torch.ones(1))
    return str(refused.value)


def test_pieces_that_end_too_early_are_refused_before_anything_is_sent(
    three_ranks: RankPool,
) -> None:
    found = three_ranks.run(_too_short)
    assert len(set(found)) == 1
