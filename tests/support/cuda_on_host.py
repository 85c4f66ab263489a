"""The CUDA kernels as a library for the host, launches and all; no CUDA toolkit is needed.

The sources of ``cuda/`` are compiled as C++, with headers in the place of CUDA's that run a block's
threads as coroutines (``on_host/include/on_host.h``). What they register for CUDA is there for CPU
tensors, in a namespace of its own: ``torch.ops.commhook_on_host``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

#: What is compiled, and the headers that it needs: what it calls is in the library of operators.
KINDS = {
    "cuda": (".cu", ".cuh", ".cpp", ".h"),
    "csrc/ops": (".h",),
    "csrc/include": (".h",),
}
LAUNCH = re.compile(r"([\w:]+(?:<[^<>;{}]*>)?)\s*<<<(.*?)>>>\((.*?)\);", re.DOTALL)
FLAGS = [
    "-std=c++20",
    "-O1",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",  # it takes a change of stack for a mistake
    # A vector at an address that is not aligned for it ends the program.
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
]
#: Of a program that runs under AddressSanitizer (see tests/long_runs/sanitizers).
UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")
if UNDER_ASAN:
    FLAGS += ["-fsanitize=address", "-g1"]


def for_the_host(text: str) -> str:
    """A source of CUDA's as one of C++."""
    text = LAUNCH.sub(r'on_host::launch("\1", \2, [&] { \1(\3); });', text)
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
    """All files that are compiled, headers among them, by their paths in the tree."""
    files = {}
    for folder, kinds in KINDS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in kinds:
                files[str(path.relative_to(ROOT))] = for_the_host(path.read_text())
    for path in sorted(HERE.rglob("*.*")):
        files[str(path.relative_to(HERE))] = path.read_text()
    return files


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

    header = folder / "all.h"
    header.write_text(
        "#pragma once\n#include <ATen/ATen.h>\n#include <torch/library.h>\n#include <on_host.h>\n"
    )
    run("-x", "c++-header", str(header), "-o", f"{header}.gch")

    def compile_one(name: str) -> str:
        output = str(folder / f"{name}.o")
        run("-include", str(header), "-x", "c++", "-c", str(folder / name), "-o", output)
        return output

    names = [name for name in files if name.endswith((".cu", ".cpp"))]
    names.sort(key=lambda name: not name.endswith(".cu"))  # these take longest
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, names))
    libraries = [str(operators), f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10", "-Wl,-z,defs"]
    # Under its name at the end alone: a build that was cut off leaves none.
    run("-shared", *objects, *libraries, "-o", str(folder / "half"))
    (folder / "half").rename(folder / "library.so")
    for path in [header.with_suffix(".h.gch"), *map(Path, objects)]:
        path.unlink()


@cache
def failure_to_load() -> Exception | None:
    """Load the library; one that does not build is not built again for every test."""
    try:
        load()
    except (NoCompilerError, OSError, RuntimeError) as error:
        return error
    return None


def load_cuda_on_host() -> None:
    """Build the library, unless it is there, and load it; skips without a compiler."""
    failure = failure_to_load()
    if isinstance(failure, NoCompilerError):
        pytest.skip(str(failure))
    if failure is not None:
        raise RuntimeError(f"the CUDA kernels do not build for the host: {failure}")


def load() -> None:
    compiler = cpp_compiler()
    files = sources()
    # By its path, it is the library that is loaded already.
    operators = next((Path(torch_commhook.__file__).parent / "lib").glob("_ops*.so"))
    what = repr((sorted(files.items()), operators, FLAGS, compiler, torch.__version__))
    folder = BUILD / hashlib.sha256(what.encode()).hexdigest()[:16]
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


#: What a library has defined ends with it.
_libraries: list[torch.library.Library] = []


def overloads() -> list[str]:
    """Of the operators that have a CUDA kernel, without the namespace."""
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

    The device has room for so many warps at once: fewer than 64, or a multiple of that.
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
    """The names of the kernels that the host has played since the last call."""
    names: list[str] = getattr(torch.ops, NAMESPACE).take_launched()
    return names
