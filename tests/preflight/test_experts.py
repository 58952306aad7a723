"""What is asked of a model's experts is refused before a run starts, where the model has none."""

from __future__ import annotations

from pathlib import Path

from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS
from hrl.preflight.preflight import inspect_run
from tests.preflight.small_run import small_run

ACTOR = "actor_rollout_ref.actor"


def test_a_dense_model_has_no_experts_to_replay_or_balance(tmp_path: Path) -> None:
    asked = (f"{ACTOR}.router_replay.mode=R2", f"{ACTOR}.router_aux_loss_coef=0.01")
    config = compose_kind(KINDS["ppo"], [*small_run(tmp_path), "trainer.device=cpu", *asked])
    _, findings = inspect_run(config, download=False)
    why = "but llama does not allow that: it has no layer with experts that transformers' own interface runs."
    problems = {problem.key: problem for problem in findings.problems}
    assert problems[f"{ACTOR}.router_replay.mode"].what == f"is R2, {why}"
    assert problems[f"{ACTOR}.router_aux_loss_coef"].what == f"is 0.01, {why}"
    assert problems[f"{ACTOR}.router_replay.mode"].hint.startswith("Set it to disabled; docs/experts.md says")
