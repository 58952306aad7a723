"""docs/metrics.md names every metric that the code can write, and none that it can't."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from hrl.algos import ratio_bounds
from hrl.report.phases import PHASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
#: What a metric's name begins with. A literal of another beginning is no metric (`bundled/addition` is a task).
FAMILIES = (
    "actor|critic|data|env|episode|health|logps|moe|perf|pf_ppo|prompt_length|response|response_length|reward|rewards|rollout|rollout_corr|"
    "timing_per_token_ms|timing_s|tracking|train|val|weight_sync"
)
NAME = re.compile(rf"(?:{FAMILIES})/[\w/@*]+")
#: Literals of that form that are no metrics: what an address or a tracker has.
NO_METRICS = {"val/generations", "val/generation_*"}


@cache
def named_on_the_page() -> frozenset[str]:
    """The names of the page's tables and text, `<…>` as `*`."""
    names = re.findall(rf"`((?:{FAMILIES})/[^`\s]+)`", PAGE.read_text())
    return frozenset(re.sub(r"<[^>]+>", "*", name) for name in names)


def written_in(source: str) -> set[str]:
    """The metrics' names among the strings of a module; what a name is put together from is `*`."""
    found = set()
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        else:
            continue
        if NAME.fullmatch(text) and not text.endswith("/"):
            found.add(f"{text}*" if text.endswith("_") else text)  # the beginning of several names
    return found


@cache
def written_by_the_package() -> dict[str, str]:
    """Name → file that has it."""
    return {
        name: str(path.relative_to(ROOT))
        for path in sorted((ROOT / "hrl").rglob("*.py"))
        for name in written_in(path.read_text())
        if name not in NO_METRICS
    }


def is_named(name: str, page: frozenset[str] | None = None) -> bool:
    """Whether a name, or a pattern that covers it, is on the page."""
    known = named_on_the_page() if page is None else page
    if name in known or "*" not in name:
        patterns = [re.escape(one).replace(r"\*", "[^/]+") for one in known if "*" in one]
        return name in known or any(re.fullmatch(pattern, name) for pattern in patterns)
    # What the code puts together must cover something on the page, part by part.
    pattern = re.escape(name).replace(r"\*", ".+")
    return any(re.fullmatch(pattern, one) for one in known)


def test_every_metric_of_the_code_is_in_the_glossary() -> None:
    missing = {name: file for name, file in written_by_the_package().items() if not is_named(name)}
    assert not missing, f"docs/metrics.md lacks {missing}"


def test_every_metric_of_the_glossary_is_in_the_code() -> None:
    written = written_by_the_package()
    # Names that the code puts together from pieces without a slash.
    built = {f"timing_s/{phase.name}" for phase in PHASES} | {"timing_s/step"}
    patterns = [re.escape(name).replace(r"\*", ".+") for name in written if "*" in name]
    unknown = {
        name
        for name in named_on_the_page() - written.keys() - built
        if not any(re.fullmatch(pattern, name) for pattern in patterns)
    }
    # A validation's names begin with a variable.
    unknown = {name for name in unknown if not name.startswith("val/*/")}
    assert not unknown


def test_the_glossary_has_every_phase_and_the_rules_of_rejection() -> None:
    text = PAGE.read_text()
    assert all(f"`{phase.name}`" in text for phase in PHASES)
    for rule in ratio_bounds.REJECTION_RULES:
        assert is_named(f"rollout_corr/rollout_rs_{rule}_masked_fraction")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('metrics["actor/new"] = 1.0', {"actor/new"}),
        ('{f"reward/{name}/mean": 1}', {"reward/*/mean"}),
        ('x = "bundled/addition"', set()),
        ('x = "see actor/new for more"', set()),
    ],
)
def test_the_collector_sees_names_and_patterns(source: str, names: set[str]) -> None:
    assert written_in(source) == names


def test_a_name_that_no_row_covers_is_noticed() -> None:
    page = frozenset({"reward/*/mean", "actor/lr"})
    assert is_named("reward/correct/mean", page)
    assert is_named("reward/*/mean", page)
    assert not is_named("actor/new", page)
    assert not is_named("reward/correct/max", page)


def test_every_row_says_what_it_means_and_what_is_healthy() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert not [line for line in rows if len([cell for cell in line.strip("| ").split(" | ") if cell]) != 4]
