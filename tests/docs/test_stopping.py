"""The examples of docs/stopping.md: the batch script, with stand-ins for run and Slurm, and the Kubernetes job."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from hrl.trainer.command import EXIT_CONFIG, EXIT_NONFINITE, EXIT_STOPPED

PAGE = Path(__file__).parents[2] / "docs" / "stopping.md"

#: The run notes the signal, works on for a moment, and ends with the status that is given.
STAND_INS = """
python() {{
    exec bash -c 'trap "asked=1" USR1; echo begun; while [ -z "$asked" ]; do sleep 0.1; done; sleep 0.3; exit {status}'
}}
scontrol() {{ echo "$@"; }}
SLURM_JOB_ID=17
"""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    return bool(int(caught, 16) >> number - 1 & 1)


@pytest.mark.parametrize(("status", "requeued"), [(75, "requeue 17\n"), (0, ""), (2, "")])
def test_the_batch_script_passes_the_signal_on_waits_asks_for_another_start_where_it_helps_and_ends_as_the_run(
    status: int, requeued: str
) -> None:
    (script,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    with subprocess.Popen(
        ["bash", "-c", STAND_INS.format(status=status) + script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        deadline = time.monotonic() + 10
        while not catches(process.pid, signal.SIGUSR1) and time.monotonic() < deadline:  # the trap is set after that
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=30)[0] == requeued
    assert process.returncode == status


def test_the_kubernetes_job_starts_a_stopped_run_again_and_nothing_that_would_fail_again() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    job = yaml.safe_load(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    by_status = {
        status: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {"values": ()})["values"]
    }
    assert by_status == {EXIT_CONFIG: "FailJob", EXIT_NONFINITE: "FailJob", EXIT_STOPPED: "Ignore"}
    assert pod["restartPolicy"] == "Never", "a podFailurePolicy is refused with any other"
    assert f"trainer.grace_s={pod['terminationGracePeriodSeconds']}" in container["command"]
