"""What the loop around the steps does when a signal comes at a bad time, or the disk refuses at the end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hrl.cluster.checkpoints import CheckpointError, CheckpointStore, CheckpointTimeoutError
from hrl.cluster.manifest import Manifest
from hrl.processes.signals import ENDING, RunStoppedError, StopRequest
from hrl.protocol import DataProto
from hrl.report.run_folder import RunFolder, RunFolderError, read_jsonl, rollouts_steps
from hrl.single_controller.worker_errors import WorkerError
from hrl.trainer.callbacks import Callback, Callbacks, RunState
from tests.trainer.ppo.driver import Driver, Workers

GRACE_S = 1.0
"""Three quarters of it are the step's, which is many times what a step takes here."""


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    numbers = (*ENDING, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    stop = StopRequest(GRACE_S)
    stop.install()
    yield stop
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number, handler in before.items():
        signal.signal(number, handler)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class SleepsInStep3(Workers):
    """Sampling in step 3 takes for ever, after `then` was called."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.then = then

    def generate_sequences(self, rows: DataProto, request: Any) -> DataProto:
        if self.done.count("generate") == 2:
            self.then()
            time.sleep(60)
        return super().generate_sequences(rows, request)


NO_VALIDATION = ("trainer.test_freq=-1", "trainer.val_before_train=false")


def test_a_signal_between_two_steps_ends_the_next_one_when_its_share_of_the_grace_has_passed(
    tmp_path: Path, stop: StopRequest
) -> None:
    driver = Driver(tmp_path, *NO_VALIDATION, steps=4, workers=SleepsInStep3())
    trainer, next_batch = driver.trainer, driver.trainer.next_batch
    trainer.stop = stop

    def signalled() -> DataProto:
        if trainer.global_steps == 2:
            terminate()
        return next_batch()

    trainer.next_batch = signalled
    with pytest.raises(RunStoppedError) as stopped:
        driver.fit()
    assert stopped.value.step == 2
    assert "step 3 is given up: it is not done within 75%" in " ".join(driver.shown.split())
    assert trainer.checkpoints.steps() == [2]


def test_steps_that_go_with_one_that_had_begun_to_learn_are_told_and_not_said_to_be_saved(
    tmp_path: Path, stop: StopRequest
) -> None:
    class LearnsForEverInStep4(Workers):
        def update_actor(self, batch: DataProto, request: Any) -> Any:
            if self.done.count("update") == 3:
                terminate()
                time.sleep(60)
            return super().update_actor(batch, request)

    driver = Driver(tmp_path, *NO_VALIDATION, "trainer.save_freq=2", steps=6, workers=LearnsForEverInStep4())
    driver.trainer.stop = stop
    with pytest.raises(RunStoppedError) as stopped:
        driver.fit()
    shown = " ".join(driver.shown.split())
    assert "step 4 is lost: it is not done within 75%" in shown
    assert "has begun to change the weights; so is what came after step 2, which was not saved" in shown
    assert stopped.value.step == 2 and driver.trainer.checkpoints.steps() == [2]


def test_a_step_that_is_made_is_not_lost_while_it_is_written_down(tmp_path: Path, stop: StopRequest) -> None:
    driver = Driver(tmp_path, *NO_VALIDATION, steps=4)
    trainer, step_done, describe = driver.trainer, driver.trainer.reporter.step_done, driver.trainer.describe
    trainer.stop = stop
    on_step_end = trainer.on_step_end

    def signalled(batch: DataProto, metrics: dict[str, float]) -> None:
        on_step_end(batch, metrics)
        if trainer.global_steps == 2:
            terminate()
            time.sleep(0.4 * GRACE_S)

    def slow(*given: Any) -> Any:
        time.sleep(0.4 * GRACE_S if trainer.global_steps == 2 else 0.0)
        return step_done(*given)

    def asked(batch: DataProto) -> dict[str, float]:
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
        return describe(batch)

    trainer.on_step_end, trainer.reporter.step_done, trainer.describe = signalled, slow, asked
    with pytest.raises(RunStoppedError) as stopped:
        driver.fit()
    assert stopped.value.step == 2
    assert trainer.checkpoints.steps() == [2]
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


class LooksAtCheckpoints(Callback):
    """Has every save waited for."""

    def on_checkpoint(self, run: RunState, folder: Path) -> None: ...


def test_a_step_whose_save_was_refused_and_then_succeeded_is_the_end_of_a_run_that_was_saved(
    tmp_path: Path, stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, refuses = CheckpointStore.commit, [2]

    def refused(self: CheckpointStore, step: int, *given: Any) -> Path:
        if step in refuses:
            raise OSError(28, "No space left on device")
        return commit(self, step, *given)

    def there_is_room_now() -> None:
        refuses.clear()
        terminate()

    monkeypatch.setattr(CheckpointStore, "commit", refused)
    keys = (*NO_VALIDATION, "trainer.save_freq=1", "trainer.on_save_error=continue")
    driver = Driver(tmp_path, *keys, steps=4, workers=SleepsInStep3(there_is_room_now))
    driver.trainer.stop = stop
    driver.trainer.callbacks = Callbacks([LooksAtCheckpoints()])
    with pytest.raises(RunStoppedError) as stopped:
        driver.fit()
    assert stopped.value.step == 2
    assert "step 2 is not saved" in " ".join(driver.shown.split())
    assert driver.trainer.checkpoints.steps() == [1, 2]


def test_the_log_is_on_the_disk_before_a_checkpoint_of_its_steps_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, make_durable = [], RunFolder.make_log_durable

    def look(self: RunFolder) -> None:
        make_durable(self)
        logged = [record["step"] for record in read_jsonl(self.metrics_file)]
        seen.append((logged[-1], CheckpointStore(self.checkpoints).steps(), rollouts_steps(self.rollouts)))

    monkeypatch.setattr(RunFolder, "make_log_durable", look)
    driver = Driver(tmp_path, *NO_VALIDATION, "trainer.save_freq=2", steps=4)
    driver.fit()
    (first, before, samples), (last, then, _) = seen
    assert first >= 2 and before == [] and samples[:2] == [1, 2] and last == 4 and then == [2]


class Exports(Workers):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def export(self, folder: Path) -> None:
        (folder / "config.json").write_text("new")
        if self.error is not None:
            raise self.error


def test_a_trained_model_is_there_when_all_of_it_is_or_not_at_all(tmp_path: Path) -> None:
    full = WorkerError(0, "actor.finish_save", "save_checkpoint", "No space left on device", "Traceback …")
    for error in (full, None):
        driver = Driver(tmp_path / "run", *NO_VALIDATION, steps=1, workers=Exports(error))
        driver.trainer.tokenizer = SimpleNamespace(save_pretrained=lambda to: (to / "tokenizer.json").touch())
        with closing(driver.folder), pytest.raises(WorkerError, match="No space left") if error else nullcontext():
            driver.trainer.export(tmp_path / "run" / "model")
        assert not list((tmp_path / "run").glob(".model.*"))
        assert (tmp_path / "run" / "model").exists() == (error is None)
    assert sorted(file.name for file in (tmp_path / "run/model").iterdir()) == ["config.json", "tokenizer.json"]


def test_a_model_goes_into_a_new_folder_and_one_that_can_not_be_made_is_not_called_the_run_folder(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path / "run", *NO_VALIDATION, steps=1, workers=Exports(None))
    driver.trainer.tokenizer = SimpleNamespace(save_pretrained=lambda to: None)
    (tmp_path / "file").touch()
    with closing(driver.folder):
        driver.trainer.export(tmp_path / "new" / "dir" / "model")
        with pytest.raises(RunFolderError, match=f"^{tmp_path}/file/model can't be written: ") as told:
            driver.trainer.export(tmp_path / "file" / "model")
    assert (tmp_path / "new/dir/model/config.json").exists() and "default_local_dir" not in str(told.value)


class StopWhenSaved(Callback):
    def on_checkpoint(self, run: RunState, folder: Path) -> None:
        run.stop("saved")


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_score_that_the_disk_refuses_at_the_end_is_told_in_one_line_and_leaves_the_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    def refused(self: Manifest, score: float) -> Manifest:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Manifest, "with_score", refused)
    keys = ("trainer.save_freq=2", "trainer.test_freq=5", "trainer.val_before_train=false")
    driver = Driver(tmp_path, *keys, f"trainer.on_save_error={on_error}", steps=9)
    driver.trainer.validate = lambda: {"val/sums/mean@1": 0.75, "val/sums/n": 3.0}
    driver.trainer.callbacks = Callbacks([StopWhenSaved()])
    said = (
        f"step 2 is saved without the score of its validation: the run folder {tmp_path} can't be written: No space "
        "left on device; make room there, or name a folder in another place with trainer.default_local_dir"
    )
    if on_error == "stop":
        with pytest.raises(CheckpointError) as ended:
            driver.fit()
        assert str(ended.value) == said
    else:
        driver.fit()
        assert said in " ".join(driver.shown.split())
    assert driver.trainer.checkpoints.choose("auto", None).path == tmp_path / "checkpoints" / "step_2"


def test_a_file_system_that_hangs_ends_a_run_that_would_go_on_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, publish = threading.Event(), CheckpointStore.publish

    def hang(self: CheckpointStore, step: int) -> Path:
        if step == 2:
            answers.wait(30.0)
        return publish(self, step)

    monkeypatch.setattr(CheckpointStore, "publish", hang)
    keys = (*NO_VALIDATION, "trainer.save_freq=1", "trainer.on_save_error=continue", "trainer.timeouts.call_s=0.5")
    driver = Driver(tmp_path, *keys, steps=4)
    with pytest.raises(CheckpointTimeoutError, match=r"step 2 is not saved: .*after 0\.5 s \(trainer.timeouts.call_s"):
        driver.fit()
    assert driver.trainer.global_steps == 3
    assert driver.trainer.checkpoints.temporary(2).exists(), "it is not removed under who still writes it"
    answers.set()
