"""Settings of Sphinx; ``make docs`` builds the site."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import _MockObject
from sphinx.util import inspect

sys.path.insert(0, str(Path(__file__).parent))

import torch_commhook

project = "torch_commhook"
author = "the authors of torch_commhook"
release = torch_commhook.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "generated",
]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4

# The pages list the names themselves.
autosummary_generate = False
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_mock_imports = [
    *("accelerate", "lightning", "pytorch_lightning", "torchft", "torchtitan", "transformers")
]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 90
add_module_names = False

html_theme = "furo"
html_title = "torch_commhook"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_permalinks_icon = "#"

linkcheck_timeout = 10


def _resolve_short_name(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.Element
) -> nodes.Element | None:
    """Let docstrings name public objects without their modules, if the name is unique."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".")
    domain: Any = env.get_domain("py")
    found = {
        entry.node_id: (name, entry)
        for name, entry in domain.objects.items()
        if name == target or name.endswith("." + target)
    }
    if len(found) != 1:
        # Annotations may name classes that are not in the reference; docstrings may not.
        return None if isinstance(contnode, nodes.literal) else contnode
    ((name, entry),) = found.values()
    return nodes.reference(
        "",
        "",
        contnode,
        internal=True,
        refuri=app.builder.get_relative_uri(node["refdoc"], entry.docname) + "#" + entry.node_id,
        reftitle=name,
    )


def _link_documents(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Let ``docs/x.md`` in a docstring lead to that page."""
    lines[:] = [re.sub(r"``docs/(\w+)\.md``", r":doc:`/\1`", line) for line in lines]


def _own_signature(
    app: Sphinx, what: str, name: str, value: Any, options: object, signature: str, returned: str
) -> tuple[str, str] | None:
    """The signature of a class whose base class belongs to a framework that is not installed."""
    if what != "class" or not issubclass(value, _MockObject):
        return None
    own = inspect.signature(value.__init__, bound_method=True)
    return inspect.stringify_signature(
        own, show_return_annotation=False, unqualified_typehints=True
    ), ""


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _own_signature)
    app.connect("autodoc-process-docstring", _link_documents)
    app.connect("missing-reference", _resolve_short_name)
