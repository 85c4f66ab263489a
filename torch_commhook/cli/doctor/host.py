"""Checks of the machine: shared memory, huge pages, processors, open files, variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch_commhook.cli.doctor.findings import Finding
from torch_commhook.cli.doctor.settings import Settings

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
    yield from _open_files(settings)


def check_variables(settings: Settings) -> Iterator[Finding]:
    """The environment variables that PyTorch, Gloo, NCCL and this library read."""
    for name in sorted(os.environ):
        if name.startswith(PREFIXES):
            yield Finding("variables", name, os.environ[name])


def _shared_memory() -> Finding:
    name = "shared memory"
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return Finding(
            "host",
            name,
            f"{SHARED_MEMORY}: {error.strerror}",
            "warning",
            f"Mount a tmpfs at {SHARED_MEMORY}; NCCL and workers of a DataLoader need it.",
        )
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    value = f"{_mebibytes(free)} of {_mebibytes(size)} are free in {SHARED_MEMORY}"
    if free >= _ENOUGH_SHARED:
        return Finding("host", name, value)
    return Finding(
        "host",
        name,
        value,
        "warning" if free >= _LEAST_SHARED else "error",
        f"Give {SHARED_MEMORY} at least 1 GiB, in a container by docker run --shm-size=1g "
        "or --ipc=host.",
    )


def _mebibytes(number: int) -> str:
    return f"{number >> 20} MiB"


def _huge_pages() -> Finding:
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return Finding("host", "huge pages", "not known on this system")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen != "never":
        return Finding("host", "huge pages", chosen)
    return Finding(
        "host",
        "huge pages",
        chosen,
        "warning",
        f"As root, run: echo madvise > {_HUGE_PAGES}; passes over buffers then take less time.",
    )


def _processors(settings: Settings) -> Finding:
    cores = usable_cores()
    ranks = 1 if settings.place is None else settings.place.local_size
    value = f"{cores} of {os.cpu_count()} for this process"
    try:
        import torch
    except (ImportError, OSError):
        return Finding("host", "processors", value)
    threads = torch.get_num_threads()
    value += f", {threads} threads in torch"
    if ranks > 1:
        value += f", {ranks} ranks on this host"
    share = max(1, int(cores) // ranks)
    if threads * ranks > max(cores, ranks):
        return Finding(
            "host",
            "processors",
            value,
            "warning",
            f"Set OMP_NUM_THREADS={share}: all ranks together have more threads than processors.",
        )
    if threads == 1 and share > 1:
        return Finding(
            "host",
            "processors",
            value,
            "warning",
            f"Set OMP_NUM_THREADS={share}: each rank uses one processor of {share} "
            "(torchrun sets it to 1).",
        )
    return Finding("host", "processors", value)


def usable_cores() -> float:
    """The number of processors in this process's affinity, at most its container's quota."""
    cores: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return min(cores, round(int(quota) / int(period), 1))
    except (OSError, ValueError):  # no such container, or "max"
        return cores


def _open_files(settings: Settings) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = 2 if settings.place is None else settings.place.size
    needed = _OWN_FILES + _CONNECTIONS * min(size, 64)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        value = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        yield Finding("host", "open files", value)
        return
    yield Finding(
        "host",
        "open files",
        f"{soft} (at most {'unlimited' if hard == resource.RLIM_INFINITY else hard})",
        "warning",
        f"Run ulimit -n {max(needed, 1024)} before training: {size} ranks may need {needed}.",
    )
