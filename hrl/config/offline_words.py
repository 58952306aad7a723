"""A run of `main_dpo`, `main_sft` or `main_rm` in words. Pure functions of the configuration."""

from collections.abc import Iterator

from hrl.config.arithmetic import Fact, count, total_steps, value_of
from hrl.config.offline import DPOTrainerConfig, OfflineConfig, PairDataConfig

UNITS: dict[str, str] = {
    "data.train_batch_size": "rows per optimizer step",
    "data.max_length": "tokens",
    "data.max_token_len_per_gpu": "tokens per process",
    "data.micro_batch_size_per_gpu": "rows per process",
    "optim.lr_warmup_steps": "optimizer steps",
    "trainer.n_gpus_per_node": "processes per machine",
    "trainer.nnodes": "machines",
    "trainer.test_freq": "steps between validations",
    "trainer.save_freq": "steps between checkpoints",
    "trainer.total_training_steps": "steps",
    "trainer.total_epochs": "passes over the training rows",
    "trainer.max_ckpt_to_keep": "checkpoints",
}
"""Keys whose name hides what they count → the unit."""


def batch_arithmetic(config: OfflineConfig, *, train_rows: int | None = None) -> list[Fact]:
    """Return the run in numbers.

    Args:
        config: A valid configuration.
        train_rows: Training rows that are kept, once they are known; None before the data are read.
    """
    return [*_step_facts(config), _length_fact(config, train_rows), _micro_batch_fact(config)]


def _step_facts(config: OfflineConfig) -> Iterator[Fact]:
    rows, longest = config.data.train_batch_size, f"at most {config.data.max_length:,} tokens"
    if isinstance(config.data, PairDataConfig):
        text = f"{count(rows, 'pair')} = {count(2 * rows, 'answer')}, each with its prompt {longest}"
    else:
        text = f"{count(rows, 'row')}, each {longest}"
    yield Fact("one step", f"{text}; one optimizer step")
    if isinstance(config, DPOTrainerConfig) and config.needs_reference:
        yield Fact("reference", "the model before its first step; its log-probs of every pair are computed once")


def _length_fact(config: OfflineConfig, train_rows: int | None) -> Fact:
    trainer, size = config.trainer, config.data.train_batch_size
    epochs = count(trainer.total_epochs, "epoch")
    if trainer.total_training_steps is not None:
        text = count(trainer.total_training_steps, "step")
    elif train_rows is None:
        text = f"{epochs} of (training rows ÷ {size:,}) steps, counted when the rows have been read"
    else:
        per_epoch, left = divmod(train_rows, size)
        rest = f", {left} left over," if left else ""
        steps = count(total_steps(config, train_rows), "step")
        text = f"{train_rows:,} rows ÷ {size:,} = {count(per_epoch, 'step')} an epoch{rest} × {epochs} = {steps}"
    return Fact("run", text)


def _micro_batch_fact(config: OfflineConfig) -> Fact:
    data = config.data
    noun, longest = ("pair", 2 * data.max_length) if isinstance(data, PairDataConfig) else ("row", data.max_length)
    if data.micro_batch_size_per_gpu is None:
        held = count(data.max_token_len_per_gpu // longest, f"longest {noun}")
        return Fact("micro-batch", f"packed up to {data.max_token_len_per_gpu:,} tokens per process ({held})")
    rows = data.micro_batch_size_per_gpu
    return Fact("micro-batch", f"{count(rows, noun)} per process (at most {rows * longest:,} tokens)")


def placement_facts(config: OfflineConfig) -> list[Fact]:
    """On how many processes the model lives."""
    trainer = config.trainer
    machines = f" ({trainer.n_gpus_per_node} on each of {trainer.nnodes} machines)" if trainer.nnodes > 1 else ""
    return [Fact("model", f"{count(config.num_processes, 'process', 'processes')}{machines}")]


def units_in_words(config: OfflineConfig) -> list[Fact]:
    """Return the keys of `UNITS` with value and unit; what is off is left out."""
    values = {key: value_of(config, key) for key in UNITS}
    return [Fact(key, f"{value:,} {UNITS[key]}") for key, value in values.items() if value is not None and value > 0]
