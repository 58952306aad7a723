"""Chats of the policy as another model reads them: rendered with its chat template, tokenised by its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hrl.data.chat import RENDERING_ERRORS, ChatTemplateError, Message, encode_texts, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class OtherReader:
    """A model that does not read the policy's tokens.

    Attributes:
        tokenizer: Its own.
        pad_token_id: Of its configuration; transformers' classifiers take the last token that is another one for the
            last of a sequence. None without one.
        max_position_embeddings: The most tokens that it takes; None without a limit.
    """

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int | None
    max_position_embeddings: int | None = None

    def token_ids(self, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the tokens of whole chats, up to the one at which transformers' classifier reads its score.

        Args:
            chats: Each with its answer. Without a chat template of its own, the model reads texts one after the other.

        Raises:
            ChatTemplateError: A chat can't be rendered, or nothing is left of it; names it by its position.
        """
        found = encode_texts(self.tokenizer, [self._render(chat, place) for place, chat in enumerate(chats)])
        for place, ids in enumerate(found):
            while ids and ids[-1] == self.pad_token_id:
                ids.pop()
            if not ids:
                raise ChatTemplateError(f"chat {place} of the batch is empty to {self.tokenizer.name_or_path}")
        return found

    def _render(self, chat: Sequence[Message], place: int) -> str:
        try:
            if self.tokenizer.chat_template is not None:
                return render_chat(self.tokenizer, chat, {})
            texts = [message["content"] for message in chat]
            if len(texts) > 2 or not all(isinstance(text, str) for text in texts):
                raise ChatTemplateError("it is more than a text and its answer, and there is no chat template")
            return "".join(texts)
        except RENDERING_ERRORS as error:
            raise ChatTemplateError(
                f"the chat template of {self.tokenizer.name_or_path} can't render chat {place} of the batch: {error}"
            ) from error


def reads_the_same(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Return whether a chat's tokens by one tokenizer are those by the other: the same vocabulary and chat template.

    A tokenizer without a chat template takes what the other has rendered.
    """
    if one.get_vocab() != other.get_vocab():
        return False
    return None in (templates := (one.chat_template, other.chat_template)) or templates[0] == templates[1]


def with_answer(prompt: Sequence[Mapping[str, object]], answer: str) -> list[Message]:
    """Return a chat with the assistant's answer at its end."""
    return [*prompt, {"role": "assistant", "content": answer}]
