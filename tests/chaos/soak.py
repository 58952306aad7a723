"""Long runs, in which nothing may grow: memory, open files and threads of every process, shared memory, Ray's store.

A series is fitted over its second half, when caches are full. A sample also counts what a step has in its hands just
then, and neighbouring steps are alike, so the line goes through the least of each block, and its standard error is
theirs. It is flat if the slope is within three standard errors of nothing, or so small that a hundred thousand steps, a
month at 25 seconds, would not matter. A series so noisy that a leak would hide within three standard errors is not
flat: nothing is known of it.

A run keeps the memory that a tensor leaves for the next (`ray_cluster`), and a heap in pieces grows by one such tensor
now and then. Here memory goes back at once, so that what grows is what somebody holds. Prompts are of many lengths, so
that every step brings shapes that were not there before, as it does in earnest.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from hrl.processes.child_environment import changed_environment
from tests.chaos import small
from tests.chaos.environments import WORLDS
from tests.chaos.faults import Fault, Outcome
from tests.runs.runner import ROOT, descendants

KIND = "a long run, in which nothing may grow"
REAL_STEPS, SCRIPTED_STEPS, BATCHES = 600, 3000, 1000
#: glibc's own limits, which it moves by itself if nobody sets them.
GIVEN_BACK_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
#: vLLM takes its cache's blocks in turn, and the system counts a block once it was written: all are within 150 steps.
SMALL_CACHE = "actor_rollout_ref.rollout.kv_cache_gib=0.05"
PATIENCE_S = 3000.0
BLOCKS = 15
#: What a series may grow by in a step and still be flat. 4 KiB are 0.4 GiB in a month.
ALLOWED = {"KiB": 4.0, "files": 0.01, "threads": 0.01}
#: What three standard errors may be. 64 KiB are 19 MiB in the 300 steps of a soak; a file or thread left in every tenth
#: step is 30 of them.
NOISE = {"KiB": 64.0, "files": 0.1, "threads": 0.1}
#: Parts of command lines, and what their processes are called.
PARTS = {
    "gcs_server": "ray",
    "raylet": "ray",
    "monitor.py": "ray",
    "log_monitor": "ray",
    "dashboard": "ray",
    "runtime_env": "ray",
    "ray::DashboardAgent": "ray",
    "ray::RuntimeEnvAgent": "ray",
    "VLLM": "engine",
    "multiprocessing.spawn": "engine",
    "rollout/": "engine",
    "hrl.reward": "rewards",
    "reward/process": "rewards",
    "ray::_Actor": "rewards",  # `hrl.reward.actor`
    "ray::EpisodeProcess": "episodes",
    "environment_process": "environments",
    "ray::IDLE": "idle",
    "ray::": "ranks",
}


class Trend(NamedTuple):
    """How a series grows.

    Attributes:
        slope: Per step.
        error: Its standard error.
        last: The least of the last block.
    """

    slope: float
    error: float
    last: float

    def is_flat(self, unit: str) -> bool:
        """Whether it does not grow, or not so that it would matter."""
        return self.slope <= max(3 * self.error, ALLOWED[unit])

    def is_too_noisy(self, unit: str) -> bool:
        """Whether growth that matters could not be told from noise."""
        return 3 * self.error > NOISE[unit]

    def told(self, unit: str) -> str:
        """Say it."""
        return f"{self.last:.0f} {unit} {self.slope:+.3f} ± {self.error:.3f}"


def trend(values: Sequence[float]) -> Trend:
    """Fit a line to the second half of a series by least squares, through the least of each block."""
    half = np.asarray(values[len(values) // 2 :], dtype=float)
    blocks = np.array_split(np.arange(len(half)), min(BLOCKS, len(half) // 2))
    x, y = (np.array(values) for values in ([b.mean() for b in blocks], [half[b].min() for b in blocks]))
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    error = float(np.sqrt(residuals @ residuals / (len(x) - 2) / (centred @ centred)))
    return Trend(slope, error, float(y[-1]))


def part_of(process: psutil.Process) -> str:
    """Return which part of a run a process is."""
    title = " ".join(process.cmdline()) or process.name()
    return next((part for word, part in PARTS.items() if word in title), "others")


def memory_kib(pid: int) -> tuple[float, float]:
    """Return a process's own memory, and its part of what is shared by name.

    Both are proportional: what the processes of a run share counts once. Files that are mapped are left out, because
    programs beside the run map the same libraries.
    """
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    sizes = {parts[0]: float(parts[1]) for parts in lines}
    return sizes["Pss_Anon:"], sizes["Pss_Shmem:"]


def sample(root: int) -> dict[tuple[str, str], float]:
    """Return memory, files and threads of the parts of a run, by part and unit."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for process in [psutil.Process(root), *descendants(root)]:
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            part = "driver" if process.pid == root else part_of(process)
            own, shared = memory_kib(process.pid)
            found["shared memory", "KiB"] += shared
            measured = own, process.num_fds(), process.num_threads()
            for unit, value in zip(("KiB", "files", "threads"), measured, strict=True):
                found[part, unit] += value
    return found


