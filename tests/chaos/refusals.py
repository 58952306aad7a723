"""What is refused or told before the first step: keys, sizes, devices, a resume with something else, a full /dev/shm.

Rewards that take more memory or disk than there is are here too: each is refused it, and the run says so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hrl.report.run_folder import read_metrics
from tests.chaos.checkpoints import LAST, NO_MOUNT, arguments, can_mount, copy, judged, run, small_disk, straight
from tests.chaos.faults import Fault, Outcome, not_tried
from tests.chaos.small import runner
from tests.runs.runner import ROOT

_RUN_S = 500.0
Inject = Callable[[Path], Outcome]


def refused(words: tuple[str, ...], *overrides: str) -> Inject:
    """A command is refused with all of the words, and makes no run folder."""

    def inject(folder: Path) -> Outcome:
        began = time.monotonic()
        status, said = run(arguments(folder / "run", *overrides))
        missing = [word for word in words if word not in said]
        wrong = [
            *([] if status == 2 else [f"exit status {status}"]),
            *([f"nothing says {missing}"] if missing or "Traceback" in said else []),
            *(["a run folder was made"] if (folder / "run").exists() else []),
        ]
        return judged(wrong, began, said, problems(said))

    return inject


def problems(said: str) -> str:
    """The list of what is wrong, which ends what a refused command says."""
    return said[max(said.rfind("problem"), 2) - 2 :]


def resumed_otherwise(words: tuple[str, ...], *overrides: str, is_refused: bool) -> Inject:
    """The command of a run that is whole is given again, one step longer and with something else.

    Args:
        words: Of the refusal, or of what is told.
        *overrides: What is new; `{model}` stands for a model of the same shape with other weights.
        is_refused: Whether it is refused; else it makes its step.
    """

    def inject(folder: Path) -> Outcome:
        mine = folder / "run"
        copy(straight(), mine)
        before = sorted(str(path) for path in mine.rglob("*"))
        given = [each.format(model=other_model(folder)) if "{model}" in each else each for each in overrides]
        began = time.monotonic()
        status, said = run(arguments(mine, f"trainer.total_training_steps={LAST + 1}", *given))
        missing = [word for word in words if word not in said]
        steps = [record["step"] for record in read_metrics(mine)]
        changed = sorted(str(path) for path in mine.rglob("*")) != before
        wrong = [
            *([] if status == (2 if is_refused else 0) else [f"exit status {status}"]),
            *([f"nothing says {missing}"] if missing or "Traceback" in said else []),
            *(["the folder was changed"] if is_refused and changed else []),
            *([] if steps == list(range(1, LAST + (1 if is_refused else 2))) else [f"its steps are {steps}"]),
        ]
        at = said.find(words[0])
        return judged(wrong, began, said, problems(said) if is_refused else said[max(at - 60, 0) : at + 120])

    return inject


def other_model(folder: Path) -> Path:
    """The model of the runs with other weights."""
    from safetensors.torch import load_file, save_file

    made = folder / "model"
    shutil.copytree(runner().model, made)
    weights = load_file(made / "model.safetensors")
    save_file({name: tensor + 0.5 for name, tensor in weights.items()}, made / "model.safetensors", {"format": "pt"})
    return made


def on_more_ranks(folder: Path) -> Outcome:
    """What one rank has saved is continued by two, in processes of their own."""
    mine = folder / "run"
    copy(straight(), mine)
    given = arguments(mine, f"trainer.total_training_steps={LAST + 1}", "trainer.n_gpus_per_node=2")
    began = time.monotonic()
    status, said = command(given)
    steps = [record["step"] for record in read_metrics(mine)]
    told = "trainer.n_gpus_per_node: 1 → 2"
    wrong = [
        *([] if status == 0 else [f"exit status {status}"]),
        *([] if told in said else [f"nothing says {told!r}"]),
        *([] if steps == list(range(1, LAST + 2)) else [f"its steps are {steps}"]),
    ]
    return judged(wrong, began, said, f"{told}, and step {LAST + 1} was made")


def command(given: list[str], *before: str) -> tuple[int, str]:
    """Run `python -m hrl.trainer.main_ppo`, perhaps by another program; return its exit status and its output."""
    done = subprocess.run(
        [*before, sys.executable, "-m", "hrl.trainer.main_ppo", *given],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_RUN_S,
        check=False,
    )
    return done.returncode, " ".join(done.stdout.split())


def no_shared_memory(folder: Path) -> Outcome:
    """`/dev/shm` of the run has 1 MiB: told before it starts, and the run is made."""
    if not can_mount():
        return not_tried(NO_MOUNT)
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"'
    began = time.monotonic()
    status, said = command(
        arguments(folder / "run", "trainer.total_training_steps=1"), "unshare", "--mount", "sh", "-c", small
    )
    told = "/dev/shm has 1 MiB free" if "/dev/shm has 1 MiB free" in said else "/dev/shm has 0 MiB free"
    made = (folder / "run" / "metrics.jsonl").exists()
    wrong = [
        *([] if told in said else ["nothing says what is free"]),
        *([] if status == 0 and made else [f"exit status {status}, {'a' if made else 'no'} step made"]),
    ]
    at = said.find(told)
    return judged(wrong, began, said, f"exit status {status}: {said[at : at + 200]}")


LEAKS = """
kept = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kept.append(bytearray(400 << 20))
    return len(set(solution_str)) / 10
