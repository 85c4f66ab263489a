"""How the native libraries are compiled: build_support.py, on a small library."""

from __future__ import annotations

import io
import os
import shlex
import sysconfig
from pathlib import Path

import pytest
from cpp_compiler import NoCompilerError, cpp_compiler

import build_support
from build_support import JOINED_FILES, CompileError, groups_of, run_ninja, write_joined

CSRC = build_support.CSRC

SOURCES = {
    "library/value.h": "#pragma once\nconstexpr int kValue = 1;\n",
    "library/precompiled.h": '#pragma once\n#include "library/value.h"\n#include <vector>\n',
    "library/first.cpp": "#include <vector>\nnamespace { int a = 1; }\nint first() { return a; }\n",
    "library/second.cpp": "namespace { int two = 2; }\nint second() { return two; }\n",
    "library/kernels.inl": "int kernel() { return 3; }\n",
    "library/kernels.cpp": '#include "library/kernels.inl"\n',
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class SmallLibrary:
    """Its sources, and what torch would have written for ninja."""

    def __init__(self, root: Path, compiler: list[str]) -> None:
        self.csrc = root / "csrc"
        self.folder = root / "build of it"  # with what must be escaped
        self.folder.mkdir(parents=True)
        for name, text in SOURCES.items():
            self.write(name, text)
        lines = [
            "ninja_required_version = 1.3",
            f"cxx = {shlex.join(compiler)}",
            f"cflags = -Wall -I{shlex.quote(str(self.csrc))}",
            "post_cflags = -std=c++17",
            "rule compile",
            "  command = $cxx -MMD -MF $out.d $cflags -c $in -o $out $post_cflags",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
        for source in sorted(self.csrc.rglob("*.cpp")):
            output = build_support.escaped(str(self.object(source.stem)))
            lines.append(f"build {output}: compile {build_support.escaped(str(source))}")
        (self.folder / "build.ninja").write_text("\n".join(lines) + "\n")

    def object(self, name: str) -> Path:
        return self.folder / f"{name}.o"

    def write(self, name: str, text: str) -> None:
        path = self.csrc / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def build(self, stream: io.StringIO | None = None) -> str:
        stream = stream or io.StringIO()
        file, _ = write_joined(self.folder)
        try:
            run_ninja(file, stream)
        finally:
            self.said = stream.getvalue()
        return self.said


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallLibrary:
    try:
        compiler = cpp_compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))
    scripts = sysconfig.get_path("scripts")  # of this Python, with its ninja
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]))
    made = SmallLibrary(tmp_path, compiler)
    monkeypatch.setattr(build_support, "CSRC", made.csrc)
    return made


def test_files_of_a_folder_are_compiled_together_and_kernels_alone(library: SmallLibrary) -> None:
    _, parts = write_joined(library.folder)
    assert parts[str(library.object("first"))] == parts[str(library.object("second"))]
    kernels = str(library.object("kernels"))
    assert parts[kernels] == kernels
    assert list(parts.values()).count(kernels) == 1
    said = library.build()
    assert all(Path(path).exists() for path in parts.values())
    assert said.count("\n") == 1 and "\r" not in said
    assert library.build().startswith("native build: nothing to compile, ")


def test_a_change_compiles_what_it_concerns(library: SmallLibrary) -> None:
    library.build()
    library.write("library/kernels.inl", "int kernel() { return 4; }\n")
    assert library.build().startswith("native build: 1 of 1 files, ")


def test_a_change_of_a_precompiled_header_compiles_what_includes_it(library: SmallLibrary) -> None:
    if not build_support.gcc_of(shlex.join(cpp_compiler())):
        pytest.skip("headers are precompiled with GCC alone")
    library.build()
    library.write("library/value.h", "#pragma once\nconstexpr int kValue = 2;\n")
    assert library.build().startswith("native build: 2 of 2 files, ")  # the header and one object


def test_the_line_rewrites_itself_on_a_terminal(library: SmallLibrary) -> None:
    said = library.build(Terminal())
    assert said.count("\n") == 1
    assert said.count("\r\033[Knative build: ") >= 3


def test_a_warning_is_shown_without_its_command(library: SmallLibrary) -> None:
    library.write("library/second.cpp", "int second() { int unused_number = 2; return 2; }\n")
    said = library.build()
    assert "unused_number" in said
    assert "-MMD" not in said


def test_an_error_is_shown_whole(library: SmallLibrary) -> None:
    library.write("library/first.cpp", "int first() {\n  return nothing_known;\n}\n")
    with pytest.raises(CompileError, match="the native build has failed"):
        library.build()
    assert "first.cpp:2:10: error:" in library.said
    assert "return nothing_known;" in library.said


def test_every_source_is_compiled_once_the_largest_kernels_first() -> None:
    sources = sorted(map(str, CSRC.rglob("*.cpp")))
    groups = groups_of(sources)
    assert sorted(source for group in groups for source in group) == sources
    assert max(map(len, groups)) <= JOINED_FILES
    assert all(len({Path(source).parent for source in group}) == 1 for group in groups)
    assert [Path(source).name for source in groups[0]] == ["blockwise.cpp"]
