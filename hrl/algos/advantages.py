"""Advantage estimators: from rewards per token to how much better than expected each token was.

An estimator is a function `(AdvantageInput, config) -> (advantages (B, R), returns (B, R))`, registered with a name and
its needs. Outputs are 0 outside the response mask and have no gradient. Outcome estimators have no value target; their
`returns` are the advantages.

All estimators follow these rules: groups are by id and may differ in size; a response without trained tokens is not
part of its group; a group with equal scores, or with only one response, gives advantage 0 before any whitening. An
episode that went on in further rows is one response: an estimator gets it as one row.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hrl.algos.episodes import FoldedEpisodes
from hrl.algos.groups import group_statistics, group_sum, share_of_best
from hrl.algos.masked import (
    WHITEN_EPSILON,
    TrainedTokens,
    broadcast_rows,
    check_shapes,
    keep,
    rows_with_tokens,
    whiten,
    whiten_in_place,
)
from hrl.algos.registry import ESTIMATOR_TRAITS, EstimatorTraits, Registry
from hrl.algos.reward_placement import place_scores
from hrl.algos.turns import Turns

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]

GROUP_EPSILON = 1e-6
MAX_LOG_POWER = 200.0
"""Powers of a discount stay above e^-200, which leaves most of float64's range to rewards."""
COMPILED_FROM = 1 << 19
"""Entries of a batch from which GAE runs compiled: a quarter of NumPy's time, after a second for the first call."""
TOKENS_AT_ONCE = 1 << 18
"""Entries in one piece of a large batch: few enough that its float64 copies stay in the processor's cache."""


@dataclass(frozen=True)
class AdvantageInput:
    """Columns of one whole batch.

    Attributes:
        token_level_rewards: `(B, R)`. Entries outside the mask are ignored.
        response_mask: `(B, R)`, 1 on trained tokens.
        group_ids: `(B,)` int64 codes of the prompt each row answers (`hrl.algos.groups.group_codes`).
        values: `(B, R)`, from a critic.
        reward_baselines: `(B,)`, the reward of a greedy response to the same prompt.
        reward_parts: `(B, K)`, several rewards of each response.
        old_log_probs: `(B, R)`, log-probs of the sampled tokens.
        sum_pi_squared: `(B, R)`, the sum over the vocabulary of squared probabilities at each token.
        rollout_is_weights: `(B, R)`, weights that correct for the sampler.
        turn_index: `(B, R)` int64, the turn of each token, counted from 0. Without it what is trained of a response is
            one turn.
        episode_ids: `(B,)` int64 codes of the episode that each row is a branch of; None makes every row one. Columns
            of rows are an episode's own, the same in all its rows.
        bootstrap_values: `(B,)`, the critic's value of the state in which a limit cut the episode off; else 0.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group_ids: Tensor | None = None
    values: Tensor | None = None
    reward_baselines: Tensor | None = None
    reward_parts: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    turn_index: Tensor | None = None
    episode_ids: Tensor | None = None
    bootstrap_values: Tensor | None = None

    def need(self, name: str) -> Tensor:
        """Return the column `name`.

        Raises:
            ValueError: The batch lacks it.
        """
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ValueError(f"this advantage estimator needs {name!r} and the batch has none")
        return column

    def scores(self) -> Tensor:
        """Return the total reward of each response, `(B,)` float64."""
        # torch adds float32 up in float64 only one by one; converted first, and in the cache, it takes a quarter.
        rows = max(TOKENS_AT_ONCE // max(self.response_mask.shape[1], 1), 1)
        pieces = zip(self.token_level_rewards.split(rows), self.response_mask.split(rows), strict=True)
        scores = [keep(rewards, mask).double().sum(dim=-1) for rewards, mask in pieces]
        return scores[0] if len(scores) == 1 else torch.cat(scores)

    def spread(self, row_values: Tensor) -> Tensor:
        """Give every trained token its row's value. `(B,) -> (B, R)`."""
        return broadcast_rows(row_values, self.response_mask, self.token_level_rewards.dtype)


class AdvantageSettings(Protocol):
    """The settings of the section `algorithm` that estimators read."""

    @property
    def gamma(self) -> float:
        """Discount per token, or per turn where an estimator's steps are turns."""

    @property
    def lam(self) -> float:
        """Lambda of GAE."""

    @property
    def norm_adv_by_std_in_grpo(self) -> bool:
        """Whether to divide by the group's standard deviation (GRPO) or not (Dr.GRPO)."""

    @property
    def gdpo_reward_keys(self) -> Sequence[str]:
        """Names of the reward parts; the caller puts these into `AdvantageInput.reward_parts`."""

    @property
    def gdpo_reward_weights(self) -> Sequence[float] | None:
        """One weight per reward part; None weighs them equally."""


