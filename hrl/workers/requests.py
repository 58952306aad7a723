"""What the driver asks of the ranks, as values that it decides once and sends with the batch.

A request carries the plan of its rows and names the columns that it reads. Only these columns travel, and the driver
refuses a batch that lacks one. A rank gets the same request with its own part of the plan, and infers nothing from what
its batch has or lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hrl.pictures import MULTI_MODAL_DATA
from hrl.routing import ROUTED_EXPERTS

if TYPE_CHECKING:
    from hrl.algos.preference import LabelledOptions, PairOptions
    from hrl.batching.plan import BatchPlan, RankPlan
    from hrl.config.actor import ActorConfig
    from hrl.config.algorithm import RolloutCorrectionConfig
    from hrl.config.critic import CriticConfig
    from hrl.config.distillation import DistillationLossConfig
    from hrl.config.model import OptimConfig

P = TypeVar("P", bound="BatchPlan | RankPlan")

#: Of each row, the log-probs of a teacher's most likely tokens at its trained tokens, `(n, K)` float32, and their ids,
#: `(n, K)` int32, where n is the number of trained tokens.
TEACHER_LOG_PROBS, TEACHER_IDS = "teacher_log_probs", "teacher_ids"
#: Likewise a teacher's last hidden states, `(n, H)` float32.
TEACHER_STATES = "teacher_states"
#: What a model reads of a row.
ROW_COLUMNS = frozenset({"prompts", "responses", "attention_mask", "response_mask", "uid"})


@dataclass(frozen=True, kw_only=True)
class Request(Generic[P]):
    """A pass over a batch.

    Attributes:
        plan: Which rank runs which rows; on a rank, what it runs.
        with_pictures: Prompts show pictures, which the column `multi_modal_data` has.
    """

    plan: P
    with_pictures: bool = False

    @property
    def rows(self: Request[BatchPlan]) -> Sequence[Sequence[int]]:
        """The rows of the batch that each rank gets."""
        return tuple(rows for rows in self.plan.rows for _ in range(self.plan.ranks_each))

    @property
    def ranks_each(self: Request[BatchPlan]) -> int:
        """Consecutive ranks that run the same rows together, of which the first one's results are those of all."""
        return self.plan.ranks_each

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns, tensors and others, that the ranks read."""
        return ROW_COLUMNS | self._shown

    @property
    def _shown(self) -> frozenset[str]:
        return frozenset({MULTI_MODAL_DATA} if self.with_pictures else ())

    def for_rank(self: Request[BatchPlan], rank: int) -> Request[RankPlan]:
        """Return what that rank is asked for."""
        whole: Any = self
        return replace(whole, plan=self.plan.ranks[rank // self.plan.ranks_each])


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: Nucleus size; 1 is off.
        top_k: Number of most likely tokens to draw from; -1 is off.
        max_tokens: Longest response, in tokens.
        seed: Of this response alone.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleRequest(Request[P]):
    """One response to every row; its columns are those of a prompt.

    Attributes:
        sampling: How every response is sampled; each gets a seed of its own.
        seed: Of all samples: a sample's own seed comes from it, the step, the row's `uid` and its `sample_index`.
        step: Of the run.
        with_greedy: Rows marked `greedy` take the most likely tokens.
        reward_round: The number under which finished samples are sent to the rewards; None sends them nowhere.
        with_experts: Also return `routed_experts`.
    """

    sampling: SamplingParams
    seed: int
    step: int
    with_greedy: bool
    reward_round: int | None
    with_experts: bool = False

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the ranks read."""
        names = {"prompts", "attention_mask", "uid", "sample_index"}
        return frozenset(names | {"greedy"} if self.with_greedy else names) | self._shown


