"""How far sampler and trainer are apart on a small random mixture of experts, with their own choices and with replay.

    python -m tests.workers.rollout.measure_experts vllm bfloat16

The engine is the real one, on a CPU, and the trainer's pass that of a run; both in the dtype that is named.

    python -m tests.workers.rollout.measure_experts products

Processor time of one thread for a layer's forward and backward pass, by each of transformers' ways to multiply.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hrl.models.tokenizer import TokenIds
from hrl.routing import ROUTED_EXPERTS, is_missing
from hrl.trainer.ppo.generation import share_known_experts
from hrl.workers.rollout.host import RolloutHost
from tests.models.tiny import SHAPE, fsdp_config, model_config, world_of_one
from tests.workers.asked import Actor
from tests.workers.rollout.settings import engine_setup, prompt_batch, sample_rows

PROMPTS, SAMPLES, ANSWER, VOCAB = (5, 40, 70, 11), 16, 48, 128
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}


def save(folder: Path, dtype: torch.dtype) -> None:
    """A random Qwen3-MoE of four layers."""
    torch.manual_seed(2)
    tokens = {"vocab_size": VOCAB, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    shape = SHAPE | {"hidden_size": 64, "num_hidden_layers": 4, "head_dim": 32} | tokens
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **EXPERTS)).to(dtype).save_pretrained(folder)


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(engine: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, length).tolist() for length in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), getattr(torch, dtype))
        longest = max(PROMPTS)
        setup = engine_setup(
            engine, folder, TokenIds(0, (1,), VOCAB), longest + ANSWER, dtype=dtype, enable_rollout_routing_replay=True
        )
        with RolloutHost(setup) as host:
            batch = sample_rows(host, prompt_batch(prompts, n=SAMPLES, width=longest), max_tokens=ANSWER)
        cached = sum(int(is_missing(row).sum()) for row in batch.non_tensor_batch[ROUTED_EXPERTS])
        share_known_experts(batch)
        with world_of_one():
            device = torch.device("cpu")
            actor = Actor(model_config(Path(folder)), None, fsdp_config(dtype), device=device, total_steps=None)
            batch.meta_info["temperature"] = 1.0
            own = actor.log_probs(batch, records_experts=True)
            replayed = actor.log_probs(batch, replays_experts=True)
    mask, theirs = batch.batch["response_mask"].bool(), batch.batch["rollout_log_probs"]
    tell(f"{len(batch)} samples, {int(mask.sum())} tokens, {cached} of the prompts' tokens were in the engine's cache")
    for name, found in (("own", own), ("replayed", replayed)):
        apart = (found.batch["old_log_probs"] - theirs)[mask].abs()
        tell(f"{name}: mean {apart.mean():.4f}, 99th percentile {apart.quantile(0.99):.4f}, largest {apart.max():.4f}")
    same = [
        (np.sort(mine, -1) == np.sort(told[: len(mine)], -1)).all(-1)
        for mine, told in zip(own.non_tensor_batch[ROUTED_EXPERTS], batch.non_tensor_batch[ROUTED_EXPERTS], strict=True)
    ]
    tell(f"choices that are the same in both: {np.concatenate([row.ravel() for row in same]).mean():.2%}")


def products() -> None:
    torch.set_num_threads(1)
    experts = EXPERTS | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 128}
    for dtype in (torch.float32, torch.bfloat16):
        times = {}
        for way in ("eager", "grouped_mm"):
            config = Qwen3MoeConfig(hidden_size=256, **experts)
            config._experts_implementation = way
            torch.manual_seed(0)
            block = Qwen3MoeSparseMoeBlock(config)
            for parameter in block.parameters():
                torch.nn.init.normal_(parameter, std=0.05)
            block, rounds = block.to(dtype), []
            for _ in range(5):
                tokens = torch.randn(1, 512, 256, dtype=dtype, requires_grad=True)
                began = time.process_time()
                block(tokens).float().square().sum().backward()
                rounds.append(time.process_time() - began)
            times[way] = min(rounds)
        tell(f"{dtype}: " + ", ".join(f"{way} {1000 * seconds:.0f} ms" for way, seconds in times.items()))


if __name__ == "__main__":
    products() if sys.argv[1:] == ["products"] else main(*sys.argv[1:])
