"""Stage merged: a vLLM engine that gets, at every sync, a model with its adapter added to it.

The engine has no adapter. What it samples from is rounded to bfloat16 after the sum, so the bound on log-probs is that
of the adapter alone: here the adapter has learnt enough to be seen, and no more.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.first_light.adapter import ADAPTER, beside
from tests.first_light.random_model import SHAPES, config_of, join_alone
from tests.first_light.report import Findings
from tests.first_light.stages import Setup


def run(setup: Setup, findings: Findings) -> None:
    """Start an engine, and take two steps of an adapter with a merged sync after each."""
    device = join_alone(setup)
    size = "tiny" if setup.tiny else "1.5B"
    folder = Path(setup.folder, "random-model-to-merge")
    with torch.device(device):
        AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16).save_pretrained(folder)
    beside(folder, replace(ADAPTER, merge=True), device, SHAPES[size][5], findings)
