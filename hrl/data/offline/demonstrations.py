"""Answers to imitate.

A row has `messages`, a whole chat in which every message of the assistant is trained on, but for those of OpenAI's
`weight` 0; or `prompt` and `completion` (`response`), each a chat or a string, with only the answer trained on. A
string prompt is one message of the user, a string answer one of the assistant. Of a preference pair the `chosen`
answer is imitated. A `text` is trained on as it is, without a chat template. `tools` are schemas of functions, for a
template that shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hrl.data.chat import as_messages, tools_of, with_tools, wrong_value
from hrl.data.offline.answers import (
    ChatPrompt,
    OfflineDataset,
    Passage,
    beside,
    pad_answers,
    passages_of_chat,
    passages_of_text,
    passages_of_whole_text,
)
from hrl.data.offline.pairs import pair_of, without_prompt
from hrl.data.pictures import take_pictures
from hrl.data.sources import DataRow, show_value, source_of
from hrl.protocol import DataProto

if TYPE_CHECKING:
    from hrl.config.offline import DemonstrationDataConfig

COMPLETION_KEYS = ("completion", "response")
TEXT, CHOSEN, REJECTED = "text", "chosen", "rejected"
"""Columns of a whole text, and of a preference pair."""


@dataclass(frozen=True)
class Demonstration(DataRow):
    """One checked row.

    Attributes:
        messages: The whole chat; empty for plain text.
        first_trained: Index of the first message that may be trained on.
        tools: Schemas of the functions that the chat offers; None for none.
        text: A plain text that is trained on.
        before: A plain text before it, which is not; None if the text is whole.
    """

    messages: list[dict[str, Any]]
    first_trained: int
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    before: str | None = None


def check_demonstration(raw: Mapping[str, Any], config: DemonstrationDataConfig) -> Demonstration | str:
    """Check a raw row; return a demonstration, or a sentence about what is wrong with the row."""
    found = _demonstration_of(raw, config)
    if isinstance(found, str):
        return found
    placed = take_pictures(raw, found.messages, config.image_key, config.video_key)
    if isinstance(placed, str):
        return placed
    messages, images = placed
    roles = [message["role"] for message in messages]
    first = roles.index("assistant", found.first_trained) if "assistant" in roles[found.first_trained :] else len(roles)
    if any(isinstance(part, Mapping) and part["type"] != "text" for part in _parts(messages[first:])):
        return (
            "shows a picture behind the first answer that is trained on, and a row's pictures belong to its prompt: "
            "split the chat into several rows"
        )
    return replace(found, messages=messages, images=images)


def _parts(messages: Iterable[Mapping[str, Any]]) -> Iterable[Any]:
    contents = (message["content"] for message in messages)
    return (part for content in contents if not isinstance(content, str) for part in content or ())


def _demonstration_of(raw: Mapping[str, Any], config: DemonstrationDataConfig) -> Demonstration | str:
    source = source_of(raw, config.data_source_key)
    tools = tools_of(raw)
    if isinstance(tools, str):
        return tools
    if raw.get(config.messages_key) is not None:
        messages = as_messages(raw[config.messages_key], config.messages_key, pictures=True)
        return messages if isinstance(messages, str) else Demonstration(messages, 0, tools, data_source=source)
    known = (config.completion_key,) if config.completion_key else COMPLETION_KEYS
    key = next((key for key in known if raw.get(key) is not None), known[0])
    if raw.get(key) is None and raw.get(CHOSEN) is not None:
        return _chosen(raw, config.prompt_key, tools, source)
    if raw.get(config.prompt_key) is None and raw.get(key) is None and raw.get(TEXT) is not None:
        text, wrong = raw[TEXT], wrong_value(raw[TEXT], TEXT)
        if wrong is not None or not isinstance(text, str) or not text:
            return wrong or f"{TEXT!r} is {show_value(text)}, expected a string that is not empty"
        return Demonstration([], 0, data_source=source, text=text)
    if config.prompt_key not in raw:
        found = ", ".join(map(str, raw)) or "none"
        return (
            f"has neither {config.messages_key!r}, nor {config.prompt_key!r} with {' or '.join(map(repr, known))}, nor "
            f"{CHOSEN!r}, nor {TEXT!r}; its columns are {found}"
        )
    prompt = as_messages(raw[config.prompt_key], config.prompt_key, pictures=True)
    answer = as_messages(raw.get(key), key, "assistant")
    if isinstance(prompt, str) or isinstance(answer, str):
        return prompt if isinstance(prompt, str) else str(answer)
    answer = without_prompt(prompt, answer)
    if not any(message["role"] == "assistant" for message in answer):
        return f"{key!r} has no message of the assistant after the prompt, and only these are trained on"
    return Demonstration([*prompt, *answer], len(prompt), tools, data_source=source)


def _chosen(
    raw: Mapping[str, Any], prompt_key: str, tools: list[dict[str, Any]] | None, source: str
) -> Demonstration | str:
    """Return the preferred answer of a pair as a demonstration, or what is wrong with the pair."""
    if raw.get(REJECTED) is None and raw.get(prompt_key) is None and not isinstance(raw[CHOSEN], str):
        messages = as_messages(raw[CHOSEN], CHOSEN)  # a whole chat without its counterpart
        return messages if isinstance(messages, str) else Demonstration(messages, 0, tools, data_source=source)
    keys = (prompt_key, CHOSEN, REJECTED)
    pair = pair_of(raw if raw.get(REJECTED) is not None else {**raw, REJECTED: "-"}, *keys)
    if isinstance(pair, str):
        return pair
    prompt, chosen, _ = pair
    if isinstance(prompt, str):
        return Demonstration([], 0, data_source=source, text=str(chosen), before=prompt)
    return Demonstration([*prompt, *chosen], len(prompt), tools, data_source=source)


class DemonstrationDataset(OfflineDataset[Demonstration]):
    """Demonstrations as tokens, one row each."""

    config: DemonstrationDataConfig

    def check(self, raw: Mapping[str, Any]) -> Demonstration | str:
        return check_demonstration(raw, self.config)

    def shape(self, row: Demonstration) -> str:
        if row.text is not None:
            return "whole texts" if row.before is None else "texts with their answers"
        return ("prompts with answers" if row.first_trained else "whole chats") + beside(row)

    def render(self, row: Demonstration) -> list[list[Passage]]:
        if row.text is not None and row.before is None:
            return [passages_of_whole_text(self.tokenizer, row.text)]
        if row.text is not None and row.before is not None:
            return [passages_of_text(self.tokenizer, row.before, row.text)]
        kwargs = with_tools(self.config.apply_chat_template_kwargs, row.tools)
        passages = passages_of_chat(self.tokenizer, row.messages, row.first_trained, kwargs)
        return [self.with_pictures(passages, row, _asked(row))]

    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return the columns of `pad_answers`; non-tensor `uid`, `data_source` and `index`."""
        chosen = list(indices)
        return self.as_proto(pad_answers([self.tokens[index][0] for index in chosen], self.pad_id), chosen)

    def first_prompt(self) -> ChatPrompt | None:
        row = next((row for row in map(self.rows.__getitem__, self.known) if row.messages), None)
        if row is None:
            return None
        return _asked(row)


def _asked(row: Demonstration) -> ChatPrompt:
    """Return a row's chat before its first answer."""
    roles = [message["role"] for message in row.messages]
    return ChatPrompt(row.messages[: roles.index("assistant", row.first_trained)], row.tools)
