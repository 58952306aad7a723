"""The pages of docs/algorithms: their code runs, and they leave no member of a family out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hrl.algos import (
    advantages,
    aggregation,
    groups,
    kl,
    policy_filtration,
    policy_losses,
    preference,
    ratio_bounds,
    reward_shaping,
    rollout_correction,
    value_loss,
)

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
PAGES = sorted(FOLDER.glob("*.md"))
FAMILIES = {
    "advantages": [advantages.ADVANTAGE_ESTIMATORS],
    "policy-losses": [policy_losses.POLICY_LOSSES],
    "aggregation": [aggregation.AGGREGATION_MODES],
    "kl": [kl.KL_ESTIMATORS],
    "value-loss": [value_loss.VALUE_LOSSES],
    "rollout-correction": [rollout_correction.IMPORTANCE_LEVELS],
    "groups": [groups.GROUP_FILTERS, policy_filtration.REWEIGHT_METHODS],
    "preference": [preference.PAIR_LOSSES, preference.REWARD_MODEL_LOSSES, preference.SFT_LOSSES],
    "rewards": [reward_shaping.REWARD_SHAPERS],
}


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_runs(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": page.stem}
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(page), "exec"), namespace)  # noqa: S102 (our own page)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_page_names_every_member_of_its_family(family: str) -> None:
    text = (FOLDER / f"{family}.md").read_text()
    missing = [name for registry in FAMILIES[family] for name in registry if f"`{name}`" not in text]
    assert not missing


def test_the_page_of_rejection_names_every_scope_and_estimate() -> None:
    text = (FOLDER / "rollout-correction.md").read_text()
    for scope, kind in ratio_bounds.REJECTION_RULES.values():
        assert f"`{scope}_…`" in text
        assert f"`…_{kind}`" in text


def test_the_index_leads_to_every_page() -> None:
    text = (FOLDER / "index.md").read_text()
    assert all(f"({page.name})" in text for page in PAGES if page.stem != "index")


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in ("index", "golden")], ids=lambda p: p.stem)
def test_a_page_says_when_its_members_fail_and_how_they_are_configured(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"[Ww]hen (it|they) fails?", text)
    assert "arxiv.org/abs/" in text
    assert "```bash\npython -m hrl.trainer.main_" in text
