"""Two steps of training in every environment that comes with hrl or is another's, each with its real package."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hrl.data.tasks import bundled_rows
from hrl.data.tasks.reasoning_gym import reasoning_gym_rows
from hrl.models.tokenizer import load_tokenizer
from hrl.report.run_folder import read_jsonl
from hrl.workers.rollout.hf_engine import _Request, draw
from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import Runner

OTHERS = Path(sys.prefix) / "environments"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not OTHERS.is_dir(), reason="run `make install-dev` for the environments of others"),
]

HUB = """
import verifiers as vf
from datasets import Dataset

class Echo(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Again."}]

def even(completion, **kwargs):
    return float(len(completion[-1].content or "") % 2 == 0)

def load_environment():
    return Echo(
        max_turns=2,
        dataset=Dataset.from_list([{"question": "Say a word.", "answer": "a"}]),
        rubric=vf.Rubric(funcs=[even]),
    )
"""
SERVER = """
import sys
sys.path.append(sys.argv[1])
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Word(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Heard(text="Say something.", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        return Heard(text="And now?", done=self.count == 2, reward=float(len(action.message) % 2))

    @property
    def state(self):
        return State(step_count=self.count)

uvicorn.run(create_fastapi_app(Echo, Word, Heard, max_concurrent_envs=64), port=int(sys.argv[2]), log_level="error")
"""
MCP_SERVER = """
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

server.run()
"""


@pytest.fixture
def openenv() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(OTHERS), str(port)])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
#: Environment → the row's question, and what the policy says, turn by turn; a random model would never call a tool.
SAID = {
    "mcp": ("Add by your tool.", [CALL % ("add", '{"a": 3, "b": 4}'), "It is 7."]),
    "python": ("Compute by your tool.", [CALL % ("python", '{"code": "print(3 + 4)"}'), "It is 7."]),
    "gymnasium": ("Reach G.", ["down", "down", "right", "right", "down", "right"]),
    "single_turn": ("Say it.", ["It is 7."]),
}


class Words:
    """What requests are to say whose prompt asks for it; with the log-probs that the model gives these tokens."""

    def __init__(self, tokenizer: Any, said: dict[str, tuple[str, list[str]]]) -> None:
        self._tokenizer, self._said = tokenizer, said
        self._left: dict[int, list[int]] = {}

    def request(self, prompt_ids: list[int], *args: Any, **options: Any) -> Any:
        asked = _Request(prompt_ids, *args, **options)
        text = self._tokenizer.decode(prompt_ids)
        turn = text.count("<|im_start|>assistant") - 1
        for question, answers in self._said.values():
            if question in text:
                self._left[id(asked.generator)] = [*self._tokenizer.encode(answers[turn]), self._tokenizer.eos_token_id]
        return asked

    def draw(self, logits: torch.Tensor, sampling: Any, generator: torch.Generator) -> tuple[int, float]:
        if not (left := self._left.get(id(generator))):
            return draw(logits, sampling, generator)
        token = left.pop(0)
        return token, float((logits / sampling.temperature).log_softmax(-1)[token])


def _of_hydra(arguments: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in arguments.items()) + "}"


def test_every_environment_makes_two_steps(
    runner: Runner, openenv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose rows name them: each is played in both steps by every sample of its row."""
    model = tmp_path / "policy"  # with room for what a game says; its positions are not learnt
    shutil.copytree(runner.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    (tmp_path / "toy_hub.py").write_text(HUB)
    (tmp_path / "sums.py").write_text(MCP_SERVER)
    # Of the environments' processes: this one has started.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(OTHERS)]))
    actions = ["left", "down", "right", "up"]
    lake = {"id": "FrozenLake-v1", "is_slippery": False, "prompt": "Reach G.", "actions": actions}
    named = {
        "textarena": {"game": "GuessTheNumber-v0"},
        "gymnasium": lake,
        "verifiers": {"env": "toy_hub"},
        "openenv": {"url": openenv, "observation": "text"},
        "mcp": {"server": [sys.executable, str(tmp_path / "sums.py")], "start_timeout_s": 120},
        "python": {"time_s": 5.0},
        "retry": {"attempts": 2},
        "single_turn": {},
    }
    (sums,) = reasoning_gym_rows("chain_sum?size=1&seed=5")
    right = sums["answer"]
    said = {**SAID, "retry": (sums["prompt"][-1]["content"][:40], ["It is nothing.", f"<answer>{right}</answer>"])}
    words = Words(load_tokenizer(model), said)
    monkeypatch.setattr("hrl.workers.rollout.hf_engine._Request", words.request)
    monkeypatch.setattr("hrl.workers.rollout.hf_engine.draw", words.draw)
    games = list(bundled_rows(f"games/train?size={len(named)}"))
    truth = {"data_source": "numeric", "reward_model": {"style": "rule", "ground_truth": "7"}}
    rows = [
        {**game, **truth, **({"prompt": said[name][0]} if name in said else {}), "env": name}
        for game, name in zip(games, named, strict=True)
    ]
    rows[list(named).index("retry")] |= sums
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with in_process():
        run_in_process(
            f"trainer.default_local_dir={tmp_path / 'run'}",
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={tmp_path / 'rows.jsonl'}",
            "data.val_files=[]",
            "environment.path=single_turn",
            *(f"environment.row_environments.{name}={_of_hydra(arguments)}" for name, arguments in named.items()),
            "environment.tool_parser=hermes",
            "environment.max_turn_tokens=40",
            "environment.max_turns=6",
            "environment.max_observation_tokens=40",
            "environment.step_timeout_s=150",
            "environment.on_error=raise",
            f"data.train_batch_size={len(named)}",
            "data.max_prompt_length=512",
            "data.max_response_length=500",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=2",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
        )
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert all(math.isfinite(value) for value in record.values())
        assert record["episode/turns/mean"] > 1 and record["rollout/logprob_diff_mean"] < 0.02
        samples = read_jsonl(tmp_path / "run" / "rollouts" / f"step_{record['step']}.jsonl")
        assert len(samples) == 2 * len(named)
        firsts = Counter(sample["messages"][0]["content"][:20] for sample in samples)
        assert set(firsts.values()) == {2} and len(firsts) == len(named), firsts
        replies = {message["content"] for sample in samples for message in sample["messages"][1:]}
        assert {"Again.", "And now?", "That is not right. Try again.", "7"} <= replies
        assert record["env/tool_calls/add"] > 0 and record["env/tool_errors/add"] == 0
        assert record["env/tool_calls/python"] > 0 and record["env/tool_errors/python"] == 0
        assert math.isfinite(record["actor/grad_norm"])
        for sample in samples:
            _check_score(sample, said)


def _check_score(sample: dict[str, Any], scripted: dict[str, tuple[str, list[str]]]) -> None:
    """Compare the score that trains with what an environment's own code says of what was said."""
    said = [turn["content"] or "" for turn in sample["turns"]]
    rewards = [turn["reward"] for turn in sample["turns"] if turn["reward"] is not None]
    for name, (question, answers) in scripted.items():
        if question in sample["messages"][0]["content"]:
            # The run's reward function scores the last answer of each, and `retry` does so itself, too.
            assert (
                sample["score"] == (2.0 if name == "retry" else 1.0)
                and len(sample["turns"]) == len(answers)
                and sample["end"] == "done"
            ), sample
            return
    assert sample["score"] == sum(rewards), sample
    heard = [message["content"] for message in sample["messages"][1:] if message["role"] == "user"]
    if "Again." in heard:
        assert sample["score"] == float(len(said[-1]) % 2 == 0)
    if "And now?" in heard:
        assert rewards == [float(len(text) % 2) for text in said]
        assert sample["score"] == sum(float(len(text) % 2) for text in said)
