"""Trainers under a real Ray: in a script as people write it, in a thread, in an event loop, on the user's own Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.runner import ROOT, Runner

pytestmark = pytest.mark.cluster

SCRIPT = """
import asyncio, sys, threading
import hrl
from hrl.algos.policy_losses import PolicyLossOutput, register_policy_loss

model, folder = sys.argv[1:]
rows = [{"prompt": f"What is {a} plus {a}?", "answer": str(2 * a)} for a in range(8)]
weights = {"letters": 0.1, "mark": 7.0}  # what the function refers to goes with it


def letters(response, answer):
    return weights["letters"] * len(set(response))


@register_policy_loss("marked", zero_at_zero_advantage=True)
def marked(inp, config):  # lives in this script alone, so a rank knows it only if it was sent
    return PolicyLossOutput(-inp.advantages * inp.ratio(), {"actor/marked": inp.ratio() * 0 + weights["mark"]})


def trained(name, loss):
    trainer = hrl.GRPO(
        model, letters, rows, steps=1, batch_size=2, n=2, max_prompt_length=64, max_response_length=4,
        folder=f"{folder}/{name}", config={
            "actor_rollout_ref.rollout.name": "hf", "trainer.device": "cpu",
            "actor_rollout_ref.actor.policy_loss.loss_mode": loss,
        },
    )
    (metrics,) = trainer.train().metrics
    assert metrics["actor/grad_norm"] > 0 and metrics.get("actor/marked") == (7.0 if loss == "marked" else None)
    return metrics["reward/mean"]


found = []
thread = threading.Thread(target=lambda: found.append(trained("thread", "vanilla")))
thread.start()
thread.join()

import ray

ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, logging_level="ERROR")


async def in_a_loop():
    return trained("loop", "marked")


found.append(asyncio.run(in_a_loop()))
assert ray.is_initialized() and ray.get(ray.remote(lambda: 5).remote()) == 5, "the user's Ray was ended"
assert len(set(found)) == 1 and found[0] > 0, found
"""


def test_a_script_without_a_guard_trains_in_a_thread_then_in_a_loop_on_its_own_ray_with_its_own_loss(
    runner: Runner, tmp_path: Path
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(runner.model), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("thread", "loop"):
        assert (tmp_path / name / "model" / "model.safetensors").exists()
        assert (tmp_path / name / "report.html").exists()
