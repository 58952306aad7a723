"""The real vLLM engine on a model whose layers carry a state: its log-probs are those of each row alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.host import RolloutHost
from tests.models.hybrids import log_probs_alone, save_hybrid
from tests.models.tiny import VOCAB
from tests.workers.rollout import models
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

# The beginning that two of them share is in no cache: states are kept for no part of a prompt.
PROMPTS = [[*range(5, 45)], [*range(5, 42)], [9], [10, 11]]
R, WIDTH, TEMPERATURE = 12, 40, 0.9


def test_log_probs_of_falcon_h1_are_those_of_rows_alone_also_after_a_sync(tmp_path: Path) -> None:
    folder = save_hybrid(tmp_path, "falcon_h1", head_dim=32)
    old, new = models.load(folder), models.perturb(models.load(folder), 0.1)
    setup = engine_setup("vllm", folder, TokenIds(0, (2,), VOCAB), WIDTH + R, dtype="float32", max_num_seqs=16)
    with RolloutHost(replace(setup, model=replace(setup.model, packs_rows=False))) as host:
        for version, model in enumerate((old, new), start=1):
            host.push_weights(version, models.specs(model, torch.float32), models.parameters(model))
            batch = prompt_batch(PROMPTS, n=2, width=WIDTH)
            out = sample_rows(host, batch, max_tokens=R, temperature=TEMPERATURE).batch
            for found, own in log_probs_alone(model, out, TEMPERATURE):
                torch.testing.assert_close(found, own, atol=5e-5, rtol=0)
