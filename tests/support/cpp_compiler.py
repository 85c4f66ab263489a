"""The C++ compiler of this machine, for what tests build themselves."""

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
    """None was found."""


def cpp_compiler() -> list[str]:
    """The variable CXX, which may hold arguments too, or else ``c++``."""
    given = shlex.split(os.environ.get("CXX", ""))
    if not given and shutil.which("c++") is None:
        raise NoCompilerError("no C++ compiler was found (c++, or the variable CXX)")
    return given or ["c++"]


def build_once(name: str, command: list[str], sources: Iterable[Path]) -> Path:
    """What ``command`` makes of sources, in the folder ``build``; compiled where it is not there.

    Args:
        command: without ``-o``; raises RuntimeError with the compiler's words where it fails.
        sources: all that the result depends on, beside the command.
    """
    digest = hashlib.sha256(repr(command).encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    path = BUILD / f"{name}-{digest.hexdigest()[:16]}"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}")  # several may build at the same time
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
