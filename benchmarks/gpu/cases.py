"""The operators for trials and timings on a GPU, and their data.

All calls go through the public functions and codecs, so that this file need not change with the
kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

import torch_commhook.native.bucket_ops as ops
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.native.bucket_ops import check_finite

#: The least speed of a work, as a share of the card's own copy.
LEAST, LEAST_WITH_ERROR = 0.9, 0.85
#: The most CPU seconds of a call on one bucket of 25 MiB.
MOST_HOST_SECONDS = 15e-6
COPY = "copy"
SCALE = 1 / 8
#: Their speed has a target.
TARGETED = ("blockwise()", "blockwise(bits=4)")


class Data:
    """Tensors of a bucket, and buffers of its size, on one device.

    Args:
        shapes: of the tensors, float32.
        device: the tensors' device.
        seed: the same seed gives the same values on all devices if ``exact`` is true.
        exact: whether to compute the values on the CPU, which takes longer.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        device: str,
        seed: int = 0,
        exact: bool = False,
    ) -> None:
        self.device, self.exact = device, exact
        self._generator = torch.Generator("cpu" if exact else device).manual_seed(seed)
        self.tensors = [self.random(*shape) for shape in shapes]
        self.numel = sum(tensor.numel() for tensor in self.tensors)
        self.into = [torch.full_like(tensor, 3.0) for tensor in self.tensors]
        self.flat = self.random(self.numel)
        self.other = self.random(self.numel)

    def random(self, *shape: int) -> Tensor:
        where = self._generator.device
        return torch.randn(shape, generator=self._generator, device=where).to(self.device)

    def bytes(self, count: int) -> Tensor:
        return torch.full((count,), 3, dtype=torch.uint8, device=self.device)


@dataclass(frozen=True)
class Work:
    """A call to try or to time.

    Attributes:
        call: runs the work.
        results: the tensors that it writes.
        nbytes: the fewest bytes that it must read and write.
        least: the target, as a share of the copy's speed; None without one.
        most_host_seconds: the target of the CPU's time.
    """

    call: Callable[[], object]
    results: list[Tensor] = field(repr=False)
    nbytes: int
    least: float | None = None
    most_host_seconds: float | None = None


Maker = Callable[[Data, int], Work]

# ---- buckets -------------------------------------------------------------------------------------


def copy(data: Data, shards: int) -> Work:
    return Work(partial(data.flat.copy_, data.other), [data.flat], 8 * data.numel)


def flatten(data: Data, shards: int, dtype: torch.dtype = torch.float32) -> Work:
    out = torch.full((data.numel,), 3.0, dtype=dtype, device=data.device)
    scale = 1.0 if dtype == torch.float32 else SCALE
    call = partial(ops.flatten, data.tensors, scale=scale, out=out)
    nbytes = (4 + dtype.itemsize) * data.numel
    return Work(call, [out], nbytes, LEAST, MOST_HOST_SECONDS)


def unflatten(data: Data, shards: int, dtype: torch.dtype = torch.float32) -> Work:
    buffer = data.flat.to(dtype)
    scale = 1.0 if dtype == torch.float32 else SCALE
    call = partial(ops.unflatten_into, buffer, data.into, scale=scale)
    nbytes = (4 + dtype.itemsize) * data.numel
    return Work(call, data.into, nbytes, LEAST, MOST_HOST_SECONDS)


def flatten_stats(data: Data, shards: int) -> Work:
    results: list[Tensor] = []

    def call() -> None:
        # Only the last call's results: a graph keeps its memory.
        results[:] = [each for each in ops.flatten_stats(data.tensors, scale=SCALE)]

    return Work(call, results, 8 * data.numel)


def check(data: Data, shards: int) -> Work:
    count = torch.zeros(1, dtype=torch.int64, device=data.device)
    tensors = [*data.tensors, torch.full((1,), torch.inf, device=data.device)]
    return Work(partial(check_finite, tensors, count), [count], 4 * data.numel)


BUCKET: dict[str, Maker] = {
    "flatten": flatten,
    "flatten, scale, to bfloat16": partial(flatten, dtype=torch.bfloat16),
    "unflatten": unflatten,
    "unflatten from bfloat16": partial(unflatten, dtype=torch.bfloat16),
    "flatten_stats": flatten_stats,
    "check_finite": check,
}

# ---- codecs --------------------------------------------------------------------------------------


