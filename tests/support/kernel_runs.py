"""Calls that run each CUDA kernel on the host, for tests that watch memory accesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook import codecs
from torch_commhook.collectives.symmetric_memory import (
    control_words,
    symmetric_barrier,
    symmetric_gather,
)
from torch_commhook.native import bucket_ops

Runs = dict[str, Callable[[], object]]

#: The operators of a form of block codec, and their arguments.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("blockwise", {"bits": 8, "symmetric": True}),
    "int8 min-max": ("blockwise", {"bits": 8, "symmetric": False}),
    "int4": ("blockwise", {"bits": 4, "symmetric": True}),
    "int4 min-max": ("blockwise", {"bits": 4, "symmetric": False}),
    "int2": ("blockwise", {"bits": 2, "symmetric": True}),
    "int2 min-max": ("blockwise", {"bits": 2, "symmetric": False}),
    "e4m3": ("fp8", {"format": "e4m3"}),
    "e5m2": ("fp8", {"format": "e5m2"}),
    "sign": ("sign", {}),
}
#: Kernels other than the block codecs'.
OTHERS = ("flatten", "narrow error", "topk", "randomk", "chunk_topk", "symmetric")
ROUNDING = (1, 2)
#: A signal beyond the barriers of all runs.
ARRIVED = 1 << 40


def least_block(form: str) -> int:
    return 32 if form == "sign" else 16 if form.startswith("int2") else 8


def block_runs(form: str, block_size: int, segments: int, tensors: list[Tensor]) -> Runs:
    """Runs of encode, decode and reduce, by name.

    Args:
        tensors: of any floating dtype. ``reduce`` and ``reduce_shards`` add ``segments`` messages
            of one segment's length.
    """
    name, own = FORMS[form]
    settings = {**own, "block_size": block_size}
    codec = codecs.CODECS[name](**settings)
    numel = sum(tensor.numel() for tensor in tensors)
    message = torch.zeros(codec.nbytes(numel, segments), dtype=torch.uint8)
    part = -(-numel // segments)
    received = torch.zeros(segments, codec.nbytes(part), dtype=torch.uint8)
    reduced = torch.zeros(codec.nbytes(part), dtype=torch.uint8)
    error, part_error = torch.zeros(numel), torch.zeros(part)
    random = {"rounding": torch.tensor(ROUNDING)} if name == "blockwise" else {}

    def call(which: str, *arguments: Any, **options: Any) -> Callable[[], object]:
        operator = getattr(torch.ops.commhook, f"{name}_{which}")
        return lambda: operator(*arguments, **settings, **options)

    written = [torch.empty_like(tensor) for tensor in tensors]
    runs = {
        "encode": call("encode", tensors, message, shards=segments),
        "encode, error": call("encode", tensors, message, shards=segments, error=error),
        "decode": call("decode", message, written, shards=segments),
        "decode_sum": call("decode_sum", received, [torch.empty(part)], scale=0.5),
        "reduce": call("reduce", received, reduced, part),
        "reduce, error": call("reduce", received, reduced, part, error=part_error),
        "reduce_shards": call("reduce_shards", [*received], reduced, part, error=part_error),
        "reduce_shards, failed": call(
            "reduce_shards", [*received], reduced, part, failed=torch.tensor([1])
        ),
    }
    if random:
        runs["encode, random"] = call(
            "encode", tensors, message, shards=segments, error=error, **random
        )
        runs["reduce, random"] = call("reduce", received, reduced, part, error=part_error, **random)
    return runs


def symmetric_runs(sizes: list[int]) -> Runs:
    """Runs of one rank that shares memory with two others. Their signals come before it waits.

    Args:
        sizes: bytes of the gathered segments, each a multiple of 4.
    """
    segments = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    message = torch.zeros(sum(sizes), dtype=torch.uint8)
    controls = [torch.zeros(control_words(3), dtype=torch.int64) for _ in range(3)]

    def barrier(signal: int, timeout: float) -> None:
        controls[1].zero_()
        controls[1][[0, 2]] = signal
        symmetric_barrier(controls, 1, timeout=timeout)

    return {
        "barrier": lambda: barrier(ARRIVED, 60),
        "barrier, in vain": lambda: barrier(0, 1e-3),
        "gather": lambda: symmetric_gather(segments, message),
        "gather, failed": lambda: symmetric_gather(segments, message, failed=torch.tensor([1])),
    }


def other_runs(kind: str, tensors: list[Tensor]) -> Runs:
    """Runs of the kernels of one of OTHERS, by name."""
    if kind == "symmetric":
        return symmetric_runs([4 * tensor.numel() for tensor in tensors])
    numel = sum(tensor.numel() for tensor in tensors)
    written = [torch.empty_like(tensor) for tensor in tensors]
    if kind == "flatten":
        buffer = torch.zeros(numel)
        count = torch.zeros(1, dtype=torch.int64)
        infinite = [torch.full_like(tensor, torch.inf) for tensor in tensors]
        return {
            "flatten": lambda: bucket_ops.flatten(tensors, out=buffer),
            "flatten_stats": lambda: bucket_ops.flatten_stats(tensors, dtype=torch.float32),
            "unflatten": lambda: bucket_ops.unflatten_into(buffer, written),
            "check_finite": lambda: torch.ops.commhook.check_finite(tensors, count),
            "check_finite, infinite": lambda: torch.ops.commhook.check_finite(infinite, count),
        }
    if kind == "narrow error":  # the error of a block codec
        codec = codecs.CODECS["blockwise"]()
    else:
        # For chunk_topk: groups of 16 values, and the largest chunks.
        codec = codecs.CODECS[kind](*([] if kind == "chunk_topk" else [0.1]))
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
    error, narrow = torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)
    rounding = torch.tensor(ROUNDING)
    not_finite = [tensor.clone() for tensor in tensors]
    for tensor in not_finite:
        tensor[::3] = torch.nan

    def encode(values: list[Tensor], error: Tensor | None) -> None:
        codec.encode(values, message, error=error, rounding=rounding)

    if kind == "narrow error":
        return {"encode": lambda: encode(tensors, narrow)}
    sums: Runs = {}
    if kind == "chunk_topk":
        encode(tensors, None)
        received = torch.stack([message, message])
        sums["decode_sum"] = lambda: codec.decode_sum(received, written, scale=0.5)
    return {
        **sums,
        "encode": lambda: encode(tensors, None),
        "encode, error": lambda: encode(tensors, error),
        "encode, narrow error": lambda: encode(tensors, narrow),
        "encode, not finite": lambda: encode(not_finite, error.clone()),
        "decode": lambda: codec.decode(message, written, rounding=rounding),
    }


def _some_tensors(kind: str) -> list[Tensor]:
    """Tensors of several dtypes and lengths, so that pieces begin at all addresses.

    Their number is odd, and large enough to give each warp of a small device two tiles.
    """
    torch.manual_seed(0)
    most = torch.randn(25_001 if kind == "sign" else 5001)
    half = torch.randn(601).half()
    return [most, half, torch.randn(3)[1:], torch.randn(4099).bfloat16()[2:]]


def runs_of(kind: str, all_segments: Sequence[int] = (1, 3)) -> list[Runs]:
    """Runs of the kernels of a form, or of one of OTHERS; these reach all their barriers."""
    if kind in OTHERS:
        return [other_runs(kind, _some_tensors(kind))]
    # The second size keeps its values in shared memory, and is not a power of two if possible.
    sizes = (least_block(kind), {8: 72, 16: 208, 32: 64}[least_block(kind)], 256, 1024)
    tensors = _some_tensors(kind)
    return [
        block_runs(kind, size, segments, tensors) for size in sizes for segments in all_segments
    ]
