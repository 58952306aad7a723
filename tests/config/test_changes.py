"""What is told of a configuration that is another one than that of the run that is continued."""

from __future__ import annotations

import json
from typing import Any

from hrl.config import compose_cli
from hrl.config.changes import Change, changes

LR = "actor_rollout_ref.actor.optim.lr"


def told(before: list[str], after: list[str]) -> list[str]:
    saved: dict[str, Any] = json.loads(json.dumps(compose_cli(before).model_dump(mode="json")))
    return [str(each) for each in changes(saved, compose_cli(after))]


def test_every_kind_of_value_is_told_old_and_new() -> None:
    after = [
        f"{LR}=0.5",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.actor.clip_ratio_high=0.4",
        "algorithm.adv_estimator=rloo",
        "reward.shaping={clip: 2.0}",
        "trainer.n_gpus_per_node=2",
    ]
    assert sorted(told([f"{LR}=0.25", "reward.shaping={clip: 1.0}"], after)) == [
        "actor_rollout_ref.actor.clip_ratio_high: null → 0.4",
        f"{LR}: 0.25 → 0.5",
        "actor_rollout_ref.rollout.temperature: 1.0 → 0.7",
        'algorithm.adv_estimator: "grpo" → "rloo"',
        "reward.shaping.clip: 1.0 → 2.0",
        "trainer.n_gpus_per_node: 1 → 2",
        "trainer.resource_pools.global: [1] → [2]",
    ]


def test_the_same_command_changes_nothing_wherever_it_is_shown() -> None:
    shown = ["trainer.logger=[console,file]", "trainer.experiment_name=again", "trainer.default_local_dir=/elsewhere"]
    assert told([], shown) == []


def test_a_key_that_the_other_version_lacked_counts_where_it_is_not_at_its_default() -> None:
    saved = json.loads(json.dumps(compose_cli([]).model_dump(mode="json")))
    del saved["algorithm"]["gamma"], saved["algorithm"]["lam"]
    saved["algorithm"]["of_old"] = 3
    found = [str(each) for each in changes(saved, compose_cli(["algorithm.gamma=0.5"]))]
    assert found == ["algorithm.gamma: 1.0 → 0.5", "algorithm.of_old: 3 → null"]


def test_a_long_value_is_shown_where_it_differs() -> None:
    old, new = "/data/" + "x" * 200 + "/one.parquet", "/data/" + "x" * 200 + "/two.parquet"
    shown = str(Change("data.train_files", [old], [new]))
    assert "one.parquet" in shown and "two.parquet" in shown and len(shown) < 180


def test_what_is_masked_on_either_side_is_told_as_not_compared() -> None:
    kwargs = "reward.custom_reward_function.reward_kwargs"
    after = ["trainer.secrets=[customer]", f"+{kwargs}={{customer: canary-2, table: {{least: 1}}}}"]
    saved = json.loads(json.dumps(compose_cli(after).model_dump(mode="json")))
    saved["reward"]["custom_reward_function"]["reward_kwargs"] = {"customer": "<masked>", "table": {"least": 0}}
    saved["actor_rollout_ref"]["model"]["path"] = "/models/<masked>"  # as an earlier version of hrl saved some paths
    assert [str(each) for each in changes(saved, compose_cli(after))] == [
        "actor_rollout_ref.model.path: masked, not compared",
        f"{kwargs}.customer: masked, not compared",
        f"{kwargs}.table.least: 0 → 1",
    ]
