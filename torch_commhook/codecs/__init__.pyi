# The package for static tools. At run time it imports its modules in a loop.
from torch_commhook.codecs.base import CODECS as CODECS
from torch_commhook.codecs.base import Codec as Codec
from torch_commhook.codecs.base import Segment as Segment
from torch_commhook.codecs.base import register_codec as register_codec
from torch_commhook.codecs.block_codec import BlockCodec as BlockCodec
from torch_commhook.codecs.block_codec import BlockForm as BlockForm
from torch_commhook.codecs.block_codec import blockwise as blockwise
from torch_commhook.codecs.block_codec import fp8 as fp8
from torch_commhook.codecs.block_codec import sign as sign
from torch_commhook.codecs.sparse_codec import chunk_topk as chunk_topk
from torch_commhook.codecs.sparse_codec import randomk as randomk
from torch_commhook.codecs.sparse_codec import topk as topk
from torch_commhook.native.bucket_ops import flatten as flatten
from torch_commhook.native.bucket_ops import unflatten_into as unflatten_into

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
