"""The door: verl's names and signatures in front of `hrl.algos`."""

import inspect
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from hrl.algos import policy_losses
from hrl.algos.advantages import AdvantageConfig, AdvantageInput, compute_advantages
from hrl.algos.aggregation import AGGREGATION_MODES, Counts, aggregate
from hrl.algos.groups import group_codes
from hrl.algos.policy_losses import PolicyLossInput, policy_loss
from hrl.protocol import DataProto
from hrl.trainer.ppo import core_algos as verls_path
from hrl.verl import core_algos
from tests.algos.batches import ACTOR, Batch, advantage_input

UIDS = np.array(["p", "q", "p", "q", "p", "r", "r", "q"], dtype=object)
BATCH = Batch.random(seed=20)
INPUT = advantage_input(BATCH.mask, group_codes(UIDS))
VERL_ACTOR = OmegaConf.create(
    {
        **{key: value for key, value in vars(ACTOR).items() if key != "policy_loss"},
        "policy_loss": vars(ACTOR.policy_loss),
        "global_batch_info": {"dp_size": 2, "batch_num_tokens": 50, "global_batch_size": 16, "loss_scale_factor": 6},
    }
)
VERL_ACTOR_ALONE = OmegaConf.merge(VERL_ACTOR, {"global_batch_info": {}})
del VERL_ACTOR_ALONE["global_batch_info"]


@pytest.fixture(autouse=True)
def own_doors(own_registries: None) -> Iterator[None]:
    """What a test registers is gone after it."""
    with patch.dict(core_algos.ADV_ESTIMATOR_REGISTRY.data), patch.dict(core_algos.POLICY_LOSS_REGISTRY.data):
        yield


GROUP = "token_level_rewards response_mask index epsilon=1e-06"
BY_STD = f"{GROUP} norm_adv_by_std_in_grpo=True config=None"
TOKEN_BASELINE = (
    "token_level_rewards response_mask index old_log_probs sum_pi_squared rollout_is_weights=None "
    "handle_zero_tail=True epsilon=1e-08 **kwargs"
)
COUNTS = "dp_size=1 batch_num_tokens=None global_batch_size=None loss_scale_factor=None"
TOKENS, SEQUENCES = "loss_agg_mode='token-mean'", "loss_agg_mode='seq-mean-token-mean'"


def loss_signature(mode: str = TOKENS) -> str:
    return f"old_log_prob log_prob advantages response_mask {mode} config=None rollout_is_weights=None"


