"""What the policy wrote in a turn, read by the engine's own parsers: its reasoning, its text, its calls of tools.

vLLM is imported only for an episode with tools or a reasoning parser.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hrl.data.chat import wrong_value
from hrl.environments import ToolCall
from hrl.episodes.parser_choice import ParserChoiceError, check_reasoning_parser, parser_class, tool_parser_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.parser.abstract_parser import Parser

logger = logging.getLogger(__name__)

_COMPLAINING = ("vllm.parser", "vllm.reasoning", "vllm.tool_parsers")
"""Loggers of vLLM's parsers: they write a traceback for every call that can't be read."""
_LONGEST_COMPLAINT = 200
_PROBE_NAME = "hrl_probe"
_PROBE = {_PROBE_NAME: 7}
_NINE_ALPHANUMERICS = re.compile(r"\|\s*length\s*(!=|==)\s*9\b")
"""How Mistral's templates test the ids of calls."""
_MOST_PARSERS = 64
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

_complaint: ContextVar[str | None] = ContextVar("complaint", default=None)


@dataclass(frozen=True)
class ParsedTurn:
    """What the policy wrote in one turn.

    Attributes:
        text: All of it, without special tokens.
        content: The text without tool calls and without reasoning.
        reasoning: Its reasoning; None without a reasoning parser, or if there is none.
        tool_calls: The calls in it, in order.
        message: The turn as a message of the chat, as `Transcript` takes it: arguments as objects where they are.
        error: What the parser could not read, where it said so; the turn then has no calls.
    """

    text: str
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    message: dict[str, Any]
    error: str | None = None


class TurnParser:
    """Reads the turns of episodes that have the same tools.

    Args:
        tokenizer: The policy's.
        tool_parser: `environment.tool_parser`; None chooses by the chat template, if there are tools.
        reasoning_parser: `environment.reasoning_parser`.
        tools: Schemas of the tools, as the chat template gets them.
        stop_ids: Tokens at which sampling stops, which are no part of the text.

    Attributes:
        tool_parser: Name of the parser of tool calls; None without tools.
        chosen_by: What it was chosen by, such as `<tool_call> in the chat template`.

    Raises:
        ParserChoiceError: No parser is known for the tools, or the configured one does not fit the tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        stop_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._template = _template_of(tokenizer)
        ends = {tokenizer.eos_token_id, *stop_ids}
        self._ends: frozenset[int] = frozenset(end for end in ends if isinstance(end, int))
        self.tool_parser: str | None = None
        self.chosen_by = ""
        if tools:
            self.tool_parser, self.chosen_by = tool_parser_for(self._template.text, tool_parser)
        if reasoning_parser is not None:
            check_reasoning_parser(reasoning_parser)
        self._reader: _Reader | None = None
        if self.tool_parser is not None or reasoning_parser is not None:
            self._reader = _Reader(tokenizer, self.tool_parser, reasoning_parser, tools or ())

    def parse(self, token_ids: Sequence[int], *, turn: int = 0) -> ParsedTurn:
        """Read what was sampled in a turn.

        Args:
            token_ids: All that was sampled, with the token that ended the turn.
            turn: Counted from 0; ids of calls are made of it.
        """
        ids = list(token_ids)
        text = self._decode(ids, skip_special_tokens=True)
        if self._reader is None:
            return ParsedTurn(text, text, None, (), {"role": "assistant", "content": text})
        written = ids[:-1] if ids and ids[-1] in self._ends else ids
        raw = self._decode(written, skip_special_tokens=False)
        found = self._reader.read(raw, ids)
        written_ids = Counter(given for _, _, given in found.calls)
        calls = tuple(
            # An id that the policy wrote stays, where it tells this call from others; vLLM draws the rest at random.
            self._call(
                name, arguments, given if given and given in raw and written_ids[given] == 1 else None, turn, number
            )
            for number, (name, arguments, given) in enumerate(found.calls)
        )
        content = self._without_special_tokens(found.content)
        reasoning = None if found.reasoning is None else self._without_special_tokens(found.reasoning)
        return ParsedTurn(
            text,
            content,
            reasoning,
            calls,
            self._message(text, content, reasoning, calls),
            None if calls else found.error,
        )

    def _decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        decoded = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    def _without_special_tokens(self, text: str) -> str:
        """Return a text that no chat template turns into other tokens than those of text."""
        return self._template.special.sub("", text) if self._template.special is not None else text

    def _call(self, name: str, arguments: str, given: str | None, turn: int, number: int) -> ToolCall:
        return ToolCall(
            name=name,
            arguments=_json_object(arguments),
            id=given or self._template.call_id(turn, number),
            text=arguments,
        )

    def _message(self, text: str, content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> dict[str, Any]:
        takes_calls = self._template.shows_calls and (
            self._template.takes_any_arguments or all(call.arguments is not None for call in calls)
        )
        if calls and not takes_calls:  # calls in a field of their own would be lost, or refused
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {
                        "name": call.name,
                        "arguments": call.text if call.arguments is None else call.arguments,
                    },
                }
                for call in calls
            ]
        return message


class TurnParsers:
    """Readers of turns, made once for each set of tools; from any thread.

    Making the first one with tools or reasoning imports vLLM, which takes seconds.

    Args:
        tokenizer, tool_parser, reasoning_parser, stop_ids: As `TurnParser` takes them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_parser: str | None,
        reasoning_parser: str | None,
        *,
        stop_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._made: OrderedDict[str, TurnParser] = OrderedDict()
        self._making = threading.Lock()

    def of(self, tools: Sequence[Mapping[str, Any]] | None, *, with_reasoning: bool = True) -> TurnParser:
        """Return the reader of turns in which these tools may be called.

        Args:
            tools: Schemas of the tools.
            with_reasoning: Whether reasoning is told apart, where a parser of it is named.

        Raises:
            ParserChoiceError: See `TurnParser`.
        """
        reasoning = self._reasoning_parser if with_reasoning else None
        key = _key_of(tools, reasoning)
        with self._making:
            made = self._made.get(key)
            if made is None:
                made = TurnParser(self._tokenizer, self._tool_parser, reasoning, tools, stop_ids=self._stop_ids)
                self._made[key] = made
            self._made.move_to_end(key)
            while len(self._made) > _MOST_PARSERS:
                self._made.popitem(last=False)
        return made

    async def ready(self, tools: Sequence[Mapping[str, Any]] | None) -> TurnParser:
        """Return the same as `of`; a new one is made on a thread, so that nothing else on this loop waits for it."""
        made = self._made.get(_key_of(tools, self._reasoning_parser))
        return made if made is not None else await asyncio.to_thread(self.of, tools)


