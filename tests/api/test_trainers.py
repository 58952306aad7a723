"""The face of the trainers: arguments with names and documentation, and an import that costs nothing."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hrl
from hrl.api.rows import UsageError
from hrl.errors import ConfigError

TRAINERS = [hrl.PPO, hrl.GRPO, hrl.DPO, hrl.SFT, hrl.RewardModel]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_argument_has_a_name_and_a_line_of_help(trainer: Any) -> None:
    parameters = inspect.signature(trainer).parameters.values()
    assert not [one for one in parameters if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    documented = inspect.getdoc(trainer.__init__) or ""
    assert [one.name for one in parameters if f"    {one.name}: " not in documented] == []
    assert "Describe a run" in pydoc.plain(pydoc.render_doc(trainer))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_argument_is_a_key_or_an_object_of_the_run(trainer: Any, tmp_path: Path) -> None:
    common = {"steps": 7, "epochs": 3, "batch_size": 4, "lr": 1e-4, "test_freq": 5, "save_freq": 6, "seed": 9}
    given = common | {"folder": tmp_path, "name": "mine"}
    config = trainer("some/model", data=["a.jsonl"], val_data="b.jsonl", **given).resolved()
    run = config.trainer
    assert (run.total_training_steps, run.total_epochs, run.test_freq, run.save_freq, run.seed) == (7, 3, 5, 6, 9)
    assert (run.default_local_dir, run.experiment_name) == (str(tmp_path), "mine")
    assert (config.data.train_files, config.data.val_files, config.data.train_batch_size) == (
        ["a.jsonl"],
        ["b.jsonl"],
        4,
    )
    optim = config.actor_rollout_ref.actor.optim if trainer.kind == "ppo" else config.optim
    model = config.actor_rollout_ref.model if trainer.kind == "ppo" else config.model
    assert (optim.lr, model.path) == (1e-4, "some/model")


def test_what_no_trainer_takes_is_told_with_the_name() -> None:
    with pytest.raises(TypeError, match="reward_funcs"):
        hrl.GRPO(reward_funcs=len)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="data is a int"):
        hrl.GRPO(data=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [[{"prompt": "a"}], "rows.jsonl"])
def test_rows_are_given_once(data: Any) -> None:
    for config in ({"data.train_files": "other.jsonl"}, {"data": {"train_files": ["other.jsonl"]}}):
        with pytest.raises(UsageError, match=r"data\.train_files is .*other.jsonl.* given as data too"):
            hrl.GRPO(data=data, config=config)
        hrl.GRPO(config=config)
    with pytest.raises(UsageError, match=r"data\.val_files is .* given as val_data too"):
        hrl.SFT(data=data, val_data=data, config={"data.val_files": ["other.jsonl"]})
    trainer = hrl.GRPO(data=data)
    if isinstance(data, list):
        with pytest.raises(UsageError, match=r"data\.train_files is .* given as data too"):
            trainer.config.data.train_files = "other.jsonl"
    again = hrl.GRPO(data=data, config=trainer.resolved())  # which names the rows of the first one
    assert again.resolved().data.train_files == trainer.resolved().data.train_files


def test_a_run_that_was_refused_before_it_started_has_not_failed() -> None:
    trainer = hrl.GRPO(data="rows.jsonl", config={"data.train_batch_sise": 4})
    for ask in (trainer.train, trainer.evaluate, lambda: trainer.generate("a")):
        with pytest.raises(ConfigError, match="train_batch_sise"):
            ask()


HEAVY = ["torch", "ray", "transformers", "pydantic", "hydra", "datasets", "IPython"]


def test_hrl_is_imported_without_what_is_heavy() -> None:
    code = f"""
import sys, hrl
assert not set({HEAVY}) & sys.modules.keys()
hrl.GRPO
assert not {{"torch", "ray", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
