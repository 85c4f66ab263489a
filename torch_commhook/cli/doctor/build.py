"""Checks of the installation: versions, the native libraries, a compiler."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from torch_commhook.cli.doctor.findings import Finding, first_line
from torch_commhook.cli.doctor.settings import Settings
from torch_commhook.native.stamp import (
    HOW_TO_BUILD,
    LIBRARY_FOLDER,
    PACKAGE,
    operator_library,
    read_built_for,
    release,
)

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

    yield Finding("versions", "torch_commhook", torch_commhook.__version__)
    yield Finding("versions", "Python", sys.version.replace("\n", " "))
    yield Finding("versions", "platform", f"{platform.platform()}, {os.cpu_count()} cores")
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding(
            "versions",
            "torch",
            f"does not load: {first_line(error)}",
            "error",
            "Install torch 2.11 or newer, then build torch_commhook again.",
        )
        return
    yield Finding("versions", "torch", torch.__version__)
    yield _tests_on(str(torch.__version__))
    built_with = [line.removeprefix("  - ") for line in torch.__config__.show().splitlines()]
    compilers = [line for line in built_with if line.startswith(("GCC", "Clang", "clang", "MSVC"))]
    yield Finding("versions", "torch's compiler", ", ".join(compilers) or "unknown")
    yield Finding("versions", "torch's CUDA", str(torch.version.cuda))
    yield Finding("versions", "torch's ROCm", str(torch.version.hip))
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("versions", "torch's CPU capability", capability)


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
        return Finding("versions", "tests on this torch", value)
    alike = [each for each in stored if release(each) == release(own)]
    value = f"never run on {own}; passed on torch {', '.join(alike or stored) or 'none'}"
    if alike:
        return Finding("versions", "tests on this torch", value)
    advice = "Install one of these, or run" if stored else "Run"
    advice += f" make test-torch TORCH={own} in a checkout."
    return Finding("versions", "tests on this torch", value, "warning", advice)


def check_build(settings: Settings) -> Iterator[Finding]:
    """The native libraries: the torch that they fit, and their kernels; a C++ compiler."""
    error = library_error()
    yield from _libraries(error)
    if error is None:
        yield from _loaded()
    yield _compiler(is_built=error is None)


def _libraries(error: Exception | None) -> Iterator[Finding]:
    files = sorted((*PACKAGE.glob("*.so"), *PACKAGE.glob("lib/*.so")))
    names = ", ".join(file.name for file in files)
    if error is None:
        yield Finding("build", "native libraries", names)
        return
    torch_version = _torch_version()
    if torch_version is None:
        yield Finding(
            "build",
            "native libraries",
            "not loaded, since torch does not load",
            "error",
            "Install torch first.",
        )
        return
    library = operator_library()
    if library is None or not any(file.name.startswith("_C.") for file in files):
        yield Finding(
            "build",
            "native libraries",
            f"not built ({names or 'none'} in {PACKAGE})",
            "error",
            _elsewhere() or f"Build them for torch {torch_version}: {HOW_TO_BUILD}",
        )
        return
    built_for = read_built_for(library)
    if built_for is not None and release(built_for) != release(torch_version):
        yield Finding(
            "build",
            "native libraries",
            f"built for torch {built_for}, and torch {torch_version} is installed",
            "error",
            f"Build them again, or install torch {release(built_for)}: {HOW_TO_BUILD}",
        )
        return
    yield Finding(
        "build",
        "native libraries",
        f"do not load: {type(error).__name__}: {first_line(error)}",
        "error",
        f"Build them again for torch {torch_version} and this Python: {HOW_TO_BUILD}",
    )


def _elsewhere() -> str | None:
    """Advice if this package hides one that is installed."""
    for path in (Path(each).resolve() / PACKAGE.name for each in sys.path if each):
        if path != PACKAGE.resolve() and operator_library(path / LIBRARY_FOLDER.name) is not None:
            return f"Change to another folder: {path} is built, and {PACKAGE.parent} comes first."
    return None


def _torch_version() -> str | None:
    try:
        import torch
    except (ImportError, OSError):
        return None
    return str(torch.__version__)


def _loaded() -> Iterator[Finding]:
    import torch

    from torch_commhook import _C

    built_for = {"_ops": torch.ops.commhook.built_for_torch(), "_C": _C.built_for_torch()}
    for library, version in built_for.items():
        if version.partition("+")[2] != str(torch.__version__).partition("+")[2]:
            yield Finding(
                "build",
                f"{library} built for torch",
                version,
                "warning",
                f"Build it again for torch {torch.__version__}: {HOW_TO_BUILD}",
            )
        else:
            yield Finding("build", f"{library} built for torch", version)
    yield Finding("build", "CPU kernels", torch.ops.commhook.cpu_capability(None))


def _compiler(is_built: bool) -> Finding:
    """The C++ compiler, for torch.compile, hooks in C++ and the build."""
    chosen = shlex.split(os.environ.get("CXX", ""))[:1]  # options may follow
    found = next(filter(None, map(shutil.which, chosen or ["c++", "g++", "clang++"])), None)
    if found is not None:
        return Finding("build", "C++ compiler", found)
    user = "torch.compile on the CPU and hooks in C++ need it" if is_built else "the build needs it"
    value, advice = "none on the PATH", f"Install g++ 11 or newer: {user}."
    if chosen:
        value = f"CXX names {chosen[0]}, which is missing"
        advice = f"Set CXX to an installed compiler, or unset it: {user}."
    return Finding("build", "C++ compiler", value, "warning" if is_built else "error", advice)
