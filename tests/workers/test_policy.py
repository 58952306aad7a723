"""The policy against the definition: plain forwards of one unpadded row at a time, in float64."""

from __future__ import annotations

import copy
import json
import math
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hrl.algos.aggregation import Counts, aggregate
from hrl.algos.kl import kl_penalty
from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.config.algorithm import RolloutCorrectionConfig
from hrl.models.packed_model import TokenRows
from hrl.protocol import DataProto
from hrl.workers.actor_rollout_ref import UnknownTokenError, require_known
from hrl.workers.engine.checksum import WeightsDifferError
from hrl.workers.engine.nonfinite import NonFiniteStepError
from hrl.workers.engine.snapshot import Snapshot
from hrl.workers.requests import OldLogProbs
from tests.models.tiny import (
    actor_config,
    fsdp_config,
    make_batch,
    model_config,
    plain_log_probs,
    plan_rows,
    save_qwen2,
    trim,
)
from tests.models.trees import num_nodes, sequences_of, tree_batch
from tests.workers.asked import Actor
from tests.workers.engine.ranks import CPU, gradients, parameters, policy_of

pytestmark = pytest.mark.usefixtures("world")

#: transformers computes its norms in float32 whatever the model's dtype, so two orders of summation differ by this.
NORM_ERROR = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("qwen2"), window=4)


def plain_model(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def one_plan(batch, micro_batches: int = 1) -> RankPlan:
    return plan_rows(batch, 1, micro_batches).ranks[0]


# ---------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("share_prefix", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_log_probs_equal_plain_forwards(family, temperature, share_prefix, request):
    path = request.getfixturevalue(family)
    policy = policy_of(path, share_prefix=share_prefix)
    batch = make_batch(temperature=temperature)
    got = policy.log_probs(batch, one_plan(batch, 2), with_entropy=True)
    with torch.no_grad():
        want = plain_log_probs(plain_model(path), batch, temperature)
    torch.testing.assert_close(got.batch["old_log_probs"], want.float(), **NORM_ERROR)
    assert (got.batch["old_log_probs"][batch.batch["response_mask"] == 0] == 0).all()
    assert got.batch["entropys"].dtype == torch.float32


def tokens_run(policy: Actor) -> list[int]:
    """The tokens of each micro-batch that the policy will run."""
    found, pack = [], policy.engine.pack

    def counted(*arguments, **options):
        packed = pack(*arguments, **options)
        found.append(packed.layout.num_tokens)
        return packed

    policy.engine.pack = counted
    return found


def beginnings_used(batch: DataProto, picked: tuple[int, ...]) -> list[np.ndarray]:
    """Of each row that trains a token, what comes before the last of these."""
    rows, sequences = TokenRows.of(batch), sequences_of(batch)
    ends = [(row, np.flatnonzero(rows.trained[row])) for row in picked]
    return [sequences[row][: len(rows.prompts[row]) + columns[-1]] for row, columns in ends if len(columns)]


@pytest.mark.parametrize("budget", [1000, 40], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_log_probs_of_a_tree_are_those_of_its_rows_alone(family, budget, request):
    path, batch = request.getfixturevalue(family), tree_batch(seed=4, num_rows=12, longest=20)
    plan = Planner(share_prefix=True).forward(batch, 1, MicroBatchLimits(budget, None, ""))
    (rank,) = plan.ranks
    assert rank.is_tree and (len(rank.mini_batches[0].micro_batches) > 1) == (budget == 40)
    mine = batch.select_idxs(list(plan.rows[0]))
    together, alone = policy_of(path), policy_of(path, share_prefix=False)
    tokens = [tokens_run(each) for each in (together, alone)]
    got, want = (each.log_probs(mine, rank, with_entropy=True).batch for each in (together, alone))
    for name in ("old_log_probs", "entropys"):
        torch.testing.assert_close(got[name], want[name], **NORM_ERROR)
    assert sum(tokens[0]) < 0.8 * sum(tokens[1])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), num_rows=st.integers(2, 14), budget=st.integers(20, 200))
