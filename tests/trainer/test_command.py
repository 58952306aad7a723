"""How a run ends, as its caller sees it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hrl.single_controller.worker_errors import WorkerError
from hrl.trainer.command import exit_status
from hrl.workers.engine.nonfinite import NonFiniteStepError


@pytest.fixture
def config(tmp_path):
    return SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(tmp_path)))


def fail(cause: Exception | None) -> None:
    raise WorkerError(2, "actor.update_actor", "update_actor", str(cause)) from cause


@pytest.mark.parametrize(
    "cause, status", [(NonFiniteStepError("3 optimizer steps in a row"), 3), (ValueError("bad"), 1), (None, 1)]
)
def test_steps_that_are_not_finite_have_an_exit_status_of_their_own(config, capsys, cause, status):
    assert exit_status(config, lambda: fail(cause)) == status
    assert "rank 2: actor.update_actor" in capsys.readouterr().err