@dataclass(frozen=True, kw_only=True)
class ScalarRequest(Request[P]):
    """Values of a critic, or scores of a reward model.

    Attributes:
        reward_ids: Tokens that a language model says of a step that is right, and of one that is wrong; None of a model
            with a scalar head.
    """

    reward_ids: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class LogProbRequest(Request[P]):
    """Log-probs of the trained response tokens.

    Attributes:
        temperature: Of the distribution that was sampled from.
        with_entropy: Also the entropy of each token's distribution.
        with_sum_pi_squared: Also the sum of its squared probabilities.
        without_adapter: Those of the model without its adapter, which is the reference of one that trains an adapter.
        replays_experts: Tokens go to the experts of the column `routed_experts`.
        records_experts: Also return that column, of the experts that tokens went to.
        num_top: Also the log-probs of this many most likely tokens, and which they are.
        with_states: Also the last hidden states, of which the head makes all log-probs.
    """

    temperature: float
    with_entropy: bool = False
    with_sum_pi_squared: bool = False
    without_adapter: bool = False
    replays_experts: bool = False
    records_experts: bool = False
    num_top: int = 0
    with_states: bool = False

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the ranks read."""
        return super().columns | {ROUTED_EXPERTS} if self.replays_experts else super().columns


def temperature_of(meta_info: Mapping[str, Any]) -> float:
    """Return the temperature that a batch was sampled at.

    Raises:
        ValueError: The batch does not say.
    """
    if "temperature" not in meta_info:
        raise ValueError(
            "meta_info['temperature'] is missing: log-probs are those of the distribution that was sampled"
        )
    return float(meta_info["temperature"])


# ------------------------------------------------------------------ updates


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model learns, whatever it learns from; given to its worker once.

    Attributes:
        optim: Optimizer and schedule.
        grad_clip: Largest global gradient norm.
        total_steps: Length of the run in optimizer steps, for the learning rate's schedule.
        seed: Seed of the run, for the rounding of bfloat16 masters.
        run_folder: Where batches are kept whose loss or gradient is not finite; `None` outside of a run.
    """

    optim: OptimConfig
    grad_clip: float
    total_steps: int
    seed: int
    run_folder: Path | None


@dataclass(frozen=True, kw_only=True)
class Update(Request[P]):
    """Every optimizer step of the plan.

    Attributes:
        step: Of the run, for messages and for the names of batches that are kept.
        has_branches: Episodes of the batch have several rows, and `episode_tokens (B,)` has the trained tokens of each
            row's episode, by which a loss takes the mean of sequences.
        router_aux_loss_coef: Weight of the loss that balances the load of experts; 0 leaves it out.
        replays_experts: Tokens go to the experts of the column `routed_experts`.
    """

    step: int
    has_branches: bool = False
    router_aux_loss_coef: float = 0.0
    replays_experts: bool = False

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the ranks read."""
        read = {"episode_tokens": self.has_branches, ROUTED_EXPERTS: self.replays_experts}
        return super().columns | {name for name, is_read in read.items() if is_read}


class OldLogProbs(StrEnum):
    """Whose log-probs are the old ones, the divisor of a policy loss's ratio. The value is the column, if any."""

    COLUMN = "old_log_probs"
    """The trainer's, computed before the update."""
    OWN = "own"
    """The update's own, without gradient: in a batch's only step, bit for bit those of the weights that sampled."""
    SAMPLER = "rollout_log_probs"
    """The sampler's."""


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(Update[P]):
    """Move the policy along the advantages.

    Attributes:
        temperature: Of the distribution that was sampled from.
        loss: Policy loss, entropy bonus and KL term, and how tokens become one number.
        old_log_probs: Whose log-probs are the old ones.
        correction: In bypass mode, how the update weighs and rejects by the ratio to the sampler; else None.
        measures_mismatch: Until a step has moved the weights, measure how far the sampler's log-probs are from the
            update's own.
        is_weighted: The batch's `rollout_is_weights` weigh the loss of each token.
        selects_tokens: The loss treats the batch's `selected_tokens` differently.
        distillation: The divergence from a teacher that is part of the loss, or all of it; None where there is none.

    Raises:
        ValueError: The update's own log-probs would be the old ones in a second step too, when the weights have moved.
    """

    temperature: float
    loss: ActorConfig
    old_log_probs: OldLogProbs
    correction: RolloutCorrectionConfig | None
    measures_mismatch: bool
    is_weighted: bool
    selects_tokens: bool
    distillation: DistillationLossConfig | None = None

    def __post_init__(self) -> None:
        if self.old_log_probs is OldLogProbs.OWN and self.plan.num_steps != 1:
            raise ValueError(
                f"an update's own log-probs are the old ones in its first step only, and the plan has "
                f"{self.plan.num_steps} steps: run compute_log_prob first, and name its column"
            )

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the policy loss is part of the loss."""
        return self.distillation is None or self.distillation.use_task_rewards

    @property
    def reads_top(self) -> bool:
        """Whether the loss reads the log-probs of the teacher's most likely tokens."""
        return self.distillation is not None and self.distillation.traits.reads_top

    @property
    def reads_all(self) -> bool:
        """Whether the loss reads the teacher's whole distribution."""
        return self.distillation is not None and self.distillation.traits.reads_all

    @property
    def token_columns(self) -> list[str]:
        """Names of the columns `(B, R)` that the loss reads beside the mask."""
        reads_sampler = self.measures_mismatch or self.correction is not None
        rewarded = self.learns_from_rewards
        is_read = {
            "advantages": rewarded,
            "old_log_probs": rewarded and self.old_log_probs is OldLogProbs.COLUMN,
            "ref_log_prob": self.loss.use_kl_loss or self.distillation is not None,
            "rollout_is_weights": rewarded and self.is_weighted,
            "rollout_log_probs": self.old_log_probs is OldLogProbs.SAMPLER or reads_sampler,
            "selected_tokens": rewarded and self.selects_tokens,
        }
        return [name for name, read in is_read.items() if read]

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the ranks read."""
        of_teacher = {TEACHER_LOG_PROBS, TEACHER_IDS} if self.reads_top else set[str]()
        of_teacher |= {TEACHER_STATES} if self.reads_all else set()
        return super().columns | of_teacher | set(self.token_columns)


@dataclass(frozen=True, kw_only=True)
class ValueUpdate(Update[P]):
    """Teach a critic the returns.

    Attributes:
        loss: Clip range, and how tokens become one number.
        loss_name: A key of `hrl.algos.value_loss.VALUE_LOSSES`; None lets the clip range decide.
    """

    loss: CriticConfig
    loss_name: str | None = None

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the ranks read."""
        return super().columns | {"values", "returns"}


