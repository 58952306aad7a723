"""The run that an evaluation is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.algos.advantages import ADVANTAGE_ESTIMATORS
from hrl.config.compose import compose_cli, to_yaml
from hrl.errors import ConfigError
from hrl.trained.evaluate import EvaluationError, Sampling, run_arguments
from hrl.trained.folders import Trained, find_trained

ROWS = ("data.train_files=a.jsonl", "data.val_files=a.jsonl")


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
        "actor_rollout_ref.rollout.name=hf",
        "recipe=ppo",
    )
    config = compose_cli(run_arguments(trained, [], Sampling(n=4), tmp_path / "out", ["reward.timeout_s=5"]))
    data, rollout = config.data, config.actor_rollout_ref.rollout
    assert (data.prompt_key, data.max_response_length, data.val_files) == ("question", 77, ["held_out.jsonl"])
    assert data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert (config.reward.custom_reward_function.path, config.reward.timeout_s) == ("mine.py", 5)
    assert (rollout.name, rollout.n) == ("hf", 1)
    assert (rollout.val_kwargs.n, rollout.val_kwargs.temperature) == (4, 1.0)
    assert config.actor_rollout_ref.model.path == str(tmp_path / "run" / "model")
    assert not (config.needs_critic or config.needs_reference)  # nothing is trained
    assert config.trainer.default_local_dir == str(tmp_path / "out")
    config = compose_cli(run_arguments(trained, ["a.jsonl", "b.jsonl"], Sampling(), tmp_path / "out", []))
    assert config.data.val_files == ["a.jsonl", "b.jsonl"]
    assert config.actor_rollout_ref.rollout.val_kwargs.do_sample is False  # one sample is the most likely one


def test_a_run_that_sums_functions_is_evaluated_with_them_or_with_what_replaces_them(tmp_path: Path) -> None:
    functions = "reward.functions=[numeric, {name: regex, pattern: '^${a}$', weight: 0.5}]"
    trained = trained_by(tmp_path, *ROWS, functions.replace("${", r"\${"))
    first, second = compose_cli(run_arguments(trained, [], Sampling(), tmp_path / "out", [])).reward.entries
    assert (first.name, second.weight, second.kwargs) == ("numeric", 0.5, {"pattern": "^${a}$"})
    given = ["reward.custom_reward_function.path=my.py"]
    reward = compose_cli(run_arguments(trained, [], Sampling(), tmp_path / "out", given)).reward
    assert [entry.path for entry in reward.entries] == ["my.py:compute_score"]


def test_functions_given_for_an_evaluation_replace_the_one_of_the_run(tmp_path: Path) -> None:
    trained = trained_by(tmp_path, *ROWS, "reward.custom_reward_function.path=my.py")
    config = compose_cli(run_arguments(trained, [], Sampling(), tmp_path / "out", ["reward.functions=[numeric]"]))
    assert [entry.name for entry in config.reward.entries] == ["numeric"]


def test_a_secret_that_was_masked_with_the_run_is_given_again_where_the_evaluation_needs_it(tmp_path: Path) -> None:
    kwargs = "reward.custom_reward_function.reward_kwargs"
    trained = trained_by(
        tmp_path,
        *ROWS,
        "reward.custom_reward_function.path=my.py",
        f"{kwargs}={{customer: 4711, words: 3}}",
        "trainer.secrets=[customer]",
        "trainer.ray_kwargs={_redis_password: secret}",  # which no evaluation needs
    )
    with pytest.raises(ConfigError, match=rf"1 problem.*\n.*{kwargs} was masked when its run was saved"):
        run_arguments(trained, [], Sampling(), tmp_path / "out", [])
    again = [f"{kwargs}.customer=4712"]
    config = compose_cli(run_arguments(trained, [], Sampling(), tmp_path / "out", again))
    assert config.reward.custom_reward_function.reward_kwargs == {"customer": 4712, "words": 3}
    assert config.trainer.ray_kwargs == {}
    instead = compose_cli(run_arguments(trained, [], Sampling(), tmp_path / "out", ["reward.functions=[numeric]"]))
    assert [entry.name for entry in instead.reward.entries] == ["numeric"]


@pytest.mark.usefixtures("own_registries")
def test_a_model_is_evaluated_without_the_functions_that_trained_it(tmp_path: Path) -> None:
    from hrl.algos.advantages import register_adv_est

    file = tmp_path / "mine.py"
    file.write_text(
        "from hrl.algos.policy_losses import register_policy_loss\nregister_policy_loss('gentle')(lambda *a: a)\n"
    )
    register_adv_est("mine", min_group_size=2)(lambda *a: a)
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    trained = trained_by(tmp_path, "algorithm.adv_estimator=mine", f"{loss}={file}:gentle", "data.prompt_key=question")
    del ADVANTAGE_ESTIMATORS["mine"]  # as in another process
    file.unlink()
    config = compose_cli(run_arguments(trained, ["a.jsonl"], Sampling(), tmp_path / "out", []))
    assert (config.data.prompt_key, config.actor_rollout_ref.actor.policy_loss.loss_mode) == ("question", "vanilla")


def test_a_model_of_no_run_needs_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nosuck").mkdir()
    with pytest.raises(EvaluationError, match="lies in no run's folder"):
        run_arguments(Trained(str(tmp_path), "model"), [], Sampling(), tmp_path, [])
    with pytest.raises(EvaluationError, match="lies in no run's folder"):
        run_arguments(Trained("bundled:smollm2-135m-instruct", "model"), [], Sampling(), tmp_path, [])
    with pytest.raises(EvaluationError, match="^there is no folder zzz here, so it is taken for a model of the hub"):
        run_arguments(Trained("zzz", "zzz"), [], Sampling(), tmp_path, [])
    with pytest.raises(EvaluationError, match=r"^there is no folder nosucks here \(did you mean nosuck\?\), so"):
        run_arguments(Trained("nosucks", "nosucks"), [], Sampling(), tmp_path, [])
    trained = Trained("some/model", "model", run=tmp_path, config={"model": {"path": "some/model"}})
    with pytest.raises(EvaluationError, match="learnt from given answers, and has no prompts"):
        run_arguments(trained, [], Sampling(), tmp_path, [])
