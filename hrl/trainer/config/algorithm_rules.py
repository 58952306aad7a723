"""Rules about the algorithm's own settings: what goes together, and what would have no effect."""

from collections.abc import Iterator

from hrl.algos.ratio_bounds import Interval, parse_rejections
from hrl.trainer.config.errors import Problem
from hrl.trainer.config.schema import PPOTrainerConfig

_LOSS = "actor_rollout_ref.actor.policy_loss"
_SAMPLES = "actor_rollout_ref.rollout.n"
_ESTIMATOR = "algorithm.adv_estimator"
_CORRECTION = "algorithm.rollout_correction"


def policy_losses_have_their_constants(config: PPOTrainerConfig) -> Iterator[Problem]:
    """`dro` has no published default for beta; a share of no token selects none."""
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield Problem(f"{_LOSS}.dro_beta", "needs a value, because loss_mode is dro.")
    shares = {"clip_cov": loss.clip_cov_ratio, "kl_cov": loss.kl_cov_ratio}
    share = shares.get(loss.loss_mode)
    if share is not None and not 0 < share <= 1:
        what = f"is {share:g}, which is no share of the tokens."
        yield Problem(f"{_LOSS}.{loss.loss_mode}_ratio", what, "Set it above 0 and at most 1.", (f"{_LOSS}.loss_mode",))
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        what = f"is {loss.clip_cov_lb:g}, not below clip_cov_ub={loss.clip_cov_ub:g}."
        yield Problem(f"{_LOSS}.clip_cov_lb", what, "Lower it.", (f"{_LOSS}.clip_cov_ub",))


def gdpo_knows_its_rewards(config: PPOTrainerConfig) -> Iterator[Problem]:
    """gdpo reads named parts of the reward, and nothing else."""
    algorithm = config.algorithm
    keys, weights, wanted = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, algorithm.adv_estimator == "gdpo"
    name = "algorithm.gdpo_reward_keys"
    if wanted and not keys:
        what = "needs the names of the rewards that gdpo normalises one by one."
        yield Problem(name, what, "Name numbers that your reward function returns, e.g. [accuracy,format].")
    if keys and not wanted:
        yield Problem(name, f"is not read by {algorithm.adv_estimator}.", f"Set {_ESTIMATOR}=gdpo.", (_ESTIMATOR,))
    if len(set(keys)) < len(keys):
        yield Problem(name, "names a reward twice.", "Weigh it with algorithm.gdpo_reward_weights.")
    if weights is not None and len(weights) != len(keys):
        what = f"has {len(weights)} weights for {len(keys)} rewards."
        yield Problem("algorithm.gdpo_reward_weights", what, "Give one each.", (name,))
    if wanted and algorithm.use_kl_in_reward:
        what = "is true, but gdpo reads the parts of the reward, which hold no KL."
        hint = "Set actor_rollout_ref.actor.use_kl_loss."
        yield Problem("algorithm.use_kl_in_reward", what, hint, (_ESTIMATOR,))


def filtered_groups_can_differ(config: PPOTrainerConfig) -> Iterator[Problem]:
    """A group of one sample has no spread."""
    samples = config.actor_rollout_ref.rollout.n
    if config.algorithm.filter_groups.enable and samples < 2:
        what = f"is {samples}, so that no group could ever have different rewards."
        hint = f"Set {_SAMPLES}=8, or algorithm.filter_groups.enable=false."
        yield Problem(_SAMPLES, what, hint, ("algorithm.filter_groups.enable",))


def ratios_have_bounds(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Thresholds of the sampler's correction can be read, and cut off what they should."""
    settings = config.algorithm.rollout_correction
    key = f"{_CORRECTION}.rollout_is_threshold"
    try:
        accepted = Interval.parse(settings.rollout_is_threshold)
    except ValueError as error:
        yield Problem(key, f"can't be read: {error}.")
    else:
        if accepted.lower is None and accepted.upper < 1:
            what = f"is {accepted.upper:g}: ratios lie around 1, and all of them would be cut down."
            yield Problem(key, what, "Set it above 1. An interval has to be quoted for YAML: '\"0.5_5.0\"'.")
    key = f"{_CORRECTION}.rollout_rs_threshold"
    if settings.rollout_rs and settings.rollout_rs_threshold is None:
        yield Problem(key, f"needs a value, because rollout_rs is {settings.rollout_rs}.")
        return
    try:
        parse_rejections(settings.rollout_rs, settings.rollout_rs_threshold)
    except ValueError as error:
        yield Problem(f"{_CORRECTION}.rollout_rs", f"can't be read: {error}.", involves=(key,))


def bypass_mode_does_what_is_set(config: PPOTrainerConfig) -> Iterator[Problem]:
    """With the sampler's log-probs for the old ones, some settings have no meaning."""
    settings, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    bypass, reinforce = f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.loss_type"
    if not settings.bypass_mode:
        if settings.loss_type != "ppo_clip":
            what = f"is {settings.loss_type}, which only bypass mode reads."
            yield Problem(reinforce, what, f"Set {bypass}=true, or {_LOSS}.loss_mode=gpg.", (bypass,))
        return
    if config.algorithm.adv_estimator == "optimal_token_baseline":
        what = f"is true, but {_ESTIMATOR}=optimal_token_baseline needs the forward pass that it spares."
        yield Problem(bypass, what, "Set it to false.", (_ESTIMATOR,))
    if settings.loss_type == "ppo_clip" and settings.rollout_is is not None:
        what = f"is {settings.rollout_is}, but the clipped loss of bypass mode has that ratio inside already."
        yield Problem(f"{_CORRECTION}.rollout_is", what, f"Remove it, or set {reinforce}=reinforce.", (bypass,))
    if settings.loss_type == "reinforce" and loss != "vanilla":
        what = f"is reinforce, which would take the place of {_LOSS}.loss_mode={loss}."
        yield Problem(reinforce, what, "Set only one of the two.", (f"{_LOSS}.loss_mode",))
    if settings.rollout_is_batch_normalize:
        what = "is true, but bypass mode weighs each micro-batch when it is learnt, and not the whole batch before."
        yield Problem(f"{_CORRECTION}.rollout_is_batch_normalize", what, f"Set it to false, or {bypass}.", (bypass,))


ALGORITHM_RULES = (
    policy_losses_have_their_constants,
    gdpo_knows_its_rewards,
    filtered_groups_can_differ,
    ratios_have_bounds,
    bypass_mode_does_what_is_set,
)
