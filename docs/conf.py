"""Sphinx's configuration. `make docs` builds the site into build/site, without network, and takes warnings for errors.

The source directory is the repository's root, so that README.md, CONTRIBUTING.md, the recipes' READMEs and benchmark
results are pages from where they lie, and links are checked as a reader of the repository follows them.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.errors import ExtensionError

import moe_ckpt

project = "moe_ckpt"
author = "the authors of moe_ckpt"
copyright = f"{author}; Apache License 2.0"
release = moe_ckpt.__version__

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "recipes/*/README.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
"""Depth of headings that get GitHub's anchors."""

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
"""Lightning's text on each of its hooks is no part of this reference."""
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_mock_imports = [name for name in ("torchtitan", "tyro") if importlib.util.find_spec(name) is None]
"""torchtitan is not among the packages for development."""
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
"""``Attributes:`` become a list in the class's text; else each is documented a second time by autodoc."""

nitpicky = True
nitpick_ignore_regex = [("py:class", r"[\w.\[\]]+")]
"""Types in signatures need not be on the site. What is no name at all is a sentence that was taken for a type."""

smartquotes = False
suppress_warnings = ["myst.header"]
"""Tables of benchmarks/results are written to be put under another heading."""

html_theme = "furo"
html_title = f"moe_ckpt {release}"
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

REMOTE = re.compile(r"""<(?:script|img|iframe)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*\bhref="(?:https?:)?//""")
"""What a browser fetches by itself from another host."""


def setup(app: Sphinx) -> None:
    """Sphinx calls it first."""
    for kind in PyObject.doc_field_types:
        if kind.name == "variable":
            kind.label = "Attributes"  # as docstrings call them; Sphinx says "Variables"
    sys.addaudithook(refuse_connections)
    app.connect("build-finished", refuse_remote_parts)
    app.connect("build-finished", write_entry)


def refuse_connections(event: str, arguments: tuple[Any, ...]) -> None:
    """Raises ``ExtensionError`` where the build connects to another host."""
    # The address of a Unix socket is a path; those of the network are tuples.
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        raise ExtensionError(f"building the documentation connects to {arguments[1]}; it must work without network")


def refuse_remote_parts(app: Sphinx, exception: Exception | None) -> None:
    """Raises ``ExtensionError`` where a page is whole only for readers with network."""
    for page in sorted(Path(app.outdir).rglob("*.html")):
        if found := REMOTE.search(page.read_text()):
            raise ExtensionError(f"{page} loads something from another host: {found[0]}")


def write_entry(app: Sphinx, exception: Exception | None) -> None:
    """Lets index.html lead to the first page, which lies as deep as its source."""
    target = f"{root_doc}.html"
    (Path(app.outdir) / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={target}">\n')
