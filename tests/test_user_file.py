"""Which files a Python file of the user's imports, found without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from hrl.user_file import imported_files

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
