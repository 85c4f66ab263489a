"""Compiles for ``setup.py``: torch's ``BuildExtension``, with all libraries in one run of ninja.

Three things make a build quick. GCC parses the headers in ``csrc/*/precompiled.h`` once. Up to
``JOINED_FILES`` files of one folder are compiled together, since each compilation spends seconds on
the inline functions of these headers. And no processor waits for the last file of a library.

Files of kernels are compiled alone (see ``csrc/ops/cpu/for_each_instruction_set.h``). Names in the
anonymous namespaces of one folder must differ.

Without ninja the files are compiled one after the other.
"""

from __future__ import annotations

import math
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from setuptools.errors import CompileError
from torch.utils import cpp_extension

CSRC = Path(__file__).resolve().parent / "csrc"
#: With more files, a change of one takes long; with fewer, the whole build does.
JOINED_FILES = 8

INCLUDE = re.compile(r"^#include\s+[<\"]([^>\"]+)[>\"]", re.MULTILINE)
KERNEL_HEADER = re.compile(r"for_each_instruction_set\.h$|\.inl$|^immintrin\.h$")
KERNEL_FILE = re.compile(r"\"(.+\.inl)\"")
COMPILATION = re.compile(r"build (?P<object>.+): compile (?P<source>.+)")
PRECOMPILE = [
    "rule precompile",
    "  command = $cxx -MD -MF $out.d $cflags -x c++-header $in -o $out $post_cflags",
    "  depfile = $out.d",
    "  deps = gcc",
]
#: Begins each line of ninja itself; all other lines come from compilers.
MARK = "\x1e"


# ---- groups of sources --------------------------------------------------------------------------


def text_of(source: str) -> str:
    return Path(source).read_text(encoding="utf-8")


def included(source: str) -> set[str]:
    """The headers that a file includes directly."""
    return set(INCLUDE.findall(text_of(source)))


def has_kernels(source: str) -> bool:
    return any(KERNEL_HEADER.search(header) for header in included(source))


def haste(group: list[str]) -> int:
    """A sort key: the largest group first, including the kernels that its files include."""
    texts = map(text_of, group)
    kernels: list[Path] = [CSRC / name for text in texts for name in KERNEL_FILE.findall(text)]
    paths = [*map(Path, group), *kernels]
    return -sum(path.stat().st_size for path in paths if path.exists())


