"""The growing token list of an episode.

What the policy sampled enters as the sampler's ids, and is never rendered or tokenised again. What the environment says
enters as the ids that the chat template adds for it. A template that rewrites what came before begins a *branch*: a
row of its own, with the chat rendered anew.

A delta is right where three things hold, and a branch begins where one of them doesn't:

1. The chat's text so far is the beginning of its new text: the generation prompt stays, tools stay where they were.
2. The template writes the policy's turn as the policy wrote it (`says_the_same`), and closes it with the token that
   the policy ended it with. A turn that was cut off is closed by the template.
3. All that follows can be tokenised by itself, since it begins behind a control token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hrl.data.chat import ChatTemplateError, Message, as_messages, wrong_value
from hrl.data.sources import show_value
from hrl.environments.interface import EnvironmentReplyError, Observation
from hrl.episodes.episode import EpisodeRow
from hrl.episodes.observation_text import with_whole_characters, without_middle
from hrl.episodes.pictures import EpisodePictures
from hrl.episodes.template import FORMS, Anchor, Encoded, EpisodeTemplate, Form
from hrl.episodes.wording import says_the_same
from hrl.pictures import Picture
from hrl.routing import continued

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class _Row:
    """A list of tokens that grows.

    Attributes:
        text: What the template wrote, up to the policy's next (or last) turn; the ids up to there stand for it.
        prompt_length: Ids before `response_ids`.
        ids: All of them.
        mask, log_probs, versions, turns: Of all ids, see `EpisodeRow`.
        anchors: Control tokens in `text`.
        routed: `(tokens, L, K)`, the experts of the first ids, as far as an engine has told; None where it does not.
    """

    text: str = ""
    prompt_length: int = 0
    ids: array[int] = field(default_factory=lambda: array("i"))
    mask: array[int] = field(default_factory=lambda: array("b"))
    log_probs: array[float] = field(default_factory=lambda: array("d"))
    versions: array[int] = field(default_factory=lambda: array("q"))
    turns: array[int] = field(default_factory=lambda: array("i"))
    anchors: list[Anchor] = field(default_factory=list)
    routed: np.ndarray | None = None

    def add(self, ids: Sequence[int], turn: int) -> None:
        """Append ids that were not sampled here."""
        self.ids.extend(ids)
        self.mask.extend([0] * len(ids))
        self.log_probs.extend([0.0] * len(ids))
        self.versions.extend([-1] * len(ids))
        self.turns.extend([turn] * len(ids))

    def add_sampled(self, ids: Sequence[int], log_probs: Sequence[float], version: int, turn: int) -> None:
        """Append ids that were sampled here."""
        self.ids.extend(ids)
        self.mask.extend([1] * len(ids))
        self.log_probs.extend(log_probs)
        self.versions.extend([version] * len(ids))
        self.turns.extend([turn] * len(ids))

    def add_text(self, text: str, start: int, rest: Encoded, turn: int) -> None:
        """Append what the template wrote from `start` on, so that the ids stand for the whole text."""
        length = len(self.ids)
        self.anchors += [Anchor(a.text_end + start, a.ids_end + length, a.token) for a in rest.anchors]
        self.add(rest.ids, turn)
        self.text = text

    def cut_to(self, length: int) -> None:
        """Take back all ids from a place on."""
        for column in (self.ids, self.mask, self.log_probs, self.versions, self.turns):
            del column[length:]
        self.anchors = [anchor for anchor in self.anchors if anchor.ids_end <= length]
        self.routed = None if self.routed is None else self.routed[:length]

    def branch(self, length: int) -> _Row:
        """Return a row with the same first ids, none of which was sampled in it."""
        row = _Row(anchors=[anchor for anchor in self.anchors if anchor.ids_end <= length])
        row.add(self.ids[:length], 0)
        row.turns[:] = self.turns[:length]
        row.routed = None if self.routed is None else self.routed[:length]
        return row

    def as_episode_row(self, pictures: tuple[Picture, ...]) -> EpisodeRow:
        """Return the row, whose prompt shows these pictures, up to its last sampled token."""
        start = self.prompt_length
        end = next((i + 1 for i in range(len(self.mask) - 1, start - 1, -1) if self.mask[i]), start)
        return EpisodeRow(
            prompt_ids=self.ids[:start].tolist(),
            response_ids=self.ids[start:end].tolist(),
            mask=self.mask[start:end].tolist(),
            log_probs=self.log_probs[start:end].tolist(),
            versions=self.versions[start:end].tolist(),
            turns=self.turns[start:end].tolist(),
            routed=None if self.routed is None else self.routed[:end],
            pictures=pictures,
        )


class _Turn(NamedTuple):
    """The policy's last turn.

    Attributes:
        row: Number of the row in which it was sampled.
        start, end: Places of its ids.
        text: Of the row, up to the turn.
        calls_tools: Whether its message has tool calls.
    """

    row: int
    start: int
    end: int
    text: str
    calls_tools: bool


class _Place(NamedTuple):
    """Where a row goes on in a rendered text.

    Attributes:
        kept: Ids of the row that stay.
        text_start: Where the rest of the text begins.
        rest: The rest's tokens.
        is_delta: Whether all that was sampled stays.
    """

    kept: int
    text_start: int
    rest: Encoded
    is_delta: bool


class Transcript:
    """An episode's conversation, its messages and its tokens.

    Args:
        tokenizer: The policy's.
        stop_ids: Tokens at which a turn ends.
        template_kwargs: `data.apply_chat_template_kwargs`.
        first: What `reset` returned. Its messages become the same tokens as the prompt of a run without environment;
            a text in it that names a special token is that token, as there.
        max_observation_tokens: Longest text of a message in later observations; what is longer loses its middle.
        prompt_ids: What stands for the messages of `first` where these are a row's own: the tokens of a run without
            environment, which may have cut them, and begins a turn behind an assistant's message. None renders them;
            a turn continues an assistant's message.
        num_own: Messages of `first`, from its beginning, whose words are whoever's who asks; of those behind them no
            text is a special token, as of what comes later. None stands for all.
        pictures: Those of the row, which stand where messages of `first` have parts for them.

    Attributes:
        messages: The conversation as the policy and the environment had it.
        pictures: What `context` shows, with places among its ids.
        turn_places: Where in it each turn of the policy stands.
        num_cut_texts: Texts of observations that were too long.

    Raises:
        ChatTemplateError: The chat template refuses the messages.
        EnvironmentReplyError: The observation is none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        template_kwargs: Mapping[str, Any],
        *,
        first: Observation,
        max_observation_tokens: int | None = None,
        prompt_ids: Sequence[int] | None = None,
        num_own: int | None = None,
        pictures: EpisodePictures | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = EpisodeTemplate(tokenizer, stop_ids, template_kwargs, first.tools)
        self._max_observation_tokens = max_observation_tokens
        self.messages: list[dict[str, Any]] = []
        self.turn_places: list[int] = []
        self.num_cut_texts = 0
        self._num_turns = 0
        #: Messages up to and with the last turn, as the template is given them, and those since.
        self._history: list[dict[str, Any]] = []
        self._since: list[dict[str, Any]] = []
        self._turn: _Turn | None = None
        self._is_answered = True
        self._form = FORMS[0]
        self._num_given = 0
        self._only_ids = first.token_ids is not None
        self._is_prompt_given = prompt_ids is not None
        self._rows = [_Row()]
        self._shown: EpisodePictures | None = None
        self.pictures: tuple[Picture, ...] = ()
        if self._only_ids:
            self._row.add(self._checked_ids(first), 0)
            self._row.prompt_length = len(self._row.ids)
        else:
            self.messages += self._checked_messages(first, shows=pictures is not None)
            self._shown = None if pictures is None else pictures.shown_in(self.messages)
            self._num_given = len(self.messages) if num_own is None else num_own
            self._since = [*self.messages[:num_own], *self._guarded(self.messages[self._num_given :])]
            self._render_prompt(prompt_ids)

    @property
    def _row(self) -> _Row:
        return self._rows[-1]

    @property
    def context(self) -> list[int]:
        """The ids in which the next turn is sampled."""
        return self._row.ids.tolist()

    @property
    def num_routed(self) -> int:
        """Tokens of `context` whose experts an engine has told."""
        return 0 if self._row.routed is None else len(self._row.routed)

    @property
    def num_tokens(self) -> int:
        """Tokens of `context`."""
        return len(self._row.ids)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of the current row beyond its prompt."""
        return len(self._row.ids) - self._row.prompt_length

    @property
    def num_rows(self) -> int:
        """Rows so far, with one that nothing was sampled in yet."""
        return len(self._rows)

    def add_turn(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        version: int,
        message: Message,
        routed: np.ndarray | None = None,
    ) -> None:
        """Append what the policy sampled in `context`.

        Args:
            token_ids: With the token that ended the turn, if one did.
            log_probs: Of each token.
            version: Of the policy.
            message: The turn as the assistant's message: `content`, and `tool_calls` and `reasoning_content` if there
                are any. Where the observation ended with an assistant's message, what continues that.
            routed: `(tokens, L, K)`, the experts of the tokens from the `num_routed`-th of `context` on, perhaps of
                more than these; None where nobody asked.

        Raises:
            ValueError: There is not a log-prob for each token, or no observation since the last turn.
        """
        if len(token_ids) != len(log_probs):
            raise ValueError(f"{len(token_ids)} tokens with {len(log_probs)} log-probs")
        if not self._is_answered:
            raise ValueError("a turn follows an observation, and this one follows a turn")
        start, num_routed = len(self._row.ids), self.num_routed
        self._row.add_sampled(token_ids, log_probs, version, self._num_turns)
        if routed is not None:
            self._row.routed = continued(self._row.routed, routed, num_routed)[: len(self._row.ids)]
        said = with_whole_characters({"role": "assistant", **message})
        known = self._template.guarded(said, by_policy=True)
        if self._goes_on:
            said, known = _joined(self.messages.pop(), said), _joined(self._since.pop(), known)
        self.turn_places.append(len(self.messages))
        self.messages.append(said)
        self._history += [*self._since, known]
        self._since = []
        end = len(self._row.ids)
        self._turn = _Turn(len(self._rows) - 1, start, end, self._row.text, bool(said.get("tool_calls")))
        self._is_answered = False
        self._num_turns += 1

    def add_observation(self, observation: Observation) -> int:
        """Append what the environment said; the template may begin a branch with it.

        An observation that follows another one continues it. An observation without messages asks for another turn.

        Returns:
            Tokens by which `context` grew; fewer than none where a branch is shorter.

        Raises:
            ChatTemplateError: The chat template refuses the messages.
            EnvironmentReplyError: The observation is none, or names tools, which only the first one may.
        """
        if observation.tools is not None:
            raise EnvironmentReplyError("an observation names tools after the first one; give them in reset")
        before = len(self._row.ids)
        if observation.token_ids is not None:
            self._row.add(self._checked_ids(observation), max(self._num_turns - 1, 0))
            self._only_ids = True
        elif self._only_ids:
            raise EnvironmentReplyError(
                "an observation of messages follows one of token ids, so that the chat template has no chat to add to; "
                "give messages in all observations, or token ids from some observation on"
            )
        else:
            messages = [self._shortened(message) for message in self._checked_messages(observation)]
            self._render([*self._since, *self._guarded(messages)])
            self.messages += messages
        self._is_answered = True
        return len(self._row.ids) - before

    def rows(self) -> list[EpisodeRow]:
        """Return the rows: the first, and one for each branch in which something was sampled.

        A row ends with its last sampled token.
        """
        rows = [row for row in self._rows if any(row.mask)]
        return [row.as_episode_row(self.pictures) for row in rows or self._rows[:1]]

    # ---- text --------------------------------------------------------------------------------------------------

    @property
    def _goes_on(self) -> bool:
        """Whether the next turn continues the assistant's message that an observation ends with."""
        if self._turn is None and self._is_prompt_given:
            return False
        return self._template.has_template and bool(self._since) and self._since[-1].get("role") == "assistant"

    def _render_prompt(self, given: Sequence[int] | None = None) -> None:
        """Make the first row anew, with the ids that are given for it."""
        self._is_prompt_given = given is not None
        text, self._form = min(self._renderings(self._since), key=_not_understood)
        encoded = self._template.encode(text)
        if given is not None and encoded.ids != [*given]:  # cut; where its control tokens stand is not looked for
            encoded = Encoded([*given], [])
        row = _Row()
        row.add_text(text, 0, encoded, 0)
        row.prompt_length = len(row.ids)
        self._rows = [row]
        if self._shown is not None:
            self.pictures = self._shown.placed(row.ids)

    def _render(self, since: list[dict[str, Any]]) -> None:
        """Bring the row from the end of the last turn to the next one, with these messages in between."""
        earlier, self._since = self._since, since
        try:
            if self._turn is None:
                self._render_prompt()
            elif self._template.has_template:
                self._add_rendered(self._turn)
            else:
                self._add_plain(self._turn)
        except ChatTemplateError:
            self._since = earlier
            raise

    def _add_rendered(self, turn: _Turn) -> None:
        row = self._rows[turn.row]
        place, text = self._place(row, turn)
        del self._rows[turn.row + 1 :]
        row.cut_to(turn.end)
        if not place.is_delta:
            prompt_length = self._rows[0].prompt_length
            row = row.branch(place.kept)
            self._rows.append(row)
        row.add_text(text, place.text_start, place.rest, self._num_turns - 1)
        if not place.is_delta:
            row.prompt_length = min(prompt_length, len(row.ids))
            self._require_pictures_in_place(row)

    def _require_pictures_in_place(self, row: _Row) -> None:
        """Refuse a branch in which a picture stands elsewhere than in the first prompt."""
        end = max((picture.start + picture.length for picture in self.pictures), default=0)
        if row.ids[:end] != self._rows[0].ids[:end]:
            raise ChatTemplateError("the chat template rewrites what stands before or between an episode's pictures")

    def _text(self, messages: Sequence[Message], form: Form) -> str:
        text = self._template.render(messages, form, num_given=self._num_given, goes_on=self._goes_on)
        return text if self._shown is None else self._shown.spread(text)

    def _renderings(self, messages: Sequence[Message]) -> Iterator[tuple[str, Form]]:
        """Yield a chat's text in each form that the template takes, that of the last time first.

        Raises:
            ChatTemplateError: It takes none.
        """
        refusals: list[ChatTemplateError] = []
        # Only messages with calls of tools differ, and what was given as it is has one form.
        differ = any(message.get("tool_calls") for message in messages[self._num_given :])
        forms = dict.fromkeys((self._form, *FORMS)) if differ else (self._form,)
        for form in forms:
            try:
                yield self._text(messages, form), form
            except ChatTemplateError as error:
                refusals.append(error)
        if len(refusals) == len(forms):
            raise refusals[0]

    def _guarded(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._template.guarded(one, by_policy=one["role"] == "assistant") for one in messages]

    def _place(self, row: _Row, turn: _Turn) -> tuple[_Place, str]:
        """Return where the row goes on, and the chat's text."""
        rendered: list[tuple[str, Form]] = []
        for text, form in self._renderings([*self._history, *self._since]):
            place = self._end_of_turn(row, turn, text)
            if place is not None:
                self._form = form
                return place, text
            rendered.append((text, form))
            if not turn.calls_tools:
                break
        text, self._form = min(rendered, key=_not_understood)
        return self._common_beginning(row, turn, text), text

    def _end_of_turn(self, row: _Row, turn: _Turn, text: str) -> _Place | None:
        """Return the place behind what was sampled; None if the text has something else there."""
        if not text.startswith(turn.text):
            return None
        ids = row.ids[turn.start : turn.end]
        ended = ids.pop() if ids and self._template.is_end(ids[-1]) else None
        said = self._template.decode(ids.tolist())
        for end in self._template.ends(text, len(turn.text)):
            if says_the_same(said, self._template.without_marks(text[len(turn.text) : end.start()])):
                break
        else:
            return None
        if ended is not None and self._template.is_name(end[0], ended):
            rest = self._template.encode_behind(ended, text[end.end() :])
            return rest and _Place(turn.end, end.end(), rest, is_delta=True)
        # Cut off, and closed by the template; or ended with a token that the template has no place for.
        rest = self._template.encode(text[end.start() :])
        kept = turn.end - (ended is not None)
        is_whole = bool(rest.ids) and self._template.is_name(end[0], rest.ids[0])
        return _Place(kept, end.start(), rest, is_delta=ended is None) if is_whole else None

    def _common_beginning(self, row: _Row, turn: _Turn, text: str) -> _Place:
        """Return the last place where row and text are known to be the same."""
        same = _common_length(turn.text, text)
        for anchor in reversed(row.anchors):
            if anchor.text_end <= same and anchor.ids_end <= turn.start:
                rest = self._template.encode_behind(anchor.token, text[anchor.text_end :])
                if rest is not None:
                    return _Place(anchor.ids_end, anchor.text_end, rest, is_delta=False)
        return _Place(0, 0, self._template.encode(text), is_delta=False)

    def _add_plain(self, turn: _Turn) -> None:
        """Append messages as raw text, for a model without a chat template."""
        text = "".join(self._text([message], self._form) for message in self._since)
        row = self._row
        row.cut_to(turn.end)
        last = row.ids[-1] if row.ids else None
        encoded = None
        if last is not None and self._template.is_end(last):
            encoded = self._template.encode_behind(last, text)
        row.add(self._template.encode_continuation(text) if encoded is None else encoded.ids, self._num_turns - 1)

    # ---- observations ------------------------------------------------------------------------------------------

    def _checked_messages(self, observation: Observation, *, shows: bool = False) -> list[dict[str, Any]]:
        messages = observation.messages
        if messages is None:
            raise EnvironmentReplyError("an observation has neither messages nor token ids; give one of them")
        if not messages and self.messages:
            return []
        name = "messages of an observation"
        wrong = wrong_value(messages, name, is_text=False)
        found = as_messages(with_whole_characters(messages), name, pictures=shows) if wrong is None else wrong
        if isinstance(found, str):
            more = "; an observation after the first shows no pictures" if self.pictures else ""
            raise EnvironmentReplyError(found + more)
        return found

    def _checked_ids(self, observation: Observation) -> list[int]:
        ids, count = observation.token_ids or [], len(self._tokenizer)
        if observation.messages is not None:
            raise EnvironmentReplyError("an observation has messages and token ids; give one of them")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < count:
                raise EnvironmentReplyError(
                    f"an observation's token_ids hold {show_value(token)}, expected ids from 0 to {count - 1}"
                )
        if not ids and not self._row.ids:
            raise EnvironmentReplyError("the first observation has no token; an episode begins with a prompt")
        return [int(token) for token in ids]

    def _shortened(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message whose texts are no longer than configured."""
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self._cut(content)}
        if content is None:
            return message
        return {**message, "content": [{**part, "text": self._cut(part["text"])} for part in content]}

    def _cut(self, text: str) -> str:
        if self._max_observation_tokens is None:
            return text
        cut = without_middle(self._tokenizer, text, self._max_observation_tokens)
        self.num_cut_texts += cut is not text
        return cut


def _joined(begun: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the assistant's message that an observation began and the policy continued."""
    return {**begun, **said, "content": _content(begun) + _content(said)}


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _not_understood(rendering: tuple[str, Form]) -> int:
    """Return how often a template has written a null as it is in Python, as some do."""
    return rendering[0].count("None")


def _common_length(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