@dataclass(frozen=True)
class AdvantageConfig:
    """`AdvantageSettings` with defaults, for calls without a configuration."""

    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    gdpo_reward_keys: Sequence[str] = ()
    gdpo_reward_weights: Sequence[float] | None = None


Estimator = Callable[[AdvantageInput, AdvantageSettings], tuple[Tensor, Tensor]]

ADVANTAGE_ESTIMATORS: Registry[Estimator, EstimatorTraits] = Registry(
    "advantage estimator", table=ESTIMATOR_TRAITS, traits=EstimatorTraits
)


def register_adv_est(name: str, **traits: object) -> Callable[[Estimator], Estimator]:
    """Register an estimator under the name that `algorithm.adv_estimator` takes.

    Args:
        name: Name of the estimator.
        traits: Its needs, fields of `hrl.algos.registry.EstimatorTraits`, e.g. `needs_critic=True`.

    Raises:
        TypeError: A trait is unknown.
        ValueError: The name is taken by another function.
    """
    return ADVANTAGE_ESTIMATORS.register(name, **traits)


def compute_advantages(name: str, inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Check the batch and run an estimator over it.

    Args:
        name: A key of `ADVANTAGE_ESTIMATORS`.
        inp: The whole batch, on one device.
        config: Settings as in `AdvantageConfig`.

    Returns:
        Advantages and returns `(B, R)`, 0 outside the mask.

    Raises:
        ValueError: Unknown name, a missing column, shapes that differ, a reward that is not finite (names the row).
    """
    estimator = ADVANTAGE_ESTIMATORS.find(name)
    rewards, mask = inp.token_level_rewards, inp.response_mask
    check_shapes(mask, token_level_rewards=rewards, values=inp.values, old_log_probs=inp.old_log_probs)
    if not torch.isfinite(rewards.sum()):
        broken = (~torch.isfinite(rewards).all(dim=-1)).nonzero()
        if len(broken):  # a sum of finite rewards may overflow
            raise ValueError(f"the rewards of row {int(broken[0])} are not finite")
    # One conversion here instead of one at every use of the mask.
    inp = replace(inp, response_mask=mask.bool())
    if inp.episode_ids is None:
        return estimator(_bootstrapped(inp, config), config)
    fold = FoldedEpisodes.of(inp.response_mask, inp.episode_ids, inp.turn_index)
    advantages, returns = estimator(_bootstrapped(_folded(inp, fold), config), config)
    return fold.unfold(advantages), fold.unfold(returns)


_OF_ROWS = ("group_ids", "reward_baselines", "reward_parts", "bootstrap_values")


def _folded(inp: AdvantageInput, fold: FoldedEpisodes) -> AdvantageInput:
    """Return the batch with one row for each episode."""
    columns = {field.name: getattr(inp, field.name) for field in fields(inp)}
    folded = {
        name: fold.rows(column) if name in _OF_ROWS else fold.tokens(column)
        for name, column in columns.items()
        if column is not None and name not in ("response_mask", "episode_ids")
    }
    return AdvantageInput(response_mask=fold.mask(), **folded)


def _bootstrapped(inp: AdvantageInput, config: AdvantageSettings) -> AdvantageInput:
    """Add what a critic expects behind an episode that a limit cut off to the reward of its last trained token.

    `r_T + gamma V(s_(T+1))`: in every temporal difference and return this is the same as a value that follows the last
    token in place of 0 (Pardo et al., arXiv:1712.00378, section 3).
    """
    if inp.bootstrap_values is None:
        return inp
    ahead = config.gamma * inp.bootstrap_values.to(inp.token_level_rewards.dtype)
    rewards = keep(inp.token_level_rewards, inp.response_mask) + place_scores(ahead, inp.response_mask)
    return replace(inp, token_level_rewards=rewards.to(inp.token_level_rewards.dtype), bootstrap_values=None)


@register_adv_est("gae")
def gae_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_t = sum_l (gamma lam)^l delta_{t+l}`, `delta_t = r_t + gamma V_{t+1} - V_t`, whitened over the batch.

    Generalised advantage estimation, arXiv:1506.02438 equation 16, as PPO uses it (arXiv:1707.06347 equations 11, 12).
    Returns are `A_t + V_t` before whitening.
    """
    return gae(inp.token_level_rewards, inp.need("values"), inp.response_mask, config.gamma, config.lam)


def _whitened_where_groups_have_spread(row_values: Tensor, inp: AdvantageInput) -> Tensor:
    """Whiten over the trained tokens of the groups with spread. `(B,) -> (B, R)`, 0 in all other rows."""
    # Whitening shifts all values by the batch's mean, which would give a group without spread a nonzero advantage.
    counted = rows_with_tokens(inp.response_mask)
    teaches = group_statistics(row_values, inp.need("group_ids"), counted).has_spread
    mask = inp.response_mask.bool() & teaches.unsqueeze(-1)
    return whiten(broadcast_rows(row_values, mask, inp.token_level_rewards.dtype), mask)


def _normalised_in_group(scores: Tensor, inp: AdvantageInput, divide_by_std: bool) -> Tensor:
    stats = group_statistics(scores, inp.need("group_ids"), rows_with_tokens(inp.response_mask))
    centred = scores.double() - stats.mean
    if divide_by_std:
        centred = centred / (stats.std + GROUP_EPSILON)
    return torch.where(stats.has_spread, centred, 0.0)


@register_adv_est("grpo")
def grpo_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_i = (s_i - mean(s)) / (std(s) + 1e-6)` over the group (GRPO, arXiv:2402.03300 section 4.1.2).

    The standard deviation is the unbiased one. Without `norm_adv_by_std_in_grpo` it is Dr.GRPO's: the difference
    alone (arXiv:2503.20783 section 3.2).
    """
    advantages = inp.spread(_normalised_in_group(inp.scores(), inp, config.norm_adv_by_std_in_grpo))
    return advantages, advantages


@register_adv_est("rloo")
def rloo_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_i = s_i - mean of s_j over the group's other responses`.

    RLOO, arXiv:2402.14740, section "REINFORCE Leave-One-Out (RLOO)". Equal to `n / (n - 1) (s_i - mean(s))` for a
    group of n, which is how it is computed.
    """
    scores = inp.scores()
    stats = group_statistics(scores, inp.need("group_ids"), rows_with_tokens(inp.response_mask))
    left_out = (scores - stats.mean) * stats.size / (stats.size - 1).clamp(min=1)
    advantages = inp.spread(torch.where(stats.has_spread, left_out, 0.0))
    return advantages, advantages


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_t = whiten(sum_l gamma^l r_{t+l})` over the whole batch (arXiv:2501.03262, the variant "REINFORCE++").

    Returns are the sums before whitening.
    """
    returns = reward_to_go(inp.token_level_rewards, inp.response_mask, config.gamma)
    return whiten(returns, inp.response_mask), returns


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_i = whiten(s_i - mean(s))`: group mean, batch spread.

    arXiv:2501.03262, the variant "REINFORCE++ w/ Baseline". The whitening is over the trained tokens of the groups with
    spread, so long responses weigh more in its mean and spread; other groups have no part in it.
    """
    centred = _normalised_in_group(inp.scores(), inp, divide_by_std=False)
    advantages = _whitened_where_groups_have_spread(centred, inp)
    return advantages, advantages


@register_adv_est("remax")
def remax_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_t = sum_l r_{t+l} - s(greedy response to the same prompt)`.

    arXiv:2310.10505, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models". Returns are the rewards to go.
    """
    returns = reward_to_go(inp.token_level_rewards, inp.response_mask, gamma=1.0)
    return returns - inp.spread(inp.need("reward_baselines")), returns


@register_adv_est("opo")
def opo_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_i = s_i - sum_j l_j s_j / sum_j l_j` with lengths `l` in trained tokens.

    OPO, arXiv:2505.23585, "On-Policy RL with Optimal Reward Baseline". The baseline of least variance where the squared
    norm of a response's gradient grows with its length.
    """
    scores, group_ids = inp.scores(), inp.need("group_ids")
    lengths = inp.response_mask.bool().sum(dim=-1).double()
    baseline = group_sum(lengths * scores, group_ids) / group_sum(lengths, group_ids).clamp(min=1)
    stats = group_statistics(scores, group_ids, lengths > 0)
    advantages = inp.spread(torch.where(stats.has_spread, scores - baseline, 0.0))
    return advantages, advantages


@register_adv_est("best_of_n")
def best_of_n_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_best = 1` for the group's best response, 0 for all others and for groups whose scores are all equal.

    With the policy loss `gpg`, `-A log p`, that is supervised learning on the best of n samples (RAFT,
    arXiv:2304.06767, Algorithm 1, with a batch of one step; best-of-n distillation). Responses that tie for the best
    share the 1.
    """
    counted = rows_with_tokens(inp.response_mask)
    advantages = inp.spread(share_of_best(inp.scores(), inp.need("group_ids"), counted))
    return advantages, advantages


@register_adv_est("grpo_passk")
def grpo_passk_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_best = s_best - s_second best` of the group, 0 for all others.

    The loss of the group's best score without the response: arXiv:2503.19595, "Optimizing Language Models for Inference
    Time Objectives using Reinforcement Learning". With `norm_adv_by_std_in_grpo` the lead is divided by the group's
    standard deviation. A tie for the best gives a lead of 0.
    """
    scores, group_ids, counted = inp.scores(), inp.need("group_ids"), rows_with_tokens(inp.response_mask)
    stats = group_statistics(scores, group_ids, counted)
    # Sorted by group, then by falling score: a group's best and second best are neighbours.
    order = torch.argsort(torch.where(counted, scores, -torch.inf), descending=True, stable=True)
    order = order[torch.argsort(group_ids[order], stable=True)]
    ordered_ids, ordered_scores = group_ids[order], scores[order]
    first = torch.ones_like(counted)
    first[1:] = ordered_ids[1:] != ordered_ids[:-1]
    best = first & stats.has_spread[order]
    lead = torch.zeros_like(scores)
    position = best.nonzero(as_tuple=True)[0]
    lead[order[position]] = ordered_scores[position] - ordered_scores[position + 1]
    if config.norm_adv_by_std_in_grpo:
        lead = lead / (stats.std + GROUP_EPSILON)
    advantages = inp.spread(lead)
    return advantages, advantages


@register_adv_est("gpg")
def gpg_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_i = B / (B - M) (s_i - mean(s))` (GPG, arXiv:2504.02546 equations 7 and 8).

    M of the B counted rows are in groups without spread and have no gradient; the factor compensates for them.
    """
    scores, counted = inp.scores(), rows_with_tokens(inp.response_mask)
    stats = group_statistics(scores, inp.need("group_ids"), counted)
    scale = float(counted.sum()) / max(float((counted & stats.has_spread).sum()), 1.0)
    advantages = inp.spread(torch.where(stats.has_spread, (scores - stats.mean) * scale, 0.0))
    return advantages, advantages


@register_adv_est("gdpo")
def gdpo_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_i = whiten(sum_k w_k (s_ik - mean_k) / (std_k + 1e-6))`, group statistics per reward k.

    GDPO, arXiv:2601.05242 equations 4, 6 and 7: several rewards, each normalised in its group, then added up and
    whitened over the tokens of the groups in which the sums differ. Adding rewards first would let the one of largest
    scale hide the others.
    """
    parts = inp.need("reward_parts")
    weights = config.gdpo_reward_weights or [1.0] * parts.shape[1]
    if len(weights) != parts.shape[1]:
        raise ValueError(f"gdpo_reward_weights has {len(weights)} entries for {parts.shape[1]} reward parts")
    total = torch.zeros_like(parts[:, 0], dtype=torch.float64)
    for part, weight in zip(parts.unbind(dim=1), weights, strict=True):
        total += weight * _normalised_in_group(part, inp, config.norm_adv_by_std_in_grpo)
    advantages = _whitened_where_groups_have_spread(total, inp)
    return advantages, advantages


@register_adv_est("optimal_token_baseline")
def optimal_token_baseline_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_it = R_it - B_t`, reward to go minus the group's mean weighted by gradient energy.

    arXiv:2602.07078 section 3, with its "Logit-Gradient Proxy" for the energy.
    `B_t = sum_i W_it G_it / sum_i W_it` over the group's responses that have a t-th trained token, where
    `W_it = sum_{j <= t} 1 - 2 p_ij + sum_v p_v^2` estimates the squared norm of the log-prob's gradient up to t,
    times the squared correction weight if there is one. If only one response is that long, the baseline is 0 for lack
    of a comparison. A group with equal scores gets advantage 0 there too.
    """
    mask, group_ids = inp.response_mask, inp.need("group_ids")
    tokens = TrainedTokens.of(mask)
    energy = 1.0 - 2.0 * inp.need("old_log_probs").double().exp() + inp.need("sum_pi_squared").double()
    if inp.rollout_is_weights is not None:
        energy = energy * inp.rollout_is_weights.double().square()
    returns = reward_to_go(inp.token_level_rewards, mask, gamma=1.0)
    alive = tokens.pack(mask.double())
    path_energy = tokens.pack(energy.clamp(min=0.0)).cumsum(dim=-1) * alive
    packed_returns = tokens.pack(returns.double())

    def over_group(per_row: Tensor) -> Tensor:
        groups = int(group_ids.max()) + 1 if len(group_ids) else 0
        totals = per_row.new_zeros((groups, per_row.shape[1]))
        return totals.index_add_(0, group_ids, per_row)[group_ids]

    total_energy = over_group(path_energy)
    baseline = over_group(path_energy * packed_returns) / total_energy
    comparable = (over_group(alive) > 1) & (total_energy > 0)
    advantages = packed_returns - torch.where(comparable, baseline, 0.0)
    teaches = group_statistics(inp.scores(), group_ids, rows_with_tokens(mask)).has_spread
    advantages = torch.where(teaches.unsqueeze(-1), advantages, 0.0)
    return tokens.unpack(advantages).to(returns.dtype), returns


# ---------------------------------------------------------------------------------- turns as steps


@register_adv_est("grpo_turns")
def grpo_turns_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_ik = sum_{j >= k} gamma^(j-k) (r_ij - mean(r)) / (std(r) + 1e-6)` for all tokens of turn k of episode i.

    GRPO with process supervision, arXiv:2402.03300 section 4.1.3, a turn being a step; there gamma is 1. The statistics
    are over the rewards of all turns of all the group's episodes, the standard deviation is the unbiased one, and
    without `norm_adv_by_std_in_grpo` there is none. A turn's reward is the sum over its tokens. Episodes of one turn
    make it `grpo`.
    """
    turns, group_ids = Turns.of(inp.response_mask, inp.turn_index), inp.need("group_ids")
    rewards, taken = turns.totals(inp.token_level_rewards), turns.slots
    of_turns = group_ids.unsqueeze(-1).expand_as(taken)[taken]
    stats = group_statistics(rewards[taken], of_turns, torch.ones_like(of_turns, dtype=torch.bool))
    # An episode has nothing to be compared with in a group of its own, however many turns it has.
    episodes = group_sum(taken.any(dim=-1).double(), group_ids).unsqueeze(-1).expand_as(taken)[taken]
    normalised = rewards[taken] - stats.mean
    if config.norm_adv_by_std_in_grpo:
        normalised = normalised / (stats.std + GROUP_EPSILON)
    steps = torch.zeros_like(rewards)
    steps[taken] = torch.where(stats.has_spread & (episodes > 1), normalised, 0.0)
    advantages = turns.spread(reward_to_go(steps, taken, config.gamma), inp.token_level_rewards.dtype)
    return advantages, advantages


@register_adv_est("gae_turns")
def gae_turns_advantage(inp: AdvantageInput, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """`A_k = sum_l (gamma lam)^l delta_{k+l}`, `delta_k = r_k + gamma V_{k+1} - V_k`, for all tokens of turn k.

    GAE whose steps are turns: arXiv:2512.17008, "Turn-PPO: Turn-Level Advantage Estimation with PPO for Improved
    Multi-Turn RL in Agentic LLMs". `r_k` is the sum of the rewards of the turn's tokens, `V_k` the value before its
    first trained token, when all that the turn answers has been read. Whitened over the trained tokens of the batch.
    The return of all tokens of a turn, the critic's target, is `A_k + V_k` before whitening; `gae` with gamma = lam = 1
    has one return within a turn too. Turns of one token make it `gae`.
    """
    turns, values = Turns.of(inp.response_mask, inp.turn_index), inp.need("values")
    rewards, dtype = turns.totals(inp.token_level_rewards), inp.token_level_rewards.dtype
    steps = turns.firsts(values).double()
    advantages, returns = gae(rewards, steps, turns.slots, config.gamma, config.lam, whitened=False)
    return whiten(turns.spread(advantages, dtype), inp.response_mask), turns.spread(returns, dtype)


# ---------------------------------------------------------------------------------- returns of single tokens


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, *, whitened: bool = True
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns over the trained tokens alone (Schulman et al., arXiv:1506.02438, equation 16).

    A masked token is not there: the value that follows a trained token is that of the next *trained* token.

    Args:
        rewards: Token-level rewards `(B, R)`; those outside the mask are ignored.
        values: Value before each token `(B, R)`; those outside the mask are ignored.
        mask: `(B, R)`, 1 on trained tokens.
        gamma: Discount.
        lam: Weight of longer returns.
        whitened: Whiten the advantages over all trained tokens of the batch. Returns are never whitened.

    Returns:
        Advantages and returns `(B, R)`, 0 outside the mask, in the dtype of `rewards`, without gradient.
    """
    check_shapes(mask, rewards=rewards, values=values)
    dtype = torch.promote_types(rewards.dtype, torch.float32)  # NumPy has no bfloat16
    reward, value = (column.detach().to("cpu", dtype).numpy() for column in (rewards, values))
    trained = mask.bool().cpu().numpy()
    compiled = _compiled_gae() if trained.size >= COMPILED_FROM else None
    advantages, returns = np.zeros_like(reward, order="C"), np.zeros_like(reward, order="C")
    if compiled is None:
        _gae_in_pieces(reward, value, trained, gamma, lam, whitened, advantages, returns)
    else:
        reward, value, trained = (np.ascontiguousarray(column) for column in (reward, value, trained))
        ends = np.zeros(len(trained), np.int64)
        moments = compiled.scan_rows(reward, value, trained, float(gamma), float(lam), advantages, returns, ends)
        if whitened:
            compiled.whiten_rows(advantages, trained, ends, *moments, WHITEN_EPSILON)
    one, other = (torch.from_numpy(column).to(rewards) for column in (advantages, returns))
    return one, other


@cache
def _compiled_gae() -> ModuleType | None:
    """Return `hrl.algos.compiled_gae`; None where numba, which vLLM brings, is missing or of no use."""
    try:
        return importlib.import_module("hrl.algos.compiled_gae")
    except ImportError:
        return None


def _gae_in_pieces(
    reward: Floats,
    value: Floats,
    trained: Bools,
    gamma: float,
    lam: float,
    whitened: bool,
    advantages: Floats,
    returns: Floats,
) -> None:
    """Write advantages and returns of the trained tokens `(B, R)` with NumPy."""
    rows = max(TOKENS_AT_ONCE // max(trained.shape[1], 1), 1)
    pieces = [slice(start, start + rows) for start in range(0, len(trained), rows)]
    flat = [_advantages_of_rows(reward[piece], value[piece], trained[piece], gamma, lam) for piece in pieces]
    for piece, tokens in zip(pieces, flat, strict=True):
        returns[piece][trained[piece]] = tokens + value[piece][trained[piece]]
    if whitened:
        whiten_in_place(flat)
    for piece, tokens in zip(pieces, flat, strict=True):
        advantages[piece][trained[piece]] = tokens


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each trained token on, over trained tokens alone. `(B, R)`."""
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0, whitened=False)
    return returns


def _advantages_of_rows(reward: Floats, value: Floats, trained: Bools, gamma: float, lam: float) -> Floats:
    """Return the advantages of the trained tokens of some rows, in the order of the mask. `(B, R) -> (N,)` float64."""
    lengths, value = np.count_nonzero(trained, axis=1), value[trained]
    deltas = np.subtract(reward[trained], value, dtype=np.float64)
    following = np.zeros_like(deltas)
    following[:-1] = value[1:]
    following[lengths[lengths > 0].cumsum() - 1] = 0.0  # behind the last token of a row
    following *= gamma
    deltas += following
    # Everything in reverse: the last token of a row, with which the sums begin, comes first.
    slots = np.arange(lengths.max(initial=0)) < lengths[::-1, None]
    packed = np.zeros(slots.shape)
    packed[slots] = deltas[::-1]
    return discounted_sums(packed, gamma * lam)[slots][::-1]


def discounted_sums(steps: Floats, decay: float) -> Floats:
    """Replace `x_j` by `y_j = x_j + decay * y_(j-1)` along the rows of a `(B, R)` float64 array, and return it.

    `y_j` is `decay^j` times the running sum of `decay^-i x_i`. A new block begins where these powers would become too
    small for float64.
    """
    length = steps.shape[1]
    if decay == 0.0:
        return steps
    size = max(length if decay == 1.0 else int(MAX_LOG_POWER / abs(math.log(decay))), 1)
    powers = decay ** np.arange(min(size, length))
    for start in range(0, length, size):
        block = steps[:, start : start + size]
        if start:
            block[:, 0] += decay * steps[:, start - 1]
        inside = powers[: block.shape[1]]
        block /= inside
        torch.from_numpy(block).cumsum_(1)  # four times as fast as NumPy's
        block *= inside
    return steps
