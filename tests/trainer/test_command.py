"""How a run ends, as its caller sees it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hrl.cluster.checkpoints import CheckpointStore, state_text
from hrl.processes.signals import ENDING, RunStoppedError
from hrl.reward.combine import NonFiniteScoreError
from hrl.reward.function import RewardFunctionError
from hrl.single_controller.worker_errors import WorkerError
from hrl.trainer.command import exit_status, run_command
from hrl.trainer.restarts import Attempt, Supervisor
from hrl.workers.engine.nonfinite import NonFiniteStepError


@pytest.fixture
def config(tmp_path):
    return SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(tmp_path)))


def fail(cause: Exception | None) -> None:
    raise WorkerError(2, "actor.update_actor", "update_actor", str(cause)) from cause


@pytest.mark.parametrize(
    "cause, status",
    [
        (NonFiniteStepError("3 optimizer steps in a row"), 3),
        (NonFiniteScoreError(2, "the score of the reward model is nan", "Check the model"), 3),
        (RewardFunctionError("returned nan, which is not finite"), 1),
        (ValueError("bad"), 1),
        (None, 1),
    ],
)
def test_numbers_that_are_not_finite_have_a_status_of_their_own_but_not_those_of_a_users_function(
    config, capsys, cause, status
):
    assert exit_status(config, lambda: fail(cause)) == status
    assert "rank 2: actor.update_actor" in capsys.readouterr().err


def test_what_the_system_refuses_is_a_line_and_a_bug_a_traceback(config, capsys) -> None:
    def refused() -> None:
        raise error

    error: OSError = PermissionError(errno.EACCES, "Permission denied", "/theirs/rows.jsonl")
    assert exit_status(config, refused) == 1
    assert "/theirs/rows.jsonl: Permission denied; " in capsys.readouterr().err
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/ours")
    with pytest.raises(FileNotFoundError):
        exit_status(config, refused)


START = """
import sys
from hrl.report.console import RunConsole

class Told(RunConsole):
    def stage(self, title):
        sys.stdout.write(f"{title}: torch {'torch' in sys.modules}, ray {'ray' in sys.modules}\\n")
        raise SystemExit(0)

import hrl.report.display
hrl.report.display.display_of = lambda trainer: Told()
from hrl.trainer.main_ppo import main
main([])
"""


def test_the_first_line_comes_before_torch_is_imported() -> None:
    told = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=600, check=True).stdout
    assert told == "importing PyTorch: torch False, ray False\n"


TELLS = """
import sys
from types import SimpleNamespace

def run(kind, config, *, display, stop, **_):
    for step in range(1, 4):
        display.note(f"lr: {step} → 2")
    sys.stderr.write(f"{stop.streams.lost} lost")

sys.modules["hrl.trainer.run"] = SimpleNamespace(run=run)
from hrl.trainer.main_ppo import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("where", "logger", "restarts", "lost"),
    [
        ("a full disk", "console", 1, 1 + 3),
        ("a full disk", "console-json", 0, 2 + 3),
        ("a closed pipe", "console", 0, 0),
    ],
)
def test_a_run_goes_on_where_nobody_takes_what_it_shows(tmp_path, where, logger, restarts, lost) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    if where == "a full disk":
        os.dup2(full := os.open("/dev/full", os.O_WRONLY), writing)
        os.close(full)
    overrides = [f"logger={logger}", f"max_restarts={restarts}", f"default_local_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", TELLS, *(f"trainer.{each}" for each in overrides)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, f"{lost} lost")


STARTED_AGAIN = """
import os, sys
from types import SimpleNamespace

def run(kind, config, *, restarts, **_):
    print(f"start {restarts}")
    if not restarts:
        os._exit(1)

sys.modules["hrl.trainer.run"] = SimpleNamespace(run=run)
from hrl.trainer import main_ppo, restarts
restarts.FIRST_PAUSE_S = 0.01
sys.exit(main_ppo.main(sys.argv[1:]))
"""


