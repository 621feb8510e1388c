"""Configuration of the site, which Sphinx builds from the whole repository: `make docs`.

The README of each package is its manual, and a page of the site. This folder has the pages that
belong to no package. Links are relative paths, which also work in a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tfdist  # noqa: E402
from pipelines.console.quiet import quieten_tensorflow  # noqa: E402

quieten_tensorflow()

project = "tfdist"
version = release = tfdist.__version__
extensions = ["myst_nb", "sphinx_design", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "notebooks/*",
    "docs/performance/*.md", "benchmarks/*.md", "pipelines/*.md", "tfdist/**/*.md",
    "tests/conformance/*.md", "tests/studies/keras_suite/*.md",
]  # fmt: skip
exclude_patterns = [".venv", ".git", "build", "runs", "**/__pycache__", "**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = f"tfdist {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

#: Names of exceptions that several packages have stay text.
suppress_warnings = ["ref.python"]
#: Blocks without a language are commands.
highlight_language = "bash"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
#: Outputs are those that are stored: building runs nothing.
nb_execution_mode = "off"
nb_merge_streams = True

napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
