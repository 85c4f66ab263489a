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


@pytest.mark.parametrize(
    ("suffix", "text", "old", "new", "is_code"),
    [
        (".py", PYTHON, "A module.", "Another.", False),
        (".py", PYTHON, "(x):\n", "(x):  # a comment\n\n", False),
        (".md", "A text.", "A text", "Another", False),
        (".cpp", CPP, "// said", "/* said\nanew */", False),
        (".cu", CPP, "auto count", "  // a count\n\n  auto count", False),
        (".py", PYTHON, "# no comment", "# none", True),
        (".cpp", CPP, "//x", "//y", True),
        (".cpp", CPP, "// code", "// text", True),
        (".cpp", CPP, """'"' + 'c'""", """'"' + 'd'""", True),
        (".json", "[1] // 1", "// 1", "// 2", True),
    ],
)
def test_words_are_no_code_and_literals_are(
    tmp_path: Path, suffix: str, text: str, old: str, new: str, is_code: bool
) -> None:
    assert old in text
    found = []
    for version in (text, text.replace(old, new)):
        path = tmp_path / f"source{suffix}"
        path.write_text(version)
        found.append(code_of(path))
    assert (found[0] != found[1]) is is_code


def test_all_of_the_library_is_understood() -> None:
    """Where a literal's end is not found, comments stay in the code, or braces leave it."""
    sources = [path for folder in ("csrc", "cuda") for path in (ROOT / folder).rglob("*")]
    read = [code_of(path).decode() for path in sources if path.suffix in CPP_SUFFIXES]
    assert len(read) > 200
    for code in read:
        assert "//" not in code and "/*" not in code
        assert code.count("{") == code.count("}")
