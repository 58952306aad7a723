"""Answers to imitate.

A row has `messages`, a whole chat in which every message of the assistant is trained on; or `prompt` and `completion`
(`response`), each a chat or a string, with only the answer trained on. A string prompt is one message of the user, a
string answer one of the assistant. `tools` are schemas of functions, for a chat template that shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hrl.data.chat import as_messages, as_tools, with_tools
from hrl.data.offline.answers import ChatPrompt, OfflineDataset, Passage, pad_answers, passages_of_chat
from hrl.data.sources import DataRow, source_of
from hrl.protocol import DataProto

if TYPE_CHECKING:
    from hrl.config.offline import DemonstrationDataConfig

COMPLETION_KEYS = ("completion", "response")


@dataclass(frozen=True)
class Demonstration(DataRow):
    """One checked row.

    Attributes:
        messages: The whole chat.
        first_trained: Index of the first message that may be trained on.
        tools: Schemas of the functions that the chat offers; None for none.
    """

    messages: list[dict[str, Any]]
    first_trained: int
    tools: list[dict[str, Any]] | None = None


def check_demonstration(raw: Mapping[str, Any], config: DemonstrationDataConfig) -> Demonstration | str:
    """Check a raw row; return a demonstration, or a sentence about what is wrong with the row."""
    source = source_of(raw, config.data_source_key)
    tools = as_tools(raw.get("tools"))
    if isinstance(tools, str):
        return tools
    if raw.get(config.messages_key) is not None:
        messages = as_messages(raw[config.messages_key], config.messages_key)
        return messages if isinstance(messages, str) else Demonstration(messages, 0, tools, data_source=source)
    known = (config.completion_key,) if config.completion_key else COMPLETION_KEYS
    key = next((key for key in known if raw.get(key) is not None), known[0])
    if config.prompt_key not in raw:
        return f"has neither {config.messages_key!r} nor {config.prompt_key!r} with {' or '.join(map(repr, known))}"
    prompt = as_messages(raw[config.prompt_key], config.prompt_key)
    answer = as_messages(raw.get(key), key, "assistant")
    if isinstance(prompt, str) or isinstance(answer, str):
        return prompt if isinstance(prompt, str) else str(answer)
    return Demonstration([*prompt, *answer], len(prompt), tools, data_source=source)


class DemonstrationDataset(OfflineDataset[Demonstration]):
    """Demonstrations as tokens, one row each."""

    config: DemonstrationDataConfig

    def check(self, raw: Mapping[str, Any]) -> Demonstration | str:
        return check_demonstration(raw, self.config)

    def render(self, row: Demonstration) -> list[list[Passage]]:
        kwargs = with_tools(self.config.apply_chat_template_kwargs, row.tools)
        return [passages_of_chat(self.tokenizer, row.messages, row.first_trained, kwargs)]

    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return the columns of `pad_answers`; non-tensor `uid`, `data_source` and `index`."""
        chosen = list(indices)
        return self.as_proto(pad_answers([self.tokens[index][0] for index in chosen], self.pad_id), chosen)

    def first_prompt(self) -> ChatPrompt | None:
        row = self.rows[0]
        roles = [message["role"] for message in row.messages]
        return ChatPrompt(row.messages[: roles.index("assistant", row.first_trained)], row.tools)