def groups_of(sources: list[str]) -> list[list[str]]:
    """Groups of sources to compile together, the slowest first."""
    folders = defaultdict(list)
    alone = []
    for source in sources:
        if CSRC in Path(source).parents and not has_kernels(source):
            folders[Path(source).parent].append(source)
        else:
            alone.append([source])
    joined = []
    for files in folders.values():
        count = math.ceil(len(files) / JOINED_FILES)
        bounds = [len(files) * i // count for i in range(count + 1)]
        joined += [files[begin:end] for begin, end in pairwise(bounds)]
    return sorted(alone, key=haste) + sorted(joined, key=haste)


# ---- files for ninja -----------------------------------------------------------------------------


def write_joined(folder: Path) -> tuple[Path, dict[str, str]]:
    """Rewrites a library's file for ninja, so that it joins sources.

    Args:
        folder: holds the file that torch has written.

    Returns:
        The new file, and for each object in torch's file the object that now contains it.
    """
    lines = []
    objects: dict[str, str] = {}  # by source
    for line in (folder / "build.ninja").read_text().splitlines():
        found = COMPILATION.match(line)
        if found:
            objects[unescaped(found["source"])] = unescaped(found["object"])
        else:
            lines.append(line)
    compiler = next(line for line in lines if line.startswith("cxx = ")).removeprefix("cxx = ")
    gcc = gcc_of(compiler)
    precompiled = precompiled_header(list(objects)) if gcc else None
    names: set[str] = set()
    header = folder / "precompiled.h"
    if precompiled is not None:
        names = included(str(precompiled))
        # GCC uses the compiled file next to this one, and reads this one only if it cannot.
        write_changed(header, f'// {gcc}\n#include "{precompiled}"\n')
        lines += PRECOMPILE
        lines.append(f"build {escaped(f'{header}.gch')}: precompile {escaped(str(header))}")
    parts = {}
    for group in groups_of(list(objects)):
        source, target = group[0], objects[group[0]]
        if len(group) > 1:
            place = "_".join(Path(source).relative_to(CSRC).with_suffix("").parts)
            path = folder / "joined" / f"{place}.cpp"
            write_changed(path, "".join(f'#include "{member}"\n' for member in group))
            source, target = str(path), str(path.with_suffix(".o"))
        parts.update({objects[member]: target for member in group})
        line = f"build {escaped(target)}: compile {escaped(source)}"
        if any(names & included(member) for member in group):
            line += f" | {escaped(f'{header}.gch')}\n"
            line += f"  cflags = -include {in_command(header)} -Winvalid-pch $cflags"
        lines.append(line)
    return write_changed(folder / "joined.ninja", "\n".join(lines) + "\n"), parts


def precompiled_header(sources: list[str]) -> Path | None:
    """The ``precompiled.h`` of a library's folder in ``csrc``."""
    paths = [Path(source) for source in sources]
    folders = {path.relative_to(CSRC).parts[0] for path in paths if CSRC in path.parents}
    found = [CSRC / folder / "precompiled.h" for folder in sorted(folders)]
    return next((path for path in found if path.exists()), None)


def gcc_of(compiler: str) -> str:
    """GCC's version, on which precompiled headers depend; empty for other compilers."""
    command = [*shlex.split(compiler), "--version"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    return said.splitlines()[0] if "Free Software Foundation" in said else ""


def write_changed(path: Path, text: str) -> Path:
    """Writes a file only if its text changes, so that ninja sees the old time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def unescaped(name: str) -> str:
    """The path that a file for ninja escapes as ``name``."""
    return re.sub(r"\$(.)", r"\1", name)


def escaped(name: str) -> str:
    return re.sub(r"([$: ])", r"$\1", name)


def in_command(path: Path) -> str:
    return shlex.quote(str(path)).replace("$", "$$")


# ---- a run of ninja ------------------------------------------------------------------------------


class Progress:
    """One line with the number of finished files and the time; rewritten in place on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rewrites = stream.isatty()
        self.begin = time.monotonic()
        self.count = ""
        self.is_shown = False

    def line(self) -> str:
        return f"native build: {self.count}{time.monotonic() - self.begin:.0f} s"

    def update(self, done: str, total: str) -> None:
        self.count = f"{done} of {total} files, "
        self.show()

    def show(self) -> None:
        if self.rewrites:
            self.write(f"\r\033[K{self.line()}")
            self.is_shown = True

    def say(self, text: str) -> None:
        """Prints a compiler's message in place of the line."""
        self.write(f"\r\033[K{text}" if self.is_shown else text)
        self.is_shown = False

    def finish(self) -> None:
        self.count = self.count or "nothing to compile, "
        self.say(f"{self.line()}\n")

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def run_ninja(file: Path, stream: TextIO) -> None:
    """Compiles the files that have changed.

    Prints the progress, the compilers' messages, and the command of a file that does not compile.
    """
    jobs = os.environ.get("MAX_JOBS", "")
    if not jobs.isdigit():
        # By default ninja would start two more, of 1.5 GB each.
        jobs = str(len(os.sched_getaffinity(0)))
    command = ["ninja", "-f", str(file), "-j", jobs]
    progress = Progress(stream)
    with subprocess.Popen(
        command,
        cwd=file.parent,
        env={**os.environ, "NINJA_STATUS": f"{MARK}%f %t "},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as ninja:
        for line in lines_of(ninja, progress):
            if line.startswith(MARK):
                done, total, _ = line.removeprefix(MARK).split(" ", 2)
                progress.update(done, total)
            elif not line.startswith("ninja: no work to do"):
                progress.say(line)
    progress.finish()
    if ninja.returncode != 0:
        raise CompileError("the native build has failed; what the compiler said stands above")


def lines_of(process: subprocess.Popen[bytes], progress: Progress) -> Iterator[str]:
    """The lines that a process writes. While it is silent, the progress line shows the time."""
    assert process.stdout is not None
    rest = b""
    while True:
        if not select.select([process.stdout], [], [], 1.0)[0]:
            progress.show()
            continue
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") + "\n" for line in lines)
        if not chunk:
            break
    if rest:
        yield rest.decode(errors="replace") + "\n"


class NinjaBuildExtension(cpp_extension.BuildExtension):
    """BuildExtension of torch, but it compiles all libraries' sources at once, then links."""

    build_temp: str

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = None  # ninja runs the compilers in parallel

    def build_extension(self, ext: Any) -> None:
        # Each extension needs its own folder: torch writes a file for ninja into it.
        folder = self.build_temp
        self.build_temp = str(Path(folder, ext.name.rpartition(".")[2]))
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = folder

    def build_extensions(self) -> None:
        # A torch without this function builds in its own way, which is only slower.
        if not self.use_ninja or not hasattr(cpp_extension, "_run_ninja_build"):
            super().build_extensions()
            return
        folders: list[Path] = []
        links: list[tuple[Any, dict[str, Any]]] = []
        with (
            mock.patch.object(
                cpp_extension,
                "_run_ninja_build",
                lambda folder, *_, **__: folders.append(Path(folder)),
            ),
            mock.patch.object(
                self.compiler,
                "link_shared_object",
                lambda *args, **kwargs: links.append((args, kwargs)),
            ),
        ):
            super().build_extensions()
        parts: dict[str, str] = {}
        lines = ["ninja_required_version = 1.3"]
        for folder in folders:
            file, own_parts = write_joined(folder)
            parts.update(own_parts)
            lines.append(f"subninja {escaped(str(file))}")
        top = write_changed(Path(self.build_temp, "build.ninja"), "\n".join(lines) + "\n")
        run_ninja(top, sys.stdout)
        for (objects, *arguments), settings in links:
            whole = list(dict.fromkeys(parts.get(name, name) for name in objects))
            self.compiler.link_shared_object(whole, *arguments, **settings)
