"""What the documents name is there: paths, make targets, commands, options and public names."""

from __future__ import annotations

import contextlib
import io
import pkgutil
import re
import shlex
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT

from torch_commhook.cli.main import COMMANDS, main
from torch_commhook.hooks.expressions import (
    HookExpressionError,
    is_file_reference,
    parse_hook,
)

PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "cuda/README.md", "benchmarks/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "api").glob("*.md")),
]

_SUFFIXES = r"\.(?:py|pyi|cpp|h|cu|cuh|inl|md|json|toml|\*)"
_TOP = {"torch_commhook", "csrc", "cuda", "tests", "docs", "examples", "benchmarks", ".ci"}
_MODULES = "torch_commhook|hooks|codecs|collectives|testing|process_group|autograd"
_DOTTED = rf"(?:{_MODULES})(?:\.[A-Za-z_]\w*)+"


@cache
def _files() -> list[str]:
    found = []
    for path in ROOT.iterdir():
        if path.name in _TOP:
            found += [each for each in path.rglob("*") if "__pycache__" not in each.parts]
        if path.is_file() or path.name in _TOP:
            found.append(path)
    return [str(path.relative_to(ROOT)) for path in found]


@cache
def _words() -> frozenset[str]:
    """All identifiers in the sources."""
    texts = (ROOT / name for name in _files() if re.search(r"\.(py|pyi|cpp|h|cu|cuh|inl)$", name))
    return frozenset(
        word
        for path in texts
        if path.name != Path(__file__).name
        for word in re.findall(r"\w+", path.read_text(errors="ignore"))
    )


def _inline(text: str) -> list[str]:
    without_blocks = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    return [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", without_blocks)]


def _code(text: str) -> list[str]:
    """What stands in backticks, and the lines of blocks."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```$", text.replace("\\\n", " "), re.M | re.S)
    return _inline(text) + [line.strip() for block in blocks for line in block.splitlines()]


def _is_file(path: str, folders: list[str]) -> bool:
    """Whether a folder has the file, named with or without its suffix; ``*`` is a glob's."""
    patterns = [folder + path + end for folder in folders for end in ("", ".*")]
    return any(fnmatch(name, pattern) for name in _files() for pattern in patterns)


def wrong_paths(text: str) -> list[str]:
    """Paths from the root must be there, and others where they can be looked for.

    In a row of a table that is below a folder that the row has named before, or beside it, or in
    the package; elsewhere it is anywhere.
    """
    rows = re.findall(r"^\|.*$", text, re.M)
    prose = re.sub(r"^\|.*$", "", text, flags=re.M)
    return _wrong_paths(prose) + [wrong for row in rows for wrong in _wrong_paths(row)]


def _wrong_paths(text: str) -> list[str]:
    wrong = []
    folders = ["", "*/"]
    for code in _inline(text):
        if not re.fullmatch(r"[\w.*/-]+", code) or code.startswith("torch.") or _resolves(code):
            continue
        path = code.rstrip("/")
        if code.split("/")[0] in _TOP and "/" in code:
            if not _is_file(path, [""]):
                wrong.append(code)
            elif text.startswith("|"):
                folder = path if (ROOT / path).is_dir() else path.rpartition("/")[0]
                named = [folder + "/", folder + "/*/", folder.rpartition("/")[0] + "/"]
                folders = [*(folders if "*/" not in folders else ["", "torch_commhook/"]), *named]
        elif re.search(_SUFFIXES + "$", code) and not _is_file(path, folders):
            wrong.append(code)
    return wrong


def wrong_targets(text: str) -> list[str]:
    targets = set(re.findall(r"^([a-z][\w -]*):", (ROOT / "Makefile").read_text(), re.M))
    known = {target for group in targets for target in group.split()}
    named = [name for code in _code(text) for name in re.findall(r"^make ([a-z][\w-]*)", code)]
    return [name for name in named if name not in known]


@cache
def _help(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return out.getvalue()


def wrong_commands(text: str) -> list[str]:
    wrong = []
    for code in _code(text):
        called = re.search(r"(?:-m torch_commhook|^commhook) ([a-z]\w*)(.*)", code)
        if called is None:
            continue
        command, rest = called.groups()
        if command not in COMMANDS:
            wrong.append(command)
            continue
        options = re.findall(r"(?<!\S)--[a-z][\w-]*", rest)
        wrong += [option for option in options if option not in _help(command)]
    return wrong


def wrong_calls(text: str) -> list[str]:
    """Commands that stand in full: their values are taken, hooks can be read, scripts are there."""
    wrong = []
    for code in _code(text):
        script = re.match(r"python3? ([\w/]+\.py)\b", code)
        if script is not None and "/" in script[1] and not (ROOT / script[1]).is_file():
            wrong.append(script[1])
        called = re.search(r"-m torch_commhook ([a-z]\w*)\b(.*)", code)
        if called is None or called[1] not in COMMANDS:
            continue
        arguments = shlex.split(called[2], comments=True)
        hook = arguments[arguments.index("--hook") + 1] if "--hook" in arguments[:-1] else None
        if not _takes(called[1], arguments) or not (hook is None or _is_hook(hook)):
            wrong.append(code)
    return wrong


def _takes(command: str, arguments: list[str]) -> bool:
    """Whether a command's parser takes the values of arguments. It stops at ``--help``."""
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], pytest.raises(SystemExit) as ended:
        main([command, *arguments, "--help"])
    return ended.value.code == 0


def _is_hook(text: str) -> bool:
    if is_file_reference(text):
        return True
    with contextlib.suppress(HookExpressionError):
        parse_hook(text)
        return True
    return False


def _resolves(name: str) -> bool:
    """Whether it is a dotted name of the package, such as ``hooks.cpp``."""
    if not re.fullmatch(_DOTTED, name):
        return False
    try:
        pkgutil.resolve_name("torch_commhook." + name.removeprefix("torch_commhook."))
    except (ImportError, AttributeError):
        return False
    return True


def wrong_names(text: str) -> list[str]:
    """Dotted names of the package resolve; other identifiers with a ``_`` are in the sources."""
    wrong = []
    for code in _inline(text):
        name = code.split("(")[0]
        if re.fullmatch(_DOTTED, name) and not re.search(_SUFFIXES + "$", code):
            is_there = _resolves(name)
        else:
            is_there = not re.fullmatch(r"[A-Za-z_]\w*_\w+", name) or name in _words()
        if not is_there:
            wrong.append(name)
    return wrong


def _anchors(text: str) -> set[str]:
    """Those that a page's headings have on the web."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def wrong_links(text: str) -> list[str]:
    """A link's page is there, and has the heading that it names."""
    wrong = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        pages = [ROOT / folder / name for folder in ("docs", "docs/api", "", "cuda", "benchmarks")]
        page = next((path for path in pages if name and path.exists()), None)
        if name and page is None:
            wrong.append(link)
        elif anchor and anchor not in _anchors(text if page is None else page.read_text()):
            wrong.append(link)
    return wrong


CHECKS = [wrong_paths, wrong_targets, wrong_commands, wrong_calls, wrong_links, wrong_names]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path, check: Callable[[str], list[str]]) -> None:
    assert check(page.read_text()) == []


