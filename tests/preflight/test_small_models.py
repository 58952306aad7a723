"""A learning rate that nobody set and that is far too low for a small model is told, by a check as by a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS
from hrl.preflight.findings import Findings
from hrl.preflight.preflight import inspect_run
from hrl.preflight.small_models import look_at_rate
from tests.preflight.small_run import small_run

LR = "actor_rollout_ref.actor.optim.lr"
MODEL = "actor_rollout_ref.model.path"


def told(kind: str, *words: str) -> list[str]:
    findings = Findings()
    look_at_rate(findings, compose_kind(KINDS[kind], ["data.train_files=rows.jsonl", *words]))
    return findings.notes


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("hrl.preflight.machine_look.gpus_here", lambda: request.param)


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_a_default_that_hardly_changes_a_small_model_is_told_with_the_key() -> None:
    note = f"{LR}=1e-06, the default, hardly changes a small model; the quickstart sets 2e-05"
    assert told("ppo") == told("ppo", f"{MODEL}=some/model") == [note]
    (of_pairs,) = told("dpo")
    assert of_pairs == "optim.lr=1e-06, the default, hardly changes a small model; the quickstart sets 3e-05"
    assert told("sft") == [], "1e-5 is half of the quickstart's"


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "words",
    [
        [f"{LR}=5e-6"],
        [f"{LR}=1e-6"],  # the default, chosen
        ["quickstart=ppo"],
        ["trainer.total_training_steps=0"],
        [f"{MODEL}=some/model", "trainer.device=cuda"],
    ],
)
def test_nothing_is_said_where_it_was_chosen_or_does_not_matter(words: list[str]) -> None:
    assert told("ppo", *words) == []


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_with_a_gpu_only_a_bundled_model_is_known_to_be_small() -> None:
    assert told("ppo", f"{MODEL}=some/model") == []
    assert len(told("ppo")) == 1


def test_a_check_and_a_run_say_it(tmp_path: Path) -> None:
    words = [*small_run(tmp_path), "trainer.device=cpu"]
    unset = [word for word in words if not word.startswith(f"{LR}=")]
    for arguments, is_told in ((unset, True), ([*unset, f"{LR}=1e-6"], False)):
        _, findings = inspect_run(compose_kind(KINDS["ppo"], arguments), download=False)
        assert any(note.startswith(f"{LR}=1e-06, the default") for note in findings.notes) is is_told
