"""Checks of this process: the machine, the installation, GPUs, and hooks that it tries."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shlex
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch_commhook.cli.doctor.meeting import REPORT_IT, Finding, Settings, first_line
from torch_commhook.native.stamp import (
    HOW_TO_BUILD,
    LIBRARY_FOLDER,
    PACKAGE,
    operator_library,
    read_built_for,
    release,
)

if TYPE_CHECKING:
    import torch


# ---- checks of the machine: shared memory, huge pages, processors, open files, variables ---------


#: Only variables with these prefixes are printed; others may hold secrets.
PREFIXES = ("COMMHOOK_", "TORCH_", "GLOO_", "NCCL_", "OMP_", "CUDA_VISIBLE_DEVICES")

SHARED_MEMORY = "/dev/shm"
#: A container has 64 MiB by default: too little for the workers of a DataLoader, or for NCCL.
_ENOUGH_SHARED = 1 << 30
#: NCCL takes about this much for each pair of GPUs.
_LEAST_SHARED = 16 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: For Python, its libraries, and the files of a training.
_OWN_FILES = 256
#: Connections between two ranks: of the library's transport, and of the user's groups.
_CONNECTIONS = 8


def check_host(settings: Settings) -> Iterator[Finding]:
    """Shared memory, huge pages, processors and threads, and open files."""
    yield _shared_memory()
    yield _huge_pages()
    yield _processors(settings)
    yield _open_files(settings)


def check_variables(settings: Settings) -> Iterator[Finding]:
    """The environment variables that PyTorch, Gloo, NCCL and this library read."""
    for name in sorted(os.environ):
        if name.startswith(PREFIXES):
            yield Finding(name, os.environ[name])


def _shared_memory() -> Finding:
    name = "shared memory"
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        advice = f"Mount a tmpfs at {SHARED_MEMORY}; NCCL and workers of a DataLoader need it."
        return Finding(name, f"{SHARED_MEMORY}: {error.strerror}", "warning", advice)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    value = f"{free >> 20} MiB of {size >> 20} MiB are free in {SHARED_MEMORY}"
    if free >= _ENOUGH_SHARED:
        return Finding(name, value)
    advice = f"Give {SHARED_MEMORY} at least 1 GiB, in a container by docker run --shm-size=1g "
    advice += "or --ipc=host."
    return Finding(name, value, "warning" if free >= _LEAST_SHARED else "error", advice)


def _huge_pages() -> Finding:
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return Finding("huge pages", "not known on this system")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen != "never":
        return Finding("huge pages", chosen)
    advice = f"As root, run: echo madvise > {_HUGE_PAGES}; passes over buffers then take less time."
    return Finding("huge pages", chosen, "warning", advice)


def _processors(settings: Settings) -> Finding:
    cores = usable_cores()
    ranks = 1 if settings.place is None else settings.place.local_size
    value = f"{cores} of {os.cpu_count()} for this process"
    try:
        import torch
    except (ImportError, OSError):
        return Finding("processors", value)
    threads = torch.get_num_threads()
    value += f", {threads} threads in torch"
    if ranks > 1:
        value += f", {ranks} ranks on this host"
    share = max(1, int(cores) // ranks)
    if threads * ranks > max(cores, ranks):
        reason = "all ranks together have more threads than processors."
    elif threads == 1 and share > 1:
        reason = f"each rank uses one processor of {share} (torchrun sets it to 1)."
    else:
        return Finding("processors", value)
    return Finding("processors", value, "warning", f"Set OMP_NUM_THREADS={share}: {reason}")


def usable_cores() -> float:
    """The number of processors in this process's affinity, at most its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return min(cores, round(int(quota) / int(period), 1))
    except (OSError, ValueError):  # no such container, or "max"
        return cores


def _open_files(settings: Settings) -> Finding:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    size = 2 if settings.place is None else settings.place.size
    needed = _OWN_FILES + _CONNECTIONS * min(size, 64)
    if soft == "unlimited" or int(soft) >= needed:
        return Finding("open files", str(soft))
    advice = f"Run ulimit -n {max(needed, 1024)} before training: {size} ranks may need {needed}."
    return Finding("open files", f"{soft} (at most {hard})", "warning", advice)


# ---- checks of the installation: versions, the native libraries, a compiler ----------------------


#: The results of all tests on each torch, which `make test-torch` stores.
TESTED = Path(__file__).with_name("tested_torches.json")


def library_error() -> Exception | None:
    """The error with which torch or a native library does not load, or None."""
    try:
        from torch_commhook.native.libraries import load_ops

        load_ops()
        import torch_commhook.native.runtime  # noqa: F401  (loads _C)
    except (ImportError, OSError) as error:
        return error
    return None


