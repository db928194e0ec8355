"""The documentation as a site: `make docs` builds it with Sphinx from README.md and the pages in docs.

The pages stay plain Markdown. What a site needs beside them is added while they are read: the navigation to the first
page (`navigation.py`), and an entry of the reference where a comment names one (`reference.py`).
"""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import llms  # noqa: E402 - found by the path above
import navigation  # noqa: E402
import reference  # noqa: E402

ROOT = HERE.parents[1]

project = "eventjet"
author = "the eventjet authors"
release = version = version_of(project)
language = "en"

root_doc = navigation.FIRST
include_patterns = ["README.md", "tests/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "benchmarks", "examples", "src", "tests/[!R]*", "scratch", "deploy"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
highlight_language = "none"

html_theme = "furo"
html_title = f"eventjet {version}"
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
# Opening the folder opens the README.
html_additional_pages = {"index": "first.html"}
templates_path = ["templates"]
# Nothing is fetched from elsewhere, so the site is read from a disk as well as from a server.
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}


def setup(app: Sphinx) -> None:
    """Hang in what the pages do not say themselves."""
    app.connect("source-read", navigation.add)
    app.connect("source-read", reference.add)
    app.connect("autodoc-process-docstring", reference.translate)
    app.connect("autodoc-process-signature", reference.sign)
    app.connect("build-finished", llms.write)
