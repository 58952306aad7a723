"""Keys of Python as those of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.api.arguments import dotted, file_arguments


def test_a_key_that_holds_a_dict_stays_one() -> None:
    tree = {"trainer": {"seed": 1, "ray_kwargs": {"address": "auto"}}, "data.seed": 2}
    assert dotted(tree, {"trainer.seed", "trainer.ray_kwargs", "data.seed"}) == {
        "trainer.seed": 1,
        "trainer.ray_kwargs": {"address": "auto"},
        "data.seed": 2,
    }


def test_a_file_in_the_home_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_arguments(Path("~/x.yaml")) == ["--config-path", str(tmp_path), "--config-name", "x"]
