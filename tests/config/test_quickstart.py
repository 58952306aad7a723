"""The quickstart's values are in force for hrl's own model and rows, and for nothing else unless they are asked for."""

import shlex
from operator import attrgetter

import pytest

from hrl.config import ConfigError, compose_cli
from hrl.config.compose import YOURS, compose_kind
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import DPO, OFFLINE_KINDS, PPO, SFT
from hrl.config.section import defaults

OWN = "data.train_files=rows.jsonl"
MODEL = "actor_rollout_ref.model.path=some/model"
EVERY_KIND = pytest.mark.parametrize("kind", [PPO, *OFFLINE_KINDS.values()], ids=lambda kind: kind.name)
OF_THE_QUICKSTART = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.optim.lr",
    "trainer.total_epochs",
    "trainer.test_freq",
)


def plain_default(key):
    return defaults(PPOTrainerConfig)[key]


@EVERY_KIND
def test_the_bare_command_is_the_quickstart(kind):
    config = compose_kind(kind, [])
    quickstart = {key for key, origin in config.origins.items() if origin == f"quickstart={kind.name}"}
    assert {"data.train_batch_size", "trainer.experiment_name", "trainer.test_freq"} <= quickstart


def test_the_quickstart_of_a_loss_that_reads_labels_has_labelled_rows():
    data = compose_kind(DPO, ["algorithm.loss_type=kto"]).data
    assert (data.train_files, data.val_files) == (
        ["bundled:addition_labelled/train"],
        ["bundled:addition_labelled/val"],
    )
    assert data.train_batch_size == compose_kind(DPO, []).data.train_batch_size
    own = compose_kind(DPO, ["algorithm.loss_type=kto", OWN]).data
    assert (own.train_files, own.val_files) == (["rows.jsonl"], [])
    with pytest.raises(ConfigError, match=r"data\.train_files is not set"):
        compose_kind(DPO, ["algorithm.loss_type=kto", "model.path=some/model"])


@pytest.mark.parametrize("given", ["recipe=dapo", "placement=separate", "actor_rollout_ref.rollout.n=4"])
def test_the_quickstart_takes_recipes_placements_and_values(given):
    config = compose_cli([given])
    assert (config.data.train_batch_size, config.data.max_response_length) == (8, 32)
    assert config.actor_rollout_ref.actor.optim.lr == 2e-5
    assert compose_cli(["recipe=dapo"]).reward.overlong_buffer.len == 6


@pytest.mark.parametrize(
    "task",
    [
        [OWN],
        [MODEL, OWN],
        [MODEL, "data.train_files=bundled:addition/train"],
        [MODEL, "data.train_files=reasoning_gym:chain_sum?size=9"],
        ["data.train_files=[bundled:addition/train,rows.jsonl]"],
        ["data.train_files=bundled:addition/train", "data.val_files=held_out.jsonl"],
    ],
    ids=" ".join,
)
def test_nothing_of_it_reaches_a_task_of_ones_own(task):
    config = compose_cli(task)
    assert {key: attrgetter(key)(config) for key in OF_THE_QUICKSTART} == {
        key: plain_default(key) for key in OF_THE_QUICKSTART
    }
    assert config.trainer.experiment_name == "ppo"
    assert set(config.origins.values()) == {YOURS, "placement=colocated"}


@pytest.mark.parametrize("task", ["reasoning_gym:chain_sum?size=9", "bundled:addition/train?answer=tags"])
def test_another_task_of_hrl_has_its_learning_rate_and_batch_and_not_its_rows(task):
    config = compose_cli([f"data.train_files={task}"])
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.optim.lr) == (8, 2e-5)
    assert (config.data.max_prompt_length, config.trainer.experiment_name) == (512, "ppo")
    assert (config.data.val_files, config.trainer.test_freq) == ([], -1)
    held_out = compose_cli([f"data.train_files={task}", f"data.val_files={task}&seed=2"])
    assert held_out.trainer.test_freq == 5


@EVERY_KIND
def test_other_training_rows_are_not_validated_on_the_bundled_ones(kind):
    config = compose_kind(kind, [OWN])
    assert config.data.val_files == []
    assert not config.trainer.val_before_train
    assert config.trainer.test_freq == -1


def test_validation_rows_that_are_named_are_used():
    config = compose_cli([OWN, "data.val_files=held_out.jsonl"])
    assert config.data.val_files == ["held_out.jsonl"]
    assert config.trainer.val_before_train


