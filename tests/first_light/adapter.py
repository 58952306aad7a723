"""Stage adapter: a vLLM engine that samples from an adapter, of which every sync sends nothing else.

Before the first sync it samples from the model alone. After each, the trainer's log-probs of what was sampled are the
engine's, and the bytes on the way are those of the adapter. Where bitsandbytes is installed, the same again beside a
model in 4 bits, which engine and trainer round each for itself.
"""

from __future__ import annotations

import importlib.util
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hrl.config.ppo import PPOTrainerConfig
from hrl.models.adapter import AdapterSource
from hrl.models.loading import ModelSource
from hrl.models.tokenizer import TokenIds
from hrl.workers.engine.engine import Engine
from hrl.workers.rollout.base import EngineSetup
from hrl.workers.rollout.host import RolloutHost
from tests.first_light.random_model import SHAPES, config_of, join_alone, one_step
from tests.first_light.report import Findings
from tests.first_light.sampled import NOISE, apart, learner, sampled, synced
from tests.first_light.stages import Setup

ADAPTER = AdapterSource(16, 32, "all-linear", None, use_rslora=False, path=None, seed=0, merge=False)
#: A rate with which one step of a new adapter is seen in what is sampled.
RATE = 2e-2


def run(setup: Setup, findings: Findings) -> None:
    """Starts an engine, and takes two steps of an adapter with a sync after each."""
    device = join_alone(setup)
    size = "tiny" if setup.tiny else "1.5B"
    folder = Path(setup.folder, "random-model-of-adapter")
    with torch.device(device):
        AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16).save_pretrained(folder)
    beside(folder, ADAPTER, device, SHAPES[size][5], findings)
    if importlib.util.find_spec("bitsandbytes") is None:
        findings.add("beside a model in 4 bits", "not tried", "bitsandbytes is not installed")
    else:
        beside(folder, replace(ADAPTER, load_in_4bit=True), device, SHAPES[size][5], findings, "4 bits: ")


def beside(
    folder: Path, adapter: AdapterSource, device: torch.device, vocab_size: int, findings: Findings, label: str = ""
) -> None:
    """Start an engine for the model and this adapter, and let both learn.

    Args:
        folder: Of the model.
        adapter: How it is trained and sent.
        device: Of both.
        vocab_size: Of the model.
        findings: Takes what is found.
        label: Before the name of each finding.
    """
    source = ModelSource(str(folder), {}, True, True, False, 256, adapter=adapter)
    trainer = learner(source, device, RATE)
    small = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "kv_cache_gib": 0.25, "max_num_seqs": 16}
    config = PPOTrainerConfig().actor_rollout_ref.rollout.model_copy(update={**small, "enforce_eager": True})
    tokens = TokenIds(pad=0, stop=(2,), vocab_size=vocab_size)
    host = RolloutHost(EngineSetup(config, source, tokens, device))
    started = time.perf_counter()
    host.start()
    try:
        findings.add(f"{label}start", f"{time.perf_counter() - started:.1f} s")
        _follow(host, trainer, _sent_bytes(trainer, folder, merge=adapter.merge), findings, label, merge=adapter.merge)
    finally:
        host.shutdown()


def _sent_bytes(trainer: Engine, folder: Path, *, merge: bool) -> int:
    """What a sync has to send in bfloat16: the adapter, or the model with the adapter added."""
    if not merge:
        return sum(2 * parameter.numel() for parameter in trainer.optimizer.parameters)  # type: ignore[union-attr]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(2 * parameter.numel() for parameter in model.parameters())  # a matrix with two names once


def _follow(
    host: RolloutHost, trainer: Engine, wanted_bytes: int, findings: Findings, label: str, *, merge: bool
) -> None:
    rows, log_probs = sampled(host, "before")
    findings.below(
        f"{label}a new adapter: log-probs differ from the engine's, mean", apart(trainer, rows, log_probs), NOISE
    )
    for version in (1, 2):
        count = len(rows.prompts)
        report = one_step(trainer, rows, (tuple(range(count)),))
        sound = report.applied and math.isfinite(report.grad_norm)
        findings.add(
            f"{label}step {version}: gradient norm of the adapter", f"{report.grad_norm:.3g}", "applied", sound
        )
        rows, log_probs = sampled(host, f"stale {version}")
        findings.add(
            f"{label}step {version}: the engine's log-probs before the sync differ, mean",
            f"{apart(trainer, rows, log_probs):.3g}",
        )
        sync, seconds = synced(host, trainer, version)
        findings.add(
            f"{label}sync {version}: sent in {seconds:.2f} s",
            f"{sync.nbytes / 2**20:.2f} MiB",
            f"{wanted_bytes / 2**20:.2f} MiB",
            sync.nbytes == wanted_bytes,
        )
        read_back = sync.receivers[0].read_back
        findings.add(
            f"{label}sync {version}: tensors read back bit for bit",
            f"{read_back} of {sync.tensors}",
            # Of a whole model those that vLLM keeps as they come; it joins and packs others.
            "some" if merge else "all",
            read_back > 0 if merge else read_back == sync.tensors,
        )
        rows, log_probs = sampled(host, f"fresh {version}")
        findings.below(
            f"{label}sync {version}: log-probs differ from the engine's, mean", apart(trainer, rows, log_probs), NOISE
        )