def check_versions(settings: Settings) -> Iterator[Finding]:
    """Versions of this library, Python, the system and torch."""
    import torch_commhook

    yield Finding("torch_commhook", torch_commhook.__version__)
    yield Finding("Python", sys.version.replace("\n", " "))
    yield Finding("platform", f"{platform.platform()}, {os.cpu_count()} cores")
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "Install torch 2.11 or newer, then build torch_commhook again."
        yield Finding("torch", f"does not load: {first_line(error)}", "error", advice)
        return
    yield Finding("torch", torch.__version__)
    yield _tests_on(str(torch.__version__))
    built_with = [line.removeprefix("  - ") for line in torch.__config__.show().splitlines()]
    compilers = [line for line in built_with if line.startswith(("GCC", "Clang", "clang", "MSVC"))]
    yield Finding("torch's compiler", ", ".join(compilers) or "unknown")
    yield Finding("torch's CUDA", str(torch.version.cuda))
    yield Finding("torch's ROCm", str(torch.version.hip))
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("torch's CPU capability", capability)


def _tests_on(version: str) -> Finding:
    """Whether the tests have passed on this torch, or on another one of its minor release."""
    stored = json.loads(TESTED.read_text())
    own = version.partition("+")[0]
    if own in stored:
        run = stored[own]
        value = (
            f"{run['passed']} passed at commit {run['code']} on torch {own}, its build "
            f"{run['build']}, with Python {run['python']}"
        )
        return Finding("tests on this torch", value)
    alike = [each for each in stored if release(each) == release(own)]
    value = f"never run on {own}; passed on torch {', '.join(alike or stored) or 'none'}"
    if alike:
        return Finding("tests on this torch", value)
    advice = "Install one of these, or run" if stored else "Run"
    advice += f" make test-torch TORCH={own} in a checkout."
    return Finding("tests on this torch", value, "warning", advice)


def check_build(settings: Settings) -> Iterator[Finding]:
    """The native libraries: the torch that they fit, and their kernels; a C++ compiler."""
    error = library_error()
    if error is None:
        yield Finding("native libraries", ", ".join(_libraries()))
        yield from _loaded()
    else:
        value, advice = _why_not_loaded(error)
        yield Finding("native libraries", value, "error", advice)
    yield _compiler(is_built=error is None)


def _libraries() -> list[str]:
    return [file.name for file in sorted((*PACKAGE.glob("*.so"), *PACKAGE.glob("lib/*.so")))]


def _why_not_loaded(error: Exception) -> tuple[str, str]:
    """The reason for an error with which the native libraries do not load, and advice."""
    try:
        import torch
    except (ImportError, OSError):
        return "not loaded, since torch does not load", "Install torch first."
    own, names, library = str(torch.__version__), _libraries(), operator_library()
    if library is None or not any(name.startswith("_C.") for name in names):
        advice = _elsewhere() or f"Build them for torch {own}: {HOW_TO_BUILD}"
        return f"not built ({', '.join(names) or 'none'} in {PACKAGE})", advice
    built_for = read_built_for(library)
    if built_for is not None and release(built_for) != release(own):
        return (
            f"built for torch {built_for}, and torch {own} is installed",
            f"Build them again, or install torch {release(built_for)}: {HOW_TO_BUILD}",
        )
    return (
        f"do not load: {type(error).__name__}: {first_line(error)}",
        f"Build them again for torch {own} and this Python: {HOW_TO_BUILD}",
    )


def _elsewhere() -> str | None:
    """Advice if this package hides one that is installed."""
    for path in (Path(each).resolve() / PACKAGE.name for each in sys.path if each):
        if path != PACKAGE.resolve() and operator_library(path / LIBRARY_FOLDER.name) is not None:
            return f"Change to another folder: {path} is built, and {PACKAGE.parent} comes first."
    return None


def _loaded() -> Iterator[Finding]:
    import torch

    from torch_commhook import _C

    built_for = {"_ops": torch.ops.commhook.built_for_torch(), "_C": _C.built_for_torch()}
    for library, version in built_for.items():
        if version.partition("+")[2] != str(torch.__version__).partition("+")[2]:
            advice = f"Build it again for torch {torch.__version__}: {HOW_TO_BUILD}"
            yield Finding(f"{library} built for torch", version, "warning", advice)
        else:
            yield Finding(f"{library} built for torch", version)
    yield Finding("CPU kernels", torch.ops.commhook.cpu_capability(None))