def test_gradients_of_any_tree_are_those_of_its_rows_alone(llama, seed, num_rows, budget):
    """However the planner cuts it, whatever is trained inside what rows share."""
    batch = tree_batch(seed, num_rows, longest=20)
    shape = batch.batch["response_mask"].shape
    noise = torch.Generator().manual_seed(seed)
    for name in ("advantages", "old_log_probs", "ref_log_prob"):
        batch.batch[name] = torch.randn(shape, generator=noise, dtype=torch.float64) - 3 * (name != "advantages")
    limits = MicroBatchLimits(budget, None, "")
    plan = Planner(share_prefix=True).update(batch, 1, limits, mini_batch_rows=num_rows, epochs=1)
    mine = batch.select_idxs(list(plan.rows[0]))
    actor = {"entropy_coeff": 0.05, "use_kl_loss": True}
    together, alone = (policy_of(llama, share_prefix=shared, **actor) for shared in (True, False))
    tokens = tokens_run(together)
    got, want = (gradients(each, mine, plan.ranks[0]) for each in (together, alone))
    assert tokens == [
        max(num_nodes(beginnings_used(mine, picked)), 1) for picked in plan.ranks[0].mini_batches[0].micro_batches
    ]
    norm = torch.stack([gradient.norm() for gradient in want.values()]).norm()
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= 1e-6 * norm, name


def test_sums_of_squared_probabilities_are_those_of_the_sampled_distributions(llama):
    batch = make_batch(temperature=0.7)
    got = policy_of(llama).log_probs(batch, one_plan(batch, 2), with_sum_pi_squared=True).batch
    assert set(got.keys()) == {"old_log_probs", "sum_pi_squared"}
    tokens, prompt_length, columns = trim(batch, 5)
    with torch.no_grad():
        probabilities = (plain_model(llama)(tokens).logits[0] / 0.7).softmax(-1)
    want = probabilities[prompt_length + columns - 1].square().sum(-1)
    torch.testing.assert_close(got["sum_pi_squared"][5, columns], want.float(), **NORM_ERROR)
    assert (got["sum_pi_squared"][batch.batch["response_mask"] == 0] == 0).all()


def test_micro_batches_change_no_log_prob(llama):
    policy, batch = policy_of(llama), make_batch()
    planned = policy.log_probs(batch, one_plan(batch, 3)).batch["old_log_probs"]
    torch.testing.assert_close(policy.log_probs(batch).batch["old_log_probs"], planned, **NORM_ERROR)


def test_a_reference_without_training_has_no_gradients_and_no_optimizer(llama):
    policy = Actor(model_config(llama), None, fsdp_config(), device=CPU, total_steps=None)
    assert policy.engine.optimizer is None
    assert not any(p.requires_grad for p in policy.engine.module.parameters())
    batch = make_batch()
    want = policy_of(llama).log_probs(batch).batch["old_log_probs"]
    assert torch.equal(policy.log_probs(batch).batch["old_log_probs"], want)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_frozen_model_loses_nothing_by_being_stored_in_the_dtype_it_computes_in(family, request):
    path, batch = request.getfixturevalue(family), make_batch()
    got = [
        Actor(model_config(path), None, fsdp_config("bfloat16", model_dtype=stored), device=CPU, total_steps=None)
        .log_probs(batch)
        .batch["old_log_probs"]
        for stored in ("float32", "bfloat16")
    ]
    assert torch.equal(*got)


def test_log_probs_follow_the_weights_after_an_update(llama):
    policy, batch = policy_of(llama), make_batch()
    before = policy.log_probs(batch).batch["old_log_probs"]
    policy.learn(batch, one_plan(batch))
    after = policy.log_probs(batch).batch["old_log_probs"]
    assert (before - after).abs().max() > 1e-3


@pytest.mark.parametrize(
    "column, row, value, message",
    [
        ("attention_mask", (3, slice(0, 9)), 0, "row 3 .* its prompt is empty"),
        ("attention_mask", (2, 8), 0, "row 2 .* not left-padded"),
        ("attention_mask", (4, 9), 0, "row 4 .* not right-padded"),
        ("response_mask", (0, 5), 1, "row 0 .* beyond the response's length"),
    ],
)
def test_bad_masks_name_the_row(llama, column, row, value, message):
    policy, batch = policy_of(llama), make_batch()
    batch.batch[column][row] = value
    with pytest.raises(ValueError, match=message):
        policy.log_probs(batch)


# ---------------------------------------------------------------------------------------------- gradients


