"""Exchanges over Gloo that use both directions of a link at once.

Gloo says that it is ready for a message on the connection on which it sends its own, behind that.
So the two directions of an all-to-all or all-gather of few large messages take turns, and a link
carries half of what it could. In pieces, with several under way, one direction has always something
to send. Among many ranks other connections fill the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.gloo_groups import is_gloo

_PIECE_BYTES = 128 * 1024
_MOST_PIECES = 128  # in each round
_MOST_RANKS = 4


def pays(group: Any, longest: int) -> bool:
    """Whether an exchange of messages of up to so many bytes is better made in pieces.

    The same on all ranks if they all ask for the same.
    """
    return longest > _PIECE_BYTES and 1 < group.size() <= _MOST_RANKS and is_gloo(group)


def exchange_in_pieces(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], longest: int, result: Tensor, group: Any
) -> torch.futures.Future[Tensor]:
    """Send a message to each rank, and get one from each.

    Args:
        inputs: for each rank what goes there, flat bytes.
        outputs: for each rank where comes what comes from there, flat bytes.
        longest: bytes of the longest message between any two ranks.
        result: what the Future is to hold.
        group: the process group.
    """
    rank = group.rank()
    outputs[rank].copy_(inputs[rank])
    return _C.exchange_pieces(group, list(inputs), list(outputs), piece_ends(longest), result)


def piece_ends(longest: int) -> list[int]:
    """Where pieces end, the last one with the longest message."""
    piece = max(_PIECE_BYTES, -(-longest // _MOST_PIECES))
    return [*range(piece, longest, piece), longest] if longest else []
