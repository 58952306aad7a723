"""The run that an evaluation is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.config.compose import compose_cli, to_yaml
from hrl.trained.evaluate import NoScoresError, Sampling, run_arguments
from hrl.trained.folders import Trained, find_trained


def trained_by(tmp_path: Path, *overrides: str) -> Trained:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (run / "config.yaml").write_text(to_yaml(compose_cli(list(overrides))))
    return find_trained(str(run))


def test_an_evaluation_takes_data_reward_and_template_of_the_models_run(tmp_path: Path) -> None:
    trained = trained_by(
        tmp_path,
        "data.train_files=mine.jsonl",
        "data.val_files=held_out.jsonl",
        "data.prompt_key=question",
        "data.max_response_length=77",
        "data.train_batch_size=8",
        "data.apply_chat_template_kwargs={enable_thinking: false}",
        "reward.custom_reward_function.path=mine.py",
        "actor_rollout_ref.actor.optim.lr=1",
        "recipe=ppo",
    )
    config = compose_cli(run_arguments(trained, [], Sampling(n=4), tmp_path / "out", ["reward.timeout_s=5"]))
    data, rollout = config.data, config.actor_rollout_ref.rollout
    assert (data.prompt_key, data.max_response_length, data.val_files) == ("question", 77, ["held_out.jsonl"])
    assert data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert (config.reward.custom_reward_function.path, config.reward.timeout_s) == ("mine.py", 5)
    assert (rollout.val_kwargs.n, rollout.val_kwargs.temperature) == (4, 1.0)
    assert config.actor_rollout_ref.model.path == str(tmp_path / "run" / "model")
    assert not (config.needs_critic or config.needs_reference)  # nothing is trained
    assert config.trainer.default_local_dir == str(tmp_path / "out")
    config = compose_cli(run_arguments(trained, ["a.jsonl", "b.jsonl"], Sampling(), tmp_path / "out", []))
    assert config.data.val_files == ["a.jsonl", "b.jsonl"]
    assert config.actor_rollout_ref.rollout.val_kwargs.do_sample is False  # one sample is the most likely one


def test_a_model_of_no_run_needs_rows(tmp_path: Path) -> None:
    with pytest.raises(NoScoresError, match="lies in no run's folder"):
        run_arguments(Trained("some/model", "model"), [], Sampling(), tmp_path, [])
