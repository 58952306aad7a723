"""What is looked at before an offline run starts anything: trackers, model, tokenizer, chat template, data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.data.chat_template import check_chat_template, with_tools
from hrl.data.model_source import resolve_model
from hrl.data.tokenizer import TokenIds, token_ids
from hrl.trainer.config.arithmetic import total_steps
from hrl.trainer.config.offline.schema import OfflineConfig
from hrl.trainer.preflight import PreflightError, check_trackers, model_config, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.data.offline.dataset import OfflineDataset


@dataclass(frozen=True)
class OfflinePreflight:
    """What an offline run needs and the files gave.

    Attributes:
        model_path: local folder of the model.
        tokenizer: the model's.
        ids: padding and stop tokens.
        train_dataset: rows to train on.
        val_dataset: rows to validate on, ``None`` where none are configured.
        total_training_steps: from ``trainer.total_training_steps``, or the epochs and the size of the data.
    """

    model_path: Path
    tokenizer: PreTrainedTokenizerBase
    ids: TokenIds
    train_dataset: OfflineDataset[Any]
    val_dataset: OfflineDataset[Any] | None
    total_training_steps: int


def offline_preflight(config: OfflineConfig, dataset_cls: type[OfflineDataset[Any]]) -> OfflinePreflight:
    """Finds model and data and checks that they fit.

    Args:
        config: the validated configuration.
        dataset_cls: reads the rows.

    Raises:
        ModelSourceError, DatasetError, ChatTemplateError, PreflightError: saying what to change.
    """
    check_trackers(config.trainer.logger)
    model, data = config.model, config.data
    path = resolve_model(model.path)
    tokenizer = tokenizer_of(model, path)
    ids = token_ids(tokenizer, path)
    limit = (model_config(path) | model.override_config).get("max_position_embeddings")
    if limit is not None and data.max_length > limit:
        raise PreflightError(
            f"data.max_length={data.max_length} tokens, but {path.name} has {limit} positions: lower it"
        )
    read = partial(dataset_cls, tokenizer=tokenizer, config=data, stop_ids=ids.stop)
    train = read(data.train_files, max_samples=data.train_max_samples)
    train.require_rows(data.train_batch_size, "one batch (data.train_batch_size)")
    val = read(data.val_files, max_samples=data.val_max_samples) if data.val_files else None
    prompt = train.first_prompt()
    if prompt is not None:
        kwargs = with_tools(data.apply_chat_template_kwargs, prompt.tools)
        check_chat_template(tokenizer, prompt.messages, ids.stop, kwargs)
    return OfflinePreflight(path, tokenizer, ids, train, val, total_steps(config, len(train)))


def padding_of_classifier(tokenizer: PreTrainedTokenizerBase, ids: TokenIds) -> int:
    """A padding token for a reward model's folder; the tokenizer is given it too.

    transformers takes the last token that is not padding for a sequence's last one. A tokenizer of a chat model often
    pads with the token that ends answers: scores would then be read one token too early.

    Raises:
        PreflightError: no special token is free.
    """
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids]
    free = [token for token in candidates if token is not None and token not in ids.stop]
    if not free:
        raise PreflightError(
            "a reward model needs a padding token that ends no answer, and every special token of the tokenizer does: "
            "save a tokenizer with one more special token and set model.tokenizer_path"
        )
    tokenizer.pad_token_id = free[0]
    return free[0]
