"""The arithmetic of a run in words: what one step samples and trains on, and where.

Pure functions of the configuration, used by `hrl check` and by the banner of a run.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from hrl.algos.registry import estimator_traits
from hrl.config.actor import ActorConfig
from hrl.config.critic import CriticConfig
from hrl.config.model import MicroBatches
from hrl.config.offline import DPOTrainerConfig, OfflineConfig
from hrl.config.outline import RunConfiguration
from hrl.config.placement import Placement, resolve_placement
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import REF, Section, WholeConfig, defaults, leaves


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
    """Count one step of the actor, or of another learner."""
    learner = learner or config.actor_rollout_ref.actor
    prompts, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini_batches = prompts // learner.ppo_mini_batch_size
    return StepSizes(
        prompts, samples, prompts * samples, mini_batches, learner.ppo_epochs, mini_batches * learner.ppo_epochs
    )


def total_steps(config: RunConfiguration, train_rows: int) -> int:
    """Return the number of steps over `train_rows` rows; rows that don't fill an epoch's last batch are skipped."""
    by_epochs = train_rows // config.data.train_batch_size * config.trainer.total_epochs
    return by_epochs if config.trainer.total_training_steps is None else config.trainer.total_training_steps


def batch_arithmetic(config: RunConfiguration, *, train_rows: int | None = None) -> list[Fact]:
    """Describe the run in numbers.

    Args:
        config: A valid configuration.
        train_rows: Training rows that are kept, once they are known; None before the data are read.
    """
    if isinstance(config, PPOTrainerConfig):
        if config.trainer.total_training_steps == 0:  # as `hrl eval` does
            return [Fact("run", "validation alone, no step"), *_engine_facts(config)]
        steps, micro_batches = _step_facts(config), [*_micro_batch_facts(config), *_engine_facts(config)]
    else:
        noun, answers = ("pair", 2) if config.learns_from_pairs else ("row", 1)
        text = _micro_batch_in_words(config.micro_batches()["model"], answers * config.data.max_length, noun)
        steps, micro_batches = _offline_step_facts(config), [Fact("micro-batch", text)]
    return [*steps, _length_fact(config, train_rows), *micro_batches]


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


def _length_fact(config: RunConfiguration, train_rows: int | None) -> Fact:
    trainer, size = config.trainer, config.data.train_batch_size
    updates = step_sizes(config).optimizer_steps if isinstance(config, PPOTrainerConfig) else 0

    def in_words(steps: int) -> str:
        counted = f" = {count(steps * updates, 'optimizer step')} of the actor" if updates else ""
        return count(steps, "step") + counted

    if trainer.total_training_steps is not None:
        return Fact("run", in_words(trainer.total_training_steps))
    epochs = count(trainer.total_epochs, "epoch")
    if train_rows is None:
        return Fact("run", f"{epochs} of (training rows ÷ {size:,}) steps, counted when the rows have been read")
    per_epoch, left = divmod(train_rows, size)
    batch = count(size, "prompt") if updates else f"{size:,}"
    rest = f", {left} left over," if left else ""
    steps = in_words(total_steps(config, train_rows))
    text = f"{train_rows:,} rows ÷ {batch} = {count(per_epoch, 'step')} an epoch{rest} × {epochs} = {steps}"
    return Fact("run", text)


def _micro_batch_facts(config: PPOTrainerConfig) -> Iterator[Fact]:
    row = config.data.max_prompt_length + config.data.max_response_length
    for name, each in config.micro_batches().items():
        if name not in ("log_prob", "values"):
            yield Fact(f"micro-batch of {name}", _micro_batch_in_words(each, row, "sequence"))


def _micro_batch_in_words(each: MicroBatches, longest: int, noun: str) -> str:
    tokens = each.largest(longest)
    whose = "process" if each.processes == 1 else f"group of {each.processes} processes"
    if each.max_rows is None:
        return f"packed up to {tokens:,} tokens per {whose} ({count(tokens // longest, f'longest {noun}')})"
    return f"{count(each.max_rows, noun)} per {whose} (at most {tokens:,} tokens)"


def _engine_facts(config: PPOTrainerConfig) -> Iterator[Fact]:
    rollout, placement = config.actor_rollout_ref.rollout, resolve_placement(config)
    processes, ranks = placement.processes(placement.rollout), rollout.tensor_model_parallel_size
    engines = processes // ranks
    if rollout.is_served:
        each = -(-step_sizes(config).sequences // max(1, len(rollout.server.urls)))
        yield Fact(
            "engines",
            f"{count(len(rollout.server.urls), 'server')} that somebody else started, about {count(each, 'sequence')} "
            f"each, at most {rollout.max_num_seqs:,} at once from each of {count(processes, 'process', 'processes')}",
        )
        return
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


def placement_facts(config: RunConfiguration) -> list[Fact]:
    """Describe which roles live on which processes."""
    if not isinstance(config, PPOTrainerConfig):
        trainer = config.trainer
        machines = f" ({trainer.n_gpus_per_node} on each of {trainer.nnodes} machines)" if trainer.nnodes > 1 else ""
        groups = _groups_in_words(config.micro_batches()["model"], config.num_processes)
        return [Fact("model", f"{count(config.num_processes, 'process', 'processes')}{machines}{groups}")]
    placement = resolve_placement(config)
    return [Fact(f"pool {pool}", _pool_sentence(config, placement, pool)) for pool in placement.pools]


def _groups_in_words(each: MicroBatches | None, processes: int) -> str:
    """Return how a role's processes share sequences or weights, in brackets; nothing where each has its own."""
    if each is None or each.processes == 1:
        return ""
    kind = "sequence" if each.slices > 1 else "tensor"
    return f" ({count(processes // each.processes, f'{kind} group')} of {each.processes})"


