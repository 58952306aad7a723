"""What is looked at once the configuration is right and before anything is started: files, models, tokenizers, data.

Everything that can be wrong with the user's files is found here, in seconds, in the driver, with a sentence that says
what to change.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.data.chat_template import TemplateReport, inspect_chat_template, with_tools
from hrl.data.custom import dataset_class
from hrl.data.model_source import resolve_model
from hrl.data.tokenizer import TokenIds, load_tokenizer, resolve_tokenizer, token_ids
from hrl.data.user_file import UserFileError, names_in_user_file
from hrl.trainer.config.arithmetic import total_steps
from hrl.trainer.tracking import installed_trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.data.dataset import RLHFDataset
    from hrl.trainer.config import PPOTrainerConfig

logger = logging.getLogger(__name__)


class PreflightError(ValueError):
    """The configuration is valid, but what it names does not fit together."""


@dataclass(frozen=True)
class Preflight:
    """What a run needs and the files gave.

    Attributes:
        model_path: local folder of the policy.
        critic_path: of the model the critic starts from; ``None`` without a critic.
        reward_model_path: of the reward model; ``None`` without one.
        tokenizer: the policy's.
        ids: padding and stop tokens.
        template: the first prompt as it is sent, and what the chat template can't do.
        train_dataset: prompts to train on.
        val_dataset: prompts to validate on, ``None`` where none are configured.
        total_training_steps: from ``trainer.total_training_steps``, or the epochs and the size of the data.
    """

    model_path: Path
    critic_path: Path | None
    reward_model_path: Path | None
    tokenizer: PreTrainedTokenizerBase
    ids: TokenIds
    template: TemplateReport
    train_dataset: RLHFDataset
    val_dataset: RLHFDataset | None
    total_training_steps: int


def preflight(config: PPOTrainerConfig) -> Preflight:
    """Finds models and data and checks that they fit.

    Raises:
        ModelSourceError, DatasetError, ChatTemplateError, PreflightError: saying what to change.
    """
    check_trackers(config.trainer.logger)
    _check_reward_function(config.reward.custom_reward_function)
    model = config.actor_rollout_ref.model
    model_path = resolve_model(model.path)
    tokenizer = tokenizer_of(model, model_path)
    ids = token_ids(tokenizer, model_path)
    _check_lengths(config, model_path)

    data, dataset_cls = config.data, dataset_class(config.data.custom_cls)
    train = dataset_cls(data.train_files, tokenizer, data, data.train_max_samples)
    train.require_rows(data.train_batch_size, "one batch (data.train_batch_size)")
    val = dataset_cls(data.val_files, tokenizer, data, data.val_max_samples) if data.val_files else None
    first = train[0]
    kwargs = with_tools(data.apply_chat_template_kwargs, first.get("tools"))  # not every custom data set has tools
    template = inspect_chat_template(tokenizer, first["raw_prompt"], ids.stop, kwargs)

    critic_path = resolve_model(config.critic.model.path) if config.needs_critic else None
    # A critic in the policy's own folder reads what the policy reads, whichever tokenizer that is.
    if critic_path is not None and critic_path != model_path:
        _check_same_vocabulary(tokenizer, "critic", critic_path, model.trust_remote_code)
    reward_model = config.reward.reward_model
    wanted = reward_model.model_path if config.needs_reward_model else None
    reward_model_path = None if wanted is None else resolve_model(wanted)
    if reward_model_path is not None:
        _check_same_vocabulary(tokenizer, "reward model", reward_model_path, model.trust_remote_code)
    return Preflight(
        model_path=model_path,
        critic_path=critic_path,
        reward_model_path=reward_model_path,
        tokenizer=tokenizer,
        ids=ids,
        template=template,
        train_dataset=train,
        val_dataset=val,
        total_training_steps=total_steps(config, len(train)),
    )


def tokenizer_of(model: Any, model_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a ``model`` section, which may name another folder or hub id than the model's own."""
    named = resolve_tokenizer(model.tokenizer_path) if model.tokenizer_path else model_path
    return load_tokenizer(named, trust_remote_code=model.trust_remote_code)


def check_trackers(names: list[str]) -> None:
    """Refuses a tracker that is not installed.

    Raises:
        PreflightError: naming it, with what to install.
    """
    try:
        installed_trackers(names)
    except ValueError as error:
        raise PreflightError(str(error)) from error


def _check_reward_function(custom: Any) -> None:
    """The user's file is only read here: it runs in the processes that score."""
    if custom.path is None:
        return
    try:
        names = names_in_user_file(custom.path)
    except UserFileError as error:
        raise PreflightError(f"reward.custom_reward_function.path: {error}") from error
    if names is not None and custom.name not in names:
        public = sorted(name for name in names if not name.startswith("_"))
        raise PreflightError(
            f"reward.custom_reward_function.name: {custom.path} defines no {custom.name!r}; "
            f"it has: {', '.join(public) or 'nothing'}"
        )


def model_config(path: Path) -> dict[str, Any]:
    """What stands in the ``config.json`` of a model folder.

    Raises:
        PreflightError: it is no JSON.
    """
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise PreflightError(f"{path / 'config.json'} is no JSON: {error}") from error


def _check_lengths(config: Any, model_path: Path) -> None:
    """Prompt and response must fit the model's positions."""
    used = model_config(model_path) | config.actor_rollout_ref.model.override_config
    limit = used.get("max_position_embeddings")
    wanted = config.data.max_prompt_length + config.data.max_response_length
    if limit is not None and wanted > limit:
        raise PreflightError(
            f"data.max_prompt_length + data.max_response_length = {wanted} tokens, but {model_path.name} has "
            f"{limit} positions: lower one of the two"
        )


def _check_same_vocabulary(tokenizer: PreTrainedTokenizerBase, what: str, path: Path, trust_remote_code: bool) -> None:
    """Critic and reward model read the policy's token ids, so they must mean the same by them."""
    if load_tokenizer(path, trust_remote_code=trust_remote_code).get_vocab() != tokenizer.get_vocab():
        raise PreflightError(
            f"the {what} {path.name} has another vocabulary than the policy: it reads the policy's token ids as they "
            "are. Take one of the same family"
        )
