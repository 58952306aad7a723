"""A default stands once: at its field. YAML files say what differs from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hrl.config import ConfigError, PPOTrainerConfig, compose_cli, load_config
from hrl.config.actor import ActorConfig, ActorRolloutRefConfig
from hrl.config.compose import compose_kind
from hrl.config.data import DataConfig
from hrl.config.load import load_kind
from hrl.config.run_kind import KINDS, PPO, RunKind
from hrl.config.section import Section, flatten, leaves, section_of
from hrl.config.trainer import TrainerConfig

CONFIGS = Path(__file__).parents[2] / "configs"
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
ACTOR = "actor_rollout_ref.actor"


def values_of(file: Path, kind: RunKind) -> dict[str, object]:
    tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False) or {}
    values = flatten({name: value for name, value in tree.items() if name != "defaults"}, kind.schema)
    return {kind.spellings.present_name(key): value for key, value in values}


def kind_of(file: Path) -> RunKind:
    return KINDS.get(file.stem.removesuffix("_trainer"), PPO) if file.parent.name != "recipe" else PPO


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_no_file_repeats_a_default(file: Path) -> None:
    kind = kind_of(file)
    known = leaves(kind.schema)
    values = values_of(file, kind)
    assert values.keys() <= known.keys()
    # What the quickstart sets, a recipe may set back.
    quickstart = values_of(CONFIGS / "quickstart" / f"{kind.name}.yaml", kind).keys() - values.keys()
    quickstart |= values_of(CONFIGS / "quickstart" / "ppo.yaml", kind).keys() if file.parent.name == "recipe" else set()
    repeated = {key for key, value in values.items() if known[key].derive is None and known[key].plain == value}
    assert repeated - quickstart == set()


@EVERY_KIND
def test_every_section_can_be_built_alone(kind: RunKind) -> None:
    def below(section: type[Section]) -> set[type[Section]]:
        inner = {found for field in section.model_fields.values() if (found := section_of(field)) is not None}
        return inner.union(*map(below, inner))

    for section in below(kind.schema):
        required = {name: ["rows.jsonl"] for name, field in section.model_fields.items() if field.is_required()}
        assert required.keys() <= {"train_files"}
        section(**required)


def test_a_section_that_is_built_alone_takes_the_rest_from_its_run() -> None:
    data = DataConfig(train_files=["rows.jsonl"], train_batch_size=64)
    with pytest.raises(
        AttributeError, match=r"DataConfig\.seed follows from other keys: set it, or read it in the whole"
    ):
        _ = data.seed
    assert not hasattr(data, "no_such_field")
    actor = ActorRolloutRefConfig(actor=ActorConfig(clip_ratio=0.1))
    config = PPOTrainerConfig(data=data, actor_rollout_ref=actor, trainer=TrainerConfig(seed=5))
    assert config == load_config(
        {
            "data": {"train_files": ["rows.jsonl"], "train_batch_size": 64},
            "actor_rollout_ref": {"actor": {"clip_ratio": 0.1}},
            "trainer": {"seed": 5},
        }
    )
    assert (config.data.seed, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (5, 64)


def test_a_place_may_have_a_default_of_its_own_whatever_is_set_beside_it() -> None:
    config = load_config({"critic": {"optim": {"weight_decay": 0.1}}})
    assert (config.critic.optim.lr, config.critic.optim.weight_decay) == (1e-5, 0.1)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6


def test_following_defaults_follow_each_other() -> None:
    config = load_config({"data": {"train_batch_size": 8}, "trainer": {"seed": 5}, "critic": {"enable": True}})
    assert config.critic.ppo_mini_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert config.data.seed == 5


@EVERY_KIND
def test_a_configuration_built_in_python_is_that_of_the_command_line(kind: RunKind) -> None:
    rows = {"data": {"train_files": ["rows.jsonl"], "train_batch_size": 16}, "trainer": {"nnodes": 2}}
    line = [*(f"data.{key}={value}" for key, value in rows["data"].items() if key != "train_files"), "trainer.nnodes=2"]
    by_line = compose_kind(kind, ["data.train_files=[rows.jsonl]", *line])
    by_class = kind.schema(**rows)
    by_dict = load_kind(kind, rows)
    if kind is PPO:  # the line chooses a placement, whose roles are spelt out
        role_pools = dict.fromkeys(("actor_rollout", "ref", "critic", "rm"), "global")
        by_class, by_dict = (
            load_kind(kind, {**rows, "trainer": {"nnodes": 2, "role_pools": role_pools}}) for _ in "12"
        )
    assert by_class == by_dict == by_line


def test_sections_may_be_objects() -> None:
    optim = PPOTrainerConfig().actor_rollout_ref.actor.optim.model_copy(update={"lr": 3e-6})
    config = load_config({"actor_rollout_ref": {"actor": {"optim": optim}}})
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6
    assert config == load_config({"actor_rollout_ref": {"actor": {"optim": {"lr": 3e-6}}}})


def test_an_object_is_held_to_the_rules_of_a_command_line() -> None:
    built = PPOTrainerConfig(data={"train_batch_size": 8}, actor_rollout_ref={"actor": {"ppo_mini_batch_size": 3}})
    with pytest.raises(ConfigError) as by_object:
        load_config(built)
    with pytest.raises(ConfigError) as by_line:
        compose_cli(["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=3"])
    assert str(by_object.value) == str(by_line.value)
    assert "does not divide data.train_batch_size=8" in str(by_line.value)


def test_a_valid_object_passes_unchanged() -> None:
    built = PPOTrainerConfig(trainer={"nnodes": 2}, algorithm={"adv_estimator": "gae"})
    assert load_config(built) == built


@pytest.mark.parametrize(
    ("batch", "mini"), [(1, 1), (200, 200), (256, 256), (1024, 256), (1000, 250), (300, 150), (514, 514), (1009, 1009)]
)
def test_a_mini_batch_that_nobody_set_divides_the_batch(batch: int, mini: int):
    for rows in ("rows.parquet", "reasoning_gym:chain_sum"):  # the second one brings the quickstart's values
        config = compose_cli([f"data.train_files={rows}", f"data.train_batch_size={batch}"])
        assert config.actor_rollout_ref.actor.ppo_mini_batch_size == mini
