"""What compilers and interpreters see of a source: its text without comments and docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CPP_SUFFIXES = (".cpp", ".h", ".inl", ".cu", ".cuh")
#: A literal, which may hold the signs of a comment, or a comment.
_LITERAL_OR_COMMENT = re.compile(
    r"""R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"  # a raw string
    | "(?:\\.|[^"\\\n])*"
    | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'  # after a digit it separates digits
    | (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)""",
    re.S | re.X,
)


def code_of(path: Path, content: bytes | None = None) -> bytes:
    """A source's code. Equal for two sources that differ in comments, docstrings and blank lines.

    Args:
        path: of the source. All bytes of a file that is neither Python, C++ nor CUDA are code,
            except those of a document (``.md``).
        content: of the source, if not that of the file.
    """
    content = path.read_bytes() if content is None else content
    if path.suffix == ".md":
        return b""
    if path.suffix in (".py", ".pyi"):
        return _python(content.decode()).encode()
    if path.suffix in CPP_SUFFIXES:
        return _cpp(content.decode()).encode()
    return content


def _python(text: str) -> str:
    module = ast.parse(text)
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(module)


def _cpp(text: str) -> str:
    def without(found: re.Match[str]) -> str:
        return " " if found["comment"] else found[0]

    lines = _LITERAL_OR_COMMENT.sub(without, text).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())
