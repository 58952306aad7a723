"""The arithmetic in words, by hand-computed numbers."""

import pytest

from hrl.config.arithmetic import (
    batch_arithmetic,
    changed_values,
    placement_facts,
    step_sizes,
    total_steps,
    units_in_words,
)
from hrl.config.compose import compose_cli, compose_kind
from hrl.config.placement import resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import DPO, SFT
from hrl.config.section import leaves

KEYS = leaves(PPOTrainerConfig)


def test_the_quickstart_in_words():
    assert dict(batch_arithmetic(compose_cli([]), train_rows=65)) == {
        "one step": "8 prompts × 8 samples = 64 sequences, each at most 64 prompt + 32 response = 96 tokens",
        "actor update": "1 mini-batch of 64 sequences (8 prompts) × 1 pass = 1 optimizer step per step",
        "run": "65 rows ÷ 8 prompts = 8 steps an epoch, 1 left over, × 4 epochs = 32 steps = "
        "32 optimizer steps of the actor",
        "micro-batch of actor": "packed up to 4,096 tokens per process (42 longest sequences)",
        "engines": "1 rollout process ÷ 1 per engine = 1 vllm engine, about 64 sequences each, 256 at once",
        "KV cache": "50% of each GPU together with the weights; on CPU 1 GiB per engine",
    }


