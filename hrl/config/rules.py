"""Rules between keys. Each is a generator of problems and is named after what it enforces.

Those of engines are in `engine_rules`, those of where roles run in `placement_rules`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hrl.algos.ratio_bounds import REJECTION_RULES, Interval, parse_rejections
from hrl.algos.registry import (
    LABELLED_LOSS_TRAITS,
    PAIR_LOSS_TRAITS,
    estimator_traits,
    pair_loss_traits,
    policy_loss_traits,
)
from hrl.config.alarms import SAMPLER_GAP
from hrl.config.engine_rules import ENGINE_RULES, broken_addresses, engine_warnings, written_out_key
from hrl.config.model import (
    ADAPTER_RATE,
    LEAST_RELATIVE_RATE,
    CheckpointConfig,
    FsdpConfig,
    LearnerConfig,
    MicroBatches,
    OptimConfig,
)
from hrl.config.offline import DPOTrainerConfig, OfflineConfig, PairDataConfig
from hrl.config.outline import RunConfiguration
from hrl.config.placement import resolve_placement
from hrl.config.placement_rules import roles_have_pools, shards_divide_the_processes
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.reward import FUNCTION_NAMES, TAKEN_NAMES, RewardConfig
from hrl.config.saved import nothing_is_masked
from hrl.config.section import ACTOR, MODEL, REF, ROLLOUT, TEACHER
from hrl.config.trainer import BATCH_SHARE, JSON_CONSOLE
from hrl.errors import Problem
from hrl.masking import is_secret_variable, is_written_secret
from hrl.nearest import nearest_divisors
from hrl.processes.sandbox import TIME_S

Rule = Callable[[Any], Iterator[Problem]]
"""A rule; it takes the configuration of those kinds of run that list it."""

_ESTIMATOR = "algorithm.adv_estimator"
_LOSS = f"{ACTOR}.policy_loss"
_CORRECTION = "algorithm.rollout_correction"
_SHAPING = "reward.shaping"
_DISTILLATION_LOSS = "distillation.distillation_loss"
_TEACHER_SERVER = "distillation.teacher_models.teacher_model.server"


def clipped_rewards_have_a_limit(config: PPOTrainerConfig) -> Iterator[Problem]:
    """`clip` needs a number; other members of `reward.shaping` have none."""
    if "clip" in config.reward.shaping and config.reward.shaping["clip"] is None:
        yield Problem(_SHAPING, "has clip without a limit.", "Give one, e.g. {clip: 5}.")


def one_console_writes(config: RunConfiguration) -> Iterator[Problem]:
    """Only one of the two consoles may write to standard output."""
    if {"console", JSON_CONSOLE} <= set(config.trainer.logger):
        what = f"names console and {JSON_CONSOLE}, which both write to standard output."
        yield Problem("trainer.logger", what, "Name one of them; metrics.jsonl is written in any case.")


def mini_batches_divide_the_batch(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Every step is a whole number of mini-batches."""
    prompts = config.data.train_batch_size
    owners = {f"{ACTOR}.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if config.needs_critic:
        owners["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    bad = {key: size for key, size in owners.items() if prompts % size}
    for key, size in _without_followers(bad).items():
        what = f"is {size} prompts and does not divide data.train_batch_size={prompts}."
        yield Problem(key, what, f"Nearest that do: {nearest_divisors(prompts, size)}.", ("data.train_batch_size",))


def _without_followers(wrong: dict[str, int]) -> dict[str, int]:
    """Drop keys with the same wrong value as the first, whose value they follow by default."""
    first = next(iter(wrong), None)
    return {key: value for key, value in wrong.items() if key == first or value != wrong[first]}  # type: ignore[index]


def groups_are_large_enough(config: PPOTrainerConfig) -> Iterator[Problem]:
    """An estimator that compares the samples of a prompt needs several of them."""
    if not config.learns_from_rewards:
        return
    name, samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    smallest = estimator_traits(name).min_group_size
    if samples < smallest:
        what = f"is {samples}, but {_ESTIMATOR}={name} compares the samples of a prompt and needs at least {smallest}."
        yield Problem(f"{ROLLOUT}.n", what, f"Set {ROLLOUT}.n=8, or another estimator.", (_ESTIMATOR,))


def critic_fits_the_estimator(config: PPOTrainerConfig) -> Iterator[Problem]:
    """GAE and a warm-up of the critic need a critic."""
    name = config.algorithm.adv_estimator
    if estimator_traits(name).needs_critic and config.critic.enable is False:
        what = f"is false, but {_ESTIMATOR}={name} needs values."
        yield Problem(
            "critic.enable", what, "Remove the key, or use an estimator without critic (grpo).", (_ESTIMATOR,)
        )
    if config.trainer.critic_warmup > 0 and not config.needs_critic:
        what = f"is {config.trainer.critic_warmup}, but {_ESTIMATOR}={name} builds no critic."
        yield Problem("trainer.critic_warmup", what, "Set it to 0.", (_ESTIMATOR, "critic.enable"))


def what_was_cut_off_can_end_in_a_value(config: PPOTrainerConfig) -> Iterator[Problem]:
    """A critic says what was still to come of an episode that was cut off, to an estimator that reads values."""
    name = config.algorithm.adv_estimator
    if config.environment.on_truncation == "bootstrap" and not estimator_traits(name).needs_critic:
        what = f"is bootstrap, but {_ESTIMATOR}={name} reads no values."
        yield Problem("environment.on_truncation", what, f"Set {_ESTIMATOR}=gae, or score or mask.", (_ESTIMATOR,))


def pairs_are_of_single_responses(config: PPOTrainerConfig) -> Iterator[Problem]:
    """A preference loss compares two responses; an episode may have several rows."""
    if config.environment.is_used and config.algorithm.preference_loss is not None:
        what = "compares pairs of responses, and an episode of environment.path may have several rows."
        yield Problem("algorithm.preference_loss", what, f"Set {_ESTIMATOR} instead.", ("environment.path",))


def bypass_mode_has_a_threshold(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Bypass mode goes on only as long as sampler and trainer agree, which an alarm's threshold decides."""
    if config.algorithm.rollout_correction.bypass_mode and config.trainer.alarms[SAMPLER_GAP] is None:
        what = f"turns off {SAMPLER_GAP}, by whose threshold {_CORRECTION}.bypass_mode=true trusts the sampler."
        yield Problem("trainer.alarms", what, f"Give it one, e.g. {{{SAMPLER_GAP}: 0.1}}.", (_CORRECTION,))


def kl_in_the_loss_has_a_gradient(config: PPOTrainerConfig) -> Iterator[Problem]:
    """k1 as a loss has an expected gradient of zero."""
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        what = f"is {actor.kl_loss_type}, whose expected gradient in a loss is zero."
        yield Problem(f"{ACTOR}.kl_loss_type", what, "Use low_var_kl, mse or kl+.", (f"{ACTOR}.use_kl_loss",))


def training_samples_come_from_the_policy(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Training samples come from the whole distribution; a truncated one is not corrected for."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_p < 1.0:
        what = f"is {rollout.top_p}, so samples would not come from the distribution that is trained."
        yield Problem(f"{ROLLOUT}.top_p", what, "Set it to 1; validation has its own val_kwargs.top_p.")
    if rollout.top_k > 0:
        what = f"is {rollout.top_k}, so samples would not come from the distribution that is trained."
        yield Problem(f"{ROLLOUT}.top_k", what, "Set it to -1; validation has its own val_kwargs.top_k.")
    if rollout.top_k == 0:
        yield Problem(f"{ROLLOUT}.top_k", "is 0, which leaves no token to sample.", "Set it to -1 for off.")


def validation_sampling_makes_sense(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Greedy validation takes one answer per prompt; sampled validation needs a temperature."""
    val, key = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if not val.do_sample and val.n > 1:
        what = f"is {val.n}, but greedy decoding gives the same answer every time."
        yield Problem(f"{key}.n", what, f"Set {key}.do_sample=true with a temperature, or n=1.", (f"{key}.do_sample",))
    if val.do_sample and val.temperature == 0.0:
        what = "is 0, which is greedy."
        yield Problem(f"{key}.temperature", what, f"Set it above 0, or {key}.do_sample=false.", (f"{key}.do_sample",))
    if val.top_k == 0:
        yield Problem(f"{key}.top_k", "is 0, which leaves no token to sample.", "Set it to -1 for off.")


def one_row_fits_the_token_budget(config: PPOTrainerConfig) -> Iterator[Problem]:
    """The token budget of a micro-batch is large enough for the longest row."""
    row = config.data.max_prompt_length + config.data.max_response_length
    passes = {each.tokens_key: each for each in config.micro_batches().values()}
    budgets = {key: each.max_tokens for key, each in passes.items()}
    too_small = {key: tokens for key, tokens in budgets.items() if tokens is not None and _is_below(passes[key], row)}
    for key, budget in _without_followers(too_small).items():
        lengths = f"{config.data.max_prompt_length} prompt + {config.data.max_response_length} response"
        what = f"is {_tokens_of(passes[key], budget)}, but one row may have {row} ({lengths})."
        yield Problem(
            key,
            what,
            f"Set it to at least {passes[key].budget_for(row)}.",
            ("data.max_prompt_length", "data.max_response_length"),
        )


def _is_below(each: MicroBatches, tokens: int) -> bool:
    """Return whether a pass has a budget, and it is too small for a micro-batch of so many tokens."""
    return each.budget is not None and each.budget < tokens


def _tokens_of(each: MicroBatches, budget: int) -> str:
    return f"{budget} tokens" + (f" on each of {each.slices} processes" if each.slices > 1 else "")


def fixed_micro_batches_have_a_size(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Without dynamic packing the number of rows must be given."""
    for name, each in config.micro_batches().items():
        # If the actor's is missing, don't report it again for passes that follow the actor; nor a critic's twice.
        follows = name in ("log_prob", "ref") and not config.actor_rollout_ref.actor.use_dynamic_bsz
        if each.max_tokens is None and each.max_rows is None and not follows and name != "values":
            what, flag = f"needs a number of sequences, because {each.packs_key} is false.", each.packs_key
            yield Problem(each.rows_key, what, f"Set it, or {flag}=true.", (flag,))


def _trained_shards(config: RunConfiguration) -> dict[str, FsdpConfig]:
    """Return the sharding of every model that is trained, by its key."""
    if isinstance(config, OfflineConfig):
        return {"model.fsdp_config": config.model.fsdp_config}
    found = {f"{ACTOR}.fsdp_config": config.actor_rollout_ref.actor.fsdp_config}
    return found | ({"critic.model.fsdp_config": config.critic.model.fsdp_config} if config.needs_critic else {})


def trained_parts(config: RunConfiguration) -> dict[str, tuple[OptimConfig, str, FsdpConfig]]:
    """Return the optimizer of every model that is trained, by its section, with the section of its sharding and it."""
    if isinstance(config, OfflineConfig):
        return {"optim": (config.optim, "model.fsdp_config", config.model.fsdp_config)}
    actor, critic = config.actor_rollout_ref.actor, config.critic
    found = {f"{ACTOR}.optim": (actor.optim, f"{ACTOR}.fsdp_config", actor.fsdp_config)}
    of_critic = (critic.optim, "critic.model.fsdp_config", critic.model.fsdp_config)
    return found | ({"critic.optim": of_critic} if config.needs_critic else {})


def an_optimizer_steps_where_it_can(config: RunConfiguration) -> Iterator[Problem]:
    """Only AdamW's moments visit the GPU, and Muon's products of matrices take too long on a CPU."""
    for section, (optim, key, sharding) in trained_parts(config).items():
        if sharding.offload_policy and optim.name == "muon":
            what = f"takes the optimizer's step on the CPU, and {section}.name=muon multiplies matrices, minutes long."
            hint = f"Set it to false, or {section}.name to another optimizer."
            yield Problem(f"{key}.offload_policy", what, hint, (f"{section}.name",))
        if sharding.optimizer_offload and not sharding.offload_policy and optim.name != "adamw":
            what = (
                f"moves AdamW's moments, and {section}.name={optim.name} keeps its state, which is smaller, on the GPU."
            )
            hint = f"Set it to false, or {section}.name=adamw."
            yield Problem(f"{key}.optimizer_offload", what, hint, (f"{section}.name",))


def gradients_have_their_range(config: RunConfiguration) -> Iterator[Problem]:
    """No float16 in training: the loss is not scaled, so small gradients would become zero."""
    for key, sharding in _trained_shards(config).items():
        if sharding.dtype == "float16":
            what = "is float16, in which small gradients become zero: the loss isn't scaled."
            yield Problem(f"{key}.dtype", what, "Set it to bfloat16.")


_REWARD_TOKENS = "reward.reward_model.reward_tokens"


def something_scores(config: PPOTrainerConfig) -> Iterator[Problem]:
    """The run has a reward, and the reward has the values it needs."""
    reward = config.reward
    if reward.reward_model.enable and not reward.reward_model.model_path:
        what = "needs a folder or hub id, because the reward model is enabled."
        yield Problem("reward.reward_model.model_path", what, involves=("reward.reward_model.enable",))
    if reward.reward_model.enable and reward.reward_model.step_token is not None:
        apart = "scores steps, whose scores stand beside the sum of the others"
        for key, used in (("environment.path", config.environment.is_used), ("reward.shaping", bool(reward.shaping))):
            if used:
                what = f"can't be used beside a reward model that {apart}."
                yield Problem(key, what, "Leave one of the two out.", ("reward.reward_model.step_token",))
    if reward.reward_model.is_served:
        yield from _nothing_else_of_a_served_model(config)
    words = reward.reward_model.reward_tokens
    if words is not None and reward.reward_model.step_token is None:
        what = "are said behind steps, and reward.reward_model.step_token is null."
        yield Problem(_REWARD_TOKENS, what, "Name the token behind each step.", ("reward.reward_model.step_token",))
    if words is not None and words[0] == words[1]:
        yield Problem(
            _REWARD_TOKENS, f"are twice {words[0]!r}.", "Name that of a right step, then that of a wrong one."
        )
    if config.reward_entries or not (config.environment.pays or config.may_leave_unscored):
        yield from _functions_can_be_summed(reward)
    buffer, longest = reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= longest:
        what = f"is {buffer.len} tokens, must be between 1 and data.max_response_length={longest}."
        yield Problem("reward.overlong_buffer.len", what, involves=("data.max_response_length",))


_OF_THE_SERVER = frozenset({"model", "host", "port", "served_model_name", "data_parallel_size", "api_key"})


def _nothing_else_of_a_served_model(config: PPOTrainerConfig) -> Iterator[Problem]:
    """What scores batches in the training workers is not asked for, nor what the run itself tells the server."""
    serves, settings = "reward.reward_model.serve", config.reward.reward_model
    if settings.step_token is not None:
        what = "is for a model that scores in the training workers, and reward.reward_model.serve is true."
        yield Problem("reward.reward_model.step_token", what, "Leave one of the two out.", (serves,))
    for name in sorted(_OF_THE_SERVER.intersection(settings.server_kwargs)):
        what = f"has {name}, which the run sets itself."
        yield Problem("reward.reward_model.server_kwargs", what, f"Remove {name}.", (serves,))


def _functions_can_be_summed(reward: RewardConfig) -> Iterator[Problem]:
    """Every function can be told from the others, and one of them or the reward model has a weight."""
    key, entries = "reward.functions", reward.entries
    if not any(entry.weight for entry in entries) and not reward.reward_model.enable:
        what = "is empty" if not entries else "has no weight but 0"
        what += " and there is no reward model, so every reward would be 0."
        yield Problem(key, what, "Add a function, or reward.reward_model.enable=true.", ("reward.reward_model.enable",))
    yield from _no_secret_is_written_out(reward)
    if reward.functions is None:
        return
    if reward.custom_reward_function.path is not None:
        what = "is given, and reward.custom_reward_function.path names a function too."
        hint = f"Add {reward.custom_reward_function.path}:{reward.custom_reward_function.name} to the list instead."
        yield Problem(key, what, hint, ("reward.custom_reward_function.path",))
    elif (kwargs := reward.custom_reward_function.reward_kwargs) and not any(entry.is_object for entry in entries):
        what = f"has {', '.join(kwargs)}, and {key} names the functions, each with its own arguments."
        hint = "Write them into the entry of the function that takes them."
        yield Problem("reward.custom_reward_function.reward_kwargs", what, hint, (key,))
    for position, entry in enumerate(entries):
        if (entry.name is None) == (entry.path is None):
            which = "neither a name nor a path" if entry.name is None else "a name and a path"
            yield Problem(
                key, f"[{position}] has {which}.", f"Give one of the two; names are {', '.join(FUNCTION_NAMES)}."
            )
    parts = [entry.part for entry in entries]
    for part in sorted({part for part in parts if parts.count(part) > 1}):
        what = f"has two functions called {part}, whose scores could not be told apart."
        yield Problem(key, what, "Give one of them a label.")
    for part in [part for part in parts if part in TAKEN_NAMES and len(parts) > 1]:
        what = f"has a function called {part} among others, {TAKEN_NAMES[part]}."
        yield Problem(key, what, "Give it a label.")


def _no_secret_is_written_out(reward: RewardConfig) -> Iterator[Problem]:
    """An argument of a function that holds a secret names the variable that has it; so does `reward.env`."""
    arguments = [("reward.custom_reward_function.reward_kwargs", "", reward.custom_reward_function.reward_kwargs)]
    arguments += [
        ("reward.functions", f"[{position}]", entry.kwargs) for position, entry in enumerate(reward.functions or [])
    ]
    for key, place, kwargs in arguments:
        yield from _arguments_written_out(key, place, kwargs)
    yield from _variables_written_out("reward.env", reward.env)


def _arguments_written_out(key: str, place: str, kwargs: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in kwargs.items():
        if is_written_secret(name, value):
            what = f"{place} has {name} written out, which would be saved with the run.".lstrip()
            yield Problem(key, what, f"Export it as an environment variable and write {name}: env:ITS_NAME.")


def _variables_written_out(key: str, variables: Sequence[str]) -> Iterator[Problem]:
    for variable in variables:
        name, equals, value = variable.partition("=")
        if equals and value and is_secret_variable(name, value):
            what = f"has the value of {name} written out, which would be saved with the run."
            yield Problem(key, what, f"Export it, and write {name} alone.")


def environments_name_their_secrets(config: PPOTrainerConfig) -> Iterator[Problem]:
    """An argument of an environment that holds a secret names the variable that has it; so does `environment.env`."""
    yield from _arguments_written_out("environment.kwargs", "", config.environment.kwargs)
    for name, kwargs in config.environment.row_environments.items():
        yield from _arguments_written_out(f"environment.row_environments.{name}", "", kwargs)
    yield from _variables_written_out("environment.env", config.environment.env)


def a_program_ends_before_its_call(config: PPOTrainerConfig) -> Iterator[Problem]:
    """The policy is told what a program that took too long has printed; the tool's deadline has to be later."""
    settings, tool = config.environment, "environment.tool_timeout_s"
    arguments = {"environment.kwargs": settings.kwargs} if settings.path == "python" else {}
    if (of_rows := settings.row_environments.get("python")) is not None:
        arguments["environment.row_environments.python"] = of_rows
    for key, given in arguments.items():
        time_s = given.get("time_s", TIME_S)
        if isinstance(time_s, int | float) and time_s >= settings.tool_timeout_s:
            what = f"is {time_s:g} s, and must be less than {tool}={settings.tool_timeout_s:g}, at which the policy is "
            what += "told that the tool took too long, and not what the program printed."
            yield Problem(f"{key}.time_s", what, involves=(tool,))
    if "python" in settings.tools and settings.is_used and settings.tool_timeout_s <= TIME_S:
        what = f"is {settings.tool_timeout_s:g} s, and must be more than the {TIME_S:g} s that a program of the tool "
        yield Problem(tool, f"{what}python may take.", "Or set environment.path=python and environment.kwargs.time_s.")


def episodes_are_played_where_the_policy_is_served(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Requests from outside are sampled beside those of episodes."""
    if config.actor_rollout_ref.rollout.serve and not config.environment.is_used:
        hint = "Set environment.path=single_turn, which trains on the same responses as a run without it."
        what = "answers beside episodes, and environment.path is not set."
        yield Problem(f"{ROLLOUT}.serve", what, hint, ("environment.path",))


def an_episode_ends_before_its_phase(config: PPOTrainerConfig) -> Iterator[Problem]:
    """A step ends before its episode, which is then cut off before the phase is, so that no deadline ends the run."""
    settings, call_s = config.environment, config.trainer.timeouts.call_s
    if not settings.is_used:
        return
    key, phase = "environment.episode_timeout_s", "trainer.timeouts.call_s"
    if settings.step_timeout_s >= settings.episode_timeout_s:
        what = f"is {settings.step_timeout_s:g} s, and must be less than {key}={settings.episode_timeout_s:g}, at "
        yield Problem("environment.step_timeout_s", what + "which the episode is cut off.", involves=(key,))
    if settings.episode_timeout_s >= BATCH_SHARE * call_s:
        what = f"is {settings.episode_timeout_s:g} s, and must be less than {BATCH_SHARE * call_s:g} s, "
        what += f"{BATCH_SHARE:.0%} of {phase}={call_s:g}, after which all episodes of a batch are cut off."
        yield Problem(key, what, involves=(phase,))


def custom_class_is_complete(config: PPOTrainerConfig) -> Iterator[Problem]:
    """A custom data set class needs both a file and a name."""
    custom = config.data.custom_cls
    if custom.path and not custom.name:
        yield Problem("data.custom_cls.name", "needs the name of the class in data.custom_cls.path.")
    if custom.name and not custom.path:
        yield Problem("data.custom_cls.path", "needs the Python file that defines data.custom_cls.name.")


def validation_has_rows(config: RunConfiguration) -> Iterator[Problem]:
    """Validation needs rows."""
    trainer = config.trainer
    if config.data.val_files or config.data.val_max_samples == 0:
        return
    if trainer.test_freq > 0:
        what = f"is {trainer.test_freq}, but data.val_files is empty."
        yield Problem("trainer.test_freq", what, "Name validation rows, or set it to -1.", ("data.val_files",))
    if trainer.val_before_train:
        what = "is true, but data.val_files is empty."
        yield Problem(
            "trainer.val_before_train", what, "Name validation rows, or set it to false.", ("data.val_files",)
        )


def resume_names_its_folder(config: RunConfiguration) -> Iterator[Problem]:
    """A run that is to resume from a path has one."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield Problem("trainer.resume_from_path", "needs a checkpoint folder, because resume_mode is resume_path.")


def checkpoints_can_be_resumed(config: RunConfiguration) -> Iterator[Problem]:
    """A checkpoint needs sharded weights for a run to continue from it, unless it is meant to hold a model alone."""
    key = "" if isinstance(config, OfflineConfig) else f"{ACTOR}."
    saved = _checkpoint(config).save_contents
    if config.trainer.save_freq > 0 and "model" not in saved and set(saved) != {"hf_model"}:
        what = f"is [{','.join(saved)}], from which no run can continue."
        yield Problem(
            f"{key}checkpoint.save_contents", what, "Add model, or set trainer.save_freq=-1.", ("trainer.save_freq",)
        )


def _checkpoint(config: RunConfiguration) -> CheckpointConfig:
    return (config if isinstance(config, OfflineConfig) else config.actor_rollout_ref.actor).checkpoint


def policy_losses_have_their_constants(config: PPOTrainerConfig) -> Iterator[Problem]:
    """`dro` needs its beta, which has no published default; shares of tokens are above 0 and at most 1."""
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield Problem(f"{_LOSS}.dro_beta", "needs a value, because loss_mode is dro.")
    shares = {"clip_cov": loss.clip_cov_ratio, "kl_cov": loss.kl_cov_ratio}
    share = shares.get(loss.loss_mode)
    if share is not None and not 0 < share <= 1:
        what = f"is {share:g}, but must be a share of the tokens."
        yield Problem(f"{_LOSS}.{loss.loss_mode}_ratio", what, "Set it above 0 and at most 1.", (f"{_LOSS}.loss_mode",))
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        what = f"is {loss.clip_cov_lb:g}, not below clip_cov_ub={loss.clip_cov_ub:g}."
        yield Problem(f"{_LOSS}.clip_cov_lb", what, "Lower it.", (f"{_LOSS}.clip_cov_ub",))


def gdpo_knows_its_rewards(config: PPOTrainerConfig) -> Iterator[Problem]:
    """gdpo needs the names of the reward's parts, and reads nothing else."""
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
    """Filtering groups needs at least two samples in a group."""
    samples = config.actor_rollout_ref.rollout.n
    if config.algorithm.filter_groups.enable and samples < 2:
        what = f"is {samples}, so no group could ever have different rewards."
        hint = f"Set {ROLLOUT}.n=8, or algorithm.filter_groups.enable=false."
        yield Problem(f"{ROLLOUT}.n", what, hint, ("algorithm.filter_groups.enable",))


def ratios_have_bounds(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Thresholds of the rollout correction can be parsed and lie where they have an effect."""
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
    """Settings that have no meaning with the sampler's log-probs as the old ones are refused, and the reverse."""
    settings, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    bypass, reinforce = f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.loss_type"
    if not settings.bypass_mode:
        if settings.loss_type != "ppo_clip":
            what = f"is {settings.loss_type}, which only bypass mode reads."
            yield Problem(reinforce, what, f"Set {bypass}=true, or {_LOSS}.loss_mode=gpg.", (bypass,))
        return
    if config.algorithm.adv_estimator == "optimal_token_baseline":
        what = f"is true, but {_ESTIMATOR}=optimal_token_baseline needs the forward pass that it skips."
        yield Problem(bypass, what, "Set it to false.", (_ESTIMATOR,))
    if settings.loss_type == "reinforce" and loss != "vanilla":
        what = f"is reinforce, which would replace {_LOSS}.loss_mode={loss}."
        yield Problem(reinforce, what, "Set only one of the two.", (f"{_LOSS}.loss_mode",))
    if settings.rollout_is_batch_normalize:
        what = "is true, but bypass mode computes weights per micro-batch during the update, not for the whole batch."
        hint = f"Set it to false, or {bypass}=false."
        yield Problem(f"{_CORRECTION}.rollout_is_batch_normalize", what, hint, (bypass,))


def preferences_take_the_place_of_advantages(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Settings that only a run with advantages reads are refused beside a preference loss."""
    algorithm, actor, key = config.algorithm, config.actor_rollout_ref.actor, "algorithm.preference_loss"
    if algorithm.preference_loss is None:
        return
    samples = config.actor_rollout_ref.rollout.n
    if samples < 2:
        what = f"is {samples}, but a pair is made of two samples of a prompt."
        yield Problem(f"{ROLLOUT}.n", what, f"Set {ROLLOUT}.n=4, or {key}=null.", (key,))
    without_effect = {
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
        f"{_CORRECTION}.bypass_mode": algorithm.rollout_correction.bypass_mode,
        f"{_CORRECTION}.rollout_is": algorithm.rollout_correction.rollout_is,
        f"{_CORRECTION}.rollout_rs": algorithm.rollout_correction.rollout_rs,
        f"{ACTOR}.use_kl_loss": actor.use_kl_loss,
        f"{ACTOR}.entropy_coeff": actor.entropy_coeff,
        "critic.enable": config.needs_critic,
        "distillation.enabled": config.distillation.enabled,
    }
    for name, value in without_effect.items():
        if value:
            yield Problem(
                name, f"has no effect on {key}, which compares two samples.", "Remove one of the two.", (key,)
            )
    pair = config.data.max_prompt_length + 2 * config.data.max_response_length
    budget, rows = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    each = config.micro_batches()["actor"]
    if _is_below(each, pair):
        what = f"is {_tokens_of(each, budget)}, but a prompt with both its answers may have {pair}."
        involves = (key, "data.max_prompt_length", "data.max_response_length")
        yield Problem(each.tokens_key, what, f"Set it to at least {each.budget_for(pair)}.", involves)
    if not actor.use_dynamic_bsz and rows is not None and rows < 2:
        what = f"is {rows}, but a pair is two sequences."
        yield Problem(f"{ACTOR}.ppo_micro_batch_size_per_gpu", what, "Set it to at least 2.", (key,))
    if algorithm.kl_ctrl.type == "adaptive":
        what = f"is adaptive, but the beta of {key} is constant."
        yield Problem("algorithm.kl_ctrl.type", what, "Set it to fixed.", (key,))
    if algorithm.kl_ctrl.kl_coef == 0:
        what = f"is 0, but it is the beta of {key}."
        yield Problem("algorithm.kl_ctrl.kl_coef", what, "Set it above 0, e.g. to 0.1.", (key,))


def one_offline_row_fits_the_token_budget(config: OfflineConfig) -> Iterator[Problem]:
    """The token budget of a micro-batch is large enough for the longest row, or both answers of the longest pair."""
    data = config.data
    longest = data.max_length * (2 if isinstance(data, PairDataConfig) else 1)
    each = config.micro_batches()["model"]
    if _is_below(each, longest):
        if config.learns_from_pairs:
            row = f"the two answers of a pair may have 2 × {data.max_length}"
        elif isinstance(data, PairDataConfig):
            row = f"a prompt with the answer to another one may have 2 × {data.max_length}"
        else:
            row = f"one row may have {longest}"
        what = f"is {_tokens_of(each, data.max_token_len_per_gpu)}, but {row}."
        yield Problem(each.tokens_key, what, f"Set it to at least {each.budget_for(longest)}.", ("data.max_length",))


def adapters_name_layers(config: RunConfiguration) -> Iterator[Problem]:
    """Layers are named by a list, or by a regular expression that can be read."""
    for section, model in _learners(config).items():
        for key in ("target_modules", "exclude_modules"):
            value = getattr(model, key)
            if value == []:
                yield Problem(f"{section}.{key}", "is an empty list.", "Name layers, or remove the key.")
            if not isinstance(value, str):
                continue
            try:
                re.compile(value)
            except re.error as error:
                what = f"is {value!r}, which is no regular expression ({error})."
                yield Problem(f"{section}.{key}", what, "Write names as a list: [q_proj, v_proj].")


def _learners(config: RunConfiguration) -> Mapping[str, LearnerConfig]:
    if isinstance(config, PPOTrainerConfig):
        return {MODEL: config.actor_rollout_ref.model, "critic.model": config.critic.model}
    return {"model": config.model}


def an_adapter_adds_something(config: RunConfiguration) -> Iterator[Problem]:
    """A new adapter has a factor; scripts that train no adapter set 0."""
    for section, model in _learners(config).items():
        if model.lora_rank > 0 and model.lora_alpha == 0 and model.lora_adapter_path is None:
            what = "is 0, by which what the adapter adds is multiplied."
            yield Problem(f"{section}.lora_alpha", what, "Set it to 16, or to the rank.", (f"{section}.lora_rank",))


def weights_in_4_bits_are_frozen(config: RunConfiguration) -> Iterator[Problem]:
    """Nothing but an adapter is trained beside weights in 4 bits."""
    for section, model in _learners(config).items():
        if model.load_in_4bit and not model.trains_adapter:
            what = "is true, and weights of 4 bits can't be trained themselves."
            hint = f"Set {section}.lora_rank, for an adapter beside them, or remove it."
            yield Problem(f"{section}.load_in_4bit", what, hint, (f"{section}.lora_rank",))


def weights_in_4_bits_are_not_cut(config: RunConfiguration) -> Iterator[Problem]:
    """A weight of blocks with a magnitude each is not cut by a tensor group; FSDP2 shards it as bytes."""
    for (_, key, sharding), (section, model) in zip(
        trained_parts(config).values(), _learners(config).items(), strict=False
    ):
        if model.load_in_4bit and sharding.tensor_parallel_size > 1:
            what = f"is {sharding.tensor_parallel_size}, and a tensor group does not cut weights of 4 bits."
            hint = f"Set it to 1, or remove {section}.load_in_4bit."
            yield Problem(f"{key}.tensor_parallel_size", what, hint, (f"{section}.load_in_4bit",))


def an_adapter_is_in_float32(config: RunConfiguration) -> Iterator[Problem]:
    """What is trained beside frozen weights is small, and bfloat16 would spare next to nothing for its noise."""
    for (_, key, sharding), (section, model) in zip(
        trained_parts(config).values(), _learners(config).items(), strict=False
    ):
        if model.trains_adapter and sharding.model_dtype == "bf16":
            rank = f"{section}.{'lora_rank' if model.lora_rank > 0 else 'lora_adapter_path'}"
            what = f"is bf16, and with {rank} an adapter is trained, which is in float32."
            hint = f"Set {key}.model_dtype=fp32: frozen weights are in {key}.dtype, whatever it is."
            yield Problem(f"{key}.model_dtype", what, hint, (rank,))


def an_adapter_is_of_a_policy_that_learns(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Engines that are alone sample from the model's folder, to which nothing adds an adapter."""
    model = config.actor_rollout_ref.model
    if model.trains_adapter and config.trainer.role_pools.get("actor", "") is None:
        key = "lora_adapter_path" if model.lora_adapter_path else "lora_rank"
        what = "asks for an adapter, but trainer.role_pools.actor is null: engines sample from the model's folder."
        hint = "Remove it, and name a folder that `hrl export` wrote as the model."
        yield Problem(f"{MODEL}.{key}", what, hint, ("trainer.role_pools",))


def weights_are_cut_where_they_can_be(config: RunConfiguration) -> Iterator[Problem]:
    """No group cuts the weights of an optimizer that takes shards for rows."""
    for section, (optim, key, sharding) in trained_parts(config).items():
        for name in ("tensor_parallel_size", "expert_parallel_size"):
            if getattr(sharding, name) > 1 and (optim.name != "adamw" or sharding.offload_policy):
                other = f"{section}.name" if optim.name != "adamw" else f"{key}.offload_policy"
                what = (
                    f"is {getattr(sharding, name)}, and weights that are cut are stepped by adamw on the device alone."
                )
                hint = f"Set it to 1, or {other} to {'adamw' if optim.name != 'adamw' else 'false'}."
                yield Problem(f"{key}.{name}", what, hint, (other,))


_OF_LABELS = f"Set it to 1, or take {' or '.join(LABELLED_LOSS_TRAITS)}, whose rows are single answers with a label."


def constants_belong_to_the_loss(config: DPOTrainerConfig) -> Iterator[Problem]:
    """A constant that the chosen loss does not read is refused."""
    algorithm, name = config.algorithm, config.algorithm.loss_type
    labelled = config.learns_from_labels
    for constant in ("label_smoothing", "target_margin"):
        value = getattr(algorithm, constant)
        if value > 0 and (labelled or not getattr(pair_loss_traits(name), constant)):
            readers = [loss for loss, traits in PAIR_LOSS_TRAITS.items() if getattr(traits, constant)]
            what = f"is {value}, which the loss {name} does not read."
            hint = f"Set it to 0, or take {'one of ' if len(readers) > 1 else ''}{', '.join(readers)}."
            yield Problem(f"algorithm.{constant}", what, hint, ("algorithm.loss_type",))
    for constant in ("desirable_weight", "undesirable_weight"):
        if (value := getattr(algorithm, constant)) != 1 and not labelled:
            what = f"is {value}, which the loss {name} does not read."
            yield Problem(f"algorithm.{constant}", what, _OF_LABELS, ("algorithm.loss_type",))
    if labelled and algorithm.reference_free:
        what = f"is true, and the loss {name} compares every answer with the reference."
        yield Problem("algorithm.reference_free", what, "Set it to false.", ("algorithm.loss_type",))
    if labelled and LABELLED_LOSS_TRAITS[name].baseline and config.data.train_batch_size < 2:
        what = f"is 1, and the loss {name} reads each prompt with the answer to another one of its batch."
        yield Problem("data.train_batch_size", what, "Set it to at least 2.", ("algorithm.loss_type",))


def replayed_experts_come_from_somewhere(config: PPOTrainerConfig) -> Iterator[Problem]:
    """What replays experts gets them from the engine, or from a pass over old log-probs."""
    mode_key, engine_key = f"{ACTOR}.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"
    mode = config.actor_rollout_ref.actor.router_replay.mode
    returned = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    if (mode == "R3") != returned:
        what = f"is {str(returned).lower()}, but {mode_key} is {mode}: only R3 takes the engine's experts."
        yield Problem(engine_key, what, "Remove the key: it follows the mode.", (mode_key,))
    if mode == "R2" and (config.algorithm.rollout_correction.bypass_mode or config.algorithm.preference_loss):
        is_bypassed = config.algorithm.rollout_correction.bypass_mode
        passed = f"{_CORRECTION}.bypass_mode" if is_bypassed else "algorithm.preference_loss"
        what = f"is R2, which takes the experts of the pass over old log-probs, and with {passed} there is none."
        yield Problem(mode_key, what, "Set it to R3, or disabled.", (passed,))


def a_teacher_is_named_and_read(config: PPOTrainerConfig) -> Iterator[Problem]:
    """Distillation has a teacher, which is in the place of the reference, and a loss that can be where it is put."""
    if not config.distillation.enabled:
        return
    switch, loss = "distillation.enabled", config.distillation.distillation_loss
    mode, as_reward = f"{_DISTILLATION_LOSS}.loss_mode", f"{_DISTILLATION_LOSS}.use_policy_gradient"
    server, temperature = config.distillation.teacher_models.teacher_model.server, f"{ROLLOUT}.temperature"
    if config.teacher_is_served:
        for urls in server.of_each:
            yield from broken_addresses(_TEACHER_SERVER, urls)
        yield from written_out_key(_TEACHER_SERVER, server.api_key)
        if () in server.of_each:
            what = "has a name without an address."
            yield Problem(f"{_TEACHER_SERVER}.urls", what, "Name the servers that score such rows, or leave it out.")
        if (value := config.actor_rollout_ref.rollout.temperature) != 1:
            what = f"is {value:g}, and a served teacher says how likely tokens are at 1."
            hint = "Set it to 1, or let the run hold the teacher."
            yield Problem(temperature, what, hint, (f"{_TEACHER_SERVER}.urls",))
    elif not config.teacher_path:
        hint = f"Name a folder or hub id, or servers with {_TEACHER_SERVER}.urls."
        involved = (switch, f"{_TEACHER_SERVER}.urls")
        yield Problem(TEACHER, f"needs a value, because {switch} is true.", hint, involved)
    penalties = {
        f"{ACTOR}.use_kl_loss": config.actor_rollout_ref.actor.use_kl_loss,
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
    }
    for key, is_set in penalties.items():
        if is_set:
            what = "is true, but the teacher takes the place of the reference."
            yield Problem(key, what, f"Set it to false, or {switch}.", (switch,))
    if loss.use_policy_gradient and not loss.traits.is_sampled:
        what = f"is {loss.loss_mode}, which a sampled token's advantage can't hold: it has a gradient of its own."
        yield Problem(mode, what, f"Set k1, or {as_reward}=false.", (as_reward,))
    if config.reads_whole_teacher:
        yield from _what_the_whole_distribution_needs(config, mode)
    if not loss.use_policy_gradient and not loss.traits.has_gradient:
        what = f"is {loss.loss_mode}, whose expected gradient in a loss is zero."
        yield Problem(mode, what, f"Use k2 or reverse_kl_topk, or set {as_reward}=true.", (as_reward,))


def _what_the_whole_distribution_needs(config: PPOTrainerConfig, mode: str) -> Iterator[Problem]:
    """A teacher shows its states to a policy whose head is whole."""
    name = config.distillation.distillation_loss.loss_mode
    if config.teacher_is_served:
        what = f"is {name}, and a served teacher says how likely a few tokens are."
        yield Problem(mode, what, f"Set {name}_topk, or let the run hold the teacher.", (f"{_TEACHER_SERVER}.urls",))
    for owner, section in ((ACTOR, config.actor_rollout_ref.actor), (REF, config.actor_rollout_ref.ref)):
        if (degree := section.fsdp_config.tensor_parallel_size) > 1:
            key = f"{owner}.fsdp_config.tensor_parallel_size"
            what = f"is {name}, and with {key}={degree} no rank has a whole head."
            yield Problem(mode, what, f"Set {name}_topk, or {key}=1.", (key,))


PPO_RULES: tuple[Rule, ...] = (
    nothing_is_masked,
    clipped_rewards_have_a_limit,
    one_console_writes,
    mini_batches_divide_the_batch,
    groups_are_large_enough,
    critic_fits_the_estimator,
    what_was_cut_off_can_end_in_a_value,
    pairs_are_of_single_responses,
    bypass_mode_has_a_threshold,
    kl_in_the_loss_has_a_gradient,
    training_samples_come_from_the_policy,
    validation_sampling_makes_sense,
    one_row_fits_the_token_budget,
    fixed_micro_batches_have_a_size,
    *ENGINE_RULES,
    gradients_have_their_range,
    weights_are_cut_where_they_can_be,
    an_optimizer_steps_where_it_can,
    roles_have_pools,
    something_scores,
    custom_class_is_complete,
    validation_has_rows,
    resume_names_its_folder,
    checkpoints_can_be_resumed,
    policy_losses_have_their_constants,
    gdpo_knows_its_rewards,
    filtered_groups_can_differ,
    ratios_have_bounds,
    bypass_mode_does_what_is_set,
    preferences_take_the_place_of_advantages,
    environments_name_their_secrets,
    a_program_ends_before_its_call,
    an_episode_ends_before_its_phase,
    episodes_are_played_where_the_policy_is_served,
    adapters_name_layers,
    an_adapter_adds_something,
    weights_in_4_bits_are_frozen,
    weights_in_4_bits_are_not_cut,
    an_adapter_is_in_float32,
    an_adapter_is_of_a_policy_that_learns,
    replayed_experts_come_from_somewhere,
    a_teacher_is_named_and_read,
)


OFFLINE_RULES: tuple[Rule, ...] = (
    nothing_is_masked,
    one_console_writes,
    one_offline_row_fits_the_token_budget,
    gradients_have_their_range,
    weights_are_cut_where_they_can_be,
    an_optimizer_steps_where_it_can,
    shards_divide_the_processes,
    validation_has_rows,
    resume_names_its_folder,
    checkpoints_can_be_resumed,
    adapters_name_layers,
    an_adapter_adds_something,
    weights_in_4_bits_are_frozen,
    weights_in_4_bits_are_not_cut,
    an_adapter_is_in_float32,
)
DPO_RULES = (*OFFLINE_RULES, constants_belong_to_the_loss)


def warnings(config: RunConfiguration) -> list[str]:
    """Return what is allowed but probably not meant, one sentence each, for `hrl check` and the run's banner."""
    if isinstance(config, PPOTrainerConfig):
        found, section = list(_ppo_warnings(config)), MODEL
        trusts_code = config.actor_rollout_ref.model.trust_remote_code
    else:
        found, section, trusts_code = [], "model", config.model.trust_remote_code
    if trusts_code:
        found.append(f"{section}.trust_remote_code=true: code from the model's folder runs with your rights.")
    if config.trainer.save_freq <= 0 and config.trainer.total_training_steps != 0:  # else nothing is trained
        found.append("trainer.save_freq is off: a run that is killed starts again from the first step.")
    elif config.trainer.save_freq > 0 and set(_checkpoint(config).save_contents) == {"hf_model"}:
        found.append("checkpoint.save_contents=[hf_model]: no run can continue from its checkpoints.")
    elif never_best := _validations_without_a_checkpoint(config):
        found.append(never_best)
    elif isinstance(config, OfflineConfig) and "hf_model" not in config.checkpoint.save_contents:
        found.append("checkpoint.save_contents has no hf_model: no folder for transformers and vLLM is written.")
    if config.trainer.resume_from_path and config.trainer.resume_mode != "resume_path":
        found.append(
            f"trainer.resume_from_path has no effect while trainer.resume_mode is {config.trainer.resume_mode}."
        )
    found += [*_low_rates_of_adapters(config), *_keys_of_no_adapter(config), *_idle_keys_of_memory(config)]
    found += _rates_of_adamw(config)
    return [*config.remarks, *found]


_OF_ADAPTERS = ("lora_alpha", "target_modules", "exclude_modules", "use_rslora")


def _keys_of_no_adapter(config: RunConfiguration) -> Iterator[str]:
    """Tell keys of adapters that nothing reads."""
    default = LearnerConfig()
    for section, learner in _learners(config).items():
        given = [name for name in _OF_ADAPTERS if getattr(learner, name) != getattr(default, name)]
        keys = ", ".join(f"{section}.{name}" for name in given)
        if given and not learner.trains_adapter:
            yield f"{keys} has no effect: {section}.lora_rank is 0, so the model itself is trained."
        elif given and learner.lora_adapter_path is not None:
            yield f"{keys} has no effect: the adapter in {section}.lora_adapter_path has its own."


def _idle_keys_of_memory(config: RunConfiguration) -> Iterator[str]:
    """Tell keys by which memory would be saved that nothing reads."""
    for _, key, sharding in trained_parts(config).values():
        idle = [f"{key}.{name}" for name in ("param_offload", "optimizer_offload") if getattr(sharding, name)]
        if sharding.offload_policy and idle:
            yield f"{', '.join(idle)} has no effect: {key}.offload_policy keeps weights and moments in host memory."
    for section, model in _learners(config).items():
        if model.recompute_num_layers is not None and not model.enable_gradient_checkpointing:
            yield f"{section}.recompute_num_layers has no effect: {section}.enable_gradient_checkpointing is false."


def _rates_of_adamw(config: RunConfiguration) -> Iterator[str]:
    """Tell a rate at which a relative step is next to none."""
    for section, (optim, _, _) in trained_parts(config).items():
        if optim.name == "adafactor" and 0 < optim.lr < LEAST_RELATIVE_RATE:
            yield f"{section}.lr={optim.lr:g} is a rate for AdamW; adafactor's is relative to the size of a weight."


def _low_rates_of_adapters(config: RunConfiguration) -> Iterator[str]:
    learners = _learners(config)
    if isinstance(config, PPOTrainerConfig):
        rates = {MODEL: (f"{ACTOR}.optim.lr", config.actor_rollout_ref.actor.optim.lr)}
        if config.needs_critic:
            rates["critic.model"] = ("critic.optim.lr", config.critic.optim.lr)
    else:
        rates = {"model": ("optim.lr", config.optim.lr)}
    for section, (key, rate) in rates.items():
        if learners[section].trains_adapter and 0 < rate < ADAPTER_RATE / 10:
            yield f"{key}={rate:g} is a rate for a whole model; adapters need larger ones."


def _validations_without_a_checkpoint(config: RunConfiguration) -> str | None:
    """Return a warning if most checkpoints have no validation and most validations no checkpoint."""
    save, test = config.trainer.save_freq, config.trainer.test_freq
    if config.trainer.max_ckpt_to_keep is None or save <= 0 or test <= 0 or save % test == 0 or test % save == 0:
        return None
    return (
        f"trainer.save_freq={save} and trainer.test_freq={test} meet every {math.lcm(save, test)} steps only, and the "
        "best checkpoint is chosen among those: make one a multiple of the other."
    )


def _ppo_warnings(config: PPOTrainerConfig) -> Iterator[str]:
    actor, estimator = config.actor_rollout_ref.actor, config.algorithm.adv_estimator
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward penalise the same divergence twice."
    for name in ("ulysses_sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size"):
        own = getattr(config.actor_rollout_ref.ref.fsdp_config, name)
        if config.reference_is_actor and own != getattr(actor.fsdp_config, name):
            yield f"{REF}.fsdp_config.{name} has no effect: the reference is the policy with its adapter off."
    distilled = config.distillation
    named = distilled.teacher_models.teacher_model
    for key, is_set in ((TEACHER, named.model_path is not None), (f"{_TEACHER_SERVER}.urls", bool(named.server.urls))):
        if not distilled.enabled and is_set:
            yield f"{key} has no effect while distillation.enabled is false."
    if distilled.teacher_key != "data_source" and not (distilled.enabled and isinstance(named.server.urls, Mapping)):
        yield f"distillation.teacher_key has no effect: {_TEACHER_SERVER}.urls names no teachers of their own rows."
    # Every placement names a pool of the reference; one that others have too is no mistake.
    own_pool = config.trainer.role_pools.get("ref")
    if config.teacher_is_served and own_pool and own_pool not in resolve_placement(config).pools:
        yield "trainer.role_pools.ref has no effect: servers score the samples, and no process of the run."
    if distilled.enabled and distilled.distillation_loss.distillation_loss_coef != distilled.distillation_loss.weight:
        yield f"{_DISTILLATION_LOSS}.distillation_loss_coef has no effect while use_task_rewards is false."
    loss = distilled.distillation_loss
    if distilled.enabled and not loss.traits.reads_top and loss.log_prob_min_clamp is not None:
        yield f"{_DISTILLATION_LOSS}.log_prob_min_clamp has no effect on {loss.loss_mode}: it is of the _topk modes."
    if config.critic.enable and not estimator_traits(estimator).needs_critic:
        yield f"critic.enable=true trains a critic that {_ESTIMATOR}={estimator} never reads."
    if actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is not None:
        yield f"{ACTOR}.ppo_micro_batch_size_per_gpu has no effect while use_dynamic_bsz is true."
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.rollout_is is not None:
        yield (
            f"{_CORRECTION}.rollout_is={correction.rollout_is} is measured and weighs nothing: the clipped loss of "
            "bypass mode already contains that ratio."
        )
    yield from engine_warnings(config)
    if config.environment.is_used and config.environment.max_turns > 1 and (rowwise := _taken_by_rows(config)):
        yield (
            f"{', '.join(rowwise)}: the update takes each row for a sequence, so an episode that a chat template gives "
            "several rows counts as several there (episode/branches/mean)."
        )


def _taken_by_rows(config: PPOTrainerConfig) -> list[str]:
    """Return the settings by which the update computes something over a whole row, each as `key=value`."""
    settings, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    found = []
    if policy_loss_traits(loss).has_row_ratio:
        found.append(f"{_LOSS}.loss_mode={loss}")
    if settings.bypass_mode:  # without it, the driver corrects, to which an episode is one sequence
        if settings.rollout_is not in (None, "token"):
            found.append(f"{_CORRECTION}.rollout_is={settings.rollout_is}")
        rules = parse_rejections(settings.rollout_rs, settings.rollout_rs_threshold)
        if any(REJECTION_RULES[rule][0] != "token" for rule, _ in rules):
            found.append(f"{_CORRECTION}.rollout_rs={settings.rollout_rs}")
    return found
