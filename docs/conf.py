"""The documentation as a site: `make docs` writes it to `build/docs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import hrl  # noqa: E402 (found by the line above)

project = "hrl"
author = "the hrl authors"
copyright = author
release = version = hrl.__version__

extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["pictures/*.py"]

# ---------------------------------------------------------------------- Markdown

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Notebooks are stored without outputs and shown as they are; tests run them.
nb_execution_mode = "off"
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
nitpicky = True  # a reference that leads nowhere is a warning
nitpick_ignore_regex = [
    # Other packages: the site is built without a network, so without their inventories.
    ("py:.*", r"(collections|contextlib|numpy|omegaconf|os|pathlib|ray|tensordict|torch)\..*"),
    ("py:.*", "Path|PreTrainedTokenizerBase"),
    # The configuration has a page of its own, by key.
    ("py:.*", r"(hrl\.config\..*\.)?(OfflineConfig|PPOTrainerConfig|RunConfiguration|Section)"),
    # Aliases, which autodoc spells out where they are explained, and a type variable.
    (
        "py:.*",
        r"OnTokens|Rewards|Rows|hrl\.single_controller\.dispatch\.F|hrl\.environments\.tool_functions\.AnyFunction",
    ),
    ("py:.*", "project"),  # a method of a generated class, which has no page
    ("py:.*", r"dict\[str|.*Mapping\[str"),  # types that Sphinx cuts at their comma
    # What hrl makes and hands over; nobody else makes one, and its fields are explained where it is given.
    (
        "py:.*",
        r"(hrl\..*\.)?(AdvantageSettings|Clip|ConfigView|EngineSetup|EpisodeDriver|Execute|GroupFilter|JsonConsole|Manifest|PolicyLossSettings|Position"
        r"|RankEnv|ReceiverReport|ResourcePoolManager|RewardModelRows|RewardService|Role|RunConsole|RunReporter|SampleOutput"
        r"|CheckpointError|ClusterLostError|LeftOutError|RunStoppedError|SamplingParams|ServedTeacher|Slot|StepMetrics|StepPhase|StopRequest|Uploads|WorkerGroups)",
    ),
]
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


def _found_by_its_last_name(app: Sphinx, env: Any, node: Any, text: nodes.Element) -> nodes.Element | None:
    """Link a class that a docstring names without its module, where only one has that name."""
    if node.get("refdomain") != "py" or "." in node["reftarget"]:
        return None
    objects = env.domains["py"].objects
    found = [name for name in objects if name.rpartition(".")[2] == node["reftarget"] and not objects[name].aliased]
    if len(found) != 1:
        return None
    there = objects[found[0]]
    return make_refnode(app.builder, node["refdoc"], there.docname, there.node_id, text, found[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _stay_on_the_site)
    app.connect("missing-reference", _found_by_its_last_name)