def plain_gradients(path: Path, batch, config) -> dict[str, torch.Tensor]:
    """Gradients of the whole mini-batch's loss, computed the slow way."""
    model = plain_model(path)
    mask = batch.batch["response_mask"].bool()
    temperature = batch.meta_info["temperature"]
    log_prob = plain_log_probs(model, batch, temperature)
    inputs = PolicyLossInput(log_prob, batch.batch["old_log_probs"], batch.batch["advantages"], mask)
    counts = Counts.of(mask)
    loss_mat = policy_loss(config.policy_loss.loss_mode, inputs, config).loss_mat
    loss = aggregate(loss_mat, mask, config.loss_agg_mode, counts, 7.0)
    if config.use_kl_loss:
        penalty = kl_penalty(log_prob, batch.batch["ref_log_prob"], config.kl_loss_type)
        loss = loss + config.kl_loss_coef * aggregate(penalty, mask, config.loss_agg_mode, counts, 7.0)
    loss.backward()
    return {f"model.{name}": p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gradients_equal_those_of_plain_forwards(family, mode, request):
    path = request.getfixturevalue(family)
    options = {"loss_agg_mode": mode, "use_kl_loss": True}
    batch = make_batch(temperature=0.8)
    got = gradients(policy_of(path, **options), batch, one_plan(batch, 2))
    want = plain_gradients(path, batch, actor_config(**options))
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_gradient_checkpointing_changes_no_number(llama):
    batch = make_batch()
    options = {"entropy_coeff": 0.1}
    plain = gradients(policy_of(llama, **options), batch, one_plan(batch, 2))
    recomputed = gradients(policy_of(llama, checkpointing=True, **options), batch, one_plan(batch, 2))
    for name in plain:
        assert torch.equal(plain[name], recomputed[name]), name


# ---------------------------------------------------------------------------------------------- updates


def test_on_policy_ratio_is_exactly_one(llama):
    policy, batch = policy_of(llama, "float32"), make_batch()
    metrics = policy.learn(batch, one_plan(batch, 2), old_log_probs=OldLogProbs.OWN)
    assert metrics["actor/ppo_kl"].result() == 0.0
    assert metrics["actor/pg_clipfrac"].result() == 0.0
    mask = batch.batch["response_mask"].bool()
    assert metrics["actor/pg_loss"].result() == pytest.approx(-float(batch.batch["advantages"][mask].mean()), rel=1e-6)


def bypass(**changes) -> dict[str, Any]:
    """Of a request, in bypass mode."""
    correction = RolloutCorrectionConfig(bypass_mode=True, **changes)
    return {"old_log_probs": OldLogProbs.SAMPLER, "correction": correction}


def test_in_bypass_mode_the_samplers_log_probs_are_the_old_ones(llama):
    batch = make_batch()
    want = gradients(policy_of(llama), batch, one_plan(batch, 2))
    batch.rename("old_log_probs", "rollout_log_probs")
    got = gradients(policy_of(llama), batch, one_plan(batch, 2), **bypass())
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_bypass_mode_rejects_by_the_policy_in_training_for_any_cut(llama):
    batch = make_batch()
    policy, trained = policy_of(llama), batch.batch["response_mask"].bool()
    now = policy.log_probs(batch).batch["old_log_probs"]
    # Sampler and trainer agree everywhere but on row 4, which a rule for sequences leaves out.
    batch.batch["rollout_log_probs"] = torch.where(trained, now + 0.01, 0.0)
    batch.batch["rollout_log_probs"][4] += 1.0
    asked = bypass(rollout_rs="seq_mean_k2", rollout_rs_threshold=0.1)
    whole = gradients(policy, batch, one_plan(batch, 1), **asked)
    for name, cut in gradients(policy, batch, one_plan(batch, 3), **asked).items():
        torch.testing.assert_close(cut, whole[name], rtol=1e-4, atol=1e-7)
    metrics = policy.learn(batch, one_plan(batch, 3), **asked)
    share = float(trained[4].sum() / trained.sum())
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].result() == pytest.approx(share)
    batch.batch["advantages"][4] = 0.0
    without = gradients(policy_of(llama), batch, one_plan(batch, 1), **asked)
    for name in whole:
        torch.testing.assert_close(whole[name], without[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_other_old_log_probs_in_bypass_mode_move_the_clipped_ratio_and_nothing_else(llama, loss_type):
    batch = make_batch()
    policy, trained = policy_of(llama), batch.batch["response_mask"].bool()
    now = policy.log_probs(batch).batch["old_log_probs"]
    batch.batch["rollout_log_probs"] = torch.where(trained, now + 0.01, 0.0)
    batch.batch["rollout_log_probs"][4] += 1.0  # rejected, and left in the divisor
    weights = "token" if loss_type == "reinforce" else None
    correction = {"rollout_is": weights, "rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.1}
    asked = bypass(loss_type=loss_type, **correction)
    against_sampler = gradients(policy, batch, one_plan(batch, 2), **asked)
    asked |= {"old_log_probs": OldLogProbs.OWN, "measures_mismatch": False}  # as behind a closed gate
    got = gradients(policy, batch, one_plan(batch, 2), **asked)
    if loss_type == "reinforce":
        want = against_sampler
    else:  # the ratio is 1 and not exp(-0.01), inside of the clip
        want = {name: gradient * math.exp(0.01) for name, gradient in against_sampler.items()}
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-7)
    metrics = policy.learn(batch, one_plan(batch, 2), **asked)
    share = float(trained[4].sum() / trained.sum())
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].result() == pytest.approx(share)
    assert metrics["actor/ppo_kl"].result() == 0.0
    assert "rollout/logprob_diff_mean" not in metrics, "it was measured before"


def test_the_mismatch_is_measured_until_the_weights_move(llama):
    policy, batch = policy_of(llama), make_batch()
    mask = batch.batch["response_mask"].bool()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"]
    before = policy.log_probs(batch).batch["old_log_probs"]
    want = (before - batch.batch["rollout_log_probs"])[mask].abs().mean()
    metrics = policy.learn(batch, RankPlan(one_plan(batch, 2).mini_batches * 3))
    assert metrics["rollout/logprob_diff_mean"].result() == pytest.approx(float(want), rel=1e-5)
    assert metrics["rollout/logprob_diff_mean"].count == metrics["rollout_corr/kl"].count == int(mask.sum())


def test_metrics_carry_verls_names_and_their_counts(llama):
    policy, batch = policy_of(llama, use_kl_loss=True), make_batch()
    metrics = policy.learn(batch, one_plan(batch, 3))
    tokens = int(batch.batch["response_mask"].sum())
    for name in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/entropy", "actor/kl_loss"):
        assert metrics[name].count == tokens, name
    assert metrics["actor/lr"].result() == 1e-3
    assert metrics["actor/skipped_steps"].result() == 0
    assert metrics["actor/grad_norm"].result() > 0
    assert metrics["perf/mfu/actor"].result() > 0


def test_a_model_that_cannot_be_counted_has_no_utilisation(llama):
    policy, batch = policy_of(llama), make_batch()
    policy.engine.flops = None
    assert "perf/mfu/actor" not in policy.learn(batch, one_plan(batch))


def test_pg_loss_is_the_mean_over_mini_batches_of_whole_losses(llama):
    policy, batch = policy_of(llama), make_batch()
    first = policy.learn(batch, one_plan(batch, 2))["actor/pg_loss"]
    fresh = policy_of(llama)
    plans = one_plan(batch, 2).mini_batches * 2
    both = fresh.learn(batch, RankPlan(plans))["actor/pg_loss"]
    second = policy.learn(batch, one_plan(batch, 2))["actor/pg_loss"]
    assert both.result() == pytest.approx((first.result() + second.result()) / 2, rel=1e-9)


def test_rows_left_out_by_the_plan_count_in_the_divisor(llama):
    batch = make_batch()
    batch.batch["advantages"][4:8] = 0.0
    plan = partial(Planner(True).update, batch, 1, MicroBatchLimits(64, None, "a.key"), mini_batch_rows=12, epochs=1)
    everything, some = plan(), plan(skip=(batch.batch["advantages"] == 0).all(1).numpy())
    policy = policy_of(llama)
    with_all = gradients(policy, batch.select_idxs(list(everything.rows[0])), everything.ranks[0])
    with_some = gradients(policy, batch.select_idxs(list(some.rows[0])), some.ranks[0])
    for name in with_all:
        torch.testing.assert_close(with_some[name], with_all[name], rtol=1e-4, atol=1e-7)


def test_a_mini_batch_of_which_no_row_runs_is_still_a_step(llama):
    policy, batch = policy_of(llama), make_batch()
    before = parameters(policy)
    metrics = policy.learn(batch, RankPlan((MiniBatchPlan((), 40, 11, 3),)))
    assert metrics["actor/grad_norm"].result() == 0.0
    decayed = {name: value * (1 - 1e-3 * 0.01) for name, value in before.items()}
    for name, value in parameters(policy).items():
        torch.testing.assert_close(value, decayed[name], rtol=1e-12, atol=0)


def test_what_stands_at_untrained_tokens_reaches_no_gradient(llama):
    policy = policy_of(llama, use_kl_loss=True, entropy_coeff=0.1)
    batch = make_batch()
    clean = gradients(policy, batch, one_plan(batch, 2))
    untrained = ~batch.batch["response_mask"].bool()
    for name in ("advantages", "old_log_probs", "ref_log_prob"):
        batch.batch[name] = batch.batch[name].masked_fill(untrained, float("nan"))
    for name, gradient in gradients(policy, batch, one_plan(batch, 2)).items():
        assert torch.equal(gradient, clean[name]), name


def test_non_finite_steps_are_not_applied_and_stop_after_three(llama):
    policy, batch = policy_of(llama), make_batch()
    before = parameters(policy)
    batch.batch["advantages"][5, 0] = float("nan")
    plan = one_plan(batch, 2)
    for _ in range(2):
        assert policy.learn(batch, plan)["actor/skipped_steps"].result() == 1
    for name, value in parameters(policy).items():
        assert torch.equal(value, before[name])
    with pytest.raises(NonFiniteStepError, match="3 optimizer steps in a row"):
        policy.learn(batch, plan)


def test_non_finite_steps_before_and_after_a_resume_are_counted_together(llama, tmp_path):
    batch = make_batch()
    batch.batch["advantages"][5, 0] = float("nan")
    for kill in range(2):
        policy = policy_of(llama)
        if kill:
            policy.engine.load(tmp_path)
        policy.learn(batch, one_plan(batch, 2))
        policy.engine.save(tmp_path)
    resumed = policy_of(llama)
    resumed.engine.load(tmp_path)
    with pytest.raises(NonFiniteStepError, match="3 optimizer steps in a row"):
        resumed.learn(batch, one_plan(batch, 2))


def test_moments_come_with_the_optimizer_and_the_schedule_with_the_extras(llama, tmp_path):
    batch = make_batch()
    saved = policy_of(llama)
    for _ in range(2):
        saved.learn(batch, one_plan(batch))
    saved.engine.save(tmp_path)
    for contents, steps in ({("model", "optimizer"): (2, 0), ("model", "extra"): (0, 2)}).items():
        resumed = policy_of(llama)
        resumed.engine.load(tmp_path, contents)
        optimizer = resumed.engine.optimizer
        assert (set(optimizer.moment_steps.values()), optimizer.steps_taken) == ({steps[0]}, steps[1])


def test_a_step_that_comes_before_a_slow_disk_is_done_is_not_in_the_checkpoint(llama, tmp_path, monkeypatch):
    batch, disk = make_batch(), threading.Event()
    read = Snapshot.read

    def slowly(snapshot):
        for number, chunk in enumerate(read(snapshot)):
            assert number != 3 or disk.wait(60)
            yield chunk

    monkeypatch.setattr(Snapshot, "read", slowly)
    saved = policy_of(llama)
    saved.learn(batch, one_plan(batch))
    then, moments = copy.deepcopy(parameters(saved)), saved.engine.optimizer.rule.state.values()
    moments = [moment.clone() for of_one in moments for moment in of_one.values()]
    record = saved.engine.begin_save(tmp_path / "state")
    saved.engine.begin_export(tmp_path / "hf", tmp_path / "written-hf.json")
    saved.learn(batch, one_plan(batch))
    saved.engine.finish_save(wait=False)
    assert not record.exists(), "two steps were taken while the disk had three chunks"
    saved.learn(batch, one_plan(batch))
    disk.set()
    saved.engine.finish_save()
    assert record.exists()
    assert not any(torch.equal(value, then[name]) for name, value in parameters(saved).items())

    resumed = policy_of(llama)
    resumed.engine.load(tmp_path / "state")
    assert all(torch.equal(value, then[name]) for name, value in parameters(resumed).items())
    loaded = [moment for of_one in resumed.engine.optimizer.rule.state.values() for moment in of_one.values()]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded, moments, strict=True))
    assert set(resumed.engine.optimizer.moment_steps.values()) == {1}
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(value, then[f"model.{name}"].to(value.dtype)) for name, value in exported.items())


