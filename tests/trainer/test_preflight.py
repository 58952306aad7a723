"""What a run's files can have wrong with them is found before anything starts."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hrl.data.model_source import ModelSourceError
from hrl.trainer.config.load import validate
from hrl.trainer.preflight import PreflightError, preflight

PROMPTS = "what is one plus two"
SCORE = "def compute_score(**row):\n    return 1.0\n"


def save_model(folder, words: str = PROMPTS, positions: int = 64):
    """The files of a model that a preflight reads: its config and a tokenizer of whole words."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": positions}))
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<end>", *words.split()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path):
    """Runs the preflight of a small configuration, with changes."""
    rows = [{"data_source": "x", "prompt": PROMPTS, "reward_model": {"ground_truth": "3"}} for _ in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(tmp_path / "policy")

    def run(**changes):
        small = {
            "data.train_files": str(tmp_path / "rows.jsonl"),
            "data.val_files": str(tmp_path / "rows.jsonl"),
            "data.train_batch_size": 2,
            "data.max_prompt_length": 16,
            "data.max_response_length": 16,
            "actor_rollout_ref.model.path": str(tmp_path / "policy"),
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "algorithm.adv_estimator": "gae",
        }
        return preflight(validate(small | changes))

    return run


def test_what_fits_passes(run, tmp_path):
    (tmp_path / "reward.py").write_text(SCORE)
    ready = run(**{"reward.custom_reward_function.path": str(tmp_path / "reward.py"), "trainer.total_epochs": 3})
    assert (ready.critic_path, ready.total_training_steps) == (ready.model_path, 6)


def test_positions_are_those_of_the_overridden_config(run):
    too_long = {"data.max_response_length": 100}
    with pytest.raises(PreflightError, match="116 tokens, but policy has 64 positions"):
        run(**too_long)
    run(**too_long, **{"actor_rollout_ref.model.override_config": {"max_position_embeddings": 128}})
    with pytest.raises(PreflightError, match="32 tokens, but policy has 20 positions"):
        run(**{"actor_rollout_ref.model.override_config": {"max_position_embeddings": 20}})


@pytest.mark.parametrize(
    "source", [SCORE, "async " + SCORE, "from math import fsum as compute_score", "from x import *"]
)
def test_a_reward_function_is_found_without_running_its_file(run, tmp_path, source):
    (tmp_path / "reward.py").write_text("raise SystemExit('this file was run')\n" + source)
    run(**{"reward.custom_reward_function.path": str(tmp_path / "reward.py")})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "path: .*reward.py does not exist"),
        ("def compute_score(:", "path: .*reward.py is no valid Python"),
        ("def score(): pass\ndef _own():\n    compute_score = 1", "name: .*defines no 'compute_score'; it has: score$"),
    ],
)
def test_a_reward_function_that_is_not_there_is_named(run, tmp_path, source, message):
    if source is not None:
        (tmp_path / "reward.py").write_text(source)
    with pytest.raises(PreflightError, match=rf"reward.custom_reward_function\.{message}"):
        run(**{"reward.custom_reward_function.path": str(tmp_path / "reward.py")})


def test_a_tracker_that_is_not_installed_is_named(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PreflightError, match=r"wandb is not installed; .*'hrl\[wandb\]'"):
        run(**{"trainer.logger": ["console", "wandb"]})


def reward_model(path):
    return {"reward.reward_model.enable": True, "reward.reward_model.model_path": str(path)}


def test_critic_and_reward_model_have_the_vocabulary_in_use(run, tmp_path):
    same, other = save_model(tmp_path / "same"), save_model(tmp_path / "other", PROMPTS + " three")
    run(**{"critic.model.path": str(same)}, **reward_model(same))
    with pytest.raises(PreflightError, match="the critic other has another vocabulary"):
        run(**{"critic.model.path": str(other)})
    with pytest.raises(PreflightError, match="the reward model other has another vocabulary"):
        run(**reward_model(other))
    run(**{"actor_rollout_ref.model.tokenizer_path": str(other)}, **reward_model(other))


def test_a_folder_without_tokenizer_explains_itself(run, tmp_path):
    folder = save_model(tmp_path / "bare")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelSourceError, match="no usable tokenizer in .*bare"):
        run(**{"critic.model.path": str(folder)})


def test_a_broken_config_explains_itself(run, tmp_path):
    (tmp_path / "policy" / "config.json").write_text("{")
    with pytest.raises((PreflightError, ModelSourceError), match=r"policy"):
        run()
