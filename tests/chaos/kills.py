"""The driver killed, again and again, and the same command each time: at the end it is the run that nobody killed.

A chain of kills is one run. That is more severe than a run for each kill: what one kill has left is the next one's
start. Kills come at random moments, drawn from a seed: every other one from start-up on, and the rest once this start
has logged a step or begun a save, for start-up takes longer than steps do. Or they come in place of an operation that
writes in the run folder, drawn likewise, so that every stage of a save, of the log and of taking a folder back is met.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.manifest import damages
from hrl.report.run_folder import RunFolder, read_metrics
from tests.chaos import small
from tests.chaos.faults import Fault, Outcome
from tests.chaos.same_run import differences, of_checkpoints
from tests.chaos.victims import Driver, Family, as_command, family_of, in_one_process, let_clock_jump

GAMES = Path(__file__).parents[1] / "episodes" / "games.py"
KIND = "the driver killed, and the same command again"
#: A run that is not killed, on a machine that does other things too.
PATIENCE_S = 600.0
#: How many kills of a chain may come too late, when the run has ended; with more, the chain has not shown anything.
MISSED = 2

#: Every part of the driver's state: an adaptive KL coefficient, shaped rewards, a sampler, a validation, a schedule.
STATEFUL = (
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "reward.shaping={standardise: null}",
    "data.val_max_samples=2",
    "trainer.test_freq=4",
)


def of_prompts(folder: Path) -> list[str]:
    """The arguments of a small run of PPO."""
    return small.runner().arguments(folder)


def of_pairs(folder: Path) -> list[str]:
    """The arguments of a small run of DPO, whose reference is the model before its first step."""
    return [
        "quickstart=dpo",
        f"trainer.default_local_dir={folder}",
        f"model.path={small.runner().model}",
        "model.fsdp_config.dtype=float32",
        "optim.lr=1e-3",
        "optim.lr_scheduler_type=cosine",
        "data.train_batch_size=4",
        "data.val_max_samples=2",
        "trainer.test_freq=4",
    ]


class Straight(NamedTuple):
    """The run that nobody kills.

    Attributes:
        folder: Its run folder.
        first_s: From its start to the end of its first step.
        step_s: Of a later step, on average.
        first_operations: The same counted in operations that write, where it was one process; else 0.
        step_operations: Likewise.
    """

    folder: Path
    first_s: float
    step_s: float
    first_operations: float
    step_operations: float


@dataclass(frozen=True)
class Scene:
    """A run to kill.

    Attributes:
        start: Starts it with these arguments; the number is the operation that kills it.
        overrides: What its arguments have beside those of `base`.
        steps: Its steps.
        base: From its folder to its first arguments.
        interval: Steps from one save to the next.
        has_store: Whether its checkpoints go to a store, too.
    """

    start: Callable[[Sequence[str], int | None], Driver]
    overrides: tuple[str, ...]
    steps: int
    base: Callable[[Path], list[str]] = of_prompts
    interval: int = 1
    has_store: bool = False

    def arguments(self, folder: Path) -> list[str]:
        """Of the command."""
        return [
            *self.base(folder),
            "trainer.cpu_threads_per_worker=1",
            *self.overrides,
            f"trainer.save_freq={self.interval}",
            f"trainer.total_training_steps={self.steps}",
            *([f"trainer.default_remote_dir=file://{store_of(folder)}"] if self.has_store else []),
        ]

    @functools.cached_property
    def folder(self) -> Path:
        """For all its runs; it goes with this process."""
        folder = Path(tempfile.mkdtemp(prefix="chaos-kills-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    @functools.cached_property
    def straight(self) -> Straight:
        """The run that nobody kills, made once for all chains."""
        folder = self.folder / "straight"
        began, first_s = time.monotonic(), 0.0
        family = family_of(lambda: self.start(self.arguments(folder), None))
        metrics = folder / "metrics.jsonl"
        while family.driver.poll() is None and time.monotonic() < began + PATIENCE_S:
            if not first_s and metrics.exists() and '"step": 1,' in metrics.read_text():
                first_s = time.monotonic() - began
            family.look()
            time.sleep(0.05)
        status = wait(family, None, patience_s=0)
        if status != 0:
            raise AssertionError(f"the run that nobody kills ended with {status}: {last_line(family.driver.output())}")
        made = folder.with_name("straight.operations")
        operations = json.loads(made.read_text()) if made.exists() else [0, 0]
        later = self.steps - 1
        step_s = (time.monotonic() - began - first_s) / later
        return Straight(folder, first_s, step_s, operations[0], (operations[1] - operations[0]) / later)


@dataclass
class Chain:
    """One run that is killed many times.

    Args:
        name: What it is called in the table.
        scene: The run.
        kills: How many there are.
        at_writes: Whether a kill comes in place of an operation that writes, and not by the clock.
        seed: Of the moments. By the clock, they are drawn evenly from the start to the first step, and for every second
            kill from this start's first step or save to two intervals later.
        done: How many were begun.
        killed: How many of these met a run that had not ended.
    """

    name: str
    scene: Scene
    kills: int
    at_writes: bool = False
    seed: int = 0
    done: int = 0
    killed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.scene.folder / self.name.replace(" ", "-").replace(",", "")

    def kill(self, _: Path) -> Outcome:
        """Start the command, kill its driver, and look at what is left."""
        straight, drawn, beyond = self.scene.straight, self._random.random(), 2 * self.scene.interval
        self.done += 1
        operation = seconds = None
        if self.at_writes:
            operation = 1 + int(drawn * (straight.first_operations + beyond * straight.step_operations))
        in_steps = not self.at_writes and self.done % 2 == 0
        if not self.at_writes:
            seconds = drawn * (beyond * straight.step_s if in_steps else straight.first_s)
        progress = Progress(self.folder)
        family = family_of(lambda: self.scene.start(self.scene.arguments(self.folder), operation))
        if in_steps:
            wait(family, PATIENCE_S, until=progress.has_been_made)
        # Where this start is faster than the straight run's, a kill of start-up comes with its first step, not later.
        early = operation is None and not in_steps
        if wait(family, seconds, until=progress.has_been_made if early else lambda: False) is None:
            family.kill()
        killed_at = time.monotonic()
        status = wait(family, None, patience_s=30)
        left = family.left()
        gone_s = time.monotonic() - killed_at
        if status not in (-signal.SIGKILL, 0):
            return Outcome(0, gone_s, f"ended with {status}: {last_line(family.driver.output())}")
        self.killed += status != 0
        since = " from its first step or save" if in_steps else ""
        when = f"operation {operation}" if operation else f"after {seconds:.1f} s{since}"
        when = "no kill, for the run had ended" if status == 0 else when
        if left:
            return Outcome(0, gone_s, f"{when}: {len(left)} left after {gone_s:.0f} s: {left[0]}")
        return judged(self.folder, when, gone_s, self.scene.interval)

    def finish(self, _: Path) -> Outcome:
        """Let the killed run end, and compare it with one that nobody kills."""
        straight, began = self.scene.straight, time.monotonic()
        family = family_of(lambda: self.scene.start(self.scene.arguments(self.folder), None))
        status = wait(family, None)
        seconds = time.monotonic() - began
        if status != 0:
            return Outcome(0, seconds, f"the killed run ended with {status}: {last_line(family.driver.output())}")
        found = differences(straight.folder, self.folder) + other_generators(straight.folder, self.folder)
        if self.scene.has_store:
            found += [f"in its store, {each}" for each in of_checkpoints(straight.folder, store_of(self.folder))]
        if found:
            return Outcome(0, seconds, f"{len(found)} differences, the first: {found[0]}")
        aside = len(list((self.folder / "checkpoints" / "superseded").glob("*")))
        for each in (self.folder, store_of(self.folder)):
            shutil.rmtree(each, ignore_errors=True)
        if self.killed < self.kills - MISSED:
            told = f"the run is the one that nobody kills, but only {self.killed} of {self.kills} kills met it"
            return Outcome(0, seconds, f"{told}: the others came after its end. Give the scene more steps")
        parts = "weights, moments, generators, metrics, samples, alarms, configuration and state"
        return Outcome(
            2, seconds, f"after {self.killed} of {self.kills} kills: {parts} equal; {aside} folders of steps made again"
        )

    def faults(self) -> list[Fault]:
        """Return a row for each kill, and one for the run that comes of them."""
        rows = [Fault(KIND, f"{self.name}, kill {n} of {self.kills}", self.kill) for n in range(1, self.kills + 1)]
        return [*rows, Fault(KIND, f"{self.name}, to its end", self.finish)]


def other_generators(straight: Path, other: Path) -> list[str]:
    """The steps that began with other states of generators than in the straight run; noted by runs in one process."""
    one, two = (folder.with_name(f"{folder.name}.generators") for folder in (straight, other))
    if not one.exists():
        return []
    lines = set(one.read_text().splitlines())
    return [f"generators at the start of {line}" for line in two.read_text().splitlines() if line not in lines]


class Progress:
    """Tells whether a start has logged a step or begun a save; it is made before the start."""

    def __init__(self, folder: Path) -> None:
        self._metrics = folder / "metrics.jsonl"
        self._store = CheckpointStore(RunFolder.checkpoints_in(folder))
        self._least, self._begun = self._size(), self._saves()

    def has_been_made(self) -> bool:
        """Whether the log has grown, also after a resume has cut it, or a save's folder is there that was not."""
        size = self._size()
        self._least = min(size, self._least)
        saves = self._saves()
        self._begun &= saves  # a number is given again once its folder is gone
        return size > self._least or not saves <= self._begun

    def _size(self) -> int:
        try:
            return self._metrics.stat().st_size
        except FileNotFoundError:
            return 0

    def _saves(self) -> set[int]:
        with contextlib.suppress(FileNotFoundError):  # one that has just been finished
            return {each.stat().st_ino for each in self._store.interrupted()}
        return set()


