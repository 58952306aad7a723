"""docs/models.md says of every causal family what the comparison says today, and of none that it is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hrl.models.probe import GRADIENT_TOLERANCE, LOG_PROB_TOLERANCE, MOST_ROUNDING
from tests.models.table import ABOUT_UNPACKED, REFUSED, RIGHT, UNPACKED, VARIANTS, compare

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HOLD = [
    "llama",
    "qwen2_moe",
    "phi3",
    "mixtral",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "granite",
    "falcon",
    "doge",
    "recurrent_gemma",
    "qwen3_next",
    "mamba2",
    "cpmant",
]
"""Families whose line is computed again here: plain, windows, LongRoPE, experts, caps, sinks, MLA, factors; ones that
take no attention, compute their mask, carry state, and a refused one."""


@pytest.fixture(scope="module")
def lines() -> dict[tuple[str, str], list[str]]:
    """The cells of the table by family and setting."""
    packed = PAGE.read_text(encoding="utf-8").partition("## Layouts")[0]
    table = [line for line in packed.splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table]
    stripped = [[cell.strip() for cell in line] for line in cells]
    return {(line[0].strip("`"), line[1]): line[2:] for line in stripped}


def test_every_causal_family_and_every_setting_has_a_line(lines):
    assert {family for family, setting in lines if not setting} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {key for key in lines if key[1]} == {(family, setting) for family, setting, _ in VARIANTS}


def test_no_line_is_wrong_in_silence(lines):
    for key, (verdict, own, packings, gradients, why) in lines.items():
        if verdict in (RIGHT, UNPACKED):
            # Above the first bound only where the model's own roundings are as large.
            assert max(float(own), float(packings)) < MOST_ROUNDING, key
            assert float(gradients) < GRADIENT_TOLERANCE * max(1.0, float(own) / LOG_PROB_TOLERANCE), key
            assert bool(why) == (verdict == UNPACKED), key
        else:
            assert verdict == REFUSED and why, key


@pytest.mark.parametrize("family", HOLD)
def test_the_page_says_what_the_comparison_says(family, lines):
    own_settings = [("", {})] + [(setting, fields) for name, setting, fields in VARIANTS if name == family]
    for setting, fields in own_settings:
        row = compare(family, setting, **fields)
        verdict, *_, why = lines[family, setting]
        assert (row.verdict, row.why) == (verdict, why)


def test_what_is_said_beside_the_table_is_on_the_page():
    assert "\n".join(ABOUT_UNPACKED) in PAGE.read_text(encoding="utf-8")
