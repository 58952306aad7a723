import errno
import json
import os
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
import yaml

from hrl.report import run_folder
from hrl.report.html_report import run_page
from hrl.report.run_folder import (
    DamagedFileError,
    RunFolder,
    RunFolderError,
    check_holds_no_checkpoints,
    json_line,
    next_numbered,
    read_jsonl,
    read_metrics,
    rollouts_steps,
)
from tests.report.runs import finished_run

HOLD_THE_LOCK = """
import sys
from hrl.report.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
sys.stdout.write("held\\n"); sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_in_the_same_folder_is_refused_by_the_owners_pid(tmp_path, other_process):
    with pytest.raises(RunFolderError, match=f"process {other_process.pid} .*trainer.default_local_dir"):
        RunFolder(tmp_path)


def test_the_lock_goes_with_a_killed_process(tmp_path, other_process):
    other_process.kill()
    other_process.wait()
    RunFolder(tmp_path).close()


def test_outputs_of_an_earlier_run_are_moved_aside_and_kept(tmp_path):
    for text in ("first", "second", "third"):
        folder = RunFolder(tmp_path)
        assert not folder.metrics_file.exists()
        folder.metrics_file.write_text(text)
        folder.write_rollouts(1, [{"text": text}])
        (tmp_path / "nonfinite").mkdir()
        (tmp_path / "nonfinite" / f"{text}.json").touch()
        folder.close()
    assert (tmp_path / "earlier/1/metrics.jsonl").read_text() == "first"
    assert (tmp_path / "earlier/2/metrics.jsonl").read_text() == "second"
    assert read_jsonl(tmp_path / "earlier/2/rollouts/step_1.jsonl") == [{"text": "second"}]
    assert [file.name for file in (tmp_path / "earlier/2/nonfinite").iterdir()] == ["second.json"]
    assert (tmp_path / "metrics.jsonl").read_text() == "third"


def test_a_resumed_run_goes_on_writing(tmp_path):
    first = RunFolder(tmp_path)
    first.metrics_file.write_text("kept")
    first.close()
    second = RunFolder(tmp_path, resume=True)
    assert second.metrics_file.read_text() == "kept"
    second.close()


def test_a_folder_with_checkpoints_is_not_started_over(tmp_path):
    (tmp_path / "checkpoints/step_5").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="resume_mode=auto"):
        RunFolder(tmp_path)
    RunFolder(tmp_path, resume=True).close()  # and the refusal let go of the lock


def test_a_folder_is_not_started_over_if_nobody_can_tell_whether_it_has_checkpoints(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").symlink_to("/not/mounted")
    with pytest.raises(
        RunFolderError, match="it is a link to /not/mounted: No such file or directory. Checkpoints may"
    ):
        RunFolder(tmp_path)
    (tmp_path / "checkpoints").unlink()
    check_holds_no_checkpoints(tmp_path)
    (tmp_path / "checkpoints").touch()
    with pytest.raises(RunFolderError, match="checkpoints can't be read: Not a directory. Checkpoints may"):
        RunFolder(tmp_path)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(RunFolderError, match="checkpoints can't be read: Permission denied. Checkpoints may"):
        check_holds_no_checkpoints(tmp_path)


def test_what_killed_runs_left_is_removed_and_nothing_else(tmp_path):
    folder = RunFolder(tmp_path)
    left = [
        ".probe.0123456789abcdef0123456789abcdef/token",
        "tmp.run/metrics.jsonl",
        ".model.0123456789abcdef.unfinished/config.json",
        "fetched/0a/tmp.step_3/state.json",
    ]
    left += [f"{place}.x.json.0123456789abcdef.partial" for place in ("", "rollouts/", "nonfinite/", "profile/")]
    left += ["checkpoints/step_2/.manifest.json.0123456789abcdef.partial"]
    kept = [
        ".probe.mine",
        ".model.mine.unfinished/config.json",
        ".x.partial",
        "tmp.mine/a",
        "fetched/0a/step_2/state.json",
        "checkpoints/step_2/manifest.json",
    ]
    for name in (*left, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert len(folder.remove_leftovers()) == len(left)
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {".lock", *kept}
    assert folder.remove_leftovers() == []
    folder.close()


def test_rewinding_moves_later_steps_and_a_torn_line_aside(tmp_path):
    folder, aside = RunFolder(tmp_path), tmp_path / "aside/1"
    folder.metrics_file.write_text('{"step": 1}\n{"step":  2}\n{"step": 3}\n{"ste')
    for step in (1, 2, 3, 10):
        folder.write_rollouts(step, [{"step": step}])
        folder.write_rollouts(step, [{"step": step}], kind="val")
    assert folder.rewind(2, aside)
    assert folder.metrics_file.read_text() == '{"step": 1}\n{"step":  2}\n'
    assert (aside / "metrics.jsonl").read_text() == '{"step": 3}\n{"ste'
    stayed, moved = (
        sorted(file.name for file in rollouts.iterdir()) for rollouts in (folder.rollouts, aside / "rollouts")
    )
    assert stayed == ["step_1.jsonl", "step_2.jsonl", "val_step_1.jsonl", "val_step_2.jsonl"]
    assert moved == ["step_10.jsonl", "step_3.jsonl", "val_step_10.jsonl", "val_step_3.jsonl"]
    assert read_jsonl(aside / "rollouts/val_step_10.jsonl") == [{"step": 10}]
    folder.close()


def test_rewinding_moves_the_profiles_of_later_steps_aside(tmp_path):
    folder, aside = RunFolder(tmp_path / "run"), tmp_path / "aside"
    names = [
        "step_2.json",
        "step_2_engine_rank_0.json.gz",
        "step_10.json",
        "step_10.txt",
        "step_10_actor_rank_0.json.gz",
    ]
    (folder.path / "profile").mkdir()
    for name in names:
        (folder.path / "profile" / name).touch()
    assert folder.rewind(2, aside)
    assert sorted(file.name for file in (folder.path / "profile").iterdir()) == names[:2]
    assert sorted(file.name for file in (aside / "profile").iterdir()) == sorted(names[2:])


def test_rewinding_moves_the_batches_of_later_steps_that_were_not_finite_aside(tmp_path):
    """Else they stay, and count as some of the few that are kept."""
    folder, aside = RunFolder(tmp_path / "run"), tmp_path / "aside"
    stay = ["step_2.old_log_prob.json", "step_2_rank_0.actor-0.safetensors", "step_3.notes.md"]
    move = ["step_10.rewards.safetensors", "step_3.old_log_prob.json", "step_3_rank_11.actor-0.json"]
    (folder.path / "nonfinite").mkdir()
    for name in (*stay, *move):
        (folder.path / "nonfinite" / name).touch()
    assert folder.rewind(2, aside)
    assert sorted(file.name for file in (folder.path / "nonfinite").iterdir()) == stay
    assert sorted(file.name for file in (aside / "nonfinite").iterdir()) == move


def test_rewinding_to_the_last_step_changes_nothing(tmp_path):
    folder, aside = RunFolder(tmp_path), tmp_path / "aside/1"
    folder.metrics_file.write_text('{"step": 1}\n{"step": 2}\n')
    folder.write_rollouts(2, [{"step": 2}])
    assert not folder.rewind(2, aside)
    assert folder.metrics_file.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert not aside.parent.exists()
    folder.close()


def test_rewinding_leaves_files_of_other_names_alone(tmp_path):
    folder, aside = RunFolder(tmp_path), tmp_path / "aside"
    stray = ["rollouts/step_5.old.jsonl", "rollouts/step_.jsonl", "rollouts/my_step_7.jsonl", "profile/step_notes.md"]
    for name in (*stray, "rollouts/step_5.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "earlier" / "²").mkdir(parents=True)  # a digit that is no number
    assert folder.rewind(3, aside)
    assert [file.name for file in aside.rglob("*.*")] == ["step_5.jsonl"]
    assert all((tmp_path / name).exists() for name in stray)
    assert rollouts_steps(folder.rollouts) == [] and next_numbered(tmp_path / "earlier").name == "1"
    folder.close()


def test_rewinding_a_log_with_a_line_of_no_step_moves_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics_file.write_text('{"step": 1}\n{"loss": 2}\n')
    folder.write_rollouts(5, [])
    with pytest.raises(DamagedFileError, match=r"metrics.jsonl, line 2, is damaged: there is no step"):
        folder.rewind(3, tmp_path / "aside")
    assert not (tmp_path / "aside").exists()
    folder.close()


# ---------------------------------------------------------------------------------------------- a disk that is full


class Disk:
    """Refuses every line and file when it is full."""

    def __init__(self, monkeypatch):
        self.is_full = False
        for name in ("add_whole", "write_whole"):
            monkeypatch.setattr(f"hrl.report.run_folder.{name}", self.refusing(getattr(run_folder, name)))

    def refusing(self, write):
        def refused(*given, **named):
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*given, **named)

        return refused


def make_step(folder, step):
    folder.write_metrics(step, {"a": float(step)})
    folder.write_alarm({"step": step})
    folder.write_rollouts(step, [{"step": step}])
    folder.write_metrics(step, {"b": 1.0})  # a validation after it


def test_a_refused_log_is_an_error_of_one_line_and_the_next_line_is_whole(tmp_path, monkeypatch):
    disk, folder = Disk(monkeypatch), RunFolder(tmp_path)
    make_step(folder, 1)
    disk.is_full = True
    for write in (lambda: folder.write_metrics(2, {}), lambda: folder.write_alarm({}), lambda: make_step(folder, 3)):
        with pytest.raises(RunFolderError, match=f"{tmp_path} can't be written: No space left.*make room there"):
            write()
    disk.is_full = False
    make_step(folder, 4)
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0, "b": 1.0}, {"step": 4, "a": 4.0, "b": 1.0}]
    folder.close()


def test_a_log_that_is_kept_is_the_same_as_on_a_disk_that_was_never_full(tmp_path, monkeypatch):
    disk, folders = Disk(monkeypatch), [RunFolder(tmp_path / name, keeps_refused=True) for name in ("roomy", "full")]
    for folder, full in zip(folders, ((), (2, 3)), strict=True):
        for step in range(1, 5):
            disk.is_full = step in full
            make_step(folder, step)
            assert len(folder.unwritten) == (4 * (step - 1) if step in full else 0)
        folder.close()
    roomy, full = ({file.name: file.read_text() for file in folder.path.rglob("*.jsonl")} for folder in folders)
    assert roomy == full and len(full) == 6


# ---------------------------------------------------------------------------------------------- a power cut


def synced(monkeypatch):
    """The names of the files and folders that are made durable, as they are."""
    names, fsync = [], os.fsync

    def told(handle):
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr("os.fsync", told)
    return names


def test_log_and_new_samples_are_made_durable_and_the_folders_after_them(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    make_step(folder, 1)
    (folder.rollouts / "step_1.jsonl").unlink()  # by the user
    folder.write_rollouts(2, [])
    names = synced(monkeypatch)
    folder.make_log_durable()
    assert names == ["step_2.jsonl", "rollouts", "metrics.jsonl", "alarms.jsonl", tmp_path.name]
    names.clear()
    folder.write_rollouts(3, [], kind="val")
    folder.make_log_durable()
    assert names[0] == "val_step_3.jsonl" and "step_2.jsonl" not in names, "samples are synced once"
    folder.close()


def test_samples_that_could_not_be_synced_are_synced_with_the_next_checkpoint(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_rollouts(1, [])
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        folder.make_log_durable()
    names = synced(monkeypatch)
    folder.make_log_durable()
    assert names[0] == "step_1.jsonl"
    folder.close()


def test_a_log_that_is_written_anew_is_durable_before_it_gets_its_name(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_metrics(1, {"a": 1.0})
    names = synced(monkeypatch)
    folder.write_metrics(1, {"b": 1.0})
    folder.write_metrics(2, {})
    assert len(names) == 1 and names[0].startswith(".metrics.jsonl."), "an added line waits for the next checkpoint"
    folder.rewind(1, tmp_path / "aside")
    assert len(names) == 3
    folder.close()


@pytest.mark.parametrize(
    ("steps", "saved", "missing"), [((1, 2, 3), 3, []), ((0, 1), 3, [2, 3]), ((), 2, [1, 2]), ((11, 12), 13, [13])]
)
def test_the_steps_that_a_log_lacks_are_those_after_its_end(tmp_path, steps, saved, missing):
    folder = RunFolder(tmp_path)
    for step in steps:
        folder.write_metrics(step, {})
    assert list(folder.unlogged(saved)) == missing
    folder.close()


# ---------------------------------------------------------------------------------------------- a stranger's folder


def test_no_file_of_a_run_is_written_through_a_link(tmp_path):
    own = tmp_path / "authorized_keys"
    own.write_text('{"step": 0}\n')
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", "metrics.jsonl", "alarms.jsonl"):
        (run / name).symlink_to(own)
        with pytest.raises(RunFolderError, match=f"{run}/{name}: it is a link, which hrl does not write.*remove the l"):
            folder = RunFolder(run, resume=True)
            with closing(folder):
                folder.write_metrics(1, {}) if name == "metrics.jsonl" else folder.write_alarm({})
        (run / name).unlink()
    for name in ("config.yaml", ".config.yaml.partial", "environment.json", "rollouts/step_1.jsonl"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(own)
    with closing(RunFolder(run, resume=True)) as folder:
        folder.write_config({})
        folder.write_environment()
        folder.write_rollouts(1, [])
    assert own.read_text() == '{"step": 0}\n'


def test_a_link_that_leads_nowhere_moves_aside_with_the_outputs_of_an_earlier_run(tmp_path):
    (tmp_path / "samples.jsonl").symlink_to(tmp_path / "not yet there")
    RunFolder(tmp_path).close()
    assert (tmp_path / "earlier/1/samples.jsonl").is_symlink() and not os.path.lexists(tmp_path / "samples.jsonl")


def test_a_file_system_without_locks_is_told_by_the_call_that_it_lacks(tmp_path, monkeypatch):
    def absent(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", absent)
    with pytest.raises(RunFolderError, match=r"locks no files \(flock: Function not implemented\).*Lustre: with"):
        RunFolder(tmp_path)


def test_a_broken_line_inside_of_a_file_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        read_jsonl(file)


def test_lines_are_strict_json_whatever_stands_in_the_record():
    record = {"a": np.float32(0.5), "b": np.arange(2), "c": float("nan"), "d": [float("inf")], "e": "line\nbreak é"}
    line = json_line(record)
    assert line.count("\n") == 1
    parsed = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert parsed == {"a": 0.5, "b": [0, 1], "c": None, "d": [None], "e": "line\nbreak é"}


def test_config_and_environment_are_written_and_no_secret_is(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-3141")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    folder = RunFolder(tmp_path)
    folder.write_config({"trainer": {"seed": 1}, "text": "größer"})
    folder.write_environment()
    folder.close()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"trainer": {"seed": 1}, "text": "größer"}
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert {"hrl", "git", "python", "packages", "cores"} <= environment.keys()
    assert environment["cores"] == 3, "those that the run may use, not those of the machine"
    assert environment["packages"]["torch"].startswith("2.")
    assert all("canary" not in file.read_text() for file in tmp_path.iterdir())
    assert os.environ["WANDB_API_KEY"]  # it was there to be leaked


def test_a_place_that_cannot_be_written_names_the_key():
    with pytest.raises(RunFolderError, match="/proc/nope can't be written: .*trainer.default_local_dir"):
        RunFolder("/proc/nope")


def test_a_full_disk_is_told_apart(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hrl.report.run_folder.write_whole", full)
    for write in (lambda: folder.write_config({}), lambda: folder.write_rollouts(1, [])):
        with pytest.raises(RunFolderError, match=f"{tmp_path} can't be written: No space left.*make room there"):
            write()
    folder.close()


# ---------------------------------------------------------------------------------------------- metrics.jsonl


def written(path, *records):
    folder = RunFolder(path, resume=True)
    for step, metrics in records:
        folder.write_metrics(step, metrics)
    folder.close()
    return read_jsonl(folder.metrics_file)


def test_a_record_is_there_as_soon_as_it_is_written(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_metrics(1, {"a": 1.0})
    assert json.loads(folder.metrics_file.read_text()) == {"step": 1, "a": 1.0}
    folder.close()


def test_a_step_that_is_written_twice_has_one_record_with_the_newer_numbers(tmp_path):
    records = written(tmp_path, (0, {"a": 1.0}), (1, {"a": 2.0, "b": 3.0}), (1, {"b": 4.0, "c": float("nan")}), (2, {}))
    assert records == [{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0, "b": 4.0, "c": None}, {"step": 2}]


def test_a_log_is_continued_where_it_ends(tmp_path):
    written(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0}))
    assert written(tmp_path, (2, {"b": 5.0}), (3, {"a": 3.0})) == [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0, "b": 5.0},
        {"step": 3, "a": 3.0},
    ]


def test_steps_only_grow(tmp_path):
    with pytest.raises(ValueError, match=r"metrics.jsonl is at step 3, so step 2 can't be written"):
        written(tmp_path, (3, {}), (2, {}))
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 3}]


def test_the_model_of_an_earlier_run_moves_with_its_outputs(tmp_path):
    first = RunFolder(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("first")
    first.close()
    assert first.earlier is None
    resumed = RunFolder(tmp_path, resume=True)
    resumed.close()
    assert (tmp_path / "model").is_dir() and resumed.earlier is None
    second = RunFolder(tmp_path)
    second.close()
    assert second.earlier == tmp_path / "earlier/1"
    assert (second.earlier / "model/config.json").read_text() == "first" and not (tmp_path / "model").exists()


def test_a_refused_start_lets_go_of_the_folder_even_while_its_error_is_looked_at(tmp_path):
    (tmp_path / "earlier").write_text("a file")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError) as kept:  # with its frames, as a notebook keeps the last error
        RunFolder(tmp_path)
    (tmp_path / "earlier").unlink()
    RunFolder(tmp_path).close()
    assert kept.value is not None


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (b'{"step": 1\n', r"metrics\.jsonl, line 2, is damaged: Expecting ',' delimiter.*Remove the line"),
        (b"3\n", r"line 2, is damaged: 3 is no JSON object"),
        (b"\xff\n", r"metrics\.jsonl is damaged: 'utf-8' codec can't decode"),
    ],
)
def test_a_damaged_file_is_an_error_that_explains_itself(tmp_path, damage, told):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + damage + b'{"step": 2}\n')
    with pytest.raises(DamagedFileError, match=told):
        read_jsonl(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("config.yaml", "a: [", r"config\.yaml is damaged: while parsing"),
        ("config.yaml", "", r"config\.yaml is damaged: it has no keys"),
        ("environment.json", "{", r"environment\.json is damaged: Expecting"),
        ("outcome.json", '{"x": 1}', r"outcome\.json is damaged: .*unexpected keyword"),
        ("first_look.json", "[]", r"first_look\.json is damaged: it has no keys"),
    ],
)
def test_the_page_of_a_run_with_a_damaged_file_names_the_file(tmp_path, name, text, told):
    (tmp_path / "config.yaml").write_text("data: {}\n")
    assert "again" in run_page(tmp_path).sections  # a run that was killed before it wrote more has a page
    (tmp_path / name).write_text(text)
    with pytest.raises(DamagedFileError, match=told):
        run_page(tmp_path)


@pytest.mark.parametrize(
    ("name", "record", "told"),
    [
        ("metrics.jsonl", {"step": 1, "reward/mean": [1.0]}, r"line 1, is damaged: reward/mean is not a number"),
        ("metrics.jsonl", {"step": 1, "reward/mean": 10**400}, "reward/mean is not a number"),
        ("rollouts/step_3.jsonl", {"prompt": [], "response": "x"}, "line 1, is damaged: prompt is not a text"),
        ("rollouts/step_3.jsonl", {"prompt": "x"}, "line 1, is damaged: there is no response"),
        ("rollouts/step_3.jsonl", {"prompt": "x", "response": "y", "score": "1"}, "score is not a number"),
        (
            "rollouts/step_3.jsonl",
            {"prompt": "x", "response": "y", "reward_parts": {"a": {}}},
            "line 1, in reward_parts, is damaged: a is not a number",
        ),
        ("alarms.jsonl", {"step": 1, "alarm": {}}, "line 1, is damaged: alarm is not a text"),
        ("first_look.json", {"advice": []}, "is damaged: there is no headline"),
        ("first_look.json", {"headline": "x", "advice": [1]}, "advice is not a list of texts"),
        ("outcome.json", {"status": "finished", "total_steps": "3"}, "total_steps is not a whole number"),
    ],
)
def test_a_field_that_no_run_writes_is_named_with_file_and_line(tmp_path, name, record, told):
    run = finished_run(tmp_path)
    (run / name).write_text(json.dumps(record) + "\n")
    with pytest.raises(DamagedFileError, match=told) as caught:
        run_page(run)
    assert str(run / name) in str(caught.value) and "Remove the line" in str(caught.value)


@pytest.mark.parametrize("text", ["9" * 5000, '{"a":' * 100_000], ids=["digits", "deep"])
def test_a_line_that_json_fails_on_is_a_damaged_one(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{text}\n')
    with pytest.raises(DamagedFileError, match="line 2, is damaged"):
        read_jsonl(tmp_path / "metrics.jsonl")


def test_an_integer_of_more_digits_than_python_writes_is_written_as_text():
    assert json.loads(json_line({"ground_truth": [10**5000, 7]})) == {"ground_truth": [hex(10**5000), 7]}