SIGNATURES = {
    "AdaptiveKLController": "init_kl_coef target_kl horizon",
    "FixedKLController": "kl_coef",
    "agg_loss": f"loss_mat loss_mask loss_agg_mode {COUNTS}",
    "compute_entropy_loss": f"logits response_mask {TOKENS}",
    "compute_gae_advantage_return": "token_level_rewards values response_mask gamma lam",
    "compute_gdpo_outcome_advantage": f"{BY_STD} non_tensor_batch=None batch=None **kwargs",
    "compute_gpg_outcome_advantage": f"{GROUP} f_norm=1.0 alpha=1.0 config=None **kwargs",
    "compute_grpo_outcome_advantage": BY_STD,
    "compute_grpo_passk_outcome_advantage": f"{BY_STD} **kwargs",
    "compute_grpo_vectorized_outcome_advantage": BY_STD,
    "compute_multi_turn_optimal_token_baseline_advantage": TOKEN_BASELINE,
    "compute_opo_outcome_advantage": f"{GROUP} config=None **kwargs",
    "compute_optimal_token_baseline_advantage": TOKEN_BASELINE,
    "compute_pf_ppo_reweight_data": "data reweight_method='pow' weight_pow=2.0",
    "compute_policy_loss": (
        "old_log_prob log_prob advantages response_mask cliprange=None cliprange_low=None cliprange_high=None "
        f"clip_ratio_c=3.0 {TOKENS}"
    ),
    "compute_policy_loss_bypass_mode": loss_signature(),
    "compute_policy_loss_cispo": loss_signature(),
    "compute_policy_loss_clip_cov": loss_signature(),
    "compute_policy_loss_dppo_kl": loss_signature(),
    "compute_policy_loss_dppo_tv": loss_signature(),
    "compute_policy_loss_dro": loss_signature(),
    # verl's default is token-mean, which its function then does not read: it takes the mean over sequences.
    "compute_policy_loss_geo_mean": loss_signature(SEQUENCES),
    "compute_policy_loss_gpg": loss_signature(),
    "compute_policy_loss_gspo": loss_signature(SEQUENCES),
    "compute_policy_loss_kl_cov": loss_signature(),
    "compute_policy_loss_reinforce": (
        "rollout_log_prob log_prob advantages response_mask loss_agg_mode='seq-mean-token-sum' config=None "
        "rollout_is_weights=None"
    ),
    "compute_policy_loss_sapo": loss_signature(SEQUENCES),
    "compute_policy_loss_vanilla": loss_signature(),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": f"{GROUP} config=None **kwargs",
    "compute_reinforce_plus_plus_outcome_advantage": "token_level_rewards response_mask config=None **kwargs",
    "compute_remax_outcome_advantage": "token_level_rewards reward_baselines response_mask config=None **kwargs",
    "compute_rewards": "token_level_scores old_log_prob ref_log_prob kl_ratio",
    "compute_rloo_outcome_advantage": f"{GROUP} config=None **kwargs",
    "compute_rloo_vectorized_outcome_advantage": f"{GROUP} config=None **kwargs",
    "compute_value_loss": f"vpreds returns values response_mask cliprange_value {TOKENS} {COUNTS}",
    "get_adv_estimator_fn": "name_or_enum",
    "get_kl_controller": "kl_ctrl",
    "get_policy_loss_fn": "name",
    "kl_penalty": "logprob ref_logprob kl_penalty",
    "kl_penalty_forward": "logprob ref_logprob kl_penalty",
    "register_adv_est": "name_or_enum",
    "register_policy_loss": "name",
}
"""Every function and class of verl 0.9's `core_algos`: names of the parameters and their defaults, in order."""


def signature_of(function: Any) -> str:
    words = []
    for parameter in inspect.signature(function).parameters.values():
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        words.append(f"{stars}{parameter.name}{default}")
    return " ".join(words)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_verls(name: str) -> None:
    assert signature_of(getattr(core_algos, name)) == SIGNATURES[name]


def test_verls_path_has_the_same_names() -> None:
    names = {*SIGNATURES, "AdvantageEstimator", "AdvantageFn", "PolicyLossFn"}
    names |= {"ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY"}
    assert {name for name in vars(verls_path) if not name.startswith("_")} == names
    for name in names:
        assert getattr(verls_path, name) is getattr(core_algos, name)


def test_the_arguments_of_doors_have_types() -> None:
    for name in SIGNATURES:
        if name[:7] == "compute":
            signature = inspect.signature(getattr(core_algos, name))
            annotations = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
            assert inspect.Signature.empty not in {*annotations.values(), signature.return_annotation}, name
    grpo = inspect.signature(core_algos.compute_grpo_outcome_advantage)
    types = {key: parameter.annotation for key, parameter in grpo.parameters.items()}
    assert (types["token_level_rewards"], types["index"], types["epsilon"]) == (torch.Tensor, np.ndarray, float)
    assert grpo.return_annotation == tuple[torch.Tensor, torch.Tensor]


