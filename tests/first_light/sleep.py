"""Stage sleep: a vLLM engine gives its memory back, takes it again and samples what it sampled before."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hrl.config.ppo import PPOTrainerConfig
from hrl.models.loading import ModelSource
from hrl.models.tokenizer import TokenIds
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineSetup
from hrl.workers.rollout.vllm_engine import VllmEngine
from tests.first_light.random_model import config_of
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

PROMPT = list(range(5, 37))


def run(setup: Setup, findings: Findings) -> None:
    """Start, sample, sleep, wake, sample again."""
    folder = Path(setup.folder, "random-model")
    size = "tiny" if setup.tiny else "1.5B"
    torch.manual_seed(0)
    with torch.device(setup.device):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    asyncio.run(_sleep_and_wake(setup, findings, str(folder)))


async def _sleep_and_wake(setup: Setup, findings: Findings, folder: str) -> None:
    on_card = setup.device == "cuda"
    small = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "kv_cache_gib": 0.25, "max_num_seqs": 16}
    config = PPOTrainerConfig().actor_rollout_ref.rollout.model_copy(update={**small, "enforce_eager": True})
    source = ModelSource.to_look_at(Path(folder), {}, trust_remote_code=False, max_model_len=256)
    tokens = TokenIds(pad=0, stop=(2,), vocab_size=config_of("tiny" if setup.tiny else "1.5B").vocab_size)
    engine = VllmEngine(EngineSetup(config, source, tokens, torch.device(setup.device)))
    started = time.perf_counter()
    await engine.start()
    findings.add("start", f"{time.perf_counter() - started:.1f} s")
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=32)
        first = await engine.generate(PROMPT, sampling, "before")
        awake = _used_gib(on_card)
        started = time.perf_counter()
        await engine.sleep(1)
        asleep = _used_gib(on_card)
        findings.add(
            "used while asleep", f"{asleep:.2f} GiB, awake {awake:.2f}", "less", asleep < awake if on_card else None
        )
        findings.add("fall asleep", f"{time.perf_counter() - started:.2f} s")
        started = time.perf_counter()
        await engine.wake(["weights"])
        await engine.wake(["kv_cache"])
        findings.add("wake", f"{time.perf_counter() - started:.2f} s")
        second = await engine.generate(PROMPT, sampling, "after")
        same = first.token_ids == second.token_ids
        findings.add("tokens before and after", "equal" if same else "other ones", "equal", same)
    finally:
        await engine.shutdown()


def _used_gib(on_card: bool) -> float:
    if not on_card:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
