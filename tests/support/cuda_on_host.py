"""Builds the CUDA kernels and their launches as a library for the host, without a CUDA toolkit.

It compiles the sources of ``cuda/`` as C++. Other headers take the place of CUDA's, and run a
block's threads as coroutines (``on_host/include/on_host.h``). The kernels are registered for CPU
tensors in a separate namespace: ``torch.ops.commhook_on_host``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from cpp_compiler import NoCompilerError, cpp_compiler
from repository import ROOT

import torch_commhook

HERE = Path(__file__).with_name("on_host")
BUILD = ROOT / "build" / "cuda_on_host"
NAMESPACE = "commhook_on_host"

#: Compiled files, and the headers that they need: the library of operators has everything else.
KINDS = {"cuda": (".cu", ".cuh", ".cpp", ".h"), "csrc/ops": (".h",), "csrc/include": (".h",)}
#: CUDA's headers, in whose place the kernels get on_host.h.
REPLACED = ["cuda_runtime.h", "ATen/cuda/CUDAContext.h"]
REPLACED += [f"c10/cuda/CUDA{name}.h" for name in ("Exception", "Functions", "Guard")]
#: These include headers of kernels.
SOURCES = (*(f"{folder}/" for folder in KINDS), "look_back.cpp")
#: Also the host's own kernels. The other files observe these.
OBSERVED = (*SOURCES, "broken_kernels.cpp")
LAUNCH = re.compile(r"([\w:]+(?:<[^<>;{}]*>)?)\s*<<<(.*?)>>>\((.*?)\);", re.DOTALL)
FLAGS = [
    "-std=c++20",
    "-O1",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    "-fPIC",
    "-g1",  # for the line numbers of accesses
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",  # it takes a change of stacks for an error
    # A vector at a misaligned address ends the program.
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
]
#: Whether the program runs under AddressSanitizer (see tests/long_runs/sanitizers).
UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")
if UNDER_ASAN:
    FLAGS += ["-fsanitize=address"]
#: Each access of memory and each basic block calls the functions of on_host/callbacks.cpp, in the
#: order of the source: the compiler splits no vector of 16 bytes, duplicates no path, and keeps the
#: order of blocks of code. Lanes are combined again by that order.
OBSERVING = (
    []
    if UNDER_ASAN
    else [
        "-fsanitize=thread",
        "--param=tsan-distinguish-volatile=1",
        "-fsanitize-coverage=trace-pc",
        "-fno-tree-sra",
        "-fno-thread-jumps",
        "-fno-reorder-blocks",
    ]
)


def launched(match: re.Match[str]) -> str:
    """A launch as a call, with the same number of lines."""
    kernel, shape, arguments = match.groups()
    lines = "\n" * (match[0].count("\n") - shape.count("\n") - arguments.count("\n"))
    return f'on_host::launch("{kernel}", {shape}, {kernel}, {arguments});{lines}'


def for_the_host(text: str) -> str:
    text = LAUNCH.sub(launched, text)
    text = re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];",
        r"auto* const \2 = static_cast<\1*>(on_host::dynamic_memory());",
        text,
    )
    text = re.sub(
        r"__shared__ ([\w:]+) (\w+)((?:\[\w+\])?);",
        r"static thread_local \1 \2\3; on_host::begin_static(&\2, sizeof \2);",
        text,
    )
    text = re.sub(r"(TORCH_LIBRARY\w*)\(commhook,", rf"\1({NAMESPACE},", text)
    return text.replace(", CUDA, m)", ", CPU, m)")


def sources() -> dict[str, str]:
    """All compiled files, including headers, by their paths in the tree."""
    files = {}
    for folder, kinds in KINDS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in kinds:
                files[str(path.relative_to(ROOT))] = for_the_host(path.read_text())
    for header in REPLACED:
        files[f"include/{header}"] = '#include "on_host.h"\n'
    for path in sorted(HERE.rglob("*.*")):
        files[str(path.relative_to(HERE))] = path.read_text()
    return files


def digest_of(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def compile_library(
    folder: Path, files: dict[str, str], operators: Path, compiler: list[str]
) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    torch_root = Path(torch.__file__).parent
    common = [
        *compiler,
        *FLAGS,
        *(f"-I{folder / name}" for name in ("include", "cuda", "csrc", "csrc/include")),
        f"-isystem{torch_root / 'include'}",
        f"-isystem{torch_root / 'include/torch/csrc/api/include'}",
    ]

    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def run(*arguments: str) -> None:
        command = [*common, *arguments]
        built = subprocess.run(command, capture_output=True, text=True, env=environment)
        if built.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}\n{built.stderr[-5000:]}")

    def compile_once(output: Path, texts: object, *arguments: str) -> None:
        """Compiles, or uses the result of an earlier build with the same texts."""
        digest = digest_of(texts, FLAGS, OBSERVING, compiler, torch.__version__)
        kept = BUILD / "objects" / f"{digest}{output.suffix}"
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            made = kept.with_name(f"{kept.name}.{os.getpid()}")
            run(*arguments, "-o", str(made))
            made.rename(kept)
        output.unlink(missing_ok=True)
        output.symlink_to(kept)

    headers = {name: text for name, text in files.items() if name.endswith((".h", ".cuh"))}
    in_place = {name: text for name, text in headers.items() if name.startswith("include/")}
    own = {name: text for name, text in headers.items() if not name.startswith(SOURCES)}
    of_sources = {name: text for name, text in headers.items() if name not in own} | in_place
    header = folder / "all.h"
    header.write_text(
        "#pragma once\n#include <ATen/ATen.h>\n#include <torch/library.h>\n#include <on_host.h>\n"
    )
    precompile = [*OBSERVING, "-x", "c++-header", str(header)]
    compile_once(folder / "all.h.gch", in_place, *precompile)

    def compile_one(name: str) -> str:
        output = folder / f"{name}.o"
        observed = [*OBSERVING, "-include", str(header)] if name.startswith(OBSERVED) else []
        texts = (name, files[name], of_sources if name.startswith(SOURCES) else own)
        compile_once(output, texts, *observed, "-x", "c++", "-c", str(folder / name))
        return str(output)

    names = [name for name in files if name.endswith((".cu", ".cpp"))]
    names.sort(key=lambda name: not name.endswith(".cu"))  # these take longest
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, names))
    libraries = [str(operators), f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10", "-Wl,-z,defs"]
    # Gets its name only at the end, so that an interrupted build leaves no library.
    run("-shared", *objects, *libraries, "-o", str(folder / "half"))
    (folder / "half").rename(folder / "library.so")


@cache
def failure_to_load() -> Exception | None:
    """Loads the library, and returns the error; a failed build is not repeated for every test."""
    try:
        load()
    except (NoCompilerError, OSError, RuntimeError) as error:
        return error
    return None


def load_cuda_on_host() -> None:
    """Builds the library unless it exists, and loads it; skips the test without a compiler."""
    failure = failure_to_load()
    if isinstance(failure, NoCompilerError):
        pytest.skip(str(failure))
    if failure is not None:
        raise RuntimeError(f"the CUDA kernels do not build for the host: {failure}")


def load() -> None:
    compiler = cpp_compiler()
    files = sources()
    # Opening it by its path gives the library that is loaded already.
    operators = next((Path(torch_commhook.__file__).parent / "lib").glob("_ops*.so"))
    what = sorted(files.items()), operators, FLAGS, OBSERVING, compiler, torch.__version__
    folder = BUILD / digest_of(*what)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "library.so").exists():
            compile_library(folder, files, operators, compiler)
    torch.ops.load_library(folder / "library.so")
    library = torch.library.Library(NAMESPACE, "DEF")
    for name in overloads():
        library.define(str(overload_of("commhook", name)._schema).partition("::")[2])
    _libraries.append(library)


#: Operators of a library are removed with the object.
_libraries: list[torch.library.Library] = []


def overloads() -> list[str]:
    """The overloads of operators with a CUDA kernel, without the namespace."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return sorted(name.split("::")[1] for name in names if name.startswith(f"{NAMESPACE}::"))


