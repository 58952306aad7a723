"""The ledger of `hrl check` against what runs take on this machine: `python -m tests.preflight.measured_peaks [NAME]`.

Each configuration makes a step. Meanwhile the proportional set sizes (PSS) of all its processes are added up three
times a second, which counts memory that several of them map once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
RUN_TIMEOUT_S = 900.0
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing"
#: A step of one micro-batch that is as large as it may be: the model tells stories until it is stopped.
ONE_STEP = (
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "data.val_files=[]",
    "data.train_batch_size=8",
    f"{_ACTOR}.ppo_mini_batch_size=8",
    f"{_ACTOR}.ppo_max_token_len_per_gpu=8192",
    f"{_ROLLOUT}.n=8",
    f"{_RECOMPUTE}=false",
    "data.max_prompt_length=48",
    "data.max_response_length=64",
    f"{_ROLLOUT}.kv_cache_gib=0.25",  # which the step fills
)
CONFIGURATIONS = {
    "full": (),
    "adapter": ("actor_rollout_ref.model.lora_rank=32", f"{_ACTOR}.optim.lr=5e-4"),
    "adapter in 4 bits": (
        "actor_rollout_ref.model.lora_rank=32",
        "actor_rollout_ref.model.load_in_4bit=true",
        f"{_ACTOR}.optim.lr=5e-4",
    ),
    "critic and reference": ("recipe=ppo",),
    "two ranks": ("trainer.n_gpus_per_node=2",),
    "long responses": (
        "data.max_response_length=256",
        f"{_RECOMPUTE}=true",
        f"{_ACTOR}.ppo_max_token_len_per_gpu=17408",
    ),
}


def stories(folder: Path) -> tuple[str, ...]:
    """Rows whose answers are long, and what pays for them."""
    rows, reward = folder / "stories.jsonl", folder / "reward.py"
    chats = [[{"role": "user", "content": f"Tell me a long story about {number} foxes."}] for number in range(10, 74)]
    rows.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    reward.write_text("def compute_score(solution_str):\n    return float(len(solution_str) % 7)\n")
    return (f"data.train_files={rows}", f"reward.custom_reward_function.path={reward}")


def said(overrides: tuple[str, ...]) -> dict[str, float]:
    """The bytes of the machine's phases."""
    command = [sys.executable, "-m", "hrl", "check", "--json", *overrides]
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=600, text=True)
    answer = json.loads(found.stdout)
    if not answer["valid"]:
        raise SystemExit(found.stdout)
    (table,) = answer["memory"]
    return {phase["phase"]: phase["bytes"] for phase in table["phases"]}


def kind_of(process: psutil.Process) -> str:
    """What a process of a run is."""
    words = " ".join(process.cmdline())
    for mark, kind in (("multiprocessing", "engine"), ("ray::Rank", "rank"), ("main_ppo", "driver")):
        if mark in words:
            return kind
    return "others"


def proportional_bytes(pid: int) -> int:
    """The PSS of a process."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(fields[1]) for fields in lines if fields[0] == "Pss:")


def sampled(run: psutil.Process) -> Iterator[dict[str, int]]:
    """The bytes of each kind of process, again and again until the run ends."""
    kinds: dict[int, str] = {}
    while run.is_running() and run.status() != psutil.STATUS_ZOMBIE:
        found: dict[str, int] = {}
        for process in (run, *run.children(recursive=True)):
            try:
                kind = kinds[process.pid] = kind_of(process)
                found[kind] = found.get(kind, 0) + proportional_bytes(process.pid)
            except (OSError, psutil.Error):  # it has ended
                continue
        yield found
        time.sleep(0.3)


def measured(overrides: tuple[str, ...], folder: Path) -> dict[str, int]:
    """The most bytes of all processes together, and of each kind at that moment."""
    command = [sys.executable, "-m", "hrl.trainer.main_ppo", *overrides, f"trainer.default_local_dir={folder}"]
    with (folder.parent / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    deadline, most = time.monotonic() + RUN_TIMEOUT_S, {"together": 0}
    for found in sampled(psutil.Process(run.pid)):
        if (together := sum(found.values())) > most["together"]:
            most = {"together": together, **found}
        if time.monotonic() > deadline:
            run.terminate()
    if run.wait(60) != 0:
        raise SystemExit((folder.parent / "log").read_text()[-3000:])
    return most


def main(names: list[str]) -> None:
    """Print a line for each configuration."""
    for name in names or CONFIGURATIONS:
        with tempfile.TemporaryDirectory() as folder:
            overrides = (*ONE_STEP, *stories(Path(folder)), *CONFIGURATIONS[name])
            phases = said(overrides)
            peak = max(phases, key=lambda phase: phases[phase])
            found = measured(overrides, Path(folder) / "run")
        parts = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in sorted(found.items()) if kind != "together")
        sys.stdout.write(
            f"{name}: said {phases[peak] / GIB:.2f} GiB ({peak}), measured {found['together'] / GIB:.2f} ({parts}), "
            f"ratio {phases[peak] / found['together']:.2f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
