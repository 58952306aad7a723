"""Every process of a run dies, or is stopped and stays so: the run ends in time with its name, or goes on.

So does a run of which something else fills the shared memory that its processes share.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from hrl.single_controller.ray_start import START_LIMIT_S
from tests.chaos.checkpoints import NO_MOUNT, can_mount
from tests.chaos.faults import Fault, Outcome, not_tried
from tests.chaos.small import runner

ROOT = Path(__file__).parents[2]
_START_S = 400.0  # on a busy machine
_GRACE_S = 60.0
_LEFT_S = 20.0
_STEPS_BEFORE = 2
_STOPPED = 75
_STORE_BYTES = 80 << 20
"""Of an object store that is no larger than Ray allows."""
_ERROR = re.compile(r"^\w+Error: .*", re.MULTILINE)


@dataclass
class Run:
    """A run of a random model that has made its first steps.

    Attributes:
        process: Its driver.
        folder: Its run folder.
        output: File with what it wrote to the terminal.
        known: Processes of it that are killed at the end, also where it has ended before them.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    output: Path
    known: list[psutil.Process] = field(default_factory=list)

    def steps(self) -> list[dict[str, float]]:
        """Records of the steps so far."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "metrics.jsonl").read_text().split("\n")[:-1]
            return [record for line in lines if "timing_s/step" in (record := json.loads(line))]
        return []

    def wait_for_steps(self, count: int, patience_s: float) -> bool:
        """Wait until it has made so many steps; return whether it has."""
        deadline = time.monotonic() + patience_s
        while len(self.steps()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    @property
    def step_s(self) -> float:
        """Duration of its longest step."""
        return max(record["timing_s/step"] for record in self.steps())

    def family(self) -> list[psutil.Process]:
        """Its processes."""
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def find(self, pattern: str) -> list[int]:
        """Processes whose command line has a pattern, in the order of their start."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append((process.create_time(), process.pid))
        return [pid for _, pid in sorted(found)]


