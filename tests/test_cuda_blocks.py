"""The CUDA kernels of block codecs, played on the host: they give the bits of the CPU's."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from host_library import compile_host_library
from torch import Tensor

from torch_commhook import codecs

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
#: Of the operators, and what the library calls a codec.
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "blockwise 8 symmetric": ("blockwise", {"bits": 8, "symmetric": True}),
    "blockwise 8 min-max": ("blockwise", {"bits": 8, "symmetric": False}),
    "blockwise 4 symmetric": ("blockwise", {"bits": 4, "symmetric": True}),
    "blockwise 4 min-max": ("blockwise", {"bits": 4, "symmetric": False}),
    "fp8 e4m3": ("fp8", {"format": "e4m3"}),
    "fp8 e5m2": ("fp8", {"format": "e5m2"}),
    "sign": ("sign", {}),
}


class Work(ctypes.Structure):
    _fields_ = (
        ("numel", ctypes.c_int64),
        ("shards", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = compile_host_library("cuda_blocks.cpp", tmp_path_factory.mktemp("cuda_blocks"))
    for name in ("encode", "decode", "reduce"):
        getattr(found, name).restype = ctypes.c_bool
    return found


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _list(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    count = len(tensors)
    return (
        count,
        (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in tensors)),
        (ctypes.c_int64 * count)(*(tensor.numel() for tensor in tensors)),
        (ctypes.c_int * count)(*(DTYPES.index(tensor.dtype) for tensor in tensors)),
    )


class Case:
    """Random tensors, a codec's settings, and what its operators take with them."""

    def __init__(self, name: str, seed: int) -> None:
        self.draw = draw = random.Random(f"{name} {seed}")
        self.generator = torch.Generator().manual_seed(seed)
        self.operators, settings = CODECS[name]
        least = 32 if self.operators == "sign" else 8
        sizes = [32, 64, 128, 256, 256, 512, 1024, 4096, *(() if least == 32 else (8, 72, 200))]
        self.block_size = draw.choice(sizes)
        self.settings = {**settings, "block_size": self.block_size}
        self.scale = draw.choice([1.0, 0.5, 1 / 3, 1e-3])
        self.tensors = [self.values(dtype) for dtype in self.dtypes()]
        self.numel = sum(tensor.numel() for tensor in self.tensors)
        self.shards = draw.choice([1, 1, 2, 3, 7])
        self.rounding = (
            torch.tensor([draw.getrandbits(62) - (1 << 61), draw.getrandbits(20)])
            if self.operators == "blockwise" and draw.random() < 0.5
            else None
        )
        self.error = self.float32(self.numel) if draw.random() < 0.5 else None

    def dtypes(self) -> list[torch.dtype]:
        choice = self.draw.choice([DTYPES, [torch.float32]])
        return [self.draw.choice(choice) for _ in range(self.draw.randint(1, 12))]

    def float32(self, numel: int) -> Tensor:
        """At any address that is a multiple of four."""
        memory = torch.randn(numel + 3, generator=self.generator)
        return memory[self.draw.randrange(4) :][:numel]

    def values(self, dtype: torch.dtype) -> Tensor:
        numel = self.draw.choice([0, 1, 7, 64, 255, 256, 1000, 3000])
        values = self.float32(numel) * 10.0 ** self.draw.randint(-42, 4)
        if numel > 2 and self.draw.random() < 0.3:
            places = torch.randint(numel, (2,), generator=self.generator)
            values[places] = self.draw.choice([torch.nan, torch.inf, -torch.inf, 3e38, -0.0])
        if self.draw.random() < 0.2:
            values.zero_()
        return values if dtype is torch.float32 else values.to(dtype)

    def operator(self, which: str) -> Callable[..., None]:
        return getattr(torch.ops.commhook, f"{self.operators}_{which}")

    def message(self, shards: int, fill: int) -> Tensor:
        form = codecs.CODECS[self.operators](
            **{k: v for k, v in self.settings.items() if k != "format"},
            **({"format": self.settings["format"]} if "format" in self.settings else {}),
        )
        return torch.full((form.nbytes(self.numel, shards),), fill, dtype=torch.uint8)

    def work(self, shards: int, scale: float) -> Any:
        return ctypes.byref(Work(self.numel, shards, self.block_size, scale))

    def given(self) -> dict[str, Any]:
        return {} if self.rounding is None else {"rounding": self.rounding}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    both_nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.tensor(False)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[one.element_size()]
    return bool((both_nan | (one.view(integers) == other.view(integers))).all())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("seed", range(60))
def test_the_bits_of_the_cpu(library: ctypes.CDLL, name: str, seed: int) -> None:
    case = Case(name, seed)
    errors = [None if case.error is None else case.error.clone() for _ in range(2)]
    if case.error is not None:  # as badly aligned as it was
        errors[1] = case.error
    own, other = case.message(case.shards, 0xAA), case.message(case.shards, 0x55)
    settings = {**case.settings, "shards": case.shards}
    case.operator("encode")(
        case.tensors, own, **settings, scale=case.scale, error=errors[0], **case.given()
    )
    assert library.encode(
        name.encode(),
        case.work(case.shards, case.scale),
        *_list(case.tensors),
        _pointer(case.rounding),
        _pointer(errors[1]),
        _pointer(other),
    )
    assert torch.equal(own, other)
    assert _same(*errors)

    decoded = [[torch.full_like(tensor, 7) for tensor in case.tensors] for _ in range(2)]
    case.operator("decode")(own, decoded[0], **settings)
    assert library.decode(
        name.encode(), case.work(case.shards, 1.0), *_list(decoded[1]), _pointer(own)
    )
    assert all(map(_same, *decoded))

    messages = torch.stack([case.message(1, 0) for _ in range(case.draw.randint(1, 4))])
    for message in messages:
        values = [tensor * (1 + case.draw.random()) for tensor in case.tensors]
        case.operator("encode")(values, message, **case.settings)
    errors = [None if case.error is None else torch.randn(case.numel) for _ in range(2)]
    if errors[0] is not None and errors[1] is not None:
        errors[1].copy_(errors[0])
    own, other = case.message(1, 0xAA), case.message(1, 0x55)
    case.operator("reduce")(
        messages, own, case.numel, **case.settings, scale=0.25, error=errors[0], **case.given()
    )
    assert library.reduce(
        name.encode(),
        case.work(1, 0.25),
        _pointer(messages),
        ctypes.c_int64(len(messages)),
        _pointer(case.rounding),
        _pointer(errors[1]),
        _pointer(other),
    )
    assert torch.equal(own, other)
    assert _same(*errors)
