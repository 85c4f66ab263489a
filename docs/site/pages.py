"""Copies the documents of the repository into one folder of pages, which Sphinx reads.

    python docs/site/pages.py build/docs-pages

The documents keep their places, where a code host shows them. Links between documents become links
between pages. Links to sources and folders become their paths.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]

#: Documents outside docs/, and their pages.
ELSEWHERE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "cuda/README.md": "cuda.md",
    "README.md": "overview.md",
}

_IMAGES = (".png", ".svg")


def page_paths() -> dict[str, str]:
    """For each document, by its path in the repository, the path of its page."""
    docs = ROOT / "docs"
    paths = {
        f"docs/{path.relative_to(docs).as_posix()}": path.relative_to(docs).as_posix()
        for path in sorted([*docs.glob("*.md"), *docs.glob("api/*.md")])
    }
    return paths | ELSEWHERE


def page_of(document: str, text: str, paths: dict[str, str]) -> str:
    """The text of a document with the links of its page.

    Args:
        document: its path in the repository.
        text: of the document.
        paths: as :func:`page_paths` gives them.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """
    here = PurePosixPath(document).parent
    page = PurePosixPath(paths[document]).parent

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        name, hash_mark, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return match[0]
        path = os.path.normpath(here / name)
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{document}: there is no {path}")
        if path in paths:
            new = os.path.relpath(paths[path], page)
        elif path.endswith(_IMAGES):
            new = os.path.relpath(os.path.relpath(path, "docs"), page)
        else:
            return f"`{path}`" if label == path else f"{label} (`{path}`)"
        return f"{mark}[{label}]({new}{hash_mark}{anchor})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    parts[::2] = [re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, part) for part in parts[::2]]
    return "".join(parts)


def main(folder: Path) -> None:
    """Write all pages and images into a folder. Pages that stay the same keep their times."""
    paths = page_paths()
    wanted = {folder / page for page in paths.values()}
    for document, page in paths.items():
        text = page_of(document, (ROOT / document).read_text(), paths)
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in {*folder.rglob("*.md")} - wanted:
        path.unlink()
    shutil.copytree(ROOT / "docs" / "images", folder / "images", dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
