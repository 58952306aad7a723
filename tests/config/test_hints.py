"""A wrong name is answered with the key that was meant, where that is clear, and never with one of another meaning."""

import random
from functools import partial
from typing import Any

import pytest

from hrl.config import ConfigError
from hrl.config.compose import config_problems
from hrl.config.load import nearest_keys, validate_kind
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import DPO, PPO, RunKind
from hrl.config.section import leaves
from hrl.config.spellings import OFFLINE_SPELLINGS, PPO_SPELLINGS
from hrl.nearest import edit_distance

KEYS = leaves(PPOTrainerConfig)

validate = partial(validate_kind, PPO)


def hint_for(key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate({key: 1})
    (problem,) = [problem for problem in caught.value.problems if problem.key == key]
    return problem.hint


def slips(word: str, draw: random.Random) -> set[str]:
    """The word with two letters swapped, one left out and one put in, each at a place drawn."""
    at = draw.randrange(len(word))
    letter = draw.choice("abcdefghijklmnopqrstuvwxyz")
    swapped = word[:at] + word[at : at + 2][::-1] + word[at + 2 :]
    return {swapped, word[:at] + word[at + 1 :], word[:at] + letter + word[at:]} - {word, ""}


def test_the_first_hint_for_a_key_with_one_slip_is_the_key_itself():
    draw, known, missed, tried = random.Random(7), KEYS, [], 0
    for key in known:
        section, _, name = key.rpartition(".")
        for wrong in sorted(slips(name, draw)):
            written = f"{section}.{wrong}"
            if written in known:
                continue
            tried += 1
            hints = nearest_keys(written, {}, PPOTrainerConfig)
            # Where a sibling is as near, as `top_` is to top_k and top_p, both are offered.
            as_near = {other for other in hints if edit_distance(wrong, other.rpartition(".")[2]) == 1}
            if key not in hints or (hints[0] != key and hints[0] not in as_near):
                missed.append((written, key, hints))
    assert tried > 400
    assert missed == []


def test_a_slip_in_the_name_of_a_section_is_found_too():
    draw, missed = random.Random(11), []
    for key in KEYS:
        section, _, name = key.rpartition(".")
        for wrong in sorted(slips(section, draw)):
            if "" in wrong.split(".") or wrong.count(".") != section.count("."):
                continue  # a slip in a dot
            if nearest_keys(f"{wrong}.{name}", {}, PPOTrainerConfig)[:1] != [key]:
                missed.append((wrong, name))
    assert missed == []


def test_no_hint_leads_into_another_section():
    draw, known = random.Random(13), KEYS
    sections = sorted({key.rpartition(".")[0] for key in known})
    for key in known:
        written = f"{draw.choice(sections)}.{key.rpartition('.')[2]}"
        if written not in known:
            section = written.rpartition(".")[0]
            assert all(hint.rpartition(".")[0] == section for hint in nearest_keys(written, {}, PPOTrainerConfig))


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("rollout.nnodes", "trainer.nnodes"),
        ("actor_rollout_ref.nccl_timeout", "clip_ratio"),
        ("actor_rollout_ref.actor.fsdp_config.seed", "rollout.n"),
        ("trainer.n_env_gpus_per_node", "trainer.n_gpus_per_node"),
        ("data.min_response_length", "data.max_response_length"),
        ("actor_rollout_ref.actor.gvpo_beta", "betas"),
        ("trainer.debug", "trainer.device"),
    ],
)
def test_a_hint_that_would_mislead_is_not_given(key, wrong):
    problems = config_problems(PPO, ["data.train_files=rows.parquet", f"{key}=1"])
    assert all(wrong not in problem.hint for problem in problems)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("recipe=gpro", "Did you mean grpo?"),
        ("algorithm.adv_estimator=grop", "Did you mean grpo?"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gvpo", "Known: "),
        ("actor_rollout_ref.rollout.name=server", "rollout.server.urls=[http://127.0.0.1:8000]; or use vllm."),
        ("trainer.device=npu", "models run on NVIDIA GPUs or on CPUs; use auto."),
        ("actor_rollout_ref.rollout.engine_kwargs.trtllm.max_batch_size=4", "Remove them."),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.tp_size=2", "Set actor_rollout_ref.rollout.tensor_model"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.skip_tokenizer_init=false", "Remove it."),
        ("actor_rollout_ref.rollout.engine_kwargs.swap_space=4", "Write it as {vllm: {swap_space: ...}}."),
    ],
)
def test_a_wrong_value_gets_the_right_one(override, hint):
    (problem,) = config_problems(PPO, ["data.train_files=rows.parquet", override])
    assert hint in problem.hint


