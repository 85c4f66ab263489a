"""Codecs: what gradients become on the wire. Each is a module of its own here."""

from torch_commhook.codecs.blockwise import (
    blockwise_bytes,
    blockwise_decode,
    blockwise_encode,
    blockwise_reduce,
    blockwise_shards,
)

__all__ = [
    "blockwise_bytes",
    "blockwise_decode",
    "blockwise_encode",
    "blockwise_reduce",
    "blockwise_shards",
]
