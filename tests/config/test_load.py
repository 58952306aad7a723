"""Validation: all problems at once, each naming the key as it was written and the way out."""

from functools import partial

import pytest

from hrl.algos.policy_losses import clip_bounds
from hrl.config import ConfigError, load_config
from hrl.config.load import validate_kind
from hrl.config.run_kind import PPO
from hrl.config.section import unflatten

validate = partial(validate_kind, PPO)


def problems_of(**given: object) -> dict[str, str]:
    """Problems by key; dots are written as double underscores."""
    return problems_of_keys({key.replace("__", "."): value for key, value in given.items()})


def problems_of_keys(given: dict[str, object]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        validate(given)
    return {problem.key: str(problem) for problem in caught.value.problems}


def value(given: dict[str, object], key: str) -> object:
    node: object = validate(given)
    for name in key.split("."):
        node = getattr(node, name)
    return node


ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"


def test_every_problem_is_listed_and_numbered():
    with pytest.raises(ConfigError) as caught:
        load_config({"algorithm": {"adv_estimatr": "grpo"}, "trainer": {"total_epoch": 3, "seed": "x"}})
    assert str(caught.value).splitlines() == [
        "3 problems in the configuration:",
        "  1. algorithm.adv_estimatr is not a key of hrl. Did you mean algorithm.adv_estimator?",
        "  2. trainer.total_epoch is not a key of hrl. Did you mean trainer.total_epochs?",
        "  3. trainer.seed is 'x', expected a whole number.",
    ]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("trainer.adv_estimator", "algorithm.adv_estimator"),
        ("traner.total_epochs", "trainer.total_epochs"),
        ("actor_rollout_ref.actor.ppo_minibatch_size", f"{ACTOR}.ppo_mini_batch_size"),
        ("actor_rollout_ref.rollout.tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("data.train_file", "data.train_files"),
        ("actor.optim.lr", f"{ACTOR}.optim.lr"),
        ("reward_model.enabel", "reward.reward_model.enable"),
        ("total_epochs", "trainer.total_epochs"),
    ],
)
def test_the_nearest_right_name_is_offered(wrong, right):
    assert right in problems_of_keys({wrong: 1})[wrong]


def test_a_key_like_no_other_points_to_the_reference():
    assert "docs/configuration.md" in problems_of(zzz=1)["zzz"]


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("trainer.seed", 1.5, "is 1.5, expected a whole number."),
        ("trainer.seed", -1, "is -1, must be at least 0."),
        ("trainer.total_epochs", True, "is true, expected a whole number."),
        ("data.shuffle", "maybe", "is 'maybe', expected true or false."),
        (f"{ACTOR}.clip_ratio_c", 0.5, "is 0.5, must be more than 1.0."),
        (
            f"{ACTOR}.loss_agg_mode",
            "token_mean",
            "names 'token_mean', which nothing is registered under. Did you mean token-mean?",
        ),
        (f"{ROLLOUT}.name", "trtllm", "can't be 'trtllm' here: TensorRT-LLM comes later; use vllm."),
        (f"{ROLLOUT}.gpu_memory_utilization", 1.2, "is 1.2, must be at most 1.0."),
        (f"{ACTOR}.optim.lr", float("nan"), "is nan"),
        ("data.train_files", [], "is []"),
        ("data.train_files", ["a.parquet", 3], "[1] is 3, expected text."),
        ("algorithm", 3, "is 3, expected a section with keys below it."),
        ("algorithm.adv_estimator", "grop", "Did you mean grpo?"),
        (f"{ACTOR}.policy_loss.loss_mode", "vanila", "Did you mean vanilla?"),
        ("algorithm.kl_penalty", "k9", "'k9'"),
        ("trainer.logger", ["console", "wandbb"], "Did you mean wandb?"),
    ],
)
def test_a_wrong_value_says_what_is_expected(key, wrong, message):
    assert message in problems_of_keys({key: wrong})[key]


def test_a_wrong_value_is_reported_once_although_other_defaults_follow_from_it():
    assert list(problems_of(trainer__seed="x")) == ["trainer.seed"]
    assert list(problems_of_keys({f"{ACTOR}.ppo_epochs": 0})) == [f"{ACTOR}.ppo_epochs"]


def test_rules_do_not_judge_a_key_that_is_already_in_doubt():
    # n=1 would be wrong for grpo, but which estimator was meant is not known yet.
    assert list(problems_of_keys({"algorithm.adv_estimatr": "gae", f"{ROLLOUT}.n": 1})) == ["algorithm.adv_estimatr"]


def test_rules_still_run_beside_wrong_values():
    found = problems_of_keys({"trainer.seed": "x", f"{ACTOR}.ppo_mini_batch_size": 3, "data.train_batch_size": 8})
    assert set(found) == {"trainer.seed", f"{ACTOR}.ppo_mini_batch_size"}


def test_numbers_may_name_things():
    assert value({"trainer.experiment_name": 42}, "trainer.default_local_dir") == "outputs/hrl/42"