def judged(
    series: Sequence[Mapping[tuple[str, str], float]], began: float, what: str, elsewhere: Collection[str] = ()
) -> Outcome:
    """Return whether all that was sampled is flat.

    Args:
        series: What was sampled, step by step.
        began: When it was begun.
        what: It was, for the message.
        elsewhere: Parts whose memory is told, and judged by another soak.
    """
    names = [name for name in series[-1] if all(name in one for one in series[len(series) // 2 :])]
    trends = {name: trend([one.get(name, 0.0) for one in series]) for name in names}
    said = "; ".join(f"{part}: {found.told(unit)}" for (part, unit), found in trends.items() if unit == "KiB")
    trends = {name: found for name, found in trends.items() if not (name[0] in elsewhere and name[1] == "KiB")}
    grown = [f"{part}: {found.told(unit)}" for (part, unit), found in trends.items() if not found.is_flat(unit)]
    seconds = time.monotonic() - began
    if grown:
        return Outcome(0, seconds, f"{what} grew per step: {'; '.join(grown)}")
    noisy = [f"{part}: {found.told(unit)}" for (part, unit), found in trends.items() if found.is_too_noisy(unit)]
    if noisy:
        return Outcome(0, seconds, f"{what}, too noisy to tell growth per step: {'; '.join(noisy)}")
    return Outcome(2, seconds, f"{what}, growth per step: {said}; open files and threads are flat too")


def steps_of(folder: Path) -> int:
    """Return how many steps a run has logged."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def rows_of_many_lengths(folder: Path) -> list[str]:
    """Write prompts of one to sixty words, and return the overrides for a run on them."""
    file = folder / "rows.jsonl"
    draw = random.Random(0)
    whats = ["raise", "step: raise", *[""] * 14] * 4  # of tools and environments, where there are any
    lines = ({"prompt": " ".join(["and"] * draw.randint(1, 60)), "answer": "", "what": what} for what in whats)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [f"data.train_files={file}", f"data.val_files={file}", "data.max_prompt_length=128"]


def real(
    engine: str, *overrides: str, steps: int = REAL_STEPS, what: str = "", elsewhere: Collection[str] = ()
) -> Fault:
    """A run of the small model on a cluster, sampled after every step; see `judged` for `elsewhere`."""

    def inject(folder: Path) -> Outcome:
        began, path = time.monotonic(), folder / "run"
        with changed_environment(GIVEN_BACK_AT_ONCE):
            process = small.runner().start(
                path,
                f"trainer.total_training_steps={steps}",
                f"actor_rollout_ref.rollout.name={engine}",
                SMALL_CACHE,
                *rows_of_many_lengths(folder),
                "trainer.val_before_train=false",
                "trainer.test_freq=50",
                "trainer.log_rollouts_freq=-1",
                *overrides,
            )
        drained: list[str] = []
        reader = threading.Thread(target=lambda: drained.extend(process.stdout or ()), daemon=True)
        reader.start()
        series: list[dict[tuple[str, str], float]] = []
        done = 0
        while process.poll() is None and time.monotonic() - began < PATIENCE_S:
            if (now := steps_of(path)) > done:
                done = now
                series.append(sample(process.pid))
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
            return Outcome(0, time.monotonic() - began, f"step {done} of {steps} after {PATIENCE_S:g} s")
        reader.join(10)
        if process.returncode != 0 or done < steps:
            return Outcome(0, time.monotonic() - began, f"status {process.returncode}: {''.join(drained[-3:])}")
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        stored = [record["perf/object_store_gib"] * 2**20 for record in records if "perf/object_store_gib" in record]
        for one, kib in zip(series, stored, strict=False):
            one["object store", "KiB"] = kib
        sampled = f"{len(series)} of {steps} steps on {engine} sampled"
        return judged(series[:-2], began, sampled, elsewhere)  # it ends meanwhile

    return Fault(KIND, f"{steps} steps of a small model on {engine}{what}", inject)


def scripted(steps: int) -> Fault:
    """A driver on stand-ins, which samples itself."""
    return _of_its_own(f"{steps} steps of a driver on stand-ins", "tests.chaos.soak", steps)


def services(batches: int) -> Fault:
    """The services that play and score episodes, on an engine that answers at once."""
    return _of_its_own(f"{batches} batches of episodes on an engine that is none", "tests.chaos.service_soak", batches)


def _of_its_own(what: str, module: str, steps: int) -> Fault:
    """A module that makes steps in a process of its own, and writes what it sampled after each."""

    def inject(folder: Path) -> Outcome:
        began = time.monotonic()
        command = [sys.executable, "-m", module, str(folder), str(steps)]
        try:
            with changed_environment(GIVEN_BACK_AT_ONCE):
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
                )
        except subprocess.TimeoutExpired:
            return Outcome(0, PATIENCE_S, f"no end after {PATIENCE_S:g} s")
        if done.returncode != 0:
            return Outcome(0, time.monotonic() - began, done.stderr.strip().splitlines()[-1])
        series = [{(part, unit): value for part, unit, value in one} for one in json.loads(done.stdout)]
        return judged(series, began, what)

    return Fault(KIND, what, inject)


def told(sampled: Iterable[Mapping[tuple[str, str], float]]) -> str:
    """Return what was sampled as `_of_its_own` reads it."""
    return json.dumps([[(*name, value) for name, value in one.items()] for one in sampled])


def run_scripted(folder: Path, steps: int) -> Iterator[dict[tuple[str, str], float]]:
    """Make the steps, and yield what the process has after each."""
    from hrl.trainer.callbacks import Callback
    from tests.trainer.ppo.driver import Driver

    driver = Driver(
        folder / "run",
        "trainer.test_freq=100",
        "trainer.save_freq=100",
        "trainer.max_ckpt_to_keep=2",
        "trainer.log_rollouts_freq=-1",
        steps=steps,
    )
    sampled: list[dict[tuple[str, str], float]] = []
    own = psutil.Process()

    class Sampling(Callback):
        def on_step_end(self, state: object, metrics: object) -> None:
            driver.shown_file.seek(0)
            driver.shown_file.truncate()  # which holds what a terminal would have taken
            for noted in vars(driver.workers).values():  # stand-ins keep what they were asked
                if isinstance(noted, list):
                    noted.clear()
            measured = memory_kib(own.pid)[0], own.num_fds(), own.num_threads()
            names = [("driver", unit) for unit in ("KiB", "files", "threads")]
            sampled.append(dict(zip(names, measured, strict=True)))

    driver.trainer.callbacks = Sampling()
    driver.fit()
    yield from sampled


#: Ray's servers grow for some minutes, also if nobody asks them for anything, and each of its processes keeps a record
#: of its last calls. That of the service of rewards is full after some 14,000, 450 of these steps: see `services`.
SLOW_TO_FILL = ("ray", "rewards")
#: Of three turns, each of which calls a tool. A row of each batch has a tool that raises, and one an environment.
EPISODES = (
    "data.shuffle=false",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.n=2",
    f"environment.path={WORLDS}:Meeting",
    "environment.tool_parser=hermes",
    "environment.max_turn_tokens=3",
    "data.max_response_length=120",
    # Of 64 episodes at once. Where the driver's heap has not yet had the worst of them, each may add two megabytes.
    "trainer.test_freq=10",
)
FAULTS: list[Fault] = [
    scripted(SCRIPTED_STEPS),
    services(BATCHES),
    real("hf"),
    real("vllm"),
    real("hf", *EPISODES, what=" that plays episodes", elsewhere=SLOW_TO_FILL),
]

if __name__ == "__main__":
    sys.stdout.write(told(run_scripted(Path(sys.argv[1]), int(sys.argv[2]))))
