"""Rules of where roles run: what can't work is refused with the nearest numbers that can."""

from __future__ import annotations

import pytest

from tests.config.refusals import names, require_refused

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

CASES = [
    (
        {f"{ROLLOUT}.tensor_model_parallel_size": 3, "trainer.n_gpus_per_node": 8},
        f"{ROLLOUT}.tensor_model_parallel_size is 3, which does not divide the 8 rollout processes. "
        "Nearest that do: 2 and 4.",
    ),
    ({f"{ACTOR}.fsdp_config.fsdp_size": 3, "trainer.n_gpus_per_node": 4}, f"{ACTOR}.fsdp_config.fsdp_size is 3"),
    (
        {f"{ACTOR}.ulysses_sequence_parallel_size": 3, "trainer.n_gpus_per_node": 8},
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size is 3, which does not divide the 8 processes of "
        "actor_rollout. Nearest that do: 2 and 4; or start a multiple of 3 processes (trainer.n_gpus_per_node).",
    ),
    (
        {"algorithm.adv_estimator": "gae", "critic.ulysses_sequence_parallel_size": 4, "trainer.n_gpus_per_node": 2},
        "critic.model.fsdp_config.ulysses_sequence_parallel_size is 4, which does not divide the 2 processes",
    ),
    (
        {f"{ACTOR}.tensor_parallel_size": 4, f"{ACTOR}.fsdp_config.fsdp_size": 2, "trainer.n_gpus_per_node": 8},
        f"{ACTOR}.fsdp_config.tensor_parallel_size is 4, which does not divide the 2 processes of actor_rollout that "
        "share a copy of the model. Nearest that do: 2; or start a multiple of 4 processes.",
    ),
    (
        {f"{ACTOR}.expert_parallel_size": 3, "trainer.n_gpus_per_node": 4},
        f"{ACTOR}.fsdp_config.expert_parallel_size is 3, which does not divide the 4 processes",
    ),
    (
        {f"{ACTOR}.{kind}_parallel_size": 2 for kind in ("tensor", "expert")} | {"trainer.n_gpus_per_node": 2},
        "a tensor group shares out experts itself. Set one of the two to 1.",
    ),
    (
        {f"{ACTOR}.{kind}_parallel_size": 2 for kind in ("tensor", "ulysses_sequence")}
        | {"trainer.n_gpus_per_node": 4},
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size is 2: a row has one kind of group.",
    ),
    (
        {
            f"{ACTOR}.tensor_parallel_size": 2,
            f"{ACTOR}.fsdp_config.model_dtype": "bf16",
            "trainer.n_gpus_per_node": 2,
        },
        f"masters in bf16 are rounded by whole rows, which tensor groups cut. Set {ACTOR}.fsdp_config.model_dtype=",
    ),
    ({"trainer.role_pools": {"actr": "global"}}, "trainer.role_pools.actr is not a role. Did you mean actor?"),
    ({"trainer.role_pools": {"ref": None}}, "trainer.role_pools.ref is null, which only the actor can be"),
    ({"trainer.role_pools": {"actor": None}}, "Set trainer.total_training_steps=0 and trainer.resume_mode=disable"),
    ({"trainer.role_pools": {"ref": "other"}}, "trainer.role_pools.ref names the pool 'other'"),
    ({"trainer.role_pools": {"actor_rollout": "global", "actor": "global"}}, "beside actor or rollout"),
    ({"trainer.resource_pools": {}}, "trainer.resource_pools has no pool."),
]


@pytest.mark.parametrize(("given", "sentence"), CASES, ids=names(CASES))
def test_what_cannot_work_is_refused(given, sentence):
    require_refused(given, sentence)