"""
ONCE = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        os.close(os.open(__file__ + ".taken", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return len(set(solution_str)) / 10
    return len(bytearray(2 << 30))
"""
FILLS = """
import uuid

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(f"{disk}/{uuid.uuid4().hex}", "wb") as file:
        file.write(bytes(400_000))
    return len(set(solution_str)) / 10
"""


def scored_by(source: str, words: tuple[str, ...], *overrides: str, goes_on: bool = False) -> Inject:
    """A reward function takes more than there is.

    Args:
        source: Of the function; `{disk}` stands for a folder with 1 MB of room.
        words: Of the message.
        *overrides: Of the command.
        goes_on: Whether the run is to go on, and count what it could not score.
    """

    def inject(folder: Path) -> Outcome:
        if "{disk}" in source and not can_mount():
            return not_tried(NO_MOUNT)
        with pytest.MonkeyPatch.context() as patch:
            if "{disk}" not in source:
                return scored(folder, source, patch)
            with small_disk(folder / "disk", 1):
                return scored(folder, source.replace("{disk}", str(folder / "disk")), patch)

    def scored(folder: Path, text: str, patch: pytest.MonkeyPatch) -> Outcome:
        file = folder / "greedy.py"
        file.write_text(text)
        began = time.monotonic()
        limits = ("reward.memory_limit_gib=1", "trainer.total_training_steps=1", "trainer.save_freq=-1")
        mine = f"reward.custom_reward_function.path={file}"
        status, said = run(arguments(folder / "run", mine, *limits, *overrides))
        missing = [word for word in words if word not in said]
        counted = read_metrics(folder / "run")[-1].get("reward/num_errors", 0) if goes_on and not status else 0
        wrong = [
            *([] if status == (0 if goes_on else 1) else [f"exit status {status}"]),
            *([f"nothing says {missing}"] if missing else []),
            *(["nothing was counted"] if goes_on and not counted else []),
        ]
        at = said.rfind("Error: ")
        shown = f"the run goes on; reward/num_errors is {counted:g}" if goes_on else said[at - 60 :]
        return judged(wrong, began, said, shown)

    return inject


KEY, SIZES, DEVICES = "an unknown key", "sizes that do not divide", "too many ranks, or devices that are not there"
RESUMES, GREEDY = "a resume with something else", "a reward takes more than there is"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

FAULTS = [
    Fault(
        KEY,
        "a letter too few",
        refused(("trainer.total_epoch ", "Did you mean trainer.total_epochs"), "trainer.total_epoch=3"),
        is_quick=True,
    ),
    Fault(KEY, "of no section", refused(("no_such.key",), "no_such.key=3"), is_quick=True),
    Fault(
        SIZES,
        "a mini-batch and the batch",
        refused((f"{ACTOR}.ppo_mini_batch_size", "Nearest that do: 2 and 4"), f"{ACTOR}.ppo_mini_batch_size=3"),
        is_quick=True,
    ),
    Fault(
        SIZES,
        "ranks and the processes of an engine",
        refused(
            (f"{ROLLOUT}.tensor_model_parallel_size", "divide"),
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            "trainer.n_gpus_per_node=3",
        ),
        is_quick=True,
    ),
    Fault(
        DEVICES,
        "a thousand ranks on this machine",
        refused(("trainer.n_gpus_per_node asks for 1,000 processes", "Ask for"), "trainer.n_gpus_per_node=1000"),
        is_quick=True,
    ),
    Fault(
        DEVICES,
        "a GPU where there is none",
        refused(("trainer.device is cuda, but no GPU", "set trainer.device=cpu"), "trainer.device=cuda"),
        is_quick=True,
    ),
    Fault(
        RESUMES,
        "another seed",
        resumed_otherwise(
            ("data.seed=2, was 1", "trainer.default_local_dir of its own"), "trainer.seed=2", is_refused=True
        ),
        is_quick=True,
    ),
    Fault(
        RESUMES,
        "another model",
        resumed_otherwise(("is another model than the one",), "actor_rollout_ref.model.path={model}", is_refused=True),
        is_quick=True,
    ),
    Fault(
        RESUMES,
        "another learning rate",
        resumed_otherwise((f"{ACTOR}.optim.lr: ", "→ 1e-05"), f"{ACTOR}.optim.lr=1e-5", is_refused=False),
    ),
    Fault(RESUMES, "another number of ranks", on_more_ranks),
    Fault("a full /dev/shm at the start", "1 MiB in all", no_shared_memory),
    Fault(GREEDY, "memory, more with each sample, and its error ends the run", scored_by(LEAKS, ("MemoryError",))),
    Fault(
        GREEDY, "memory, for one sample, and the run goes on", scored_by(ONCE, (), "reward.on_error=skip", goes_on=True)
    ),
    Fault(GREEDY, "a disk, and its error ends the run", scored_by(FILLS, ("No space left on device",))),
]