def test_the_registries_hold_what_is_found_by_name() -> None:
    assert core_algos.ADV_ESTIMATOR_REGISTRY["grpo"] is core_algos.compute_grpo_outcome_advantage
    assert core_algos.POLICY_LOSS_REGISTRY["vanilla"] is core_algos.compute_policy_loss_vanilla
    assert set(core_algos.ADV_ESTIMATOR_REGISTRY) == {member.value for member in core_algos.AdvantageEstimator}
    assert set(core_algos.POLICY_LOSS_REGISTRY) == set(policy_losses.POLICY_LOSSES) | {"bypass_mode"}

    @core_algos.register_adv_est("mine")
    def estimator(token_level_rewards: Any, response_mask: Any, **kwargs: Any) -> Any:
        return token_level_rewards, token_level_rewards

    @core_algos.register_policy_loss("mine")
    def loss(**kwargs: Any) -> Any:
        return None

    assert core_algos.ADV_ESTIMATOR_REGISTRY["mine"] is estimator
    assert core_algos.POLICY_LOSS_REGISTRY["mine"] is loss


def test_kl_penalty_takes_its_kind_by_verls_name() -> None:
    logprob, reference = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert core_algos.kl_penalty(logprob=logprob, ref_logprob=reference, kl_penalty="kl").item() == 2.0
    assert core_algos.kl_penalty(logprob, reference, "mse").item() == 2.0**2 / 2


OTHER_NAMES = {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}


@pytest.mark.parametrize("name", core_algos.AdvantageEstimator)
def test_estimators_give_what_the_algorithm_gives(name: core_algos.AdvantageEstimator) -> None:
    columns: dict[str, Any] = {
        "token_level_rewards": INPUT.token_level_rewards,
        "response_mask": INPUT.response_mask,
        "values": INPUT.values,
        "gamma": 0.9,
        "lam": 0.8,
        "index": UIDS,
        "config": OmegaConf.create({"gamma": 0.9, "gdpo_reward_keys": ["a", "b", "c"]}),
        "reward_baselines": INPUT.reward_baselines,
        "old_log_probs": INPUT.old_log_probs,
        "sum_pi_squared": INPUT.sum_pi_squared,
        "non_tensor_batch": dict(zip("abc", INPUT.reward_parts.T.numpy(), strict=True)),
    }
    function = core_algos.get_adv_estimator_fn(name)
    wanted = [key for key in inspect.signature(function).parameters if key in columns]
    got = function(**{key: columns[key] for key in wanted})
    expected = compute_advantages(OTHER_NAMES.get(name, name.value), INPUT, AdvantageConfig(gamma=0.9, lam=0.8))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_every_name_of_the_enumeration_resolves() -> None:
    for name in core_algos.AdvantageEstimator:
        assert core_algos.get_adv_estimator_fn(name) is core_algos.get_adv_estimator_fn(name.value)
    with pytest.raises(ValueError, match=r"'nope'.*grpo"):
        core_algos.get_adv_estimator_fn("nope")


def test_arguments_that_would_be_ignored_are_refused() -> None:
    rewards, mask = INPUT.token_level_rewards, INPUT.response_mask
    with pytest.raises(ValueError, match="epsilon"):
        core_algos.compute_grpo_outcome_advantage(rewards, mask, UIDS, epsilon=1e-3)
    with pytest.raises(ValueError, match="handle_zero_tail"):
        core_algos.compute_optimal_token_baseline_advantage(
            rewards, mask, UIDS, INPUT.old_log_probs, INPUT.sum_pi_squared, handle_zero_tail=False
        )
    with pytest.raises(ValueError, match=r"\['style'\]"):
        core_algos.compute_gdpo_outcome_advantage(
            rewards, mask, UIDS, config=SimpleNamespace(gdpo_reward_keys=["style"]), non_tensor_batch={}
        )


def test_an_estimator_in_verls_form_is_known_to_the_trainer() -> None:
    @core_algos.register_adv_est("centred")
    def centred(token_level_rewards, response_mask, index, config=None, **kwargs):
        assert index.tolist() == group_codes(UIDS).tolist()
        advantages_ = (token_level_rewards.sum(-1, keepdim=True) - config.gamma) * response_mask
        return advantages_, advantages_

    assert core_algos.register_adv_est("centred")(centred) is centred
    assert core_algos.get_adv_estimator_fn("centred") is centred
    got, _ = compute_advantages("centred", INPUT, AdvantageConfig(gamma=0.5))
    scores = INPUT.token_level_rewards.sum(-1, keepdim=True)
    torch.testing.assert_close(got, (scores - 0.5) * BATCH.mask)
    with pytest.raises(ValueError, match="'gae' is already registered"):
        core_algos.register_adv_est("gae")(centred)


