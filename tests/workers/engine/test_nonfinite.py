"""A batch that gives no finite step is not lost: what is kept of it, where, and how much at most."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hrl.algos.preference import PairOptions
from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.workers.engine import nonfinite
from hrl.workers.engine.nonfinite import NonFiniteStepError, NonFiniteWeightsError, unpadded
from tests.models.tiny import (
    PROMPT_WIDTH,
    actor_config,
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
    plan_rows,
)
from tests.workers.asked import Actor, Critic, learn_answers, learn_pairs, learn_scores
from tests.workers.engine.ranks import CPU, parameters

pytestmark = pytest.mark.usefixtures("world")

POISONED = 5


def policy_in(run_folder: Path | None, llama: Path) -> Actor:
    return Actor(
        model_config(llama),
        actor_config(),
        fsdp_config("float32"),
        device=CPU,
        total_steps=None,
        run_folder=run_folder,
    )


def poisoned_batch():
    """One advantage of row 5 is NaN."""
    batch = make_batch()
    batch.batch["advantages"][POISONED, 0] = float("nan")
    batch.meta_info |= {"threshold": float("inf"), "rules": SimpleNamespace(kinds=("k1", None))}
    return batch, plan_rows(batch, 1, 3).ranks[0]


def read_strictly(path: Path) -> dict:
    """JSON as the standard has it: without NaN."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in {path}"))


def test_the_batch_is_kept_with_what_was_not_finite(llama, tmp_path):
    policy, (batch, plan) = policy_in(tmp_path, llama), poisoned_batch()
    before = parameters(policy)
    policy.learn(batch, plan)

    record = read_strictly(tmp_path / "nonfinite" / "step_7_rank_0.actor-0.json")
    micro_batches = plan.mini_batches[0].micro_batches
    guilty = next(i for i, picked in enumerate(micro_batches) if POISONED in picked)
    assert [part["loss"] == "NaN" for part in record["micro_batches"]] == [i == guilty for i in range(3)]
    uids = batch.non_tensor_batch["uid"]
    assert [part["uids"] for part in record["micro_batches"]] == [[*uids[list(picked)]] for picked in micro_batches]
    found = record["not_finite"]
    assert found["columns"] == ["advantages"] and "actor/pg_loss" in found["metrics"] and found["weights"] == []
    assert set(found["gradients"]) <= set(before) and "model.model.norm.weight" in found["gradients"]
    assert (record["step"], record["rank"], record["update"], record["grad_norm"]) == (7, 0, "actor", "NaN")
    assert record["config"]["optim"] == vars(policy.loss.optim) | {"betas": [0.9, 0.999]}
    assert record["meta_info"] == {"temperature": 1.0, "threshold": "Infinity", "rules": {"kinds": ["k1", None]}}
    asked_for = record["request"]
    assert (asked_for["step"], asked_for["old_log_probs"], asked_for["temperature"]) == (7, "old_log_probs", 1.0)
    assert asked_for["loss"]["clip_ratio_high"] == 0.2 and "plan" not in asked_for
    assert all(torch.equal(value, before[name]) for name, value in parameters(policy).items())


def test_the_kept_columns_are_the_rows_in_the_order_they_ran(llama, tmp_path):
    policy, (batch, plan) = policy_in(tmp_path, llama), poisoned_batch()
    policy.learn(batch, plan)

    kept = load_file(tmp_path / "nonfinite" / "step_7_rank_0.actor-0.safetensors")
    order = [row for picked in plan.mini_batches[0].micro_batches for row in picked]
    mask = batch.batch["attention_mask"][order].bool()
    starts = [0, *kept["response_lengths"].cumsum(0).tolist()]
    assert kept["prompts"].tolist() == batch.batch["prompts"][order][mask[:, :PROMPT_WIDTH]].tolist()
    for slot, row in enumerate(order):
        want = batch.batch["advantages"][row][mask[slot, PROMPT_WIDTH:]]
        torch.testing.assert_close(kept["advantages"][starts[slot] : starts[slot + 1]], want, equal_nan=True)
    assert kept["prompt_lengths"].tolist() == mask[:, :PROMPT_WIDTH].sum(1).tolist()
    assert kept["micro_batch"].tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_rows_that_did_not_run_are_not_kept():
    batch = make_batch()
    columns = unpadded(batch, [(3,), (), (8, 1)])
    assert columns["micro_batch"].tolist() == [0, 2, 2] and len(columns["prompt_lengths"]) == 3


