"""Prompts as the model sees them, and a check at start that the chat template is fit for training.

A template that quietly breaks one of these rules costs a run: the model is then trained on contexts that it never
samples from, or can't learn to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: An answer that no template has a reason to treat in another way than the next one.
PROBE_ANSWER = "Forty-two."
_SHOWN_TOKENS = 12


class ChatTemplateError(ValueError):
    """The chat template can't be used for training; the message shows the difference."""


@dataclass(frozen=True)
class TemplateReport:
    """One prompt and a made-up answer as tokens, for the banner.

    Attributes:
        tokens: prompt, answer and end token, one string per token.
        trained: per token whether it stands where the policy samples.
    """

    tokens: tuple[str, ...]
    trained: tuple[bool, ...]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], template_kwargs: Mapping[str, Any]
) -> str:
    """The text of a prompt, ready for the assistant's answer.

    A tokenizer without a chat template, of a base model, takes the text of a single message as it is.

    Raises:
        ChatTemplateError: several messages, and no chat template.
        jinja2.TemplateError: the template refuses the chat.
    """
    if tokenizer.chat_template is None:
        if len(messages) == 1:
            return messages[0]["content"]
        raise ChatTemplateError(
            "the prompt is a chat of several messages, but the tokenizer has no chat template: "
            "choose an instruct model, or give prompts as strings"
        )
    return _render(tokenizer, messages, template_kwargs, add_generation_prompt=True)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], template_kwargs: Mapping[str, Any]
) -> str:
    """The text of a chat as it stands, with nothing added for an answer to come.

    Raises:
        jinja2.TemplateError: the template refuses the chat.
    """
    return _render(tokenizer, messages, template_kwargs, add_generation_prompt=False)


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered prompts; special tokens are in the text already, unless there is no chat template."""
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=tokenizer.chat_template is None)["input_ids"]


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    stop_ids: Sequence[int],
    template_kwargs: Mapping[str, Any] | None = None,
) -> TemplateReport:
    """Checks the template on one prompt of the data set.

    1. The generation prompt only adds to the chat (the answer starts where the chat ends).
    2. Prompt tokens are a prefix of the tokens of the same chat with the answer in it.
    3. The template closes the answer with one of the stop ids, so that the end that is trained is the one sampled.

    Raises:
        ChatTemplateError: naming the rule, with both sides of the difference.
    """
    kwargs = dict(template_kwargs or {})
    prompt = render_prompt(tokenizer, messages, kwargs)
    prompt_ids = encode_texts(tokenizer, [prompt])[0]
    if tokenizer.chat_template is None:
        return _report(tokenizer, prompt_ids, [])
    chat = render_chat(tokenizer, messages, kwargs)
    if not prompt.startswith(chat) or prompt == chat:
        raise ChatTemplateError(
            "the chat template's generation prompt does not extend the chat: with add_generation_prompt the text ends "
            f"{prompt[-60:]!r}, without it {chat[-60:]!r}"
        )
    answered = [*messages, {"role": "assistant", "content": PROBE_ANSWER}]
    full_ids = encode_texts(tokenizer, [render_chat(tokenizer, answered, kwargs)])[0]
    if full_ids[: len(prompt_ids)] != prompt_ids:
        raise ChatTemplateError(_prefix_difference(tokenizer, prompt_ids, full_ids))
    answer_ids = full_ids[len(prompt_ids) :]
    closing = _closing_ids(tokenizer, answer_ids)
    if stop_ids and (not closing or closing[0] not in stop_ids):
        raise ChatTemplateError(
            f"the chat template closes an answer with {_show(tokenizer, closing) or 'nothing'}, but generation stops "
            f"at {_show(tokenizer, stop_ids)}: set the tokenizer's eos_token or generation_config's eos_token_id to "
            "the token that closes an answer"
        )
    end = len(answer_ids) - len(closing) + min(len(closing), 1)
    return _report(tokenizer, prompt_ids, answer_ids[:end])


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    kwargs: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> str:
    conversation = [dict(message) for message in messages]
    return str(
        tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    )


def _closing_ids(tokenizer: PreTrainedTokenizerBase, answer_ids: Sequence[int]) -> list[int]:
    """What the template puts after the answer: the ids behind the shortest head that spells the answer out."""
    for length in range(1, len(answer_ids) + 1):
        if PROBE_ANSWER in tokenizer.decode(answer_ids[:length]):
            return list(answer_ids[length:])
    raise ChatTemplateError(
        f"the chat template changes the assistant's answer: {PROBE_ANSWER!r} became {tokenizer.decode(answer_ids)!r}"
    )


def _prefix_difference(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], full_ids: Sequence[int]) -> str:
    pairs = zip(prompt_ids, full_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt_ids), len(full_ids)))
    start = max(at - 3, 0)
    return (
        "the chat template is not prefix-preserving: the prompt that is sampled from is no prefix of the chat with its "
        f"answer. From token {at} on, the prompt has {_show(tokenizer, prompt_ids[start : start + _SHOWN_TOKENS])}, "
        f"the answered chat {_show(tokenizer, full_ids[start : start + _SHOWN_TOKENS])}. "
        "data.apply_chat_template_kwargs can often switch off what rewrites the chat (e.g. enable_thinking)"
    )


def _show(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return " ".join(f"{tokenizer.decode([i])!r}({i})" for i in ids[:_SHOWN_TOKENS])


def _report(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> TemplateReport:
    ids = [*prompt_ids, *answer_ids]
    trained = [False] * len(prompt_ids) + [True] * len(answer_ids)
    return TemplateReport(tuple(tokenizer.decode([i]) for i in ids), tuple(trained))
