"""How the native libraries are compiled (build_support.py, on a small library) and loaded."""

from __future__ import annotations

import gc
import io
import os
import re
import shlex
import sysconfig
import weakref
from pathlib import Path

import pytest
import torch
from cpp_compiler import NoCompilerError, cpp_compiler
from torch.nn.parallel import DistributedDataParallel as DDP

import build_support
import torch_commhook
from build_support import JOINED_FILES, CompileError, groups_of, run_ninja, write_joined
from torch_commhook import NativeLibraryError, attach, hooks
from torch_commhook.native import libraries, stamp

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


# ---- loading -------------------------------------------------------------------------------------


def test_both_libraries_were_built_for_this_torch() -> None:
    assert torch.ops.commhook.built_for_torch() == torch.__version__
    assert torch_commhook._C.built_for_torch() == torch.__version__  # type: ignore[attr-defined]
    (library,) = libraries.LIBRARY_FOLDER.glob("_ops*.so")
    assert stamp.read_built_for(library) == torch.__version__


def test_another_torch_is_named() -> None:
    with pytest.raises(NativeLibraryError) as caught:
        libraries.check_built_for("1.2.3+cpu")
    message = str(caught.value)
    assert "built for torch 1.2.3+cpu" in message and f"torch {torch.__version__} is" in message
    assert "python setup.py develop" in message
    libraries.check_built_for(torch.__version__.split("+")[0] + "+other")  # the same release


def test_a_missing_library_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "LIBRARY_FOLDER", tmp_path)
    with pytest.raises(NativeLibraryError, match=r"is not in .*python setup.py develop"):
        libraries.load_ops()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"nonsense", r"does not load: .* built for torch unknown.*python setup.py develop"),
        (b"..commhook built for torch 1.0.0\0..", r"built for torch 1.0.0, but torch .* installed"),
    ],
)
def test_a_library_that_does_not_fit(
    contents: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_ops.so").write_bytes(contents)
    monkeypatch.setattr(libraries, "LIBRARY_FOLDER", tmp_path)
    with pytest.raises(NativeLibraryError, match=re.compile(message, re.DOTALL)):
        libraries.load_ops()


@pytest.mark.usefixtures("one_rank")
def test_a_model_with_a_hook_is_collected() -> None:
    model = DDP(torch.nn.Linear(3, 3))
    handle = attach(model, hooks.cast(torch.bfloat16))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None
