"""Which checkpoint a run resumes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hrl.cluster.checkpoints import STATE_FILE, CheckpointError, CheckpointStore, load_state, state_text


def save(store: CheckpointStore, step: int, score: float | None = None, **state: object) -> Path:
    (store.begin(step) / "weights.bin").write_bytes(b"w" * step)
    return store.commit(step, state_text({"step": step, **state}), score=score)


def test_a_committed_checkpoint_is_found_and_holds_what_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 3)
    save(store, 12)
    found = store.find("auto", None)
    assert found == tmp_path / "checkpoints" / "step_12"  # the larger number, not the later name
    assert (found / "weights.bin").read_bytes() == b"w" * 12
    assert load_state(found, ()) == {"step": 12}


def test_an_interrupted_save_is_never_chosen_and_its_rest_is_removed_by_the_next(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.begin(2) / "half").write_text("torn")
    assert store.find("auto", None) == store.path(1)
    assert not (store.begin(2) / "half").exists()


def test_a_folder_with_only_torn_checkpoints_is_refused_rather_than_trained_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.path(1).mkdir()
    with pytest.raises(CheckpointError, match="none is whole"):
        store.find("auto", None)


def test_a_first_save_that_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    rest = store.begin(1)
    assert store.find("auto", None) is None
    assert store.interrupted() == [rest]


def test_later_checkpoints_make_way_for_the_steps_that_are_made_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for repetition in ("1", "2"):
        for step in (10, 20, 30):
            if step not in store.steps():
                save(store, step)
        aside = store.next_superseded()
        assert aside == tmp_path / "superseded" / repetition
        assert store.supersede(20, aside)
        assert (tmp_path / "superseded" / repetition / "step_30" / "weights.bin").stat().st_size == 30
        assert store.find("auto", None) == store.path(20)
    assert not store.supersede(20, store.next_superseded())
    assert not store.next_superseded().exists()
    save(store, 30)


def test_disable_starts_afresh_and_an_empty_folder_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.find("auto", None) is None
    save(store, 1)
    assert store.find("disable", None) is None


def test_resume_path_must_be_a_whole_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    torn = store.begin(7)
    with pytest.raises(CheckpointError, match=STATE_FILE):
        store.find("resume_path", str(torn))
    whole = save(store, 7)
    assert store.find("resume_path", str(whole)) == whole


def test_a_relative_path_to_resume_from_means_the_same_wherever_a_worker_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = save(CheckpointStore(tmp_path), 7)
    monkeypatch.chdir(tmp_path)
    assert CheckpointStore(tmp_path / "branch").find("resume_path", "step_7") == whole


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        save(store, step)
    assert store.steps() == [2, 10]


def test_rotation_never_takes_what_was_just_saved(tmp_path: Path) -> None:
    everything = CheckpointStore(tmp_path)
    for step in (20, 30, 40):
        save(everything, step)
    save(CheckpointStore(tmp_path, keep=3), 10)
    assert everything.steps() == [10, 30, 40]
    save(CheckpointStore(tmp_path, keep=1), 5)
    assert everything.steps() == [5]
    save(CheckpointStore(tmp_path, keep=9), 6)
    assert everything.steps() == [5, 6]


def test_the_best_validation_stays_beside_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, score in ((1, 0.5), (2, 0.9), (3, None), (4, 0.7), (5, 0.8), (6, None)):
        save(store, step, score=score)
    assert store.steps() == [2, 5, 6]
    assert store.best() == 2
    save(store, 7, score=0.9)  # as good, and newer
    assert store.best() == 7
    assert store.steps() == [6, 7]


def test_the_best_is_remembered_by_a_run_that_resumes(tmp_path: Path) -> None:
    for step, score in ((1, -0.1), (2, -0.4), (3, -0.3)):  # losses, with the other sign
        save(CheckpointStore(tmp_path, keep=1), step, score=score)
    assert CheckpointStore(tmp_path, keep=1).steps() == [1, 3]
    assert CheckpointStore(tmp_path).find("auto", None) == tmp_path / "step_3"  # the newest continues, not the best


def test_one_that_cannot_be_removed_is_a_warning_and_no_longer_counts(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(path: Path) -> None:
        raise OSError(39, "Directory not empty", str(path))

    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    monkeypatch.setattr("shutil.rmtree", refuse)
    assert save(store, 2) == store.path(2)
    assert f"{store.path(1)} is no longer needed and can't be removed: [Errno 39]" in caplog.text
    assert store.path(1).exists() and store.steps() == [2]


def test_without_validation_the_newest_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        save(store, step, score=None)
    assert store.best() is None and store.steps() == [2]


def test_a_checkpoint_with_only_a_model_to_use_is_not_trained_on_from(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 1, contents=["hf_model"])
    with pytest.raises(CheckpointError, match=r'save_contents=\["hf_model"\].*no run continues from it.*step_1/hf'):
        load_state(path, ())
    path = save(CheckpointStore(tmp_path), 2, contents=["model", "optimizer"])
    assert load_state(path, ())["step"] == 2


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.begin(1)
    with pytest.raises(CheckpointError, match="never overwritten"):
        store.commit(1, state_text({"step": 1}))


def test_a_state_that_is_no_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=STATE_FILE):
        load_state(tmp_path, ())
    (tmp_path / STATE_FILE).write_text(json.dumps({"epoch": 1}))
    with pytest.raises(CheckpointError, match="no step"):
        load_state(tmp_path, ())
