"""Given answers as tokens, the trained ones marked by position and never by id; and the base of their data sets.

A conversation is rendered message by message. The tokens of the prompt are those that a sampler would be given, so the
model learns in the contexts that it will be used in. An assistant's message is trained on completely, together with
the closing that the template adds, up to the first stop token in it; the rest of the closing is context.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import torch

from hrl.data.chat import PROBE_ANSWER, ChatTemplateError, Message, encode_texts, render_chat, render_prompt
from hrl.data.sources import DataFiles, DataRow
from hrl.data.tokenised_dataset import TokenisedDataset
from hrl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.offline import OfflineDataConfig

R = TypeVar("R", bound=DataRow)
Messages = Sequence[Message]
Pieces = list[list[int]]


@dataclass(frozen=True)
class Answer:
    """One row of a model's input.

    Attributes:
        prompt: (P,) int32, not empty; not trained on.
        answer: (R,) int32; its first and its last token are trained on.
        trained: (R,) bool, whether each token of `answer` is trained on.
    """

    prompt: np.ndarray
    answer: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    def without_beginning(self, tokens: int) -> Answer | None:
        """Return the row without this many first tokens of the prompt; None if no prompt token is left."""
        return Answer(self.prompt[tokens:], self.answer, self.trained) if tokens < len(self.prompt) else None

    def cut_to(self, tokens: int) -> Answer | None:
        """Return the row truncated to this many tokens; None if no trained token is left."""
        kept = np.flatnonzero(self.trained[: max(tokens - len(self.prompt), 0)])
        if not len(kept):
            return None
        end = int(kept[-1]) + 1
        return Answer(self.prompt, self.answer[:end], self.trained[:end])


@dataclass(frozen=True)
class Passage:
    """A piece of a conversation's text.

    Attributes:
        text: The rendered text.
        trained: Whether the text is trained on.
        closing: Text that the template adds after an answer; trained on up to its first stop token.
    """

    text: str
    trained: bool
    closing: bool = False


def passages_of_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first_trained: int, template_kwargs: Mapping[str, Any]
) -> list[Passage]:
    """Split a conversation into the assistant's messages from number `first_trained` on and the context between them.

    Raises:
        ChatTemplateError: There is nothing to train on or nothing to answer, or the template rewrites earlier messages
            or closes this answer differently from others.
        jinja2.TemplateError: The template refuses the chat.
    """
    turns = [
        i
        for i, message in enumerate(messages)
        if i >= first_trained and message["role"] == "assistant" and message.get("weight", 1) != 0  # OpenAI's rows
    ]
    if not turns:
        raise ChatTemplateError("has no message of the assistant to train on")
    if turns[0] == 0:
        raise ChatTemplateError("begins with the assistant's message, which answers nothing")
    if tokenizer.chat_template is None:
        texts = [message["content"] for message in messages]
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise ChatTemplateError("is more than a text and its answer, but the tokenizer has no chat template")
        return passages_of_text(tokenizer, *texts)
    passages: list[Passage] = []
    rendered = ""
    for turn in turns:
        before = render_prompt(tokenizer, messages[:turn], template_kwargs)
        after = render_chat(tokenizer, messages[: turn + 1], template_kwargs)
        if not (before.startswith(rendered) and after.startswith(before)):
            raise ChatTemplateError(
                f"the chat template rewrites the text before message {turn}, so a sampler would never see the "
                "context that is trained on; data.apply_chat_template_kwargs can often switch that off "
                "(e.g. enable_thinking)"
            )
        closing = _closing(tokenizer, messages, turn, before, after, template_kwargs)
        content = after[len(before) : len(after) - len(closing)]
        passages += [Passage(before[len(rendered) :], False), Passage(content, True), Passage(closing, True, True)]
        rendered = after
    return passages


def _closing(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    turn: int,
    before: str,
    after: str,
    template_kwargs: Mapping[str, Any],
) -> str:
    """Return the text that the template adds after the answer of a turn.

    It is found with a different answer in the turn's place, because the message itself may contain or end in the same
    text. Other content of the message, such as tool calls, is part of its answer, unless the template then closes it
    differently.

    Raises:
        ChatTemplateError: Other answers are closed differently.
    """
    plain, whole = {"role": "assistant", "content": PROBE_ANSWER}, {**messages[turn], "content": PROBE_ANSWER}
    for probe in (plain, whole):
        rendered = render_chat(tokenizer, [*messages[:turn], probe], template_kwargs)
        _, found, closing = rendered[len(before) :].rpartition(PROBE_ANSWER)
        if not found:
            raise ChatTemplateError(f"the chat template changes the text of message {turn}")
        if after.endswith(closing, len(before)):
            return closing
    raise ChatTemplateError(
        f"the chat template closes message {turn} with {after[len(before) :][-40:]!r}, but other answers in its place "
        f"with {closing!r}: where it ends can't be told"
    )


def passages_of_text(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> list[Passage]:
    """Return the passages of a text and its answer without a chat template, with the tokenizer's end token, if any."""
    return [Passage(prompt, False), *passages_of_whole_text(tokenizer, answer)]


