"""Calls every CUDA kernel on small tensors, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python tests/long_runs/cuda_sanitized.py [PART ...]

The parts ``buckets`` and ``codecs`` compare with the CPU, so that a run whose kernels do nothing
fails. ``kernels`` runs each kernel in each way that it has. ``large`` is more than one tile for
each warp, and takes minutes under racecheck. By default all parts but ``large`` run. Each step is
printed before it runs, so that the log of a run that was cut off shows the last one. ``make gpu``
runs the parts beside each other.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from codec_examples import EXAMPLES, everything, same, some_tensors
from kernel_device import DEVICE
from kernel_runs import FORMS, OTHERS, runs_of
from ops_reference import DTYPES

import torch_commhook.native.bucket_ops as ops
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.native.bucket_ops import check_finite

#: Some more than one table of a kernel's arguments holds, and some of them empty.
LISTS = ([0, 1, 31, 4097, 70_001], [i % 7 for i in range(250)])
LONG = [9] * 1900
#: More values than a GPU's warps take in two tiles of blocks each.
LARGE = 20_000_000
SEGMENTS = (1, 3)


def apart(lengths: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Tensors in one memory, at all alignments, the last one at its end."""
    memory = torch.zeros(sum(lengths) + len(lengths) - 1, dtype=dtype).cuda()
    pieces = memory.split([length + 1 for length in lengths[:-1]] + lengths[-1:])
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]


def check_bucket(lengths: list[int], dtype: torch.dtype, target: torch.dtype) -> None:
    """Flatten, statistics, and back."""
    values = torch.randn(sum(lengths)).to(dtype)
    tensors, copies = list(values.split(lengths)), apart(lengths, dtype)
    torch._foreach_copy_(copies, tensors)
    want = ops.flatten(tensors, scale=0.5, dtype=target)
    got = ops.flatten(copies, scale=0.5, dtype=target)
    assert torch.equal(got.cpu(), want)
    stats = ops.flatten_stats(copies, scale=0.5, dtype=target)
    assert torch.equal(stats.buffer.cpu(), want)
    back = apart(lengths, dtype)
    ops.unflatten_into(got, back, scale=2.0)
    right = [torch.zeros_like(tensor) for tensor in tensors]
    ops.unflatten_into(want, right, scale=2.0)
    assert torch.equal(torch.cat(back).cpu(), torch.cat(right))


def check_buckets() -> None:
    """Between all dtypes, at odd offsets, and the check of values."""
    for lengths in LISTS:
        for dtype in DTYPES:
            print(f"{len(lengths)} tensors of {dtype}", flush=True)
            for target in DTYPES:
                check_bucket(lengths, dtype, target)
            copies = apart(lengths, dtype)
            bad = torch.zeros(1, dtype=torch.int64).cuda()
            copies[-1][-1:] = float("inf")
            check_finite(copies, bad)
            assert bad.item() == 1
    check_bucket(LONG, torch.float32, torch.bfloat16)


def check_codec(codec: Codec, tensors: list[Tensor], segments: int) -> None:
    error = torch.randn(sum(tensor.numel() for tensor in tensors)) * 1e-3
    right = everything(codec, tensors, segments, 0.5, error)
    got = everything(codec, DEVICE.copy(tensors), segments, 0.5, error.cuda())
    assert all(same(a.cpu(), b) for a, b in zip(got, right, strict=True)), codec


def check_codecs() -> None:
    """What every codec writes, on tensors of all kinds."""
    rng = random.Random(0)
    large = [CODECS["sign"](block_size=1024), CODECS["blockwise"](block_size=4096)]  # type: ignore[call-arg]
    for codec in [*EXAMPLES, *large]:
        print(codec, flush=True)
        for segments in SEGMENTS:
            check_codec(codec, [*some_tensors(rng), torch.randn(3001)], segments)
    for name in ("blockwise", "topk"):  # each tensor has memory of its own, which takes long
        codec = CODECS[name]()
        print(f"{codec}, {len(LONG)} tensors", flush=True)
        check_codec(codec, [torch.randn(length) for length in LONG], 2)


def run_kernels(device: str) -> None:
    """Runs each kernel in each way that it has; compares nothing."""
    with torch.device(device):
        for kind in (*FORMS, *OTHERS):
            print(f"kernels of {kind}", flush=True)
            for runs in runs_of(kind, SEGMENTS[1:]):
                for run in runs.values():
                    run()


def check_large() -> None:
    """More than one tile for each warp."""
    for name in ("sign", "fp8", "blockwise"):
        print(f"{name}, {LARGE} values", flush=True)
        check_codec(CODECS[name](), [torch.randn(LARGE)], 2)


PARTS: dict[str, Callable[[], None]] = {
    "buckets": check_buckets,
    "codecs": check_codecs,
    "kernels": partial(run_kernels, "cuda"),
    "large": check_large,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    if not torch.ops.commhook.has_cuda_kernels():
        print("this build has no CUDA kernels")
        return 1
    torch.manual_seed(0)
    for part in arguments.parts or [name for name in PARTS if name != "large"]:
        PARTS[part]()
    torch.cuda.synchronize()
    print("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
