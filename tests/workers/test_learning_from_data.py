"""What is learnt from pairs and demonstrations, against plain forwards of one unpadded row at a time, in float64.

That no gradient depends on the cut, for every loss on 1, 2 and 4 ranks, is in ``test_partition.py``.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hrl.algos.preference import REWARD_MODEL_LOSSES, SFT_LOSSES, PairOptions
from hrl.batching.plan import MiniBatchPlan, RankPlan
from tests.models.tiny import (
    critic_config,
    fsdp_config,
    make_batch,
    model_config,
    plain_log_probs,
    trim,
)
from tests.workers.asked import Critic, learn_answers, learn_pairs, learn_scores
from tests.workers.engine.ranks import CPU, policy_of
from tests.workers.partition import ALONE, as_pairs, deal, local_gradients

pytestmark = pytest.mark.usefixtures("world")

NORM_ERROR = {"rtol": 2e-5, "atol": 2e-6}
BETA = 0.4
learn = partial(learn_pairs, options=PairOptions(BETA))


def pairs_of(seed: int = 0):
    """Eight pairs of answers with text, a tool's tokens in some of them."""
    return as_pairs(make_batch(num_groups=5, samples=4, seed=seed).slice(4, 20))


def plain_sums(path: Path, batch) -> tuple[torch.nn.Module, torch.Tensor]:
    """The log-probs of whole answers (B,), with gradients."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    mask = batch.batch["response_mask"].bool()
    return model, (plain_log_probs(model, batch, 1.0) * mask).sum(-1)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def same_gradients(found, model) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], parameter.grad, rtol=1e-4, atol=2e-6, msg=name)


# ---------------------------------------------------------------------------------------------- preferences


def test_the_dpo_loss_is_that_of_the_paper(llama):
    batch = pairs_of()
    model, sums = plain_sums(llama, batch)
    ratios = sums - batch.batch["ref_sequence_log_prob"]
    margins = BETA * (ratios[0::2] - ratios[1::2])
    torch.nn.functional.logsigmoid(margins).mean().neg().backward()
    policy, plan = policy_of(llama), deal(batch, ALONE, 3)
    mine = batch.select_idxs(list(plan.rows[0]))

    found = local_gradients(policy, partial(learn, policy), mine, plan.ranks[0])
    same_gradients(found, model)

    metrics = {n: m.result() for n, m in learn(policy, mine, plan.ranks[0]).items()}
    by_hand, ratios, sums = margins.detach().tolist(), ratios.detach(), sums.detach()
    expected = {
        "train/loss": -sum(map(log_sigmoid, by_hand)) / 8,
        "rewards/margins": sum(by_hand) / 8,
        "rewards/accuracies": sum(m > 0 for m in by_hand) / 8,
        "rewards/chosen": float(BETA * ratios[0::2].mean()),
        "rewards/rejected": float(BETA * ratios[1::2].mean()),
        "logps/chosen": float(sums[0::2].mean()),
        "logps/rejected": float(sums[1::2].mean()),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert metrics["train/grad_norm"] > 0 and metrics["train/lr"] == 1e-3


@pytest.mark.parametrize("loss_type", ["ipo", "simpo"])
def test_losses_of_means_divide_policy_and_reference_by_the_answers_length(llama, loss_type):
    batch = pairs_of()
    _, sums = plain_sums(llama, batch)
    lengths = batch.batch["response_mask"].sum(-1)
    means = (sums if loss_type == "simpo" else sums - batch.batch["ref_sequence_log_prob"]) / lengths
    lead = means[0::2] - means[1::2]
    by_hand = {"ipo": (lead - 0.5 / BETA).square(), "simpo": -torch.nn.functional.logsigmoid(BETA * lead)}
    plan = deal(batch, ALONE, 2)
    mine = batch.select_idxs(list(plan.rows[0]))
    metrics = learn(policy_of(llama), mine, plan.ranks[0], loss_type=loss_type, has_reference=loss_type != "simpo")
    assert metrics["train/loss"].result() == pytest.approx(float(by_hand[loss_type].detach().mean()), rel=1e-4)


def test_without_reference_columns_the_reference_is_a_uniform_one(llama):
    batch = pairs_of()
    _, sums = plain_sums(llama, batch)
    batch.pop(batch_keys=["ref_sequence_log_prob"])
    plan = deal(batch, ALONE, 1)
    metrics = learn(policy_of(llama), batch.select_idxs(list(plan.rows[0])), plan.ranks[0])
    leads = BETA * (sums[0::2] - sums[1::2])
    assert metrics["rewards/margins"].result() == pytest.approx(float(leads.mean()), rel=1e-4)


def test_a_step_on_pairs_widens_their_margins(llama):
    batch, policy = pairs_of(), policy_of(llama)
    plan = deal(batch, ALONE, 2)
    mine = batch.select_idxs(list(plan.rows[0]))
    margins = [learn(policy, mine, plan.ranks[0])["rewards/margins"].result() for _ in range(4)]
    assert margins == sorted(margins) and margins[-1] > margins[0] + 0.1


def test_a_pair_that_is_torn_apart_is_named(llama):
    batch = pairs_of()
    torn = RankPlan((MiniBatchPlan(((0, 1, 2), (3, *range(4, 16))), 1, 16, 8),))
    with pytest.raises(ValueError, match=r"pair 1 is not whole.*plan_pairs"):
        learn(policy_of(llama), batch, torn)


# ---------------------------------------------------------------------------------------------- demonstrations


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_supervised_loss_is_the_mean_negative_log_likelihood_of_trained_tokens(llama, mode):
    batch = make_batch()
    learn = partial(learn_answers, loss_agg_mode=mode, loss_scale_factor=20)
    mask = batch.batch["response_mask"].bool()
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64, attn_implementation="eager")
    nll = -plain_log_probs(model, batch, 1.0) * mask
    rows = mask.any(1)
    per_row = nll.sum(1)[rows] / mask.sum(1)[rows]
    loss = {
        "token-mean": nll.sum() / mask.sum(),
        "seq-mean-token-mean": per_row.mean(),
        "seq-mean-token-sum-norm": nll.sum() / rows.sum() / 20,
    }[mode]
    loss.backward()
    policy, plan = policy_of(llama), deal(batch, ALONE, 3)
    mine = batch.select_idxs(list(plan.rows[0]))
    found = local_gradients(policy, partial(learn, policy), mine, plan.ranks[0])
    same_gradients(found, model)
    metrics = learn(policy, mine, plan.ranks[0])
    assert metrics["train/loss"].result() == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["train/nll"].result() == pytest.approx(float(nll.sum() / mask.sum()), rel=1e-4)
    assert metrics["train/nll"].count == int(mask.sum())


def test_a_supervised_loss_of_ones_own_is_told_by_name(llama, monkeypatch):
    batch, policy = make_batch(), policy_of(llama)
    plan = deal(batch, ALONE, 2)
    mine, update = batch.select_idxs(list(plan.rows[0])), partial(learn_answers, policy)
    usual = local_gradients(policy, update, mine, plan.ranks[0])
    monkeypatch.setitem(SFT_LOSSES, "twice", lambda log_prob: -2.0 * log_prob)
    update = partial(update, loss_type="twice")
    for name, gradient in local_gradients(policy, update, mine, plan.ranks[0]).items():
        torch.testing.assert_close(gradient, 2.0 * usual[name], rtol=1e-12, atol=0)
    metrics = update(mine, plan.ranks[0])
    assert metrics["train/loss"].result() == pytest.approx(2.0 * metrics["train/nll"].result())
    with pytest.raises(ValueError, match="unknown supervised loss 'thrice'"):
        update(mine, plan.ranks[0], loss_type="thrice")


# ---------------------------------------------------------------------------------------------- reward models


def plain_scores(path: Path, batch, head: float) -> tuple[torch.nn.Module, torch.Tensor]:
    """The head's number at the last token of every row (B,), with gradients."""
    model = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float64, attn_implementation="eager"
    )
    torch.nn.init.constant_(model.score.weight, head)
    outputs = [model.score(model.model(trim(batch, row)[0]).last_hidden_state)[0, -1, 0] for row in range(len(batch))]
    return model, torch.stack(outputs)


