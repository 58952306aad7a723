"""The preflight check of a reward model: its head, and whose tokens it reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hrl.config.arithmetic import Fact
from hrl.config.outline import Outline
from hrl.data.other_reader import OtherReader, reads_the_same
from hrl.models.hf_config import load_config
from hrl.models.scalar_head import check_scores
from hrl.models.tokenizer import load_tokenizer
from hrl.preflight.findings import Findings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLE = "rm"


def look_at_reward_model(
    findings: Findings,
    outline: Outline,
    folders: Mapping[str, Path],
    tokenizer: PreTrainedTokenizerBase | None,
    step_token: str | None = None,
) -> OtherReader | None:
    """Check the head of the reward model that scores a policy, and find out how it reads the policy's answers.

    Args:
        findings: Collects problems.
        outline: Outline of the run.
        folders: Role → folder of its model.
        tokenizer: The policy's.
        step_token: Marks the steps of an answer for a model that scores these; None of any other.

    Returns:
        The reader of a model that does not read the policy's tokens; None of one that does, and without one.
    """
    model, folder = outline.models.get(_ROLE), folders.get(_ROLE)
    if model is None or folder is None or model.learner is not None:
        return None
    reader, trust = None, outline.model.trust_remote_code
    with findings.about(model.key):
        check_scores(folder, of_steps=step_token is not None)
        own = load_tokenizer(folder, trust_remote_code=trust)
        if step_token is not None and step_token not in own.get_vocab():
            what = f"is {step_token!r}, which is no token of {folder.name}."
            findings.problem("reward.reward_model.step_token", what, "Name the token that the model was trained with.")
        if tokenizer is None or (step_token is None and reads_the_same(tokenizer, own)):
            return None
        config = load_config(folder, {}, trust_remote_code=trust).get_text_config()
        reader = OtherReader(
            own, getattr(config, "pad_token_id", None), getattr(config, "max_position_embeddings", None)
        )
        differs = "vocabulary" if own.get_vocab() != tokenizer.get_vocab() else "chat template"
        said = f"has another {differs}: it gets each chat rendered as its own"
        if step_token is not None:
            said = f"scores each step of an answer, at the token {step_token} behind it"
        findings.facts.append(Fact("reward model", said))
        if own.chat_template is None:
            findings.notes.append(
                f"{model.key} names {folder.name}, whose tokenizer has no chat template: it reads prompt and answer "
                "one after the other, as plain text. If it was trained on chats, put its template into the folder "
                "(chat_template.jinja)"
            )
    return reader
