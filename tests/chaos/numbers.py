"""Numbers that are not finite, and bits that flip in the memory of a rank.

Runs are in this process, with a real model, engine and optimizer; `exit_status` says what a command would have ended
with.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hrl.config import compose_cli
from hrl.report.run_folder import read_jsonl
from hrl.trainer.command import exit_status
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.workers import policy
from hrl.workers.policy import Policy
from tests.chaos import small
from tests.chaos.faults import Fault, Outcome
from tests.runs.in_process import in_process, run_configured
from tests.runs.runner import TWO_ROWS

NAN = math.nan
STEPS = 4
Poison = Callable[[pytest.MonkeyPatch], None]


def run(folder: Path, poison: Poison, *overrides: str) -> tuple[int, str]:
    """Return the exit status of a poisoned run, and what standard error has."""
    here = ("actor_rollout_ref.rollout.name=hf", "trainer.device=cpu", f"trainer.total_training_steps={STEPS}")
    config = compose_cli(small.runner().arguments(folder / "run", *TWO_ROWS, *here, *overrides))
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, in_process(), contextlib.redirect_stderr(said):
        poison(patch)
        status = exit_status(config, lambda: run_configured("ppo", config))
    return status, said.getvalue().strip()


def _ended(folder: Path, poison: Poison, status: int, *named: str, overrides: tuple[str, ...] = ()) -> Outcome:
    """Judge a run that has to end with this status and a message with these words."""
    began = time.monotonic()
    got, said = run(folder, poison, *overrides)
    line = next((line for line in said.splitlines() if "Error: " in line), said[-200:])
    missing = [word for word in named if word not in said]
    score = 0 if got != status else 1 if missing else 2
    return Outcome(score, time.monotonic() - began, line if score == 2 else f"status {got}, without {missing}: {line}")


def _columns(method: str, column: str, value: float, step: int | None = None) -> Poison:
    """Poison a column that a phase of the driver returns; in all steps, or one."""

    def poison(patch: pytest.MonkeyPatch) -> None:
        made = getattr(RayPPOTrainer, method)

        def poisoned(trainer: Any, batch: Any, *args: Any, **named: Any) -> Any:
            batch = made(trainer, batch, *args, **named)
            if step in (None, trainer.global_steps):
                batch.batch[column][1, 0] = value
            return batch

        patch.setattr(RayPPOTrainer, method, poisoned)

    return poison


def _before_update(step: int, change: Callable[[Policy], None]) -> Poison:
    """Change a rank's memory just before an update."""

    def poison(patch: pytest.MonkeyPatch) -> None:
        update = Policy.update

        def poisoned(self: Policy, batch: Any, request: Any) -> Any:
            if request.step == step:
                change(self)
            return update(self, batch, request)

        patch.setattr(Policy, "update", poisoned)

    return poison


def _flip(owner: Policy) -> None:
    """Flip the lowest bit of one weight."""
    weight = owner.engine.module.get_parameter("model.model.layers.0.mlp.up_proj.weight").detach()
    weight.to_local().view(-1)[:1].view(torch.uint8)[0] ^= 1


def _break_moment(owner: Policy) -> None:
    state = next(iter(owner.engine.optimizer.rule.state.values()))  # type: ignore[union-attr]
    state["exp_avg_sq"].to_local().view(-1)[0] = math.inf


def _no_loss(patch: pytest.MonkeyPatch) -> None:
    loss, names = policy._LOSSES[policy.PolicyUpdate]
    patch.setitem(policy._LOSSES, policy.PolicyUpdate, (lambda *args: loss(*args) * NAN, names))


def _goes_on(folder: Path) -> Outcome:
    """One batch is left out, and the run goes on without it."""
    began = time.monotonic()
    status, said = run(folder, _columns("compute_advantage", "advantages", -math.inf, step=2))
    records = read_jsonl(folder / "run" / "metrics.jsonl")
    left_out = [record["nonfinite/batches"] for record in records]
    kept = folder / "run" / "nonfinite" / "step_2.adv.json"
    score = 2 if (status, left_out, kept.exists()) == (0, [0, 1, 0, 0], True) else 0
    return Outcome(score, time.monotonic() - began, f"nonfinite/batches {left_out}, rows in {kept.name} {said}".strip())


KIND = "a number that is not finite"
FLIPPED = "a bit flipped in a rank's memory"
FAULTS: list[Fault] = [
    Fault(KIND, "an infinite advantage in one step", _goes_on, is_quick=True),
    Fault(
        KIND,
        "NaN in the sampler's log-probs of every step",
        lambda folder: _ended(
            folder, _columns("compute_reward", "rollout_log_probs", NAN), 3, "rollout_log_probs is nan in row 1", "uid"
        ),
    ),
    Fault(
        KIND,
        "NaN in every loss",
        lambda folder: _ended(folder, _no_loss, 3, "3 optimizer steps in a row", "step_3_rank_0.actor-0.json"),
        is_quick=True,
    ),
    Fault(
        KIND,
        "an infinite moment of the optimizer",
        lambda folder: _ended(folder, _before_update(2, _break_moment), 3, "update actor of step 2", "exp_avg_sq of"),
    ),
    Fault(
        FLIPPED,
        "a weight between two updates",
        lambda folder: _ended(
            folder,
            _before_update(3, _flip),
            1,
            "weights of rank 0 changed outside of an update",
            "layers.0.mlp.up_proj.weight",
            "the same command continues after step 2",
            overrides=("trainer.save_freq=2",),
        ),
        is_quick=True,
    ),
]
