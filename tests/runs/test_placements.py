"""Every layout of the roles, by YAML alone, through real Ray, real FSDP2 and a real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hrl.data.steps import step_ends, with_step_tokens
from tests.runs.placed_runs import ENDED, WHERE
from tests.runs.runner import ROOT, RUN_TIMEOUT_S, FinishedRun, Runner
from tests.trainer.ppo.test_reward_model_rows import TEMPLATE, chat_of, language_model_of, tokenizer_of

pytestmark = pytest.mark.engine

PPO = (
    "recipe=ppo",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
)
EVERY_ROLE_METRICS = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/reward_kl_penalty",
    "critic/vf_loss",
    "critic/values/mean",
    "critic/score/mean",
    "rollout/logprob_diff_mean",
    "timing_s/gen",
    "timing_s/ref",
    "timing_s/values",
    "timing_s/update_critic",
    "timing_s/update_actor",
    "timing_s/weight_sync",
    "perf/throughput",
)


def test_all_colocated_on_two_ranks_with_one_tensor_parallel_engine(runner: Runner, tmp_path: Path) -> None:
    """The actor and its reference are cut over the two ranks as well, and the critic is sharded."""
    run = runner(
        tmp_path / "run",
        *PPO,
        *runner.with_reward_model,
        "placement=colocated",
        "trainer.total_training_steps=2",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.tensor_parallel_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",  # by which weights move, whose sync the second step samples from
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    assert [record["step"] for record in run.metrics] == [1, 2]
    for record in run.metrics:
        assert set(EVERY_ROLE_METRICS) <= record.keys(), set(EVERY_ROLE_METRICS) - record.keys()
        # Random weights in bf16: sampler and trainer agree, which they only do if each sync arrived.
        assert record["rollout/logprob_diff_mean"] < 0.02
    assert all("reward_model" in sample["reward_parts"] for sample in run.samples(1))


def test_every_role_apart_with_weights_by_broadcast_until_ctrl_c_ends_the_run_and_its_engine(
    runner: Runner, tmp_path: Path
) -> None:
    """The engine drafts: greedy answers of a random model repeat themselves."""
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"
    drafts = "{method:ngram,num_speculative_tokens:3,prompt_lookup_min:1,prompt_lookup_max:2}"
    process = runner.start_and_wait(
        folder,
        lambda: metrics.exists() and metrics.read_text().count("\n") >= 3,
        *PPO,
        *runner.with_reward_model,
        "placement=separate",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={drafts}",
        "trainer.val_before_train=true",
        "data.val_max_samples=4",
    )
    os.kill(process.pid, signal.SIGINT)
    run = runner.finish(process, folder, timeout_s=240)
    assert run.returncode == 75, run.output
    steps = run.metrics[1:]  # behind the validation
    assert [record["step"] for record in steps[:2]] == [1, 2]
    kept, proposed = (steps[0][f"rollout/{name}_tokens"] for name in ("accepted", "draft"))
    assert 0 < kept <= proposed and steps[0]["rollout/acceptance_rate"] == pytest.approx(kept / proposed)
    for record in steps:
        assert set(EVERY_ROLE_METRICS) <= record.keys()
        assert record["rollout/logprob_diff_mean"] < 0.02  # also after a large step: the broadcast arrived
        timed = {name: seconds for name, seconds in record.items() if name.startswith("timing_s/")}
        together = sum(timed.values()) - timed["timing_s/step"]
        assert together - record["perf/overlap_s"] <= timed["timing_s/step"]
        assert record["perf/overlap_s"] > 0, "phases ran at once"


#: What no two runs have in common.
OF_ITS_OWN = ("timing_", "perf/", "reward/call_s", "weight_sync/")
#: Placement → its arguments, and on which node which roles have which processes; a letter for each process.
PLACEMENTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "shared": ((), {"actor_rollout": "a", "ref": "b", "critic": "c", "rm": "c"}),
    "cpu_scorers": ((), {"actor_rollout": "a", "ref": "b", "critic": "a", "rm": "b"}),
    "pinned": ((), {"actor": "a", "ref": "a", "critic": "a", "rm": "a", "rollout": "b"}),
    "split": (
        ("trainer.resource_pools.cards=[2]", "trainer.resource_pools.policy=1", "trainer.resource_pools.ref=1"),
        {"actor_rollout": "a", "ref": "b", "critic": "c", "rm": "d"},
    ),
}
#: Run → its arguments, for a policy of two ranks beside a critic of one.
WIDE = {"merged": ("placement=merged",), "spare": ("placement=spare", "trainer.nnodes=2")}
#: The same, for runs that validate after each step: beside the next one, and before it.
VALIDATED = {
    name: (
        f"placement={placement}",
        "reward.reward_model.enable=false",
        "trainer.test_freq=1",
        "data.val_max_samples=8",
        "trainer.total_training_steps=2",
    )
    for name, placement in (("beside", "pinned"), ("before", "colocated"))
}


#: A run whose reward model scores steps by a word, over two ranks of a pool of its own.
STEPS = "steps"


class PlacedRuns:
    """Runs on one Ray of two nodes, one after another; a test waits for those that it asks for, and for no other."""

    def __init__(self, folder: Path, every: list[str], runs: dict[str, list[str]]) -> None:
        self._folder, self._log, self._last = folder, folder / "output", folder / [*runs][-1] / ENDED
        command = [sys.executable, "-m", "tests.runs.placed_runs", str(folder), json.dumps(every), json.dumps(runs)]
        environ = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        with self._log.open("w") as output:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)

    def __getitem__(self, name: str) -> tuple[list[dict[str, Any]], dict[str, Any], FinishedRun]:
        """The metrics of its steps, where its ranks were, and the run."""
        run, deadline = FinishedRun(self._folder / name, 0, ""), time.monotonic() + RUN_TIMEOUT_S
        while not (run.folder / ENDED).exists():
            assert self._process.poll() in (None, 0) and time.monotonic() < deadline, self._log.read_text()[-6000:]
            time.sleep(0.2)
        return run.metrics, json.loads((run.folder / WHERE).read_text()), run

    def end(self) -> None:
        """Wait until the cluster has ended, well if all runs have; those that no test asked for are not waited for."""
        all_ran = self._last.exists()
        if not all_ran:
            self._process.send_signal(signal.SIGINT)
        try:
            returncode = self._process.wait(RUN_TIMEOUT_S)
        finally:
            self._process.kill()
        assert returncode == 0 or not all_ran, self._log.read_text()[-6000:]


@pytest.fixture(scope="module")
def placed(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedRuns]:
    folder = tmp_path_factory.mktemp("placed")
    float32 = [f"{key}.dtype=float32" for key in (
        "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "actor_rollout_ref.rollout",
        "critic.model.fsdp_config", "reward.reward_model.model.fsdp_config",
    )]  # fmt: skip
    every = [
        *(argument for argument in runner.arguments(folder) if "default_local_dir" not in argument),
        *(*PPO, *runner.with_reward_model, *float32),
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.model.probe=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.cpu_threads_per_worker=1",
        "trainer.total_training_steps=1",
    ]
    runs = {name: [f"placement={name}", *arguments] for name, (arguments, _) in PLACEMENTS.items()}
    runs |= {name: [*arguments] for name, arguments in (*WIDE.items(), *VALIDATED.items())}
    judge = language_model_of(folder / "prm", tokenizer_of("1 + 2 - 3", TEMPLATE), positions=512)
    runs[STEPS] = [
        "trainer.resource_pools={policy: [1], steps: [2]}",
        "trainer.role_pools={rm: steps}",
        "data.max_response_length=16",
        f"reward.reward_model.model_path={judge}",
        "reward.reward_model.step_token='<s>'",
        "reward.reward_model.step_separator=' '",
        "reward.reward_model.reward_tokens=['+','-']",
    ]
    running = PlacedRuns(folder, every, runs)
    yield running
    running.end()


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {metric: value for metric, value in record.items() if not metric.startswith(OF_ITS_OWN)}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_placement_has_its_processes_where_it_says_and_the_numbers_of_any_other(
    name: str, placed: PlacedRuns
) -> None:
    (record,), where, _ = placed[name]
    processes = PLACEMENTS[name][1]
    assert where.keys() == processes.keys() and all(len(ranks) == 1 for ranks in where.values())
    pids = {role: ranks[0][1] for role, ranks in where.items()}
    together = {(one, other) for one in pids for other in pids if pids[one] == pids[other]}
    assert together == {(a, b) for a in processes for b in processes if processes[a] == processes[b]}
    nodes = {role: ranks[0][0] for role, ranks in where.items()}
    if name == "pinned":
        assert nodes == {role: "sample" if role == "rollout" else "train" for role in nodes}
    if name in ("shared", "split"):
        assert len(set(nodes.values())) == 1, "processes that share a reservation share its node"
    at_once = record.get("perf/overlap_s", 0.0) > 0
    assert at_once == (name in ("cpu_scorers", "split")), "none on one device, or in one process"
    assert untimed(record) == untimed(placed["pinned"][0][0]), "the same samples, losses and weights, to the last bit"
    assert {"actor/weights_checksum", "critic/weights_checksum"} <= record.keys()


def test_a_policy_over_two_merged_pools_is_one_over_two_machines_beside_a_smaller_critic(
    placed: PlacedRuns,
) -> None:
    (merged,), where, _ = placed["merged"]
    (spare,), apart, _ = placed["spare"]
    assert untimed(merged) == untimed(spare)
    assert {role: [node for node, _ in ranks] for role, ranks in where.items()} == {
        "actor_rollout": ["train", "sample"], "critic": ["train"], "ref": ["sample"], "rm": ["sample"],
    }  # fmt: skip
    pids = {role: [pid for _, pid in ranks] for role, ranks in where.items()}
    assert pids["ref"] == pids["rm"] and pids["critic"][0] not in pids["actor_rollout"]
    assert {role: len(ranks) for role, ranks in apart.items()} == {role: len(ranks) for role, ranks in where.items()}
    assert merged["perf/overlap_s"] > 0, "critic and reference score at once, on devices of the policy's"


def test_a_validation_beside_the_next_step_is_the_one_before_it(
    placed: PlacedRuns,
) -> None:
    beside, before = placed["beside"][0], placed["before"][0]
    assert [*map(untimed, beside)] == [*map(untimed, before)]
    assert [any(name.startswith("val/") for name in record) for record in beside] == [True, True]
    # In the pinned run the second step waits for the first one's validation; the last one is waited for as ever.
    assert beside[1]["perf/overlap_s"] > 0 and "perf/overlap_s" not in before[1]


def test_two_ranks_on_a_pool_of_their_own_score_steps_as_transformers_does(
    placed: PlacedRuns,
) -> None:
    (record,), where, run = placed[STEPS]
    others = {pid for role, ranks in where.items() if role != "rm" for _, pid in ranks}
    assert len(where["rm"]) == 2 and others.isdisjoint(pid for _, pid in where["rm"])
    folder, most = run.folder.parent / "prm", 0
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    mark, words = tokenizer.convert_tokens_to_ids("<s>"), tokenizer.convert_tokens_to_ids(["+", "-"])
    for sample in run.samples(1):
        text = sample["response"].replace("<|im_end|>", "")
        ends = step_ends(text, " ")
        chat = chat_of(sample["question"], with_step_tokens(text, ends, "<s>"))
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True).input_ids
        at = (ids[0] == mark).nonzero().flatten()[-len(ends) :]
        with torch.no_grad():
            scores = model(ids).logits[0, at][:, words].softmax(-1)[:, 0]
        assert sample["reward_parts"]["reward_model"] == pytest.approx(float(scores.mean()), abs=1e-5)
        most = max(most, len(ends))
    assert most > 1 and record["actor/grad_norm"] > 0
