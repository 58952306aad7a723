"""Which files a Python file of the user's imports, found without running anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hrl.config.compose import compose_cli
from hrl.environments.loading import EnvironmentLoadError, EnvironmentMaker, EnvironmentSpec
from hrl.errors import ConfigError
from hrl.user_file import RunWhileReadError, imported_files, load_user_file, refuse_while_reading

FILES = {
    "mine.py": "import os, torch, helper\nfrom pack.sub import name\nimport loose.inner\n\ndef f():\n    import late\n",
    "helper.py": "import deep, mine\n",
    "deep.py": "from .. import outside\nfrom ......... import nothing\n",
    "late.py": "def (",
    "unused.py": "",
    "os.txt": "",
    "pack/__init__.py": "from . import other\nfrom .third import g\n",
    "pack/sub.py": "",
    "pack/other.py": "import helper\n",
    "pack/third.py": "",
    "pack/unused.py": "",
    "loose/inner.py": "",
}
IMPORTED = {
    "deep.py",
    "helper.py",
    "late.py",
    "loose/inner.py",
    "pack/__init__.py",
    "pack/other.py",
    "pack/sub.py",
    "pack/third.py",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_what_a_file_imports_from_beside_it_is_found_through_other_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path, {"outside.py": ""})
    write(tmp_path / "own", FILES)
    found = imported_files(tmp_path / "own" / "mine.py")
    assert {str(file.relative_to(tmp_path / "own")) for file in found} == IMPORTED


@pytest.mark.parametrize("text", ["", "def (", "import torch", "import mine"])
def test_a_file_without_such_imports_has_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"mine.py": text})
    assert imported_files(tmp_path / "mine.py") == []


TRAINS = """import hrl

class Mine(hrl.SingleTurn):
    pass

def main():
    trainer = hrl.GRPO(environment=Mine, data=[{"prompt": "Play."}])
    trainer.%s

main()
"""


@pytest.mark.parametrize("does", ["train()", "evaluate()", "generate('?')", "save_hf('x')", "start()", "__enter__()"])
def test_a_file_that_is_read_starts_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    (tmp_path / "pk").mkdir()
    (tmp_path / "pk" / "nomain.py").write_text(TRAINS % does)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = '^pk/nomain.py:10 starts a run while hrl reads it: put it under `if __name__ == "__main__":`$'
    with pytest.raises(RunWhileReadError, match=told):
        load_user_file("pk/nomain.py")
    for named in ("pk/nomain.py:Mine", "pk.nomain:Mine"):
        with pytest.raises(EnvironmentLoadError, match=told):
            EnvironmentMaker(EnvironmentSpec.of(named))
        sys.modules.pop("pk.nomain", None)


def test_a_file_named_for_an_estimator_starts_no_run_while_the_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TRAINS % "train()")
    with pytest.raises(ConfigError, match=r"mine\.py:10 starts a run while hrl reads it"):
        compose_cli([f"algorithm.adv_estimator={tmp_path}/mine.py:mine", "data.train_files=bundled:addition/train"])


def test_what_is_read_may_be_run_behind_that(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no')")
    with pytest.raises(ValueError, match="no"):
        load_user_file(tmp_path / "broken.py")
    refuse_while_reading()
