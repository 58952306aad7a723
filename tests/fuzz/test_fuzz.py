"""Whatever is in files, in rows and on command lines: it is read, or refused in a sentence, and nothing else.

Few cases of every target are tried here; `HRL_FUZZ_CASES=2000 pytest tests/fuzz`, or `python -m tests.fuzz 10000`,
tries more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.cases import Target, explore, quick_cases
from tests.fuzz.rows import WAYS, read, valid_files, valid_parquet
from tests.fuzz.targets import targets


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name.replace(" ", "-"))
def test_no_case_ends_in_another_traceback(target: Target) -> None:
    tried = explore(target, quick_cases())
    assert tried.cases
    assert not tried.findings, str(tried)


@pytest.mark.parametrize("name", [*valid_files(), *valid_parquet()])
def test_files_that_are_not_damaged_are_taken(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes((valid_files() | valid_parquet())[name])
    pairs = {"sft", "dpo"} if "deep" in name or name in ("data.json", "delta.parquet") else set()
    whole = {"stream"} if name == "data.json" or name.endswith(".parquet") or name == "rows.json.xz" else set()
    for way in set(WAYS) - pairs - whole - ({"stream"} if name == "rows.json" else set()):
        read(path, way)
