"""Which checkpoint a run resumes from."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from hrl.cluster.checkpoints import (
    STATE_FILE,
    CheckpointError,
    CheckpointStore,
    Choice,
    is_renamed,
    load_state,
    require_undamaged,
    state_text,
)
from hrl.cluster.manifest import MANIFEST, Manifest
from hrl.errors import may_pass
from hrl.report.run_folder import RunFolderError
from hrl.workers.engine.background import write_record
from hrl.workers.engine.digest import FileDigest, Written


def save(store: CheckpointStore, step: int, score: float | None = None, **state: object) -> Path:
    (store.begin(step) / "weights.bin").write_bytes(b"w" * step)
    return store.commit(step, state_text({"step": step, **state}), score=score)


def test_a_committed_checkpoint_is_found_and_holds_what_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 3)
    save(store, 12)
    found = store.choose("auto", None).path
    assert found == tmp_path / "checkpoints" / "step_12"  # the larger number, not the later name
    assert (found / "weights.bin").read_bytes() == b"w" * 12
    assert load_state(found, ()) == {"step": 12}


def test_an_interrupted_save_is_never_chosen_and_its_rest_is_removed_by_the_next(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.begin(2) / "half").write_text("torn")
    assert store.choose("auto", None).path == store.path(1)
    assert not (store.begin(2) / "half").exists()


def test_a_folder_with_only_torn_checkpoints_is_refused_rather_than_trained_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.path(1).mkdir()
    with pytest.raises(CheckpointError, match="none is whole"):
        store.choose("auto", None)


def test_a_first_save_that_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    rest = store.begin(1)
    assert store.choose("auto", None).path is None
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
        assert store.choose("auto", None).path == store.path(20)
    assert not store.supersede(20, store.next_superseded())
    assert not store.next_superseded().exists()
    save(store, 30)


def damaged(store: CheckpointStore, step: int) -> str:
    """What is said of a newer checkpoint that the run does not continue, because it continues the one before."""
    choice = store.choose("auto", None)
    assert choice.path == store.path(step - 1)
    (newer,) = choice.damaged
    assert newer.path == store.path(step)
    return str(newer)


def pointer(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("step_99")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "weights.bin").write_bytes(b"wx"), "weights.bin is not what was written"),
        (lambda path: (path / "weights.bin").write_bytes(b"w"), "weights.bin has 1 bytes, of 2 that were written"),
        (lambda path: (path / "weights.bin").unlink(), "weights.bin is missing"),
        (lambda path: (path / STATE_FILE).write_text(""), "state.json has 0 bytes"),
        (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda path: (path / MANIFEST).write_text("latest: step_1"), "manifest.json is damaged"),
        (lambda path: [file.unlink() for file in path.rglob("*") if file.is_file()], "manifest.json is missing"),
        (lambda path: (path / "actor" / "shard-2.safetensors").touch(), "shard-2.safetensors is not in the manifest"),
        (lambda path: (path / "actor" / "written-rank-0.json").unlink(), "actor/written-rank-0.json is missing"),
        (pointer, "manifest.json is missing"),
    ],
)
def test_the_newest_that_is_whole_continues_whatever_a_newer_one_lacks(
    tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        weights = save_with_record(store, step)
        assert store.choose("auto", None) == Choice(weights)
    spoil(store.path(2))
    assert said in damaged(store, 2)
    assert store.set_aside(store.choose("auto", None).damaged[0].path) == tmp_path / "damaged.step_2"
    assert store.choose("auto", None) == Choice(store.path(1))


def save_with_record(store: CheckpointStore, step: int) -> Path:
    """As a rank does, which leaves a record of its files."""
    actor = store.begin(step) / "actor"
    actor.mkdir()
    (actor / "shard-1.safetensors").write_bytes(b"shard")
    (actor.parent / "weights.bin").write_bytes(b"w" * step)
    write_record(actor / "written-rank-0.json", [Written.by_reading(actor / "shard-1.safetensors")])
    return store.commit(step, state_text({"step": step}))


def test_a_file_of_the_users_own_beside_the_shards_does_no_harm_and_is_named(tmp_path: Path, caplog) -> None:
    store = CheckpointStore(tmp_path)
    path = save_with_record(store, 1)
    (path / "notes.txt").write_text("the good one")
    (path / "hf").mkdir()
    (path / "hf" / "model.gguf").write_text("converted")
    assert store.choose("auto", None) == Choice(path)
    assert "hf/model.gguf is not in the manifest (and 1 more); nothing reads it" in caplog.text
    require_undamaged(path, "hf")
    (path / "hf" / "model-2.safetensors").write_text("which vLLM would load")
    with pytest.raises(CheckpointError, match="hf/model-2.safetensors is not in the manifest"):
        require_undamaged(path, "hf")


def test_hidden_tensors_among_the_shards_count_because_torch_would_load_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save_with_record(store, 1)
    (path / "hf").mkdir()
    (path / "hf" / "._model.safetensors").write_text("of a Mac's copy, which nothing reads")
    (path / "actor" / ".nfs01").touch()
    assert store.choose("auto", None) == Choice(path)
    require_undamaged(path, "hf")
    (path / "actor" / "._shard-1.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"actor/\._shard-1\.safetensors is not in the manifest: remove it"):
        store.choose("auto", None)
    with pytest.raises(CheckpointError, match=r"actor/\._shard-1\.safetensors is not in the manifest"):
        require_undamaged(path, "actor")


def test_a_damaged_part_does_not_keep_another_from_being_used(tmp_path: Path) -> None:
    path = save_with_record(CheckpointStore(tmp_path), 1)
    (path / "actor" / "shard-1.safetensors").write_bytes(b"Shard")
    require_undamaged(path, "hf")
    with pytest.raises(CheckpointError, match=r"step_1 is damaged: actor/shard-1\.safetensors is not what was written"):
        require_undamaged(path, "actor")


def test_a_state_that_the_manifest_does_not_list_is_not_read(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 1)
    listed = {name: digest for name, digest in Manifest.read(path).files.items() if name != STATE_FILE}
    Manifest(1, listed).write(path)
    with pytest.raises(CheckpointError, match=r"step_1 is damaged: state\.json is not in the manifest"):
        CheckpointStore(tmp_path).choose("auto", None)
    with pytest.raises(CheckpointError, match=r"step_1 is damaged: state\.json is not in the manifest"):
        require_undamaged(path, "hf")


@pytest.mark.parametrize("left", ["a shard that is cut", "records of sizes alone", "the state alone"])
def test_a_copy_that_was_cut_short_before_its_manifest_is_no_checkpoint(tmp_path: Path, left: str) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        actor = save_with_record(store, step) / "actor"
    (store.path(2) / MANIFEST).unlink()
    (actor / "shard-1.safetensors").write_bytes(b"s")
    if left == "records of sizes alone":  # of one of several ranks
        (actor / "written-rank-0.json").write_text('{"files": {"shard-1.safetensors": 1}}')
    else:
        (actor / "written-rank-0.json").unlink()
    if left == "the state alone":
        shutil.rmtree(actor)
    assert "manifest.json is missing: the folder was not written, or not copied, to its end" in damaged(store, 2)
    assert store.steps() == [1]
    with pytest.raises(CheckpointError, match=r"step_2 is damaged: manifest\.json is missing"):
        require_undamaged(store.path(2), "hf")


def test_a_checkpoint_that_cannot_be_read_is_neither_set_aside_nor_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save_with_record(store, step)
    os.utime(store.path(2) / "weights.bin")  # else it is known from the save

    def stale(path: Path, **given: object) -> FileDigest:
        raise OSError(116, "Stale file handle", str(path))

    with monkeypatch.context() as refusing:
        refusing.setattr("hrl.cluster.patience.PAUSES_S", ())
        refusing.setattr(FileDigest, "of", stale)
        with pytest.raises(
            CheckpointError, match=r"can't be read: Stale .*step_2 may be whole, so it stays"
        ) as refused:
            store.choose("auto", None)
    assert may_pass(refused.value), "starting again may help"
    assert store.choose("auto", None) == Choice(store.path(2))


def test_a_checkpoint_is_read_once_as_long_as_its_files_look_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = CheckpointStore(tmp_path), Counter[str]()
    path, digest = save(store, 1), FileDigest.of
    os.utime(path / "weights.bin")  # else it is known from the save
    monkeypatch.setattr(FileDigest, "of", lambda path, **given: read.update([path.name]) or digest(path, **given))
    for _ in range(3):
        store.choose("auto", None)
    assert read == {"weights.bin": 1, STATE_FILE: 1}
    (path / "weights.bin").write_bytes(b"x")  # another time
    with pytest.raises(CheckpointError, match=r"weights\.bin is not what was written"):
        store.choose("auto", None)


def test_what_the_disk_made_of_a_save_is_found_before_the_older_one_goes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    save(store, 1)
    weights = store.begin(2) / "weights.bin"
    weights.write_bytes(b"wrong")
    with pytest.raises(CheckpointError, match=r"step_2 is not what was written to it: read back, weights\.bin is not"):
        store.commit(2, state_text({"step": 2}), {weights: FileDigest(5, xxh3_128_hexdigest(b"right"))})
    assert store.steps() == [1] and (store.folder / "damaged.step_2").is_dir()


@pytest.mark.parametrize(
    "rename",
    [
        lambda path, target: None,  # says that it did
        lambda path, target: shutil.copytree(path, target),  # both names are there
        lambda path, target: (shutil.copytree(path, target), (target / "weights.bin").unlink(), shutil.rmtree(path)),
    ],
)
def test_a_file_system_that_lies_about_a_rename_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rename: Callable[[Path, Path], object]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    save(store, 1)
    monkeypatch.setattr("hrl.cluster.checkpoints.RENAME_PATIENCE_S", 0.0)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match=r"tmp\.step_2 was renamed to step_2 without an error, and yet"):
        save(store, 2)
    assert store.path(1).is_dir(), "the one before is still there"


def test_a_rename_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def late(temporary: Path, final: Path) -> bool:
        seen.append(final)
        return len(seen) > 2 and is_renamed(temporary, final)

    monkeypatch.setattr("hrl.cluster.checkpoints.is_renamed", late)
    assert save(CheckpointStore(tmp_path), 1).is_dir()
    assert len(seen) > 2


def test_what_kills_and_rotations_left_is_removed_and_said(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    kept = save(store, 1)
    store.begin(2)
    (tmp_path / "tmp.rotated.step_0").mkdir()
    (tmp_path / "tmp.something").write_text("x")
    assert [path.name for path in store.remove_interrupted()] == [
        "tmp.rotated.step_0", "tmp.something", "tmp.step_2",
    ]  # fmt: skip
    assert [*tmp_path.iterdir()] == [kept]


def test_a_second_one_that_is_damaged_at_the_same_step_gets_a_number(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    for name in ("damaged.step_2", "damaged.step_2.2"):
        (save(store, 2) / "weights.bin").unlink()
        assert store.set_aside(store.choose("auto", None).damaged[0].path).name == name


def test_disable_starts_afresh_and_an_empty_folder_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.choose("auto", None).path is None
    save(store, 1)
    assert store.choose("disable", None).path is None


def test_a_link_that_leads_nowhere_is_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to("/not/mounted")
    with pytest.raises(RunFolderError, match="it is a link to /not/mounted: No such file"):
        CheckpointStore(tmp_path / "checkpoints").choose("auto", None)


def test_resume_path_must_be_a_whole_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    torn = store.begin(7)
    with pytest.raises(CheckpointError, match=STATE_FILE):
        store.choose("resume_path", str(torn))
    damaged = save(store, 8)
    (damaged / "weights.bin").write_bytes(b"w" * 7)
    whole = save(store, 7)
    with pytest.raises(CheckpointError, match=r"step_8 is damaged: weights.bin has 7 bytes.*; beside it lie step_7$"):
        store.choose("resume_path", str(damaged))
    assert store.choose("resume_path", str(whole)).path == whole


def test_a_relative_path_to_resume_from_means_the_same_wherever_a_worker_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = save(CheckpointStore(tmp_path), 7)
    monkeypatch.chdir(tmp_path)
    assert CheckpointStore(tmp_path / "branch").choose("resume_path", "step_7").path == whole


def test_a_checkpoint_that_is_a_link_is_the_runs_own_wherever_it_leads(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    (tmp_path / "large").mkdir()
    save(store, 7).rename(tmp_path / "large" / "step_7")
    store.path(7).symlink_to(tmp_path / "large" / "step_7")
    (tmp_path / "latest").symlink_to(store.path(7).parent)
    for chosen in (
        store.choose("auto", None),
        store.choose("resume_path", str(store.path(7))),
        store.choose("resume_path", str(tmp_path / "latest" / "step_7")),
    ):
        assert chosen.path == store.path(7) and store.holds(store.path(7))
    (tmp_path / "newest").symlink_to(save(store, 8))
    assert store.choose("resume_path", str(tmp_path / "newest")).path == store.path(8)
    other = store.choose("resume_path", str(tmp_path / "large" / "step_7")).path
    assert other == tmp_path / "large" / "step_7" and not store.holds(other)


def test_what_was_superseded_or_set_aside_is_not_the_runs_own(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, step)
    store.supersede(1, store.next_superseded())
    aside = store.set_aside(store.path(1))
    assert not store.holds(tmp_path / "superseded" / "1" / "step_2") and not store.holds(aside)
    assert store.holds(store.path(1))


def test_a_folder_whose_name_is_a_digit_but_no_number_is_not_of_steps_made_again(tmp_path: Path) -> None:
    for name in ("\N{SUPERSCRIPT TWO}", "1", "10", "9"):
        (tmp_path / "superseded" / name).mkdir(parents=True)
    store = CheckpointStore(tmp_path)
    assert store.remove_superseded(keep=1) == [tmp_path / "superseded" / name for name in ("1", "9")]
    assert store.next_superseded().name == "11"


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        save(store, step)
    assert store.steps() == [2, 10]


def test_rotation_removes_the_link_to_a_checkpoint_elsewhere_and_nothing_there(tmp_path: Path, caplog) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    save(store, 1).rename(tmp_path / "elsewhere")
    store.path(1).symlink_to(tmp_path / "elsewhere")
    save(store, 2)
    assert [path.name for path in store.folder.iterdir()] == ["step_2"] and not caplog.text
    assert (tmp_path / "elsewhere" / "weights.bin").is_file()
    (store.folder / "tmp.rotated.step_1").symlink_to(tmp_path / "elsewhere")  # as earlier versions left it
    assert store.remove_interrupted() == [store.folder / "tmp.rotated.step_1"] and not store.interrupted()
    assert (tmp_path / "elsewhere" / "weights.bin").is_file()


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
    assert CheckpointStore(tmp_path).choose("auto", None).path == tmp_path / "step_3"  # not the best


def test_one_that_cannot_be_removed_is_a_warning_and_no_longer_counts(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(path: Path) -> None:
        raise OSError(39, "Directory not empty", str(path))

    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    monkeypatch.setattr("shutil.rmtree", refuse)
    assert save(store, 2) == store.path(2)
    assert f"{store.path(1)} is no longer needed and can't be removed: [Errno 39]" in caplog.text
    assert store.interrupted() == [tmp_path / "tmp.rotated.step_1"] and store.steps() == [2]


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


def test_a_part_that_older_checkpoints_lack_is_what_it_was_in_them_and_any_other_is_missed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert load_state(save(store, 1), ["nonfinite_in_a_row"])["nonfinite_in_a_row"] == 0
    with pytest.raises(CheckpointError, match="has no kl_coef: it was saved by another trainer"):
        load_state(store.path(1), ["nonfinite_in_a_row", "kl_coef"])
    assert load_state(save(store, 2, nonfinite_in_a_row=2), ["nonfinite_in_a_row"])["nonfinite_in_a_row"] == 2


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.begin(1)
    with pytest.raises(CheckpointError, match="never overwritten"):
        store.commit(1, state_text({"step": 1}))


INPUTS = {"kind": "ppo", "models": {}, "tokenizer": "t", "code": {}}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("step", True),
        ("step", -1),
        ("step", "1"),
        ("step", None),
        pytest.param("step", 10**400, id="huge step"),
        ("data_position", {"epoch": 0}),
        ("data_position", [0, 0]),
        ("data", []),
        ("data", {"columns": []}),
        ("contents", 3),
        ("config", None),
        ("inputs", INPUTS | {"models": {"actor": 1}}),
        ("inputs", {"kind": 1}),
        ("ranks", {"actor": "two"}),
        ("kl_coef", "0.1"),
        pytest.param("kl_coef", 10**400, id="huge coefficient"),
        ("drift_gate_closed", 0),
        ("nonfinite_in_a_row", None),
        ("reward_shaping", {"clip": {"count": None}}),
    ],
)
def test_a_part_of_the_state_that_is_of_another_kind_is_named(tmp_path: Path, part: str, value: object) -> None:
    for inputs in (INPUTS, {}):  # the latter of a trainer that was built by hand
        (tmp_path / STATE_FILE).write_text(json.dumps({"step": 1, "inputs": inputs, "ranks": {"actor": 2}}))
        load_state(tmp_path, ())
    (tmp_path / STATE_FILE).write_text(json.dumps({"step": 1, part: value}))
    with pytest.raises(CheckpointError, match=rf"state\.json is damaged: '{part}[.a-z]*' is not what hrl writes there"):
        load_state(tmp_path, ())


def test_a_state_that_is_nested_without_end_is_damaged(tmp_path: Path) -> None:
    def write(levels: int) -> None:
        (tmp_path / STATE_FILE).write_text('{"step": 1, "config": {"a": ' + "[" * levels + "]" * levels + "}}")

    write(90)
    load_state(tmp_path, ())
    for levels, told in ((101, "more than 100 lists and objects"), (100_000, "is damaged")):
        write(levels)
        with pytest.raises(CheckpointError, match=told):
            load_state(tmp_path, ())


def test_a_state_that_is_no_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=STATE_FILE):
        load_state(tmp_path, ())
    (tmp_path / STATE_FILE).write_text(json.dumps({"epoch": 1}))
    with pytest.raises(CheckpointError, match="no step"):
        load_state(tmp_path, ())
