"""Stage sglang: SGLang's own server, and its engine inside a run, sample from the weights that a trainer sends.

After each of two steps the trainer's log-probs of what was sampled are the sampler's, every answer names the version
that was sent, and the engine sleeps and wakes between the two.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hrl.config.ppo import PPOTrainerConfig
from hrl.config.rollout import RolloutConfig, ServerConfig
from hrl.models.loading import ModelSource
from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.base import EngineSetup
from hrl.workers.rollout.host import RolloutHost
from hrl.workers.rollout.sglang_server import server_command
from tests.first_light.random_model import SHAPES, config_of, join_alone, one_step
from tests.first_light.report import Findings
from tests.first_light.sampled import MAX_TOKENS, NOISE, apart, learner, sampled, synced
from tests.first_light.stages import Setup

#: A rate with which one step is seen in what is sampled.
RATE = 1e-4
START_S, LOOK_S = 200.0, 1.0
MEMORY_SHARE = 0.3


def run(setup: Setup, findings: Findings) -> None:
    """First the server, then the engine: each alone on the device beside a trainer."""
    device = join_alone(setup)
    size = "tiny" if setup.tiny else "1.5B"
    folder = Path(setup.folder, "random-model-of-sglang")
    with torch.device(device):
        AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16).save_pretrained(folder)
    source = ModelSource(str(folder), {}, True, True, False, 256)
    tokens = TokenIds(pad=0, stop=(2,), vocab_size=SHAPES[size][5])
    small = {"name": "sglang", "dtype": "bfloat16", "gpu_memory_utilization": MEMORY_SHARE, "max_num_seqs": 16}
    config = PPOTrainerConfig().actor_rollout_ref.rollout.model_copy(update={**small, "enforce_eager": True})
    longest = 8 if setup.tiny else MAX_TOKENS
    with _serving(EngineSetup(config, source, tokens, device), Path(setup.folder, "sglang-server.log")) as url:
        shared = Path("/dev/shm")
        place = str(shared if os.access(shared, os.W_OK) else Path(setup.folder))
        served = config.model_copy(update={"server": ServerConfig(urls=[url], weights_folder=place)})
        _follow(served, source, tokens, device, findings, "server", longest)
    _follow(config, source, tokens, device, findings, "engine", longest)


@contextmanager
def _serving(setup: EngineSetup, log: Path) -> Iterator[str]:
    """SGLang's server by the command that hrl shows; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [*shlex.split(server_command(setup)), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--mem-fraction-static", str(MEMORY_SHARE), "--skip-tokenizer-init"]  # the random model has none
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *command[1:]], stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"SGLang's server did not start: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(LOOK_S)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()  # what it has left ends with the stage's process group


def _answers(url: str) -> bool:
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/health", timeout=20) as answer:
        return bool(answer.status == 200)
    return False


def _follow(
    config: RolloutConfig,
    source: ModelSource,
    tokens: TokenIds,
    device: torch.device,
    findings: Findings,
    way: str,
    longest: int,
) -> None:
    """Two syncs and two steps; `longest` is of the responses, in tokens."""
    trainer = learner(source, device, RATE)
    host = RolloutHost(EngineSetup(config, source, tokens, device, run_mark="firstlight"))
    started = time.perf_counter()
    try:
        host.start()
        findings.add(f"{way}: start", f"{time.perf_counter() - started:.1f} s")
        for version in (1, 2):
            host.wake(["weights"])
            sync, seconds = synced(host, trainer, version)
            findings.add(f"{way}: sync {version}: {sync.nbytes / 2**20:.0f} MiB", f"{seconds:.2f} s")
            host.wake(["kv_cache"])
            rows, log_probs = sampled(host, f"{way} {version}", longest)  # which refuses answers of another version
            findings.below(
                f"{way}: sync {version}: log-probs differ from the trainer's, mean",
                apart(trainer, rows, log_probs),
                NOISE,
            )
            again, _ = sampled(host, f"{way} {version} again", longest)
            same = np.array_equal(again.responses, rows.responses)
            findings.add(f"{way}: sync {version}: the same seeds again", "equal" if same else "others", "equal", same)
            host.sleep()
            report = one_step(trainer, rows, (tuple(range(len(rows.prompts))),))
            sound = report.applied and math.isfinite(report.grad_norm)
            findings.add(f"{way}: step {version}: gradient norm", f"{report.grad_norm:.3g}", "applied", sound)
    finally:
        host.shutdown()
