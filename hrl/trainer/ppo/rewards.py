"""The driver's view of rewards: samples go to a service as they finish, and come back as one score per row.

The service is a Ray actor that owns the pool of reward processes. The rollout workers send it every sample as it
finishes, so that rewards are computed while the rest is still generated.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Self

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayTaskError

from hrl.metrics import reduce_metrics
from hrl.protocol import DataProto
from hrl.reward.combine import CombinedScores, Weighting, combine_scores
from hrl.reward.function import RewardSpec
from hrl.reward.keys import sample_keys
from hrl.reward.loop import RewardBatch, RewardError, RewardLoop, RewardRow
from hrl.trainer.ppo.lengths import lengths_of

_START_TIMEOUT_S = 120.0


class _RewardActor:
    """A ``RewardLoop`` that many workers can reach."""

    def __init__(self, spec: RewardSpec, num_workers: int, timeout_s: float, on_error: Any) -> None:
        self._loop = RewardLoop(spec, num_workers=num_workers, timeout_s=timeout_s, on_error=on_error)

    def start(self) -> None:
        self._loop.start()

    def begin(self, step: int, rows: list[RewardRow]) -> None:
        self._loop.begin(step, rows)

    def submit(self, step: int, key: Hashable, text: str) -> None:
        self._loop.submit(step, key, text)

    def collect(self, step: int, deadline_s: float) -> RewardBatch:
        return self._loop.collect(step, deadline_s)

    def close(self) -> None:
        self._loop.shutdown()


class RewardService:
    """Scores the samples of a batch by reward function, reward model or both. Leaving its context ends the pool.

    Args:
        config: the whole configuration.
        data_sources: the data sources to come, so that their scorers are loaded beforehand.

    Raises:
        RewardFunctionError: the reward function cannot be loaded.
    """

    def __init__(self, config: Any, data_sources: tuple[str, ...]) -> None:
        reward = config.reward
        self._deadline_s = config.trainer.timeouts.call_s
        self._max_response_tokens = config.data.max_response_length
        overlong = reward.overlong_buffer
        self._log_overlong = overlong.enable and overlong.log
        self._weighting = Weighting(
            function=reward.function_weight,
            model=reward.reward_model.weight,
            overlong_buffer_tokens=overlong.len if overlong.enable else 0,
            overlong_factor=overlong.penalty_factor,
        )
        custom = reward.custom_reward_function
        self._round = 0
        self.sink: Any = None
        if reward.function_weight != 0:  # otherwise the reward model alone decides
            spec = RewardSpec(custom.path, custom.name, custom.reward_kwargs, data_sources)
            self.sink = ray.remote(num_cpus=0, max_concurrency=8)(_RewardActor).remote(
                spec, reward.num_workers, reward.timeout_s, reward.on_error
            )

    def __enter__(self) -> Self:
        if self.sink is not None:
            self._call(self.sink.start, _START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self.sink is not None:
            ray.kill(self.sink)

    def begin(self, rows: DataProto) -> None:
        """Announces the samples of a batch and marks its rows, so that the workers stream them here."""
        self._round += 1
        rows.meta_info["reward_round"] = self._round
        if self.sink is None:
            return
        columns = rows.non_tensor_batch
        announced = [
            RewardRow(key, str(source), reward_model.get("ground_truth"), extra or {})
            for key, source, reward_model, extra in zip(
                sample_keys(rows), columns["data_source"], columns["reward_model"], columns["extra_info"], strict=True
            )
        ]
        self._call(self.sink.begin, _START_TIMEOUT_S, self._round, announced)

    def collect(self, batch: DataProto, metrics: dict[str, float]) -> CombinedScores:
        """The scores of the announced batch: ``scores`` to train on, ``plain`` to validate by.

        Rows that a reward function left out (it returned ``None``, or failed with ``reward.on_error=skip``) lose their
        response mask: they train nothing and count in no statistics of their group. What the reward was made of is kept
        in the non-tensor column ``reward_parts``.

        Args:
            batch: sampled rows, with ``rm_scores (B,)`` if there is a reward model.
            metrics: receives the counters of the reward function.

        Raises:
            RewardError: rewards are missing or wrong; the message names function and sample.
        """
        function_scores: list[float | None] | None = None
        parts: list[dict[str, Any]] = [{} for _ in range(len(batch))]
        if self.sink is not None:
            scored = self._call(self.sink.collect, self._deadline_s + 10.0, self._round, self._deadline_s)
            metrics |= reduce_metrics(scored.metrics)
            function_scores, parts = scored.scores, [dict(result.parts) for result in scored.results]
        model_scores = batch.batch["rm_scores"] if "rm_scores" in batch.batch.keys() else None
        combined = combine_scores(
            function_scores,
            model_scores,
            lengths_of(batch)[1],
            self._max_response_tokens,
            self._weighting,
        )
        self._note_parts(parts, model_scores, combined.overlong)
        batch.non_tensor_batch["reward_parts"] = np.fromiter(parts, dtype=object, count=len(parts))
        batch.batch["response_mask"] = batch.batch["response_mask"] * combined.kept[:, None]
        return combined

    def _note_parts(
        self, parts: list[dict[str, Any]], model_scores: torch.Tensor | None, overlong: torch.Tensor
    ) -> None:
        for row, part in enumerate(parts):
            if model_scores is not None:
                part["reward_model"] = float(model_scores[row])
            if self._log_overlong:
                part["overlong"] = float(overlong[row])

    def _call(self, method: Any, timeout_s: float, *args: Any) -> Any:
        try:
            return ray.get(method.remote(*args), timeout=timeout_s)
        except RayTaskError as error:
            # The cause is the service's own error, which names function and sample; Ray's wrapping says nothing more.
            raise error.cause if isinstance(error.cause, Exception) else RewardError(str(error)) from None
        except GetTimeoutError as error:
            raise RewardError(f"the reward service did not answer within {timeout_s:g} s") from error
