"""`python -m bench` with benchmarks that are fakes: what it runs, what it says, what it writes, how it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import bench.__main__ as program
from bench import measure, peers, results
from bench.harness import Case, Comparison
from bench.results import read
from tests.bench.test_results import ORIGIN, ROW, Found, write

Run = Callable[..., int]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two benchmarks, `adding` and the heavier `sorting`; without peers."""
    (tmp_path / "adding.py").write_text('"""Adding.\n\nNumbers.\n"""\n\nSECONDS = 30\nTHREADS = 2\nHEAVY = True\n')
    (tmp_path / "sorting.py").write_text('"""Sorting.\n\nNumbers.\n"""\n\nSECONDS = 60\n')
    for module, name, path in (
        (program, "HERE", ""),
        (program, "FOLDER", "results"),
        (results, "HERE", ""),
        (results, "FOLDER", "results"),
        (results, "PAGE", "RESULTS.md"),
    ):
        monkeypatch.setattr(module, name, tmp_path / path)
    monkeypatch.setattr(peers, "install", lambda: None)
    return tmp_path


@pytest.fixture
def bench(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program. Each benchmark of `ends` writes its figures and ends with its status."""

    def run(*names: str, ratio: float = 4.0, ends: dict[str, int] | None = None) -> int:
        def process(command: list[str], **_: Any) -> SimpleNamespace:
            *_, name, file = command
            status = (ends or {}).get(name, 0)
            if status == 0:
                write(Path(file), Found(ORIGIN, [replace(ROW, theirs=ratio * ROW.ours)]))
            return SimpleNamespace(returncode=status)

        monkeypatch.setattr(program.subprocess, "run", process)
        monkeypatch.setattr(sys, "argv", ["bench", *names])
        return program.main()

    return run


def test_all_benchmarks_run_the_heavy_ones_last(bench: Run, fakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == 0
    assert capsys.readouterr().err == "sorting, adding: about 2 minutes\n"
    page = (fakes / "RESULTS.md").read_text()
    assert page.index("## Sorting") < page.index("## Adding")


def test_one_benchmark_runs_by_its_name_and_the_others_keep_their_place_on_the_page(bench: Run, fakes: Path) -> None:
    bench()
    figures = (fakes / "results" / "adding.json").stat().st_mtime_ns

    assert bench("sorting") == 0

    assert (fakes / "results" / "adding.json").stat().st_mtime_ns == figures
    assert "## Adding" in (fakes / "RESULTS.md").read_text()


def test_a_ratio_below_its_floor_is_named_and_ends_it_with_1(
    bench: Run, fakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("sorting", ratio=2.9) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[1:] == [
        "sorting: 512 rows: 2.9 times less seconds than verl 0.9.1; the floor is 3",
    ]
    assert "3 **missed**" in (fakes / "RESULTS.md").read_text()


def test_one_that_was_not_asked_for_is_not_told_of(bench: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("adding", ratio=1.0) == 1
    capsys.readouterr()
    assert bench("sorting") == 0
    assert "adding" not in capsys.readouterr().err


def test_a_benchmark_that_crashes_ends_it_with_1_after_the_others(
    bench: Run, fakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(ends={"sorting": 1}) == 1
    assert capsys.readouterr().err.splitlines()[1:] == ["sorting failed"]
    page = (fakes / "RESULTS.md").read_text()
    assert "## Adding" in page and "## Sorting" not in page


def test_one_that_crashes_keeps_its_figures_and_is_not_judged_by_them(
    bench: Run, fakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("sorting", ratio=1.0)
    capsys.readouterr()
    assert bench("sorting", ends={"sorting": -9}) == 1
    assert capsys.readouterr().err.splitlines()[1:] == ["sorting failed"]
    assert "## Sorting" in (fakes / "RESULTS.md").read_text()


def test_one_that_does_not_end_is_ended(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def process(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(program.subprocess, "run", process)
    assert program.run("sorting") is False
    assert capsys.readouterr().err == "sorting did not end within 900 s\n"


def test_a_benchmark_has_the_threads_that_it_names(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def process(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        seen[command[-2]] = env["OMP_NUM_THREADS"]
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(program.subprocess, "run", process)
    assert program.run("sorting") and program.run("adding")
    assert seen == {"sorting": "1", "adding": "2"}


def test_list_prints_the_names_and_runs_nothing(bench: Run, fakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--list") == 0
    assert capsys.readouterr().out == "sorting\nadding\n"
    assert not (fakes / "results").exists()


def test_an_unknown_name_ends_it_with_2_and_the_names_there_are(
    bench: Run, fakes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        bench("sorted", "adding")
    assert error.value.code == 2
    assert "there is no benchmark sorted; there are sorting, adding" in capsys.readouterr().err
    assert not (fakes / "results").exists()


# ---- the process of one benchmark ---------------------------------------------------------------------------------


def measured(monkeypatch: pytest.MonkeyPatch, file: Path, *cases: Case | Comparison) -> None:
    module = ModuleType("bench.fake")
    module.cases = lambda: iter(cases)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.fake", module)
    monkeypatch.setattr(peers, "importable", lambda: None)
    measure.main("fake", file)


def equal(ours: int, theirs: int) -> None:
    assert ours == theirs


def test_a_benchmark_writes_its_rows_with_the_commit(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.origin, "commit", lambda: "abc1234")
    case = Case("a", "peer", lambda: 1, lambda: 1, equal, 1e9, rounds=1)

    measured(monkeypatch, fakes / "results" / "fake.json", case)

    found = read("fake")
    assert found is not None
    assert [(row.label, row.quantity) for row in found.rows] == [("a", "seconds"), ("a", "CPU seconds")]
    assert found.origin.commit == "abc1234" and found.origin.took_s > 0


def test_a_benchmark_without_a_peer_gives_what_it_has_compared_with_a_limit(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = replace(ROW, label="12 hops", peer="the limit", quantity="MiB")
    measured(monkeypatch, fakes / "results" / "fake.json", grown)
    found = read("fake")
    assert found is not None and found.rows == [grown]
    assert capsys.readouterr().err == "  fake: 12 hops: 0.5 MiB, the limit 2, 4.0×\n"


def test_a_benchmark_whose_results_differ_writes_nothing(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fakes / "results" / "fake.json"
    good, bad = (Case("a", "peer", lambda: 1, lambda n=n: n, equal, rounds=1) for n in (1, 2))
    with pytest.raises(AssertionError):
        measured(monkeypatch, file, good, bad)
    assert not file.exists()


# ---- the real ones ------------------------------------------------------------------------------------------------


def test_every_benchmark_says_what_it_is_and_how_long_it_takes() -> None:
    names = program.names()
    assert {"gae", "driver_hop", "grpo_step"} <= set(names)
    for name in names:
        title, _, text = results._docstring(name).partition("\n")
        assert title.endswith(".") and len(text) > 100, name
        assert int(results.constant(name, "THREADS")) > 0, name
        assert program.seconds(name) > 0, name


def test_all_benchmarks_together_take_21_minutes_at_most() -> None:
    assert sum(map(program.seconds, program.names())) <= 21 * 60
