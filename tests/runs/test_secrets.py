"""Canaries in a run: none is in any byte that it leaves or shows, and what it leaves is for its user alone if asked."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hrl import masking
from hrl.config import compose_cli
from hrl.errors import ConfigError
from hrl.masking import MASK
from hrl.report import tracking
from hrl.report.run_folder import read_config
from hrl.trainer.command import run_command
from hrl.trainer.ppo import ray_trainer
from tests.runs.in_process import in_process
from tests.runs.runner import Runner

pytestmark = pytest.mark.cluster

REWARD = """
import os

calls = 0

def compute_score(solution_str, customer, key, table):
    global calls
    calls += 1
    assert (customer, key) == ("canary-customer", "canary-variable"), "they reach the function as they are"
    if calls == table["fails_at"]:
        raise RuntimeError(f"the judge refused the key {key!r} of {customer}: use no sk-canary-0123456789abcdef")
    return len(solution_str) / 10
"""
SETTINGS = (
    "data.train_batch_size=2",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.name=hf",
    "trainer.device=cpu",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.total_training_steps=3",
    "trainer.logger=[console,tensorboard]",
    "trainer.private=true",
    "trainer.secrets=[customer]",
    "trainer.ray_kwargs.runtime_env.env_vars.WANDB_API_KEY=canary-wandb",
    "trainer.ray_kwargs.runtime_env.env_vars.FEED='https://me:canary-login@feed.example/x?sig=canary-signature'",
    "trainer.ray_kwargs._redis_password=canary-redis",
)


def test_no_secret_is_in_any_byte_that_a_run_leaves_or_shows(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(masking, "_remembered", set())
    monkeypatch.setenv("MY_VARIABLE", "canary-variable")
    monkeypatch.setenv("HF_TOKEN", "canary-hub")
    monkeypatch.setenv("DATABASE", "postgres://me:canary-database@db/x")
    told: list[Any] = []
    tensorboard = tracking.TRACKERS["tensorboard"]

    def watched(run):
        told.append(run.config)
        return tensorboard(run)

    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", watched)
    good = ray_trainer.compute_advantage

    def poisoned(batch, *args, **kwargs):
        batch = good(batch, *args, **kwargs)
        batch.batch["advantages"][0, 0] = float("nan")  # so that something is written to nonfinite/
        return batch

    monkeypatch.setattr(ray_trainer, "compute_advantage", poisoned)
    (reward := tmp_path / "reward.py").write_text(REWARD)
    folder = tmp_path / "run"
    arguments = [
        "quickstart=ppo",
        *SETTINGS,
        f"trainer.default_local_dir={folder}",
        f"actor_rollout_ref.model.path={runner.model}",
        f"reward.custom_reward_function.path={reward}",
        "reward.custom_reward_function.reward_kwargs="
        "{customer: canary-customer, key: 'env:MY_VARIABLE', table: {fails_at: 7}}",
    ]
    umask = os.umask(0o022)
    try:
        with in_process(reports=True):
            status = run_command("ppo", arguments)
        assert os.umask(0o022) == 0o022, "the user's own files get their rights back"
    finally:
        os.umask(umask)
    said = "".join(capfd.readouterr())
    assert status == 1 and "RuntimeError: the judge refused the key" in said, said

    # Everything was there to be found: a step with its checkpoint and a dump, the report, an outcome.
    assert {file.name for file in folder.iterdir()} >= {
        "config.yaml",
        "outcome.json",
        "report.html",
        "nonfinite",
        "tensorboard",
    }
    assert (folder / "checkpoints" / "step_1" / "state.json").exists()
    assert told[0]["reward"]["custom_reward_function"]["reward_kwargs"]["customer"] == MASK

    assert "canary" not in said
    assert "canary" not in json.dumps(told, default=str)
    written = [file for file in folder.rglob("*") if file.is_file()]
    assert [str(file) for file in written if b"canary" in file.read_bytes() or "canary" in file.name] == []
    config = read_config(folder)
    kwargs = config["reward"]["custom_reward_function"]["reward_kwargs"]
    assert kwargs == {"customer": MASK, "key": "env:MY_VARIABLE", "table": {"fails_at": 7}}
    assert config["trainer"]["ray_kwargs"] == {
        "runtime_env": {"env_vars": {"WANDB_API_KEY": MASK, "FEED": MASK}},
        "_redis_password": MASK,
    }

    readable = [entry for entry in (folder, *folder.rglob("*")) if stat.S_IMODE(entry.lstat().st_mode) & 0o077]
    assert readable == [], "trainer.private: nobody else reads anything"

    # What was saved is no configuration that somebody could run by mistake.
    with pytest.raises(ConfigError, match=r"reward_kwargs was masked when its run was saved, .* Give it again"):
        compose_cli(["--config-path", str(folder), "--config-name", "config"])

    # The same command continues: nothing reads a value back.
    arguments[-1] = arguments[-1].replace("fails_at: 7", "fails_at: 0")
    monkeypatch.setattr(ray_trainer, "compute_advantage", good)
    with in_process():
        assert run_command("ppo", arguments) == 0
    said = "".join(capfd.readouterr())
    assert "reward_kwargs.table.fails_at: 7 → 0" in said and "canary" not in said
