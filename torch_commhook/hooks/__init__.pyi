# The package for static tools. At run time it makes a hook for each codec on demand.
# For a codec of your own, write compressed(codec): tools do not know a hook of its name.
import torch.distributed as dist

from torch_commhook.hooks.auto import auto as auto
from torch_commhook.hooks.base import Hook as Hook
from torch_commhook.hooks.compressed import adaptive as adaptive
from torch_commhook.hooks.compressed import compressed as compressed
from torch_commhook.hooks.cpp import cpp as cpp
from torch_commhook.hooks.hierarchical import hierarchical as hierarchical
from torch_commhook.hooks.local_sgd import local_sgd as local_sgd
from torch_commhook.hooks.local_sgd import outer_sgd as outer_sgd
from torch_commhook.hooks.mean import allreduce as allreduce
from torch_commhook.hooks.mean import cast as cast
from torch_commhook.hooks.policy import policy as policy
from torch_commhook.hooks.powersgd import powersgd as powersgd
from torch_commhook.hooks.wrappers import after as after
from torch_commhook.hooks.wrappers import clip as clip
from torch_commhook.hooks.wrappers import error_feedback as error_feedback
from torch_commhook.hooks.wrappers import momentum as momentum

__all__: list[str]

def blockwise(
    bits: int = 8,
    block_size: int = 256,
    symmetric: bool = True,
    rounding: str = "nearest",
    *,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> compressed: ...
def chunk_topk(
    k: int = 64,
    chunk: int = 4096,
    bits: int = 2,
    *,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> compressed: ...
def fp8(
    format: str = "e4m3",
    block_size: int = 256,
    *,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> compressed: ...
def randomk(
    density: float = 0.01,
    unbiased: bool = False,
    *,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> compressed: ...
def sign(
    block_size: int = 1024,
    *,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> compressed: ...
def topk(
    density: float = 0.01,
    *,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> compressed: ...
