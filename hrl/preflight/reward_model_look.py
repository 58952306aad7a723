"""The preflight check of a reward model: its head, and whose tokens it reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hrl.config.arithmetic import Fact
from hrl.config.outline import Outline
from hrl.config.reward import RewardModelConfig
from hrl.data.other_reader import OtherReader, reads_the_same
from hrl.data.steps import mark_id, word_id
from hrl.models.hf_config import load_config
from hrl.models.scalar_head import check_scores, find_head
from hrl.models.source import find_model, resolve_model
from hrl.models.tokenizer import load_tokenizer
from hrl.preflight.findings import Findings
from hrl.preflight.machine_look import look_at_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLE = "rm"


def look_at_reward_model(
    findings: Findings,
    outline: Outline,
    folders: Mapping[str, Path],
    tokenizer: PreTrainedTokenizerBase | None,
    settings: RewardModelConfig,
) -> OtherReader | None:
    """Check the head of the reward model that scores a policy, and find out how it reads the policy's answers.

    Args:
        findings: Collects problems.
        outline: Outline of the run.
        folders: Role → folder of its model.
        tokenizer: The policy's.
        settings: Of the reward model; whether it scores steps, and how.

    Returns:
        The reader of a model that does not read the policy's tokens; None of one that does, and without one.
    """
    model, folder = outline.models.get(_ROLE), folders.get(_ROLE)
    if model is None or folder is None or model.learner is not None:
        return None
    reader, trust, step_token = None, outline.model.trust_remote_code, settings.step_token
    with findings.about(model.key):
        _look_at_head(findings, folder, settings)
        own = load_tokenizer(folder, trust_remote_code=trust)
        if step_token is not None:
            said = _look_at_marks(findings, folder, own, step_token, settings)
        if tokenizer is None or (step_token is None and reads_the_same(tokenizer, own)):
            return None
        config = load_config(folder, {}, trust_remote_code=trust).get_text_config()
        reader = OtherReader(
            own, getattr(config, "pad_token_id", None), getattr(config, "max_position_embeddings", None)
        )
        differs = "vocabulary" if own.get_vocab() != tokenizer.get_vocab() else "chat template"
        if step_token is None:
            said = f"has another {differs}: it gets each chat rendered as its own"
        findings.facts.append(Fact("reward model", said))
        if own.chat_template is None:
            findings.notes.append(
                f"{model.key} names {folder.name}, whose tokenizer has no chat template: it reads prompt and answer "
                "one after the other, as plain text. If it was trained on chats, put its template into the folder "
                "(chat_template.jinja)"
            )
    return reader


def look_at_served_model(findings: Findings, settings: RewardModelConfig, *, download: bool) -> Path | None:
    """Find the folder of a reward model that the run serves, and check what its server is told.

    Args:
        findings: Collects problems.
        settings: Of the reward model.
        download: Download a hub id that is not on this machine; otherwise it is reported as unchecked.

    Returns:
        None if it is missing, and without one.
    """
    if not settings.is_served or settings.model_path is None:
        return None
    look_at_vllm(findings, settings.server_kwargs, "reward.reward_model.serve", "reward.reward_model.server_kwargs")
    with findings.about("reward.reward_model.model_path"):
        folder = resolve_model(settings.model_path) if download else find_model(settings.model_path)
        if folder is None:
            what = f"reward.reward_model.model_path: {settings.model_path} is a hub id that is not on this machine"
            findings.unchecked.append(f"{what}; a run downloads it first")
            return None
        findings.facts.append(Fact("reward model", f"vLLM serves {settings.model_path} on trainer.role_pools.rm"))
        return folder
    return None


def _look_at_head(findings: Findings, folder: Path, settings: RewardModelConfig) -> None:
    """Check that a folder holds a head of the kind that is read."""
    if settings.reward_tokens is None:
        check_scores(folder, of_steps=settings.step_token is not None)
    elif (head := find_head(folder)) is not None:
        what = f"are words of a language model, and {folder.name} is a classifier: its head is {head.name}."
        findings.problem("reward.reward_model.reward_tokens", what, "Leave it out: the head has the scores.")


def _look_at_marks(
    findings: Findings,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    step_token: str,
    settings: RewardModelConfig,
) -> str:
    """Check that what marks and judges steps are tokens of the reward model; return how it scores, in words."""
    hint = "Name what the model was trained with."
    if mark_id(tokenizer, step_token) is None:
        what = f"is {step_token!r}, which is no token of {folder.name}."
        findings.problem("reward.reward_model.step_token", what, hint)
    ids = {word: word_id(tokenizer, word) for word in settings.reward_tokens or ()}
    if None in ids.values():
        several = [word for word, number in ids.items() if number is None]
        what = f"names {' and '.join(map(repr, several))}, which {folder.name} has not as one token."
        findings.problem("reward.reward_model.reward_tokens", what, hint)
    elif len({*ids.values()}) < len(ids):
        what = f"are one token of {folder.name}: {' and '.join(map(repr, ids))}."
        findings.problem("reward.reward_model.reward_tokens", what, hint)
    by = " over ".join(f"{word} (token {number})" for word, number in ids.items())
    said = f"scores each step of an answer, at the token {step_token.strip()} behind it"
    return f"{said}, by the probability of {by}" if ids else said
