"""The driver's side of rewards: samples go to a service as they finish and come back as one score per row.

The rollout workers send every sample to a Ray actor as it finishes, so that rewards are computed while the rest is
still generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from hrl.batching.planner import lengths_of
from hrl.metrics import StepMetrics
from hrl.pictures import MULTI_MODAL_DATA, files_of, has_pictures
from hrl.protocol import DataProto
from hrl.reward.actor import RewardActor, RewardError, RewardOutcome, reward_metrics
from hrl.reward.combine import CombinedScores, NonFiniteScoreError, RewardShaping, combine_scores
from hrl.reward.parts import part_metrics
from hrl.reward.pool import RewardRow
from hrl.reward.spec import RewardSpec, with_served
from hrl.reward.weighted import Rewards
from hrl.workers.rollout.base import sample_keys

if TYPE_CHECKING:
    from torch import Tensor

    from hrl.config import PPOTrainerConfig


_OF_ROWS = ("data_source", "reward_model", "extra_info", "columns", "raw_prompt")
"""What rewards are told of a row, in the order of `RewardRow`."""


class _Round(NamedTuple):
    number: int = 0
    title: str = "no step"


class RewardService:
    """Scores the samples of a batch by reward function, reward model or both.

    Entering its context begins to start the pool, `start` waits until it is there, leaving the context ends it.

    Args:
        config: The whole configuration.
        data_sources: The data sources of the run, whose scorers are loaded beforehand.
        function: Rewards that the caller has as objects, in place of those that the configuration names.
        columns: Columns of the rows to come, which the function may take by name.
        scores_steps: Whether the samples of a step are scored.
        scores_validations: Whether those of a validation are.

    Attributes:
        scores_steps, scores_validations: As given.
        shaping: Shapes the rewards of training samples; its state is part of a checkpoint.

    Raises:
        RewardFunctionError: The reward function cannot be loaded.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        data_sources: tuple[str, ...],
        function: Rewards | None = None,
        columns: tuple[str, ...] = (),
        scores_steps: bool = True,
        scores_validations: bool = True,
    ) -> None:
        reward = config.reward
        self.scores_steps, self.scores_validations = scores_steps, scores_validations
        self._deadline_s = config.trainer.timeouts.call_s
        self._max_response_tokens = config.data.max_response_length
        self._reward = reward
        self.shaping = RewardShaping(reward.shaping)
        self._has_model = config.needs_reward_model
        self._num_rounds = 0
        self._rounds = {validate: _Round() for validate in (True, False)}
        self._spec: RewardSpec | None = None
        self._loop: RewardActor | None = None
        scores_some = scores_steps or scores_validations
        # Otherwise the reward model or the environment alone decides, or nothing is scored.
        if scores_some and (config.reward_entries or function is not None):
            folder = config.trainer.default_local_dir
            self._spec = RewardSpec.of_config(reward, data_sources, function, columns, folder)
            if not reward.reward_model.is_served:  # else its address is not known yet
                self._loop = RewardActor(self._spec, reward)

    @property
    def gives_scores(self) -> bool:
        """Whether there is a reward function or a reward model."""
        return self._spec is not None or self._has_model

    @property
    def sink(self) -> Any:
        """The Ray actor that workers send finished samples to; `None` where the reward model alone decides.

        Beside a reward model that the run serves it is there once `start` has been told where.
        """
        return None if self._loop is None else self._loop.handle

    def __enter__(self) -> Self:
        if self._loop is not None:
            self._loop.begin_start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.shutdown()

    def start(self, served: str | None = None) -> None:
        """Return when samples can be scored.

        Args:
            served: Where the run serves its reward model; functions find it in the environment of their process.

        Raises:
            RewardFunctionError: The reward function cannot be loaded in the pool's processes.
            RewardError: They did not start.
        """
        if served is not None and self._spec is not None and self._loop is None:
            self._loop = RewardActor(self._spec, with_served(self._reward, served))
            self._loop.begin_start()
        if self._loop is not None:
            self._loop.start()

    def begin(self, rows: DataProto, step: int, *, validate: bool) -> int | None:
        """Announce the samples of a batch. Those of a validation and of a step may be announced at the same time.

        Args:
            rows: One per sample.
            step: Of the run.
            validate: The samples are validated by and not trained on, so that their rewards are not shaped.

        Returns:
            The number under which workers send the samples as they finish; None where the reward model alone decides,
            or nobody.
        """
        self._num_rounds += 1
        title = f"the validation after step {step}" if validate else f"step {step}"
        self._rounds[validate] = _Round(self._num_rounds, title)
        if not (self.scores_validations if validate else self.scores_steps):
            return None
        if self._loop is None:
            return None
        wants = has_pictures(rows.non_tensor_batch) and self._takes_pictures
        shown = list(rows.non_tensor_batch[MULTI_MODAL_DATA]) if wants else [()] * len(rows)
        announced = [
            RewardRow(
                key, str(source), reward_model.get("ground_truth"), extra or {}, columns, prompt, files_of(pictures)
            )
            for key, pictures, source, reward_model, extra, columns, prompt in zip(
                sample_keys(rows),
                shown,
                *(rows.non_tensor_batch[name] for name in _OF_ROWS),
                strict=True,
            )
        ]
        self._loop.begin(self._num_rounds, announced, title)
        return self._num_rounds

    @cached_property
    def _takes_pictures(self) -> bool:
        return self._loop is not None and self._loop.takes_pictures()

    def outcomes(self, *, validate: bool = False) -> list[RewardOutcome] | None:
        """Wait for the functions and return what they say of each announced sample; None where there is no function.

        Raises:
            RewardError: Rewards are missing or wrong.
        """
        number, _ = self._rounds[validate]
        return None if self._loop is None else self._loop.collect(number, self._deadline_s)

    def collect(
        self,
        batch: DataProto,
        metrics: StepMetrics,
        *,
        validate: bool = False,
        outcomes: list[RewardOutcome] | None = None,
        of_environment: Tensor | None = None,
        lengths: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> CombinedScores:
        """Return the scores of the announced batch: `scores` to train on, `plain` to validate by.

        Rows that a reward function left out (it returned `None`, or failed with `reward.on_error=skip`) lose their
        response mask: they train nothing and count in no statistics of their group. What the reward was made of is kept
        in the non-tensor column `reward_parts`.

        Args:
            batch: Sampled rows, with `rm_scores (B,)` where the run has a reward model.
            metrics: Receives the counters of the reward function and the means of the parts.
            validate: The batch was announced as that of a validation.
            outcomes: What `outcomes` has returned; None waits for it here.
            of_environment: (B,), what an environment gave to each over all turns, nan where it gave nothing; None
                without an environment. It is a part of the reward where there are others, and it paid anybody.
            lengths: (B,), the tokens that a length penalty counts; None counts those of the response.
            counts: (B,) bool, rows whose rewards count, in whatever statistics; None counts all.

        Raises:
            RewardError: Rewards are missing or wrong; the message names function or model, and sample.
        """
        _, title = self._rounds[validate]
        function_scores: list[float | None] | None = None
        turn_scores: list[Sequence[float] | None] = [None] * len(batch)
        counted_rows = [True] * len(batch) if counts is None else counts.tolist()
        parts: list[dict[str, Any]] = [{} for _ in range(len(batch))]
        if (outcomes := outcomes or self.outcomes(validate=validate)) is not None:
            metrics.observe(
                reward_metrics([one for one, counted in zip(outcomes, counted_rows, strict=True) if counted])
            )
            function_scores = [outcome.score for outcome in outcomes]
            turn_scores = [outcome.turn_scores for outcome in outcomes]
            parts = [dict(outcome.parts) for outcome in outcomes]
        model_scores = batch.batch["rm_scores"] if self._has_model else None
        try:
            combined = combine_scores(
                function_scores,
                model_scores,
                lengths_of(batch)[1] if lengths is None else lengths,
                self._max_response_tokens,
                self._reward,
                None if validate else self.shaping,
                None if of_environment is None else of_environment.nan_to_num(nan=0.0),
                counts,
            )
        except NonFiniteScoreError as error:
            uid, sample = sample_keys(batch)[error.row]
            raise RewardError(f"{error.what} in {title}: uid {uid}, sample {sample}. {error.way_out}") from error
        paid = of_environment if self.gives_scores and of_environment is not None else None
        paid = None if paid is None or paid.isnan().all() else paid.nan_to_num(nan=0.0)
        for row, part in enumerate(parts):
            if model_scores is not None:
                part["reward_model"] = float(model_scores[row])
            if paid is not None:  # an episode that was not paid has 0, as in its score
                part["environment"] = float(paid[row])
            if self._reward.overlong_buffer.enable:
                part["overlong"] = float(combined.overlong[row])
        parts = [part if counted else {} for part, counted in zip(parts, counted_rows, strict=True)]
        metrics.observe(part_metrics(parts))
        batch.non_tensor_batch["reward_parts"] = np.fromiter(parts, dtype=object, count=len(parts))
        _leave_out(batch, combined.kept)
        return combined if of_environment is None else _with_turn_scores(combined, turn_scores)


def leave_out_unscored(batch: DataProto, outcomes: Sequence[RewardOutcome]) -> None:
    """Take the response mask from rows that a reward function left out, as `RewardService.collect` does."""
    _leave_out(batch, torch.tensor([outcome.score is not None for outcome in outcomes], dtype=torch.bool))


def _leave_out(batch: DataProto, kept: Tensor) -> None:
    mask = batch.batch["response_mask"]
    if mask[~kept].any():
        batch.batch["response_mask"] = mask * kept[:, None]


def _with_turn_scores(combined: CombinedScores, turn_scores: Sequence[Sequence[float] | None]) -> CombinedScores:
    """Return the scores of episodes with those of their turns, which count in validation as all that functions say."""
    sums = torch.tensor([sum(of_turns or ()) for of_turns in turn_scores], dtype=torch.float32)
    plain = torch.where(combined.kept, combined.plain + sums, 0.0)
    return replace(combined, plain=plain, turn_scores=turn_scores)