def _pool_sentence(config: PPOTrainerConfig, placement: Placement, pool: str) -> str:
    sizes = placement.pools[pool]
    processes = count(sum(sizes), "process", "processes")
    per_machine = " + ".join(map(str, sizes))
    machines = f" ({per_machine} on {len(sizes)} machines)" if len(sizes) > 1 else ""
    passes = config.micro_batches()
    passes["actor_rollout"] = passes["actor"]
    roles = ", ".join(f"{role}{_groups_in_words(passes.get(role), sum(sizes))}" for role in placement.roles_on(pool))
    return f"{processes}{machines} with {roles}"


def _offline_step_facts(config: OfflineConfig) -> Iterator[Fact]:
    rows, longest = config.data.train_batch_size, f"at most {config.data.max_length:,} tokens"
    if config.learns_from_pairs:
        text = f"{count(rows, 'pair')} = {count(2 * rows, 'answer')}, each with its prompt {longest}"
    else:
        text = f"{count(rows, 'row')}, each {longest}"
    yield Fact("one step", f"{text}; one optimizer step")
    if isinstance(config, DPOTrainerConfig) and config.needs_reference:
        each = "pair" if config.learns_from_pairs else "answer, to its own prompt and to another,"
        yield Fact("reference", f"the model before its first step; its log-probs of every {each} are computed once")


def units_in_words(config: WholeConfig) -> list[Fact]:
    """Return value and unit of the keys that this run uses and whose name doesn't tell their unit.

    Keys of features that are off or not built are left out.
    """
    absent: tuple[str, ...] = ()
    if isinstance(config, PPOTrainerConfig):
        built = {
            "critic.": config.needs_critic,
            f"{REF}.": config.runs_reference,
            "reward.reward_model.": config.needs_reward_model,
            "algorithm.kl_ctrl.": config.algorithm.use_kl_in_reward,
            "algorithm.filter_groups.": config.algorithm.filter_groups.enable,
        }
        absent = tuple(section for section, is_built in built.items() if not is_built)
    found = []
    for key, leaf in leaves(type(config)).items():
        value = attrgetter(key)(config)
        if leaf.unit is not None and value is not None and value > 0 and not key.startswith(absent):
            found.append(Fact(key, f"{value:,} {leaf.unit}"))
    return found


def changed_values(config: Section) -> Mapping[str, tuple[Any, Any]]:
    """Return the keys that differ from the schema's plain default: key → (plain value, default)."""
    values = {key: (attrgetter(key)(config), default) for key, default in defaults(type(config)).items()}
    return {key: (_plain(value), default) for key, (value, default) in values.items() if value != default}


def _plain(value: Any) -> Any:
    """Return a key's value as a file would hold it: an entry of a list, too, may be a section."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.model_dump() if isinstance(value, Section) else value


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 step`, `2 steps`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
