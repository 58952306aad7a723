"""Runs stages one after the other, each in a process group of its own with a deadline."""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.first_light.report import ABSENT, ENDED, FAILED, PASSED, StageResult, read_rows, write_tables
from tests.first_light.stages import Setup, Stage

BUDGET_S = 3360.0
_ROOT = Path(__file__).parents[2]
_LAST_WORDS_CHARACTERS = 4000
_GRACE_S = 5.0


def run_stages(
    stages: Iterable[Stage], setup: Setup, budget_s: float = BUDGET_S, patience: float = 1.0
) -> list[StageResult]:
    """Runs them all, whatever becomes of any; the tables are written anew after each.

    Args:
        stages: in order.
        setup: for all of them.
        budget_s: a stage that begins later than this is not run; one that would end later has that much less time.
        patience: how often its deadline a stage has.
    """
    end = time.monotonic() + budget_s
    folder = Path(setup.folder)
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(setup)
    results: list[StageResult] = []
    for stage in stages:
        results.append(_run(stage, setup, min(patience * stage.deadline_s, end - time.monotonic())))
        write_tables(folder, machine, results)
    return results


def describe_machine(setup: Setup) -> dict[str, Any]:
    """Device, versions and cores, for the head of the table."""
    import torch
    import transformers

    card = torch.cuda.get_device_name() if setup.device == "cuda" else platform.processor() or "CPU"
    return {
        "device": card,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cores": len(os.sched_getaffinity(0)),
    }


def _run(stage: Stage, setup: Setup, deadline_s: float) -> StageResult:
    missing = [name for name in stage.needs if importlib.util.find_spec(name) is None]
    if missing:
        return StageResult(stage.name, ABSENT, 0.0, reason=f"{', '.join(missing)} not installed")
    if deadline_s <= 0:
        return StageResult(stage.name, ABSENT, 0.0, reason="no time left")
    folder = Path(setup.folder)
    rows, log = folder / f"{stage.name}.jsonl", folder / f"{stage.name}.log"
    rows.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.first_light", "--inside", stage.module, "--rows", str(rows)]
    command += ["--device", setup.device, "--out", setup.folder, *(["--tiny"] if setup.tiny else [])]
    started = time.monotonic()
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    seconds = time.monotonic() - started
    if code is None:
        return StageResult(stage.name, ENDED, seconds, read_rows(rows), f"after {deadline_s:.0f} s")
    last_words = log.read_text(errors="replace")[-_LAST_WORDS_CHARACTERS:]
    return StageResult(
        stage.name, PASSED if code == 0 else FAILED, seconds, read_rows(rows), last_words if code else ""
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever the stage has left: engines, ranks, a process that hangs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.1)
    process.wait(_GRACE_S)
