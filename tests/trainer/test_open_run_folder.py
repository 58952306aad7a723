"""Which folder a run continues, and what it says when it takes one back to an earlier step."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hrl.cluster.checkpoints import CheckpointError, CheckpointStore, state_text
from hrl.config import compose_cli
from hrl.preflight.folder_plan import FolderPlan, plan_run_folder
from hrl.report.console import RunConsole
from hrl.report.run_folder import DamagedFileError, RunFolder, RunFolderError, json_line, read_jsonl
from hrl.trainer.kinds import KINDS
from hrl.trainer.run import open_run_folder

DATA = {"rows": 9, "shuffle": True, "seed": 1, "tokens": "d1", "columns": {}}


def earlier_run(path: Path, steps: int = 3) -> CheckpointStore:
    folder = RunFolder(path)
    folder.metrics_file.write_text("".join(json_line({"step": step}) for step in range(1, steps + 1)))
    folder.close()
    store = CheckpointStore(folder.checkpoints)
    for step in range(1, steps + 1):
        store.begin(step)
        store.commit(step, state_text({"step": step, "data": DATA}))
    return store


def planned(path: Path) -> FolderPlan:
    config = compose_cli([f"trainer.default_local_dir={path}"])
    return plan_run_folder(config.trainer, SimpleNamespace(fingerprint=DATA))


def opened(path: Path, resume_from: Path | None = None, data: dict[str, Any] = DATA) -> SimpleNamespace:
    mode = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={resume_from}"] if resume_from else []
    config = compose_cli([f"trainer.default_local_dir={path}", *mode])
    shown = io.StringIO()
    console = RunConsole(Console(file=shown, width=400, color_system=None))
    folder = open_run_folder(config.trainer, console, SimpleNamespace(fingerprint=data))
    folder.close()
    log = [record["step"] for record in read_jsonl(folder.metrics_file)] if folder.metrics_file.exists() else None
    return SimpleNamespace(folder=folder, log=log, shown=shown.getvalue())


def test_the_newest_checkpoint_continues_the_log(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    run = opened(tmp_path)
    assert run.log == [1, 2, 3]
    assert run.shown == ""


def test_steps_that_the_log_lacks_after_a_power_cut_are_told(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json_line({"step": 1}))
    run = opened(tmp_path)
    assert run.log == [1]
    assert "the log lacks steps 2 to 3, which the checkpoint has and are not made again" in run.shown


def test_what_the_disk_refuses_of_the_log_is_kept_as_on_save_error_says(tmp_path: Path) -> None:
    for asked in ("stop", "continue"):
        config = compose_cli([f"trainer.default_local_dir={tmp_path}", f"trainer.on_save_error={asked}"])
        display = RunConsole(Console(file=io.StringIO()))
        with closing(open_run_folder(config.trainer, display, SimpleNamespace(fingerprint=DATA))) as folder:
            (tmp_path / "alarms.jsonl").mkdir(exist_ok=True)
            with pytest.raises(RunFolderError) if asked == "stop" else nullcontext():
                folder.write_alarm({})
            assert len(folder.unwritten) == (asked == "continue")


def test_a_lock_is_looked_at_before_the_start_and_by_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RunFolder(tmp_path)), pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
        planned(tmp_path)

    def absent(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patch, pytest.raises(RunFolderError, match="locks no files"):
        patch.setattr("fcntl.flock", absent)
        planned(tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").symlink_to(tmp_path / "not there")
    with pytest.raises(RunFolderError, match=r"\.lock: it is a link.*remove the link"):
        planned(tmp_path)


def test_an_empty_folder_of_checkpoints_is_no_fresh_start_if_the_log_says_that_there_were_some(tmp_path: Path) -> None:
    store = earlier_run(tmp_path, steps=4)
    shutil.rmtree(store.folder)
    store.folder.mkdir()  # as if a disk were not mounted

    def has_configured(save_freq: int, on_save_error: str = "stop") -> None:
        about = {"save_freq": save_freq, "on_save_error": on_save_error}
        (tmp_path / "config.yaml").write_text(json.dumps({"trainer": about}))

    for spared in (
        (3, "stop"),
        (-1, "stop"),
        (2, "continue"),
    ):  # the first save was under way, none was due, all failed
        has_configured(*spared)
        assert planned(tmp_path).checkpoint is None
    has_configured(2)
    with pytest.raises(RunFolderError, match=r"checkpoints is empty, and the run there has made 4 steps.* every 2\."):
        planned(tmp_path)
    store.folder.rmdir()
    assert planned(tmp_path).checkpoint is None


def test_an_older_checkpoint_of_the_folder_takes_log_and_checkpoints_back(tmp_path: Path) -> None:
    store = earlier_run(tmp_path)
    run = opened(tmp_path, store.path(1))
    assert run.log == [1]
    assert store.steps() == [1]
    aside = store.folder / "superseded/1"
    assert f"what the run had of steps after 1, which are made again, is now in {aside}" in run.shown
    assert [record["step"] for record in read_jsonl(aside / "metrics.jsonl")] == [2, 3]
    assert sorted(path.name for path in aside.glob("step_*")) == ["step_2", "step_3"]


def test_a_checkpoint_that_was_superseded_is_another_history_than_the_folders(tmp_path: Path) -> None:
    store = earlier_run(tmp_path)
    opened(tmp_path, store.path(1))
    left = store.folder / "superseded" / "1" / "step_3"
    with pytest.raises(RunFolderError, match=r"holds checkpoints of an earlier run.* its own trainer"):
        opened(tmp_path, left)
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    assert left.is_dir() and store.steps() == [1]
    assert opened(tmp_path / "branch", left).log is None and left.is_dir()


def test_a_checkpoint_that_is_a_link_is_continued(tmp_path: Path) -> None:
    store = earlier_run(tmp_path / "run")
    store.path(3).rename(tmp_path / "large")
    store.path(3).symlink_to(tmp_path / "large")
    for resume_from in (None, store.path(3)):
        assert opened(tmp_path / "run", resume_from).log == [1, 2, 3]


def test_a_folder_with_nothing_but_what_was_superseded_or_set_aside_is_no_fresh_start(tmp_path: Path) -> None:
    store = earlier_run(tmp_path)
    about = {"save_freq": 1, "on_save_error": "stop"}
    (tmp_path / "config.yaml").write_text(json.dumps({"trainer": about}))
    opened(tmp_path, store.path(2))
    shutil.rmtree(store.path(1))
    store.set_aside(store.path(2))
    with pytest.raises(RunFolderError, match=r"no checkpoint left but what lies in superseded/.*resume_mode=resume_pa"):
        planned(tmp_path)
    shutil.rmtree(store.folder / "superseded")
    with pytest.raises(RunFolderError, match=r"no checkpoint that is whole, and the run there has made 2 steps"):
        planned(tmp_path)
    shutil.rmtree(store.folder)
    assert planned(tmp_path).checkpoint is None


def test_of_the_steps_that_were_made_again_the_newest_ten_records_are_kept(tmp_path: Path) -> None:
    store = earlier_run(tmp_path, steps=1)
    aside = store.folder / "superseded"
    for _ in range(12):
        with (tmp_path / "metrics.jsonl").open("a") as log:
            log.write(json_line({"step": 2}))
        run = opened(tmp_path)
    assert sorted(int(path.name) for path in aside.iterdir()) == list(range(3, 13))
    assert f"removed {aside / '2'}: of steps that were made again, the newest are kept" in run.shown


def test_a_checkpoint_of_another_run_leaves_that_run_alone_and_starts_a_new_log(tmp_path: Path) -> None:
    other = earlier_run(tmp_path / "other")
    mine = RunFolder(tmp_path / "mine")
    mine.metrics_file.write_text(json_line({"step": 1}))
    mine.close()
    assert opened(tmp_path / "mine", other.path(2)).log is None
    assert read_jsonl(tmp_path / "mine/earlier/1/metrics.jsonl") == [{"step": 1}]
    assert other.steps() == [1, 2, 3]
    earlier_run(tmp_path / "third")
    with pytest.raises(RunFolderError, match="holds checkpoints of an earlier run"):
        opened(tmp_path / "third", other.path(2))


def test_a_checkpoint_that_cannot_be_read_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    store = earlier_run(tmp_path)
    (store.path(2) / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step_2 is damaged: state.json has 1 bytes.*lie step_1, step_3"):
        opened(tmp_path, store.path(2))
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_1", "step_2", "step_3"]


def test_damaged_newer_checkpoints_are_set_aside_aloud_and_the_log_goes_back_to_the_one_that_is_whole(
    tmp_path: Path,
) -> None:
    store = earlier_run(tmp_path)
    (store.path(3) / "state.json").unlink()
    (store.path(2) / "state.json").write_text((store.path(2) / "state.json").read_text().replace("9", "8"))
    plan = str(planned(tmp_path))
    assert plan.startswith(f"{tmp_path}, continued after step 1; {store.path(3)} is damaged: state.json is missing")
    assert store.path(3).exists(), "a check changes nothing"
    run = opened(tmp_path)
    assert run.log == [1] and store.steps() == [1]
    assert sorted(path.name for path in store.folder.glob("damaged.*")) == ["damaged.step_2", "damaged.step_3"]
    assert f"{store.path(3)} is damaged: state.json is missing. It is now damaged.step_3" in run.shown
    assert f"{store.path(2)} is damaged: state.json is not what was written" in run.shown
    again = opened(tmp_path)
    assert again.shown == "" and again.log == [1], "it is said once"


def test_folders_of_which_none_is_whole_are_named_and_left_as_they_are(tmp_path: Path) -> None:
    store = earlier_run(tmp_path)
    for step in store.steps():
        (store.path(step) / "manifest.json").write_text("")
    with pytest.raises(CheckpointError, match=r"step_3 is damaged: manifest.json .*step_1 is damaged.* start from scr"):
        opened(tmp_path)
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_1", "step_2", "step_3"]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rows": 8, "tokens": "d2"}, "8 rows, were 9"),
        ({"tokens": "d2"}, "other tokens"),
        ({"seed": 2}, "data.seed=2, was 1"),
        ({"shuffle": False, "seed": None}, "data.shuffle=False, was True"),
    ],
)
def test_other_data_is_refused_by_name_and_leaves_the_folder_as_it_is(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    store = earlier_run(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{store.path(1)} was saved with other .*{named}.*default_local_dir"):
        opened(tmp_path, store.path(1), DATA | change)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3
    assert store.steps() == [1, 2, 3]
    assert opened(tmp_path / "branch", store.path(1), DATA | change).log is None


def test_a_run_killed_in_its_first_save_starts_afresh_and_says_so(tmp_path: Path) -> None:
    rest = CheckpointStore(tmp_path / "checkpoints").begin(1)
    (tmp_path / "metrics.jsonl").write_text(json_line({"step": 1}))
    run = opened(tmp_path)
    assert run.log is None
    assert f"removed {rest}, left by an interrupted save" in run.shown and not rest.exists()


def test_what_a_killed_run_left_beside_its_outputs_is_removed_and_said(tmp_path: Path) -> None:
    rest = tmp_path / ".metrics.jsonl.0123456789abcdef.partial"
    rest.touch()
    assert f"removed {rest}, left by a run that was killed" in opened(tmp_path).shown and not rest.exists()


def test_the_phase_bar_has_the_old_log_probs_where_the_run_computes_them() -> None:
    batches = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert "old_log_prob" not in KINDS["ppo"].phases(compose_cli(batches))
    twice = KINDS["ppo"].phases(compose_cli([*batches, "actor_rollout_ref.actor.ppo_epochs=2"]))
    assert twice[:3] == ["gen", "reward", "old_log_prob"]


def test_a_log_that_cannot_be_taken_back_leaves_the_folder_free(tmp_path: Path) -> None:
    store = earlier_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\ndamaged\n{"step": 3}\n')
    with pytest.raises(DamagedFileError) as kept:  # with its frames, as a notebook keeps the last error
        opened(tmp_path, store.path(1))
    RunFolder(tmp_path, resume=True).close()
    assert "line 2" in str(kept.value)
