"""What families allow of their experts: found on a small cut, and what docs/experts.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from hrl.models.expert_probe import probe_experts
from tests.models.table import COMPLETED, LONG_RUN_TOKENS, quiet

PAGE = Path(__file__).parents[2] / "docs" / "experts.md"
SAYS = {
    "mixtral": ("", ""),
    "qwen3_moe": ("", ""),
    "gpt_oss": ("", ""),
    "deepseek_v3": ("", "its family has no auxiliary loss"),  # a bias, groups, and scores that are no probabilities
    "deepseek_v2": ("gives some of the experts that it is told no weight", "its family has no auxiliary loss"),
    "phimoe": (r"does not choose them by one torch\.topk", r"does not choose them by one torch\.topk"),
    "llama": ("no layer with experts", "no layer with experts"),
}


@pytest.mark.parametrize("family", SAYS)
def test_what_a_family_allows_is_found_and_the_page_says_it(family):
    with quiet():
        found = probe_experts(CONFIG_MAPPING[family](**COMPLETED.get(family, {})), LONG_RUN_TOKENS)
    for why, says in zip((found.why_no_replay, found.why_no_balance), SAYS[family], strict=True):
        assert re.search(says, why) if says else not why
    line = re.search(rf"^\| `{family}` \| (\S+) \| (\S+) \|", PAGE.read_text(), re.MULTILINE)
    if family == "llama":
        assert line is None
    else:
        assert line is not None
        assert line.groups() == tuple("no" if why else "yes" for why in (found.why_no_replay, found.why_no_balance))
