"""The driver of a PPO or GRPO run: the algorithm is `train_step`, everything heavy a worker group's method."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from hrl.algos.bypass import bypass_loss_name
from hrl.algos.kl import AdaptiveKLController, get_kl_controller
from hrl.algos.registry import estimator_traits, policy_loss_traits
from hrl.algos.reward_placement import place_scores
from hrl.algos.token_selection import TOKEN_SELECTORS
from hrl.batching.planner import plan_generation, rows_of_first_step
from hrl.cluster.roles import ResourcePoolManager, Role
from hrl.config.alarms import SAMPLER_GAP
from hrl.config.placement import model_scores_apart, resolve_placement
from hrl.data.order import Position
from hrl.data.sampler import PromptSampler, check_choice, load_sampler
from hrl.metrics import Metric, StepMetrics
from hrl.pictures import has_pictures
from hrl.protocol import DataProto
from hrl.report import health
from hrl.report.first_look import first_look
from hrl.report.samples import rollout_records
from hrl.report.thumbnails import thumbnails
from hrl.routing import ROUTED_EXPERTS
from hrl.trainer.loop import TrainingLoop
from hrl.trainer.phases import StepPhase
from hrl.trainer.ppo.advantage import (
    add_teacher_advantages,
    advantage_columns,
    apply_kl_penalty,
    compute_advantage,
    rows_without_advantage,
)
from hrl.trainer.ppo.dynamic_sampling import GroupFilter
from hrl.trainer.ppo.episodes import EpisodeScores, heads_of, require_sampled, score_episodes, values_behind_truncations
from hrl.trainer.ppo.finite_columns import FiniteColumns, LeftOutError
from hrl.trainer.ppo.generation import (
    Asked,
    check_policy_version,
    count_troubles,
    prompt_batch,
    sampling_of,
    seed_of,
    share_known_experts,
    take_baselines,
)
from hrl.trainer.ppo.metrics import (
    CORRECT_AT,
    answers_that_are_correct,
    compute_data_metrics,
    count_left_out,
    validation_episodes,
    validation_metrics,
    validation_troubles,
)
from hrl.trainer.ppo.old_log_probs import needs_old_log_prob, policy_update, update_measures_mismatch
from hrl.trainer.ppo.rewards import leave_out_unscored
from hrl.trainer.ppo.sampler_mismatch import (
    DriftGate,
    correct_for_sampler,
    sampler_drift,
    spot_check,
    with_sample_sizes,
)
from hrl.trainer.ppo.samples import count_episode_tokens, counted_samples
from hrl.trainer.ppo.selection import draw_by_score, mark_tokens, step_generator
from hrl.trainer.ppo.served_teacher import ServedTeacher
from hrl.workers.requests import (
    ROW_COLUMNS,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    TEACHER_STATES,
    LogProbRequest,
    SampleRequest,
    SamplingParams,
    ScalarRequest,
    ValueUpdate,
    temperature_of,
)

if TYPE_CHECKING:
    from hrl.batching.plan import BatchPlan
    from hrl.config.ppo import PPOTrainerConfig
    from hrl.reward.actor import RewardOutcome
    from hrl.reward.combine import CombinedScores
    from hrl.trainer.ppo.episodes import EpisodeDriver
    from hrl.trainer.ppo.reward_model_rows import RewardModelRows
    from hrl.trainer.ppo.rewards import RewardService

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage"]


SAMPLER = "sampler"
"""What a checkpoint calls the state of the sampler of prompts."""
RM_SCORES = frozenset({"rm_scores", "rm_step_scores"})
SCORES = frozenset({"token_level_scores", "plain_scores"})
OLD_LOG_PROBS = frozenset({"old_log_probs", "sum_pi_squared", "rollout_is_weights", ROUTED_EXPERTS})
REF_LOG_PROBS = frozenset({"ref_log_prob", TEACHER_LOG_PROBS, TEACHER_IDS, TEACHER_STATES})
VALUES = frozenset({"values", "bootstrap_values"})
"""What phases give, where a run asks for it."""
_LEFT_OUT = frozenset({"response_mask"})
"""Where it is seen which rows a reward function leaves out."""


class RayPPOTrainer(TrainingLoop):
    """Trains a policy with PPO, GRPO, or any registered advantage estimator and policy loss.

    The algorithm is `train_step`, which `fit` calls for every batch of prompts. Each of its phases is a method with
    the batch in and the batch out, so that a subclass changes one phase and inherits the rest; `on_batch_scored` and
    `on_step_end` are hooks that do nothing here.

    Args:
        rewards: Scores finished samples, see `hrl.trainer.ppo.rewards`.
        episodes: Has episodes played, see `hrl.trainer.ppo.episodes`; None where every prompt has one answer.
        reward_model_rows: Makes what a reward model reads that does not read the policy's tokens; None if it does.
        teacher: Asks the servers of one; None where the run holds it, and without one.
        config, args, named: As for `TrainingLoop`; its datasets hold prompts.

    Attributes:
        group_filter: The class that decides which groups `algorithm.filter_groups` keeps; a subclass may name another.
    """

    config: PPOTrainerConfig
    learners = (Role.ActorRollout, Role.Actor, Role.Critic)
    beginning = "giving the engine the weights"
    group_filter: ClassVar[type[GroupFilter]] = GroupFilter

    def __init__(
        self,
        config: PPOTrainerConfig,
        *args: Any,
        rewards: RewardService,
        episodes: EpisodeDriver | None = None,
        reward_model_rows: RewardModelRows | None = None,
        teacher: ServedTeacher | None = None,
        **named: Any,
    ) -> None:
        super().__init__(config, *args, **named)
        self.rewards, self.episodes, self.reward_model_rows = rewards, episodes, reward_model_rows
        self.teacher = teacher
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.use_critic = config.needs_critic
        self.use_reference_policy = config.needs_reference
        self.use_rm = config.needs_reward_model
        self.needs_old_log_prob = needs_old_log_prob(config)
        self.estimator = estimator_traits(config.algorithm.adv_estimator)
        self.placement = resolve_placement(config)
        self.finite = FiniteColumns(self.reporter.folder.path, self.reporter.console.note)
        self.drift_gate = DriftGate(config.trainer.alarms[SAMPLER_GAP] or math.inf)
        self.policy_version = -1
        self._begun: list[Asked] = []
        self._validated: tuple[DataProto, StepMetrics] | None = None
        self._outcomes: list[RewardOutcome] | None = None
        self.sampler = _sampler_of(config, self.train_dataset)

    def init_workers(self) -> None:
        """Start the processes of every pool and load the models of every role into them."""
        # Rewards and episodes start beside the workers, unless functions ask a server that is one of these.
        serves = self.config.reward.reward_model.is_served
        if self.episodes is not None and not serves:
            self.episodes.begin_start(self.rewards.sink)
        super().init_workers()
        if self.config.reads_whole_teacher:  # whose head stays as it is
            head = next(each for each in self.workers.ref.head_of_teacher() if each is not None)
            self.workers.actor.learn_from_head(head)
        served = None
        if serves:
            served = next(address for address in self.workers.rm.address() if address is not None)
            self.reporter.console.note(f"the reward model is served at {served}")
        self.rewards.start(served)
        if self.episodes is not None:
            if serves:
                self.episodes.begin_start(self.rewards.sink)
            self.episodes.start()
            if (address := self.episodes.open_to_others(self.reporter.folder.path)) is not None:
                self.reporter.console.note(
                    f"the policy can be asked while it is trained: source {shlex.quote(str(address))}"
                )
        elif self.rewards.sink is not None:
            self.workers.rollout.set_reward_sink(self.rewards.sink)

    # ------------------------------------------------------------------ the algorithm

    def begin(self) -> None:
        """Give the engines the weights that the run starts with."""
        self.sync_weights()

    def prepare_batch(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Return all that is to be learnt from: samples, scores, log-probs, values, advantages.

        Raises:
            LeftOutError: A number of it is not finite.
        """
        return self.run_phases(self.preparation(), batch, metrics, over=self._look_at)

    def learn(self, batch: DataProto, metrics: StepMetrics) -> None:
        """Teach the critic and move the policy."""
        self.run_phases(self.updates(), self.rows_to_learn(batch, metrics), metrics)

    def preparation(self) -> Iterator[StepPhase]:
        """Yield the phases from prompts to advantages. Those on pools of their own run at once where they can.

        A phase whose method a subclass has replaced may do anything: those before and after it do not run beside it.
        """
        rejects = bool(self.config.algorithm.rollout_correction.rollout_rs)
        pool = self.pool_of
        actor, rm = pool(self.placement.actor), pool("rm")
        yield StepPhase("gen", self._generate_and_sleep, on=pool(self.placement.rollout))
        if self.scores_apart:  # others need to know which rows a function leaves out, and no scores
            yield StepPhase("rm", self._score_by_model, rm, ROW_COLUMNS, RM_SCORES, self._devices_of(rm))
            if self.rewards.sink is not None:
                yield StepPhase("reward", self._wait_for_functions, None, _LEFT_OUT, _LEFT_OUT)
            yield StepPhase("reward", self._combine_scores, None, RM_SCORES | _LEFT_OUT, SCORES | {"reward_parts"})
        elif self.rewards.scores_steps:  # else a teacher alone is learnt from
            yield self._phase("reward", "compute_reward", rm, ROW_COLUMNS, None)
        if self._shapes_batch:
            yield StepPhase("scored", self._shape_batch, is_timed=False)
        if self.needs_old_log_prob:
            needs = ROW_COLUMNS | {"rollout_log_probs"} | (SCORES if rejects else frozenset())
            gives = OLD_LOG_PROBS | (SCORES | _LEFT_OUT if rejects else frozenset())
            yield self._phase("old_log_prob", "compute_old_log_prob", actor, needs, gives)
        if self.use_reference_policy:
            ref = actor if self.config.reference_is_actor else pool("ref")
            yield self._phase("ref", "compute_ref_log_prob", ref, ROW_COLUMNS, REF_LOG_PROBS)
        if self.use_critic:
            yield self._phase("values", "compute_values", pool("critic"), ROW_COLUMNS, VALUES)
        yield StepPhase("adv", self.compute_advantage)

    def updates(self) -> Iterator[StepPhase]:
        """Yield the phases that change weights, which run at once where critic and policy have pools of their own.

        Beside them engines on a pool of their own may still sample the validation of the weights that they have.
        """
        nothing: frozenset[str] = frozenset()
        actor = self.pool_of(self.placement.actor)
        if self.use_critic:
            yield self._phase("update_critic", "update_critic", self.pool_of("critic"), nothing, nothing)
        if self.global_steps > self.config.trainer.critic_warmup:
            yield self._phase("update_actor", "update_actor", actor, nothing, nothing)
        else:
            devices = self._devices_of(actor)
            yield StepPhase("old_log_prob", self._compare_all_with_sampler, actor, nothing, nothing, devices)
        if self._in_validation is not None:
            engines = self.pool_of(self.placement.rollout)
            devices = self._devices_of(engines)
            yield StepPhase("testing", self._wait_for_validation, engines, nothing, nothing, devices)

    def _phase(
        self, name: str, method: str, on: str | None, needs: frozenset[str], gives: frozenset[str] | None
    ) -> StepPhase:
        run = getattr(self, method)
        if method in ("compute_ref_log_prob", "compute_values"):  # which have no metrics
            run = _without_metrics(run)
        if getattr(type(self), method) is not getattr(RayPPOTrainer, method):
            return StepPhase(name, run, on)
        return StepPhase(name, run, on, needs, gives, self._devices_of(on))

    def _devices_of(self, pool: str | None) -> frozenset[Hashable]:
        return frozenset() if pool is None else frozenset(self.placement.devices(pool))

    def train_step(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Take one step of the algorithm, phase by phase, on a batch of prompts."""
        self.finite.begin()
        try:
            batch = self.prepare_batch(batch, metrics)
        except LeftOutError as left_out:
            batch = self.finite.leave_out(left_out, self.global_steps, metrics)
        else:
            self.learn(batch, metrics)
            self.finite.learnt(metrics)
        self.end_validation()  # by the weights that the engines have until now
        with self.phase("weight_sync"):
            metrics |= self.sync_weights()
        self.judge_mismatch(metrics)
        return batch

    def pool_of(self, role: str) -> str | None:
        """Return the pool of a role; None where the run has no such role."""
        return self.placement.roles.get(role)

    # ------------------------------------------------------------------ which prompts come

    def draw(self, position: Position, batch_size: int) -> tuple[list[int], Position]:
        """Return the prompts of the next batch: those that `data.sampler` chooses, or the next in order."""
        if self.sampler is None:
            return super().draw(position, batch_size)
        chosen, position = self.sampler.choose(position, batch_size)
        check_choice(self.sampler, chosen, batch_size, len(self.train_dataset))
        return chosen, position

    def show_sampler(self, batch: DataProto) -> None:
        """Show a scored batch to the sampler of prompts; samples that have no score are left out."""
        if self.sampler is None:
            return
        kept = batch.select_idxs(counted_samples(batch))
        scores = kept.batch["plain_scores"].double().numpy()
        right = answers_that_are_correct(kept.non_tensor_batch["reward_parts"].tolist())
        self.sampler.observe(kept, scores, scores >= CORRECT_AT if right is None else np.array(right, dtype=bool))

    def data_metrics(self) -> dict[str, float]:
        """Return the metrics of the data set, and those of the sampler of prompts."""
        return super().data_metrics() | ({} if self.sampler is None else self.sampler.metrics())

    # ------------------------------------------------------------------ hooks

    def on_batch_scored(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Filter or reshape a batch whose rows all have their rewards; called before anything is learnt from it.

        With `algorithm.filter_groups` it is called for every sampled batch, before groups are dropped.
        """
        return batch

    def rows_to_learn(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Return the rows that critic and policy learn from: all of them, or those that `algorithm.pf_ppo` draws."""
        algorithm = self.config.algorithm
        if not algorithm.use_pf_ppo:
            return batch
        drawn, counts = draw_by_score(batch, algorithm.pf_ppo, self._generator("pf_ppo"))
        metrics |= counts
        return drawn

    # ------------------------------------------------------------------ phases

    def _generate_and_sleep(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        batch = self.generate(batch, metrics)
        if not self.config.algorithm.filter_groups.enable:
            self.workers.rollout.sleep_rollout()
        return batch

    @property
    def _shapes_batch(self) -> bool:
        """Whether anything may happen to a batch between its scores and what is computed from its rows."""
        is_replaced = type(self).on_batch_scored is not RayPPOTrainer.on_batch_scored
        return is_replaced or self.config.algorithm.filter_groups.enable

    def _shape_batch(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        batch = self.on_batch_scored(batch, metrics)
        self._show_first(batch)
        if self.config.algorithm.filter_groups.enable:
            batch = self.refill(batch, metrics)
            self.workers.rollout.sleep_rollout()
        return batch

    @property
    def scores_apart(self) -> bool:
        """Whether the reward model's scores are a phase of their own, `rm`, beside which others can run.

        Not where a method of a subclass may do anything to rows, see `model_scores_apart`.
        """
        is_replaced = self._shapes_batch or type(self).compute_reward is not RayPPOTrainer.compute_reward
        return model_scores_apart(self.config) and not is_replaced

    def _score_by_model(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        return self._with_model_scores(batch)

    def _wait_for_functions(self, batch: DataProto, metrics: StepMetrics) -> None:
        self._outcomes = self.rewards.outcomes()
        leave_out_unscored(batch, self._outcomes or ())

    def _combine_scores(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        outcomes, self._outcomes = self._outcomes, None
        return self._score(batch, metrics, self.rewards.collect(batch, metrics, outcomes=outcomes))

    def _look_at(self, batch: DataProto, phase: str) -> None:
        is_scored = "token_level_scores" in batch.batch.keys()
        if phase in ("gen", "rm") or (phase == "reward" and (self._shapes_batch or not is_scored)):
            return
        if phase == "reward":
            self._show_first(batch)
        self.finite.look(batch, "reward" if phase == "scored" else phase)

    def _show_first(self, batch: DataProto) -> None:
        if self.global_steps == 1:
            self.reporter.first_look(first_look(rollout_records(batch, self.tokenizer), self.config))

    def _compare_all_with_sampler(self, batch: DataProto, metrics: StepMetrics) -> None:
        self.compare_with_sampler(batch, (), metrics)

    def generate(self, batch: DataProto, metrics: StepMetrics, wave: int = 0) -> DataProto:
        """Sample `rollout.n` responses per prompt; finished ones are scored while the others are still generated.

        Args:
            batch: One row per prompt.
            metrics: Receives the engines' counts.
            wave: How many batches the step has sampled before this one.
        """
        return self._sample(batch, metrics, wave=wave)

    def refill(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Drop groups without spread and sample further prompts until the batch is full (DAPO's dynamic sampling).

        Engines stay awake meanwhile: a reward model on the same devices scores beside them.

        Raises:
            DynamicSamplingError: `algorithm.filter_groups.max_num_gen_batches` batches did not suffice.
        """
        settings, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        groups = self.group_filter(settings, wanted, self.global_steps)
        groups.add(batch)
        while not groups.is_full:
            with self.phase("gen"):
                more = self.generate(self.next_batch(), metrics, wave=groups.num_batches)
            with self.phase("reward"):
                more = self.compute_reward(more, metrics)
            groups.add(self.on_batch_scored(more, metrics))
        batch, counts = groups.full_batch()
        metrics |= counts
        return batch

    @property
    def looks_ahead(self) -> bool:
        """Whether a validation and the samples of the next step may be drawn at the same time.

        Not if a sampler chooses the prompts, whose state is in checkpoints; if rows are streamed, and may turn out bad;
        if a reward model would score a validation beside engines that sample; if episodes are played, since ranks pull
        the turns of one batch until it is over, and turns of another would wait half sampled; or if a subclass samples
        in its own way.
        """
        draws_late = self.sampler is not None or getattr(self.train_dataset, "is_streamed", False)
        return (
            not (draws_late or self.use_rm or self.episodes is not None)
            and type(self).generate is RayPPOTrainer.generate
        )

    def look_ahead(self, upcoming: DataProto) -> None:
        """Begin the samples of the validation, and beside them those of the next step.

        So both share the engines' iterations, and wait for their longest responses together. `validate` and `generate`
        ask for them as ever.
        """
        with self.phase("testing"):
            self._begun = [
                self._asked(self._validation_prompts(), self.global_steps, validate=True),
                self._asked(upcoming, self.global_steps + 1),
            ]
            if self._goes_on_beside_validation:  # the trainer waits for those of the step
                self._begun.reverse()
            for asked in self._begun:
                self.workers.rollout.begin_sampling(asked.rows, asked.request)

    @property
    def validates_beside(self) -> bool:
        """Whether a validation may go on while the next step trains, since engines have devices of their own.

        Not with `algorithm.filter_groups`, where a step asks the engines for what they have not begun, and not in a
        subclass that makes steps, validates or looks at a step's metrics in its own way.
        """
        own = ("train_step", "validate", "on_step_end")
        is_replaced = any(getattr(type(self), name) is not getattr(RayPPOTrainer, name) for name in own)
        engines = self.placement.rollout
        trains_apart = self.placement.trains and engines != self.placement.actor and self.placement.is_apart(engines)
        return trains_apart and not is_replaced and not self.config.algorithm.filter_groups.enable

    def _sample(
        self,
        prompts: DataProto,
        metrics: StepMetrics,
        *,
        validate: bool = False,
        wave: int = 0,
        step: int | None = None,
    ) -> DataProto:
        step = self.global_steps if step is None else step
        seed = seed_of(self.config.trainer.seed, validate=validate)
        asked = next((begun for begun in self._begun if begun.is_for(prompts, step, seed)), None)
        if asked is None:
            self._begun = []  # the engines drop it too
            asked = self._asked(prompts, step, validate=validate, wave=wave)
        else:
            self._begun.remove(asked)
        sampled = self._responses(asked, metrics)
        if self.episodes is not None:
            require_sampled(sampled, self.config)
        check_policy_version(sampled, self.policy_version)
        metrics.observe(count_troubles(sampled))
        if asked.request.with_experts:
            share_known_experts(sampled)
        return sampled

    def _asked(self, prompts: DataProto, step: int, *, validate: bool = False, wave: int = 0) -> Asked:
        settings = self.config.actor_rollout_ref.rollout
        samples, with_greedy = settings.n, self.estimator.needs_baseline
        if validate:
            samples, with_greedy = settings.val_kwargs.n, False
        rows = prompt_batch(prompts, samples, step=step, validate=validate, wave=wave, with_greedy=with_greedy)
        request = self._request(
            rows,
            step,
            sampling_of(settings, self.config.data.max_response_length, validate=validate),
            seed_of(self.config.trainer.seed, validate=validate),
            with_greedy=with_greedy,
            reward_round=self.rewards.begin(rows, step, validate=validate),
            with_experts=self._router_replay == "R3" and not validate,
        )
        return Asked(prompts, rows, request, validate)

    def _request(
        self,
        rows: DataProto,
        step: int,
        sampling: SamplingParams,
        seed: int,
        *,
        with_greedy: bool = False,
        reward_round: int | None = None,
        with_experts: bool = False,
    ) -> SampleRequest[BatchPlan]:
        rollout, parallel = self.workers.rollout, self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        return SampleRequest(
            plan=plan_generation(rows.non_tensor_batch["uid"], rollout.world_size, parallel),
            sampling=sampling,
            seed=seed,
            step=step,
            with_greedy=with_greedy,
            reward_round=reward_round,
            with_experts=with_experts,
            with_pictures=has_pictures(rows.non_tensor_batch),
        )

    def _responses(self, asked: Asked, metrics: StepMetrics) -> DataProto:
        """Return the rows with a response each, or those of their episodes, by the weights that the engines have."""
        if self.episodes is not None:
            return self.episodes.play(asked, self.workers.rollout, metrics)
        sampled = self.workers.rollout.generate_sequences(asked.rows, asked.request)
        # The sampler's columns are prompt and response together; they replace the prompt's own.
        return asked.rows.select(batch_keys=[]).union(sampled)

    def answer(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        n: int = 1,
        *,
        with_log_probs: bool = False,
    ) -> list[dict[str, Any]]:
        """Return `n` responses to each prompt, by the present weights; they are neither scored nor trained on.

        Args:
            rows: As in `data.train_files`.
            sampling: How they are sampled; the length is at most `data.max_response_length`.
            n: Responses to each prompt, in a row.
            with_log_probs: Whether a record has `logprobs`, the sampler's log-probabilities of the response's tokens;
                None of those that an environment said.

        Returns:
            A record for each response, as in the folder `rollouts`.

        Raises:
            DatasetError: A prompt can't be used, even where the run's own rows are left out for it: responses are
                matched with prompts by their order.
        """
        self.prepare()
        dataset = self.seen(self.train_dataset.of_prompts(rows))
        dataset.require_all()
        prompts, step = dataset.batch(range(len(dataset))), self.global_steps
        samples = prompt_batch(prompts, n, step=step, validate=True)
        request = self._request(samples, step, sampling, seed_of(self.config.trainer.seed, validate=True))
        self._begun = []
        sampled = self._responses(Asked(prompts, samples, request, validate=True), StepMetrics())
        records = rollout_records(sampled, self.tokenizer)
        if self.episodes is not None and (failed := [record for record in records if record["end"] == "failed"]):
            first = next(error for error in sampled.non_tensor_batch["episode_error"] if error)
            self.reporter.console.note(f"{len(failed)} of {len(records)} episodes failed; the first: {first}")
        if with_log_probs:
            # A record's response is that of the episode's last row.
            heads = range(len(records)) if self.episodes is None else heads_of(sampled).tolist()
            columns = sampled.batch
            for record, row in zip(records, heads, strict=True):
                length = record["response_length"]
                of_tokens = columns["rollout_log_probs"][row, :length].tolist()
                is_sampled = columns["response_mask"][row, :length].tolist()
                record["logprobs"] = [
                    one if sampled else None for one, sampled in zip(of_tokens, is_sampled, strict=True)
                ]
        return records

    def compute_reward(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Score every response: reward functions, reward model, or both combined.

        Adds `token_level_scores (B, R)`, the score on the last token of the response, and `plain_scores (B,)`, the
        reward function's own. Greedy responses leave the batch; their scores stay as `reward_baselines (B,)`.
        """
        batch = self._with_model_scores(batch)
        if self.episodes is None:
            return self._score(batch, metrics, self.rewards.collect(batch, metrics))
        return self._score(
            batch, metrics, score_episodes(batch, self.rewards, self.config.environment, metrics, validate=False)
        )

    def _score(self, batch: DataProto, metrics: StepMetrics, scored: CombinedScores | EpisodeScores) -> DataProto:
        if isinstance(scored, EpisodeScores):
            batch.batch["token_level_scores"] = scored.tokens
        else:
            batch.batch["token_level_scores"] = place_scores(scored.scores, batch.batch["response_mask"])
            if "rm_step_scores" in batch.batch:
                of_steps = self.config.reward.reward_model.weight * batch.batch["rm_step_scores"]
                of_steps = of_steps * batch.batch["response_mask"]
                batch.batch["token_level_scores"] += of_steps
                scored = replace(scored, scores=scored.scores + of_steps.sum(-1))
        batch.batch["plain_scores"] = scored.plain
        if self.estimator.needs_baseline:
            batch, counts = take_baselines(batch, scored.scores, scored.kept)
            metrics.observe(counts)
        self.show_sampler(batch)
        return batch

    def _with_model_scores(self, batch: DataProto) -> DataProto:
        if not self.use_rm:
            return batch
        if self.config.reward.reward_model.step_token is not None:
            return self._with_step_scores(batch)
        rm, limits = self.workers.rm, self.limits["rm"]
        rows, places = batch, slice(None)
        if self.reward_model_rows is not None:
            rows, places = self.reward_model_rows.of(batch, limits)
        plan = self.planner.forward(rows, rm.world_size, limits)
        request = ScalarRequest(plan=plan, with_pictures=has_pictures(rows.non_tensor_batch))
        scores = torch.zeros(len(batch))
        scores[places] = rm.compute_rm_score(rows, request).batch["rm_scores"].float()
        return batch.union(DataProto.from_dict(tensors={"rm_scores": scores}))

    def _with_step_scores(self, batch: DataProto) -> DataProto:
        assert self.reward_model_rows is not None, "a process reward model is shown marked steps"
        rm, limits = self.workers.rm, self.limits["rm"]
        steps, marks = self.reward_model_rows.of_steps(batch, limits), self.reward_model_rows.steps
        plan = self.planner.forward(steps.rows, rm.world_size, limits)
        request = ScalarRequest(plan=plan, reward_ids=None if marks is None else marks.reward_ids)
        scores = rm.compute_step_scores(steps.rows, request).batch["rm_step_scores"]
        placed, means = steps.place(scores, batch.batch["responses"].shape[1])
        return batch.union(DataProto.from_dict(tensors={"rm_step_scores": placed, "rm_scores": means}))

    @property
    def _router_replay(self) -> str:
        return self.config.actor_rollout_ref.actor.router_replay.mode

    @property
    def bypasses(self) -> bool:
        """Whether this step takes the sampler's log-probs for the old ones (in bypass mode, unless they drifted)."""
        return self.config.algorithm.rollout_correction.bypass_mode and not self.drift_gate.is_closed

    def compute_old_log_prob(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Add `old_log_probs (B, R)` of the policy that sampled, as the trainer computes them.

        With `algorithm.rollout_correction` also add `rollout_is_weights (B, R)` and take rejected tokens out of the
        response mask. In bypass mode the update does both, and the sampler's log-probs are taken unless they drifted.
        """
        if self.bypasses:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
            return batch
        actor, correction = self.workers.actor, self.config.algorithm.rollout_correction
        plan = self.planner.forward(batch, actor.world_size, self.limits["log_prob"])
        request = LogProbRequest(
            plan=plan,
            temperature=temperature_of(batch.meta_info),
            with_sum_pi_squared=self.estimator.needs_sum_pi_squared,
            replays_experts=self._router_replay == "R3",
            records_experts=self._router_replay == "R2",
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        batch = batch.union(actor.compute_log_prob(batch, request))
        self.finite.look(batch, "old_log_prob")  # before the correction, which would reject such a token
        columns = batch.batch
        metrics.observe(sampler_drift(columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]))
        if correction.corrects and not correction.bypass_mode:
            batch, counts = correct_for_sampler(batch, correction)
            metrics.observe(counts)
        return batch

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Add `ref_log_prob (B, R)` of the reference policy, or of a teacher, and what else is read of the teacher."""
        num_top = self.config.num_teacher_tokens
        if self.teacher is not None:
            return batch.union(self.teacher.score(batch, num_top))
        is_actor = self.config.reference_is_actor
        ref = self.workers.actor if is_actor else self.workers.ref
        plan = self.planner.forward(batch, ref.world_size, self.limits["ref"])
        request = LogProbRequest(
            plan=plan,
            temperature=temperature_of(batch.meta_info),
            without_adapter=is_actor,
            num_top=num_top,
            with_states=self.config.reads_whole_teacher,
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        return batch.union(ref.compute_ref_log_prob(batch, request))

    def compute_values(self, batch: DataProto) -> DataProto:
        """Add the critic's `values (B, R)`, and `bootstrap_values (B,)` where episodes that were cut off end in one."""
        critic = self.workers.critic
        plan = self.planner.forward(batch, critic.world_size, self.limits["values"])
        request = ScalarRequest(plan=plan, with_pictures=has_pictures(batch.non_tensor_batch))
        batch = batch.union(critic.compute_values(batch, request))
        if self.episodes is not None and self.config.environment.on_truncation == "bootstrap":
            batch.batch["bootstrap_values"] = values_behind_truncations(batch, self._last_values)
        return batch

    def _last_values(self, batch: DataProto) -> torch.Tensor:
        critic = self.workers.critic
        plan = self.planner.forward(batch, critic.world_size, self.limits["values"])
        values: torch.Tensor = critic.compute_last_values(batch, ScalarRequest(plan=plan)).batch["last_values"]
        return values

    def compute_advantage(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Add `token_level_rewards`, `advantages` and `returns`, each (B, R); without rewards what a teacher says."""
        algorithm = self.config.algorithm
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty)
            metrics |= kl_metrics
            self.finite.look(batch, "adv")
        elif self.rewards.scores_steps:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        if self.rewards.scores_steps:
            columns = advantage_columns(self.config)
            batch = compute_advantage(batch, algorithm.adv_estimator, config=algorithm, columns=columns)
        if self.config.distils_by_reward:
            metrics |= add_teacher_advantages(batch, self.config.distillation.distillation_loss)
        return batch

    def update_critic(self, batch: DataProto, metrics: StepMetrics) -> None:
        """Teach the critic the returns."""
        settings = self.config.critic
        plan = self.planner.update(
            batch,
            self.workers.critic.world_size,
            self.limits["critic"],
            mini_batch_rows=settings.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n,
            epochs=settings.ppo_epochs,
            shuffle_seed=self._shuffle_seed(),
        )
        has_branches = count_episode_tokens(batch)
        request = ValueUpdate(
            plan=plan,
            step=self.global_steps,
            has_branches=has_branches,
            loss=settings,
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        metrics.observe(*self.workers.critic.update_critic(batch, request))

    def compare_with_sampler(self, batch: DataProto, compared: Collection[int], metrics: StepMetrics) -> None:
        """Compare sampler and trainer on rows that the coming update leaves out, if it runs too few to judge by.

        Do nothing if all rows were compared when the old log-probs were computed.

        Args:
            batch: The step's samples.
            compared: The rows that the update compares itself. These are the rows of its first optimizer step, which
                still has the weights that sampled.
            metrics: Receives `rollout/logprob_diff_*`, `rollout_corr/*` and `actor/entropy` of the other rows; those
                of the update are merged with them.
        """
        if not update_measures_mismatch(self.config, bypasses=self.bypasses):
            return
        has_tokens = batch.batch["response_mask"].bool().any(-1)
        metrics.observe({"rollout/logprob_diff_rows": Metric.total(has_tokens[list(compared)].sum())})
        rows = spot_check(batch, compared)
        if not len(rows):
            return
        actor, sample = self.workers.actor, batch.select_idxs(rows)
        plan = self.planner.forward(sample, actor.world_size, self.limits["log_prob"])
        request = LogProbRequest(
            plan=plan,
            temperature=temperature_of(batch.meta_info),
            with_entropy=True,
            replays_experts=self._router_replay == "R3",
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        scored, mask = actor.compute_log_prob(sample, request).batch, sample.batch["response_mask"]
        metrics.observe(sampler_drift(scored["old_log_probs"], sample.batch["rollout_log_probs"], mask))
        entropies = scored["entropys"][mask.bool()]
        metrics.observe({"actor/entropy": Metric.mean(entropies.sum(), entropies.numel())})

    def update_actor(self, batch: DataProto, metrics: StepMetrics) -> None:
        """Move the policy along the advantages. Rows that cannot move it count in the divisor and are not run.

        `actor/rows_run` is the number of rows that are run. Means over tokens, such as `actor/ppo_kl` and
        `actor/pg_clipfrac`, are means over these rows. `actor/shared_tokens` says how much of them is computed once.
        """
        settings, correction = self.config.actor_rollout_ref.actor, self.config.algorithm.rollout_correction
        loss = settings.policy_loss.loss_mode
        if loss in TOKEN_SELECTORS and "advantages" in batch.batch:  # else a teacher alone is learnt from
            metrics |= mark_tokens(batch, settings, self._generator("selected_tokens"))
        if correction.bypass_mode:
            loss = bypass_loss_name(loss, correction)
        only_policy_loss = not (settings.use_kl_loss or settings.entropy_coeff or self.config.distils_by_loss)
        may_skip = only_policy_loss and policy_loss_traits(loss).zero_at_zero_advantage
        plan = self.planner.update(
            batch,
            self.workers.actor.world_size,
            self.limits["actor"],
            mini_batch_rows=settings.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n,
            epochs=settings.ppo_epochs,
            skip=rows_without_advantage(batch) if may_skip else None,
            shuffle_seed=self._shuffle_seed(),
        )
        self.compare_with_sampler(batch, rows_of_first_step(plan), metrics)
        metrics["actor/rows_run"] = float(sum(map(len, plan.rows)))
        if (shared := self.planner.shared_tokens(batch, plan)) is not None:
            metrics["actor/shared_tokens"] = shared
        request = policy_update(
            self.config,
            plan,
            step=self.global_steps,
            temperature=temperature_of(batch.meta_info),
            bypasses=self.bypasses,
            has_branches=count_episode_tokens(batch),
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        metrics.observe(*self.workers.actor.update_actor(batch, request))

    def judge_mismatch(self, metrics: dict[str, float]) -> None:
        """Decide whether the next step may take the sampler's log-probs, which are compared with the trainer's."""
        with_sample_sizes(metrics)
        drift = metrics.get("rollout/logprob_diff_mean")
        if self.config.algorithm.rollout_correction.bypass_mode:
            metrics["rollout_corr/recomputed"] = float(self.drift_gate.is_closed)
            moved = self.drift_gate.judge(drift)
            if moved is not None:
                self.reporter.console.note(moved)

    def _shuffle_seed(self) -> int | None:
        shuffle = self.config.actor_rollout_ref.actor.shuffle
        return self.config.trainer.seed + self.global_steps if shuffle else None

    def _generator(self, purpose: str) -> torch.Generator:
        return step_generator(self.config.trainer.seed, self.global_steps, purpose)

    def sync_weights(self) -> dict[str, float]:
        """Give the engines the policy's weights, with the step's number as their version; returns its metrics.

        Also after a step that did not train the policy (critic warm-up), so that the version is always the last step.
        """
        metrics = self.workers.sync_weights(
            self.global_steps, self.config.actor_rollout_ref.rollout.weight_sync.driver_timeout_s
        )
        self.policy_version = self.global_steps
        return metrics

    # ------------------------------------------------------------------ validation

    def validate(self) -> dict[str, float]:
        """Sample `val_kwargs.n` answers to every validation prompt; returns `val/...` metrics.

        The score is the reward function's own (the reward model's where there is none), without weights and penalties.
        Samples that the function left out are counted in `val/<source>/skipped` and in nothing else. Errors of rewards
        and engines are counted in `val/reward/...` and `val/rollout/...`, see `validation_troubles`.
        """
        if self.val_dataset is None:
            return {}
        with self.phase("testing"):
            batch, counters = self._validation_samples(self.global_steps)
        return self._judged(self.global_steps, batch, counters)

    def finish_validation(self, step: int) -> dict[str, float]:
        """Return what `validate` would have returned after an earlier step, whose weights the engines still have."""
        if self._validated is None:  # nothing was learnt, beside which it could have been waited for
            with self.phase("testing"):
                self._validated = self._validation_samples(step)
        (batch, counters), self._validated = self._validated, None
        return self._judged(step, batch, counters)

    def _wait_for_validation(self, batch: DataProto, metrics: StepMetrics) -> None:
        assert self._in_validation is not None, "there is one"
        self._validated = self._validation_samples(self._in_validation)

    def _validation_samples(self, step: int) -> tuple[DataProto, StepMetrics]:
        """Return the scored samples of the validation after a step, and what was counted on the way."""
        counters = StepMetrics()
        return self._validate_batch(self._validation_prompts(), counters, step), counters

    def _judged(self, step: int, batch: DataProto, counters: StepMetrics) -> dict[str, float]:
        """Return the `val/...` metrics of scored samples, and write these down."""
        kept = batch.pop(["kept"]).batch["kept"]
        counted = batch if self.episodes is None else batch.select_idxs(heads_of(batch))  # an episode counts once
        kept_samples = kept if self.episodes is None else kept[heads_of(batch)]
        scored, left_out = batch.select_idxs(kept), count_left_out(counted, kept_samples)
        if left_out:
            count = f"{sum(left_out.values()):g} of {len(counted)} samples"
            others = "" if self.episodes is None else "an environment that failed or was late, or "
            self.reporter.console.note(f"validation: {others}the reward function left out {count}")
        metrics: dict[str, float] = {}
        if self.rewards.scores_validations:
            metrics = validation_metrics(
                counted.select_idxs(kept_samples), self.config.actor_rollout_ref.rollout.val_kwargs.n
            )
        if self.keeps_validation_samples:
            tracked, samples = self.config.trainer.log_val_generations, rollout_records(scored, self.tokenizer)
            self._write_pictures(scored)
            self.reporter.validation_samples(step, samples, tracked=tracked)
        return metrics | left_out | validation_troubles(counters) | validation_episodes(counters)

    def _validation_prompts(self) -> DataProto:
        rows = self.val_dataset
        assert rows is not None, "there is something to validate on"
        prompts: DataProto = rows.batch(range(len(rows)))
        return prompts

    def _validate_batch(self, prompts: DataProto, counters: StepMetrics, step: int) -> DataProto:
        batch = self._with_model_scores(self._sample(prompts, counters, validate=True, step=step))
        if self.episodes is not None:
            of_rows = score_episodes(batch, self.rewards, self.config.environment, counters, validate=True)
            heads = heads_of(batch)
            scores = batch.batch["rollout_log_probs"].new_zeros(batch.batch["response_mask"].shape)
            scores[heads, 0] = of_rows.plain[heads]  # also of an episode in which nothing was sampled
            batch.batch["token_level_scores"], batch.batch["plain_scores"] = scores, of_rows.plain
            batch.batch["kept"] = of_rows.kept
            return batch
        if not self.rewards.scores_validations:
            batch.batch["kept"] = torch.ones(len(batch), dtype=torch.bool)
            return batch
        combined = self.rewards.collect(batch, counters, validate=True)
        batch.batch["token_level_scores"] = place_scores(combined.plain, batch.batch["response_mask"])
        batch.batch["kept"] = combined.kept
        return batch

    # ------------------------------------------------------------------ what is reported

    def describe(self, batch: DataProto) -> dict[str, float]:
        """Return scores, rewards, advantages and lengths of a step's samples, under verl's names."""
        whole = not self.finite.left_out
        return compute_data_metrics(batch, use_critic=self.use_critic and whole, has_advantages=whole)

    def validation_score(self, metrics: Mapping[str, float]) -> float | None:
        """Return the mean score of the validation, over its sources."""
        return health.validation_score(metrics)

    def report_samples(self, batch: DataProto) -> None:
        """Write the step's samples to the run folder, and show some every `trainer.log_rollouts_freq` steps."""
        shown = self.is_due(self.config.trainer.log_rollouts_freq)
        samples = rollout_records(batch, self.tokenizer)
        self._write_pictures(batch)
        self.reporter.samples(self.global_steps, samples, show=shown)
        self.callbacks.on_rollouts(self.run_state, samples)

    def _write_pictures(self, batch: DataProto) -> None:
        folder = self.reporter.folder
        folder.write_pictures(thumbnails(batch, folder.rollouts))

    # ------------------------------------------------------------------ checkpoints

    @property
    def save_contents(self) -> Sequence[str]:
        """What a checkpoint holds (`actor.checkpoint.save_contents`)."""
        return self.config.actor_rollout_ref.actor.checkpoint.save_contents

    def state(self) -> dict[str, Any]:
        """Return KL coefficient, position of the drift gate, statistics that shape rewards, bad batches in a row."""
        return {
            "kl_coef": self.kl_ctrl.value,
            "drift_gate_closed": self.drift_gate.is_closed,
            "reward_shaping": self.rewards.shaping.state_dict(),
            "nonfinite_in_a_row": self.finite.in_a_row,
            **({} if self.sampler is None else {SAMPLER: self.sampler.state_dict()}),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; a fixed KL coefficient stays the configuration's."""
        self._restore_kl_coef(state["kl_coef"])
        self.drift_gate.is_closed = state["drift_gate_closed"]
        self.rewards.shaping.load_state_dict(state["reward_shaping"])
        self.finite.in_a_row = state["nonfinite_in_a_row"]
        if self.sampler is not None and self.data_position != Position():  # of the same data
            self.sampler.load_state_dict(state[SAMPLER])

    def _restore_kl_coef(self, saved: float) -> None:
        if isinstance(self.kl_ctrl, AdaptiveKLController):
            self.kl_ctrl.value = saved
        elif self.kl_ctrl.value != saved:
            now = self.kl_ctrl.value
            self.reporter.console.note(f"algorithm.kl_ctrl.kl_coef is {now:g} from here on; it was {saved:g}")


def _without_metrics(method: Callable[[DataProto], DataProto]) -> Callable[[DataProto, StepMetrics], DataProto]:
    return lambda batch, _: method(batch)


def _sampler_of(config: PPOTrainerConfig, train_dataset: Any) -> PromptSampler | None:
    settings, seed = config.data.sampler, config.data.seed
    return None if settings is None else load_sampler(settings, train_dataset, seed, config.data)
