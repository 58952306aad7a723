"""Online DPO: the policy samples, the reward ranks, and the best sample of each prompt is preferred to the worst.

Guo et al. 2024 (arXiv:2402.04792), with the reward in the place of their annotator. Sampling, rewards, validation,
weight sync and checkpoints are PPO's; the update is that of DPO, on one pair per prompt.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hrl.algos.groups import best_against_worst, group_codes
from hrl.algos.preference import PairOptions
from hrl.metrics import StepMetrics
from hrl.pictures import has_pictures
from hrl.protocol import DataProto
from hrl.trainer.ppo.metrics import compute_data_metrics
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.workers.requests import PreferenceUpdate, temperature_of


class OnlineDPOTrainer(RayPPOTrainer):
    """Learns from pairs of its own samples, by `algorithm.preference_loss`."""

    def on_batch_scored(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Add `preference (B,)`: 1 for the best sample of a prompt, -1 for the worst, 0 for the others.

        Prompts whose samples are all worth the same have no pair; an empty answer is in none.
        """
        columns = batch.batch
        counted = columns["response_mask"].bool().any(-1)
        groups = group_codes(batch.non_tensor_batch["uid"])
        best, worst = best_against_worst(columns["token_level_scores"].sum(-1), groups, counted)
        columns["preference"] = torch.zeros(len(batch), dtype=torch.int64)
        columns["preference"][best], columns["preference"][worst] = 1, -1
        return batch

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Add `ref_sequence_log_prob (B,)` float64 of the samples that are in a pair."""
        sums = torch.zeros(len(batch), dtype=torch.float64)
        rows = batch.batch["preference"].nonzero().flatten()
        if len(rows):
            found = super().compute_ref_log_prob(batch.select_idxs(rows))
            sums[rows] = found.batch["ref_log_prob"].double().sum(-1)
        batch.batch["ref_sequence_log_prob"] = sums
        return batch

    def compute_advantage(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Return the batch as it is: pairs have no advantages."""
        return batch

    def describe(self, batch: DataProto) -> dict[str, float]:
        """Return the scores and lengths of a step's samples."""
        return compute_data_metrics(batch, use_critic=False, has_advantages=False)

    def rows_to_learn(self, batch: DataProto, metrics: StepMetrics) -> DataProto:
        """Return the pairs: the best and the worst sample of each prompt, one after the other.

        If there are few pairs or none, sampler and trainer are also compared on other samples.
        """
        preference, groups = batch.batch["preference"], group_codes(batch.non_tensor_batch["uid"])
        best, worst = (
            rows[groups[rows].argsort()] for rows in ((preference == sign).nonzero().flatten() for sign in (1, -1))
        )
        rows = torch.stack([best, worst], dim=1).flatten()
        first_step = rows[: 2 * self.config.actor_rollout_ref.actor.ppo_mini_batch_size].tolist()
        with self.phase("old_log_prob"):
            self.compare_with_sampler(batch, first_step, metrics)
        pairs = batch.select_idxs(rows)
        pairs.batch["is_chosen"] = pairs.batch["preference"] == 1
        metrics["rollout/pairs"] = float(len(best))
        return pairs

    def update_actor(self, batch: DataProto, metrics: StepMetrics) -> None:
        """Learn from the pairs by the preference loss, `ppo_mini_batch_size` of them per optimizer step."""
        if not len(batch):
            self.reporter.console.note(f"step {self.global_steps}: no two samples of a prompt differ, nothing to learn")
            return
        actor, settings = self.workers.actor, self.config.actor_rollout_ref.actor
        limits = self.limits["actor"]
        plan = self.planner.pairs(
            batch,
            actor.world_size,
            replace(limits, max_rows=None if limits.max_rows is None else limits.max_rows // 2),
            mini_batch_pairs=settings.ppo_mini_batch_size,
            epochs=settings.ppo_epochs,
        )
        request = PreferenceUpdate(
            plan=plan,
            step=self.global_steps,
            router_aux_loss_coef=settings.router_aux_loss_coef,
            replays_experts=settings.router_replay.mode == "R3",
            temperature=temperature_of(batch.meta_info),
            loss_type=str(self.config.algorithm.preference_loss),  # named wherever this trainer runs
            options=PairOptions(beta=self.kl_ctrl.value),
            has_reference=self.use_reference_policy,
            measures_mismatch=True,
            with_pictures=has_pictures(batch.non_tensor_batch),
        )
        metrics.observe(*actor.update_actor(batch, request))
