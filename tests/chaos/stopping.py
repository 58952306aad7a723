"""Signals to a run, on a terminal of its own, and faults of machines where it may start again.

After each, the same command ends the run, and at the end it is the one that nobody stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos import small
from tests.chaos.faults import Fault, Outcome
from tests.chaos.same_run import differences
from tests.runs.runner import ROOT, descendants

STEPS = 8
#: How long a run may take to come to a moment, and to end, on a machine that does other things too.
PATIENCE_S = 240.0
#: What is left of a step, a save, the end of all processes and the report.
END_S = 90.0
GONE_S = 15.0

COMMON = (
    "trainer.val_before_train=false",
    "trainer.cpu_threads_per_worker=1",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "trainer.save_freq=4",
    f"trainer.total_training_steps={STEPS}",
)
HF = ("actor_rollout_ref.rollout.name=hf",)


@dataclass
class OnTerminal:
    """A run in the foreground of a terminal of its own.

    Args:
        arguments: Of Python.
    """

    arguments: Sequence[str]
    said: bytes = b""
    family: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.master, slave = pty.openpty()
        self.popen = subprocess.Popen(
            [sys.executable, *self.arguments],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_own_terminal,
            env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"},
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody has the other end
            while piece := os.read(self.master, 4096):
                self.said += piece

    @property
    def text(self) -> str:
        return self.said.decode(errors="replace").replace("\r", "")

    def look(self) -> None:
        with contextlib.suppress(IndexError):  # psutil read of a process that was ending
            self.family |= {child.pid: child for child in descendants(self.popen.pid)}

    def comes_to(self, reached: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                return False
            self.look()
            time.sleep(0.05)
        self.look()
        return True

    def end(self, patience_s: float = END_S) -> str:
        """Wait for the end; return what is wrong with it, in words."""
        deadline = time.monotonic() + patience_s
        while self.popen.poll() is None:
            self.look()
            if time.monotonic() > deadline:
                os.killpg(self.popen.pid, signal.SIGKILL)
                self.popen.wait(GONE_S)
                return f"it did not end within {patience_s:g} s"
            time.sleep(0.1)
        left = psutil.wait_procs(list(self.family.values()), timeout=GONE_S)[1]
        self._reader.join(2)
        return f"left running: {[process.pid for process in left]}" if left else ""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.master)


def _own_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these faults may be injected under `nohup`
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def arguments(folder: Path, *overrides: str) -> list[str]:
    return ["-m", "hrl.trainer.main_ppo", *small.runner().arguments(folder, *COMMON, *overrides)]


def to_its_end(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal."""
    command = [sys.executable, *arguments(folder, *overrides)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)


