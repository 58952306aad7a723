"""Chats: take one from a row, render it with the chat template, and inspect the template before a run.

Sampling only needs a prompt that the template can render. Training on answers that were not sampled (SFT, DPO) needs
more: a template that breaks one of the rules of `inspect_chat_template` would train the model on contexts that it never
samples from, or would not teach it to stop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hrl.data.files import DEEPEST
from hrl.data.sources import show_value
from hrl.errors import HrlError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Role, content and whatever else the template reads of a message, such as `tool_calls`.
Message = Mapping[str, Any]

#: What rendering may raise: errors of the template, and of Python where the template adds text to a null.
RENDERING_ERRORS = (TemplateError, TypeError, ValueError)
#: An answer that no template has a reason to treat specially.
PROBE_ANSWER = "Forty-two."
_OLDER_TOOLS = ("functions", "function_call")
_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT's rows → as chat templates know them."""
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content|from|value)\1\s*:""")
"""How a chat begins in a format that has only text, such as CSV: JSON, or what Python's `str` makes of a list."""
_LONGEST_TEXT = 10_000_000
"""Characters of a text that is tokenised: a file in one line, say, would take minutes and gigabytes."""
_SHOWN_TOKENS = 12
_SHOWN_CHARACTERS = 400


class ChatTemplateError(HrlError, ValueError):
    """A chat can't be rendered, or its answers can't be trained on; the message shows the difference."""


@dataclass(frozen=True)
class TemplateReport:
    """Findings about the chat template, from one prompt of the data set.

    Attributes:
        prompt: The prompt's text as sent to the model.
        has_template: False for a base model, whose prompts are sent as raw text.
        faults: Reasons why answers that were not sampled can't be trained on, a sentence each.
    """

    prompt: str
    has_template: bool
    faults: tuple[str, ...] = ()

    @property
    def shown_prompt(self) -> str:
        """The prompt on one line, with its middle cut out if it is long."""
        return shortened(self.prompt)

    def warnings_for_sampling(self) -> list[str]:
        """Return warnings for a run that samples from these prompts."""
        if not self.has_template:
            return [
                "the tokenizer has no chat template: prompts are sent as raw text, which the model continues. If it is "
                "an instruct model, set the tokenizer's folder (tokenizer_path) to one that has its template"
            ]
        return [f"{fault}. Sampled answers do not need this; SFT and DPO would refuse it" for fault in self.faults]


def shortened(text: str) -> str:
    """Return a text on one line, with its middle cut out if it is long."""
    half = _SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}")


# ---- from a row ------------------------------------------------------------------------------------------------


