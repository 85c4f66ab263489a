"""The C++ compiler of this machine, for tests that build something."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from repository import ROOT

BUILD = ROOT / "build"


class NoCompilerError(Exception):
    """This machine has no compiler."""


def cpp_compiler() -> list[str]:
    """The value of the variable CXX, which may include arguments, or else ``c++``."""
    given = shlex.split(os.environ.get("CXX", ""))
    if not given and shutil.which("c++") is None:
        raise NoCompilerError("no C++ compiler was found (c++, or the variable CXX)")
    return given or ["c++"]


def build_once(name: str, command: list[str], sources: Iterable[Path]) -> Path:
    """Compiles sources, unless the folder ``build`` has the result; returns its path.

    Args:
        command: without ``-o``. If it fails, RuntimeError shows the compiler's output.
        sources: everything that the result depends on, except the command.
    """
    digest = hashlib.sha256(repr(command).encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    path = BUILD / f"{name}-{digest.hexdigest()[:16]}"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}")  # several processes may build at once
    try:
        built = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, timeout=600
        )
        if built.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{built.stderr}")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
    return path