def wait(
    family: Family, seconds: float | None, patience_s: float = PATIENCE_S, until: Callable[[], bool] = lambda: False
) -> int | None:
    """Return the exit status of a run; None where it has not ended after so many seconds, or until something is so."""
    deadline = time.monotonic() + (patience_s if seconds is None else seconds)
    while (status := family.driver.poll()) is None and time.monotonic() < deadline and not until():
        family.look()
        time.sleep(0.05)
    if status is None and seconds is None:
        family.kill()
        raise AssertionError(f"the run did not end within {patience_s:g} s: {family.left()}")
    return status


def store_of(folder: Path) -> Path:
    """The store beside a run folder; checkpoints lie in it as in a run folder."""
    return folder.with_name(f"{folder.name}.store")


def judged(folder: Path, when: str, seconds: float, interval: int = 1) -> Outcome:
    """Judge what a kill has left: a whole checkpoint, at most one interval older than the newest that was begun.

    Args:
        folder: The run folder.
        when: The kill came.
        seconds: For the table.
        interval: Steps from one save to the next.
    """
    store = CheckpointStore(RunFolder.checkpoints_in(folder))
    steps = [record["step"] for record in read_metrics(folder)] if folder.exists() else []
    whole = [step for step in store.steps() if not damages(store.path(step))]
    logged, newest = max(steps, default=0), max(whole, default=0)
    begun = max([int(each.name.rpartition("_")[2]) for each in store.interrupted()], default=0)
    begun = begun or (logged - 1) // interval * interval  # the save of the last step that was logged may be to come
    where = f"{when}, step {logged} logged, {newest or 'none'} saved"
    if sorted(set(steps)) != steps:
        return Outcome(0, seconds, f"{where}: metrics.jsonl has the steps {steps}")
    if whole != store.steps():
        return Outcome(0, seconds, f"{where}: of the checkpoints {store.steps()} only {whole} are whole")
    if newest < begun - interval:
        return Outcome(0, seconds, f"{where}: step {begun} was begun, so step {begun - interval} has to be whole")
    sent = CheckpointStore(RunFolder.checkpoints_in(store_of(folder)))
    if torn := [step for step in sent.steps() if damages(sent.path(step))]:
        return Outcome(0, seconds, f"{where}: in its store, the steps {torn} are not whole")
    return Outcome(2, seconds, f"{where}; nothing left")


