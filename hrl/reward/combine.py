"""Combine reward function, reward model, shaping and length penalty into one score per response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hrl.algos.reward_placement import overlong_penalty
from hrl.algos.reward_shaping import REWARD_SHAPERS, RunningNormalizer


@dataclass(frozen=True)
class Weighting:
    """How the sources of reward are combined.

    Attributes:
        function: Factor of the reward function's score.
        model: Factor of the reward model's score.
        overlong_buffer_tokens: Length over which DAPO's penalty grows to `overlong_factor`, at the longest response
            allowed; 0 for no penalty.
        overlong_factor: The largest penalty, as a positive number.
    """

    function: float = 1.0
    model: float = 1.0
    overlong_buffer_tokens: int = 0
    overlong_factor: float = 1.0


@dataclass(frozen=True)
class CombinedScores:
    """Scores of a batch.

    Attributes:
        scores: float32 (B,), 0 where not kept.
        kept: Bool (B,); a row that is not kept trains nothing and counts in no statistics of its group.
        overlong: float32 (B,), the penalty inside `scores`, not positive.
        plain: float32 (B,), for validation: the function's unweighted score, or the model's if there is no function;
            0 where not kept.
    """

    scores: Tensor
    kept: Tensor
    overlong: Tensor
    plain: Tensor


class RewardShaping:
    """Applies members of `REWARD_SHAPERS` in order, each with the statistics it has gathered over the run.

    Args:
        limits: Name of each member, in order → its limit, or None.

    Raises:
        ValueError: No member has that name.
    """

    def __init__(self, limits: Mapping[str, float | None]) -> None:
        unknown = sorted(limits.keys() - REWARD_SHAPERS.keys())
        if unknown:
            raise ValueError(f"unknown reward shaping {unknown[0]!r}; there are: {', '.join(REWARD_SHAPERS)}")
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


class NonFiniteScoreError(ValueError):
    """A score of the reward model, or the weighted and shaped sum, isn't finite in float32.

    Attributes:
        row: Index of the first such row in the batch.
        score: Score of that row.
        source: Name of the score's source.
    """

    def __init__(self, row: int, score: float, source: str = "reward model's score") -> None:
        super().__init__(f"the {source} of row {row} is {score}")
        self.row, self.score, self.source = row, score, source


def combine_scores(
    function_scores: Sequence[float | None] | None,
    model_scores: Tensor | None,
    response_lengths: Tensor,
    max_response_tokens: int,
    weighting: Weighting,
    shaping: RewardShaping | None = None,
) -> CombinedScores:
    """Return `shaping(function · f + model · m) + overlong penalty`, per response.

    Args:
        function_scores: One per response, `None` for those left out; or `None` without a reward function.
        model_scores: (B,), or `None` without a reward model.
        response_lengths: (B,), in tokens.
        max_response_tokens: The longest response allowed.
        weighting: The factors.
        shaping: Applied to the weighted sum; `None` for no shaping.

    Raises:
        ValueError: There is no source of reward, or the number of scores differs from the number of responses.
        NonFiniteScoreError: A score of the reward model, or the combined score, isn't finite.
    """
    rows = len(response_lengths)
    if function_scores is None and model_scores is None:
        raise ValueError("there is neither a reward function nor a reward model")
    scores = plain = torch.zeros(rows)
    kept = torch.ones(rows, dtype=torch.bool)
    if model_scores is not None:
        _check_rows("reward model", len(model_scores), rows)
        plain = model_scores.float().cpu()
        _check_finite(plain, "reward model's score")
        scores = scores + weighting.model * plain
    if function_scores is not None:
        _check_rows("reward function", len(function_scores), rows)
        kept = torch.tensor([score is not None for score in function_scores], dtype=torch.bool)
        plain = torch.tensor([score or 0.0 for score in function_scores], dtype=torch.float32)
        scores = scores + weighting.function * plain
    if shaping is not None:
        scores = shaping(scores, kept)
    penalty = torch.zeros(rows)
    if weighting.overlong_buffer_tokens > 0:
        penalty = overlong_penalty(
            response_lengths.cpu(), max_response_tokens, weighting.overlong_buffer_tokens, weighting.overlong_factor
        )
    scores = torch.where(kept, scores + penalty, 0.0)
    _check_finite(scores, "sum of weighted and shaped scores")
    return CombinedScores(
        scores=scores,
        kept=kept,
        overlong=torch.where(kept, penalty, 0.0),
        plain=torch.where(kept, plain, 0.0),
    )


def _check_finite(scores: Tensor, source: str) -> None:
    wrong = (~torch.isfinite(scores)).nonzero().flatten().tolist()
    if wrong:
        raise NonFiniteScoreError(wrong[0], float(scores[wrong[0]]), source)


def _check_rows(source: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"the {source} gave {found} scores for {expected} responses")
