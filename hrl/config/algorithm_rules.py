"""Rules about the algorithm's own settings: what goes together, and what would have no effect."""

from collections.abc import Iterator

from hrl.algos.ratio_bounds import Interval, parse_rejections
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.problems import Problem

_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss"
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


def preferences_take_the_place_of_advantages(config: PPOTrainerConfig) -> Iterator[Problem]:
    """With a preference loss, what only advantages know of would have no effect."""
    algorithm, actor, key = config.algorithm, config.actor_rollout_ref.actor, "algorithm.preference_loss"
    if algorithm.preference_loss is None:
        return
    samples = config.actor_rollout_ref.rollout.n
    if samples < 2:
        what = f"is {samples}, but a pair is made of two samples of a prompt."
        yield Problem(_SAMPLES, what, f"Set {_SAMPLES}=4, or {key}=null.", (key,))
    without_effect = {
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
        f"{_CORRECTION}.bypass_mode": algorithm.rollout_correction.bypass_mode,
        f"{_CORRECTION}.rollout_is": algorithm.rollout_correction.rollout_is,
        f"{_CORRECTION}.rollout_rs": algorithm.rollout_correction.rollout_rs,
        f"{_ACTOR}.use_kl_loss": actor.use_kl_loss,
        f"{_ACTOR}.entropy_coeff": actor.entropy_coeff,
        "critic.enable": config.needs_critic,
    }
    for name, value in without_effect.items():
        if value:
            yield Problem(name, f"has no effect on {key}, which compares two samples.", "Remove one of both.", (key,))
    pair = config.data.max_prompt_length + 2 * config.data.max_response_length
    budget, rows = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    if actor.use_dynamic_bsz and budget < pair:
        what = f"is {budget} tokens, but a prompt with both its answers may have {pair}."
        involves = (key, "data.max_prompt_length", "data.max_response_length")
        yield Problem(
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", what, f"Set it to at least {pair}.", involves
        )
    if not actor.use_dynamic_bsz and rows is not None and rows < 2:
        what = f"is {rows}, but a pair is two sequences."
        yield Problem(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", what, "Set it to at least 2.", (key,))
    if algorithm.kl_ctrl.type == "adaptive":
        what = f"is adaptive, but the beta of {key} stays."
        yield Problem("algorithm.kl_ctrl.type", what, "Set it to fixed.", (key,))
    if algorithm.kl_ctrl.kl_coef == 0:
        what = f"is 0, but it is the beta of {key}."
        yield Problem("algorithm.kl_ctrl.kl_coef", what, "Set it above 0, e.g. to 0.1.", (key,))


ALGORITHM_RULES = (
    policy_losses_have_their_constants,
    gdpo_knows_its_rewards,
    filtered_groups_can_differ,
    ratios_have_bounds,
    bypass_mode_does_what_is_set,
    preferences_take_the_place_of_advantages,
)
