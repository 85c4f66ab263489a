"""Codecs: encode gradients into messages, and decode messages.

The package imports each of its modules. For the interface see
:class:`torch_commhook.codecs.Codec`.
"""

import importlib
import pkgutil
from typing import Any

from torch_commhook.codecs.base import CODECS, Codec, Segment, register_codec
from torch_commhook.codecs.block_codec import BlockCodec, BlockForm
from torch_commhook.native.bucket_ops import flatten, unflatten_into
from torch_commhook.wording import warn_user

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
globals().update(CODECS)

__all__ = [
    "CODECS",
    "BlockCodec",
    "BlockForm",
    "Codec",
    "Segment",
    "flatten",
    "register_codec",
    "unflatten_into",
]


def __getattr__(name: str) -> Any:
    if name == "Shard":
        warn_user("codecs.Shard is deprecated: use codecs.Segment", DeprecationWarning)
        return Segment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
