"""The transformers engine on models whose layers carry a state: its log-probs are those of each row alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.host import RolloutHost
from tests.models.hybrids import HYBRIDS, log_probs_alone, save_hybrid
from tests.models.tiny import VOCAB
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows

PROMPTS = [[5, 6, 7, 8, 20, 21, 22, 23, 9], [9], [10, 11], [5, 30]]
R, WIDTH = 12, 9


@pytest.mark.parametrize("family", HYBRIDS)
def test_log_probs_of_ragged_prompts_are_those_of_rows_alone(family: str, tmp_path: Path) -> None:
    """MiniMax gives other ones beside padding, Mamba where it is told of none, and Bamba without positions."""
    folder = save_hybrid(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    setup = engine_setup("hf", folder, TokenIds(0, (2,), VOCAB), WIDTH + R, dtype="float32", max_num_seqs=16)
    with RolloutHost(replace(setup, model=replace(setup.model, packs_rows=False))) as host:
        out = sample_rows(host, prompt_batch(PROMPTS, n=2, width=WIDTH), max_tokens=R, temperature=0.9).batch
    for found, own in log_probs_alone(model, out, 0.9):
        torch.testing.assert_close(found, own, atol=5e-5, rtol=0)
