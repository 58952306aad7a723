"""The program for the first machine with a GPU, run here as far as a machine without one can."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.first_light import ladder, runner
from tests.first_light.__main__ import main
from tests.first_light.report import (
    ABSENT,
    ENDED,
    FAILED,
    PASSED,
    Findings,
    Row,
    StageResult,
    last_error,
    markdown,
    read_rows,
)
from tests.first_light.stages import STAGES, Setup, Stage
from tests.processes.warm import warm_context

pytestmark = pytest.mark.cluster

BARE = ("ops", "ipc", "engine", "groups", "experts", "optimizers", "ulysses", "activations", "memory")


def inside(arguments: list[str]) -> None:
    """What the runner starts in a process of its own."""
    sys.exit(main(arguments))


@pytest.mark.parametrize("name", BARE)
def test_a_stage_runs_on_a_cpu_and_keeps_its_bounds(tmp_path: Path, name: str) -> None:
    (module,) = (stage.module for stage in STAGES if stage.name == name)
    rows = tmp_path / "rows.jsonl"
    given = ["--inside", module, "--rows", str(rows), "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    process = warm_context().Process(target=inside, args=(given,))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    found = read_rows(rows)
    assert found and all(row.ok is not False for row in found)


def test_bare_stages_are_those_that_need_no_package() -> None:
    assert tuple(stage.name for stage in STAGES if not stage.needs) == BARE
    with_what_is_left = ("sglang", "peer")
    assert sum(stage.deadline_s for stage in STAGES if stage.name not in with_what_is_left) <= runner.BUDGET_S


@pytest.mark.engine
@pytest.mark.parametrize("stage", ["sleep", "adapter", "merged", "routing"])
def test_a_stage_with_an_engine_runs_on_a_cpu(tmp_path: Path, stage: str) -> None:
    pytest.importorskip("vllm")
    assert main(["--stage", stage, "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0, (
        tmp_path / "first-light.md"
    ).read_text() + (tmp_path / f"{stage}.log").read_text()[-3000:]
    assert f"| **{stage}** |" in (tmp_path / "first-light.md").read_text()


def test_the_stage_of_sglang_runs_with_the_stub_in_its_place(tmp_path: Path, monkeypatch) -> None:
    stub = Path(__file__).parents[1] / "workers" / "rollout" / "sglang_stub"
    monkeypatch.syspath_prepend(str(stub))
    monkeypatch.setenv("PYTHONPATH", str(stub))
    assert main(["--stage", "sglang", "--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0, (
        tmp_path / "first-light.md"
    ).read_text() + (tmp_path / "sglang.log").read_text()[-3000:]
    found = [row.what for row in read_rows(tmp_path / "sglang.jsonl")]
    for way in ("server", "engine"):
        for version in (1, 2):
            assert f"{way}: sync {version}: log-probs differ from the trainer's, mean" in found


def test_without_sglang_its_stage_is_left_out(tmp_path: Path) -> None:
    (stage,) = (stage for stage in STAGES if stage.name == "sglang")
    (result,) = runner.run_stages([stage], Setup("cpu", True, str(tmp_path)))
    assert (result.status, result.reason) == (ABSENT, "sglang not installed")


# ---------------------------------------------------------------------------------------------- the runner

FAULTS = {
    "breaks": "def run(setup, findings):\n    findings.add('first', '1')\n    raise ValueError('no such kernel')\n",
    "hangs": (
        "import subprocess, time, os\nfrom pathlib import Path\n"
        "def run(setup, findings):\n    findings.add('first', '1')\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    Path(setup.folder, 'pids').write_text(f'{os.getpid()} {child.pid}')\n    time.sleep(600)\n"
    ),
    "bounds": (
        "def run(setup, findings):\n"
        "    findings.below('apart', 2.0, 1.0)\n    findings.below('nan', float('nan'), 1.0)\n"
    ),
    "works": "def run(setup, findings):\n    findings.below('apart', 0.5, 1.0, ' s')\n",
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StageResult]:
    """Four stages in a row, three of which go wrong in their own way, and one that lacks a package."""
    out = tmp_path_factory.mktemp("faults")
    package = out / "modules" / "tests" / "first_light"
    package.mkdir(parents=True)
    for name, text in FAULTS.items():
        (package / f"fault_{name}.py").write_text(text)
    # A namespace package spans both folders.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(out / "modules"), os.environ.get("PYTHONPATH", "")])
    try:
        stages = [Stage(name, f"fault_{name}", 20.0 if name != "hangs" else 5.0) for name in FAULTS]
        stages.insert(1, Stage("lacks", "fault_works", 20.0, ("a_package_that_is_not_there",)))
        results = runner.run_stages(stages, Setup("cpu", True, str(out)))
    finally:
        os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
    written = json.loads((out / "first-light.json").read_text())["stages"]
    assert [stage["stage"] for stage in written] == [result.stage for result in results]
    return {result.stage: result for result in results}


def test_a_stage_that_breaks_does_not_stop_the_next(faults: dict[str, StageResult]) -> None:
    assert {name: result.status for name, result in faults.items()} == {
        "breaks": FAILED,
        "lacks": ABSENT,
        "hangs": ENDED,
        "bounds": FAILED,
        "works": PASSED,
    }
    assert "ValueError: no such kernel" in faults["breaks"].reason
    assert faults["breaks"].rows == [Row("first", "1")]
    assert "a_package_that_is_not_there" in faults["lacks"].reason


def test_a_stage_that_hangs_is_ended_with_its_children_and_keeps_its_rows(
    faults: dict[str, StageResult], tmp_path_factory
) -> None:
    assert 5.0 <= faults["hangs"].seconds < 20.0
    assert faults["hangs"].rows == [Row("first", "1")]
    (pids,) = tmp_path_factory.getbasetemp().rglob("pids")
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_figure_out_of_bounds_fails_its_stage(faults: dict[str, StageResult]) -> None:
    assert [row.ok for row in faults["bounds"].rows] == [False, False]
    assert "out of bounds: apart, nan" in faults["bounds"].reason
    assert faults["works"].rows == [Row("apart", "0.5 s", "≤ 1 s", True)]


def test_a_stage_for_which_no_time_is_left_is_not_run(tmp_path: Path) -> None:
    started = time.monotonic()
    (result,) = runner.run_stages([STAGES[0]], Setup("cpu", True, str(tmp_path)), budget_s=0.0)
    assert (result.status, result.reason) == (ABSENT, "no time left")
    assert time.monotonic() - started < 5.0


def test_the_table_has_a_line_for_every_stage_and_row() -> None:
    rows = [Row("a | b", "1 ms"), Row("c", "2", "≤ 1", False), Row("d", "0", "≤ 1", True)]
    text = markdown({"device": "H100"}, [StageResult("ops", FAILED, 1.6, rows, "Traceback\nValueError: x\n")])
    assert text.splitlines()[2].endswith("device H100")
    assert text.splitlines()[4:] == [
        "| stage | what | found | wanted | |",
        "| --- | --- | --- | --- | --- |",
        "| **ops** | failed: ValueError: x | 2 s |  |  |",
        "|  | a \\| b | 1 ms |  |  |",
        "|  | c | 2 | ≤ 1 | **no** |",
        "|  | d | 0 | ≤ 1 | ok |",
    ]


def test_the_line_of_a_stage_shows_its_exception_and_not_what_was_printed_after_it() -> None:
    log = (
        'loading\nTraceback (most recent call last):\n  File "a.py", line 1, in run\n    go()\n    ~~^^\n'
        "torch.OutOfMemoryError: CUDA out of memory\nThe card has 79 GiB\n"
        "[W1122 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called\n"
    )
    text = markdown({"device": "H100"}, [StageResult("engine", FAILED, 1.0, [], log)])
    assert "failed: torch.OutOfMemoryError: CUDA out of memory |" in text
    assert last_error("out of bounds: a\n") == "out of bounds: a"


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "rows")
    findings.add("whole", "1")
    with (tmp_path / "rows").open("a") as file:
        file.write('{"what": "cut')
    assert read_rows(tmp_path / "rows") == [Row("whole", "1")]


def test_a_rung_that_cannot_fit_is_not_climbed() -> None:
    parameters, card = 7_615_616_512, 79.1 * 2**30
    tried = {rung.name: ladder.fits(rung, parameters, card) for rung in ladder.RUNGS}
    # 4, 6, 10, 2 and 16 bytes a parameter: 28, 43, 71, 14 and 113 GiB, beside 5 of the rest.
    assert tried == {
        "forward, bfloat16 weights": True,
        "forward, float32 weights": True,
        "step, float32, moments offloaded": True,
        "step, float32, all on the host": True,
        "step, float32, all on the card": False,
    }
    assert ladder.num_parameters("7B") == parameters


def test_the_program_names_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--stage", "nothing"])
    assert "'quickstart'" in capsys.readouterr().err
