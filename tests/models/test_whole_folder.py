"""A model that is written in place of another, and what is there when it can't be written to its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hrl.files import unfinished
from hrl.models.whole_folder import is_free, whole_model


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, **content: str) -> None:
    with whole_model(folder) as new:
        for name, text in content.items():
            (new / name.replace("_json", ".json").replace("_safetensors", ".safetensors")).write_text(text)


def test_a_model_has_its_name_only_when_all_of_it_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    with whole_model(folder) as new:
        (new / "config.json").write_text("new")
        assert not folder.exists() and [new] == list(folder.parent.glob(unfinished("model")))
    assert files(tmp_path) == {"deep/model/config.json": "new"}


def test_a_model_that_can_not_be_written_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, config_json="old", model_safetensors="old")
    with pytest.raises(OSError, match="full"), whole_model(folder) as new:
        (new / "config.json").write_text("new")
        raise OSError("full")
    assert files(tmp_path) == {"model/config.json": "old", "model/model.safetensors": "old"}


def test_of_a_model_before_no_weights_stay_and_what_is_no_model_does(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, **dict.fromkeys(("model-00001-of-00002_safetensors", "config_json", "mine_safetensors"), "old"))
    (folder / "model.safetensors.index.json").write_text("old")
    (folder / "templates").mkdir()
    (folder / "templates" / "old").write_text("old")
    with whole_model(folder) as new:
        (new / "config.json").write_text("new")
        (new / "model.safetensors").write_text("new")
        (new / "templates").mkdir()
        (new / "templates" / "new").write_text("new")
    assert files(tmp_path) == {
        "model/config.json": "new",
        "model/model.safetensors": "new",
        "model/mine.safetensors": "old",
        "model/templates/new": "new",
    }


def test_a_folder_that_is_there_is_filled_from_within_and_its_configuration_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, replace, moved = tmp_path / "model", Path.replace, []
    folder.mkdir()

    def told(self: Path, target: Path) -> Path:
        moved.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", told)
    monkeypatch.setattr(Path, "rename", None)  # as a place where a disk is mounted, and one in a folder of others
    with whole_model(folder) as new:
        assert new.parent == folder and [*tmp_path.iterdir()] == [folder]
        (new / "config.json").write_text("new")
        (new / "tokenizer.json").write_text("new")
    assert moved == ["tokenizer.json", "config.json"] and len(files(folder)) == len([*folder.iterdir()]) == 2


@pytest.mark.parametrize("is_there", [False, True])
def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "a[b]"
    if is_there:
        folder.mkdir()
    place = folder if is_there else tmp_path
    left = place / f".{folder.name}.{'0' * 16}.unfinished"
    mine = place / ".other.0000000000000000.unfinished"
    for each in (left, mine):
        each.mkdir()
        (each / "config.json").write_text("half")
    assert not is_there or not is_free(folder)
    with whole_model(folder) as first:
        assert not left.exists() and mine.exists()
        with pytest.raises(OSError, match="full"), whole_model(folder):
            assert first.exists(), "somebody writes there"
            raise OSError("full")
        (first / "config.json").write_text("new")
    assert (folder / "config.json").read_text() == "new" and mine.exists()
    left.mkdir(parents=True)
    mine.joinpath("config.json").unlink()
    mine.rmdir()
    (folder / "config.json").unlink()
    assert is_free(folder)


def test_a_replacement_that_is_cut_off_leaves_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, replace = tmp_path / "model", Path.replace
    write(folder, config_json="old", model_safetensors="old")

    def cut_off(self: Path, target: Path) -> Path:
        if target.name == "tokenizer.json":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write(folder, config_json="new", model_safetensors="new", tokenizer_json="new")
    assert "config.json" not in files(folder), "so that the files of two models are not taken for one"


def test_files_are_on_the_disk_before_the_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fsync = tmp_path / "model", os.fsync
    synced = []

    def told(handle: int) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, folder.exists()))
        fsync(handle)

    monkeypatch.setattr("os.fsync", told)
    write(folder, config_json="new")
    assert synced[0] == ("config.json", False) and synced[-1] == (tmp_path.name, True)
