"""Stage peer: the same GRPO steps by hrl and by TRL, if it is installed and time is left.

The bundled model learns to add, with the same prompts, samples, lengths and learning rate, float32 masters and bfloat16
products; TRL samples with its own generation. A step of either is one optimizer step over the answers to a batch. The
first step compiles and warms up, and is left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from hrl.data.tasks.addition import rows
from hrl.models.source import resolve_model
from tests.first_light.report import Findings
from tests.first_light.stages import Setup

MODEL = "bundled:smollm2-135m-instruct"
STEPS = 4
RATE = 2e-5


def run(setup: Setup, findings: Findings) -> None:
    """Times the steps of both, one after the other, and says how often hrl's goes into TRL's."""
    prompts, samples, tokens = (2, 2, 4) if setup.tiny else (16, 8, 32)
    own = hrl_seconds(setup, prompts, samples, tokens)
    findings.add("a step of hrl", f"{own:.2f} s")
    peer = trl_seconds(setup, prompts, samples, tokens)
    findings.add("a step of TRL", f"{peer:.2f} s")
    findings.add("TRL's over hrl's", f"{peer / own:.2f}")


def hrl_seconds(setup: Setup, prompts: int, samples: int, tokens: int) -> float:
    """Median seconds of a step of `hrl.trainer.main_ppo`, start-up and validation apart."""
    folder = Path(setup.folder, "peer-hrl")
    arguments = {
        "trainer.total_training_steps": STEPS,
        "trainer.device": setup.device,
        "trainer.default_local_dir": folder,
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "data.train_batch_size": prompts,
        "data.max_response_length": tokens,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "actor_rollout_ref.actor.optim.lr": RATE,
        "actor_rollout_ref.rollout.n": samples,
        "actor_rollout_ref.rollout.name": "hf" if setup.tiny else "vllm",
    }
    command = [sys.executable, "-m", "hrl.trainer.main_ppo", *(f"{key}={value}" for key, value in arguments.items())]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([line["timing_s/step"] for line in lines if "actor/grad_norm" in line][1:])


def trl_seconds(setup: Setup, prompts: int, samples: int, tokens: int) -> float:
    """Median seconds of a step of TRL's trainer."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder = resolve_model(MODEL)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if setup.device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]

    config = GRPOConfig(
        output_dir=str(Path(setup.folder, "peer-trl")),
        max_steps=STEPS,
        per_device_train_batch_size=prompts * samples,
        num_generations=samples,
        max_completion_length=tokens,
        learning_rate=RATE,
        beta=0.0,
        bf16=True,
        use_cpu=setup.device == "cpu",
        report_to="none",
        save_strategy="no",
    )
    data = datasets.Dataset.from_list(
        [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows("train")]
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        callbacks=[Clock()],
    )
    trainer.train()
    return statistics.median(later - earlier for earlier, later in pairwise(ends))