def _key_of(tools: Sequence[Mapping[str, Any]] | None, reasoning: str | None) -> str:
    return json.dumps([list(tools or ()), reasoning], default=str)


def template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the text of the chat template that shows tools; None where there is none."""
    templates = tokenizer.chat_template
    if isinstance(templates, dict):  # several; `tool_use` is the one that transformers takes for tools
        templates = templates.get("tool_use") or templates.get("default")
    return templates


class _Template:
    """What a chat template does with tool calls.

    Attributes:
        text: None where there is none.
        special: Finds special tokens in a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text = template_of(tokenizer)
        self.source = tokenizer.chat_template
        self._tokenizer = tokenizer
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special = sorted(added.union(tokenizer.all_special_tokens), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special))) if special else None
        self._has_short_ids = _NINE_ALPHANUMERICS.search(self.text or "") is not None

    def call_id(self, turn: int, number: int) -> str:
        """Return the id of a call: the same in every run, and another one for each call of an episode."""
        return f"c{_digits(turn)}{_digits(number)}" if self._has_short_ids else f"call_{turn}_{number}"

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template writes out the field `tool_calls`, whose arguments it takes as objects or as JSON."""
        return self._shows(_PROBE) or self._shows(json.dumps(_PROBE))

    @cached_property
    def takes_any_arguments(self) -> bool:
        """Whether the template also writes out arguments that are no object; some walk through their entries."""
        return self._shows(json.dumps([_PROBE_NAME]))

    def _shows(self, arguments: object) -> bool:
        """Return whether the template writes out arguments that are given like that."""
        if self.text is None:
            return False
        call = {"type": "function", "id": self.call_id(0, 0), "function": {"name": "probe", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": "probe", "content": "7"},
        ]
        try:
            shown = self._tokenizer.apply_chat_template(messages, tokenize=False)
        # Templates are programs of others: on what they don't expect they raise whatever comes of it.
        except Exception as error:  # noqa: BLE001
            logger.debug("the chat template takes no arguments as %s: %s", type(arguments).__name__, error)
            return False
        return _PROBE_NAME in str(shown)


_templates: WeakKeyDictionary[Any, _Template] = WeakKeyDictionary()


def _template_of(tokenizer: PreTrainedTokenizerBase) -> _Template:
    """Return what is known of a tokenizer's chat template; looked at once."""
    known = _templates.get(tokenizer)
    if known is None or known.source != tokenizer.chat_template:
        known = _templates[tokenizer] = _Template(tokenizer)
    return known