@dataclass(frozen=True, kw_only=True)
class PreferenceUpdate(Update[P]):
    """Move a policy towards the chosen and away from the rejected answers.

    Attributes:
        temperature: Of the distribution whose log-probs are compared.
        loss_type: A key of `hrl.algos.preference.PAIR_LOSSES`.
        options: Its constants.
        has_reference: `ref_sequence_log_prob` has the reference's log-probs, summed over each answer's trained tokens.
        measures_mismatch: The answers were sampled, and the update measures as `PolicyUpdate` does.
    """

    temperature: float
    loss_type: str
    options: PairOptions
    has_reference: bool
    measures_mismatch: bool

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the ranks read."""
        is_read = {"ref_sequence_log_prob": self.has_reference, "rollout_log_probs": self.measures_mismatch}
        return super().columns | {"is_chosen"} | {name for name, read in is_read.items() if read}


@dataclass(frozen=True, kw_only=True)
class LabelledUpdate(Update[P]):
    """Move a policy towards good and away from bad answers, of which each stands alone.

    Attributes:
        temperature: Of the distribution whose log-probs are compared.
        loss_type: A key of `hrl.algos.preference.LABELLED_LOSSES`.
        options: Its constants.
        baseline: Of the whole batch, see `hrl.algos.preference.kto_baseline`.
    """

    temperature: float
    loss_type: str
    options: LabelledOptions
    baseline: float

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the ranks read."""
        return super().columns | {"is_desirable", "ref_sequence_log_prob"}


@dataclass(frozen=True, kw_only=True)
class SupervisedUpdate(Update[P]):
    """Make a policy more likely to give the answers of the rows.

    Attributes:
        temperature: Of the distribution whose log-probs are raised.
        loss_type: A key of `hrl.algos.preference.SFT_LOSSES`.
        loss_agg_mode: How tokens become one number.
        loss_scale_factor: The constant divisor of `seq-mean-token-sum-norm`, in tokens.
    """

    temperature: float
    loss_type: str
    loss_agg_mode: str
    loss_scale_factor: float


@dataclass(frozen=True, kw_only=True)
class RewardModelUpdate(Update[P]):
    """Make a classifier score the chosen answer of every pair above the rejected one, by the pair's `margin`.

    Attributes:
        loss_type: A key of `hrl.algos.preference.REWARD_MODEL_LOSSES`.
    """

    loss_type: str

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the ranks read."""
        return super().columns | {"is_chosen", "margin"}


if TYPE_CHECKING:
    AnyPolicyUpdate = (
        PolicyUpdate[RankPlan] | PreferenceUpdate[RankPlan] | LabelledUpdate[RankPlan] | SupervisedUpdate[RankPlan]
    )
