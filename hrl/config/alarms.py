"""Alarms of a run: for each its threshold, what it means and what helps.

The table is the default of `trainer.alarms` and the text of `docs/reading-a-run.md`; `hrl.report.health` decides from
the metrics of a run which alarm is raised.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PositiveFloat

from hrl.config.section import NameOf

SAMPLER_GAP = "sampler_gap"
"""The alarm whose threshold is also that of bypass mode, see `rollout_correction.bypass_mode`."""


@dataclass(frozen=True)
class Alarm:
    """What an alarm watches.

    Attributes:
        threshold: Its default.
        raised: When it is raised, with `{}` for the threshold.
        meaning: What that says of the run.
        remedy: What helps.
    """

    threshold: float
    raised: str
    meaning: str
    remedy: str

    def when(self, threshold: float | None = None) -> str:
        """Return when it is raised, as a clause; by default at its own threshold."""
        return self.raised.format(f"{self.threshold if threshold is None else threshold:g}")


ALARMS: Mapping[str, Alarm] = {
    "zero_reward": Alarm(
        3.0,
        "after {} steps no sample of the run has had a reward above 0",
        "the model never does what the reward pays for, so there is nothing to learn from",
        "read samples (`hrl rollouts`); pay for a part of the task, such as the format, or take easier rows",
    ),
    "no_spread": Alarm(
        5.0,
        "all samples of every prompt have the same reward for {} steps, and it is not the highest one seen",
        "samples are compared with each other, and there is no difference to learn from",
        "rows of other difficulty, more samples per prompt (`rollout.n`), a reward with more levels",
    ),
    "zero_gradient": Alarm(
        3.0,
        "the norm of the gradient is 0 for {} steps although rewards differ, or in a run without rewards",
        "steps are made and no weight moves",
        "look at `actor/pg_clipfrac` and `actor/rows_run`, and at masks and frozen parameters",
    ),
    "no_tokens": Alarm(
        1.0,
        "no sample has a token to learn from, for {} step",
        "every answer is empty, or the reward function left all of them out, or every episode was too late",
        "`response/aborted_ratio` and `episode/num_late` tell which; look at the prompts and at the stop tokens",
    ),
    "truncation": Alarm(
        0.5,
        "more than {} of the answers are cut off at the length limit, for 3 steps",
        "cut answers rarely earn a reward, and the model is not taught to end",
        "a larger `data.max_response_length`, or `reward.overlong_buffer.enable=true`",
    ),
    "length_drift": Alarm(
        2.0,
        "answers are {} times as long or as short as in the first 3 steps, for 3 steps, and neither reward nor "
        "validation is higher",
        "the policy changes the length of its answers for no gain",
        "look for a reward that pays for length; a lower learning rate, or a KL term",
    ),
    "entropy_low": Alarm(
        0.01,
        "the entropy is below {} nats per token for 3 steps, and rewards below the highest one seen remain",
        "all samples of a prompt are the same, so nothing new is tried",
        "a lower learning rate, `actor.clip_ratio_high` above `clip_ratio_low`, `actor.entropy_coeff`, or a KL term",
    ),
    "entropy_high": Alarm(
        3.0,
        "the entropy is {} times that of the first 3 steps, for 3 steps, and the reward is not at its best",
        "the policy falls apart into noise",
        "a lower learning rate, a smaller `actor.entropy_coeff`, or a KL term",
    ),
    SAMPLER_GAP: Alarm(
        0.1,
        "sampler and trainer differ by more than {} in the log-prob of a sampled token, on average over a step",
        "the policy learns from samples that are not its own",
        "compare `rollout.dtype` with `fsdp_config.dtype`; `algorithm.rollout_correction.rollout_is=token` corrects",
    ),
    "kl": Alarm(
        1.0,
        "the KL divergence from the reference is above {} per token, for 3 steps",
        "the policy has left the model that it started from; its language suffers first",
        "a larger `actor.kl_loss_coef` or `algorithm.kl_ctrl.kl_coef`, or a lower learning rate",
    ),
    "update_kl": Alarm(
        0.1,
        "the policy moves by a KL divergence of more than {} per token within a step, for 3 steps",
        "updates go further than the samples allow",
        "a lower learning rate, fewer `actor.ppo_epochs`, larger mini-batches",
    ),
    "clip_share": Alarm(
        0.3,
        "more than {} of the tokens are clipped, for 3 steps",
        "the policy leaves the range in which its samples can teach it",
        "a lower learning rate, fewer `actor.ppo_epochs`, larger mini-batches",
    ),
    "episodes_failed": Alarm(
        0.05,
        "more than {} of the episodes fail, for 3 steps",
        "an environment that breaks chooses what is learnt from",
        "`rollouts/` has the error of each; `hrl env-test` plays some of them alone",
    ),
    "episodes_cut": Alarm(
        0.5,
        "more than {} of the episodes are ended by a limit, for 3 steps",
        "cut episodes rarely reach what their rewards are paid for",
        "`episode/end/*` tells which limit; a larger `environment.max_turns`, `data.max_response_length` or "
        "`environment.episode_timeout_s`",
    ),
    "tool_errors": Alarm(
        0.5,
        "more than {} of the tool calls fail, for 3 steps",
        "the policy learns to live without its tools",
        "read conversations (`hrl rollouts`): a form that the parser can't read, arguments that the tool refuses, or a "
        "tool that is too slow (`environment.tool_timeout_s`)",
    ),
    "reward_hacking": Alarm(
        0.1,
        "two validations in a row are {} of the range of rewards below the best one, and more if that may be luck, "
        "while the training reward is above that of then",
        "the policy learns what the reward function pays for and not the task, or learns the training rows by heart",
        "read the samples with the highest reward (`hrl rollouts --sort score`); take an earlier checkpoint, more rows",
    ),
    "overfitting": Alarm(
        0.1,
        "two validation losses in a row are above the lowest one by a share of {} of it and of all that was gained, "
        "while the training loss is below that of then",
        "the model learns the training rows by heart",
        "take an earlier checkpoint; fewer epochs, a lower learning rate, more rows",
    ),
}
"""Name → alarm. A number of steps or a share is told apart by the text of `raised`."""


def default_thresholds() -> dict[str, float | None]:
    """Return the threshold of every alarm."""
    return {name: alarm.threshold for name, alarm in ALARMS.items()}


def _thresholds(given: Any) -> Any:
    """Fill in the defaults of what is not given. False and null turn one alarm off, or all of them."""
    if given is False or given is None:
        return dict.fromkeys(ALARMS)
    if not isinstance(given, Mapping):
        return given
    written = {name: None if value is False else value for name, value in given.items()}
    return default_thresholds() | written


Thresholds = Annotated[
    dict[Annotated[str, NameOf(ALARMS)], PositiveFloat | None],
    BeforeValidator(_thresholds),
]
"""Name of an alarm → its threshold, None for off; the type of `trainer.alarms`."""
