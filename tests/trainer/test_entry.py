"""What a signal does to a command that trains in its first second."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

MAINS = tuple(f"hrl.trainer.main_{kind}" for kind in ("ppo", "dpo", "sft", "rm"))


def test_entry_points_import_nothing_large_before_they_answer_signals() -> None:
    script = f"import sys, {', '.join(MAINS)}\nsys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert not imported & {"torch", "ray", "numpy", "hydra", "omegaconf", "pydantic", "psutil", "rich", "xxhash"}


@pytest.mark.parametrize(
    ("command", "number"),
    [(["hrl.trainer.main_sft"], signal.SIGTERM), (["hrl.cli", "train", "sft"], signal.SIGINT)],
    ids=["module", "console script"],
)
def test_a_signal_while_a_command_is_imported_ends_it_with_a_word_and_the_status_to_start_it_again(
    command: list[str], number: signal.Signals
) -> None:
    told = [sys.executable, "-X", "importtime", "-m", *command, "no_such_key=1"]  # status 2 if it comes so far
    with subprocess.Popen(told, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        while not (line := run.stderr.readline()).endswith(" pydantic\n"):  # it has just been imported
            assert line, "the command ended before the signal"
        run.send_signal(number)
        said = [line for line in run.stderr.read().splitlines() if not line.startswith("import time:")]
    assert (run.returncode, said) == (75, ["", "interrupted"])
