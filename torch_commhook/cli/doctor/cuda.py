"""Checks of GPUs, and of the CUDA kernels for them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from torch_commhook.cli.doctor.build import library_error
from torch_commhook.cli.doctor.findings import Finding, first_line
from torch_commhook.cli.doctor.settings import Settings
from torch_commhook.native.stamp import operator_library

_DRIVER = Path("/proc/driver/nvidia/version")

# A fat binary begins with a magic number, a version, the size of the header, and the size of the
# entries. Each entry begins with its kind, the size of its header, the size of its payload, and its
# architecture.
_FAT_BINARY = re.compile(rb"\x50\xed\x55\xba\x01\x00")
_FAT_HEADER = struct.Struct("<IHHQ")
_ENTRY_HEADER = struct.Struct("<HHIQIIHHI")
_PTX, _MACHINE_CODE = 1, 2


def check_gpus(settings: Settings) -> Iterator[Finding]:
    """The GPUs that torch sees, and whether the build has kernels for them."""
    try:
        import torch
    except (ImportError, OSError):
        yield Finding("gpus", "GPUs", "not known, since torch does not load")
        return
    is_cuda_build = torch.version.cuda is not None
    count = torch.cuda.device_count() if is_cuda_build else 0
    yield _gpus(is_cuda_build, count)
    if library_error() is not None:
        yield Finding("gpus", "CUDA kernels", "not known, since the native libraries do not load")
        return
    yield _kernels(is_cuda_build, count)


def _gpus(is_cuda_build: bool, count: int) -> Finding:
    import torch

    if count:
        return Finding("gpus", "GPUs", ", ".join(map(_gpu, range(count))))
    if not _DRIVER.exists():
        return Finding("gpus", "GPUs", "none")
    if is_cuda_build:
        return Finding(
            "gpus",
            "GPUs",
            f"none that torch can use, though NVIDIA's driver is loaded{_cuda_error()}",
            "warning",
            "Look at CUDA_VISIBLE_DEVICES, and whether the driver serves CUDA "
            f"{torch.version.cuda}.",
        )
    return Finding(
        "gpus",
        "GPUs",
        f"none that torch {torch.__version__} can use, though NVIDIA's driver is loaded",
        "warning",
        "Install a CUDA build of torch to use them.",
    )


def _gpu(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    gibibytes = properties.total_memory / (1 << 30)
    return f"{properties.name} ({capability}, {gibibytes:.0f} GiB)"


def _cuda_error() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f": {first_line(error)}"
    return ""


def _kernels(is_cuda_build: bool, count: int) -> Finding:
    import torch

    name = "CUDA kernels"
    if not _has_kernels():
        if not is_cuda_build:
            value = f"none, since torch {torch.__version__} is not a CUDA build"
            return Finding("gpus", name, value)
        return Finding(
            "gpus",
            name,
            f"none in the build, though torch is a build for CUDA {torch.version.cuda}; slower "
            "reference kernels serve CUDA tensors",
            "warning",
            f"Install nvcc of CUDA {torch.version.cuda}, then run: "
            "COMMHOOK_CUDA=1 python setup.py develop",
        )
    library = operator_library()
    found = set() if library is None else architectures(library.read_bytes())
    value = ", ".join(sorted(found, key=_order)) or "of unknown architectures"
    capabilities = {torch.cuda.get_device_capability(index) for index in range(count)}
    missing = sorted(one for one in capabilities if found and not serves(found, *one))
    if not missing:
        return Finding("gpus", name, value)
    texts = [f"{major}.{minor}" for major, minor in missing]
    return Finding(
        "gpus",
        name,
        f"{value}: none for compute capability {' and '.join(texts)}",
        "error",
        f"Build again: TORCH_CUDA_ARCH_LIST='{' '.join(texts)}' COMMHOOK_CUDA=1 "
        "python setup.py develop",
    )


def _has_kernels() -> bool:
    import torch

    return bool(torch.ops.commhook.has_cuda_kernels())


def architectures(library: bytes) -> set[str]:
    """The architectures of the CUDA kernels in a library.

    Args:
        library: the contents of its file.

    Returns:
        ``"sm_90"`` for machine code, ``"compute_90"`` for PTX, which newer GPUs can also run.
    """
    found = set()
    for match in _FAT_BINARY.finditer(library):
        try:
            _, _, header, size = _FAT_HEADER.unpack_from(library, match.start())
            place = match.start() + header
            end = place + size
            while place < end:
                kind, _, header, size, _, _, _, _, number = _ENTRY_HEADER.unpack_from(
                    library, place
                )
                if kind not in (_PTX, _MACHINE_CODE) or not 0 < number < 1000:
                    break
                found.add(f"{'compute' if kind == _PTX else 'sm'}_{number}")
                place += header + size
        except struct.error:  # the file ends within it
            continue
    return found


def serves(architectures: set[str], major: int, minor: int) -> bool:
    """Whether kernels of these architectures run on a GPU of a compute capability."""
    for each in architectures:
        kind, number = each.split("_")
        own = divmod(int(number), 10)
        if kind == "compute" and own <= (major, minor):
            return True
        if kind == "sm" and own[0] == major and own[1] <= minor:
            return True
    return False


def _order(architecture: str) -> tuple[int, str]:
    kind, number = architecture.split("_")
    return int(number), kind