def test_an_estimator_in_verls_form_gets_episodes_of_several_rows_as_one() -> None:
    seen: list[list[list[float]]] = []

    @core_algos.register_adv_est("summed")
    def summed(token_level_rewards, response_mask, index, config=None, **kwargs):
        seen.append(token_level_rewards.tolist())
        advantages_ = token_level_rewards.sum(-1, keepdim=True) * response_mask
        return advantages_, advantages_

    rewards, mask = torch.tensor([[1.0, 9.0], [9.0, 2.0], [4.0, 9.0]]), torch.tensor([[1, 0], [0, 1], [1, 0]])
    inp = AdvantageInput(rewards, mask, group_codes("aaa"), episode_ids=torch.tensor([0, 0, 1]))
    got, _ = compute_advantages("summed", inp, AdvantageConfig())
    assert seen == [[[1.0, 2.0], [4.0, 0.0]]]
    assert got.tolist() == [[3, 0], [0, 3], [4, 0]]


@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
def test_agg_loss_over_ranks_and_alone(mode: str) -> None:
    norm = BATCH.mask.shape[1]
    alone = core_algos.agg_loss(BATCH.values, BATCH.mask, mode)
    torch.testing.assert_close(alone, aggregate(BATCH.values, BATCH.mask, mode, norm=norm))
    shared = core_algos.agg_loss(BATCH.values, BATCH.mask, mode, 4, 100, 30, 7.0)
    torch.testing.assert_close(shared, 4 * aggregate(BATCH.values, BATCH.mask, mode, Counts(100, 30), 7.0))
    if mode != "token-sum":
        with pytest.raises(ValueError, match="2 ranks"):
            core_algos.agg_loss(BATCH.values, BATCH.mask, mode, dp_size=2)


@pytest.mark.parametrize("name", sorted(set(policy_losses.POLICY_LOSSES) - {"clip_cov", "kl_cov"}))
def test_losses_give_what_the_algorithm_gives(name: str) -> None:
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        BATCH.old_log_prob,
        BATCH.log_prob,
        BATCH.advantages,
        BATCH.mask,
        loss_agg_mode="token-mean",
        config=VERL_ACTOR,
        rollout_is_weights=BATCH.weights,
    )
    inp = PolicyLossInput(BATCH.log_prob, BATCH.old_log_prob, BATCH.advantages, BATCH.mask, BATCH.weights)
    output = policy_loss(name, inp, ACTOR)
    torch.testing.assert_close(loss, 2 * aggregate(output.loss_mat, BATCH.mask, "token-mean", Counts(50, 16)))
    total, count = output.metrics["actor/ppo_kl"]
    assert metrics["actor/ppo_kl"] == pytest.approx((total / count).item())


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_losses_choose_within_what_they_are_given(name: str) -> None:
    log_prob = BATCH.log_prob.clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        BATCH.old_log_prob, log_prob, BATCH.advantages, BATCH.mask, config=VERL_ACTOR
    )
    loss.backward()
    assert log_prob.grad is not None
    assert torch.isfinite(log_prob.grad).all()


def test_settings_that_are_left_out_are_verls() -> None:
    config = SimpleNamespace(clip_ratio=0.2)
    explicit = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0)
    loss, _ = core_algos.compute_policy_loss_vanilla(
        BATCH.old_log_prob, BATCH.log_prob, BATCH.advantages, BATCH.mask, config=config
    )
    inp = PolicyLossInput(BATCH.log_prob, BATCH.old_log_prob, BATCH.advantages, BATCH.mask)
    torch.testing.assert_close(
        loss, aggregate(policy_loss("vanilla", inp, explicit).loss_mat, BATCH.mask, "token-mean")
    )


