"""What is code and what is comment in a source."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import ROOT
from source_code import CPP_SUFFIXES, code_of

PYTHON = """
'''A module.'''

def call(x):
    return "# no comment"
"""
CPP = """
auto url = "http://x";  // said
auto raw = R"py(// code "x" )" )py";
auto count = 1'000'000 + '"' + 'c';
"""


def _code(folder: Path, suffix: str, text: str) -> bytes:
    path = folder / f"source{suffix}"
    path.write_text(text)
    return code_of(path)


@pytest.mark.parametrize(
    ("suffix", "text", "old", "new"),
    [
        (".py", PYTHON, "A module.", "Another."),
        (".py", PYTHON, "(x):\n", "(x):  # a comment\n\n"),
        (".md", "A text.", "A text", "Another"),
        (".cpp", CPP, "// said", "/* said\nanew */"),
        (".cu", CPP, "auto count", "  // a count\n\n  auto count"),
    ],
)
def test_words_are_no_code(tmp_path: Path, suffix: str, text: str, old: str, new: str) -> None:
    assert old in text
    assert _code(tmp_path, suffix, text) == _code(tmp_path, suffix, text.replace(old, new))


@pytest.mark.parametrize(
    ("suffix", "text", "old", "new"),
    [
        (".py", PYTHON, "# no comment", "# none"),
        (".cpp", CPP, "//x", "//y"),
        (".cpp", CPP, "// code", "// text"),
        (".cpp", CPP, """'"' + 'c'""", """'"' + 'd'"""),
        (".json", "[1] // 1", "// 1", "// 2"),
    ],
)
def test_literals_are_code(tmp_path: Path, suffix: str, text: str, old: str, new: str) -> None:
    assert old in text
    assert _code(tmp_path, suffix, text) != _code(tmp_path, suffix, text.replace(old, new))


def test_all_of_the_library_is_understood() -> None:
    """Where a literal's end is not found, comments stay in the code, or braces leave it."""
    sources = [path for folder in ("csrc", "cuda") for path in (ROOT / folder).rglob("*")]
    read = [code_of(path).decode() for path in sources if path.suffix in CPP_SUFFIXES]
    assert len(read) > 200
    for code in read:
        assert "//" not in code and "/*" not in code
        assert code.count("{") == code.count("}")
