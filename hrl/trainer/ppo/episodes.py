"""The driver's side of episodes: what a batch asks for, and what comes back as its rows."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from hrl.algos.episodes import FoldedEpisodes
from hrl.algos.reward_placement import place_scores, place_token_rewards, place_turn_rewards
from hrl.batching.episodes import episode_numbers
from hrl.columns import object_column
from hrl.config.trainer import BATCH_SHARE
from hrl.episodes.episode import LEFT_OUT, TRUNCATIONS, limits_by_end
from hrl.episodes.metrics import door_metrics, episode_metrics, pool_metrics
from hrl.episodes.play import EpisodeError, EpisodeTask, Limits
from hrl.episodes.pool import environment_of
from hrl.episodes.rows import episode_batch, policy_version_of
from hrl.episodes.service import EpisodeActor, EpisodeServiceError, EpisodeSetup
from hrl.masking import remember
from hrl.metrics import Metric, StepMetrics
from hrl.models.tokenizer import TokenIds
from hrl.pictures import MULTI_MODAL_DATA, has_pictures
from hrl.protocol import DataProto
from hrl.serve.agents import AgentDoor, Outside
from hrl.serve.outside import write_address
from hrl.serve.sessions import new_key
from hrl.single_controller.worker_errors import WorkerError
from hrl.trainer.ppo.samples import sample_rows
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import sample_keys

if TYPE_CHECKING:
    from torch import Tensor

    from hrl.config import PPOTrainerConfig
    from hrl.config.environment import EnvironmentConfig
    from hrl.trainer.ppo.generation import Asked
    from hrl.trainer.ppo.rewards import RewardService


class EpisodeDriver:
    """Has the episodes of a batch played by the engines of a run.

    Entering its context begins to start the environments' processes, `start` waits until they are there, leaving the
    context ends them.

    Args:
        config: The whole configuration, with an environment.
        environment: The environment, if it was given as an object; else None.
        tokenizer_path: Folder of the policy's tokenizer.
        tokens: Its ids that have a meaning.
    """

    def __init__(self, config: PPOTrainerConfig, environment: Any, tokenizer_path: str, tokens: TokenIds) -> None:
        self._config, self._tokens = config, tokens
        self._num_batches = 0
        rollout = config.actor_rollout_ref.rollout
        self._outside: Outside | None = None
        self._address: Path | None = None
        if rollout.serve:
            self._outside = Outside(new_key(), SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k))
            remember(self._outside.key)
        self._setup = EpisodeSetup(
            environment=environment_of(config.environment, environment),
            settings=config.environment,
            limits=Limits(config.data.max_prompt_length, config.data.max_response_length),
            tokenizer_path=tokenizer_path,
            trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
            stop_ids=tokens.stop,
            template_kwargs=dict(config.data.apply_chat_template_kwargs),
            agents=partial(AgentDoor, outside=self._outside),
        )
        self._actor: EpisodeActor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._address is not None:  # first: the key goes with the run, also where the shutdown fails
            self._address.unlink(missing_ok=True)
        if self._actor is not None:
            self._actor.shutdown()

    def begin_start(self, rewards: Any) -> None:
        """Begin to start the processes.

        Args:
            rewards: The Ray actor that scores what was answered last; None where environments alone decide.
        """
        self._actor = EpisodeActor(replace(self._setup, rewards=rewards))

    def start(self) -> None:
        """Return when episodes can be played.

        Raises:
            EnvironmentLoadError: The environment can't be loaded.
            EpisodeServiceError: The service did not start.
        """
        self._service.start()

    def open_to_others(self, folder: Path) -> Path | None:
        """Let others than the run's own programs ask the policy, with `rollout.serve`.

        Args:
            folder: Of the run.

        Returns:
            The file with address and key.
        """
        if self._outside is not None:
            self._address = write_address(folder, self._service.listen(), self._outside.key)
        return self._address

    def play(self, asked: Asked, engines: Any, metrics: StepMetrics) -> DataProto:
        """Play the episodes that a batch asks for; returns their rows, see `episode_batch`.

        Args:
            asked: One row per episode.
            engines: The worker group that samples.
            metrics: Receives what the episodes were like.

        Raises:
            EpisodeError: Episodes failed, and `environment.on_error` does not allow it.
            EpisodeServiceError: The service is gone.
            WorkerError: A rank failed.
        """
        self._num_batches += 1
        tasks, request = tasks_of(asked), asked.request
        num_engines = engines.world_size // self._config.actor_rollout_ref.rollout.tensor_model_parallel_size
        timeout_s = BATCH_SHARE * self._config.trainer.timeouts.call_s
        self._service.begin(self._num_batches, tasks, num_engines, request.reward_round, timeout_s)
        try:
            engines.serve_requests(self._service.inbox(self._num_batches))
        except WorkerError as error:
            if isinstance(error.__cause__, EpisodeServiceError):
                # A rank sees that the service is gone; the driver knows why. If it is there, the rank's word counts.
                self._service.require_alive()
            raise
        collected = self._service.collect(self._num_batches)
        episodes = collected.episodes
        # The greedy baselines of a training step say how the policy is at another temperature.
        is_greedy = asked.rows.non_tensor_batch["greedy"] if request.with_greedy else [False] * len(episodes)
        sampled = [episode for episode, greedy in zip(episodes, is_greedy, strict=True) if not greedy]
        metrics.observe(episode_metrics(sampled) | pool_metrics(collected.pool) | door_metrics(collected.asked))
        batch = episode_batch(
            asked.rows,
            episodes,
            prompt_width=self._setup.limits.prompt,
            response_width=self._setup.limits.response,
            pad_id=self._tokens.pad,
            with_experts=request.with_experts,
        )
        batch.meta_info["temperature"] = request.sampling.temperature
        version = policy_version_of(batch)
        if version is not None:
            batch.meta_info["policy_version"] = version
        return batch

    @property
    def _service(self) -> EpisodeActor:
        if self._actor is None:
            raise RuntimeError("the episode service was not started")
        return self._actor


def require_sampled(batch: DataProto, config: PPOTrainerConfig) -> None:
    """Refuse a batch of episodes in which the policy sampled nothing.

    Raises:
        EpisodeError: It says how the episodes ended.
    """
    if (batch.batch["rollout_versions"] >= 0).any():
        return
    first, columns = sample_rows(batch).numpy(), batch.non_tensor_batch
    ends, errors = Counter(columns["end"][first]), [error for error in columns["episode_error"][first] if error]
    limits = limits_by_end(config.environment, config.data.max_prompt_length, config.data.max_response_length)
    found = [f"{number} {end}" + (f" ({limits[end]})" if end in limits else "") for end, number in ends.most_common()]
    failed = f". The first that failed: {errors[0]}" if errors else ""
    raise EpisodeError(
        f"the policy sampled nothing in any of {first.sum()} episodes. How they ended: {', '.join(found)}{failed}. "
        "`hrl env-test` plays some of them alone, and shows how long calls take"
    )


def tasks_of(asked: Asked) -> list[EpisodeTask]:
    """Return the episodes that a batch asks for."""
    rows, request = asked.rows.non_tensor_batch, asked.request
    is_greedy = rows["greedy"] if request.with_greedy else np.zeros(len(asked.rows), dtype=bool)
    prompts, is_prompt = asked.rows.batch["prompts"], asked.rows.batch["attention_mask"].bool()
    shown = rows[MULTI_MODAL_DATA] if has_pictures(rows) else [()] * len(asked.rows)
    names = ("index", "raw_prompt", "data_source", "reward_model", "extra_info", "columns")
    return [
        EpisodeTask(
            key,
            {
                **columns,
                "prompt": list(prompt),
                "data_source": source,
                "reward_model": reward_model,
                "extra_info": extra,
            },
            replace(request.sampling, temperature=0.0) if greedy else request.sampling,
            request.seed,
            request.step,
            held_out=int(index) if asked.validate else None,
            prompt_ids=array("i", ids[is_there].tolist()),
            with_experts=request.with_experts,
            pictures=pictures,
        )
        for key, greedy, ids, is_there, pictures, index, prompt, source, reward_model, extra, columns in zip(
            sample_keys(asked.rows), is_greedy, prompts, is_prompt, shown, *(rows[name] for name in names), strict=True
        )
    ]


@dataclass(frozen=True)
class EpisodeScores:
    """What the episodes of a batch are worth, row by row.

    Attributes:
        tokens: `(B, R)`, rewards of tokens on these, of turns on the last trained token of each (an environment's, and
            `turn_scores` of reward functions), what functions and models gave to the whole on the last one of the
            episode.
        scores: `(B,)`, all of it, of the row's episode.
        plain: `(B,)`, the same without weights and penalties of `reward`.
        kept: `(B,)` bool, whether the row's episode counts.
    """

    tokens: Tensor
    scores: Tensor
    plain: Tensor
    kept: Tensor


def score_episodes(
    batch: DataProto, rewards: RewardService, settings: EnvironmentConfig, metrics: StepMetrics, *, validate: bool
) -> EpisodeScores:
    """Score a batch of episodes. Episodes that do not count lose their response mask, in all their rows.

    Args:
        batch: Rows of `episode_batch`, with `rm_scores (B,)` where the run has a reward model.
        rewards: Scores what was answered last.
        settings: The section `environment`.
        metrics: Receives what was counted.
        validate: Whether the batch was announced as that of a validation.

    Raises:
        RewardError: Rewards are missing or wrong.
    """
    numbers, heads = episode_numbers(batch), heads_of(batch)
    codes = np.arange(len(batch)) if numbers is None else numbers
    turn_rewards = batch.non_tensor_batch["turn_rewards"]
    totals = _totals(turn_rewards)
    is_paid = torch.tensor([any(one is not None for one in turns) for turns in turn_rewards])
    last = batch.select_idxs(heads)
    of_row = torch.from_numpy(codes)
    ends = last.non_tensor_batch["end"]
    counts = torch.tensor([end not in LEFT_OUT for end in ends])
    # No reward is one of 0: a game may pay for nothing but a win, and a step may be without any.
    is_unpaid = counts & ~is_paid[heads] & (not rewards.gives_scores)
    if settings.on_truncation == "mask" and not validate:
        counts &= torch.tensor([end == "done" for end in ends])
    combined = rewards.collect(
        last,
        metrics,
        validate=validate,
        of_environment=torch.where(is_paid, totals, math.nan)[heads],
        lengths=_lengths(batch, of_row, ends),
        counts=counts,
    )
    if any(of_turns is not None for of_turns in combined.turn_scores):
        of_functions = [combined.turn_scores[episode] for episode in codes.tolist()]
        turn_rewards = object_column(list(map(_added, turn_rewards, of_functions)))
        batch.non_tensor_batch["turn_rewards"] = turn_rewards
        totals = _totals(turn_rewards)
    kept = combined.kept[of_row]
    batch.batch["response_mask"] = batch.batch["response_mask"] * kept[:, None]
    batch.non_tensor_batch["reward_parts"] = last.non_tensor_batch["reward_parts"][codes]
    mask = batch.batch["response_mask"]
    turn_index, token_rewards = batch.batch["turn_index"], batch.non_tensor_batch["token_rewards"]
    of_tokens, others = place_token_rewards(token_rewards, turn_rewards, turn_index, mask, codes)
    placed = place_turn_rewards(others, turn_index, mask, codes)
    metrics.observe(
        {
            "episode/rewards_moved": Metric.total(placed.num_moved),
            "episode/rewards_lost": Metric.total(placed.num_lost),
            "episode/num_unpaid": Metric.total(float(is_unpaid.sum())),
        }
    )
    fold = FoldedEpisodes.of(mask, of_row, turn_index)
    tokens = of_tokens + placed.scores + fold.unfold(place_scores(combined.scores, fold.mask()))
    scores = combined.scores[of_row] + totals
    return EpisodeScores(tokens, torch.where(kept, scores, 0.0), combined.plain[of_row], kept)


def _lengths(batch: DataProto, of_row: Tensor, ends: NDArray[np.object_]) -> Tensor:
    """Return how near each episode came to `data.max_response_length`, which limits its rows: `(E,)` int64, in tokens.

    It is the length of its longest row, with what the environment said; all of the limit where the limit ended it, for
    what did not fit any more is not in the row.
    """
    turn_index = batch.batch["turn_index"]
    longest = torch.zeros(len(ends), dtype=torch.int64).scatter_reduce_(0, of_row, (turn_index >= 0).sum(-1), "amax")
    return longest.masked_fill(torch.tensor([end == "max_tokens" for end in ends]), turn_index.shape[1])


def _totals(turn_rewards: Iterable[Sequence[float | None]]) -> Tensor:
    """Return what the turns of each row's episode are worth together, `(B,)` float32."""
    sums = [sum(one for one in turns if one is not None) for turns in turn_rewards]
    return torch.tensor(sums, dtype=torch.float32)


