"""Steps of a model with a hook in stages, its process groups, and a codec around another one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from torch_commhook.codecs import CODECS, Codec, Segment

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


def known_groups() -> int:
    gc.collect()  # frees objects of earlier tests
    return len(distributed_c10d._world.pg_map)


def _noted(method: str) -> Any:
    """A method that calls :attr:`Around.before`, and the wrapped codec's."""

    def call(self: Around, *arguments: Any, **options: Any) -> None:
        self.before(method)
        getattr(self.inner, method)(*arguments, **options)

    return call


class Around(Codec):
    """Wraps a codec, and calls a function before each of its methods."""

    def __init__(self, inner: Codec, before: Callable[[str], None]) -> None:
        self.inner = inner  # the wrapped codec
        self.before = before  # called with the method's name

    exchange = property(lambda self: self.inner.exchange)  # type: ignore[assignment]
    is_random = property(lambda self: self.inner.is_random)  # type: ignore[assignment]
    takes_error = property(lambda self: self.inner.takes_error)  # type: ignore[assignment]
    encode, decode = _noted("encode"), _noted("decode")
    decode_sum, reduce = _noted("decode_sum"), _noted("reduce")

    def segments(self, numel: int, segments: int = 1) -> list[Segment]:
        return self.inner.segments(numel, segments)

    def __repr__(self) -> str:
        return f"Around({self.inner})"


class OwnError(Exception):
    pass


class Failure:
    """Raises in one call of one of a codec's methods, when it is told to."""

    def __init__(self) -> None:
        self.method, self.calls, self.error = "", 0, OwnError

    def arm(self, method: str, calls: int = 0, error: type[BaseException] = OwnError) -> None:
        self.method, self.calls, self.error = method, calls, error

    def __call__(self, method: str) -> None:
        if method == self.method:
            self.calls -= 1
            if self.calls < 0:
                self.method = ""
                raise self.error("boo")
