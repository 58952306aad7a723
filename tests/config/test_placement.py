"""Pools on devices of their own or of others: who is where, and what can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hrl.config import compose_cli, load_config
from hrl.config.compose import to_yaml
from hrl.config.placement import Device, resolve_placement
from hrl.config.placement_picture import placement_picture
from hrl.errors import ConfigError

PPO = {
    "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True},
    "reward": {"reward_model": {"enable": True, "model_path": "x"}},
}
WITH_RM = ("reward.reward_model.enable=true", "reward.reward_model.model_path=x")


def picture(*overrides: str) -> dict[str, str]:
    return dict(placement_picture(compose_cli(["recipe=ppo", *WITH_RM, *overrides])))


def placed(pools: dict[str, Any], options: dict[str, Any], roles: dict[str, str], nnodes: int = 1) -> Any:
    trainer = {"resource_pools": pools, "pool_options": options, "role_pools": roles, "nnodes": nnodes}
    return load_config({**PPO, "trainer": trainer})


@pytest.mark.parametrize("name", ["split", "shared", "merged", "pinned"])
def test_what_a_run_writes_of_its_placement_can_be_read_again(name: str, tmp_path: Path) -> None:
    config = compose_cli(["recipe=ppo", f"placement={name}", *WITH_RM])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = compose_cli(["--config-path", str(tmp_path), "--config-name", "config"])
    assert again.trainer == config.trainer and resolve_placement(again) == resolve_placement(config)


# ---------------------------------------------------------------------------------------------- pictures


def test_shared_devices_have_a_process_of_each_pool() -> None:
    assert picture("placement=shared", "trainer.n_gpus_per_node=2") == {
        "cards: device 0": "actor_rollout 0 | ref 0 | critic 0 + rm 0",
        "cards: device 1": "actor_rollout 1 | ref 1 | critic 1 + rm 1",
    }


def test_parts_take_the_ranks_of_the_whole_in_their_order() -> None:
    assert picture("placement=split") == {
        "cards: device 0": "actor_rollout 0 | ref 0",
        "cards: device 1": "actor_rollout 1 | ref 1",
        "cards: device 2": "critic 0 | rm 0",
    }


def test_pinned_pools_and_those_on_cpus_say_so() -> None:
    assert picture("placement=pinned") == {
        "train (on train): device 0": "actor 0 + ref 0 + critic 0 + rm 0",
        "sample (on sample): device 0": "rollout 0",
    }
    assert picture("placement=cpu_scorers")["scorers (CPUs alone): device 0"] == "ref 0 + rm 0"


def test_a_large_placement_has_a_line_for_neighbours_that_are_alike() -> None:
    shown = picture("placement=spare", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    assert shown == {
        "policy, machine 1: devices 0 to 7": "actor_rollout 0-7",
        "policy, machine 2: devices 0 to 7": "actor_rollout 8-15",
        "value: device 0": "critic 0",
        "scorers: device 0": "ref 0 + rm 0",
    }


def test_a_device_that_nobody_takes_is_free() -> None:
    pools, options = {"cards": [3], "few": 2}, {"few": {"split_of": "cards"}}
    shown = dict(placement_picture(placed(pools, options, {"actor_rollout": "few"})))
    assert shown["cards: device 2"] == "free"


# ---------------------------------------------------------------------------------------------- arithmetic


def test_a_merged_pool_has_the_devices_of_its_parts_and_needs_no_size() -> None:
    options = {"big": {"nodes": "big"}, "small": {"nodes": "small"}, "all": {"merge_of": ["big", "small"]}}
    config = placed({"big": [2], "small": [1]}, options, {"actor_rollout": "all"})
    placement = resolve_placement(config)
    assert config.trainer.resource_pools["all"] == [2, 1]
    assert placement.devices("all") == (Device("big", 0), Device("big", 1), Device("small", 0))
    assert placement.pools == {"all": (2, 1)} and placement.reservations == {"big": (2,), "small": (1,)}
    assert (placement.num_devices, placement.num_cpus, placement.processes("critic")) == (3, 3, 3)


def test_a_part_over_two_machines_counts_its_ranks_on_each() -> None:
    pools = {"cards": 4, "policy": 6, "value": 2}
    options = {"cards": {"max_colocate_count": 2}, "policy": {"split_of": "cards"}, "value": {"split_of": "cards"}}
    roles = {"actor_rollout": "policy", "ref": "policy", "critic": "value", "rm": "value"}
    placement = resolve_placement(placed(pools, options, roles, nnodes=2))
    assert placement.pools == {"policy": (4, 2), "value": (2,)}
    assert placement.reservations == {"cards": (4, 4)}
    assert (placement.num_devices, placement.num_cpus) == (8, 16)
    assert placement.devices("value") == (Device("cards", 6), Device("cards", 7))
    assert placement.sharing() == {("policy",): (4, 2), ("value",): (2,)}


def test_what_is_on_a_device_together_is_known() -> None:
    options = {"cards": {"max_colocate_count": 2}, "half": {"split_of": "cards"}}
    pools = {"cards": 2, "half": 2}
    roles = {"actor_rollout": "cards", "ref": "half", "critic": "half", "rm": "cards"}
    assert resolve_placement(placed(pools, options, roles, nnodes=2)).sharing() == {
        ("cards", "half"): (2,),
        ("cards",): (2,),
    }


def test_pools_on_cpus_have_no_gpus() -> None:
    placement = resolve_placement(compose_cli(["recipe=ppo", *WITH_RM, "placement=cpu_scorers"]))
    assert (placement.num_gpus, placement.num_devices) == (1, 2)
    shared = resolve_placement(compose_cli(["recipe=ppo", *WITH_RM, "placement=shared", "trainer.n_gpus_per_node=2"]))
    assert (shared.num_gpus, shared.num_devices) == (2, 2)


def test_merged_devices_hold_what_is_on_their_parts_too() -> None:
    assert picture("placement=merged") == {
        "large (on large): device 0": "actor_rollout 0 | critic 0",
        "small (on small): device 0": "actor_rollout 1 | ref 0 + rm 0",
    }
    assert picture("placement=merged", "trainer.nnodes=2")["small, machine 2 (on small): device 0"] == (
        "actor_rollout 3 | ref 1 + rm 1"
    )


def test_pools_without_options_are_what_they_were() -> None:
    placement = resolve_placement(compose_cli(["recipe=ppo", "placement=separate", "trainer.n_gpus_per_node=2"]))
    assert placement.reservations == placement.pools and not placement.places
    assert placement.num_devices == placement.num_cpus == sum(map(sum, placement.pools.values())) == 8


# ---------------------------------------------------------------------------------------------- what can't be

CARDS = {"actor_rollout": "cards", "ref": "more", "critic": "cards", "rm": "cards"}


@pytest.mark.parametrize(
    ("pools", "options", "roles", "key", "says"),
    [
        (
            {"cards": [2], "more": 3},
            {"more": {"split_of": "cards"}},
            CARDS,
            "resource_pools.more",
            "split off pool 'cards', which has 2 ranks left for it. Give it at most 2",
        ),
        (
            {"cards": [3], "a": 2, "more": 2},
            {"a": {"split_of": "cards"}, "more": {"split_of": "cards"}},
            CARDS,
            "resource_pools.more",
            "which has 1 of its 3 ranks left for it",
        ),
        (
            {"cards": [2], "more": 2},
            {"more": {"split_of": "cards"}},
            CARDS,
            "pool_options.cards.max_colocate_count",
            "2 processes are on its device 0, of the pools cards, more. Set it to 2: each process then has 1/2",
        ),
        (
            {"cards": [2]},
            {"crads": {"use_gpu": False}},
            {},
            "pool_options.crads",
            "is no pool of trainer.resource_pools. Did you mean cards?",
        ),
        (
            {"cards": [2], "more": 2},
            {"more": {"split_of": "other"}},
            CARDS,
            "pool_options.more.split_of",
            "names the pool 'other', which there is not. Pools are cards, more",
        ),
        (
            {"cards": [2], "more": 2},
            {"more": {"split_of": "more"}},
            CARDS,
            "pool_options.more.split_of",
            "is itself made of it",
        ),
        (
            {"cards": [2], "more": 2},
            {"more": {"split_of": "cards"}, "cards": {"split_of": "more"}},
            CARDS,
            "pool_options.more.split_of",
            "itself",
        ),
        (
            {"cards": [2], "more": 2, "c": 1},
            {"more": {"split_of": "cards"}, "c": {"split_of": "more"}},
            CARDS,
            "pool_options.c.split_of",
            "names 'more', which is a part itself",
        ),
        (
            {"cards": [2], "more": 2},
            {"more": {"split_of": "cards", "merge_of": ["cards"]}},
            CARDS,
            "pool_options.more",
            "has split_of beside merge_of",
        ),
        (
            {"cards": [2]},
            {"more": {"merge_of": ["cards"]}},
            CARDS,
            "pool_options.more.merge_of",
            "is [cards]. Name two different pools",
        ),
        (
            {"cards": [2], "b": [1]},
            {"b": {"use_gpu": False}, "more": {"merge_of": ["cards", "b"]}},
            CARDS,
            "pool_options.more.merge_of",
            "joins pools whose use_gpu differs: true in cards, false in b",
        ),
        (
            {"cards": [2], "b": [1], "more": [2]},
            {"more": {"merge_of": ["cards", "b"]}},
            CARDS,
            "resource_pools.more",
            "has 2 processes, and the pools it is merged of have 3. Leave it out",
        ),
        (
            {"cards": [2], "more": 1},
            {"more": {"split_of": "cards", "max_colocate_count": 2}},
            CARDS,
            "pool_options.more.max_colocate_count",
            "belongs to the pool whose devices it takes, cards",
        ),
        (
            {"cards": [1, 1], "more": 1},
            {"cards": {"nodes": ["a", "b", "c"]}},
            CARDS,
            "pool_options.cards.nodes",
            "names 3 nodes, and the pool has processes on 2 machine(s)",
        ),
        (
            {"cards": [1], "more": 1},
            {"cards": {"use_gpu": False}},
            CARDS,
            "role_pools.actor_rollout",
            "is 'cards', whose processes have no GPU",
        ),
        (
            {"cards": [1], "more": 1},
            {"cards": {"max_colocate_count": 2}, "more": {"split_of": "cards"}},
            {"actor": "cards", "rollout": "more", "ref": "cards"},
            "role_pools.actor",
            "are pools with the same devices, 'cards' and 'more'. Name one pool for both",
        ),
    ],
)
def test_what_can_not_be_placed_is_one_error_with_pool_and_key(
    pools: dict[str, Any], options: dict[str, Any], roles: dict[str, str], key: str, says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        placed(pools, options, roles)
    (problem,) = [one for one in raised.value.problems if one.key == f"trainer.{key}"]
    assert says in f"{problem.what} {problem.hint}"


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        (
            {"max_colocate_cuont": 3},
            "cards.max_colocate_cuont",
            "is not a key of hrl. Did you mean max_colocate_count?",
        ),
        (
            {"num_gpus": 0.5},
            "cards.num_gpus",
            "is not a key of hrl. trainer.pool_options.cards has max_colocate_count, use_gpu, accelerator_type, nodes,",
        ),
        ({"max_colocate_count": -2}, "cards.max_colocate_count", "is -2, must be more than 0"),
        ({"max_colocate_count": 0.5}, "cards.max_colocate_count", "is 0.5, expected a whole number"),
        ({"use_gpu": "maybe"}, "cards.use_gpu", "is 'maybe'"),
        ({"nodes": [""]}, "cards.nodes", "[0] is empty, expected text"),
        ({"accelerator_type": ""}, "cards.accelerator_type", "is empty, expected text"),
        ({"split_of": ["cards"]}, "cards.split_of", "is ['cards'], expected text"),
        ({"merge_of": 3}, "cards.merge_of", "is 3, expected a list"),
        (3, "cards", "is 3, expected a section with keys below it"),
    ],
)
def test_a_wrong_option_is_the_only_problem_and_named_as_it_is_written(options: Any, key: str, says: str) -> None:
    """Pools that would follow from it are not missed."""
    roles = {"actor_rollout": "policy", "ref": "policy", "critic": "policy", "rm": "policy"}
    with pytest.raises(ConfigError) as raised:
        placed({"cards": [1]}, {"cards": options, "policy": {"split_of": "cards"}}, roles)
    (problem,) = raised.value.problems
    assert problem.key == f"trainer.pool_options.{key}"
    assert says in f"{problem.what} {problem.hint}"


def test_a_circle_of_pools_is_told_once() -> None:
    roles = {"actor_rollout": "a"}
    for options in (
        {"a": {"split_of": "b"}, "b": {"split_of": "c"}, "c": {"split_of": "a"}},
        {"a": {"merge_of": ["b", "c"]}, "b": {"merge_of": ["a", "c"]}},
        {"d": {"merge_of": ["a", "e"]}, "e": {"merge_of": ["b", "d"]}},  # of which neither has a size
    ):
        with pytest.raises(ConfigError) as raised:
            placed({"a": 1, "b": 1, "c": 1}, options, roles)
        (problem,) = raised.value.problems
        assert problem.what.endswith("which is itself made of it."), problem


def test_every_wrong_option_has_a_line() -> None:
    with pytest.raises(ConfigError) as raised:
        placed({"a": [1], "b": [1]}, {"a": {"use_gpus": True}, "b": {"node": "x"}}, {"actor_rollout": "a"})
    assert [problem.hint for problem in raised.value.problems] == ["Did you mean use_gpu?", "Did you mean nodes?"]


def test_sizes_that_engines_do_not_divide_name_the_key() -> None:
    pools, options = {"cards": [3], "policy": 3}, {"policy": {"split_of": "cards"}}
    trainer = {"resource_pools": pools, "pool_options": options, "role_pools": {"actor_rollout": "policy"}}
    rollout = {"actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": 2}}}
    with pytest.raises(ConfigError, match="tensor_model_parallel_size is 2, which does not divide the 3 rollout proc"):
        load_config({**PPO, **rollout, "trainer": trainer})
