"""The batch script of docs/stopping.md, with stand-ins for the run and for Slurm."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "stopping.md"

#: The run notes the signal, works on for a moment, and ends with the status that is given.
STAND_INS = """
python() {{
    exec bash -c 'trap "asked=1" USR1; echo begun; while [ -z "$asked" ]; do sleep 0.1; done; sleep 0.3; exit {status}'
}}
scontrol() {{ echo "$@"; }}
SLURM_JOB_ID=17
"""


@pytest.mark.parametrize(("status", "requeued"), [(75, "requeue 17\n"), (1, "")])
def test_the_batch_script_passes_the_signal_on_waits_and_asks_for_another_start_where_it_helps(
    status: int, requeued: str
) -> None:
    (script,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    with subprocess.Popen(
        ["bash", "-c", STAND_INS.format(status=status) + script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=30)[0] == requeued