def _compiler(is_built: bool) -> Finding:
    """The C++ compiler, for torch.compile, hooks in C++ and the build."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]  # options may follow
    found = next(filter(None, map(shutil.which, chosen or ["c++", "g++", "clang++"])), None)
    if found is not None:
        return Finding("C++ compiler", found)
    user = "torch.compile on the CPU and hooks in C++ need it" if is_built else "the build needs it"
    value, advice = "none on the PATH", f"Install g++ 11 or newer: {user}."
    if chosen:
        value = f"CXX names {chosen[0]}, which is missing"
        advice = f"Set CXX to an installed compiler, or unset it: {user}."
    return Finding("C++ compiler", value, "warning" if is_built else "error", advice)


# ---- checks of GPUs, and of the CUDA kernels for them --------------------------------------------


_DRIVER = Path("/proc/driver/nvidia/version")
_BUILD_KERNELS = "COMMHOOK_CUDA=1 python setup.py develop"

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
        yield Finding("GPUs", "not known, since torch does not load")
        return
    is_cuda_build = torch.version.cuda is not None
    count = torch.cuda.device_count() if is_cuda_build else 0
    yield _gpus(is_cuda_build, count)
    if library_error() is not None:
        yield Finding("CUDA kernels", "not known, since the native libraries do not load")
        return
    yield _kernels(is_cuda_build, count)


def _gpus(is_cuda_build: bool, count: int) -> Finding:
    import torch

    if count:
        found = [torch.cuda.get_device_properties(index) for index in range(count)]
        texts = [
            f"{each.name} ({each.major}.{each.minor}, {each.total_memory / (1 << 30):.0f} GiB)"
            for each in found
        ]
        return Finding("GPUs", ", ".join(texts))
    if not _DRIVER.exists():
        return Finding("GPUs", "none")
    if not is_cuda_build:
        value = f"none that torch {torch.__version__} can use, though NVIDIA's driver is loaded"
        return Finding("GPUs", value, "warning", "Install a CUDA build of torch to use them.")
    value = "none that torch can use, though NVIDIA's driver is loaded"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        value += f": {first_line(error)}"
    advice = "Look at CUDA_VISIBLE_DEVICES, and whether the driver serves CUDA "
    return Finding("GPUs", value, "warning", f"{advice}{torch.version.cuda}.")


def _kernels(is_cuda_build: bool, count: int) -> Finding:
    import torch

    name = "CUDA kernels"
    cuda = torch.version.cuda
    if not torch.ops.commhook.has_cuda_kernels():
        if not is_cuda_build:
            return Finding(name, f"none, since torch {torch.__version__} is not a CUDA build")
        value = f"none in the build, though torch is a build for CUDA {cuda}; slower reference "
        value += "kernels serve CUDA tensors"
        advice = f"Install nvcc of CUDA {cuda}, then run: {_BUILD_KERNELS}"
        return Finding(name, value, "warning", advice)
    library = operator_library()
    found = set() if library is None else architectures(library.read_bytes())
    by_number = sorted(found, key=lambda each: (int(each.partition("_")[2]), each))
    value = ", ".join(by_number) or "of unknown architectures"
    capabilities = {torch.cuda.get_device_capability(index) for index in range(count)}
    missing = sorted(one for one in capabilities if found and not serves(found, *one))
    if not missing:
        return Finding(name, value)
    texts = [f"{major}.{minor}" for major, minor in missing]
    value = f"{value}: none for compute capability {' and '.join(texts)}"
    advice = f"Build again: TORCH_CUDA_ARCH_LIST='{' '.join(texts)}' {_BUILD_KERNELS}"
    return Finding(name, value, "error", advice)


def architectures(library: bytes) -> set[str]:
    """The architectures of the CUDA kernels in the contents of a library's file.

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
        if own <= (major, minor) and (kind == "compute" or own[0] == major):
            return True
    return False


# ---- tries hooks on two ranks, which are threads of this process ---------------------------------


#: The hooks to try, as ``--hook`` of ``train`` takes them.
HOOKS = ("allreduce", "error_feedback(blockwise)")


def check_hooks(settings: Settings) -> Iterator[Finding]:
    """Average gradients of two ranks with each of two hooks."""
    if library_error() is not None:
        yield Finding("hooks", "not tried, since the native libraries do not load")
        return
    for hook in HOOKS:
        error = _error_of(hook)
        if error is None:
            yield Finding(hook, "averages the gradients of two ranks")
        else:
            value = f"{type(error).__name__}: {first_line(error)}"
            yield Finding(hook, value, "error", REPORT_IT)


def _error_of(hook: str) -> Exception | None:
    try:
        from torch_commhook.testing import run_ranks

        first, second = run_ranks(averaged, 2, hook)
        if not first.equal(second) or not (first - 1.5).abs().max() < 0.05:
            raise RuntimeError(f"gives {first} and {second}, and should give 1.5")
    except Exception as error:  # doctor reports any error
        return error
    return None


def averaged(rank: int, hook: str) -> torch.Tensor:
    """A gradient that is 1 on rank 0, 2 on rank 1, and so on, through a hook."""
    import torch

    from torch_commhook import attach
    from torch_commhook.hooks.expressions import parse_hook

    model = torch.nn.Linear(4, 4)
    handle = attach(model, parse_hook(hook))
    model(torch.full((1, 4), rank + 1.0, dtype=torch.float32, device="cpu")).sum().backward()
    handle.remove()
    assert model.weight.grad is not None
    return model.weight.grad
