"""Whole runs, started as a user starts them, with nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs.own_network import in_own_network, is_loopback, listening, report_of

RUN_TIMEOUT_S = 900.0
ROOT = Path(__file__).resolve().parents[2]
#: The least that a step can learn from, and no validation.
TWO_ROWS = (
    "data.train_batch_size=2",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
)


@dataclass(frozen=True)
class FinishedRun:
    """What a run left behind."""

    folder: Path
    returncode: int
    output: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def samples(self, step: int) -> list[dict[str, Any]]:
        """The rollouts of a step."""
        return [json.loads(line) for line in (self.folder / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


class Runner:
    """Starts ``python -m hrl.trainer.main_ppo`` and checks that nothing of it stays."""

    def __init__(self, model: Path, reward_model: Path, reward: Path, *, is_enclosed: bool = False) -> None:
        self.model = model
        self.reward_model = reward_model
        self.reward = reward
        self._shared_memory: set[str] = set()
        self._is_enclosed = is_enclosed
        self._network: Path | None = None

    @classmethod
    def of_random_models(cls, folder: Path, *, is_enclosed: bool = False) -> Runner:
        """Runs on a random two-layer Llama with the tokenizer of the bundled model, and a random classifier over it.

        Args:
            folder: Where they are written.
            is_enclosed: Whether each run is in a network of its own, out of which it must not send anything.
        """
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

        from hrl.models.source import resolve_model

        tokenizer = AutoTokenizer.from_pretrained(resolve_model("bundled:smollm2-135m-instruct"))
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
            num_labels=1,
        )
        torch.manual_seed(0)
        for name, architecture in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
            architecture(config).to(torch.bfloat16).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        # A random model answers no sum, so nothing would be learnt: different answers get different scores instead.
        reward = folder / "spread.py"
        signature = "data_source, solution_str, ground_truth, extra_info=None"
        reward.write_text(f"def compute_score({signature}):\n    return len(set(solution_str)) / 10\n")
        return cls(folder / "policy", folder / "reward", reward, is_enclosed=is_enclosed)

    @property
    def with_reward_model(self) -> tuple[str, ...]:
        return (
            "reward.reward_model.enable=true",
            f"reward.reward_model.model_path={self.reward_model}",
            f"critic.model.path={self.model}",
        )

    def arguments(self, folder: Path, *overrides: str) -> list[str]:
        """What follows the command."""
        return [
            "quickstart=ppo",
            f"trainer.default_local_dir={folder}",
            f"actor_rollout_ref.model.path={self.model}",
            f"reward.custom_reward_function.path={self.reward}",
            "actor_rollout_ref.rollout.kv_cache_gib=0.25",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
            "data.max_response_length=8",
            *overrides,
        ]

    def launch(self, *arguments: str) -> subprocess.Popen[str]:
        """Python with these arguments; `finish` compares with the shared memory that is there now."""
        self._shared_memory = set(os.listdir("/dev/shm"))
        self._network = Path(tempfile.mkdtemp(prefix="network-"), "report.json") if self._is_enclosed else None
        return launch(*arguments, network=self._network)

    def start(self, folder: Path, *overrides: str) -> subprocess.Popen[str]:
        one_thread = "trainer.cpu_threads_per_worker=1"  # enough for this model; its processes share two cores
        return self.launch("-m", "hrl.trainer.main_ppo", *self.arguments(folder, one_thread, *overrides))

    def start_and_wait(self, folder: Path, reached: Callable[[], bool], *overrides: str) -> subprocess.Popen[str]:
        """A run of so many steps that only a signal ends it, which has come to where `reached` holds."""
        process = self.start(folder, *overrides, "trainer.total_training_steps=1000")
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not reached():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.5)
        return process

    def finish(self, process: subprocess.Popen[str], folder: Path, timeout_s: float = RUN_TIMEOUT_S) -> FinishedRun:
        """Waits for the run and asserts that it listened on loopback alone, sent nothing and left nothing running."""
        family: dict[int, psutil.Process] = {}
        reachable: set[str] = set()
        of_others, seen_names = set[str](), set(self._shared_memory)
        deadline = time.monotonic() + timeout_s
        while process.poll() is None:
            family |= {child.pid: child for child in descendants(process.pid)}
            names = set(os.listdir("/dev/shm")) - seen_names
            for name, owners in owners_of(names).items():
                seen_names.add(name)
                of_others |= set() if owners & {process.pid, *family} else {name}
            if self._network is None:  # in a network of its own, this process sees none of the run's sockets
                reachable |= beyond_loopback([psutil.Process(process.pid), *family.values()])
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                pytest.fail(f"the run did not end within {timeout_s:g} s:\n{output}")
            time.sleep(0.5)
        output, _ = process.communicate()
        left = psutil.wait_procs(list(family.values()), timeout=15)[1]
        left_in_memory = self._left_in_memory(patience_s=15) - of_others
        if self._network is not None:
            seen = report_of(self._network)
            shutil.rmtree(self._network.parent)
            assert not seen.sent, f"called out: {seen.sent}"
            reachable |= set(seen.listening)
        assert not left_in_memory, f"shared memory was left: {sorted(left_in_memory)}"
        assert not reachable, f"listened beyond loopback: {sorted(reachable)}"
        assert not left, f"left running: {[child.as_dict(['pid', 'name', 'cmdline']) for child in left]}"
        return FinishedRun(folder, process.returncode, output)

    def _left_in_memory(self, patience_s: float) -> set[str]:
        """What stays: the semaphores of a process that has just ended are unlinked by another one, a moment later."""
        deadline = time.monotonic() + patience_s
        while left := without_owner(set(os.listdir("/dev/shm")) - self._shared_memory):
            if time.monotonic() > deadline:
                return left
            time.sleep(0.2)
        return set()

    def __call__(self, folder: Path, *overrides: str) -> FinishedRun:
        run = self.finish(self.start(folder, *overrides), folder)
        assert run.returncode == 0, run.output
        return run


def launch(*arguments: str, network: Path | None = None) -> subprocess.Popen[str]:
    """Python with these arguments, at the repository's root.

    Args:
        network: Where a report is written, if it is to run in a network of its own; see `in_own_network`.
    """
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command if network is None else in_own_network(network, command),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "NO_COLOR": "1"},
    )


def beyond_loopback(processes: Iterable[psutil.Process]) -> set[str]:
    """Sockets of these processes, in this process's network, that another machine could connect to."""
    reachable = {f"socket:[{each.inode}]": each.ip for each in listening() if not is_loopback(each.ip)}
    found = set()
    for process in processes:
        descriptors = []
        with contextlib.suppress(OSError):  # it has ended
            descriptors = os.listdir(f"/proc/{process.pid}/fd")
        for descriptor in descriptors:
            with contextlib.suppress(OSError, psutil.Error):  # it is closed by now
                if (ip := reachable.get(os.readlink(f"/proc/{process.pid}/fd/{descriptor}"))) is not None:
                    found.add(f"{process.name()} on {ip}")
    return found


def owners_of(names: set[str]) -> dict[str, set[int]]:
    """Names in /dev/shm → the running processes that have them mapped, of those that any has.

    Files are told by their inodes: who makes a semaphore maps it under a name that it has for a moment.
    """
    found, inodes = dict[str, set[int]](), dict[int, str]()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes[Path("/dev/shm", name).stat().st_ino] = name
    for maps in Path("/proc").glob("[0-9]*/maps") if inodes else ():
        with contextlib.suppress(OSError):  # it has ended
            for line in maps.read_text().splitlines():
                if "/dev/shm/" in line and (mapped := inodes.get(int(line.split()[4]))) is not None:
                    found.setdefault(mapped, set()).add(int(maps.parent.name))
    return found


def without_owner(names: set[str]) -> set[str]:
    """Those of these names in /dev/shm that no running process has mapped: other tests may run beside this one."""
    return {name for name in names - owners_of(names).keys() if Path("/dev/shm", name).exists()}


def descendants(pid: int) -> list[psutil.Process]:
    """The processes below ``pid`` right now."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