def overload_of(namespace: str, name: str) -> torch._ops.OpOverload:
    operator, _, overload = name.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
    assert isinstance(found, torch._ops.OpOverload)
    return found


@contextmanager
def cuda_kernels_on_host(warps: int) -> Iterator[None]:
    """``torch.ops.commhook`` with the CUDA kernels for CPU tensors.

    ``warps`` is the number of warps that fit on the device: fewer than 64, or a multiple of 64.
    """
    load_cuda_on_host()
    getattr(torch.ops, NAMESPACE).set_warps(warps)
    library = torch.library.Library("commhook", "IMPL")
    for name in overloads():
        library.impl(name, overload_of(NAMESPACE, name), "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def take_launched() -> list[str]:
    """The names of the kernels that have run on the host since the last call."""
    return getattr(torch.ops, NAMESPACE).take_launched()


@contextmanager
def omitted(barrier: str) -> Iterator[None]:
    """Makes one barrier, given by file and line, order nothing; threads still wait there."""
    host = getattr(torch.ops, NAMESPACE)
    host.omit_barrier(barrier)
    try:
        yield
    finally:
        host.omit_barrier("")


@contextmanager
def nothing_past(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Makes an access to the 16 bytes past one of these contiguous tensors an error."""
    host = getattr(torch.ops, NAMESPACE)
    host.forbid_past(tensors)
    try:
        yield
    finally:
        host.forbid_past([])


@dataclass
class Requests:
    """The cost of one kernel's accesses to global or shared memory."""

    count: int = 0
    parts: int = 0  # sectors of 32 bytes, or passes over the banks
    fewest: int = 0
    bytes: int = 0
    #: The parts beyond the fewest possible, by line of the source.
    waste: Counter[str] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        return self.parts / max(self.fewest, 1)


#: Loads, stores and atomics of global memory, then of shared memory, in the host's order.
SPACES = ("global",) * 3 + ("shared",) * 3


def requests_of(run: Callable[[], object]) -> dict[tuple[str, str], Requests]:
    """The cost of each kernel's accesses, by its name and the memory: global or shared."""
    host = getattr(torch.ops, NAMESPACE)
    host.take_requests()
    host.watch_requests(True)
    try:
        run()
    finally:
        host.watch_requests(False)
    kernels, lines, rows = host.take_requests()
    found: dict[tuple[str, str], Requests] = {}
    for kernel, line, (kind, count, parts, fewest, nbytes) in zip(
        kernels, lines, rows.tolist(), strict=True
    ):
        name = kernel.partition("<")[0]
        requests = found.setdefault((name, SPACES[kind]), Requests())
        requests.count += count
        requests.parts += parts
        requests.fewest += fewest
        requests.bytes += nbytes
        if parts > fewest:
            requests.waste[line] += parts - fewest
    return found