@pytest.mark.parametrize("prefix", ["model.", "exp_avg.", "exp_avg_sq."])
def test_weights_and_moments_that_are_not_what_was_written_are_refused_when_they_are_loaded(llama, tmp_path, prefix):
    """As where a rank's node sees another file than the driver, which has compared it."""
    saved = policy_of(llama)
    saved.learn(make_batch(), one_plan(make_batch()))
    saved.engine.save(tmp_path)
    policy_of(llama).engine.load(tmp_path)
    (shard,) = tmp_path.glob("shard-*")
    content = bytearray(shard.read_bytes())
    header = int.from_bytes(content[:8], "little")
    begins = {
        name: tensor["data_offsets"][0] for name, tensor in json.loads(content[8 : 8 + header]).items() if "." in name
    }
    content[8 + header + next(begin for name, begin in begins.items() if name.startswith(prefix))] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        WeightsDifferError, match=r"rank 0 has loaded from .* not those that were written to shard-0000"
    ):
        policy_of(llama).engine.load(tmp_path)


def test_a_disk_that_is_full_is_said_and_the_next_save_works(llama, tmp_path):
    policy = policy_of(llama)
    (tmp_path / "file").touch()
    policy.engine.begin_save(tmp_path / "file" / "state")
    with pytest.raises(NotADirectoryError, match=str(tmp_path)):
        policy.engine.finish_save()
    policy.engine.save(tmp_path / "state")
    policy.engine.load(tmp_path / "state")