def _added(of_environment: Sequence[float | None], of_functions: Sequence[float] | None) -> list[float | None]:
    """Return what turns are worth by their environment and by reward functions, which have one score for each."""
    if of_functions is None or not of_environment:  # a failed episode may have none
        return list(of_environment)
    return [(given or 0.0) + score for given, score in zip(of_environment, of_functions, strict=True)]


def values_behind_truncations(batch: DataProto, last_values: Callable[[DataProto], Tensor]) -> Tensor:
    """Return what a critic expects behind the episodes that a limit cut off, `(B,)` float32 in all their rows, else 0.

    Args:
        batch: Rows of `episode_batch`.
        last_values: From some of the rows to the critic's values of the state behind the last token of each.
    """
    numbers, heads = episode_numbers(batch), heads_of(batch)
    codes = torch.arange(len(batch)) if numbers is None else torch.from_numpy(numbers)
    is_cut_off = torch.tensor([end in TRUNCATIONS - LEFT_OUT for end in batch.non_tensor_batch["end"][heads.numpy()]])
    of_episodes = torch.zeros(len(heads))
    if is_cut_off.any():
        of_episodes[is_cut_off] = last_values(batch.select_idxs(heads[is_cut_off])).float()
    return of_episodes[codes]


def heads_of(batch: DataProto) -> Tensor:
    """Return the rows that hold the last turn of their episodes, (E,) int64, in the order of the episodes.

    Args:
        batch: Rows of `episode_batch`, those of an episode next to each other.
    """
    columns, branches = batch.batch, batch.non_tensor_batch["branch"]
    last_turns = (columns["turn_index"] * (columns["rollout_versions"] >= 0)).amax(dim=-1).tolist()
    heads: list[int] = []
    for row, branch in enumerate(branches.tolist()):
        if branch == 0:
            heads.append(row)
        elif last_turns[row] >= last_turns[heads[-1]]:
            heads[-1] = row
    return torch.tensor(heads, dtype=torch.int64)
