"""Collectives with one interface in every mode.

Each starts at once and returns a future. In eager code this is a ``torch.futures.Future``, and the
group's result is checked. While a compiler traces it is a :class:`TracedFuture` over PyTorch's
functional collectives, which the compiler may overlap with other work. All count their bytes on the
wire.
"""

from torch_commhook.collectives.compressed import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from torch_commhook.collectives.futures import TracedFuture
from torch_commhook.collectives.gloo_groups import resolve_group
from torch_commhook.collectives.hosts import hierarchical_all_reduce
from torch_commhook.collectives.plain import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)

__all__ = [
    "TracedFuture",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "compressed_all_gather",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
    "hierarchical_all_reduce",
    "reduce_scatter",
    "resolve_group",
]
