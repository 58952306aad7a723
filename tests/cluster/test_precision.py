"""Which dtype `auto` becomes."""

from __future__ import annotations

import pytest
import torch

from hrl.cluster.precision import fastest_dtype, with_dtypes
from hrl.config import compose_cli


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_f": True, "amx_bf16": True}, "bfloat16"),
        ({"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        ({"architecture": "arm", "bf16": True}, "bfloat16"),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, "float32"),
        ({}, "float32"),
    ],
)
def test_a_cpu_takes_bfloat16_where_it_has_instructions_for_it(capabilities, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert fastest_dtype("cpu") == dtype
    assert fastest_dtype("cuda") == "bfloat16"


def test_every_role_gets_the_dtype_and_a_set_one_stays(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    config = compose_cli(["recipe=ppo", "actor_rollout_ref.ref.fsdp_config.dtype=bfloat16"])
    roles = with_dtypes(config, "cpu").actor_rollout_ref
    assert (roles.actor.fsdp_config.dtype, roles.rollout.dtype, roles.ref.fsdp_config.dtype) == (
        "float32",
        "float32",
        "bfloat16",
    )
    assert with_dtypes(config, "cpu").critic.model.fsdp_config.dtype == "float32"
    assert config.actor_rollout_ref.rollout.dtype == "auto"