def passages_of_whole_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[Passage]:
    """Return the passages of a text that is trained on from its second token on, with the tokenizer's end token."""
    return [Passage(text, True), Passage(tokenizer.eos_token or "", True, True)]


def encode_passages(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[Passage]], stop_ids: Sequence[int]
) -> list[Answer | None]:
    """Return the tokens of every row; None for a row without a token to train on or without a token before it."""
    encoded = encode_pieces(tokenizer, [[passage.text for passage in passages] for passages in rows])
    return [_answer(passages, pieces, stop_ids) for passages, pieces in zip(rows, encoded, strict=True)]


def _answer(passages: Sequence[Passage], pieces: Sequence[list[int]], stop_ids: Sequence[int]) -> Answer | None:
    """Build a row; `pieces[i]` are the tokens of passage `i`."""
    trained: list[bool] = []
    for passage, piece in zip(passages, pieces, strict=True):
        count = _until_stop(piece, stop_ids) if passage.closing else len(piece)
        trained += [passage.trained and i < count for i in range(len(piece))]
    if trained and passages[0].trained:  # a whole text, whose first token nothing comes before
        trained[0] = False
    places = np.flatnonzero(trained)
    if not len(places) or places[0] == 0:
        return None
    first, end = int(places[0]), int(places[-1]) + 1
    tokens = np.array([*chain.from_iterable(pieces)], dtype=np.int32)
    return Answer(tokens[:first], tokens[first:end], np.array(trained[first:end]))


def _until_stop(closing: Sequence[int], stop_ids: Sequence[int]) -> int:
    """Return the number of tokens up to and including the first stop token; all of them if there is none."""
    return next((i + 1 for i, token in enumerate(closing) if token in stop_ids), len(closing))