def as_messages(prompt: object, key: str, role: str = "user", *, pictures: bool = False) -> list[dict[str, Any]] | str:
    """Return a chat, or a sentence about what is wrong with it; a string is one message of `role`, or a chat as JSON.

    A content is text, a list of parts (text, pictures and videos), or null in a message with other content (an
    assistant's `tool_calls`). Messages keep all other fields for the chat template, except nulls: Parquet gives every
    message every field, and templates test whether a field is present.

    Args:
        prompt: The value of a row's column.
        key: Name of the column.
        role: Role of the message that a string becomes.
        pictures: Whether messages may show pictures, in parts `{"type": "image"}` and `{"type": "video"}`.
    """
    wrong = wrong_value(prompt, key)
    if wrong is not None:
        return wrong
    prompt = chat_of_text(prompt)
    if isinstance(prompt, str):
        if _CHAT_AS_TEXT.match(prompt):
            return f"{key!r} is a chat written as text, but not as JSON: {show_value(prompt)}"
        return [{"role": role, "content": prompt}] if prompt else f"{key!r} is an empty string"
    if not isinstance(prompt, Sequence) or not prompt:
        return f"{key!r} is {show_value(prompt)}, expected a string or a non-empty list of messages"
    messages = []
    for position, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            hint = "expected an object with role and content"
            if isinstance(message, str):
                hint += ", such as {'role': 'user', 'content': '…'}; a prompt that is one text is no list"
            return f"message {position} of {key!r} is {show_value(message)}, {hint}"
        if "from" in message and "value" in message and "role" not in message:  # ShareGPT's names
            message = {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
        if message.get("function_call"):
            return f"message {position} of {key!r} has 'function_call', OpenAI's older form of 'tool_calls'; rewrite it"
        if not isinstance(message.get("role"), str):
            return f"'role' of message {position} of {key!r} is {show_value(message.get('role'))}, expected a string"
        fields = {name: value for name, value in message.items() if value is not None and name != "content"}
        content = message.get("content")
        wrong = _wrong_content(content, says_more=len(fields) > 1, pictures=pictures)
        if wrong is not None:
            return f"'content' of message {position} of {key!r} is {show_value(content)}, {wrong}"
        messages.append({"role": fields.pop("role"), "content": content, **fields})
    return messages


def chat_of_text(value: object) -> object:
    """Return the chat of a text that is one in JSON; any other value as it is."""
    if not isinstance(value, str) or not _CHAT_AS_TEXT.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # also of a number of thousands of digits, and of deep nesting
        return value


def _wrong_content(content: object, *, says_more: bool, pictures: bool) -> str | None:
    """Return what was expected instead of a message's content; None if the content is right."""
    if isinstance(content, str) or (content is None and says_more):
        return None
    if not isinstance(content, Sequence) or not content:
        return "expected a string, a list of parts, or null beside fields such as tool_calls"
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if not pictures:
            return 'expected parts {"type": "text", "text": …}: hrl trains on text here'
        if kind not in ("image", "video"):
            return (
                'expected parts {"type": "text", "text": …}, {"type": "image"} and {"type": "video"}: hrl trains on '
                "text, pictures and videos"
            )
    return None


def as_tools(tools: object) -> list[dict[str, Any]] | str | None:
    """Return tool schemas, given as a list or as JSON text of a list; or a sentence about what is wrong with them."""
    wrong = wrong_value(tools, "tools")
    if wrong is not None:
        return wrong
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            return f"'tools' is a string, but not JSON ({error.msg} at column {error.colno})"
        except (ValueError, RecursionError) as error:
            return f"'tools' is a string of JSON that can't be read ({error})"
    if tools is None or (isinstance(tools, Sequence) and not tools):
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        return f"'tools' is {show_value(tools)}, expected a list of JSON schemas"
    return [dict(tool) for tool in tools]


def tools_of(raw: Mapping[str, Any]) -> list[dict[str, Any]] | str | None:
    """Return the tool schemas of a row; or a sentence about what is wrong with them."""
    for name in _OLDER_TOOLS:
        if raw.get(name):
            return (
                f"{name!r} is OpenAI's older form of 'tools' and 'tool_calls', which no chat template reads; rewrite it"
            )
    return as_tools(raw.get("tools"))


def wrong_value(value: object, key: str, *, is_text: bool = True) -> str | None:
    """Return a sentence about a value that can't be tokenised or sent to another process; None if it can.

    Args:
        value: The value of a row's column.
        key: Name of the column.
        is_text: Whether the value is tokenised, so that all text in it must be Unicode.
    """
    if not _is_shallow(value):
        return f"{key!r} is nested more than {DEEPEST} levels deep"
    if is_text and (length := _longest_text(value)) > _LONGEST_TEXT:
        return f"{key!r} holds a text of {length:,} characters, and one of more than {_LONGEST_TEXT:,} is not tokenised"
    if is_text and not _is_unicode(value):
        return f"{key!r} holds half a character (a lone surrogate, such as \\ud800)"
    return None


def _longest_text(value: object) -> int:
    """Return the number of characters of the longest text in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return max(map(_longest_text, value.values()), default=0)
    return max(map(_longest_text, value), default=0) if isinstance(value, list | tuple) else 0


def _is_unicode(value: object) -> bool:
    """Return whether all text in a value can be encoded as UTF-8, i.e. has no lone surrogates."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value)
    if isinstance(value, Mapping):
        return all(_is_unicode(part) for item in value.items() for part in item)
    return not isinstance(value, list | tuple) or all(map(_is_unicode, value))


def _is_shallow(value: object) -> bool:
    """Return whether a value is nested at most `DEEPEST` levels deep."""
    level: list[object] = [value]
    for _ in range(DEEPEST):
        inner = (item for item in level if isinstance(item, Mapping | list | tuple))
        level = [part for item in inner for part in (item.values() if isinstance(item, Mapping) else item)]
        if not level:
            return True
    return not any(isinstance(item, Mapping | list | tuple) for item in level)


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in a value, such as those of a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(part)


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's content as readable text: its text, its joined text parts, or its other fields as JSON."""
    content = message["content"]
    if isinstance(content, str):
        return content
    if content is not None:
        return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)
    return json.dumps({name: value for name, value in message.items() if name not in ("role", "content")}, default=str)


# ---- as text ---------------------------------------------------------------------------------------------------


