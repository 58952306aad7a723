"""Combine reward function, reward model, shaping and length penalty into one score per response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hrl.algos.reward_placement import overlong_penalty
from hrl.algos.reward_shaping import REWARD_SHAPERS, RunningNormalizer
from hrl.config.reward import RewardConfig
from hrl.errors import NonFiniteError


@dataclass(frozen=True)
class CombinedScores:
    """Scores of a batch.

    Attributes:
        scores: float32 (B,), 0 where not kept.
        kept: Bool (B,); a row that is not kept trains nothing and counts in no statistics of its group.
        overlong: float32 (B,), the penalty inside `scores`, not positive.
        plain: float32 (B,), for validation: the functions' score, or the model's if no function has a weight; 0 where
            not kept.
        turn_scores: Of episodes, what functions gave to the turns of each; None for those of which nobody said
            anything of turns.
    """

    scores: Tensor
    kept: Tensor
    overlong: Tensor
    plain: Tensor
    turn_scores: Sequence[Sequence[float] | None] = ()


class RewardShaping:
    """Applies members of `REWARD_SHAPERS` in order, each with the statistics it has gathered over the run.

    Args:
        limits: `reward.shaping`: name of each member, in order → its limit, or None.
    """

    def __init__(self, limits: Mapping[str, float | None]) -> None:
        self._limits = dict(limits)
        self._seen = {name: RunningNormalizer() for name in limits}

    def __call__(self, scores: Tensor, kept: Tensor) -> Tensor:
        """Shape the scores of a step.

        Args:
            scores: Float (B,).
            kept: Bool (B,); other rows count in no statistics.

        Returns:
            Float (B,), 0 where not kept.
        """
        for name, limit in self._limits.items():
            seen = self._seen[name]
            seen.update(scores[kept])
            scores = REWARD_SHAPERS[name](scores, seen, float("inf") if limit is None else limit)
        return torch.where(kept, scores, 0.0)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return each member's statistics, for a checkpoint."""
        return {name: seen.state_dict() for name, seen in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore a `state_dict`; members that the checkpoint lacks start afresh."""
        for name in self._seen.keys() & state.keys():
            self._seen[name].load_state_dict(state[name])


class NonFiniteScoreError(NonFiniteError):
    """A score of the reward model, or the weighted and shaped sum, isn't finite in float32.

    Attributes:
        row: Index of the first such row in the batch.
        what: The score and where it comes from.
        way_out: What to change.
    """

    def __init__(self, row: int, what: str, way_out: str) -> None:
        super().__init__(f"{what}, in row {row}. {way_out}")
        self.row, self.what, self.way_out = row, what, way_out


def combine_scores(
    function_scores: Sequence[float | None] | None,
    model_scores: Tensor | None,
    response_lengths: Tensor,
    max_response_tokens: int,
    reward: RewardConfig,
    shaping: RewardShaping | None = None,
    environment_scores: Tensor | None = None,
    counts: Tensor | None = None,
) -> CombinedScores:
    """Return `shaping(functions + model · m) + overlong penalty`, per response; `plain` has the environment's too.

    Args:
        function_scores: The weighted sum of the functions' scores, one per response, `None` for those left out; or
            `None` without a reward function.
        model_scores: (B,), or `None` without a reward model.
        response_lengths: (B,), in tokens.
        max_response_tokens: The longest response allowed.
        reward: The section `reward`, with the weight `m` and the overlong buffer.
        shaping: Applied to the weighted sum; `None` for no shaping.
        environment_scores: (B,), what an environment gave over all turns; `None` without one. These rewards belong to
            their turns, so they are not in `scores`.
        counts: (B,) bool, responses that are not left out whatever their scores are; None counts all.

    Raises:
        ValueError: There is no source of reward, or the number of scores differs from the number of responses.
        NonFiniteScoreError: A score of the reward model, or the combined score, isn't finite.
    """
    rows = len(response_lengths)
    if function_scores is None and model_scores is None and environment_scores is None:
        raise ValueError("there is neither a reward function nor a reward model, nor an environment that gives rewards")
    scores = plain = torch.zeros(rows)
    kept = torch.ones(rows, dtype=torch.bool) if counts is None else counts
    if model_scores is not None:
        _check_rows("reward model", len(model_scores), rows)
        plain = model_scores.float().cpu()
        _check_finite(
            plain,
            f"the score of the reward model {reward.reward_model.model_path}",
            "Check the model on its own, or in float32 (reward.reward_model.model.fsdp_config.dtype)",
        )
        if reward.reward_model.step_token is None:  # else the scores of its steps stand on these
            scores = scores + reward.reward_model.weight * plain
    if function_scores is not None:
        _check_rows("reward function", len(function_scores), rows)
        kept = kept & torch.tensor([score is not None for score in function_scores], dtype=torch.bool)
        functions = torch.tensor([score or 0.0 for score in function_scores], dtype=torch.float32)
        scores = scores + functions
        if model_scores is None or any(entry.weight for entry in reward.entries):
            plain = functions
    if environment_scores is not None:
        plain = plain + environment_scores.float()
    if shaping is not None:
        scores = shaping(scores, kept)
    penalty, overlong = torch.zeros(rows), reward.overlong_buffer
    if overlong.enable:
        penalty = overlong_penalty(response_lengths.cpu(), max_response_tokens, overlong.len, overlong.penalty_factor)
    scores = torch.where(kept, scores + penalty, 0.0)
    _check_finite(
        scores,
        "the sum of weighted and shaped scores",
        "Lower the weights in reward.functions or reward.reward_model.weight, or the function's scores",
    )
    return CombinedScores(
        scores=scores,
        kept=kept,
        overlong=torch.where(kept, penalty, 0.0),
        plain=torch.where(kept, plain, 0.0),
    )


def _check_finite(scores: Tensor, what: str, way_out: str) -> None:
    wrong = (~torch.isfinite(scores)).nonzero().flatten().tolist()
    if wrong:
        raise NonFiniteScoreError(wrong[0], f"{what} is {float(scores[wrong[0]])}", way_out)


def _check_rows(source: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"the {source} gave {found} scores for {expected} responses")
