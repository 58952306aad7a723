"""Groups that teach nothing are dropped and others sampled in their place (DAPO, arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import ClassVar

from hrl.algos.groups import filter_groups, group_codes
from hrl.config.algorithm import FilterGroupsConfig
from hrl.errors import HrlError
from hrl.protocol import DataProto
from hrl.trainer.ppo.reward_parts import reward_values
from hrl.trainer.ppo.samples import counted_samples


class DynamicSamplingError(HrlError, RuntimeError):
    """Too few groups have a spread to fill a batch within the bound.

    A smaller batch is not trained on in its place: it would be another algorithm in the steps that are the hardest to
    fill, a full step of the learning rate from a few groups.
    """


class GroupFilter:
    """Collects the groups with spread of the batches that one step samples, until there are enough for a batch.

    Args:
        settings: `algorithm.filter_groups`.
        num_groups: Groups of a full batch.
        step: For errors.

    Attributes:
        rule: A key of `hrl.algos.groups.GROUP_FILTERS`; a subclass names another, and a subclass of the trainer that
            subclass as its `group_filter`.
    """

    rule: ClassVar[str] = "spread"

    def __init__(self, settings: FilterGroupsConfig, num_groups: int, step: int) -> None:
        self._settings = settings
        self._wanted = num_groups
        self._step = step
        self._kept: list[DataProto] = []
        self._num_kept = 0
        self._dropped: Counter[str] = Counter()
        self.num_batches = 0

    @property
    def is_full(self) -> bool:
        """Whether the groups suffice for a batch."""
        return self._num_kept >= self._wanted

    def add(self, batch: DataProto) -> None:
        """Take the groups with spread of a scored batch.

        Raises:
            ValueError: The metric is no number that every sample has.
            DynamicSamplingError: The bound is reached and the batch not full.
        """
        self.num_batches += 1
        values = reward_values(batch, self._settings.metric, "algorithm.filter_groups.metric")
        groups = group_codes(batch.non_tensor_batch["uid"])
        counted = counted_samples(batch)
        keep = filter_groups(self.rule, values, groups, counted)
        for group in groups[~keep].unique().tolist():
            of_group = values[(groups == group) & counted]
            self._dropped[f"{float(of_group[0]):g}" if len(of_group) else "no score"] += 1
        self._num_kept += groups[keep].unique().numel()
        if keep.any():
            self._kept.append(batch.select_idxs(keep))
        if not self.is_full and self.num_batches >= self._settings.max_num_gen_batches:
            raise DynamicSamplingError(self._describe_failure())

    def full_batch(self) -> tuple[DataProto, dict[str, float]]:
        """Return the first groups that were kept, as many as a batch has, and what became of the others.

        Groups beyond the batch are not kept for the next step: they would be samples of an older policy.
        """
        batch = DataProto.concat(self._kept)
        batch = batch.select_idxs(group_codes(batch.non_tensor_batch["uid"]) < self._wanted)
        return batch, {
            "rollout/filter_groups/gen_batches": float(self.num_batches),
            "rollout/filter_groups/dropped": float(self._dropped.total()),
            "rollout/filter_groups/surplus": float(self._num_kept - self._wanted),
        }

    def _describe_failure(self) -> str:
        metric, bound = self._settings.metric, self._settings.max_num_gen_batches
        found = ", ".join(f"{count} groups with {value} everywhere" for value, count in self._dropped.most_common(4))
        return (
            f"step {self._step}: {bound} batches of prompts were sampled, and {self._num_kept} of the {self._wanted} "
            f"groups that a batch needs differ in {metric!r} ({found}). {self._more_batches()}, take prompts that are "
            "neither always nor never solved, sample more per prompt (actor_rollout_ref.rollout.n), or set "
            "algorithm.filter_groups.enable=false, which trains on the groups that differ among those that do not. "
            "The same command goes on from the last checkpoint, where trainer.save_freq has left one"
        )

    def _more_batches(self) -> str:
        key = "algorithm.filter_groups.max_num_gen_batches"
        if not self._num_kept:
            return f"With none found, more batches promise little: instead of raising {key}"
        needed = ceil(self._wanted * self.num_batches / self._num_kept)
        return f"At this rate it takes {needed} batches: raise {key} above that, lower data.train_batch_size"