class Coded:
    """A codec's calls on data.

    If the data are exact, messages to read come from the CPU. So a test of a reading kernel does
    not depend on the writing one.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.is_targeted = repr(codec) in TARGETED

    def rounding(self, device: str) -> Tensor | None:
        return torch.tensor([1, 2], device=device) if self.codec.is_random else None

    def shards(self, shards: int) -> int:
        return shards if self.codec.exchange == "all_to_all" else 1

    def message_of(self, tensors: list[Tensor], data: Data, shards: int) -> Tensor:
        device = "cpu" if data.exact else data.device
        own = [tensor.to(device) for tensor in tensors]
        count = self.codec.nbytes(sum(each.numel() for each in own), shards)
        message = torch.zeros(count, dtype=torch.uint8, device=device)
        self.codec.encode(own, message, segments=shards, rounding=self.rounding(device))
        return message.to(data.device)

    def encode(self, data: Data, shards: int, with_error: bool = False) -> Work:
        shards = self.shards(shards)
        message = data.bytes(self.codec.nbytes(data.numel, shards))
        error = data.random(data.numel).mul_(1e-3) if with_error else None
        call = partial(
            self.codec.encode,
            data.tensors,
            message,
            segments=shards,
            scale=SCALE,
            error=error,
            rounding=self.rounding(data.device),
        )
        nbytes = 4 * data.numel + message.nbytes
        if error is None:
            return Work(call, [message], nbytes, self.least(LEAST))
        return Work(call, [message, error], nbytes + 2 * error.nbytes, self.least(LEAST_WITH_ERROR))

    def decode(self, data: Data, shards: int) -> Work:
        shards = self.shards(shards)
        message = self.message_of(data.tensors, data, shards)
        call = partial(
            self.codec.decode,
            message,
            data.into,
            segments=shards,
            rounding=self.rounding(data.device),
        )
        return Work(call, data.into, 4 * data.numel + message.nbytes, self.least(LEAST))

    def reduce(self, data: Data, shards: int) -> Work:
        """The messages that a rank receives from as many ranks as there are shards."""
        count = self.codec.segments(data.numel, shards)[0].numel
        sent = [self.message_of([data.random(count)], data, 1) for _ in range(shards)]
        messages, message = torch.stack(sent), data.bytes(sent[0].nbytes)
        rounding = self.rounding(data.device)
        call = partial(self.codec.reduce, messages, message, count, scale=SCALE, rounding=rounding)
        return Work(call, [message], messages.nbytes + message.nbytes)

    def decode_sum(self, data: Data, shards: int) -> Work:
        sent = [self.message_of([data.random(data.numel)], data, 1) for _ in range(max(shards, 2))]
        messages = torch.stack(sent)
        rounding = self.rounding(data.device)
        call = partial(self.codec.decode_sum, messages, data.into, scale=SCALE, rounding=rounding)
        return Work(call, data.into, messages.nbytes + 4 * data.numel)

    def least(self, least: float) -> float | None:
        return least if self.is_targeted else None

    def makers(self) -> dict[str, Maker]:
        makers: dict[str, Maker] = {"encode": self.encode}
        if self.codec.takes_error:
            makers["encode, error feedback"] = partial(self.encode, with_error=True)
        makers["decode"] = self.decode
        if self.codec.exchange == "all_to_all":
            makers["reduce"] = self.reduce
        else:
            makers["decode_sum"] = self.decode_sum
        return {f"{self.codec!r}: {name}": maker for name, maker in makers.items()}


def codecs() -> list[Codec]:
    """Two examples of each codec, the default first."""
    return [codec for cls in CODECS.values() for codec in list(cls.examples())[:2]]


def makers(chosen: str = "all") -> dict[str, Maker]:
    """Functions that make each work, by name.

    Args:
        chosen: ``"targeted"``: works with a target, and those that belong to them; ``"rest"``: the
            others; ``"all"``.
    """
    coded = [Coded(codec) for codec in codecs()]
    if chosen == "targeted":
        coded = [each for each in coded if each.is_targeted]
    if chosen == "rest":
        coded = [each for each in coded if not each.is_targeted]
    result = {} if chosen == "rest" else dict(BUCKET)
    for each in coded:
        result |= each.makers()
    return result


def depends_on_shards(name: str) -> bool:
    """Whether a work depends on the number of shards."""
    return name not in BUCKET


def small_shapes(seed: int) -> list[tuple[int, ...]]:
    """Shapes of tensors that reveal mistakes in a few seconds: odd lengths, and empty ones."""
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 7, 255, 256, 257, 4096, 9001]) for _ in range(6)]
    return [(70_001,), (33, 100), *((length,) for length in lengths)]