def test_a_run_is_started_again_where_nobody_reads_that_it_is(tmp_path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    overrides = ["trainer.max_restarts=1", f"trainer.default_local_dir={tmp_path}"]
    command = [sys.executable, "-c", STARTED_AGAIN, *overrides]
    done = subprocess.run(command, stdout=-1, stderr=writing, text=True, timeout=600, check=False)
    os.close(writing)
    assert (done.returncode, [line for line in done.stdout.splitlines() if line.startswith("start ")]) == (
        0,
        ["start 0", "start 1"],
    )


def test_an_interruption_while_torch_is_imported_is_one_too(monkeypatch, capsys, tmp_path) -> None:
    def interrupted(self, title):
        raise KeyboardInterrupt

    monkeypatch.setattr("hrl.report.console.RunConsole.stage", interrupted)
    assert run_command("ppo", [f"trainer.default_local_dir={tmp_path}"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(
    ("is_saved", "overrides", "status", "said"),
    [
        (False, (), 75, "the same command starts again: nothing was there to be saved\n"),
        (True, (), 75, "the same command continues after step 4\n"),
        (True, ("resume_mode=disable",), 130, "trainer.resume_mode=auto continues after step 4\n"),
    ],
    ids=["of a new run", "of one with a checkpoint", "of one that would not continue it"],
)
def test_a_termination_at_the_start_loses_nothing_and_gives_the_cursor_back(
    monkeypatch, capsys, tmp_path, is_saved, overrides, status, said
) -> None:
    if is_saved:
        saved_step_4(tmp_path, ["model"])

    @contextmanager
    def terminated(self, title):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield lambda text: None
        finally:
            sys.stdout.write("cursor shown\n")

    monkeypatch.setattr("hrl.report.console.RunConsole.stage", terminated)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        given = [f"trainer.{each}" for each in (f"default_local_dir={tmp_path}", *overrides)]
        assert run_command("ppo", given) == status
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    assert (out, err) == ("cursor shown\n", f"\ninterrupted\n{said}")


def saved_step_4(folder, contents):
    store = CheckpointStore(folder / "checkpoints")
    store.begin(4)
    return store.commit(4, state_text({"step": 4, "contents": contents}))


@pytest.mark.parametrize(
    ("mode", "contents", "damage", "status", "said"),
    [
        ("auto", ["model"], False, 75, "stopped after step 4\nthe same command continues after step 4\n"),
        ("disable", ["model"], False, 130, "stopped after step 4\ntrainer.resume_mode=auto continues after step 4\n"),
        ("resume_path", ["model"], False, 130, "trainer.resume_mode=auto continues after step 4\n"),
        ("auto", ["hf_model"], False, 130, "it holds a model to use, and no run continues from it"),
        ("auto", ["model"], True, 130, "stopped after step 4\n"),
    ],
    ids=["auto", "anew", "from another run", "only a model", "damaged"],
)
def test_a_stopped_run_has_the_status_to_be_started_again_only_where_the_same_command_continues_it(
    tmp_path, capsys, mode, contents, damage, status, said
):
    final = saved_step_4(tmp_path, contents)
    if damage:
        (final / "state.json").write_text('{"step": 4}')

    def stopped() -> None:
        raise RunStoppedError(4)

    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(tmp_path), resume_mode=mode))
    assert exit_status(config, stopped) == status
    err = capsys.readouterr().err
    assert said in err
    assert ("the same command continues after step 4\n" in err) == (status == 75)


def test_what_continues_a_run_is_said_without_reading_its_checkpoints(monkeypatch, capsys, tmp_path) -> None:
    """They may be terabytes, and whoever asked twice waits."""
    saved_step_4(tmp_path, ["model"])

    def read(*_: object) -> None:
        raise AssertionError("files are read")

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hrl.cluster.checkpoints.damages", read)
    monkeypatch.setattr("hrl.cluster.checkpoints._FOUND", {})  # as in a process that did not write it
    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(tmp_path), resume_mode="auto"))
    assert exit_status(config, interrupted) == 130
    assert capsys.readouterr().err == "\ninterrupted\nthe same command continues after step 4\n"


def test_a_signal_while_it_is_said_what_continues_a_run_ends_the_command_without_a_traceback(
    monkeypatch, config
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointStore, "steps", interrupted)
    assert exit_status(config, interrupted) == 130
    assert exit_status(config, lambda: fail(None)) == 130


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (RunStoppedError(4), 130), (WorkerError(0, "actor", "update", "it died"), 1)],
    ids=["interrupted", "stopped", "failed"],
)
def test_a_folder_of_checkpoints_that_cannot_be_seen_does_not_hide_how_the_run_ended(
    tmp_path, capsys, error, status
) -> None:
    (tmp_path / "checkpoints").symlink_to("/not/mounted")

    def ended() -> None:
        raise error

    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(tmp_path), resume_mode="auto"))
    assert exit_status(config, ended) == status
    err = capsys.readouterr().err
    assert f"whether anything continues the run can't be told: {tmp_path}/checkpoints can't be read" in err
    assert ("it died" in err) == (status == 1)


@pytest.mark.parametrize(
    ("overrides", "status", "said"),
    [
        ((), 75, "the same command continues after step 4"),
        (("resume_mode=resume_path", "resume_from_path=elsewhere"), 130, "trainer.resume_mode=auto continues after"),
    ],
    ids=["auto", "from another run"],
)
def test_a_signal_between_two_starts_leaves_a_run_that_goes_on(
    monkeypatch, capsys, tmp_path, overrides, status, said
) -> None:
    saved_step_4(tmp_path, ["model"])
    monkeypatch.setattr(Supervisor, "run", lambda self: self._pass_on(signal.SIGTERM, None))
    given = [f"trainer.{each}" for each in (f"default_local_dir={tmp_path}", "max_restarts=3", *overrides)]
    assert run_command("ppo", given) == status
    err = capsys.readouterr().err
    assert err.startswith("\ninterrupted\n") and said in err


def test_a_run_that_was_started_again_promises_what_the_command_does_that_was_given(
    monkeypatch, capsys, tmp_path
) -> None:
    """The second start goes on from the run's own checkpoints, whatever the mode; the command from outside does not."""
    saved_step_4(tmp_path, ["model"])
    modes = []

    def stopped(kind, config, **_) -> None:
        modes.append(config.trainer.resume_mode)
        raise RunStoppedError(4)

    monkeypatch.setattr(Supervisor, "run", lambda self: Attempt(1))
    monkeypatch.setattr("hrl.processes.signals.StopRequest.install", lambda self: None)
    monkeypatch.setitem(sys.modules, "hrl.trainer.run", SimpleNamespace(run=stopped))
    mode = ("resume_mode=resume_path", "resume_from_path=elsewhere")
    given = [f"trainer.{each}" for each in (f"default_local_dir={tmp_path}", "max_restarts=3", *mode)]
    assert run_command("ppo", given) == 130
    assert modes == ["auto"]
    assert "\ntrainer.resume_mode=auto continues after step 4\n" in capsys.readouterr().err