def test_an_export_is_configured_as_the_model_that_was_trained(llama, tmp_path):
    model = model_config(llama, override_config={"max_position_embeddings": 64, "rms_norm_eps": 1e-5})
    Actor(model, None, fsdp_config(), device=CPU, total_steps=None).engine.export_hf(tmp_path)
    exported, own = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, llama))
    changed = {key: exported[key] for key in own if exported.get(key) != own[key]}
    assert changed == {"max_position_embeddings": 64, "rms_norm_eps": 1e-5}


def test_state_is_saved_loaded_and_exported_from_where_it_lies(llama, tmp_path, monkeypatch):
    """Beside an engine that is awake a GPU has no room for parameters and moments."""
    policy = policy_of(llama)
    monkeypatch.setattr(policy.engine, "onload", lambda **_: pytest.fail("brought to the device"))
    policy.engine.save(tmp_path / "state")
    policy.engine.load(tmp_path / "state")
    policy.engine.export_hf(tmp_path / "hf")
    assert sum(1 for _ in policy.engine.iter_full_params(torch.bfloat16)) == len(parameters(policy))


def test_a_finite_step_starts_the_count_again(llama):
    policy, good, bad = policy_of(llama), make_batch(), make_batch()
    bad.batch["advantages"][5, 0] = float("inf")
    for _ in range(2):
        for batch in (bad, bad, good):
            policy.learn(batch, one_plan(batch))
    assert policy.engine.optimizer.steps_taken == 2


