"""Whole runs of the trainers that learn from a data set: what they leave, how they resume, what their models do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hrl.cluster.checkpoints import PARTS
from hrl.config.compose import compose_kind
from hrl.config.offline import OfflineConfig
from hrl.config.run_kind import OFFLINE_KINDS, RunKind
from hrl.errors import ConfigError
from hrl.report.run_folder import read_jsonl
from tests.config.key_reads import KeyReads
from tests.runs.in_process import in_process, run_configured, run_in_process
from tests.runs.runner import Runner

pytestmark = pytest.mark.cluster

EVERY_STEP = {
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/tokens",
    "train/skipped_steps",
    "train/weights_checksum",
    "response_length/mean",
    "timing_s/update",
    "timing_s/step",
    "perf/throughput",
    "perf/max_memory_gib",
}
OF_PAIRS = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
OWN = {"dpo": OF_PAIRS | {"logps/chosen", "logps/rejected"}, "sft": {"train/perplexity", "train/nll"}, "rm": OF_PAIRS}


@pytest.fixture(scope="module", autouse=True)
def reads() -> Iterator[KeyReads]:
    """Of all runs here, which are in this process."""
    found = KeyReads()
    with in_process(), found.recording():
        yield found


def run(kind_name: str, model: Path, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """What ``main_<kind>`` does, without a cluster; the records of metrics.jsonl."""
    config = compose_kind(
        OFFLINE_KINDS[kind_name],
        [
            f"quickstart={kind_name}",
            f"model.path={model}",
            f"trainer.default_local_dir={folder}",
            "trainer.device=cpu",
            "data.train_batch_size=4",
            "data.val_max_samples=6",
            "trainer.test_freq=-1",
            "optim.lr=1e-3",
            *overrides,
        ],
    )
    run_configured(kind_name, config)
    return read_jsonl(folder / "metrics.jsonl")


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments. (Generators are seeded when ranks join, which they did before these runs.)"""
    return {name: value for file in folder.glob("shard-*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("kind", OFFLINE_KINDS)
def test_a_run_leaves_what_it_promises_and_resumes_bit_for_bit(
    kind: str, runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    falling = "optim.lr_scheduler_type=cosine"
    straight = run(kind, runner.model, tmp_path / "straight", falling, "trainer.total_training_steps=2")
    stopped = run(kind, runner.model, tmp_path / "run", falling, "trainer.total_training_steps=1")
    assert [record["step"] for record in stopped] == [0, 1]
    for record in straight[1:]:
        assert record.keys() >= EVERY_STEP | OWN[kind]
        assert math.isfinite(record["train/loss"]) and record["train/skipped_steps"] == 0

    resumed = run(kind, runner.model, tmp_path / "run", falling, "trainer.total_training_steps=2")
    assert "continuing after step 1" in capsys.readouterr().out
    for name in ("train/loss", "train/grad_norm", *OWN[kind]):
        assert [r.get(name) for r in resumed[1:]] == [r.get(name) for r in straight[1:]], name
    checkpoints = [tmp_path / name / "checkpoints" / "step_2" for name in ("run", "straight")]
    one, other = (state(path / ("rm" if kind == "rm" else "actor")) for path in checkpoints)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    (driver,) = {frozenset(json.loads((path / "state.json").read_text())) for path in checkpoints}
    assert driver == {*PARTS} - {"score"}  # which the manifest has
    if kind == "dpo":
        dpo_starts_at_its_reference_and_leaves_it(straight)


def test_a_run_with_another_optimizer_resumes_bit_for_bit_and_with_no_other(runner: Runner, tmp_path: Path) -> None:
    options = ("optim.name=muon", "model.enable_gradient_checkpointing=true", "model.recompute_num_layers=1")
    straight = run("sft", runner.model, tmp_path / "straight", *options, "trainer.total_training_steps=2")
    run("sft", runner.model, tmp_path / "run", *options, "trainer.total_training_steps=1")
    resumed = run("sft", runner.model, tmp_path / "run", *options, "trainer.total_training_steps=2")
    for name in ("train/loss", "train/grad_norm", "train/weights_checksum"):
        assert [r.get(name) for r in resumed[1:]] == [r.get(name) for r in straight[1:]], name
    kept = state(tmp_path / "run" / "checkpoints" / "step_2" / "actor")
    moved = {name.partition(".")[0] for name in kept if ".layers." in name and "proj" in name}
    assert moved == {"model", "momentum_buffer"}
    with pytest.raises(ConfigError, match=r"optim.name is adamw, and .*step_2 holds the state of muon"):
        run("sft", runner.model, tmp_path / "run", "trainer.total_training_steps=3")


@pytest.mark.parametrize("kind", OFFLINE_KINDS)
def test_a_run_of_an_adapter_resumes_bit_for_bit_and_leaves_its_folder(
    kind: str, runner: Runner, tmp_path: Path
) -> None:
    options = ("model.lora_rank=4", "model.lora_alpha=8", "checkpoint.save_contents=[model,optimizer,extra,hf_model]")
    straight = run(kind, runner.model, tmp_path / "straight", *options, "trainer.total_training_steps=2")
    run(kind, runner.model, tmp_path / "run", *options, "trainer.total_training_steps=1")
    resumed = run(kind, runner.model, tmp_path / "run", *options, "trainer.total_training_steps=2")
    for name in ("train/loss", "train/grad_norm", "train/weights_checksum"):
        assert [r.get(name) for r in resumed[1:]] == [r.get(name) for r in straight[1:]], name
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    saved = state(checkpoint / ("rm" if kind == "rm" else "actor"))
    assert saved and all(".lora_" in name or ".score." in name for name in saved)
    held = load_file(checkpoint / "hf" / "adapter_model.safetensors")
    assert ("base_model.model.score.weight" in held) == (kind == "rm")
    if kind == "dpo":
        dpo_starts_at_its_reference_and_leaves_it(straight)


def dpo_starts_at_its_reference_and_leaves_it(records: list[dict[str, Any]]) -> None:
    source = "val/bundled/addition_pairs"
    before, first, after = records
    assert before[f"{source}/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert before[f"{source}/rewards_chosen"] == before[f"{source}/rewards_margins"] == 0.0
    assert before[f"{source}/n"] == 6 and "timing_s/ref" in before
    # The update's own forward gives what the pass of the reference gave.
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
    chosen, rejected, margin = (after[f"{source}/rewards_{name}"] for name in ("chosen", "rejected", "margins"))
    assert chosen != 0.0 and margin == pytest.approx(chosen - rejected)


def test_a_loss_without_a_reference_asks_for_none(runner: Runner, tmp_path: Path) -> None:
    records = run(
        "dpo", runner.model, tmp_path / "run", "algorithm.loss_type=simpo", "algorithm.target_margin=0.5",
        "trainer.total_training_steps=1", "trainer.save_freq=-1",
    )  # fmt: skip
    assert "timing_s/ref" not in records[0] and records[0]["val/bundled/addition_pairs/rewards_chosen"] < 0


def test_sft_lowers_the_perplexity_of_what_it_imitates(runner: Runner, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(4)))
    records = run(
        "sft", runner.model, tmp_path / "run", f"data.train_files={file}", f"data.val_files={file}",
        "trainer.total_epochs=4", "optim.lr=3e-3",
    )  # fmt: skip
    before, after = records[0], records[-1]
    assert after["val/chat/perplexity"] < 0.5 * before["val/chat/perplexity"]
    assert before["val/chat/perplexity"] == pytest.approx(math.exp(before["val/chat/loss"]))
    assert before["val/chat/n"] == 4
    # The first step's loss is that of the validation before it: the same rows, the same weights.
    assert records[1]["train/loss"] == pytest.approx(before["val/chat/loss"], rel=1e-4)
    assert records[1]["train/tokens"] == 4 * 3  # hello, there, and the end

    exported = tmp_path / "run" / "checkpoints" / "step_4" / "hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    prompt, whole = (
        tokenizer.apply_chat_template(part, add_generation_prompt=more, return_tensors="pt", return_dict=False)
        for part, more in ((chat[:1], True), (chat, False))
    )
    log_probs = model(whole).logits[0].detach().float().log_softmax(-1)
    answer = range(prompt.shape[1], prompt.shape[1] + 3)
    nll = -sum(float(log_probs[position - 1, whole[0, position]]) for position in answer) / 3
    assert nll == pytest.approx(after["val/chat/loss"], rel=0.1)  # the folder's weights are bfloat16


def test_a_trained_reward_model_scores_in_transformers_and_in_a_ppo_run(runner: Runner, tmp_path: Path) -> None:
    records = run("rm", runner.model, tmp_path / "rm", "trainer.total_training_steps=2")
    assert records[0]["val/bundled/addition_pairs/loss"] == pytest.approx(math.log(2))  # a fresh head scores 0
    assert records[1]["train/grad_norm"] > 0
    folder = tmp_path / "rm" / "checkpoints" / "step_2" / "hf"
    model, tokenizer = (auto.from_pretrained(folder) for auto in (AutoModelForSequenceClassification, AutoTokenizer))
    assert (model.config.num_labels, model.config.pad_token_id) == (1, tokenizer.pad_token_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id  # the end of an answer must not look like padding
    assert bool((model.score.weight != 0).any())

    run_in_process(
        f"trainer.default_local_dir={tmp_path / 'ppo'}",
        f"actor_rollout_ref.model.path={runner.model}",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={folder}",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "data.max_response_length=8",
        "data.val_max_samples=2",
        "trainer.total_training_steps=1",
    )
    step = read_jsonl(tmp_path / "ppo" / "metrics.jsonl")[1]
    assert step["critic/score/max"] != step["critic/score/min"]


@pytest.mark.engine
def test_two_ranks_on_a_cluster_of_their_own(runner: Runner, tmp_path: Path) -> None:
    run_of_two = runner.finish(
        runner.launch(
            "-m",
            "hrl.trainer.main_dpo",
            "quickstart=dpo",
            f"model.path={runner.model}",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "data.train_batch_size=4",
            "data.val_max_samples=3",
            "trainer.n_gpus_per_node=2",
            "trainer.total_training_steps=1",
        ),
        tmp_path / "run",
    )
    assert run_of_two.returncode == 0, run_of_two.output
    assert [record["step"] for record in run_of_two.metrics] == [0, 1]
    assert run_of_two.metrics[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
    for name in ("loss_curve.png", "report.html", "config.yaml", "checkpoints/step_1/hf/model.safetensors"):
        assert (tmp_path / "run" / name).stat().st_size > 0, name


@pytest.mark.parametrize("kind", OFFLINE_KINDS.values(), ids=OFFLINE_KINDS)
def test_every_key_is_read_by_code(
    reads: KeyReads, kind: RunKind[OfflineConfig], request: pytest.FixtureRequest
) -> None:
    ran = {item.name for item in request.session.items}
    if f"test_a_run_leaves_what_it_promises_and_resumes_bit_for_bit[{kind.name}]" not in ran:
        pytest.skip("says something after a run of the kind")
    assert reads.unread(kind.schema) == set()
