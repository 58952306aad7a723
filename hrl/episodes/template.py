"""The chat template as episodes need it: what it writes, what only it may write, and its text as tokens.

A *control token* means something to the template: special tokens, the tokens that end a turn, and added tokens that the
template's own source names, such as `<tool_response>`. The template writes them as tokens. In the words of an
environment, and of a policy that spells them out with ordinary tokens, they are ordinary text: nobody forges a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from hrl.data.chat import RENDERING_ERRORS, ChatTemplateError, Message, render_prompt, shortened, with_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\ufdd0"
"""Stands in a control token's name that is ordinary text. No character: Unicode has it for use inside a program."""
_REPLACEMENT = "\ufffd"


class Form(NamedTuple):
    """How a template reads a message with tool calls; templates differ.

    Attributes:
        arguments_as_text: Whether the arguments of a call are its JSON as text; else they are an object.
        empty: What stands for content where there is none.
    """

    arguments_as_text: bool = False
    empty: str | None = None


FORMS = (Form(), Form(empty=""), Form(True), Form(True, ""))
"""All of them; models' own templates mostly read the first."""


class Anchor(NamedTuple):
    """A control token, behind which a text can be tokenised by itself: nothing before it has a say in its tokens.

    Attributes:
        text_end: Where it ends in the text.
        ids_end: Where it ends in the ids.
        token: Its id.
    """

    text_end: int
    ids_end: int
    token: int


class Encoded(NamedTuple):
    """Ids of a text, and the control tokens in it."""

    ids: list[int]
    anchors: list[Anchor]


@dataclass(frozen=True)
class _Controls:
    """The control tokens of a tokenizer and a template.

    Attributes:
        texts: Of each control token, by id.
        ends: Finds what may end a turn in a template's text: tokens that do when sampled, and special ones of its own.
        by_environment: Finds what an environment must not write.
        by_policy: Finds what a policy must not spell out. Special tokens that it sampled are not in its text, while
            other added tokens are (`<think>`), and templates look for those.
    """

    texts: Mapping[int, str]
    ends: re.Pattern[str]
    by_environment: re.Pattern[str]
    by_policy: re.Pattern[str]


_controls: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, tuple[int, ...]], _Controls]]
_controls = WeakKeyDictionary()


def _controls_of(tokenizer: PreTrainedTokenizerBase, source: str, stop_ids: tuple[int, ...]) -> _Controls:
    known = _controls.setdefault(tokenizer, {})
    if (source, stop_ids) not in known:
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        special = {i: token.content for i, token in added.items() if token.special or i in stop_ids}
        written = {i: token.content for i, token in added.items() if _is_markup(token.content, source)}
        own = (text for i, text in special.items() if i in stop_ids or i == tokenizer.eos_token_id or text in source)
        texts = special | written
        known[source, stop_ids] = _Controls(texts, _any(own), _any(texts.values()), _any(special.values()))
    return known[source, stop_ids]


def _is_markup(name: str, source: str) -> bool:
    """Return whether a template writes a token as markup, such as `</think>`. Tokens are added for plain words, too."""
    bracketed = not name[0].isalnum() and not name[-1].isalnum()
    return bracketed and any(map(str.isalpha, name)) and name in source