def test_one_string_is_a_list_of_one():
    assert value({"data.train_files": "a.parquet"}, "data.train_files") == ["a.parquet"]
    assert value({"trainer.logger": "console"}, "trainer.logger") == ["console"]


# Defaults that follow from other keys.


def test_the_sample_count_follows_the_estimator():
    assert value({"algorithm.adv_estimator": "grpo"}, f"{ROLLOUT}.n") == 8
    assert value({"algorithm.adv_estimator": "gae"}, f"{ROLLOUT}.n") == 1


def test_the_estimator_follows_from_a_critic_being_mentioned():
    assert value({}, "algorithm.adv_estimator") == "grpo"
    assert value({"critic.optim.lr": 1e-5}, "algorithm.adv_estimator") == "gae"
    assert value({"critic.enable": False}, "algorithm.adv_estimator") == "grpo"


def test_one_clip_ratio_sets_both_sides():
    given = {f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_high": 0.3}
    assert clip_bounds(validate(given).actor_rollout_ref.actor) == (0.1, 0.3)


def test_a_fixed_micro_batch_turns_dynamic_packing_off_for_every_pass():
    given = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}
    assert value(given, f"{ACTOR}.use_dynamic_bsz") is False
    assert value(given, f"{REF}.log_prob_use_dynamic_bsz") is False
    assert value(given, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu") == 4
    assert value(given, "critic.ppo_micro_batch_size_per_gpu") == 4


def test_a_written_dynamic_flag_wins_over_a_leftover_number_of_rows():
    given = {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8}
    assert value(given, f"{ROLLOUT}.log_prob_use_dynamic_bsz") is True


def test_token_budgets_follow_the_actor():
    given = {f"{ACTOR}.ppo_max_token_len_per_gpu": 2048}
    for key in (
        f"{REF}.log_prob_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
        "critic.forward_max_token_len_per_gpu",
        "reward.reward_model.max_token_len_per_gpu",
    ):
        assert value(given, key) == 2048


def test_pools_follow_the_machines():
    assert value({"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2}, "trainer.resource_pools") == {"global": [4, 4]}
    given = {"trainer.resource_pools": {"a": 2, "b": [1, 3]}, "trainer.nnodes": 2}
    assert value(given, "trainer.resource_pools") == {"a": [2, 2], "b": [1, 3]}


def test_the_critic_starts_from_the_policy():
    assert value({"actor_rollout_ref.model.path": "x/y"}, "critic.model.path") == "x/y"


def test_a_checkpoint_holds_a_model_folder_that_is_not_read_on_resume():
    checkpoint = validate({}).actor_rollout_ref.actor.checkpoint
    assert checkpoint.save_contents == ["model", "optimizer", "extra", "hf_model"]
    assert checkpoint.load_contents == ["model", "optimizer", "extra"]


def test_remote_code_and_shuffling_have_one_switch():
    policy = "actor_rollout_ref.model.trust_remote_code"
    validate_kind(
        PPO, {policy: True, "critic.model.trust_remote_code": True, f"{ACTOR}.shuffle": True, "critic.shuffle": True}
    )
    assert "critic.shuffle is True, but actor_rollout_ref.actor.shuffle is False" in str(
        problems_of_keys({"critic.shuffle": True})["critic.shuffle"]
    )
    assert policy in str(problems_of_keys({"critic.model.trust_remote_code": True})["critic.model.trust_remote_code"])


def test_a_reward_models_micro_batches_are_packed_where_the_actors_are():
    def rows(**given):
        model = validate({key.replace("__", "."): row for key, row in given.items()}).reward.reward_model
        return model.micro_batch_size_per_gpu

    assert rows() is None
    assert rows(reward__reward_model__micro_batch_size_per_gpu=4) == 4
    assert rows(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=2) == 2


def test_a_frozen_model_is_stored_in_the_dtype_it_computes_in():
    config = validate({f"{REF}.fsdp_config.dtype": "float32", f"{REF}.fsdp_config.model_dtype": "bf16"})
    frozen, trained = config.actor_rollout_ref.ref.fsdp_config, config.actor_rollout_ref.actor.fsdp_config
    assert (frozen.model_dtype, trained.model_dtype) == ("float32", "fp32")


def test_the_driver_waits_longer_for_a_sync_than_the_workers():
    def waits(**given):
        return validate({f"{ROLLOUT}.weight_sync.{key}": value for key, value in given.items()})

    assert waits().actor_rollout_ref.rollout.weight_sync.driver_timeout_s == 360.0
    assert waits(timeout_s=1000).actor_rollout_ref.rollout.weight_sync.driver_timeout_s == 1060.0


def test_loading_what_was_resolved_changes_nothing():
    config = validate({"algorithm.adv_estimator": "gae", "trainer.nnodes": 2})
    assert load_config(config.model_dump()) == config


def test_a_key_below_a_mapping_leaves_the_default_of_the_next_run_alone():
    default = {"prompt": "question"}
    tree = unflatten({"data.map": default, "data.map.answer": "solution"})
    assert tree == {"data": {"map": {"prompt": "question", "answer": "solution"}}}
    assert default == {"prompt": "question"}
