"""What PyTorch asks of the operators of codecs that send some of the values: topk and randomk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_commhook.native.bucket_ops import BUCKET_DTYPES


@dataclass(frozen=True)
class Operators:
    """Of a codec; a message has ``entry_bytes`` for each value that is sent."""

    name: str
    entry_bytes: int
    #: Arguments that follow tensors and message.
    rounding: tuple[Tensor, ...] = ()

    @property
    def encode(self) -> Any:
        return getattr(torch.ops.commhook, f"{self.name}_encode").default

    @property
    def decode(self) -> Any:
        return getattr(torch.ops.commhook, f"{self.name}_decode").default

    def message(self, entries: int) -> Tensor:
        return torch.zeros(entries * self.entry_bytes, dtype=torch.uint8)


CODECS = [Operators("topk", 8), Operators("randomk", 4, (torch.tensor([1, 2]),))]
pytestmark = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@pytest.mark.parametrize("dtype", BUCKET_DTYPES, ids=str)
def test_opcheck_of_each_dtype(codec: Operators, dtype: torch.dtype) -> None:
    tensors = [torch.randn(5, 30).to(dtype), torch.randn(10, 7).to(dtype).t()]
    message = codec.message(1)
    torch.library.opcheck(codec.encode, (tensors, message, *codec.rounding))
    torch.library.opcheck(codec.decode, (message, tensors, *codec.rounding))


@pytest.mark.parametrize("name", ["encode", "decode", "empty", "one"])
def test_opcheck(codec: Operators, name: str) -> None:
    tensors, message = [torch.randn(5, 30), torch.randn(70)], codec.message(20)
    codec.encode(tensors, message, *codec.rounding)
    op, arguments, keywords = {
        "encode": (codec.encode, (tensors, message), {"error": torch.zeros(220)}),
        "decode": (codec.decode, (message, tensors), {}),
        "empty": (codec.encode, ([torch.zeros(0)], codec.message(0)), {}),
        "one": (codec.encode, ([torch.ones(())], codec.message(1)), {}),
    }[name]
    torch.library.opcheck(op, (*arguments, *codec.rounding), keywords)


def test_versions_move(codec: Operators) -> None:
    x, message, error = torch.randn(64), codec.message(2), torch.zeros(64)
    codec.encode([x], message, *codec.rounding, error=error)
    assert (x._version, message._version, error._version) == (0, 1, 1)
    codec.decode(message, [x], *codec.rounding)
    assert x._version == 1


def test_memory_must_be_apart(codec: Operators) -> None:
    memory = torch.zeros(100)
    shared, apart = memory.view(torch.uint8)[:16], codec.message(2)
    with pytest.raises(ValueError, match=r"message must share no memory with tensors\[0\]"):
        codec.encode([memory[2:66]], shared, *codec.rounding)
    with pytest.raises(ValueError, match=r"tensors\[0\] must share no memory with message"):
        codec.decode(shared, [memory[2:66]], *codec.rounding)
    with pytest.raises(ValueError, match=r"error must share no memory with tensors\[0\]"):
        codec.encode([memory[:64]], apart, *codec.rounding, error=memory[36:])
    with pytest.raises(ValueError, match="must reach each of its elements once"):
        codec.decode(apart, [torch.ones(1).expand(64)], *codec.rounding)