def encode_pieces(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[Pieces]:
    """Return the token ids of every text of every row.

    Pieces 0 … k of a row are the tokens of its texts 0 … k joined to one text. If a token would span the border after
    a text, the following text is encoded by itself.
    """
    # The tokens of a text need not begin with the tokens of its beginning: a token may span the border, and how a run
    # of spaces is split depends on what follows it. So the tokens before a border are those of the text before it,
    # encoded alone.
    if not rows:
        return []
    # Taken literally that encodes a conversation once per border. A tokenizer that says where its tokens stand does it
    # in one go: special tokens are cut out of a text before anything else is looked at, so what is left and right of
    # one is encoded as if it stood alone. Only what lies between the last of them and a border is encoded again to
    # compare, and that is mostly the header of a message.
    # Without a chat template the tokenizer may add tokens of its own, which stand nowhere.
    once = tokenizer.is_fast and tokenizer.chat_template is not None
    found = _cut_wholes(tokenizer, rows) if once else [None] * len(rows)
    left = iter(_cut_beginnings(tokenizer, [texts for texts, pieces in zip(rows, found, strict=True) if not pieces]))
    return [pieces or next(left) for pieces in found]


def _cut_wholes(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[Pieces | None]:
    """Encode each row as a whole and split its tokens at the borders; None if a token spans a border."""
    wholes = ["".join(texts) for texts in rows]
    encoded = tokenizer(wholes, add_special_tokens=False, return_offsets_mapping=True)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    anchors = [[*_anchors(*row, special)] for row in zip(rows, wholes, ids, spans, strict=True)]
    windows = [*dict.fromkeys(window for row in anchors for _, window in row)]
    alone = dict(zip(windows, encode_texts(tokenizer, windows), strict=True))
    return [_cut(tokens, [(at, alone[window]) for at, window in row]) for tokens, row in zip(ids, anchors, strict=True)]


def _anchors(
    texts: Sequence[str], whole: str, ids: Sequence[int], spans: Sequence[tuple[int, int]], special: Collection[int]
) -> Iterator[tuple[int, str]]:
    """Yield, for each border, a token that starts at or before it whatever follows, and the text in between."""
    places = [i for i, token in enumerate(ids) if token in special]
    starts = [spans[i][0] for i in places]
    for border in accumulate(map(len, texts[:-1])):
        found = bisect_left(starts, border)
        if found < len(starts) and starts[found] == border:
            yield places[found], ""
        else:
            at, start = (places[found - 1], starts[found - 1]) if found else (0, 0)
            yield at, whole[start:border]


def _cut(ids: list[int], borders: Sequence[tuple[int, list[int]]]) -> Pieces | None:
    """Split tokens at the borders; None if the tokens before a border aren't the expected ones."""
    if any(ids[at : at + len(expected)] != expected for at, expected in borders):
        return None
    ends = [0, *(at + len(expected) for at, expected in borders), len(ids)]
    return [ids[start:end] for start, end in pairwise(ends)]


def _cut_beginnings(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[Pieces]:
    """Return the pieces by encoding each text together with all texts before it."""
    beginnings = [text for texts in rows for text in accumulate(texts)]
    encoded = iter(encode_texts(tokenizer, beginnings))
    return [_differences(tokenizer, texts, [next(encoded) for _ in texts]) for texts in rows]


def _differences(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], encoded: Sequence[list[int]]) -> Pieces:
    """Return the pieces of a row; `encoded[k]` are the tokens of texts 0 … k as one text."""
    pieces = []
    before: list[int] = []
    for text, until_here in zip(texts, encoded, strict=True):
        if until_here[: len(before)] == before:
            pieces.append(until_here[len(before) :])
        else:
            pieces.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        before = until_here
    return pieces


def pad_answers(rows: Sequence[Answer], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad answers to the columns of a batch, int64, as wide as the longest prompt and answer.

    Returns:
        `prompts (B, P)` left-padded, `responses (B, R)` right-padded, `attention_mask (B, P+R)` and
        `response_mask (B, R)`.
    """
    prompt_width = max(len(row.prompt) for row in rows)
    width = max(len(row.answer) for row in rows)
    prompts = np.full((len(rows), prompt_width), pad_id, np.int64)
    responses = np.full((len(rows), width), pad_id, np.int64)
    attention = np.zeros((len(rows), prompt_width + width), np.int64)
    trained = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        start = prompt_width - len(row.prompt)
        prompts[i, start:] = row.prompt
        responses[i, : len(row.answer)] = row.answer
        attention[i, start : prompt_width + len(row.answer)] = 1
        trained[i, : len(row.answer)] = row.trained
    columns = {"prompts": prompts, "responses": responses, "attention_mask": attention, "response_mask": trained}
    return {name: torch.from_numpy(column) for name, column in columns.items()}


# ---- data sets -------------------------------------------------------------------------------------------------


class ChatPrompt(NamedTuple):
    """The context of an answer: a chat and the tools that it offers."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def beside(row: Any) -> str:
    """Return what a row has beside its texts, as the end of a sentence about it."""
    names = [name for name, has in (("pictures", row.images), ("tools", row.tools)) if has]
    return f" with {' and '.join(names)}" if names else ""


class OfflineDataset(TokenisedDataset[R, list[list[Passage]], list[Answer]]):
    """Rows with their answers as tokens, one answer per row of a batch; `render` gives one list of passages for each.

    Args:
        data_files, tokenizer, config, max_samples: See `TokenisedDataset`.
        stop_ids: Tokens that end an answer.
    """

    config: OfflineDataConfig

    def __init__(
        self,
        data_files: DataFiles,
        tokenizer: PreTrainedTokenizerBase,
        config: OfflineDataConfig,
        max_samples: int = -1,
        *,
        stop_ids: Sequence[int],
    ) -> None:
        self._stop_ids = stop_ids
        super().__init__(data_files, tokenizer, config, max_samples)

    def of_other_rows(self, data_files: DataFiles) -> Self:
        return type(self)(data_files, self.tokenizer, self.config, stop_ids=self._stop_ids)

    @abstractmethod
    def batch(self, indices: Iterable[int]) -> DataProto:
        """Return a batch of these rows."""

    @abstractmethod
    def first_prompt(self) -> ChatPrompt | None:
        """Return a prompt to check the chat template with; None if all rows are plain text."""

    @property
    def sources(self) -> list[str]:
        """The data source of every row (N,)."""
        return [row.data_source for row in self.rows]

    def with_pictures(self, passages: list[Passage], row: R, asked: ChatPrompt) -> list[Passage]:
        """Return a row's passages, in whose first one as many tokens stand for each picture as it takes.

        Args:
            passages: Of the chat.
            row: Has the pictures.
            asked: The chat before its first answer.

        Raises:
            ChatTemplateError: The chat template shows another number of pictures, or the prompt spells their tokens.
        """
        if not row.images:
            return passages
        self._pictures.require_unspelled(*asked)
        first, *others = passages
        return [replace(first, text=self._pictures.spread(first.text, row.images)), *others]

    def as_proto(self, tensors: dict[str, torch.Tensor], indices: Sequence[int]) -> DataProto:
        """Return a batch with the columns common to all rows and temperature 1 for log-probs."""
        columns = {
            "uid": [str(index) for index in indices],
            "data_source": [self.rows[index].data_source for index in indices],
            "index": list(indices),
        }
        objects = {name: np.array(values, dtype=object) for name, values in columns.items()}
        objects |= self.shown_by(indices)
        return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info={"temperature": 1.0})

    def prompt_ids(self, index: int) -> np.ndarray:
        return self.tokens[index][0].prompt

    def in_order(self, size: int) -> Iterator[DataProto]:
        """Yield the whole data set in batches of at most `size` rows."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    def shown(self, row: R) -> str:
        return " … or … ".join("".join(passage.text for passage in passages) for passages in self.render(row))

    def encode(self, rendered: Sequence[list[list[Passage]]]) -> Iterator[list[Answer] | None]:
        encoded = iter(encode_passages(self.tokenizer, [one for texts in rendered for one in texts], self._stop_ids))
        for texts in rendered:
            found = [next(encoded) for _ in texts]
            answers = [answer for answer in found if answer is not None]
            yield answers if len(answers) == len(texts) else None

    def length(self, tokens: list[Answer]) -> int:
        return max(map(len, tokens))

    def fit(self, tokens: list[Answer]) -> list[Answer] | None:
        limit = self.config.max_length
        over = self.length(tokens) - limit
        if over <= 0:
            return tokens
        if self.sees and self._pictures.shows(tokens[0].prompt):
            return None  # a picture is not cut
        if self.config.truncation == "left":  # cut all answers by the same number, so that a pair keeps one prompt
            cut = [answer.without_beginning(over) for answer in tokens]
        elif self.config.truncation == "right":
            cut = [answer.cut_to(limit) for answer in tokens]
        else:
            return None
        fitted = [answer for answer in cut if answer is not None]
        return fitted if len(fitted) == len(tokens) else None

    def too_long(self) -> tuple[str, str] | None:
        if self.config.truncation == "drop":
            return None
        cut = {"left": ", even without their prompts", "right": ", prompts alone"}.get(self.config.truncation, "")
        return (
            f"rows are longer than data.max_length={self.config.max_length}{cut}",
            "raise it, or set data.truncation=drop to leave them out"
            + ("" if cut else ", left to cut prompts, or right to cut answers"),
        )

    def all_ids(self) -> Iterator[np.ndarray]:
        known = (answer for index in self.known for answer in self.tokens[index])
        return (ids for answer in known for ids in (answer.prompt, answer.answer))

    def beside_ids(self) -> Iterator[dict[str, Any]]:
        for index in self.known:
            yield {"trained tokens": [np.packbits(answer.trained).tobytes() for answer in self.tokens[index]]}
