"""Sums of small tensors in half a round trip or one; a ring takes a half for each of its hops.

Each rank sums values in the order of ranks, so that all have the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.exchange import Place, exchanges, place_in
from torch_commhook.collectives.futures import chained
from torch_commhook.collectives.sum_rows import sum_rows
from torch_commhook.metrics import tensor_bytes
from torch_commhook.spans import continued

#: The most bytes that a rank receives at once. For more, each rank sums a shard and sends it to
#: all.
_MOST_GATHERED = 64 * 1024
#: From this number of bytes on, a ring's even load outweighs its hops.
MOST_SUMMED = 4 << 20
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def sums_directly(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether :func:`start_sum` supports a tensor; the same on all ranks."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in _DTYPES
        and 0 < tensor_bytes(tensor) <= MOST_SUMMED
        and exchanges(group)
    )


def is_gathered(nbytes: float, ranks: int) -> bool:
    """Whether each rank receives the whole tensors of all, of this size each."""
    return ranks == 2 or (ranks - 1) * nbytes <= _MOST_GATHERED


def direct_bytes(tensor: Tensor, rank: int, ranks: int) -> tuple[int, int]:
    """Bytes that a rank sends and receives in :func:`start_sum`."""
    nbytes = tensor_bytes(tensor)
    if is_gathered(nbytes, ranks):
        return nbytes * (ranks - 1), nbytes * (ranks - 1)
    own = tensor.element_size() * _shards(tensor.numel(), ranks)[rank]
    exchanged = nbytes - own + own * (ranks - 1)
    return exchanged, exchanged


def expect_sum(place: Place, like: Tensor, group: dist.ProcessGroup) -> None:
    """Give memory to the other ranks' values, before this rank has its own.

    Args:
        place: the position in which :func:`start_sum` will exchange them.
        like: a tensor with the dtype and the number of elements of the one to sum.
        group: the process group.
    """
    if sums_directly(like, group):
        place.memory = rows = _new_rows(like.detach().reshape(-1), group)
        place.expect(0, list(rows.view(torch.uint8)))


def _new_rows(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Memory for the messages of all ranks in the first stage."""
    ranks = group.size()
    if is_gathered(tensor_bytes(flat), ranks):
        return flat.new_empty((ranks, flat.numel()))
    return flat.new_empty((ranks, _shards(flat.numel(), ranks)[group.rank()]))


def start_sum(
    tensor: Tensor, group: dist.ProcessGroup, place: Place | None = None
) -> torch.futures.Future[Tensor]:
    """Sum a tensor over all ranks, on any thread.

    Args:
        tensor: contiguous, supported by :func:`sums_directly`. Written.
        group: the process group.
        place: the position in the order of its exchanges; None for the next one.

    Returns:
        A Future of the same tensor.
    """
    ranks, rank, place = group.size(), group.rank(), place or place_in(group)
    flat = tensor.detach().view(-1)
    rows = _new_rows(flat, group) if place.memory is None else place.memory
    if is_gathered(tensor_bytes(tensor), ranks):
        message = flat.view(torch.uint8)
        gathered = place.exchange(0, [message] * ranks, list(rows.view(torch.uint8)), rows)
        return gathered.then(continued(lambda done: _add_up(done.value(), flat, tensor)))
    shards = flat.split(_shards(flat.numel(), ranks))
    messages = [shard.view(torch.uint8) for shard in shards]
    own = shards[rank]
    # A rank sends its sum after it has received this rank's shard, whose memory takes that sum.
    place.expect(1, messages)
    first = place.exchange(0, messages, list(rows.view(torch.uint8)), rows)

    def send_sums(rows: Tensor) -> torch.futures.Future[Tensor]:
        _add_up(rows, own, own)
        return place.exchange(1, [messages[rank]] * ranks, messages, tensor)

    return chained(first, send_sums, lambda done: done)


def _add_up(rows: Tensor, out: Tensor, result: Tensor) -> Tensor:
    # Tensors made in inference mode can be written only in that mode.
    with torch.inference_mode() if out.is_inference() else torch.no_grad():
        if rows.dtype == torch.float64:
            out.copy_(rows[0])
            for row in rows[1:]:
                out.add_(row)
        else:
            sum_rows(rows, out)
    return result


def _shards(numel: int, ranks: int) -> list[int]:
    """The number of elements that each rank sums."""
    each, left = divmod(numel, ranks)
    return [each + (rank < left) for rank in range(ranks)]