@dataclass(frozen=True)
class _Found:
    """What the engine's parser made of a turn; a call is (name, arguments as text, id)."""

    content: str
    reasoning: str | None = None
    calls: Sequence[tuple[str, str, str | None]] = ()
    error: str | None = None


class _Reader:
    """The engine's parsers, as its server uses them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._tokenizer = _with_quick_vocabulary(tokenizer)
        self._class = parser_class(tool_parser, reasoning_parser)
        self._has_tools = tool_parser is not None
        try:
            self._request = ChatCompletionRequest(messages=[], model="", tools=[dict(tool) for tool in tools] or None)
        except ValueError as error:
            raise ParserChoiceError(f"the environment's tools are no schemas of functions: {error}") from error
        for key, names in (("reasoning_parser", (None, reasoning_parser)), ("tool_parser", (tool_parser, None))):
            if any(names):
                self._try(key, parser_class(*names))

    def _try(self, key: str, parser: type[Parser]) -> None:
        try:
            parser(self._tokenizer, self._request.tools)
        # Each parser looks for its own tokens in the vocabulary, and says in its own way what it misses.
        except Exception as error:
            raise ParserChoiceError(
                f"environment.{key}: vLLM's parser does not fit the model's tokenizer ({error}); choose that of the "
                "model's family"
            ) from error

    def read(self, text: str, token_ids: list[int]) -> _Found:
        """Return what is in a turn; what can't be read is content."""
        _listen()
        token = _complaint.set(None)
        try:
            parser = self._class(self._tokenizer, self._request.tools)
            reasoning, content, calls = parser.parse(
                text, self._request, enable_auto_tools=self._has_tools, model_output_token_ids=token_ids
            )
            found = [(call.name, call.arguments, call.id) for call in calls or ()]
            return _Found(content or "", reasoning, found, _complaint.get())
        # The policy may write anything, and the parsers were written for what models usually write.
        except Exception as error:  # noqa: BLE001
            return _Found(text, error=f"{type(error).__name__}: {error}"[:_LONGEST_COMPLAINT])
        finally:
            _complaint.reset(token)


class _Complaints(logging.Handler):
    """Keeps what a parser writes into the log about the turn that it reads."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            return
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
        _complaint.set(text[:_LONGEST_COMPLAINT])


_complaints = _Complaints()


def _listen() -> None:
    """Take what vLLM's parsers log for what it is: a property of a turn. A policy in training writes much nonsense."""
    for name in _COMPLAINING:
        source = logging.getLogger(name)
        # Said before each turn: who configures vLLM's loggers anew takes handlers away.
        if _complaints not in source.handlers or source.propagate:
            source.addHandler(_complaints)
            source.propagate = False


def _with_quick_vocabulary(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that keeps its vocabulary as a dictionary, which each parser asks for."""
    known = _quick.get(tokenizer)
    if known is None:
        from vllm.tokenizers.hf import get_cached_tokenizer

        known = _quick[tokenizer] = get_cached_tokenizer(tokenizer)
    return known


_quick: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the object of a JSON text; None if it is none, or one that can't be handed on."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # also of a number of thousands of digits, and of deep nesting
        return None
    return value if isinstance(value, dict) and wrong_value(value, "arguments") is None else None


def _digits(number: int) -> str:
    """Return a number as four digits of base 36."""
    digits = ""
    for _ in range(4):
        number, last = divmod(number, len(_DIGITS))
        digits = _DIGITS[last] + digits
    return digits
