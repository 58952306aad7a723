"""`hrl serve` from its start to Ctrl-C, with a real engine; its keys and its key."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from hrl import cli
from hrl.config.compose import compose_cli, to_yaml
from hrl.errors import ConfigError
from hrl.report.rollouts import show_rollouts
from hrl.serve.server import DoorError
from hrl.serve.sessions import Limits
from hrl.trained import serving
from hrl.trained.folders import NoModelError, find_trained
from hrl.trained.serving import Serving, ServingError, serve, serving_config
from tests.models.tiny import SHAPE
from tests.serve.doors import tokenizer_with_merges


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that answers chats."""
    folder = tmp_path_factory.mktemp("models") / "babbler"
    tokenizer = tokenizer_with_merges()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    return folder


class Session:
    """Plays against the server on a thread of its own, and ends it as Ctrl-C does."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.answers: list[Any] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Session:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)

    def _run(self) -> None:
        try:
            deadline = time.monotonic() + 60
            while not any("Ctrl-C ends it" in line for line in self.lines):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            exported = next(line for line in self.lines if line.startswith("export "))
            url, key = (part.partition("=")[2] for part in exported.split()[1:3])
            with OpenAI(base_url=url, api_key=key if key.startswith("hrl-") else "a-key-of-mine-0") as client:
                chat: list[Any] = [{"role": "user", "content": "hi"}]
                for _ in range(2):
                    answer = client.chat.completions.create(model="babbler", messages=chat, max_tokens=5, seed=3)
                    self.answers.append(answer)
                    chat += [answer.choices[0].message, {"role": "user", "content": "more"}]
        except Exception as error:  # noqa: BLE001  (the test says it)
            self.error = error
        finally:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_model_is_served_recorded_and_let_go(model: Path, tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in (1, 2):
        with Session() as session:
            overrides = ["rollout.name=hf", "rollout.dtype=float32", "rollout.max_model_len=100"]
            serve(
                str(model),
                Serving(name="babbler", record=tmp_path, limits=Limits(calls=10)),
                overrides,
                session.lines.append,
            )
        assert session.error is None
        assert {number: signal.getsignal(number) for number in before} == before
        (record,) = map(json.loads, (tmp_path / "rollouts" / f"step_{number}.jsonl").read_text().splitlines())
    (row,) = record["rows"]
    assert record["episode_id"] == "default-0" and record["num_turns"] == 2
    assert len(row["prompt_ids"]) == session.answers[0].usage.prompt_tokens
    assert sum(row["mask"]) == sum(answer.usage.completion_tokens for answer in session.answers)
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "user", "assistant"]
    assert f"hrl rollouts {tmp_path}" in session.lines[-1]
    shown = io.StringIO()
    show_rollouts(tmp_path, Console(file=shown, width=200), tokens=True)
    assert "more" in shown.getvalue() and "policy" in shown.getvalue()


def test_a_key_of_the_users_is_taken_and_not_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("a-key-of-mine-0\n")
    with pytest.raises(ServingError, match="at least 16"):
        serve(str(model), Serving(key_file=file), [], print)
    with pytest.raises(ServingError, match="can't be read from .*No such file"):
        serve(str(model), Serving(key_file=tmp_path / "none"), [], print)
    monkeypatch.setattr(serving, "_SHORTEST_KEY", 15)
    with Session() as session:
        serve(
            str(model),
            Serving(name="babbler", key_file=file),
            ["rollout.name=hf", "rollout.dtype=float32"],
            session.lines.append,
        )
    assert session.error is None and len(session.answers) == 2
    assert not any("a-key-of-mine" in line for line in session.lines)


@pytest.mark.parametrize("key", ["short", "with a blank in it", "with:a:colon:in:it", "ü" * 20])
def test_a_key_that_can_not_be_sent_is_refused(key: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HRL_SERVE_KEY", key)
    with pytest.raises(ServingError, match="HRL_SERVE_KEY can't be used") as refused:
        serve(str(model), Serving(), ["rollout.name=hf"], print)
    assert key not in str(refused.value)


def test_an_address_that_can_not_be_had_is_refused_before_an_engine_starts(model: Path) -> None:
    said: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for wrong in (Serving(port=taken.getsockname()[1]), Serving(host="0.0.0.0")):
            with pytest.raises(DoorError):
                serve(str(model), wrong, ["rollout.name=hf"], said.append)
    assert said == []


def test_keys_are_those_of_a_run(model: Path) -> None:
    trained = find_trained(str(model))
    config = serving_config(
        trained, ["rollout.name=hf", "+model.override_config={a: 1}", "environment.tool_parser=hermes"]
    )
    assert config.actor_rollout_ref.rollout.name == "hf" and config.environment.tool_parser == "hermes"
    assert config.actor_rollout_ref.model.override_config == {"a": 1}
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.nme"):
        serving_config(trained, ["rollout.nme=hf"])


def test_a_run_brings_all_keys_of_its_engine_but_those_that_serving_decides(model: Path, tmp_path: Path) -> None:
    ours = ["n=4", "serve=true", "val_kwargs.top_p=0.5", "name=hf", "dtype=float32"]
    more = ["environment.path=single_turn", "data.train_files=rows.jsonl"]
    config = compose_cli([*(f"actor_rollout_ref.rollout.{key}" for key in ours), *more])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "model").symlink_to(model)
    rollout = serving_config(find_trained(str(tmp_path)), []).actor_rollout_ref.rollout
    assert (rollout.name, rollout.dtype) == ("hf", "float32")
    assert (rollout.n, rollout.serve, rollout.val_kwargs.top_p) == (1, False, 1.0)


def test_what_is_no_model_is_refused_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoModelError):
        serve(str(tmp_path), Serving(), [], print)
    assert cli.main(["serve", str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["serve", "x", "--port", "70000"])
    assert "70000 is no port" in capsys.readouterr().err
