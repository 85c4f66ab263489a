"""Codecs: encode gradients into messages, and decode messages.

The package imports each of its modules. For the interface see
:class:`torch_commhook.codecs.Codec`.
"""

import importlib
import pkgutil

from torch_commhook.codecs.base import CODECS, Codec, Shard, register_codec
from torch_commhook.codecs.block_codec import BlockCodec, BlockForm
from torch_commhook.native.bucket_ops import flatten, unflatten_into

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
globals().update(CODECS)

__all__ = [
    "CODECS",
    "BlockCodec",
    "BlockForm",
    "Codec",
    "Shard",
    "flatten",
    "register_codec",
    "unflatten_into",
]
