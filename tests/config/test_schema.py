"""The schema itself: small, closed, documented, and every constant name equal to its registry."""

import copy
import math
import pickle
import runpy
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from hrl.config import PPOTrainerConfig, load_config
from hrl.config.section import leaves, sections
from hrl.config.spellings import PPO_SPELLINGS, lookup
from hrl.config.trainer import LOGGERS, WITHOUT_TRACKER
from hrl.errors import ConfigError

KEYS = leaves(PPOTrainerConfig)


def test_there_are_not_many_keys():
    assert len(KEYS) < 292


def test_every_key_has_a_sentence_that_ends():
    unfinished = [key for key, leaf in KEYS.items() if not leaf.help.endswith((".", "`."))]
    assert unfinished == []


def test_a_validated_configuration_is_immutable_and_can_be_copied():
    config = load_config({"trainer": {"seed": 7}})
    with pytest.raises(ValidationError, match="frozen"):
        config.trainer.seed = 8  # type: ignore[misc]
    assert copy.deepcopy(config) == config


def test_no_key_is_both_in_the_schema_and_in_a_table_of_exceptions():
    spellings, of_others = PPO_SPELLINGS, "distillation.teacher_models.*"  # whatever else verl's teachers are called
    for table in (spellings.renamed, spellings.outside, spellings.must_equal, spellings.converted):
        assert [key for key in KEYS if (found := lookup(table, key)) and found[0] != of_others] == []


def test_every_renaming_ends_at_a_key_that_is_understood():
    spellings = PPO_SPELLINGS
    for old, new in spellings.renamed.items():
        target = new.removesuffix(".*").removesuffix(".data_source")  # an entry of `data.map`
        understood = target in KEYS or target in sections(PPOTrainerConfig) or lookup(spellings.outside, new)
        assert understood or new in spellings.must_equal or new in spellings.converted, old


def test_every_synonym_names_a_key_or_a_group():
    assert [name for name, other in PPO_SPELLINGS.synonyms.items() if other.key not in {*KEYS, "placement"}] == []


def test_a_default_that_follows_from_other_keys_is_said_in_words():
    assert [key for key, leaf in KEYS.items() if ("Default: " in leaf.help) != (leaf.derive is not None)] == []


@pytest.mark.parametrize(
    ("placement", "share"),
    [
        ({}, 0.5),
        ({"resource_pools": {"train": [2], "gen": [2]}, "role_pools": {"actor": "train", "rollout": "gen"}}, 0.9),
        ({"resource_pools": {"train": [2], "gen": [2]}, "role_pools": {"rollout": "gen"}}, 0.9),
        ({"resource_pools": {"gen": [2], "train": [2]}, "role_pools": {"rollout": "gen"}}, 0.5),  # the actor joins it
        ({"resource_pools": {"all": [2]}, "role_pools": {"actor": "all", "rollout": "all"}}, 0.5),
        (
            {
                "resource_pools": {"train": [2], "gen": [2]},
                "role_pools": {"actor": "train", "rollout": "gen", "ref": "gen"},
            },
            0.5,
        ),
    ],
)
def test_an_engine_takes_most_of_a_gpu_of_its_own_and_half_of_a_shared_one(placement, share):
    config = load_config({"trainer": placement})

    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == share


