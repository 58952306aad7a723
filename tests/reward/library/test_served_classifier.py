"""vLLM's own server with a sequence classifier, on a CPU: a remote reward is the classifier's score of the chat."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hrl.reward.library.remote import Remote
from tests.trainer.ppo.test_reward_model_rows import TEMPLATE, chat_of, classifier_of, tokenizer_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

START_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    pytest.fail(f"vLLM's server is not there: {log.read_text()[-3000:]}")


def test_vllms_server_scores_a_chat_as_transformers_does(tmp_path: Path) -> None:
    # Heads of 32 numbers, of which vLLM's attention on a CPU asks.
    folder = classifier_of(tmp_path / "rm", tokenizer_of("Sums and fruits", TEMPLATE), positions=256, width=128)
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path / "log"
    options = ["--dtype", "float32", "--max-model-len", "256", "--served-model-name", "rm", "--runner", "pooling"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        where = ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
        server = subprocess.Popen([*command, *where], stdout=out, stderr=out, env=environ, start_new_session=True)
    try:
        wait_until_ready(url, server, log)
        chats = [chat_of("What is 7 + 5?", answer) for answer in ("12", "It is 13.", "")]
        remote = Remote(url, "vllm", "rm")

        async def ask() -> list[Any]:
            try:
                return await asyncio.gather(*(remote(chat[-1]["content"], chat) for chat in chats))
            finally:
                await remote.aclose()

        found = [one["score"] for one in asyncio.run(ask())]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    for chat, score in zip(chats, found, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        assert score == pytest.approx(model(ids).logits.item(), abs=1e-4)
    assert len({*found}) == 3