def last_line(text: str) -> str:
    """Return the last line of an output."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def started_twice(_: Path) -> Outcome:
    """Start the same command twice at once: one run is made, and the other says which process has the folder."""
    scene, began = SHORT, time.monotonic()
    folder = scene.folder / "twice"
    both = [family_of(lambda: in_one_process(scene.arguments(folder))) for _ in range(2)]
    statuses = [wait(family, None) for family in both]
    seconds = time.monotonic() - began
    said = [family.driver.output() for family, status in zip(both, statuses, strict=True) if status != 0]
    if sorted(map(bool, statuses)) != [False, True]:
        return Outcome(0, seconds, f"they ended with {statuses}: {last_line(said[0]) if said else 'both made the run'}")
    if found := differences(scene.straight.folder, folder):
        return Outcome(0, seconds, f"the run is another one: {found[0]}")
    winner = next(family.driver.pid for family, status in zip(both, statuses, strict=True) if status == 0)
    names_it = f"process {winner}" in said[0]
    return Outcome(2 if names_it else 1, seconds, last_line(said[0]))


def clock_jumps(_: Path) -> Outcome:
    """Let the time of day jump to and fro by two days at each look: no deadline and no result depends on it."""
    scene, began = SHORT, time.monotonic()
    folder = scene.folder / "jumps"
    family = family_of(lambda: in_one_process(scene.arguments(folder), before=let_clock_jump))
    status, seconds = wait(family, None), time.monotonic() - began
    if status != 0:
        return Outcome(0, seconds, f"it ended with {status}: {last_line(family.driver.output())}")
    found = differences(scene.straight.folder, folder)
    return Outcome(0, seconds, found[0]) if found else Outcome(2, seconds, "the run is the one of a steady clock")


SHORT = Scene(in_one_process, STATEFUL, steps=3)
IN_ONE_PROCESS = Scene(in_one_process, STATEFUL, steps=40)
#: Real processes and a Ray of its own, with a critic and its moments; weights and moments are shared by two ranks.
TWO_RANKS = Scene(
    as_command,
    (*STATEFUL, "recipe=ppo", "trainer.n_gpus_per_node=2", "critic.optim.lr=1e-3"),
    steps=24,
)
ONE_RANK = Scene(as_command, STATEFUL, steps=24)
#: Three steps are logged for each that is saved, so that a kill has some made again.
RARELY_SAVED = Scene(in_one_process, STATEFUL, steps=18, interval=3)
#: Kills meet what is sent, too: a store's files lie beside the run folder.
WITH_STORE = Scene(in_one_process, STATEFUL, steps=10, has_store=True)
#: The reference is computed anew at each start, before the checkpoint is loaded.
PAIRS = Scene(functools.partial(in_one_process, kind="dpo"), (), steps=14, base=of_pairs, interval=2)
WITH_VLLM = Scene(as_command, (*STATEFUL, "actor_rollout_ref.rollout.name=vllm"), steps=24)

#: Three turns each, in processes of environments, which no kill may leave behind. When a turn is asked for is a matter
#: of time, and so is what hf computes beside it; vLLM's log-probs do not depend on that.
EPISODES = Scene(
    as_command,
    (
        *STATEFUL,
        "actor_rollout_ref.rollout.name=vllm",
        f"environment.path={GAMES}:Game",
        "environment.max_turn_tokens=3",
        "environment.num_workers=1",
        "data.max_response_length=64",
    ),
    steps=24,
)

CHAINS = [
    Chain("hf in one process, in place of a write", IN_ONE_PROCESS, kills=25, at_writes=True),
    Chain("hf in one process, by the clock", IN_ONE_PROCESS, kills=25, seed=1),
    Chain("hf in one process, saved every third step", RARELY_SAVED, kills=5, at_writes=True, seed=5),
    Chain("hf in one process, with a store", WITH_STORE, kills=5, at_writes=True, seed=25),
    Chain("DPO in one process", PAIRS, kills=5, at_writes=True, seed=20),
    Chain("hf on one rank", ONE_RANK, kills=10, seed=2),
    Chain("hf on two ranks with a critic", TWO_RANKS, kills=10, seed=3),
    Chain("vLLM", WITH_VLLM, kills=10, seed=4),
    Chain("episodes with vLLM", EPISODES, kills=10, seed=6),
]
FAULTS = [
    Fault("two drivers at once", "in one folder, started together", started_twice),
    Fault("the clock jumps", "a day late and a day early by turns", clock_jumps),
    *(fault for chain in CHAINS for fault in chain.faults()),
]
