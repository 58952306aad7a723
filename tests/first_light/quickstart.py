"""Stage quickstart: three steps of the command that every user runs first."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.first_light.report import Findings
from tests.first_light.stages import Setup

STEPS = 3
SHOWN = ("critic/rewards/mean", "actor/grad_norm", "rollout/logprob_diff_mean", "timing_s/step", "perf/max_memory_gib")


def run(setup: Setup, findings: Findings) -> None:
    """Runs `hrl.trainer.main_ppo` and reads what it wrote down."""
    folder = Path(setup.folder, "quickstart")
    command = [sys.executable, "-m", "hrl.trainer.main_ppo", f"trainer.total_training_steps={STEPS}"]
    command += [f"trainer.device={setup.device}", f"trainer.default_local_dir={folder}", "trainer.save_freq=-1"]
    command += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    started = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    findings.add("exit code", str(code), "0", code == 0)
    findings.add("from start to end", f"{time.perf_counter() - started:.0f} s")
    steps = [metrics for path in sorted(folder.rglob("metrics.jsonl")) for metrics in _lines(path)]
    steps = [metrics for metrics in steps if "actor/grad_norm" in metrics]
    findings.add("optimizer steps", str(len(steps)), str(STEPS), len(steps) == STEPS)
    for number, metrics in enumerate(steps, 1):
        for name in SHOWN:
            if name in metrics:
                findings.add(f"step {number}: {name}", f"{metrics[name]:.4g}")


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