def test_a_share_that_was_asked_for_stands():
    placement = {"resource_pools": {"train": [2], "gen": [2]}, "role_pools": {"actor": "train", "rollout": "gen"}}
    tree = {"trainer": placement, "actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.7}}}

    assert load_config(tree).actor_rollout_ref.rollout.gpu_memory_utilization == 0.7


def test_an_untouched_schema_is_what_an_empty_tree_loads():
    assert load_config({}) == PPOTrainerConfig()


def test_every_entry_of_a_table_has_its_function_and_no_function_is_without_an_entry():
    from hrl.algos import registry
    from tests.algos.registries import REGISTRIES

    tables = runpy.run_path(str(registry.__file__))  # as they stand before a function is registered
    built_in = {
        "ESTIMATOR_TRAITS": "advantage",
        "POLICY_LOSS_TRAITS": "policy loss",
        "PAIR_LOSS_TRAITS": "preference",
        "LABELLED_LOSS_TRAITS": "labelled",
        "DISTILLATION_TRAITS": "distillation",
        "AGGREGATION_NAMES": "aggregation",
        "KL_NAMES": "kl",
        "IMPORTANCE_LEVEL_NAMES": "correction",
        "REWARD_SHAPER_NAMES": "reward shaping",
        "REWEIGHT_METHOD_NAMES": "policy filtration",
    }
    assert built_in.keys() == {name for name in tables if name.endswith(("_TRAITS", "_NAMES"))}
    for table, family in built_in.items():
        assert set(tables[table]) == set(REGISTRIES[family]), table
        assert getattr(registry, table) is REGISTRIES[family].table


def test_the_loggers_of_the_schema_are_the_trackers_and_consoles():
    from hrl.report.tracking import TRACKERS

    assert {*TRACKERS, *WITHOUT_TRACKER} == set(LOGGERS)


@pytest.mark.usefixtures("own_registries")
def test_an_estimator_of_the_user_is_known_to_the_configuration():
    from hrl.algos import advantages

    advantages.register_adv_est("my_own", min_group_size=3)(lambda inp, config: (inp, inp))
    assert load_config({"algorithm": {"adv_estimator": "my_own"}}).actor_rollout_ref.rollout.n == 8


def test_a_kl_estimator_and_an_aggregation_of_the_user_are_found_too(monkeypatch):
    from hrl.algos import aggregation, kl

    monkeypatch.setitem(kl.KL_ESTIMATORS, "quartic", lambda difference: difference**4)
    monkeypatch.setitem(aggregation.AGGREGATION_MODES, "root-mean", aggregation.AGGREGATION_MODES["token-mean"])
    actor = {"kl_loss_type": "quartic+", "loss_agg_mode": "root-mean"}
    assert load_config({"actor_rollout_ref": {"actor": actor}}).actor_rollout_ref.actor.loss_agg_mode == "root-mean"


def test_a_level_of_correction_of_the_user_is_accepted_and_computed_with(monkeypatch):
    from hrl.algos import rollout_correction

    def largest(log_ratio):
        return log_ratio.amax(dim=-1, keepdim=True).exp().expand(log_ratio.shape)

    monkeypatch.setitem(rollout_correction.IMPORTANCE_LEVELS, "largest", (largest, None))
    settings = load_config({"algorithm": {"rollout_correction": {"rollout_is": "largest"}}}).algorithm
    log_ratio = torch.tensor([[0.0, math.log(1.5)]])
    weights, _, _ = rollout_correction.correct(log_ratio, torch.ones(1, 2), settings.rollout_correction)
    assert weights.tolist() == [[pytest.approx(1.5)] * 2]


def test_a_method_of_filtration_of_the_user_is_accepted_and_drawn_with(monkeypatch):
    from hrl.algos import policy_filtration

    monkeypatch.setitem(policy_filtration.REWEIGHT_METHODS, "worst", lambda scores, power: (scores == scores.min()) * 1)
    settings = load_config({"algorithm": {"use_pf_ppo": True, "pf_ppo": {"reweight_method": "worst"}}}).algorithm.pf_ppo
    drawn = policy_filtration.draw_rows(
        torch.tensor([3.0, -1.0, 2.0]),
        torch.ones(3, dtype=torch.bool),
        settings.reweight_method,
        settings.weight_pow,
        generator=torch.Generator().manual_seed(0),
    )
    assert drawn.tolist() == [1, 1, 1]


@pytest.mark.usefixtures("own_registries")
def test_a_loss_of_pairs_of_the_user_says_whether_it_has_a_reference():
    from hrl.algos.preference import PAIR_LOSSES

    PAIR_LOSSES["linear"] = lambda chosen, rejected, options: rejected - chosen
    tree = {"algorithm": {"preference_loss": "linear", "kl_ctrl": {"kl_coef": 0.1}}}
    assert load_config(tree).needs_reference
    PAIR_LOSSES.register("linear", reference=False)(PAIR_LOSSES["linear"])
    assert not load_config(tree).needs_reference


@pytest.mark.parametrize(
    ("key", "name", "nearest"),
    [
        ("preference_loss", "sigmoyd", "sigmoid"),
        ("rollout_correction.rollout_is", "sequenze", "sequence"),
        ("pf_ppo.reweight_method", "max_rand", "max_random"),
    ],
)
def test_a_name_that_nothing_is_registered_under_is_refused(key, name, nearest):
    section, _, leaf = key.rpartition(".")
    tree = {section: {leaf: name}} if section else {leaf: name}
    with pytest.raises(ConfigError) as refused:
        load_config({"algorithm": tree})
    assert [str(problem) for problem in refused.value.problems] == [
        f"algorithm.{key} names {name!r}, which nothing is registered under. Did you mean {nearest}?"
    ]


def test_composing_imports_neither_torch_nor_ray():
    code = (
        "import sys; from hrl.config import compose_cli; compose_cli([]); "
        "sys.exit(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)) != [])"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0


def test_unpickling_a_configuration_needs_no_hydra():
    code = (
        "import pickle, sys; config = pickle.loads(sys.stdin.buffer.read()); "
        "sys.exit('hydra' in sys.modules or config.trainer.seed != 9)"
    )
    data = pickle.dumps(load_config({"trainer": {"seed": 9}}))
    assert subprocess.run([sys.executable, "-c", code], input=data, timeout=600, check=False).returncode == 0
