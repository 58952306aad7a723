"""Does a test notice? Puts each mistake of ``mutants/`` into a copy of the package and runs the tests named for it.

``python -m tests.mutation.run [words ...]`` (``make mutation``) prints each verdict and fails where less than 95 % of
the mistakes are caught. Caught is a mistake with which a test fails. Tests that do not end in time or can not be
collected say nothing about it; they are counted by themselves, and not as caught. Words choose mutants whose file or
description contains one of them.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import hypothesis
import pytest
import torch
import transformers.models.llama.modeling_llama  # noqa: F401  (likewise)
from rich.console import Console

from tests.mutation.mutants import Mutant, all_mutants

ROOT = Path(__file__).parents[2]
JOBS = os.cpu_count() or 1
TIMEOUT_S = 180.0
WANTED = 0.95
CAUGHT, SURVIVED, TIMEOUT, NO_VERDICT = "caught", "survived", "did not end in time", "no verdict"


@dataclass(frozen=True)
class Verdict:
    """What the tests said about a mistake.

    Attributes:
        kind: one of the four above.
        said: the test that failed, or how the tests ended without a verdict.
    """

    kind: str
    said: str = ""


def copy_of_the_package(folder: Path) -> Path:
    """Code, tests and configuration, without what Python made of them."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("hrl", "tests", "configs", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(folder: Path, tests: Iterable[str], report: Path) -> None:
    """A child process: pytest in the copy, up to the first failure; what it says goes to ``report``."""
    with report.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # two versions of a file may have one size and be of one second
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "hrl")]:
        del sys.modules[name]
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None)
    # By the option, since tests/conftest.py loads a profile of its own.
    code = pytest.main(
        ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-profile=mutation", *tests]
    )
    sys.stdout.flush()
    os._exit(int(code))


def examine(mutant: Mutant, folder: Path) -> mp.Process:
    """Starts the tests of one mutant in a copy of its own."""
    copy_of_the_package(folder)
    (folder / mutant.file).write_text(mutant.applied_to(ROOT))
    process = mp.get_context("fork").Process(target=run_tests, args=(folder, mutant.tests, folder / "report.txt"))
    process.start()
    return process


def verdict(process: mp.Process, folder: Path) -> Verdict:
    """What pytest's exit code says: 1 is a failed test, 0 none, and anything else is no answer."""
    if process.is_alive():
        process.kill()
        process.join()
        return Verdict(TIMEOUT)
    process.join()
    if process.exitcode == pytest.ExitCode.OK:
        return Verdict(SURVIVED)
    text = (folder / "report.txt").read_text()
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if process.exitcode != pytest.ExitCode.TESTS_FAILED or found is None:
        return Verdict(NO_VERDICT, f"exit code {process.exitcode}")
    return Verdict(CAUGHT, found[1].removeprefix("tests/"))


def examine_all(mutants: list[Mutant], scratch: Path, console: Console) -> list[Verdict]:
    """The verdict on each, ``JOBS`` at a time, printed as it falls."""
    verdicts = [Verdict(NO_VERDICT)] * len(mutants)
    waiting, running = list(enumerate(mutants)), {}
    while waiting or running:
        while waiting and len(running) < JOBS:
            index, mutant = waiting.pop(0)
            folder = scratch / str(index)
            running[index] = (examine(mutant, folder), folder, time.monotonic())
        wait([process.sentinel for process, _, _ in running.values()], timeout=1.0)
        for index, (process, folder, started) in list(running.items()):
            if not process.is_alive() or time.monotonic() - started > TIMEOUT_S:
                found = verdicts[index] = verdict(process, folder)
                mutant = f"{Path(mutants[index].file).stem}, {mutants[index].breaks}"
                console.print(f"{mutant:<70} {found.kind:<9} {found.said}", markup=False, highlight=False)
                shutil.rmtree(folder)
                del running[index]
    return verdicts


def sound_tests_pass(mutants: list[Mutant], scratch: Path) -> bool:
    """The tests pass without any mistake; otherwise nothing here means anything."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    folder = copy_of_the_package(scratch / "sound")
    process = mp.get_context("fork").Process(target=run_tests, args=(folder, tests, folder / "report.txt"))
    process.start()
    process.join(TIMEOUT_S * 3)
    if process.exitcode == 0:
        return True
    sys.stderr.write((folder / "report.txt").read_text())
    return False


def main(words: list[str]) -> int:
    """Exit code: 0 where enough is caught."""
    mutants = [m for m in all_mutants() if not words or any(w in m.file or w in m.breaks for w in words)]
    console = Console(width=180)
    with tempfile.TemporaryDirectory(prefix="hrl-mutation-") as name:
        scratch = Path(name)
        if not mutants or not sound_tests_pass(mutants, scratch):
            console.print("no mutant chosen" if not mutants else "the tests fail without any mistake in the code")
            return 2
        started = time.monotonic()
        verdicts = examine_all(mutants, scratch, console)
    counts = Counter(found.kind for found in verdicts)
    share, seconds = counts[CAUGHT] / len(mutants), time.monotonic() - started
    others = ", ".join(f"{counts[kind]} {kind}" for kind in (SURVIVED, TIMEOUT, NO_VERDICT))
    console.print(f"caught {counts[CAUGHT]} of {len(mutants)} ({share:.1%}); {others}; in {seconds:.0f} s")
    return 0 if share >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