@contextmanager
def begun(folder: Path, *overrides: str, before: Sequence[str] = ()) -> Iterator[Run]:
    """Yield a run of a thousand steps that has just begun; nothing of it is left after the block.

    Args:
        folder: Its folder.
        *overrides: Of its configuration.
        before: A command that becomes the run's, which follows it.
    """
    output = folder / "output.txt"
    arguments = runner().arguments(
        folder / "run", "trainer.cpu_threads_per_worker=1", "trainer.total_training_steps=1000", *overrides
    )
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "hrl.trainer.main_ppo", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
    run = Run(process, folder / "run", output)
    try:
        yield run
    finally:
        for each in [*run.known, *(run.family() if process.poll() is None else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


@contextmanager
def running(folder: Path, *overrides: str, before: Sequence[str] = ()) -> Iterator[Run]:
    """Yield a run that has made two steps; see `begun`."""
    with begun(folder, *overrides, before=before) as run:
        if not run.wait_for_steps(_STEPS_BEFORE, _START_S):
            raise RuntimeError(f"the run never came to its second step:\n{run.output.read_text()[-3000:]}")
        run.known = run.family()
        yield run


Find = Callable[[Run], int]


def named(pattern: str, place: int = 0) -> Find:
    """The process with such a command line, the first or another one."""
    return lambda run: run.find(pattern)[place]


def _message(run: Run) -> str:
    """The error that the user was shown, in one line."""
    found = _ERROR.findall(run.output.read_text())
    return found[-1] if found else run.output.read_text().strip().rpartition("\n")[2]


def _left(family: Sequence[psutil.Process]) -> list[str]:
    """Those of a run's processes that do not end within some time."""
    left = []
    for process in psutil.wait_procs(family, timeout=_LEFT_S)[1]:
        with contextlib.suppress(psutil.Error):  # a zombie has ended
            left.append(" ".join(process.cmdline())[:80])
    return left


def ends(
    find: Find, sign: signal.Signals, words: Sequence[str], folder: Path, overrides: Sequence[str] = ()
) -> Outcome:
    """Send a signal to a process of a run, which is to end within two steps and a minute, and say all of the words.

    `PID` among the words is the id of the process.
    """
    with running(folder, *overrides) as run:
        victim = find(run)
        return _end_of(run, lambda: os.kill(victim, sign), [word.replace("PID", str(victim)) for word in words])


def never_up(pattern: str, words: Sequence[str], folder: Path) -> Outcome:
    """Stop a process of Ray as soon as it is there, so that Ray is never up: the run ends in time and says so."""
    with begun(folder, *_HF) as run:
        deadline = time.monotonic() + _START_S
        while not (found := run.find(pattern)):
            if run.process.poll() is not None or time.monotonic() > deadline:
                return Outcome(0, 0.0, f"there is none: {_message(run)}")
            time.sleep(0.005)
        run.known = run.family()
        return _end_of(run, lambda: os.kill(found[0], signal.SIGSTOP), words, START_LIMIT_S + _GRACE_S)


def _end_of(run: Run, disturb: Callable[[], object], words: Sequence[str], allowed_s: float | None = None) -> Outcome:
    """Disturb a run, which is to end in time, within two steps and a minute, and say all of the words."""
    family = [each for each in run.family() if each.pid != run.process.pid]
    allowed_s = 2 * run.step_s + _GRACE_S if allowed_s is None else allowed_s
    began = time.monotonic()
    disturb()
    try:
        code = run.process.wait(allowed_s)
    except subprocess.TimeoutExpired:
        return Outcome(0, allowed_s, f"the run has not ended: {run.output.read_text()[-300:]}")
    took = time.monotonic() - began
    left = _left(family)
    said = _message(run)
    if left:
        return Outcome(0, took, f"left running: {left}; {said}")
    if code == 0:
        return Outcome(0, took, f"exit status 0; {said}")
    missing = [word for word in words if word not in said]
    return Outcome(1, took, f"without {missing}: {said}") if missing else Outcome(2, took, said)


def full_shared_memory(folder: Path) -> Outcome:
    """Something else takes all of `/dev/shm`, a small one of the run's own, once it has made two steps."""
    if not can_mount():
        return not_tried(NO_MOUNT)
    small = f'mount -t tmpfs -o size={_STORE_BYTES * 5 // 4} tmpfs /dev/shm && exec "$0" "$@"'
    store = f"trainer.ray_kwargs.object_store_memory={_STORE_BYTES}"
    with running(folder, *_HF, store, before=("unshare", "--mount", "sh", "-c", small)) as run:
        its_own = Path(f"/proc/{run.process.pid}/root/dev/shm")
        if its_own.stat().st_dev == Path("/dev/shm").stat().st_dev:
            return Outcome(0, 0.0, "the run has no /dev/shm of its own, and the machine's is left alone")

        def fill() -> None:
            with contextlib.suppress(OSError), (its_own / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))

        return _end_of(run, fill, ("/dev/shm ", "MiB free", "--shm-size"))


def goes_on(
    disturb: Callable[[Run], None], counted: str | None, folder: Path, overrides: Sequence[str] = ()
) -> Outcome:
    """Disturb a run, which is to make further steps and then to end well when it is asked to.

    Args:
        disturb: What happens to it.
        counted: A metric that has to show it.
        folder: Its folder.
        overrides: Of its configuration.
    """
    with running(folder, *overrides) as run:
        family = [each for each in run.family() if each.pid != run.process.pid]
        allowed_s = 3 * run.step_s + _GRACE_S
        began = time.monotonic()
        disturb(run)
        before = len(run.steps())
        if not run.wait_for_steps(before + 3, allowed_s):
            return Outcome(0, allowed_s, f"no further step: {_message(run)}")
        took = time.monotonic() - began
        run.process.send_signal(signal.SIGTERM)
        try:
            code = run.process.wait(allowed_s)
        except subprocess.TimeoutExpired:
            return Outcome(0, took, "the run does not end when it is asked to")
        left = _left(family)
        if left or code != _STOPPED:
            return Outcome(0, took, f"exit status {code}, left: {left}")
        if counted is not None and not any(record.get(counted, 0) > 0 for record in run.steps()):
            return Outcome(1, took, f"nothing is counted in {counted}")
        return Outcome(2, took, "the run goes on" + (f"; {counted} counts it" if counted else ""))


def _signalled(find: Find, sign: signal.Signals) -> Callable[[Run], None]:
    return lambda run: os.kill(find(run), sign)


def _ctrl_z_and_fg(run: Run) -> None:
    os.killpg(run.process.pid, signal.SIGSTOP)
    time.sleep(15.0)  # longer than a process may be stopped that others wait for
    os.killpg(run.process.pid, signal.SIGCONT)


RAYLET = named(r"raylet/raylet ")
GCS = named(r"gcs_server")
RANK = named(r"^ray::RankProcess")
SECOND_RANK = named(r"^ray::RankProcess", 1)
REWARDS = named(r"^ray::_Actor")
REWARD_PROCESS = named(r"^(?!.*guard\.py).*hrl\.reward\.process")
REWARD_GUARD = named(r"guard\.py.*hrl\.reward\.process")
GUARD = named(r"processes/guard\.py \d+ group")
ENGINE = named(r"VLLM|EngineCore|multiprocessing\.spawn")

_HF = ("actor_rollout_ref.rollout.name=hf",)
_TWO = (*_HF, "trainer.n_gpus_per_node=2")
_VLLM = ("actor_rollout_ref.rollout.name=vllm", "data.max_response_length=64")


def _end(
    kind: str, variant: str, find: Find, sign: signal.Signals, *words: str, overrides: Sequence[str] = _HF
) -> Fault:
    return Fault(kind, variant, lambda folder: ends(find, sign, words, folder, overrides))


def _on(kind: str, variant: str, disturb: Callable[[Run], None], counted: str | None = None) -> Fault:
    return Fault(kind, variant, partial(goes_on, disturb, counted, overrides=_HF))


def _never(variant: str, pattern: str, *words: str) -> Fault:
    told = ("ClusterLostError", "Ray did not come up on this machine", *words)
    return Fault("a process of Ray is stopped while Ray comes up", variant, partial(never_up, pattern, told))


KILL, STOP = signal.SIGKILL, signal.SIGSTOP

FAULTS: list[Fault] = [
    _end("a process of Ray is killed", "raylet", RAYLET, KILL, "Ray's raylet", "(pid PID)", "killed by SIGKILL"),
    _end("a process of Ray is killed", "GCS", GCS, KILL, "control service (GCS)", "(pid PID)", "killed by SIGKILL"),
    _end("a process of Ray is killed", "agent", named("^ray::DashboardAgent"), KILL, "DashboardAgent", "(pid PID)"),
    _end("a process of Ray is stopped", "raylet", RAYLET, STOP, "Ray's raylet", "(pid PID", "SIGSTOP"),
    _end("a process of Ray is stopped", "GCS", GCS, STOP, "control service (GCS)", "(pid PID", "SIGSTOP"),
    _never("raylet", "raylet/raylet ", "Ray's raylet", "SIGSTOP"),
    _never("GCS", "gcs_server", "control service (GCS)", "SIGSTOP"),
    _on("a process that a run can do without is killed", "log monitor", _signalled(named("log_monitor"), KILL)),
    _on("a process that a run can do without is killed", "guard of a rank", _signalled(GUARD, KILL)),
    _end("a rank is killed", "the only one", RANK, KILL, "rank 0", "(pid PID)", "phase "),
    _end("a rank is killed", "one of two", SECOND_RANK, KILL, "rank ", "(pid PID)", "phase ", overrides=_TWO),
    _end("a rank is stopped", "the only one", RANK, STOP, "rank 0", "(pid PID", "SIGSTOP", "phase "),
    _end(
        "a rank is stopped",
        "one of two, which waits for it in a collective",
        SECOND_RANK,
        STOP,
        "rank ",
        "(pid PID",
        "SIGSTOP",
        "phase ",
        overrides=_TWO,
    ),
    _end("the reward service is killed", "", REWARDS, KILL, "the reward service (process PID"),
    _end("the reward service is stopped", "", REWARDS, STOP, "the reward service (process PID", "SIGSTOP"),
    _on("a reward process is killed", "", _signalled(REWARD_PROCESS, KILL)),
    _on("a reward process is stopped", "", _signalled(REWARD_PROCESS, STOP)),
    _on("a guard is stopped", "of a reward process", _signalled(REWARD_GUARD, STOP)),
    _on("a guard is stopped", "of a rank", _signalled(GUARD, STOP)),
    _end("the engine is killed", "vLLM", ENGINE, KILL, "vLLM engine (pid PID)", "died during", overrides=_VLLM),
    _end("the engine is stopped", "vLLM", ENGINE, STOP, "vLLM engine (pid PID)", "SIGSTOP", overrides=_VLLM),
    Fault("a full /dev/shm during a run", "something else takes what is free", full_shared_memory),
    _on("a run is suspended", "Ctrl-Z and fg 15 s later", _ctrl_z_and_fg),
]
