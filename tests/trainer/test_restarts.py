"""A parent process that starts a run again: when, how often, and what it passes on. The runs are a few lines here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hrl.cluster.checkpoints import CheckpointError
from hrl.cluster.manifest import Manifest
from hrl.config import compose_cli
from hrl.errors import HrlError, may_pass
from hrl.processes.signals import ENDING
from hrl.reward.actor import RewardError, RewardServiceError
from hrl.single_controller.worker_errors import ClusterLostError, WorkerDiedError, WorkerError, WorkerTimeoutError
from hrl.trainer.command import _resuming
from hrl.trainer.restarts import Attempt, Supervisor
from hrl.workers.engine.nonfinite import NonFiniteStepError
from hrl.workers.rollout.base import EngineDeadError, RolloutError

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from hrl.errors import HrlError
from hrl.processes.signals import StopRequest
from hrl.trainer.restarts import Supervisor

class Fault(HrlError):
    may_pass = True

def step(number):
    with open(folder / "metrics.jsonl", "a") as log:
        log.write(json.dumps({"step": number}) + "\\n")

def fail(error, status=1):
    attempt.failed(error)
    sys.exit(status)

folder = Path(sys.argv[1])
trainer = SimpleNamespace(max_restarts=int(sys.argv[2]), default_local_dir=str(folder))
def wait(seconds):
    print(f"pause {seconds:g}", flush=True)
attempt = Supervisor(trainer, wait).run()
if isinstance(attempt, int):
    assert "torch" not in sys.modules
    sys.exit(attempt)
print(f"run {attempt.restarts}", flush=True)
"""


def supervised(folder: Path, most: int, run: str, head: str = HEAD) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", head + run, str(folder), str(most)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass
class Told:
    status: int
    said: str
    pauses: list[float]
    starts: int


class Fault(HrlError):
    may_pass = True