def test_compute_policy_loss_takes_settings_as_arguments() -> None:
    columns = (BATCH.old_log_prob, BATCH.log_prob, BATCH.advantages, BATCH.mask)
    loss, clipped, drift, floored = core_algos.compute_policy_loss(*columns, cliprange=0.2)
    config = SimpleNamespace(clip_ratio=0.2)
    expected, metrics = core_algos.compute_policy_loss_vanilla(*columns, config=config)
    assert loss.item() == expected.item()
    assert [clipped.item(), drift.item(), floored.item()] == [
        metrics[f"actor/{key}"] for key in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    ]
    with pytest.raises(ValueError, match="cliprange"):
        core_algos.compute_policy_loss(*columns, cliprange_low=0.2)


def test_value_and_entropy_losses() -> None:
    ones = torch.ones(1, 2)
    loss, clipfrac = core_algos.compute_value_loss(
        2 * ones, returns=0 * ones, values=ones, response_mask=ones, cliprange_value=0.5
    )
    assert (loss.item(), clipfrac.item()) == (2.0, 0.0)
    logits = torch.tensor([[[0.0, 0.0, -torch.inf], [9.0, 0.0, 0.0]]])
    entropy = core_algos.compute_entropy_loss(logits, torch.tensor([[1, 0]]))
    assert entropy.item() == pytest.approx(np.log(2.0))


def test_rewards_with_a_penalty() -> None:
    rewards = core_algos.compute_rewards(torch.tensor([1.0]), torch.tensor([-1.0]), torch.tensor([-3.0]), 0.1)
    assert rewards.item() == pytest.approx(0.8)


def verl_style_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """REINFORCE with a bound taken from the configuration, written as a verl user would write it."""
    loss_mat = -(advantages * log_prob).clamp(max=config.clip_ratio + config.get("unheard_of", 1.0))
    loss = core_algos.agg_loss(
        loss_mat=loss_mat, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    return loss, {"actor/bound": 0.25}


@pytest.mark.parametrize("mode", sorted(AGGREGATION_MODES))
def test_a_loss_in_verls_form_is_as_invariant_as_our_own(mode: str) -> None:
    core_algos.register_policy_loss("mine")(verl_style_loss)
    assert core_algos.get_policy_loss_fn("mine") is verl_style_loss
    counts = Counts.of(BATCH.mask)

    def share(rows: torch.Tensor) -> torch.Tensor:
        piece = BATCH.rows(rows)
        output = policy_loss(
            "mine", PolicyLossInput(piece.log_prob, piece.old_log_prob, piece.advantages, piece.mask), ACTOR
        )
        total, count = output.metrics["actor/bound"]
        assert total.item() == pytest.approx(0.25 * count.item())
        return aggregate(output.loss_mat, piece.mask, mode, counts, norm=6.0)

    whole = share(torch.arange(8))
    pieces = sum(share(rows) for rows in torch.arange(8).tensor_split(3))
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


def test_a_loss_that_reduces_by_itself_is_refused() -> None:
    core_algos.register_policy_loss("hasty")(lambda **columns: (columns["log_prob"].mean(), {}))
    inp = PolicyLossInput(BATCH.log_prob, BATCH.old_log_prob, BATCH.advantages, BATCH.mask)
    with pytest.raises(ValueError, match=r"'hasty' reduced its tokens.*agg_loss"):
        policy_loss("hasty", inp, ACTOR)
    with pytest.raises(ValueError, match="'vanilla' is already registered"):
        core_algos.register_policy_loss("vanilla")(verl_style_loss)


def test_the_portable_case_of_reinforce_plus_plus() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 2.0]])
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=0.5)
    )
    assert returns.tolist() == [[0.5, 1.0, 0.0, 0.0, 2.0]]