def test_weights_that_are_not_finite_are_named(llama, tmp_path):
    policy, batch = policy_in(tmp_path, llama), make_batch()
    with torch.no_grad():
        policy.engine.module.get_parameter("model.model.norm.weight").to_local()[0] = float("inf")
    with pytest.raises(NonFiniteWeightsError, match="rank 0: weight model.model.norm.weight"):
        policy.learn(batch, plan_rows(batch, 1, 1).ranks[0])
    (record,) = (tmp_path / "nonfinite").glob("*.json")
    assert read_strictly(record)["not_finite"]["weights"] == ["model.model.norm.weight"]


def test_finite_steps_leave_nothing(llama, tmp_path):
    policy, batch = policy_in(tmp_path, llama), make_batch()
    policy.learn(batch, plan_rows(batch, 1, 2).ranks[0])
    assert list(tmp_path.iterdir()) == []


def test_the_error_names_the_last_batch_and_nothing_is_half_written(llama, tmp_path):
    policy = policy_in(tmp_path, llama)
    for step in (1, 2):
        policy.learn(*poisoned_batch(), step=step)
    last = tmp_path / "nonfinite" / "step_3_rank_0.actor-0.json"
    with pytest.raises(NonFiniteStepError, match=f"3 optimizer steps in a row.*This rank's rows are in {last}"):
        policy.learn(*poisoned_batch(), step=3)
    names = {file.name for file in last.parent.iterdir()}
    assert names == {f"step_{n}_rank_0.actor-0.{kind}" for n in (1, 2, 3) for kind in ("json", "safetensors")}


def test_a_rank_keeps_no_more_than_a_few_of_a_run(llama, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(nonfinite, "MAX_DUMPS", 1)
    policy = policy_in(tmp_path, llama)
    for step in (1, 2):
        policy.learn(*poisoned_batch(), step=step)
    assert [file.name for file in (tmp_path / "nonfinite").glob("*.json")] == ["step_1_rank_0.actor-0.json"]
    assert "step_2_rank_0.actor-0 is not kept: this rank has kept 1 batches" in caplog.text


def test_a_disk_that_refuses_does_not_hide_the_skipped_step(llama, tmp_path, caplog):
    (tmp_path / "nonfinite").touch()
    with caplog.at_level(logging.WARNING):
        metrics = policy_in(tmp_path, llama).learn(*poisoned_batch())
    assert metrics["actor/skipped_steps"].result() == 1
    assert "could not be written" in caplog.text and "mini-batch 0 of update actor not applied" in caplog.text


def pairs(llama, tmp_path):
    batch = make_batch(num_groups=6, samples=2)
    batch.batch["is_chosen"] = torch.tensor([1, 0] * 6).bool()
    batch.batch["ref_sequence_log_prob"] = torch.zeros(12)
    batch.batch["margin"] = torch.zeros(12)
    return batch, RankPlan((MiniBatchPlan((tuple(range(4)), tuple(range(4, 12))), 40, 12, 6),))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("kind", ["dpo", "rm", "critic", "values"])
def test_no_update_takes_a_step_on_a_column_that_is_not_finite(llama, tmp_path, kind, value):
    column = {"dpo": "ref_sequence_log_prob", "rm": "margin", "critic": "returns", "values": "values"}[kind]
    batch, plan = pairs(llama, tmp_path)
    learn = {"dpo": partial(learn_pairs, options=PairOptions(0.1)), "rm": learn_scores}
    if kind == "dpo":
        model = policy_in(tmp_path, llama)
    else:
        training = critic_config()
        model = Critic(model_config(llama), training, fsdp_config("float32"), device=CPU, total_steps=10)
    row = 4  # the chosen answer of a pair, which has a trained token
    place = row if batch.batch[column].dim() == 1 else (row, 0)
    before = model.engine.weights_checksum()
    batch.batch[column][place] = value
    metrics = learn[kind](model, batch, plan) if kind in learn else model.learn(batch, plan)
    skipped = sum(metric.result() for name, metric in metrics.items() if name.endswith("/skipped_steps"))
    assert skipped == 1 and model.engine.weights_checksum() == before


def test_answers_are_not_imitated_by_a_model_whose_results_are_not_finite(llama, tmp_path):
    policy, (batch, plan) = policy_in(tmp_path, llama), pairs(llama, tmp_path)
    forward = policy.engine.module.forward
    policy.engine.module.forward = lambda *args: [None if c is None else c * math.nan for c in forward(*args)]
    before = policy.engine.weights_checksum()
    assert learn_answers(policy, batch, plan)["train/skipped_steps"].result() == 1
    assert policy.engine.weights_checksum() == before
