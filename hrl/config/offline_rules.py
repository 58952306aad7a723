"""Rules between keys of the offline trainers. Each is a generator of problems, named for what it enforces."""

from collections.abc import Callable, Iterator

from hrl.algos.registry import PAIR_LOSS_TRAITS, pair_loss_traits
from hrl.config.offline import DPOTrainerConfig, OfflineConfig, PairDataConfig
from hrl.config.problems import Problem
from hrl.config.rules import (
    not_registered,
    one_console_writes,
    resume_names_its_folder,
    trackers_are_known,
    validation_has_rows,
)


def one_row_fits_the_token_budget(config: OfflineConfig) -> Iterator[Problem]:
    """The hard cap of a micro-batch admits the longest row, or both answers of the longest pair."""
    data = config.data
    pairs = isinstance(data, PairDataConfig)
    longest = data.max_length * (2 if pairs else 1)
    if data.micro_batch_size_per_gpu is None and data.max_token_len_per_gpu < longest:
        row = f"the two answers of a pair may have 2 × {data.max_length}" if pairs else f"one row may have {longest}"
        what = f"is {data.max_token_len_per_gpu} tokens, but {row}."
        yield Problem("data.max_token_len_per_gpu", what, f"Set it to at least {longest}.", ("data.max_length",))


def gradients_have_their_range(config: OfflineConfig) -> Iterator[Problem]:
    """Small gradients vanish in float16, and nothing scales the loss."""
    if config.model.fsdp_config.dtype == "float16":
        what = "is float16, in which small gradients become zero: the loss isn't scaled."
        yield Problem("model.fsdp_config.dtype", what, "Set it to bfloat16.")


def shards_divide_the_processes(config: OfflineConfig) -> Iterator[Problem]:
    """Every process is part of exactly one sharded copy."""
    size, processes = config.model.fsdp_config.fsdp_size, config.num_processes
    if size != -1 and (size == 0 or processes % size):
        what = f"is {size}, which does not divide the {processes} processes."
        involves = ("trainer.n_gpus_per_node", "trainer.nnodes")
        yield Problem("model.fsdp_config.fsdp_size", what, "Set it to -1 for all of them.", involves)


def checkpoints_can_be_resumed(config: OfflineConfig) -> Iterator[Problem]:
    """A run that is saved in between continues from the sharded weights."""
    saved, trainer = config.checkpoint.save_contents, config.trainer
    if trainer.save_freq > 0 and "model" not in saved:
        what = f"is [{','.join(saved)}], from which no run can continue."
        hint = "Add model, or set trainer.save_freq=-1."
        yield Problem("checkpoint.save_contents", what, hint, ("trainer.save_freq",))


def loss_is_registered(config: DPOTrainerConfig) -> Iterator[Problem]:
    """The loss of pairs exists."""
    name = config.algorithm.loss_type
    if name not in PAIR_LOSS_TRAITS:
        yield not_registered("algorithm.loss_type", name, PAIR_LOSS_TRAITS)


def constants_belong_to_the_loss(config: DPOTrainerConfig) -> Iterator[Problem]:
    """A constant that the chosen loss does not read is refused."""
    algorithm, name = config.algorithm, config.algorithm.loss_type
    for constant in ("label_smoothing", "target_margin"):
        value = getattr(algorithm, constant)
        if value > 0 and not getattr(pair_loss_traits(name), constant):
            readers = [loss for loss, traits in PAIR_LOSS_TRAITS.items() if getattr(traits, constant)]
            what = f"is {value}, which the loss {name} does not read."
            hint = f"Set it to 0, or take {'one of ' if len(readers) > 1 else ''}{', '.join(readers)}."
            yield Problem(f"algorithm.{constant}", what, hint, ("algorithm.loss_type",))


OFFLINE_RULES: tuple[Callable[..., Iterator[Problem]], ...] = (
    trackers_are_known,
    one_console_writes,
    one_row_fits_the_token_budget,
    gradients_have_their_range,
    shards_divide_the_processes,
    validation_has_rows,
    resume_names_its_folder,
    checkpoints_can_be_resumed,
)
DPO_RULES = (*OFFLINE_RULES, loss_is_registered, constants_belong_to_the_loss)


def warnings(config: OfflineConfig) -> list[str]:
    """What is allowed but probably not meant, one sentence each."""
    found = list(config.remarks)
    if config.model.trust_remote_code:
        found.append("model.trust_remote_code=true: code from the model's folder runs with your rights.")
    if config.trainer.save_freq <= 0:
        found.append("trainer.save_freq is off: what the run has learnt is not written anywhere.")
    elif "hf_model" not in config.checkpoint.save_contents:
        found.append("checkpoint.save_contents has no hf_model: no folder that transformers and vLLM load is written.")
    return found