def _any(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of some texts, the longest of those at one place; nothing if there are none."""
    names = set(texts)
    return re.compile(_one_of(names) if names else r"(?!)")


def _one_of(names: Collection[str]) -> str:
    """Return a pattern that matches one of some texts, letter by letter: there may be thousands of them."""
    rests: dict[str, set[str]] = {}
    for name in filter(None, names):
        rests.setdefault(name[0], set()).add(name[1:])
    if not rests:
        return ""
    ways = "|".join(re.escape(letter) + _one_of(rest) for letter, rest in sorted(rests.items()))
    return f"(?:{ways})?" if "" in names else f"(?:{ways})"


class EpisodeTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: The policy's.
        stop_ids: Tokens at which a turn ends.
        template_kwargs: `data.apply_chat_template_kwargs`.
        tools: Schemas that the policy may call.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.has_template = tokenizer.chat_template is not None
        source = ""
        if self.has_template:
            shown = with_tools(template_kwargs, tools).get("tools")
            source = tokenizer.get_chat_template(template_kwargs.get("chat_template"), shown)
        self._controls = _controls_of(tokenizer, source, tuple(stop_ids))
        # A server's words may be in schemas.
        guarded = [_guarded(tool, self._controls.by_environment) for tool in tools or ()]
        self._kwargs = with_tools(template_kwargs, guarded)
        self._names_of_reasoning = [name for name in ("thinking", "reasoning") if name in source]
        self._stop_ids = frozenset(stop_ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> EpisodeTemplate:
        return self  # never changes

    # ---- messages ----------------------------------------------------------------------------------------------

    def guarded(self, message: Message, *, by_policy: bool = False) -> dict[str, Any]:
        """Return a message as `render` takes it: the names of control tokens in its texts are ordinary text.

        Args:
            message: As it was given.
            by_policy: Whether the policy wrote it, or the environment for the policy. There the names of added tokens
                that aren't special (`<think>`) are those tokens, since templates look for them.
        """
        pattern = self._controls.by_policy if by_policy else self._controls.by_environment
        return {name: _guarded(value, pattern) for name, value in message.items()}

    def render(
        self, messages: Sequence[Message], form: Form = FORMS[0], *, num_given: int = 0, goes_on: bool = False
    ) -> str:
        """Return the text of a chat, ready for the policy's turn.

        Args:
            messages: With what came after the first prompt `guarded`.
            form: How the template is given messages with tool calls.
            num_given: Messages of the first prompt, which the template is given as they are.
            goes_on: The policy's turn continues the last message, which is the assistant's.

        Raises:
            ChatTemplateError: The template refuses the chat.
        """
        chat = [*messages[:num_given], *(self._known(message, form) for message in messages[num_given:])]
        try:
            if goes_on and self.has_template:
                arguments = {"tokenize": False, "continue_final_message": True, **self._kwargs}
                return str(self.tokenizer.apply_chat_template(chat, **arguments))
            return render_prompt(self.tokenizer, chat, self._kwargs)
        except ChatTemplateError:
            raise
        except (*RENDERING_ERRORS, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ChatTemplateError(
                f"the chat template refuses an episode's messages ({shortened(roles)}): {type(error).__name__}: {error}"
            ) from error

    def _known(self, message: Message, form: Form) -> dict[str, Any]:
        """Return a message with its calls and its reasoning as the template reads them."""
        known = dict(message)
        calls = known.get("tool_calls")
        if calls:
            known["tool_calls"] = [_with_arguments(call, form) for call in calls]
        if not known.get("content"):
            known["content"] = form.empty if calls else ""
        if reasoning := known.get("reasoning_content"):
            known |= {name: reasoning for name in self._names_of_reasoning if name not in known}
        return known

    # ---- tokens ------------------------------------------------------------------------------------------------

    def is_end(self, token: int) -> bool:
        """Return whether a token ends a turn and stands in the template's text under its own name."""
        return token in self._stop_ids and token in self._controls.texts

    def ends(self, text: str, start: int) -> Iterable[re.Match[str]]:
        """Return what may end a turn in a rendered text, from a place on."""
        return self._controls.ends.finditer(text, start)

    def is_name(self, text: str, token: int) -> bool:
        """Return whether a text is the name of this control token."""
        return self._controls.texts.get(token) == text

    def decode(self, ids: Sequence[int]) -> str:
        """Return what the policy wrote, with special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def without_marks(self, text: str) -> str:
        """Return a rendered text as people read it."""
        return text.replace(_MARK, "")

    def encode(self, text: str) -> Encoded:
        """Return the tokens of a rendered text."""
        return self._encode_pieces(text, "", add_special_tokens=not self.has_template)

    def encode_behind(self, token: int, text: str) -> Encoded | None:
        """Return the tokens of the rest of a rendered text behind a control token; None if they can't be told.

        What some tokenizers do at the beginning of a text, such as a space of their own, comes out as it does in the
        middle.
        """
        name = self._controls.texts[token]
        ids, anchors = self._encode_pieces(text, name, add_special_tokens=False)
        if ids[:1] != [token]:
            return None
        return Encoded(ids[1:], [Anchor(a.text_end, a.ids_end - 1, a.token) for a in anchors if a.ids_end > 1])

    def encode_continuation(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on where other text ended, with no space put before it."""
        return [token for piece in text.split(_MARK) for token in self._encode_continuation(piece).ids]

    def _encode_pieces(self, text: str, before: str, *, add_special_tokens: bool) -> Encoded:
        """Return the tokens of `before` and a rendered text; places are counted from the text's beginning."""
        first, *others = text.split(_MARK)
        ids, anchors = self._encode_piece(before + first, -len(before), add_special_tokens)
        done = len(first)
        for piece in others:
            # The piece begins in the middle of a name that is ordinary text.
            done += len(_MARK)
            more, found = self._encode_continuation(piece)
            anchors += [Anchor(done + a.text_end, len(ids) + a.ids_end, a.token) for a in found]
            ids += more
            done += len(piece)
        return Encoded(ids, anchors)

    def _encode_piece(self, text: str, offset: int, add_special_tokens: bool) -> Encoded:
        """Return the tokens of a text without marks; places in it are counted from `-offset`."""
        if not self.tokenizer.is_fast:  # it doesn't tell where its tokens stand
            return Encoded(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], [])
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        texts = self._controls.texts
        anchors = [
            Anchor(spans[i][1] + offset, i + 1, token)
            for i, token in enumerate(ids)
            if token in texts and text[slice(*spans[i])] == texts[token]
        ]
        return Encoded(ids, anchors)

    def _encode_continuation(self, text: str) -> Encoded:
        for before in ("\n", "a"):
            known = self.tokenizer(before, add_special_tokens=False)["input_ids"]
            ids, anchors = self._encode_piece(before + text, -len(before), add_special_tokens=False)
            if ids[: len(known)] == known:
                return Encoded(
                    ids[len(known) :], [Anchor(a.text_end, a.ids_end - len(known), a.token) for a in anchors]
                )
        return self._encode_piece(text, 0, add_special_tokens=False)


def _guarded(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        value = value.replace(_MARK, _REPLACEMENT) if _MARK in value else value
        while pattern.search(value):
            value = pattern.sub(_broken, value)
        return value
    if isinstance(value, Mapping):
        return {_guarded(key, pattern): _guarded(item, pattern) for key, item in value.items()}
    return [_guarded(item, pattern) for item in value] if isinstance(value, list | tuple) else value


def _broken(found: re.Match[str]) -> str:
    name = found[0]
    return name[0] + _MARK + name[1:] if len(name) > 1 else _REPLACEMENT


def _with_arguments(call: Any, form: Form) -> Any:
    """Return a tool call with its arguments as an object or as JSON text; what is neither stays as it is."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if form.arguments_as_text:
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):  # also of a number of thousands of digits, and of deep nesting
            return call
        arguments = read if isinstance(read, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}
