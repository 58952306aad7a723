"""What is looked at before an offline run starts anything: packages, model, tokenizer, chat template, data.

`hrl check` and a run take the same look.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.config.arithmetic import Fact, total_steps
from hrl.config.offline import OfflineConfig
from hrl.data.chat_template import check_chat_template, with_tools
from hrl.data.offline.demonstrations import COMPLETION_KEYS
from hrl.models.source import ModelSourceError
from hrl.models.tokenizer import TokenIds, token_ids
from hrl.preflight.findings import Findings, PreflightError
from hrl.preflight.looks import (
    look_at_columns,
    look_at_devices,
    look_at_family,
    look_at_model,
    look_at_positions,
    look_at_run_folder,
    look_at_size,
    look_at_tokenizer,
    look_at_trackers,
    model_in_words,
    rows_in_words,
)
from hrl.preflight.memory_look import look_at_offline_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.data.offline.dataset import OfflineDataset

__all__ = ["OfflinePreflight", "PreflightError", "inspect_offline", "offline_preflight", "padding_of_classifier"]


@dataclass(frozen=True)
class OfflinePreflight:
    """What an offline run needs and the files gave.

    Attributes:
        model_path: Local folder of the model.
        tokenizer: The model's.
        ids: Padding and stop tokens.
        train_dataset: Rows to train on.
        val_dataset: Rows to validate on, `None` where none are configured.
        total_training_steps: From `trainer.total_training_steps`, or the epochs and the size of the data.
        notes: What was not checked, or is probably not meant.
    """

    model_path: Path
    tokenizer: PreTrainedTokenizerBase
    ids: TokenIds
    train_dataset: OfflineDataset[Any]
    val_dataset: OfflineDataset[Any] | None
    total_training_steps: int
    notes: tuple[str, ...] = ()


def offline_preflight(kind_name: str, config: OfflineConfig) -> OfflinePreflight:
    """Find model and data, fetching what is on the hub, and checks that they fit.

    Args:
        kind_name: Of the run: dpo, sft or rm.
        config: The validated configuration.

    Raises:
        PreflightError: Lists everything that is wrong, with the way out.
    """
    ready, findings = inspect_offline(kind_name, config)
    findings.raise_problems()
    if ready is None:
        raise RuntimeError("a preflight without problems has to find everything")
    return ready


def inspect_offline(
    kind_name: str, config: OfflineConfig, *, download: bool = True
) -> tuple[OfflinePreflight | None, Findings]:
    """Look at everything that a run needs before it starts anything; see `hrl.preflight.ppo.inspect_run`."""
    findings = Findings()
    look_at_trackers(findings, config.trainer.logger)
    model, data = config.model, config.data
    path = look_at_model(
        findings,
        "model.path",
        model.path,
        override=model.override_config,
        download=download,
        trust_remote_code=model.trust_remote_code,
    )
    tokenizer = look_at_tokenizer(findings, "model", model, path, download=download)
    if path is not None:
        findings.facts.append(Fact("model", model_in_words(model.path, path)))
        look_at_positions(findings, path, model, data.max_length, ["data.max_length"])
    ids = None
    with findings.about("model.path"):
        ids = None if tokenizer is None or path is None else token_ids(tokenizer, path)
    train = _dataset(findings, kind_name, "data.train_files", config, tokenizer, ids)
    val = _dataset(findings, kind_name, "data.val_files", config, tokenizer, ids)
    if train is not None:
        look_at_size(findings, "data.train_batch_size", train, data.train_batch_size, suggested_at_most=len(train))
    look_at_devices(findings, config.trainer, config.num_processes)
    if path is not None:
        look_at_offline_memory(findings, config, path)
    look_at_run_folder(findings, config.trainer, train)
    if path is None or tokenizer is None or ids is None or train is None:
        return None, findings
    with findings.about("data.train_files"):
        prompt = train.first_prompt()
        if prompt is not None:
            kwargs = with_tools(data.apply_chat_template_kwargs, prompt.tools)
            check_chat_template(tokenizer, prompt.messages, ids.stop, kwargs)
    if kind_name == "rm":
        with findings.about("model.tokenizer_path"):
            ids = replace(ids, pad=padding_of_classifier(tokenizer, ids))
    if model.probe and not findings.problems:
        look_at_family(
            findings,
            "model.path",
            path,
            override=model.override_config,
            trust_remote_code=model.trust_remote_code,
            max_model_len=data.max_length,
            is_scalar=kind_name == "rm",
        )
    if findings.problems:
        return None, findings
    steps = total_steps(config, len(train))
    return OfflinePreflight(path, tokenizer, ids, train, val, steps, tuple(findings.notes)), findings


def _dataset(
    findings: Findings,
    kind_name: str,
    key: str,
    config: OfflineConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: TokenIds | None,
) -> OfflineDataset[Any] | None:
    """Return the rows that a key names; None where they can't be read, or it names none."""
    data = config.data
    train = key == "data.train_files"
    sources = data.train_files if train else data.val_files
    if not sources or not look_at_columns(findings, key, sources, _columns(kind_name, data)):
        return None
    if tokenizer is None or ids is None:
        return None
    with findings.about(key):
        most = data.train_max_samples if train else data.val_max_samples
        rows = dataset_class(kind_name)(sources, tokenizer, data, most, stop_ids=ids.stop)
        noun = "rows" if train else "validation rows"
        findings.facts.append(Fact(noun, rows_in_words(rows, sources, rows.lengths, "rows", data.max_length)))
        return rows
    return None


def dataset_class(kind_name: str) -> type[OfflineDataset[Any]]:
    """Return what reads the rows of a kind of run."""
    from hrl.data.offline.demonstrations import DemonstrationDataset
    from hrl.data.offline.pairs import PairDataset

    return DemonstrationDataset if kind_name == "sft" else PairDataset


def _columns(kind_name: str, data: Any) -> dict[str, tuple[str, ...]]:
    """Key that names a column → the columns that will do."""
    if kind_name == "sft":
        answers = (data.completion_key,) if data.completion_key else COMPLETION_KEYS
        wanted = {"data.messages_key": (data.messages_key, data.prompt_key)}
        return wanted | {"data.completion_key": (*answers, data.messages_key)}
    return {"data.chosen_key": (data.chosen_key,), "data.rejected_key": (data.rejected_key,)}


def padding_of_classifier(tokenizer: PreTrainedTokenizerBase, ids: TokenIds) -> int:
    """Return a padding token for a reward model's folder; the tokenizer is given it too.

    transformers takes the last token that is not padding for a sequence's last one. A tokenizer of a chat model often
    pads with the token that ends answers: scores would then be read one token too early.

    Raises:
        ModelSourceError: No special token is free.
    """
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids]
    free = [token for token in candidates if token is not None and token not in ids.stop]
    if not free:
        raise ModelSourceError(
            "a reward model needs a padding token that ends no answer, and every special token of the tokenizer does: "
            "save a tokenizer with one more special token and set model.tokenizer_path"
        )
    tokenizer.pad_token_id = free[0]
    return free[0]