def test_values_at_masked_tokens_do_not_move_gae() -> None:
    columns = (INPUT.token_level_rewards, INPUT.values, INPUT.response_mask)
    moved = INPUT.values + 100.0 * (1 - BATCH.mask)
    before = core_algos.compute_gae_advantage_return(*columns, gamma=0.99, lam=0.9)
    after = core_algos.compute_gae_advantage_return(columns[0], moved, columns[2], gamma=0.99, lam=0.9)
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine, theirs)


def test_reinforce_by_hand() -> None:
    log_prob, sampler = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
    weights, mask = torch.tensor([[0.5, 2.0]]), torch.ones(1, 2)
    loss, metrics = core_algos.compute_policy_loss_reinforce(
        sampler, log_prob, torch.tensor([[3.0, 1.0]]), mask, config=VERL_ACTOR_ALONE, rollout_is_weights=weights
    )
    assert loss.item() == pytest.approx(3.0 * 1.0 * 0.5 + 1.0 * 2.0 * 2.0)  # the sum over the row's tokens
    assert metrics["actor/ppo_kl"] == pytest.approx((-0.5 + 0.0) / 2)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode_finds_its_settings_in_the_actors_configuration(loss_type: str) -> None:
    correction = {"loss_type": loss_type, "rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.05}
    config = OmegaConf.merge(VERL_ACTOR_ALONE, {"policy_loss": {"rollout_correction": correction}})
    function = core_algos.get_policy_loss_fn("bypass_mode")
    loss, metrics = function(BATCH.old_log_prob, BATCH.log_prob, BATCH.advantages, BATCH.mask, config=config)
    log_ratio = (BATCH.log_prob - BATCH.old_log_prob) * BATCH.mask
    kept = BATCH.mask * (0.5 * log_ratio.square() <= 0.05)
    assert 0 < kept.sum() < BATCH.mask.sum()
    name, weights = ("gpg", log_ratio.exp().clamp(max=2.0)) if loss_type == "reinforce" else ("vanilla", None)
    inp = PolicyLossInput(BATCH.log_prob, BATCH.old_log_prob, BATCH.advantages, kept, weights)
    want = aggregate(policy_loss(name, inp, ACTOR).loss_mat, kept, "token-mean")
    torch.testing.assert_close(loss, want)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - float(kept.sum() / BATCH.mask.sum()))
    with pytest.raises(ValueError, match="rollout_correction"):
        function(BATCH.old_log_prob, BATCH.log_prob, BATCH.advantages, BATCH.mask, config=VERL_ACTOR_ALONE)


def test_reweighting_draws_rows_of_the_batch() -> None:
    scores = torch.tensor([[0.0, 0.0], [0.0, 3.0], [-2.0, 0.0], [0.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]])
    data = DataProto.from_dict(
        tensors={"token_level_scores": scores, "response_mask": mask},
        non_tensors={"name": np.array(["zero", "three", "two", "masked"], dtype=object)},
    )
    torch.manual_seed(0)
    drawn = core_algos.compute_pf_ppo_reweight_data(data, "pow", 2.0)
    assert len(drawn) == 4
    assert set(drawn.non_tensor_batch["name"]) <= {"three", "two"}


def test_the_forward_estimate_of_a_kl_has_its_own_gradient() -> None:
    logprob = torch.tensor([0.5], requires_grad=True)
    value = core_algos.kl_penalty_forward(logprob, torch.zeros(1), "kl+")
    assert value.item() == 0.5
    assert torch.autograd.grad(value.sum(), logprob)[0].item() == 1.0  # of k1; k2's would be 0.5


@pytest.mark.parametrize("name", sorted(name for name in core_algos.__all__ if name.startswith("compute_")))
def test_a_function_knows_its_name(name: str) -> None:
    function = getattr(verls_path, name)
    assert function.__name__ == name
    assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301 (our own)
    with pytest.raises(TypeError, match=rf"^{name}\(\).*missing a? ?.*required"):
        function()
