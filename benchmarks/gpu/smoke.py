"""Runs one operator on small tensors, and compares the results with the CPU's, bit by bit.

python -m benchmarks.gpu.smoke "flatten" --device cuda --record FILE
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .cases import Data, Maker, depends_on_shards, makers, small_shapes
from .commands import ROOT
from .plant import fault_at, strike

SHARDS = (1, 2, 3, 8)
ROUNDS = 3


def kernels(device: str) -> AbstractContextManager[None]:
    """The CUDA kernels for tensors of the device; ``"host"`` runs them for CPU tensors."""
    if device != "host":
        return nullcontext()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from cuda_on_host import cuda_kernels_on_host

    return cuda_kernels_on_host(128)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def differences(maker: Maker, name: str, device: str, shards: int, seed: int) -> str | None:
    """A difference from the CPU's results; None if there is none."""
    on = "cpu" if device == "host" else device
    shapes = small_shapes(seed)
    right = maker(Data(shapes, "cpu", seed, exact=True), shards)
    right.call()
    work = maker(Data(shapes, on, seed, exact=True), shards)
    with kernels(device):
        work.call()
    if on == "cuda":
        torch.cuda.synchronize()
    if fault_at(f"smoke/{name}") == "wrong":
        work.results[0].view(-1)[-1:].fill_(42)
    for i, (got, want) in enumerate(zip(work.results, right.results, strict=True)):
        wrong = bits(got) != bits(want)
        if name == "flatten_stats" and want.numel() == 1 and want.is_floating_point():
            # Blocks of threads add in another order than the CPU.
            if not torch.allclose(got.cpu(), want, rtol=1e-5):
                return f"result {i}: {got.item()}, not {want.item()}"
        elif wrong.any():
            first = int(wrong.nonzero()[0])
            return f"{int(wrong.sum())} of {wrong.numel()} bytes of result {i}, from {first} on"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case")
    parser.add_argument("--device", choices=("cuda", "cpu", "host"), default="cuda")
    parser.add_argument("--record", help="ignored: the outcome is the only result")
    arguments = parser.parse_args()
    name = arguments.case
    maker = makers()[name]
    strike(f"smoke/{name}")
    for seed in range(ROUNDS):
        for shards in SHARDS if depends_on_shards(name) else (1,):
            found = differences(maker, name, arguments.device, shards, seed)
            if found is not None:
                print(f"{shards} shards differ from the CPU: {found}")
                return 1
    print("the bits of the CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
