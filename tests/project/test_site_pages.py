"""The pages of the site: what docs/site/pages.py makes of the documents' links."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from repository import ROOT


def _pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "site" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = _pages()


@pytest.mark.parametrize(
    ("document", "link", "becomes"),
    [
        ("docs/hooks.md", "[a](modes.md#x)", "[a](modes.md#x)"),
        ("docs/hooks.md", "[a](#x)", "[a](#x)"),
        ("docs/hooks.md", "[a](../CONTRIBUTING.md#x)", "[a](contributing.md#x)"),
        ("docs/hooks.md", "[a](../examples/cpp_hook)", "a (`examples/cpp_hook`)"),
        ("docs/hooks.md", "[examples/cpp_hook](../examples/cpp_hook)", "`examples/cpp_hook`"),
        ("docs/hooks.md", "[a](https://x.org/b.md)", "[a](https://x.org/b.md)"),
        ("docs/results.md", "![a](images/wan.png)", "![a](images/wan.png)"),
        ("docs/api/hooks.md", "[a](../../cuda/README.md)", "[a](../cuda.md)"),
        ("README.md", "[a](docs/hooks.md)", "[a](hooks.md)"),
        ("cuda/README.md", "[a](../docs/kernels.md)", "[a](kernels.md)"),
        ("README.md", "```cpp\n[a](const b)\n```", "```cpp\n[a](const b)\n```"),
    ],
)
def test_a_link_leads_to_a_page(document: str, link: str, becomes: str) -> None:
    assert pages.page_of(document, link, pages.page_paths()) == becomes


def test_a_link_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/hooks\.md: there is no docs/no_such\.md"):
        pages.page_of("docs/hooks.md", "[a](no_such.md)", pages.page_paths())
