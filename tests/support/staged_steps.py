"""A small model, its steps, and the process groups that a hook in stages makes for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from torch_commhook.codecs import CODECS
from torch_commhook.collectives import exchange

BLOCKWISE = CODECS["blockwise"]()
TOPK = CODECS["topk"]()
X = torch.ones(600)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))


def gradients_of(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters()]


def backward(net: nn.Module, rank: int) -> None:
    net.zero_grad()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    net(x).square().sum().backward()


def gloo_groups() -> int:
    gc.collect()  # frees objects of earlier tests
    return len(distributed_c10d._world.pg_map)


@contextmanager
def point_to_point(is_wanted: bool) -> Iterator[None]:
    """Makes ranks exchange messages, or use Gloo's collectives, as many ranks do."""
    with patch.object(exchange, "MOST_RANKS", exchange.MOST_RANKS if is_wanted else 1):
        yield


def as_long(rank: int, is_wanted: bool, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a rank's function under :func:`point_to_point`."""
    with point_to_point(is_wanted):
        return function(rank, *args)
