"""The C++ compiler of this machine, for what tests build themselves."""

from __future__ import annotations

import os
import shlex
import shutil


class NoCompilerError(Exception):
    """None was found."""


def cpp_compiler() -> list[str]:
    """The variable CXX, which may hold arguments too, or else ``c++``."""
    given = shlex.split(os.environ.get("CXX", ""))
    if not given and shutil.which("c++") is None:
        raise NoCompilerError("no C++ compiler was found (c++, or the variable CXX)")
    return given or ["c++"]
