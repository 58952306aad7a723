"""The arithmetic of a run in words: what one step samples and trains on, and where.

Pure functions of the configuration, used by `hrl check` and by the banner of a run.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hrl.algos.registry import estimator_traits
from hrl.config.actor import ActorConfig
from hrl.config.critic import CriticConfig
from hrl.config.keys import leaves
from hrl.config.placement import Placement, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import Section

_ACTOR, _REF, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))

UNITS: dict[str, str] = {
    "data.train_batch_size": "prompts per step",
    "data.val_batch_size": "prompts generated at once",
    "data.max_prompt_length": "tokens",
    "data.max_response_length": "tokens",
    f"{_ACTOR}.ppo_mini_batch_size": "prompts per optimizer step",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "sequences per process",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "tokens per process",
    f"{_ACTOR}.optim.lr_warmup_steps": "optimizer steps",
    f"{_REF}.log_prob_micro_batch_size_per_gpu": "sequences per process",
    f"{_REF}.log_prob_max_token_len_per_gpu": "tokens per process",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": "sequences per process",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": "tokens per process",
    f"{_ROLLOUT}.n": "samples per prompt",
    f"{_ROLLOUT}.gpu_memory_utilization": "of a GPU's memory",
    f"{_ROLLOUT}.max_num_seqs": "sequences per engine at once",
    f"{_ROLLOUT}.max_num_batched_tokens": "tokens per engine iteration",
    f"{_ROLLOUT}.max_model_len": "tokens",
    f"{_ROLLOUT}.tensor_model_parallel_size": "processes per engine",
    f"{_ROLLOUT}.weight_sync.bucket_mb": "MiB per buffer",
    "critic.ppo_mini_batch_size": "prompts per optimizer step",
    "critic.ppo_micro_batch_size_per_gpu": "sequences per process",
    "critic.ppo_max_token_len_per_gpu": "tokens per process",
    "critic.forward_max_token_len_per_gpu": "tokens per process",
    "algorithm.kl_ctrl.horizon": "sequences",
    "algorithm.filter_groups.max_num_gen_batches": "batches of prompts per step",
    "reward.num_workers": "processes",
    "reward.max_concurrency": "async calls per process",
    "reward.reward_model.max_token_len_per_gpu": "tokens per process",
    "reward.reward_model.micro_batch_size_per_gpu": "sequences per process",
    "reward.overlong_buffer.len": "tokens",
    "trainer.n_gpus_per_node": "processes per machine",
    "trainer.nnodes": "machines",
    "trainer.test_freq": "steps between validations",
    "trainer.save_freq": "steps between checkpoints",
    "trainer.critic_warmup": "steps",
    "trainer.total_training_steps": "steps",
    "trainer.total_epochs": "passes over the training rows",
    "trainer.log_rollouts_freq": "steps between tables of samples",
    "trainer.log_val_generations": "samples",
    "trainer.max_ckpt_to_keep": "checkpoints",
}
"""Keys whose name hides what they count → the unit."""


class Fact(NamedTuple):
    """One line of the arithmetic: a label and its sentence."""

    label: str
    text: str


class StepSizes(NamedTuple):
    """The counts that one training step is made of.

    Attributes:
        prompts: Prompts sampled.
        samples: Samples per prompt.
        sequences: Prompts × samples.
        mini_batches: Mini-batches per pass.
        epochs: Passes over the batch.
        optimizer_steps: mini_batches × epochs.
    """

    prompts: int
    samples: int
    sequences: int
    mini_batches: int
    epochs: int
    optimizer_steps: int


def step_sizes(config: PPOTrainerConfig, learner: ActorConfig | CriticConfig | None = None) -> StepSizes:
    """Return counts of one step of the actor, or of another learner."""
    learner = learner or config.actor_rollout_ref.actor
    prompts, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini_batches = prompts // learner.ppo_mini_batch_size
    return StepSizes(
        prompts, samples, prompts * samples, mini_batches, learner.ppo_epochs, mini_batches * learner.ppo_epochs
    )


def total_steps(config: Any, train_rows: int) -> int:
    """Return steps of the run over `train_rows` rows.

    The rows that don't fill an epoch's last batch are left out of it.
    """
    by_epochs = train_rows // config.data.train_batch_size * config.trainer.total_epochs
    return by_epochs if config.trainer.total_training_steps is None else config.trainer.total_training_steps


def batch_arithmetic(config: PPOTrainerConfig, *, train_rows: int | None = None) -> list[Fact]:
    """Return the run in numbers.

    Args:
        config: A valid configuration.
        train_rows: Training rows after filtering, once they are known; None before the data are read.
    """
    return [*_step_facts(config), _length_fact(config, train_rows), *_micro_batch_facts(config), *_engine_facts(config)]


def _step_facts(config: PPOTrainerConfig) -> Iterator[Fact]:
    sizes = step_sizes(config)
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    counts = f"{count(sizes.prompts, 'prompt')} × {count(sizes.samples, 'sample')}"
    tokens = f"{prompt:,} prompt + {response:,} response = {prompt + response:,} tokens"
    yield Fact("one step", f"{counts} = {count(sizes.sequences, 'sequence')}, each at most {tokens}")
    if estimator_traits(config.algorithm.adv_estimator).needs_baseline:
        yield Fact("baselines", f"{count(sizes.prompts, 'greedy response')} more per step, one for each prompt")
    if config.algorithm.filter_groups.enable:
        bound = config.algorithm.filter_groups.max_num_gen_batches
        differ = f"differ in {config.algorithm.filter_groups.metric}"
        most = f"at most {count(bound, 'batch', 'batches')} = {count(bound * sizes.prompts, 'prompt')} a step"
        yield Fact("dynamic sampling", f"until the samples of {count(sizes.prompts, 'prompt')} {differ}, {most}")
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    yield Fact("actor update", _update_sentence(sizes, mini))
    if config.needs_critic:
        critic = config.critic
        yield Fact("critic update", _update_sentence(step_sizes(config, critic), critic.ppo_mini_batch_size))


def _update_sentence(sizes: StepSizes, mini_batch_prompts: int) -> str:
    rows = mini_batch_prompts * sizes.samples
    return (
        f"{count(sizes.mini_batches, 'mini-batch', 'mini-batches')} of {count(rows, 'sequence')} "
        f"({count(mini_batch_prompts, 'prompt')}) × {count(sizes.epochs, 'pass', 'passes')} = "
        f"{count(sizes.optimizer_steps, 'optimizer step')} per step"
    )


def _length_fact(config: PPOTrainerConfig, train_rows: int | None) -> Fact:
    trainer, sizes = config.trainer, step_sizes(config)
    epochs = count(trainer.total_epochs, "epoch")
    if trainer.total_training_steps is not None:
        steps = trainer.total_training_steps
        text = f"{count(steps, 'step')} = {count(steps * sizes.optimizer_steps, 'optimizer step')} of the actor"
    elif train_rows is None:
        text = f"{epochs} of (training rows ÷ {sizes.prompts:,}) steps, counted when the rows have been read"
    else:
        per_epoch, left = divmod(train_rows, sizes.prompts)
        rest = f", {left} left over," if left else ""
        steps = total_steps(config, train_rows)
        updates = count(steps * sizes.optimizer_steps, "optimizer step")
        text = (
            f"{train_rows:,} rows ÷ {count(sizes.prompts, 'prompt')} = {count(per_epoch, 'step')} an epoch{rest} × "
            f"{epochs} = {count(steps, 'step')} = {updates} of the actor"
        )
    return Fact("run", text)


def _micro_batch_facts(config: PPOTrainerConfig) -> Iterator[Fact]:
    roles = config.actor_rollout_ref
    row = config.data.max_prompt_length + config.data.max_response_length
    actor, ref, critic, model = roles.actor, roles.ref, config.critic, config.reward.reward_model
    passes: list[tuple[str, bool, int, int | None]] = [
        ("actor", actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu)
    ]
    if config.needs_reference:
        limits = (ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu)
        passes.append(("ref", ref.log_prob_use_dynamic_bsz, *limits))
    if config.needs_critic:
        limits = (critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu)
        passes.append(("critic", critic.use_dynamic_bsz, *limits))
    if config.needs_reward_model:
        passes.append(("rm", model.use_dynamic_bsz, model.max_token_len_per_gpu, model.micro_batch_size_per_gpu))
    for role, dynamic, tokens, rows in passes:
        if dynamic:
            text = f"packed up to {tokens:,} tokens per process ({count(tokens // row, 'longest sequence')})"
        else:
            text = f"{count(rows or 0, 'sequence')} per process (at most {(rows or 0) * row:,} tokens)"
        yield Fact(f"micro-batch of {role}", text)


def _engine_facts(config: PPOTrainerConfig) -> Iterator[Fact]:
    rollout, placement = config.actor_rollout_ref.rollout, resolve_placement(config)
    processes, ranks = placement.processes(placement.rollout), rollout.tensor_model_parallel_size
    engines = processes // ranks
    per_engine = -(-step_sizes(config).sequences // engines)
    yield Fact(
        "engines",
        f"{count(processes, 'rollout process', 'rollout processes')} ÷ {ranks} per engine = "
        f"{count(engines, rollout.name + ' engine')}, about {count(per_engine, 'sequence')} each, "
        f"{rollout.max_num_seqs:,} at once",
    )
    yield Fact(
        "KV cache",
        f"{rollout.gpu_memory_utilization:.0%} of each GPU together with the weights; "
        f"on CPU {rollout.kv_cache_gib:g} GiB per engine",
    )


def placement_facts(config: PPOTrainerConfig) -> list[Fact]:
    """Return which roles live on which processes."""
    placement = resolve_placement(config)
    return [Fact(f"pool {pool}", _pool_sentence(placement, pool)) for pool in placement.pools]


def _pool_sentence(placement: Placement, pool: str) -> str:
    sizes = placement.pools[pool]
    processes = count(sum(sizes), "process", "processes")
    per_machine = " + ".join(map(str, sizes))
    machines = f" ({per_machine} on {len(sizes)} machines)" if len(sizes) > 1 else ""
    roles = ", ".join(placement.roles_on(pool))
    return f"{processes}{machines} with {roles}"


def units_in_words(config: PPOTrainerConfig) -> list[Fact]:
    """Return the keys of `UNITS` that take part in this run, with value and unit.

    What is off or not built is left out.
    """
    built = {
        "critic.": config.needs_critic,
        f"{_REF}.": config.needs_reference,
        "reward.reward_model.": config.needs_reward_model,
        "algorithm.kl_ctrl.": config.algorithm.use_kl_in_reward,
        "algorithm.filter_groups.": config.algorithm.filter_groups.enable,
    }
    absent = tuple(section for section, is_built in built.items() if not is_built)
    values = {key: value_of(config, key) for key in UNITS if not key.startswith(absent)}
    return [Fact(key, f"{value:,} {UNITS[key]}") for key, value in values.items() if value is not None and value > 0]


def value_of(config: Section, key: str) -> Any:
    """Return the value of a dotted key."""
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name)
    return node


def differences(config: Section) -> Mapping[str, tuple[Any, Any]]:
    """Keys that differ from the schema's plain default: key → (value, default)."""
    values = {key: (value_of(config, key), leaf.default) for key, leaf in leaves(type(config)).items()}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 step`, `2 steps`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
