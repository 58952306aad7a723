"""The list of mistakes is up to date; `make mutation` puts them in and runs the tests."""

import multiprocessing as mp
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.mutants import StaleMutantError, all_mutants, read
from tests.mutation.run import CAUGHT, NO_VERDICT, SURVIVED, TIMEOUT, Verdict, verdict

ROOT = Path(__file__).parents[2]
MUTANTS = all_mutants()


def test_every_mutant_still_applies() -> None:
    for mutant in MUTANTS:
        compile(mutant.applied_to(ROOT), mutant.file, "exec")
        assert all((ROOT / test.split("::")[0]).is_file() for test in mutant.tests), mutant.tests


def test_there_are_enough_and_none_is_there_twice() -> None:
    assert len(MUTANTS) >= 240
    assert Counter((mutant.file, mutant.old, mutant.new) for mutant in MUTANTS).most_common(1)[0][1] == 1


def test_a_mutant_whose_text_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("file: a.py\ntests: t.py\n\n@ sign\n- x + 1\n+ x - 1\n")
    (tmp_path / "a.py").write_text("y = x + 1\n")
    (mutant,) = read(tmp_path / "a.txt")
    assert mutant.applied_to(tmp_path) == "y = x - 1\n"
    (tmp_path / "a.py").write_text("y = x + 2\n")
    with pytest.raises(StaleMutantError, match=r"a.py, 'sign': 'x \+ 1' occurs 0 times"):
        mutant.applied_to(tmp_path)


def test_a_block_without_a_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("file: a.py\ntests: t.py\n\n@ nothing\n- x\n+ x\n")
    with pytest.raises(ValueError, match="'nothing' is no mutant"):
        list(read(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("code", "report", "expected"),
    [
        (pytest.ExitCode.OK, "3 passed", Verdict(SURVIVED)),
        (
            pytest.ExitCode.TESTS_FAILED,
            "FAILED tests/a/test_b.py::test_c - boom",
            Verdict(CAUGHT, "a/test_b.py::test_c"),
        ),
        (pytest.ExitCode.INTERRUPTED, "ERROR tests/a/test_b.py", Verdict(NO_VERDICT, "exit code 2")),
        (pytest.ExitCode.USAGE_ERROR, "file not found", Verdict(NO_VERDICT, "exit code 4")),
        (pytest.ExitCode.NO_TESTS_COLLECTED, "no tests ran", Verdict(NO_VERDICT, "exit code 5")),
    ],
)
def test_only_a_failed_test_catches_a_mistake(tmp_path: Path, code: int, report: str, expected: Verdict) -> None:
    (tmp_path / "report.txt").write_text(report)
    process = mp.get_context("fork").Process(target=os._exit, args=(int(code),))
    process.start()
    process.join()
    assert verdict(process, tmp_path) == expected


def test_tests_that_do_not_end_say_nothing(tmp_path: Path) -> None:
    process = mp.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    assert verdict(process, tmp_path) == Verdict(TIMEOUT)
    assert not process.is_alive()
