"""What a signal leaves of a run in this process, and how the run goes on from it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hrl.processes import signals
from hrl.trainer.main_ppo import main
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs.in_process import in_process
from tests.runs.runner import Runner

pytestmark = pytest.mark.cluster

SMALL = (
    "trainer.device=cpu",
    "actor_rollout_ref.rollout.name=hf",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "data.max_response_length=4",
)


@pytest.fixture(scope="module", autouse=True)
def _here() -> Iterator[None]:
    with in_process():
        yield


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has something done in a phase of a step."""

    def at(step: int, method: str, act: Callable[[], None]) -> None:
        whole = getattr(RayPPOTrainer, method)

        def acting(self: RayPPOTrainer, *args: Any, **named: Any) -> Any:
            if self.global_steps == step:
                act()
            return whole(self, *args, **named)

        monkeypatch.setattr(RayPPOTrainer, method, acting)

    return at


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def twice() -> None:
    terminate()
    time.sleep(signals._ONE_REQUEST_S + 0.1)
    terminate()


def for_ever() -> None:
    """Has a signal come in what would take longer than any grace."""
    terminate()
    time.sleep(60)


def log(folder: Path) -> list[dict[str, Any]]:
    """The metrics without times and rates, which no two runs have in common."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name.startswith(("actor/", "critic/", "response", "step"))}
        for record in records
    ]


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*step_*"))


@pytest.fixture(scope="module")
def straight(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("straight")
    assert main(runner.arguments(folder, *SMALL)) == 0
    return log(folder)


def test_a_run_without_checkpoints_is_saved_after_its_step_and_goes_on_as_if_nothing_had_been(
    runner: Runner,
    straight: list[dict[str, Any]],
    at: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at(2, "generate", terminate)
    assert main(runner.arguments(tmp_path, *SMALL)) == 75
    said = capsys.readouterr()
    assert "SIGTERM: stopping after step 2, saved; again to stop now" in said.out
    assert said.err.endswith("stopped after step 2\nthe same command continues after step 2\n")
    assert steps(tmp_path) == ["step_2"] and log(tmp_path) == straight[:2]
    assert not (tmp_path / "model").exists()
    monkeypatch.undo()
    assert main(runner.arguments(tmp_path, *SMALL)) == 0
    assert log(tmp_path) == straight


def test_a_second_signal_ends_the_run_in_its_step_and_promises_no_more_than_is_there(
    runner: Runner, at: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at(2, "compute_advantage", twice)
    assert main(runner.arguments(tmp_path, *SMALL)) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted\n")
    assert steps(tmp_path) == []


def test_a_step_that_takes_longer_than_the_grace_is_given_up_for_the_one_before(
    runner: Runner,
    straight: list[dict[str, Any]],
    at: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at(3, "compute_advantage", for_ever)
    assert main(runner.arguments(tmp_path, *SMALL, "trainer.grace_s=1")) == 75
    said = capsys.readouterr()
    assert (
        "step 3 is given up: it is not done within 75% of trainer.grace_s=1; the run is saved as it was after 2"
        in said.out
    )
    assert "the same command continues after step 2" in said.err
    monkeypatch.undo()
    assert main(runner.arguments(tmp_path, *SMALL)) == 0
    assert log(tmp_path) == straight


def test_a_step_that_has_begun_to_learn_is_lost_and_said_to_be(
    runner: Runner, at: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at(3, "update_actor", for_ever)
    assert main(runner.arguments(tmp_path, *SMALL, "trainer.grace_s=1", "trainer.save_freq=1")) == 75
    said = capsys.readouterr()
    assert "step 3 is lost: it is not done within 75% of trainer.grace_s=1, and has begun to change" in said.out
    assert "the same command continues after step 2" in said.err
    assert steps(tmp_path) == ["step_1", "step_2"]
