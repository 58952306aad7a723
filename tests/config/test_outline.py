"""What both schemas say about models, lengths and processes comes out under one name."""

from __future__ import annotations

from typing import Any

import pytest

from hrl.config.load import load_kind
from hrl.config.outline import Outline, outline_of
from hrl.config.run_kind import KINDS


def outline(kind: str, **keys: Any) -> Outline:
    return outline_of(load_kind(KINDS[kind], keys))


def test_a_ppo_run_reads_the_models_that_it_needs_the_policy_first() -> None:
    assert list(outline("ppo").models) == ["actor"]
    rewarded = outline(
        "ppo",
        algorithm={"adv_estimator": "gae"},
        critic={"model": {"path": "/critic", "override_config": {"x": 1}}},
        reward={"reward_model": {"enable": True, "model_path": "/judge"}},
    ).models
    assert [(role, model.key, model.is_scalar) for role, model in rewarded.items()] == [
        ("actor", "actor_rollout_ref.model.path", False),
        ("critic", "critic.model.path", True),
        ("rm", "reward.reward_model.model_path", True),
    ]
    assert (rewarded["critic"].path, rewarded["critic"].override_config, rewarded["rm"].path) == (
        "/critic", {"x": 1}, "/judge",
    )  # fmt: skip


def test_a_model_is_opened_for_what_the_rollout_says_and_rows_are_as_long_as_the_data_says() -> None:
    data = {"max_prompt_length": 30, "max_response_length": 12}
    plain = outline("ppo", data=data).lengths
    assert (plain.total, plain.model) == (42, 42)
    longer = outline("ppo", data=data, actor_rollout_ref={"rollout": {"max_model_len": 64}}).lengths
    assert (longer.total, longer.model) == (42, 64)


@pytest.mark.parametrize(("kind", "role"), [("dpo", "actor"), ("sft", "actor"), ("rm", "rm")])
def test_an_offline_run_is_one_model_on_one_pool(kind: str, role: str) -> None:
    found = outline(kind, data={"max_length": 77}, trainer={"nnodes": 3, "n_gpus_per_node": 2})
    ((name, model),) = found.models.items()
    assert (name, model.key, model.is_scalar) == (role, "model.path", kind == "rm")
    assert found.placement.roles == {role: "global"}
    assert (found.num_processes, found.most_processes_on_a_node) == (6, 2)
    assert {found.lengths.total, found.lengths.model} == {77}