def test_bfloat16_compute_keeps_float32_master_weights(llama):
    policy = Actor(
        model_config(llama),
        actor_config(),
        fsdp_config("bfloat16", model_dtype="fp32"),
        device=CPU,
        total_steps=1,
    )
    batch = make_batch()
    batch.batch["old_log_probs"] = policy.log_probs(batch).batch["old_log_probs"]
    with torch.no_grad():
        want = plain_log_probs(plain_model(llama), batch, 1.0)
    mask = batch.batch["response_mask"].bool()
    assert (batch.batch["old_log_probs"] - want)[mask].abs().mean() < 0.1
    metrics = policy.learn(batch, one_plan(batch))
    assert metrics["actor/ppo_kl"].result() == pytest.approx(0.0, abs=1e-2)
    assert {p.dtype for p in policy.engine.module.parameters()} == {torch.float32}


def test_a_sampled_token_that_a_teacher_does_not_embed_is_named_with_its_row():
    batch = make_batch(num_groups=2, samples=2, temperature=1.0)
    ids = batch.batch["responses"]
    there = batch.batch["attention_mask"][:, batch.batch["prompts"].shape[1] :].bool()
    known = int(ids.max()) + 1
    ids[~there] = known + 5  # padding may be anything
    require_known(batch, known, "/teacher")
    row = int(there[:, 0].nonzero()[-1])
    ids[row, 0] = known
    uid = batch.non_tensor_batch["uid"][row]
    told = f"row {row} .uid {uid}.: .* token {known}, and the teacher /teacher has {known}"
    with pytest.raises(UnknownTokenError, match=told):
        require_known(batch, known, "/teacher")
