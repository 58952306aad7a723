"""Weights in 4 bits without their package are refused before anything starts."""

from __future__ import annotations

import pytest

from hrl.config import compose_cli
from hrl.config.outline import outline_of
from hrl.preflight import machine_look
from hrl.preflight.findings import Findings

MODEL = "actor_rollout_ref.model"


@pytest.mark.parametrize("is_here", [False, True])
def test_a_missing_package_is_named_with_the_key_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    monkeypatch.setattr(machine_look, "find_spec", lambda name: object() if is_here else None)
    config = compose_cli([f"{MODEL}.lora_rank=4", f"{MODEL}.load_in_4bit=true"])
    findings = Findings()
    machine_look.look_at_4_bits(findings, outline_of(config))
    said = [(problem.key, problem.what) for problem in findings.problems]
    wanted = (f"{MODEL}.load_in_4bit", "is true, which needs the package bitsandbytes; it is not here.")
    assert said == ([] if is_here else [wanted])