def ended(folder: Path, most: int, run: Callable[[Attempt, Callable[[int], None]], int]) -> Told:
    """What the parent did about a run, a function of what it is and of how it logs a step."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    trainer: Any = SimpleNamespace(max_restarts=most, default_local_dir=str(folder))
    told = Told(-1, "", [], 0)

    def say(text: str) -> None:
        told.said += text

    def step(number: int) -> None:
        with (folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"step": number}) + "\n")

    try:
        attempt = Supervisor(trainer, told.pauses.append, say).run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if isinstance(attempt, Attempt):
        with (folder / "starts").open("a") as starts:
            starts.write(f"{attempt.restarts}\n")
        os._exit(run(attempt, step))
    told.status = attempt
    told.starts = (folder / "starts").read_text().count("\n")
    return told


def failing(error: Exception, status: int = 1, *, moves: bool = False) -> Callable[..., int]:
    def run(attempt: Attempt, step: Callable[[int], None]) -> int:
        step(attempt.restarts + 1 if moves else 1)
        attempt.failed(type(error)(f"{error} {attempt.restarts}\nand more"))
        return status

    return run


def test_a_run_that_gets_further_is_started_again_after_pauses_that_grow_and_its_status_is_the_commands(
    tmp_path: Path,
) -> None:
    def run(attempt: Attempt, step: Callable[[int], None]) -> int:
        return 0 if attempt.restarts == 3 else failing(Fault("rank"), moves=True)(attempt, step)

    told = ended(tmp_path, 5, run)
    assert (told.status, told.starts, told.pauses) == (0, 4, [5, 10, 20])
    assert told.said.splitlines()[:2] == [
        "a machine failed: Fault: rank 0",
        "restart 1 of 5 (trainer.max_restarts) in 5 s, at the beginning",
    ]


def test_a_folder_that_cannot_be_read_when_a_run_has_ended_counts_as_no_progress(tmp_path: Path) -> None:
    """The next start says what is wrong with it."""

    def unmounts(attempt: Attempt, step: Callable[[int], None]) -> int:
        if not attempt.restarts:
            step(3)
            (tmp_path / "checkpoints").symlink_to("/not/mounted")
            (tmp_path / "metrics.jsonl").rename(tmp_path / "kept")
            (tmp_path / "metrics.jsonl").mkdir()
        attempt.failed(Fault("rank"))
        return 1

    told = ended(tmp_path, 5, unmounts)
    assert (told.status, told.starts, told.pauses) == (1, 2, [5])
    assert "not started again: it failed twice with no new step between" in told.said


@pytest.mark.parametrize("letter", ["\N{GOTHIC LETTER AHSA}", "\udc80"], ids=["astral", "lone surrogate"])
def test_an_error_in_any_script_reaches_the_parent(tmp_path: Path, letter: str) -> None:
    told = ended(tmp_path, 1, failing(Fault(letter * 600)))
    assert f"a machine failed: Fault: {letter * 493}\n" in told.said


def test_pauses_have_an_upper_end(tmp_path: Path) -> None:
    told = ended(tmp_path, 8, failing(Fault("rank"), moves=True))
    assert told.pauses == [5, 10, 20, 40, 80, 160, 300, 300]


@pytest.mark.parametrize(
    ("most", "run", "starts", "said"),
    [
        (
            5,
            failing(Fault("failure")),
            2,
            "not started again: it failed twice with no new step between\n"
            "  1. Fault: failure 0\n  2. Fault: failure 1\n",
        ),
        (
            1,
            failing(Fault("failure"), moves=True),
            2,
            "not started again: trainer.max_restarts=1 is used up, and the last failure was Fault: failure 1\n",
        ),
        (5, failing(HrlError("the disk is full"), moves=True), 1, ""),
        (5, failing(HrlError("not finite"), 3, moves=True), 1, ""),
        (5, lambda attempt, step: 75, 1, ""),
    ],
    ids=["no new step", "used up", "not a machine's fault", "not finite", "stopped in order"],
)
def test_a_run_that_another_start_does_not_help_stays_ended(
    tmp_path: Path, most: int, run: Callable[..., int], starts: int, said: str
) -> None:
    told = ended(tmp_path, most, run)
    assert told.status in (1, 3, 75)
    assert told.starts == starts
    assert told.said.endswith(said) if said else not told.said


@pytest.mark.parametrize(
    ("end", "status", "named"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "the run's process was killed by SIGKILL"),
        (lambda: os._exit(1), 1, "the run's process ended with status 1 and without a word"),
    ],
    ids=["killed", "ended by a library"],
)
def test_a_run_whose_process_is_gone_is_started_again(
    tmp_path: Path, end: Callable[[], None], status: int, named: str
) -> None:
    def run(attempt: Attempt, step: Callable[[int], None]) -> int:
        step(1)
        end()
        return 0

    told = ended(tmp_path, 3, run)
    assert (told.status, told.starts) == (status, 2)
    assert f"a machine failed: {named}" in told.said


def test_a_signal_reaches_the_run_which_is_then_not_started_again(tmp_path: Path) -> None:
    run = (
        "stop = StopRequest()\nstop.install()\n"
        "with stop.in_order(lambda name: print(name, flush=True)):\n"
        "    print('steps', flush=True)\n"
        "    while not stop.is_asked: time.sleep(0.05)\n"
        "fail(Fault('a rank died while the run was ending'))\n"
    )
    process = supervised(tmp_path, 5, run)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["run 0\n", "steps\n"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=600)
    assert (out, process.returncode) == ("SIGTERM\n", 1)


def test_a_signal_in_a_pause_ends_the_command(tmp_path: Path) -> None:
    head = HEAD.replace(
        '    print(f"pause {seconds:g}", flush=True)\n', '    print("pause", flush=True)\n    time.sleep(60)\n'
    )
    process = supervised(tmp_path, 5, "step(1)\nfail(Fault('gone'))", head)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["run 0\n", "pause\n"]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert err.endswith("KeyboardInterrupt\n")  # which the command turns into its status


def test_the_run_dies_with_the_parent(tmp_path: Path) -> None:
    process = supervised(tmp_path, 5, "time.sleep(60)")
    assert process.stdout is not None
    process.stdout.readline()
    (run,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    run.wait(timeout=10)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (WorkerDiedError(0, "actor.update_actor", "update_actor", 7, "it was killed"), True),
        (WorkerTimeoutError([1], "actor.update_actor", "update_actor", 5.0), True),
        (EngineDeadError("the engine died"), True),
        (RewardServiceError("the reward service died"), True),
        (ClusterLostError("the GCS has ended"), True),
        (RolloutError("a row is too long"), False),
        (WorkerError(0, "actor.update_actor", "update_actor", "ValueError: bad"), False),
        (NonFiniteStepError("three steps"), False),
        (CheckpointError("torn"), False),
        (RewardError("compute_score raised"), False),
        (OSError(28, "No space left on device"), False),
        (HrlError("anything else"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_only_faults_of_machines_may_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
    try:
        raise WorkerError(0, "rollout.sync", "weight_sync", "it failed") from error
    except WorkerError as wrapped:
        assert may_pass(wrapped) is passes


def test_a_run_that_is_started_again_resumes_from_its_own_checkpoints_whatever_the_first_start_was_told(
    tmp_path: Path,
) -> None:
    own = tmp_path / "run"
    config = compose_cli(
        [
            "quickstart=ppo",
            f"trainer.default_local_dir={own}",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={tmp_path / 'other' / 'step_3'}",
        ]
    )
    assert _resuming(config, Attempt(1)).trainer.resume_mode == "resume_path"  # it has none of its own yet
    checkpoint = own / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    Manifest.of(checkpoint, 1).write(checkpoint)
    assert _resuming(config, Attempt(0)).trainer.resume_mode == "resume_path"
    again = _resuming(config, Attempt(1)).trainer
    assert (again.resume_mode, again.resume_from_path) == ("auto", None)