def classifier_of(path: Path, head: float) -> Critic:
    model = Critic(model_config(path), critic_config(), fsdp_config(), device=CPU, total_steps=10)
    torch.nn.init.constant_(model.engine.module.model.score.weight, head)
    return model


@pytest.mark.parametrize("with_margin", [True, False])
def test_the_reward_models_loss_is_that_of_bradley_and_terry_at_the_last_token(llama, with_margin):
    batch = pairs_of()
    if not with_margin:
        batch.batch["margin"].zero_()
    model, scores = plain_scores(llama, batch, head=0.1)
    lead = scores[0::2] - scores[1::2]
    loss = torch.nn.functional.logsigmoid(lead - batch.batch["margin"][0::2]).mean().neg()
    loss.backward()
    mine, plan = classifier_of(llama, 0.1), deal(batch, ALONE, 3)
    held = batch.select_idxs(list(plan.rows[0]))
    found = local_gradients(mine, partial(learn_scores, mine), held, plan.ranks[0])
    same_gradients(found, model)
    metrics = {n: m.result() for n, m in learn_scores(mine, held, plan.ranks[0]).items()}
    expected = {
        "train/loss": float(loss.detach()),
        "rewards/chosen": float(scores[0::2].mean()),
        "rewards/rejected": float(scores[1::2].mean()),
        "rewards/margins": float(lead.mean()),
        "rewards/accuracies": float((lead > 0).double().mean()),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_fresh_head_starts_at_even_odds(llama):
    batch = pairs_of()
    batch.batch["margin"].zero_()
    plan = deal(batch, ALONE, 1)
    model = Critic(model_config(llama), critic_config(), fsdp_config(), device=CPU, total_steps=10)
    metrics = learn_scores(model, batch.select_idxs(list(plan.rows[0])), plan.ranks[0])
    assert metrics["train/loss"].result() == pytest.approx(math.log(2))
    assert metrics["rewards/accuracies"].result() == 0.0  # a tie is not won


def test_a_reward_models_loss_of_ones_own_is_told_by_name(llama, monkeypatch):
    batch = pairs_of()
    batch.batch["margin"].zero_()
    _, scores = plain_scores(llama, batch, head=0.1)
    plan = deal(batch, ALONE, 2)
    mine, model = batch.select_idxs(list(plan.rows[0])), classifier_of(llama, 0.1)
    monkeypatch.setitem(REWARD_MODEL_LOSSES, "hinge", lambda lead: torch.relu(0.5 - lead))
    by_hand = torch.relu(0.5 - (scores[0::2] - scores[1::2])).mean()
    metrics = learn_scores(model, mine, plan.ranks[0], loss_type="hinge")
    assert metrics["train/loss"].result() == pytest.approx(float(by_hand.detach()), rel=1e-4)
    with pytest.raises(ValueError, match="unknown reward model loss 'squared'"):
        learn_scores(model, mine, plan.ranks[0], loss_type="squared")


def test_an_exported_classifier_scores_the_same_in_transformers_and_as_a_frozen_reward_model(llama, tmp_path):
    batch, pad = make_batch(num_groups=2, samples=3), 60
    batch.batch["responses"][batch.batch["responses"] == pad] = 1  # the padding token is in no answer
    model = classifier_of(llama, 0.1)
    scores = model.scores(batch).batch["rm_scores"]
    model.begin_export(tmp_path / "hf", None, pad_token_id=pad)
    model.engine.finish_save()
    frozen = Critic(model_config(tmp_path / "hf"), None, fsdp_config(), device=CPU, total_steps=None)
    torch.testing.assert_close(frozen.scores(batch).batch["rm_scores"], scores, **NORM_ERROR)

    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert theirs.config.architectures == ["LlamaForSequenceClassification"] and theirs.num_labels == 1
    rows = [trim(batch, row)[0][0] for row in range(len(batch))]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    with torch.no_grad():
        logits = theirs(input_ids=ids, attention_mask=ids != pad).logits
    torch.testing.assert_close(logits[:, 0], scores, rtol=1e-4, atol=1e-4)
