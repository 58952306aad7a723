"""Updates on episodes: what an environment said moves nothing, and how many rows an episode has does not show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hrl.algos.aggregation import AGGREGATION_MODES
from hrl.algos.policy_losses import POLICY_LOSSES
from hrl.batching.plan import RankPlan
from hrl.batching.planner import MicroBatchLimits, Planner
from hrl.metrics import Metric
from hrl.models.packed_model import TokenRows
from hrl.protocol import DataProto
from hrl.trainer.ppo.advantage import compute_advantage
from hrl.trainer.ppo.samples import count_episode_tokens
from tests.algos.batches import ACTOR
from tests.models.tiny import critic_config, fsdp_config, model_config
from tests.trainer.ppo.episode_rows import by_episode, in_branches, whole_episodes, with_noise
from tests.workers import padded
from tests.workers.asked import Critic
from tests.workers.engine.ranks import CPU, gradients, policy_of

pytestmark = pytest.mark.usefixtures("world")

OF_ROWS = {"gspo", "geo_mean"}
"""Their ratio belongs to a row, which is a context of its own."""
EVERYTHING = {"use_kl_loss": True, "entropy_coeff": 0.3}


def three_forms(seed: int = 3) -> list[DataProto]:
    """Episodes of one row each, the same with other numbers at the environment's tokens, and in several rows."""
    whole = whole_episodes(seed)
    batches = [whole, with_noise(whole, seed), in_branches(whole, seed)]
    assert len(batches[2]) > len(whole), "some episode has several rows"
    assert (whole.batch["attention_mask"][:, 3:] > whole.batch["response_mask"]).any(), "an environment said something"
    for batch in batches:
        compute_advantage(batch, "grpo")
        batch.batch["returns"] = batch.batch["advantages"] + 1.0
    return batches


def plan_of(batch: DataProto) -> RankPlan:
    """One optimizer step in several micro-batches, as the driver plans it."""
    limits = MicroBatchLimits(40, None, "a.key")
    return Planner(share_prefix=True).update(batch, 1, limits, mini_batch_rows=len(batch), epochs=1).ranks[0]


def asked(batch: DataProto, **changes: object) -> dict[str, object]:
    return {"has_branches": count_episode_tokens(batch), **changes}


def critic_of(path: Path, **loss: object) -> Critic:
    """A critic whose head passes gradients."""
    learner = critic_config(**loss)
    critic = Critic(model_config(path), learner, fsdp_config("float64"), device=CPU, total_steps=10)
    torch.nn.init.constant_(critic.engine.module.model.score.weight, padded.HEAD)
    return critic


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient.double(), rtol=1e-4, atol=2e-6, msg=name)


def test_only_the_policys_tokens_have_a_gradient(llama):
    """It is that of a padded forward of a plain model whose loss takes the trained tokens alone."""
    whole, noisy, _ = three_forms()
    policy, plain = policy_of(llama, **EVERYTHING), padded.Plain(llama)
    want = padded.policy_gradients(plain, whole, policy.loss, correction=None)
    assert_equal_gradients(gradients(policy, whole, plan_of(whole)), want)
    for name, gradient in gradients(policy, noisy, plan_of(noisy)).items():
        assert torch.equal(gradient, gradients(policy, whole, plan_of(whole))[name]), name


def test_what_stands_at_an_environments_tokens_is_in_no_metric(llama):
    found: list[dict[str, Metric]] = []
    for batch in three_forms()[:2]:
        policy = policy_of(llama, **EVERYTHING)
        batch.batch.pop("entropys"), batch.batch.pop("sum_pi_squared")
        found.append(policy.learn(batch, plan_of(batch), measures_mismatch=True))
    numbers = [{name: metric.result() for name, metric in each.items() if "/mfu" not in name} for each in found]
    assert numbers[0] == numbers[1]
    assert {"actor/entropy", "actor/kl_loss", "rollout/logprob_diff_mean"} <= numbers[0].keys()


@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
def test_the_rows_of_an_episode_are_one_sequence_for_every_aggregation(llama, mode):
    policy = policy_of(llama, loss_agg_mode=mode, **EVERYTHING)
    whole, _, branched = three_forms()
    expected = gradients(policy, whole, plan_of(whole), **asked(whole))
    assert_equal_gradients(gradients(policy, branched, plan_of(branched), **asked(branched)), expected)


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES.keys() - OF_ROWS))
def test_the_rows_of_an_episode_are_one_for_every_loss_of_tokens(llama, loss):
    settings = vars(ACTOR) | {"policy_loss": SimpleNamespace(**vars(ACTOR.policy_loss) | {"loss_mode": loss})}
    policy = policy_of(llama, loss_agg_mode="seq-mean-token-mean", **settings)
    whole, _, branched = three_forms()
    for batch in (whole, branched):
        batch.batch["selected_tokens"] = batch.batch["turn_index"] == 0
    expected = gradients(policy, whole, plan_of(whole), **asked(whole))
    assert_equal_gradients(gradients(policy, branched, plan_of(branched), **asked(branched)), expected)


@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
def test_a_critic_learns_at_the_policys_tokens_alone(llama, mode):
    critic = critic_of(llama, loss_agg_mode=mode)
    whole, noisy, branched = three_forms()
    expected = gradients(critic, whole, plan_of(whole))
    for batch in (noisy, branched):
        assert_equal_gradients(gradients(critic, batch, plan_of(batch), **asked(batch)), expected)


def test_a_branch_has_the_log_probs_and_values_of_the_whole_episode_and_no_others_are_computed(llama):
    """What the environment said has hidden states, and no head is run over them."""
    policy, critic = policy_of(llama), critic_of(llama)
    whole, _, branched = three_forms()
    for batch in (whole, branched):
        columns = policy.log_probs(batch, with_entropy=True).batch
        for name, column in (*columns.items(), ("values", critic.values(batch).batch["values"])):
            batch.batch[name] = column
            assert (column[batch.batch["response_mask"] == 0] == 0).all()
        packed = policy.engine.pack(TokenRows.of(batch), tuple(range(len(batch))))
        assert (
            len(packed.hidden_index) == batch.batch["response_mask"].sum() < batch.batch["attention_mask"][:, 3:].sum()
        )
    for name in ("old_log_probs", "entropys", "values"):
        torch.testing.assert_close(by_episode(branched, name), by_episode(whole, name), rtol=2e-5, atol=2e-6)


def test_the_value_behind_a_row_is_that_of_its_last_token_whoever_wrote_it(llama):
    """A longer row of the same beginning has this value before its next token."""
    critic, whole = critic_of(llama), whole_episodes(3)
    row = int(whole.batch["attention_mask"].sum(-1).argmax())
    longer = whole.select_idxs([row])
    length = int(longer.batch["attention_mask"][:, 3:].sum())
    shorter = longer.select(deepcopy=True)
    shorter.batch["attention_mask"][:, 3 + length - 1] = 0
    shorter.batch["response_mask"][:, length - 1] = 0
    longer.batch["response_mask"][:, length - 1] = 1
    behind = critic.scores(shorter).batch["rm_scores"]
    torch.testing.assert_close(behind, critic.values(longer).batch["values"][:, length - 1], rtol=2e-5, atol=2e-6)