def test_sequence_groups_are_told_where_roles_live_and_how_much_a_micro_batch_holds():
    line = ["recipe=ppo", "trainer.n_gpus_per_node=8", "critic.ulysses_sequence_parallel_size=2"]
    line += ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=4", "algorithm.use_kl_in_reward=true"]
    config = compose_cli([*line, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000"])
    (roles,) = dict(placement_facts(config)).values()
    assert roles == (
        "8 processes with actor_rollout (2 sequence groups of 4), ref (2 sequence groups of 4), "
        "critic (4 sequence groups of 2)"
    )
    facts = dict(batch_arithmetic(config))
    assert facts["micro-batch of actor"] == "packed up to 4,000 tokens per group of 4 processes (41 longest sequences)"
    assert facts["micro-batch of critic"].startswith("packed up to 2,000 tokens per group of 2 processes")
    cut = compose_cli(["trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.tensor_parallel_size=4"])
    assert dict(placement_facts(cut)) == {"pool global": "8 processes with actor_rollout (2 tensor groups of 4)"}
    offline = compose_kind(SFT, ["ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=4"])
    assert dict(placement_facts(offline)) == {"model": "4 processes (2 sequence groups of 2)"}


def test_a_row_of_labelled_answers_is_no_pair():
    pairs, labelled = (
        dict(batch_arithmetic(compose_kind(DPO, [f"algorithm.loss_type={loss}"]))) for loss in ("sigmoid", "kto")
    )
    assert pairs["one step"].startswith("16 pairs = 32 answers, each with its prompt at most 96 tokens")
    assert labelled["one step"].startswith("16 rows, each at most 96 tokens")
    assert pairs["micro-batch"].endswith("(21 longest pairs)")
    assert labelled["micro-batch"].endswith("(42 longest rows)")


def test_a_run_that_only_validates_has_no_step_and_no_update():
    facts = dict(batch_arithmetic(compose_cli(["trainer.total_training_steps=0"])))
    assert list(facts) == ["run", "engines", "KV cache"] and facts["run"] == "validation alone, no step"


def test_ppo_on_eight_processes_in_words():
    overrides = ["recipe=ppo", "placement=separate", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"]
    overrides += ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
    overrides += ["actor_rollout_ref.actor.ppo_epochs=2", "critic.ppo_mini_batch_size=8"]
    overrides += ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.total_training_steps=100"]
    config = compose_cli(overrides)
    facts = dict(batch_arithmetic(config))
    assert facts["one step"].startswith("32 prompts × 8 samples = 256 sequences")
    assert (
        facts["actor update"] == "2 mini-batches of 128 sequences (16 prompts) × 2 passes = 4 optimizer steps per step"
    )
    assert (
        facts["critic update"] == "4 mini-batches of 64 sequences (8 prompts) × 2 passes = 8 optimizer steps per step"
    )
    assert facts["run"] == "100 steps = 400 optimizer steps of the actor"
    assert facts["engines"].startswith("8 rollout processes ÷ 2 per engine = 4 vllm engines, about 64 sequences each")
    assert dict(placement_facts(config)) == {
        f"pool {role}": f"8 processes (4 + 4 on 2 machines) with {role}"
        for role in ("actor", "rollout", "ref", "critic")
    }


def test_before_the_data_are_read_the_length_stays_open():
    assert "counted when the rows have been read" in dict(batch_arithmetic(compose_cli([])))["run"]


def test_step_sizes_and_total_steps():
    config = compose_cli(
        [
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_epochs=3",
        ]
    )
    assert step_sizes(config) == (16, 8, 128, 2, 3, 6)
    assert total_steps(config, train_rows=65) == 16
    assert total_steps(compose_cli(["trainer.total_training_steps=5"]), train_rows=65) == 5


def test_units_skip_what_is_off():
    shown = dict(units_in_words(compose_cli([])))
    assert shown["data.train_batch_size"] == "8 prompts per step"
    assert not any(key.startswith(("critic.", "actor_rollout_ref.ref.")) for key in shown)
    assert "trainer.save_freq" not in shown


def test_differences_are_exactly_what_was_set():
    changed = {key: value for key, (value, _) in changed_values(compose_cli(["trainer.seed=3"])).items()}
    assert changed["trainer.seed"] == changed["data.seed"] == 3
    assert changed["data.train_batch_size"] == 8
    assert "data.shuffle" not in changed


def test_differences_are_plain_values_down_to_the_entries_of_a_list():
    config = compose_cli(["reward.functions=[{name: length, weight: 0.5, most: 50}]"])
    value, default = changed_values(config)["reward.functions"]
    entry = {"name": "length", "path": None, "weight": 0.5, "label": None, "kwargs": {"most": 50}}
    assert (value, default) == ([entry], None)


@pytest.mark.parametrize(
    ("placement", "roles"),
    [
        ("colocated", {"actor_rollout": "global", "ref": "global", "critic": "global"}),
        ("separate", {"actor": "actor", "rollout": "rollout", "ref": "ref", "critic": "critic"}),
        ("pairs", {"actor": "policy", "rollout": "rollout", "ref": "policy", "critic": "value"}),
    ],
)
def test_roles_stand_where_the_placement_puts_them(placement, roles):
    resolved = resolve_placement(compose_cli(["recipe=ppo", f"placement={placement}"]))
    assert resolved.roles == roles
    assert set(resolved.pools) == set(roles.values())
    shared = resolved.roles[resolved.actor] == resolved.roles[resolved.rollout]
    assert shared is (placement == "colocated")


def test_actor_and_rollout_on_one_pool_are_one_role():
    config = compose_cli(["trainer.role_pools={actor: global, rollout: global}"])
    assert resolve_placement(config).roles == {"actor_rollout": "global"}


def test_a_role_left_out_joins_the_actor():
    pools, roles = "trainer.resource_pools={a: 1, b: 1}", "trainer.role_pools={actor: a, rollout: b}"
    config = compose_cli(["recipe=grpo", pools, roles])
    assert resolve_placement(config).roles["ref"] == "a"


def test_what_is_sampled_beside_the_batch_is_said():
    dapo, remax = (dict(batch_arithmetic(compose_cli([f"recipe={name}"]))) for name in ("dapo", "remax"))
    bound = "until the samples of 8 prompts differ in score, at most 10 batches = 80 prompts a step"
    assert dapo["dynamic sampling"] == bound
    assert remax["baselines"] == "8 greedy responses more per step, one for each prompt"
    assert "algorithm.filter_groups.max_num_gen_batches" not in dict(units_in_words(compose_cli([])))


def test_engines_alone_have_no_policy_beside_them():
    roles, ends = "trainer.role_pools={actor: null, rollout: global}", "trainer.total_training_steps=0"
    config = compose_cli([roles, ends, "trainer.resume_mode=disable", "quickstart=ppo"])
    placement = resolve_placement(config)
    assert "rollout" in placement.roles and not {"actor", "actor_rollout"} & placement.roles.keys()
    assert (placement.rollout, placement.trains) == ("rollout", False)
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.9
    assert resolve_placement(compose_cli([])).trains
