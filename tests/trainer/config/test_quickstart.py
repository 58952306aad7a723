"""What a run on other rows or another model takes over from the quickstart."""

import shlex

import pytest

from hrl.trainer.config import ConfigError, compose_cli
from hrl.trainer.config.compose import compose_kind
from hrl.trainer.config.kinds import PPO
from hrl.trainer.config.offline.kinds import KINDS, SFT
from hrl.trainer.config.rules import warnings

OWN = "data.train_files=rows.jsonl"
MODEL = "actor_rollout_ref.model.path=some/model"
SAVED = "trainer.save_freq=10"  # whatever is not saved is a warning of its own


@pytest.mark.parametrize("kind", [PPO, *KINDS.values()], ids=lambda kind: kind.name)
def test_other_training_rows_are_not_validated_on_the_bundled_ones(kind):
    config = compose_kind(kind, [OWN])
    assert config.data.val_files == []
    assert not config.trainer.val_before_train and not config.trainer.val_after_train
    assert config.trainer.test_freq == -1


def test_validation_rows_that_are_named_are_used():
    config = compose_cli([OWN, "data.val_files=held_out.jsonl"])
    assert config.data.val_files == ["held_out.jsonl"]
    assert config.trainer.val_before_train and config.trainer.val_after_train and config.trainer.test_freq == 5


@pytest.mark.parametrize("argument", [MODEL, "data.train_files=bundled:addition/train"])
def test_the_bundled_rows_keep_their_validation(argument):
    config = compose_cli([argument])
    assert config.data.val_files == ["bundled:addition/val"]
    assert config.trainer.val_after_train and config.trainer.test_freq == 5


def test_a_frequency_without_rows_is_a_problem_where_it_was_asked_for():
    with pytest.raises(ConfigError, match=r"trainer\.test_freq is 20, but data\.val_files is empty"):
        compose_cli([OWN, "trainer.test_freq=20"])


def test_the_quickstart_itself_takes_nothing_over():
    assert warnings(compose_cli([SAVED])) == []
    assert warnings(compose_cli([SAVED, "recipe=grpo", "data.train_batch_size=16"])) == []


@pytest.mark.parametrize("task", [MODEL, OWN])
def test_values_of_the_quickstart_that_nobody_gave_are_listed(task):
    given = ["data.max_response_length=32", "trainer.total_epochs=2", "trainer.experiment_name=mine"]
    (warning,) = warnings(compose_cli([SAVED, task, *given]))
    frequency = ", trainer.test_freq=5" if task == MODEL else ""
    assert warning == (
        "from the quickstart: data.train_batch_size=8, data.max_prompt_length=64, "
        "actor_rollout_ref.model.enable_gradient_checkpointing=false, actor_rollout_ref.actor.ppo_mini_batch_size=8, "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096, actor_rollout_ref.actor.optim.lr=2e-05"
        f"{frequency}; set them, or start from your own YAML."
    )


def test_a_model_under_another_name_counts():
    assert "data.max_length=96" in compose_kind(SFT, ["model.partial_pretrain=some/model"]).remarks[0]


def test_what_stands_in_a_file_of_the_user_was_given(tmp_path):
    here = ["--config-path", str(tmp_path)]
    rows = "data:\n  train_files: rows.jsonl\n  max_prompt_length: 64\n"
    (tmp_path / "on_top.yaml").write_text(f"defaults:\n  - ppo_trainer\n  - _self_\n{rows}")
    (tmp_path / "alone.yaml").write_text(rows)
    (remark,) = compose_cli([*here, "--config-name", "on_top"]).remarks
    assert "max_response_length=32" in remark and "max_prompt_length" not in remark
    assert compose_cli([*here, "--config-name", "alone"]).remarks == ()


@pytest.mark.parametrize("kind", [PPO, *KINDS.values()], ids=lambda kind: kind.name)
def test_the_example_of_the_help_takes_nothing_over(kind):
    (example,) = (text for text in kind.help.examples if "train_files" in text)
    config = compose_kind(kind, shlex.split(example.replace("\\\n", " ")))
    assert config.remarks == ()