def with_tools(template_kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the template's arguments for a row: those of the configuration and the row's tools."""
    return {**template_kwargs, **({"tools": tools} if tools else {})}


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template_kwargs: Mapping[str, Any]
) -> str:
    """Return the text of a prompt, ready for the assistant's answer.

    With a tokenizer without a chat template (a base model's) the text of a single message is used unchanged.

    Raises:
        ChatTemplateError: Several messages, and no chat template.
        jinja2.TemplateError: The template refuses the chat.
    """
    if tokenizer.chat_template is None:
        if len(messages) == 1 and isinstance(messages[0]["content"], str):
            return messages[0]["content"]
        raise ChatTemplateError(
            "the prompt is a chat of several messages, but the tokenizer has no chat template: "
            "choose an instruct model, or give prompts as strings"
        )
    return render_chat(tokenizer, messages, template_kwargs, add_generation_prompt=True)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Return the text of a chat, by default without a generation prompt at its end.

    Raises:
        jinja2.TemplateError: The template refuses the chat.
    """
    conversation = [dict(message) for message in messages]
    return str(
        tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    )


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of rendered prompts; special tokens are added only if there is no chat template."""
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=tokenizer.chat_template is None)["input_ids"]


def inspect_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    stop_ids: Sequence[int],
    template_kwargs: Mapping[str, Any] | None = None,
) -> TemplateReport:
    """Render one prompt of the data set and check the rules that training on its answers needs.

    1. The prompt opens the answer: only whitespace is between the two.
    2. Prompt tokens are a prefix of the tokens of the same chat with the answer.
    3. The template writes the answer unchanged.
    4. It closes the answer with one of the stop ids, so that the end that is trained is the end that is sampled.
    5. A row's tools appear in the prompt.

    Args:
        tokenizer: The policy's tokenizer.
        messages: The prompt.
        stop_ids: Tokens at which sampling stops.
        template_kwargs: Arguments from `data.apply_chat_template_kwargs`, and the row's `tools`.

    Raises:
        ChatTemplateError, jinja2.TemplateError: The prompt itself can't be rendered.
    """
    kwargs = dict(template_kwargs or {})
    prompt = render_prompt(tokenizer, messages, kwargs)
    if tokenizer.chat_template is None:
        return TemplateReport(prompt, has_template=False)
    faults = []
    if kwargs.get("tools") and render_prompt(tokenizer, messages, {**kwargs, "tools": None}) == prompt:
        faults.append("the rows bring tools, but the chat template does not show them to the model")
    try:
        _check_answer(tokenizer, messages, prompt, stop_ids, kwargs)
    except RENDERING_ERRORS as error:
        faults.append(str(error))
    return TemplateReport(prompt, has_template=True, faults=tuple(faults))


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    stop_ids: Sequence[int],
    template_kwargs: Mapping[str, Any] | None = None,
) -> TemplateReport:
    """Inspect a chat template for training on answers that were not sampled; a fault is an error.

    Raises:
        ChatTemplateError: A rule is broken; names it and shows both sides of the difference.
    """
    report = inspect_chat_template(tokenizer, messages, stop_ids, template_kwargs)
    if report.faults:
        raise ChatTemplateError("; ".join(report.faults))
    return report


def _check_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    prompt: str,
    stop_ids: Sequence[int],
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse a template with which a made-up answer can't be trained on; see `inspect_chat_template`."""
    prompt_ids = encode_texts(tokenizer, [prompt])[0]
    full = render_chat(tokenizer, [*messages, {"role": "assistant", "content": PROBE_ANSWER}], kwargs)
    full_ids = encode_texts(tokenizer, [full])[0]
    if full_ids[: len(prompt_ids)] != prompt_ids:
        raise ChatTemplateError(_prefix_difference(tokenizer, prompt_ids, full_ids))
    opening = full[len(prompt) :].partition(PROBE_ANSWER)[0]
    closing = _closing_ids(tokenizer, full_ids[len(prompt_ids) :])
    if opening.strip():
        raise ChatTemplateError(
            f"the chat template's generation prompt does not open the answer: the prompt ends {prompt[-60:]!r}, and "
            f"an answer then begins with {opening!r}"
        )
    if stop_ids and (not closing or closing[0] not in stop_ids):
        raise ChatTemplateError(
            f"the chat template closes an answer with {_show(tokenizer, closing) or 'nothing'}, but generation stops "
            f"at {_show(tokenizer, stop_ids)}: set the tokenizer's eos_token or generation_config's eos_token_id to "
            "the token that closes an answer"
        )


def _closing_ids(tokenizer: PreTrainedTokenizerBase, answer_ids: Sequence[int]) -> list[int]:
    """Return the ids that the template puts after the answer: those after the first ids that spell it out."""
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
        "the chat template is not prefix-preserving: the sampled prompt is not a prefix of the chat with its answer. "
        f"From token {at} on, the prompt has {_show(tokenizer, prompt_ids[start : start + _SHOWN_TOKENS])}, "
        f"the answered chat {_show(tokenizer, full_ids[start : start + _SHOWN_TOKENS])}. "
        "data.apply_chat_template_kwargs can often switch off what rewrites the chat (e.g. enable_thinking)"
    )


def _show(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return " ".join(f"{tokenizer.decode([i])!r}({i})" for i in ids[:_SHOWN_TOKENS])