@pytest.mark.parametrize(
    ("check", "planted", "found"),
    [
        (wrong_paths, "see `torch_commhook/no_such.py`", "torch_commhook/no_such.py"),
        (wrong_paths, "see `no_such.py`", "no_such.py"),
        (wrong_paths, "| `torch_commhook/codecs/`: `topk.py`, `powersgd.py` |", "powersgd.py"),
        (wrong_paths, "`csrc/runtime/no_such.*`", "csrc/runtime/no_such.*"),
        (wrong_targets, "```sh\nmake no-such\n```", "no-such"),
        (wrong_commands, "`python -m torch_commhook no_such`", "no_such"),
        (wrong_commands, "`commhook train --no-such 1`", "--no-such"),
        (wrong_calls, "```sh\npython benchmarks/no_such.py --help\n```", "benchmarks/no_such.py"),
        (wrong_calls, "`python -m torch_commhook train --steps few`", None),
        (wrong_calls, "`python -m torch_commhook train --hook 'no_such()'`", None),
        (wrong_links, "[a page](no_such.md)", "no_such.md"),
        (wrong_links, "[a heading](modes.md#no-such)", "modes.md#no-such"),
        (wrong_links, "[a heading](#no-such)\n\n## Another", "#no-such"),
        (wrong_names, "`hooks.no_such(3)`", "hooks.no_such"),
        (wrong_names, "`leave_to_no_one`", "leave_to_no_one"),
    ],
)
def test_what_is_not_there_is_found(
    check: Callable[[str], list[str]], planted: str, found: str | None
) -> None:
    assert check(planted) == [planted.strip("`") if found is None else found]


def test_the_table_of_layers_names_every_folder_of_the_package() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "torch_commhook"
    folders = [path.name for path in package.iterdir() if (path / "__init__.py").is_file()]
    assert [name for name in folders if f"`torch_commhook/{name}" not in table] == []