@functools.cache
def straight(overrides: tuple[str, ...]) -> Path:
    """The run that nobody stops."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-stopping-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    done = to_its_end(folder / "run", *overrides)
    if done.returncode != 0:
        raise AssertionError(f"the run that nobody stops ended with {done.returncode}: {done.stderr[-500:]}")
    return folder / "run"


def logged(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def ctrl_c(run: OnTerminal) -> None:
    os.write(run.master, b"\x03")


def to_all(number: signal.Signals) -> Callable[[OnTerminal], None]:
    """As from Slurm, which signals every process of a step."""

    def send(run: OnTerminal) -> None:
        for process in (psutil.Process(run.popen.pid), *descendants(run.popen.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    return send


def to_driver(number: signal.Signals) -> Callable[[OnTerminal], None]:
    return lambda run: run.popen.send_signal(number)


def stopped(
    act: Callable[[OnTerminal], None],
    *overrides: str,
    reached: Callable[[Path], bool] = lambda folder: logged(folder) >= 2,
    says: str = "again to stop now",
) -> Callable[[Path], Outcome]:
    """The run is saved with status 75, and the same command makes it the one that nobody stopped."""

    def inject(folder: Path) -> Outcome:
        whole = straight(overrides)
        at = folder / "run"
        run = OnTerminal(arguments(at, *overrides))
        try:
            if not run.comes_to(lambda: reached(at)):
                return Outcome(0, PATIENCE_S, f"it did not come so far: {run.text[-200:]}")
            began = time.monotonic()
            act(run)
            wrong = run.end()
            seconds = time.monotonic() - began
        finally:
            run.close()
        if wrong or run.popen.returncode != 75:
            return Outcome(0, seconds, wrong or f"status {run.popen.returncode}: {run.text[-300:]!r}")
        if says not in run.text:
            return Outcome(1, seconds, f"it does not say {says!r}: {run.text[-200:]!r}")
        again = to_its_end(at, *overrides)
        found = differences(whole, at) if again.returncode == 0 else [f"the same command ended with {again.returncode}"]
        last = run.text.strip().splitlines()[-1] if run.text.strip() else ""
        return Outcome(0 if found else 2, seconds, "; ".join(found[:2]) or last)

    return inject


def ended_now(
    act: Callable[[OnTerminal], None], status: int, reached: Callable[[Path, OnTerminal], bool], *overrides: str
) -> Callable[[Path], Outcome]:
    """The run ends with a status, and promises nothing."""

    def inject(folder: Path) -> Outcome:
        at = folder / "run"
        run = OnTerminal(arguments(at, *HF, *overrides))
        try:
            if not run.comes_to(lambda: reached(at, run)):
                return Outcome(0, PATIENCE_S, f"it did not come so far: {run.text[-200:]}")
            began = time.monotonic()
            act(run)
            wrong = run.end(60)
            seconds = time.monotonic() - began
        finally:
            run.close()
        if wrong or run.popen.returncode != status:
            return Outcome(0, seconds, wrong or f"status {run.popen.returncode}: {run.text[-300:]!r}")
        if "the same command continues after step" in run.text:
            return Outcome(0, seconds, "it says that the same command continues, and nothing is saved")
        return Outcome(2 if "interrupted" in run.text else 1, seconds, "interrupted")

    return inject


def twice(run: OnTerminal) -> None:
    ctrl_c(run)
    run.comes_to(lambda: "again to stop now" in run.text)  # Ray lets a process answer once in a second
    time.sleep(0.7)  # less would be one request
    ctrl_c(run)


def killed(name: str, *overrides: str) -> Callable[[Path], Outcome]:
    """A process of the run is killed, and `trainer.max_restarts` starts the run again."""

    def inject(folder: Path) -> Outcome:
        whole = straight((*overrides, "trainer.max_restarts=2"))
        at = folder / "run"
        run = OnTerminal(arguments(at, *overrides, "trainer.max_restarts=2"))
        try:
            if not run.comes_to(lambda: logged(at) >= 5 and (at / "checkpoints" / "step_4").is_dir()):
                return Outcome(0, PATIENCE_S, f"it did not come so far: {run.text[-200:]}")
            began = time.monotonic()
            victims = [process for process in descendants(run.popen.pid) if name in " ".join(process.cmdline())]
            if not victims:
                return Outcome(0, 0.0, f"there is no process {name}")
            victims[0].kill()
            wrong = run.end(PATIENCE_S)
            seconds = time.monotonic() - began
        finally:
            run.close()
        if wrong or run.popen.returncode != 0:
            return Outcome(0, seconds, wrong or f"status {run.popen.returncode}: {run.text[-300:]!r}")
        said = next((line for line in run.text.splitlines() if line.startswith("a machine failed: ")), "")
        found = [what for what in differences(whole, at) if not ("run/restarts" in what and "(1 differ)" in what)]
        if found:
            return Outcome(0, seconds, "; ".join(found[:2]))
        return Outcome(2 if said and "restart 1 of 2" in run.text else 1, seconds, said)

    return inject


def close_terminal(run: OnTerminal) -> None:
    os.close(run.master)


ONCE, TWICE, AGAIN = (
    "asked to stop once",
    "asked to stop twice, or with nothing to save",
    "a machine's fault, to start again",
)
FAULTS = [
    Fault(ONCE, "Ctrl-C on the terminal, to the whole group", stopped(ctrl_c, *HF)),
    Fault(ONCE, "SIGTERM to every process of the job", stopped(to_all(signal.SIGTERM), *HF)),
    Fault(ONCE, "SIGTERM to every process of the job, vLLM", stopped(to_all(signal.SIGTERM))),
    Fault(ONCE, "SIGUSR1 to the driver", stopped(to_driver(signal.SIGUSR1), *HF)),
    Fault(ONCE, "the terminal closed", stopped(close_terminal, *HF, says="")),
    Fault(
        ONCE,
        "SIGTERM while a checkpoint is written",
        stopped(
            to_driver(signal.SIGTERM),
            *HF,
            reached=lambda folder: any((folder / "checkpoints").glob("*step_4")),
        ),
    ),
    Fault(
        TWICE,
        "Ctrl-C, and again",
        ended_now(twice, 130, lambda at, run: logged(at) >= 2, "trainer.save_freq=-1", "data.max_response_length=190"),
    ),
    Fault(
        TWICE,
        "SIGTERM while Ray starts",
        ended_now(to_driver(signal.SIGTERM), 75, lambda at, run: "starting Ray" in run.text),
    ),
    Fault(
        TWICE,
        "SIGTERM while models are loaded",
        ended_now(to_driver(signal.SIGTERM), 75, lambda at, run: "loading actor_rollout" in run.text),
    ),
    Fault(AGAIN, "a rank killed", killed("ray::RankProcess", *HF)),
    Fault(AGAIN, "an engine killed", killed("multiprocessing.spawn")),
]
