"""The documentation as a site: `make docs` writes it to `build/docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import hrl  # noqa: E402 (found by the line above)

project = "hrl"
author = "the hrl authors"
copyright = author
release = version = hrl.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["pictures/*.py"]

# ---------------------------------------------------------------------- Markdown

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# A prompt is shown, not copied.
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

# ---------------------------------------------------------------------- API

# The docstrings put code between single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "both"  # a class says what it is, its __init__ what it takes
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else a field has two descriptions, its own and that of `Attributes:`

# ---------------------------------------------------------------------- pages

html_theme = "furo"
html_title = f"hrl {release}"
html_static_path = ["_static"]
html_css_files = ["hrl.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7ab4f5", "color-brand-content": "#7ab4f5"},
    "navigation_with_keys": True,
}


# ---------------------------------------------------------------------- links that lead out of docs/

_PAGES_OF_THE_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def _stay_on_the_site(app: Sphinx, name: str, source: list[str]) -> None:
    """Lead links to files beside README to their pages here; readers on a forge follow them as they are."""
    for file, page in _PAGES_OF_THE_ROOT.items():
        source[0] = source[0].replace(f"](../{file}", f"](/{page}")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _stay_on_the_site)