def test_arguments_of_an_engine_that_is_refused_are_not_refused_as_well():
    line = ["actor_rollout_ref.rollout.name=trtllm", "actor_rollout_ref.rollout.engine_kwargs.trtllm.mem=1"]
    (problem,) = config_problems(PPO, ["data.train_files=rows.parquet", *line])
    assert problem.key == "actor_rollout_ref.rollout.name"


@pytest.mark.parametrize(
    "key", ["rollout.n", "rollout.temperature", "model.path", "actor.optim.lr", "ref.log_prob_use_dynamic_bsz"]
)
def test_a_key_without_the_name_of_the_policys_section_is_known(key):
    assert f"id you mean actor_rollout_ref.{key}?" in hint_for(key)


@pytest.mark.parametrize("choice", ["recipe=nope", "recipe=grpo", "placement=separate"])
def test_a_choice_of_another_kind_of_run_is_named_as_one(choice):
    (problem,) = config_problems(DPO, [choice])
    assert problem.what == "is a choice of PPO runs." and "hrl check dpo --help" in problem.hint


def test_a_list_that_a_shell_cut_at_its_space_is_to_be_quoted():
    problem, rest = config_problems(PPO, ["data.train_files=[a.jsonl,", "b.jsonl]"])
    assert problem.hint == "Write a list without spaces, or quote it: 'data.train_files=[…,…]'."
    assert rest.key == "b.jsonl]"


def test_a_section_that_is_right_lists_its_keys():
    assert hint_for("algorithm.kl_ctrl.zzz") == "algorithm.kl_ctrl has type, kl_coef, horizon, target_kl."


# Names of TRL and OpenRLHF.


NAMES_ELSEWHERE = {
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "beta": "actor_rollout_ref.actor.kl_loss_coef",
    "num_generations": "actor_rollout_ref.rollout.n",
    "max_completion_length": "data.max_response_length",
    "n_samples_per_prompt": "actor_rollout_ref.rollout.n",
    "per_device_train_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "max_prompt_length": "data.max_prompt_length",
    "micro_train_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "rollout_batch_size": "data.train_batch_size",
    "loss_type": "actor_rollout_ref.actor.loss_agg_mode",
    "bf16": "actor_rollout_ref.actor.fsdp_config.dtype",
    "init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "advantage_estimator": "algorithm.adv_estimator",
}
SPELLINGS = ["{}=1", "--{}=1", "--{} 1", "--{dashed} 1", "actor.{}=1"]


@pytest.mark.parametrize(
    ("name", "spelt"),
    [(name, "{}=1") for name in NAMES_ELSEWHERE] + [("learning_rate", spelt) for spelt in SPELLINGS],
)
def test_a_name_of_another_library_is_answered_with_the_key(name, spelt):
    written = spelt.format(name, dashed=name.replace("_", "-"))
    (problem,) = config_problems(PPO, ["data.train_files=rows.parquet", *written.split(" ")])
    assert problem.hint.startswith(f"It is {NAMES_ELSEWHERE[name]} here")


def test_a_synonym_says_where_its_unit_differs():
    assert "prompts" in PPO_SPELLINGS.synonyms["rollout_batch_size"].hint
    assert "use_kl_loss=true" in PPO_SPELLINGS.synonyms["beta"].hint


def test_an_option_and_its_value_are_one_problem():
    problems = config_problems(PPO, ["data.train_files=rows.parquet", "--beta", "0.1", "--bf16", "--zzz", "3"])
    assert [problem.key for problem in problems] == ["--beta 0.1", "--bf16", "--zzz 3"]


def test_a_preference_run_has_its_own_synonyms():
    (problem,) = config_problems(DPO, ["data.train_files=rows.parquet", "beta=0.2"])
    assert problem.hint == "It is algorithm.beta here."
    assert [name for name, synonym in OFFLINE_SPELLINGS.synonyms.items() if synonym.key not in leaves(DPO.schema)] == []


def test_a_synonym_with_the_section_of_something_else_is_no_hint():
    assert "kl_loss_coef" not in hint_for("critic.beta")


@pytest.mark.parametrize(
    ("kind", "argument", "key"),
    [
        (PPO, "model=x", "actor_rollout_ref.model.path"),
        (PPO, "steps=3", "trainer.total_training_steps"),
        (PPO, "--steps 3", "trainer.total_training_steps"),
        (PPO, "batch_size=4", "data.train_batch_size"),
        (PPO, "folder=out", "trainer.default_local_dir"),
        (PPO, "reward=my.py", "reward.functions"),
        (PPO, "data=x.jsonl", "data.train_files"),
        (DPO, "model=x", "model.path"),
        (DPO, "lr=1", "optim.lr"),
    ],
)
def test_an_argument_of_python_is_answered_with_its_key(kind: RunKind[Any], argument: str, key: str):
    (problem, *_) = config_problems(kind, argument.split(maxsplit=1) if argument.startswith("-") else [argument])
    assert f"It is {key} here" in problem.hint
