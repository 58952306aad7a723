"""What a run must not do on a network, and what must not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.chaos.faults import Fault, Outcome, not_tried
from tests.chaos.small import runner
from tests.processes.process_table import still_alive
from tests.runs.own_network import in_own_network, report_of, why_not

_LIMIT_S = 500.0
_GONE_S = 20.0
_QUICK = ("trainer.cpu_threads_per_worker=1", "trainer.test_freq=-1", "trainer.val_before_train=false")
_STRAYING = """
import os, subprocess

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    subprocess.Popen(["setsid", "sleep", "{seconds}"])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "{seconds}"], {{}})
        os._exit(0)
    os.wait()
    {then}
    return len(set(solution_str)) / 10
"""


def _enclosed(folder: Path, *overrides: str) -> Outcome:
    """A whole run in a network of its own, where the machine's name has an address of another interface."""
    began = time.monotonic()
    if (reason := why_not()) is not None:
        return not_tried(reason)
    arguments = runner().arguments(folder / "run", *_QUICK, "trainer.total_training_steps=2", *overrides)
    done = subprocess.run(
        in_own_network(folder / "network.json", [sys.executable, "-m", "hrl.trainer.main_ppo", *arguments]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    took_s = time.monotonic() - began
    seen = report_of(folder / "network.json")
    if done.returncode != 0:
        return Outcome(0, took_s, f"the run ended with {done.returncode}: {done.stdout[-300:]}")
    if seen.sent or seen.listening:
        return Outcome(0, took_s, f"sent: {seen.sent}; reachable: {seen.listening}")
    return Outcome(2, took_s, "sent nothing, and nobody else can reach it")


def hf_run(folder: Path) -> Outcome:
    """One rank that samples itself."""
    return _enclosed(folder, "actor_rollout_ref.rollout.name=hf")


def engine_run(folder: Path) -> Outcome:
    """One rank and its engine."""
    return _enclosed(folder)


def tensor_parallel_run(folder: Path) -> Outcome:
    """Two ranks with one engine over both."""
    two = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    return _enclosed(folder, "placement=colocated", *two)


def separate_run(folder: Path) -> Outcome:
    """Roles apart, with weights by broadcast."""
    return _enclosed(folder, "placement=separate")


def _sleepers(seconds: str) -> list[int]:
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if process.info["cmdline"] == ["sleep", seconds]]


def _stray(folder: Path, end: str) -> Outcome:
    """A run whose reward function starts, for each sample, a session of its own and a daemon without environment."""
    seconds = f"9{os.getpid()}.{time.monotonic_ns() % 10**6}"  # by which nobody else's are called
    crash = 'if len(os.listdir(os.path.dirname(__file__))) > 1: raise RuntimeError("broken on purpose")'
    reward = folder / "own" / "straying.py"
    reward.parent.mkdir()
    reward.write_text(_STRAYING.format(seconds=seconds, then=crash if end == "a crash" else "pass"))
    steps = 1000 if end == "SIGKILL of the driver" else 2
    process = runner().start(
        folder / "run",
        *_QUICK,
        "actor_rollout_ref.rollout.name=hf",
        f"reward.custom_reward_function.path={reward}",
        f"trainer.total_training_steps={steps}",
    )
    deadline = time.monotonic() + _LIMIT_S
    while not (seen := _sleepers(seconds)) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    if not seen:
        process.kill()
        said = process.communicate(timeout=_GONE_S)[0]
        return Outcome(0, 0.0, f"the fault did not come about: {said[-300:]}")
    began = time.monotonic()
    if end == "SIGKILL of the driver":
        process.send_signal(signal.SIGKILL)
    elif end == "a crash":
        (reward.parent / "now").touch()
    process.communicate(timeout=_LIMIT_S)
    left = still_alive(_sleepers(seconds), within_s=_GONE_S)
    took_s = time.monotonic() - began
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        return Outcome(0, took_s, f"{len(left)} processes outlive the run")
    return Outcome(2, took_s, f"nothing is left; exit status {process.returncode}")


def stray_to_the_end(folder: Path) -> Outcome:
    """The run ends as it should."""
    return _stray(folder, "the end")


def stray_and_crash(folder: Path) -> Outcome:
    """The run fails."""
    return _stray(folder, "a crash")


def stray_and_kill(folder: Path) -> Outcome:
    """Nobody is left to clear up."""
    return _stray(folder, "SIGKILL of the driver")


_NETWORK = "a machine whose name is an address that others reach, and a network that nobody answers on"
_STRAYS = "a reward function starts sessions and daemons"
FAULTS: list[Fault] = [
    Fault(_NETWORK, "one rank", hf_run),
    Fault(_NETWORK, "one rank with vLLM", engine_run),
    Fault(_NETWORK, "two ranks, one engine over both", tensor_parallel_run),
    Fault(_NETWORK, "roles apart", separate_run),
    Fault(_STRAYS, "the run ends", stray_to_the_end),
    Fault(_STRAYS, "the run fails", stray_and_crash),
    Fault(_STRAYS, "SIGKILL of the driver", stray_and_kill),
]
