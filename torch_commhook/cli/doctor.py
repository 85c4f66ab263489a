"""``doctor``: prints what is installed, and tries two hooks on it. Bug reports ask for its output.

It works even if torch or a native library does not load. So it imports these only when it needs
them, and the package calls :func:`end_where_nothing_loads` before it loads them itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: The hooks to try, as ``--hook`` of ``train`` takes them.
HOOKS = ("allreduce", "error_feedback(blockwise)")

#: Only variables with these prefixes are printed; others may hold secrets.
PREFIXES = ("COMMHOOK_", "TORCH_", "GLOO_", "NCCL_")

_PACKAGE = Path(__file__).parent.parent


def main(argv: Sequence[str]) -> int:
    """Run ``doctor argv``; returns 0 where all is well, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="commhook doctor",
        description="Print what is installed, and try two hooks on two ranks in this process.",
    )
    parser.parse_args(argv)
    error = library_error()
    _print_report()
    if error is None:
        error = _failed_check()
    if error is None:
        print(f"check: ok (two ranks, {' and '.join(HOOKS)})")
        return 0
    print(f"check: FAILED: {type(error).__name__}: {error}")
    return 1


def end_where_nothing_loads() -> None:
    """If this process runs ``doctor`` and the package cannot be imported, say why and end."""
    if sys.argv[1:] == ["doctor"] and library_error() is not None:
        sys.exit(main([]))


def library_error() -> Exception | None:
    """The error with which torch or a native library does not load, or None."""
    try:
        from torch_commhook.native.libraries import load_ops

        load_ops()
        import torch_commhook.native.runtime  # noqa: F401  (loads _C)
    except (ImportError, OSError) as error:
        return error
    return None


def _print_report() -> None:
    for name, value in (*_of_the_system(), *_of_torch(), *_of_the_libraries(), *_of_variables()):
        print(f"{name}: {value}")


def _of_the_system() -> Iterator[tuple[str, str]]:
    import torch_commhook

    yield "torch_commhook", torch_commhook.__version__
    yield "Python", sys.version.replace("\n", " ")
    yield "platform", f"{platform.platform()}, {os.cpu_count()} cores"


def _of_torch() -> Iterator[tuple[str, str]]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        yield "torch", f"does not load: {error}"
        return
    yield "torch", torch.__version__
    built_with = [line.removeprefix("  - ") for line in torch.__config__.show().splitlines()]
    compilers = [line for line in built_with if line.startswith(("GCC", "Clang", "clang", "MSVC"))]
    yield "torch's compiler", ", ".join(compilers) or "unknown"
    yield "torch's CUDA", str(torch.version.cuda)
    yield "torch's ROCm", str(torch.version.hip)
    yield "torch's CPU capability", torch.backends.cpu.get_cpu_capability()
    if dist.is_available():
        yield "Gloo", _available(dist.is_gloo_available())
        yield "NCCL", _available(dist.is_nccl_available())
    else:
        yield "torch.distributed", _available(False)
    count = torch.cuda.device_count()
    yield "CUDA devices", ", ".join(map(torch.cuda.get_device_name, range(count))) or "none"


def _available(is_available: bool) -> str:
    return "available" if is_available else "not available"


def _of_the_libraries() -> Iterator[tuple[str, str]]:
    files = sorted((*_PACKAGE.glob("*.so"), *_PACKAGE.glob("lib/*.so")))
    yield "native libraries", ", ".join(file.name for file in files) or "none"
    try:
        import torch

        from torch_commhook.native.libraries import load_ops

        load_ops()
        yield "_ops built for torch", torch.ops.commhook.built_for_torch()
        yield "CUDA kernels in the build", str(torch.ops.commhook.has_cuda_kernels())
        yield "CPU kernels", torch.ops.commhook.cpu_capability(None)
        from torch_commhook import _C

        yield "_C built for torch", _C.built_for_torch()
    except (ImportError, OSError) as error:
        yield "not loaded", str(error)


def _of_variables() -> Iterator[tuple[str, str]]:
    for name in sorted(os.environ):
        if name.startswith(PREFIXES):
            yield name, os.environ[name]


def _failed_check() -> Exception | None:
    """Average gradients of two ranks with two hooks; returns the error, or None."""
    try:
        from torch_commhook.testing import run_ranks

        for hook in HOOKS:
            first, second = run_ranks(_averaged, 2, hook)
            if not first.equal(second) or not (first - 1.5).abs().max() < 0.05:
                raise RuntimeError(f"{hook} gives {first} and {second}, and should give 1.5")
    except Exception as error:  # whatever it is, it is what the user has come to learn
        return error
    return None


def _averaged(rank: int, hook: str) -> torch.Tensor:
    """A gradient that is 1 on rank 0 and 2 on rank 1, through a hook."""
    import torch

    from torch_commhook import attach
    from torch_commhook.hooks.expressions import parse_hook

    model = torch.nn.Linear(4, 4)
    handle = attach(model, parse_hook(hook))
    model(torch.full((1, 4), rank + 1.0, dtype=torch.float32, device="cpu")).sum().backward()
    handle.remove()
    assert model.weight.grad is not None
    return model.weight.grad