def test_the_quickstart_may_leave_validation_out():
    off = ["data.val_files=[]", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    config = compose_cli(off)
    assert config.data.train_batch_size == 8 and not config.trainer.validates_last


@EVERY_KIND
def test_rows_are_asked_for_beside_another_model(kind):
    key = "actor_rollout_ref.model.path" if kind is PPO else "model.path"
    with pytest.raises(ConfigError) as caught:
        compose_kind(kind, [f"{key}=some/model", "trainer.sed=1"])
    (wrong, missing) = sorted(map(str, caught.value.problems), reverse=True)
    assert missing == (
        "data.train_files is not set. Name yours, e.g. data.train_files=train.parquet; or add "
        f"quickstart={kind.name}, which brings bundled rows and settings for a small model."
    )
    assert "Did you mean trainer.seed?" in wrong


def test_the_quickstart_can_be_asked_for_beside_a_model_of_ones_own():
    config = compose_cli(["quickstart=ppo", MODEL])
    assert (config.data.train_files, config.data.max_response_length) == (["bundled:addition/train"], 32)
    assert (config.data.val_files, config.trainer.test_freq) == (["bundled:addition/val"], 5)
    assert config.origins[MODEL.partition("=")[0]] == YOURS


def test_the_quickstart_of_another_trainer_is_refused():
    with pytest.raises(ConfigError, match=r"quickstart has no choice 'sft'. Choose one of ppo."):
        compose_cli(["quickstart=sft"])


def test_the_quickstart_beside_rows_of_ones_own_does_not_validate():
    config = compose_cli(["quickstart=ppo", OWN])
    assert (config.data.val_files, config.trainer.test_freq, config.data.train_batch_size) == ([], -1, 8)
    with pytest.raises(ConfigError, match=r"trainer\.test_freq is 20, but data\.val_files is empty"):
        compose_cli(["quickstart=ppo", OWN, "trainer.test_freq=20"])


def test_a_recipe_wins_over_the_quickstart_and_the_line_over_both():
    config = compose_cli(["recipe=ppo", "trainer.seed=3"])
    assert config.origins["trainer.experiment_name"] == "recipe=ppo"
    assert config.origins["algorithm.adv_estimator"] == "recipe=ppo"
    assert config.origins["trainer.seed"] == YOURS
    assert config.origins["actor_rollout_ref.actor.optim.lr"] == "quickstart=ppo"
    assert "critic.optim.weight_decay" not in config.origins


@pytest.mark.parametrize("recipe", ["ppo", "pf_ppo"])
def test_a_critic_of_ones_own_learns_at_the_plain_rate(recipe):
    """The quickstart's rate suits 135M parameters; a recipe brings none for a model that it does not know."""
    plain = plain_default("critic.optim.lr")
    assert plain == 1e-5
    assert compose_cli([f"recipe={recipe}", MODEL, OWN]).critic.optim.lr == plain
    assert compose_cli([f"recipe={recipe}"]).critic.optim.lr == 2e-5


@pytest.mark.parametrize(
    ("given", "estimator", "lr"),
    [
        ([], "grpo", 1e-5),
        (["recipe=dapo"], "grpo", 1e-5),
        (["critic.enable=null"], "grpo", 1e-5),
        (["critic.cliprange_value=0.2"], "gae", 2e-5),
        (["algorithm.adv_estimator=gae"], "gae", 2e-5),
        (["algorithm.adv_estimator=gae", "critic.optim.lr=3e-5"], "gae", 3e-5),
    ],
)
def test_the_quickstarts_critic_asks_for_no_critic(given, estimator, lr):
    config = compose_cli(given)
    assert (config.algorithm.adv_estimator, config.critic.optim.lr) == (estimator, lr)
    assert ("critic.optim.lr" in config.origins) == (lr != 1e-5)


def test_a_model_under_another_name_counts():
    config = compose_kind(SFT, ["model.partial_pretrain=some/model", OWN])
    assert (config.data.max_length, config.origins["model.path"]) == (1024, YOURS)


def test_a_file_of_the_user_starts_from_the_defaults(tmp_path):
    here = ["--config-path", str(tmp_path)]
    rows = "data:\n  train_files: rows.jsonl\n  max_prompt_length: 64\n"
    (tmp_path / "on_top.yaml").write_text(f"defaults:\n  - ppo_trainer\n  - _self_\n{rows}")
    (tmp_path / "alone.yaml").write_text(rows)
    (tmp_path / "asks.yaml").write_text("defaults:\n  - ppo_trainer\n  - override quickstart: ppo\n  - _self_\n")
    (tmp_path / "without_rows.yaml").write_text("trainer: {seed: 3}\n")
    for name in ("on_top", "alone"):
        config = compose_cli([*here, "--config-name", name])
        assert (config.data.max_prompt_length, config.data.max_response_length) == (64, 512)
        assert config.actor_rollout_ref.actor.optim.lr == 1e-6
        assert config.origins["data.max_prompt_length"] == YOURS
    assert compose_cli([*here, "--config-name", "asks"]).data.max_response_length == 32
    with pytest.raises(ConfigError, match="data.train_files is not set"):
        compose_cli([*here, "--config-name", "without_rows"])


@pytest.mark.parametrize(("batch", "mini_batch"), [(8, 8), (255, 255), (256, 256), (1024, 256)])
def test_a_small_batch_is_one_optimizer_step(batch, mini_batch):
    config = compose_cli([OWN, f"data.train_batch_size={batch}"])
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == mini_batch


@pytest.mark.parametrize(("response", "zone"), [(20480, 4096), (512, 102), (4, 1)])
def test_the_overlong_zone_is_a_fifth_of_the_longest_response(response, zone):
    length = [f"data.max_response_length={response}", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768"]
    assert compose_cli([OWN, "recipe=dapo", *length]).reward.overlong_buffer.len == zone
    assert compose_cli([OWN, *length]).reward.overlong_buffer.len == 0


@EVERY_KIND
def test_the_example_of_the_help_composes(kind):
    (example,) = (text for text in kind.help.examples if "train_files" in text)
    config = compose_kind(kind, shlex.split(example.replace("\\\n", " ")))
    assert not any(origin.startswith("quickstart") for origin in config.origins.values())
