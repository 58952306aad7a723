"""The policy as a client meets it: words become tokens, a response is sampled, and its tokens become words."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hrl.data.chat import ChatTemplateError
from hrl.environments.interface import EnvironmentReplyError, Observation
from hrl.episodes.episode import NO_VERSION
from hrl.episodes.parser_choice import ParserChoiceError
from hrl.episodes.parsing import ParsedTurn, TurnParser, TurnParsers
from hrl.episodes.tokens import Transcript
from hrl.episodes.tokens_as_text import Pieces, Stopped, beginnings, decode, pieces, shown_token, stopped_at
from hrl.serve.answers import Choice, FinishReason
from hrl.serve.asked import ChatAsked, plain_message
from hrl.serve.refusals import RequestRefusedError, bad_request
from hrl.serve.sessions import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.serve.asked import CompletionAsked
    from hrl.serve.sessions import Session
    from hrl.workers.rollout.base import SampleOutput

P = ParamSpec("P")
T = TypeVar("T")

_ANSWERS = ("assistant", "tool", "function")
_DOCUMENTS = "documents"
"""The only parameter of `apply_chat_template` that is data for the template and says nothing of how it is rendered."""
_LONGEST_TOKEN_AT_LEAST = 64
"""Characters. Of a text with more of them than the longest context has room for, no token is looked at."""


@dataclass(frozen=True)
class Reading:
    """How the policy's words are read.

    Attributes:
        stop_ids: Tokens at which a response ends.
        template_kwargs: Further arguments of the chat template.
        tool_parser: Name of the engine's parser of tool calls; None chooses by the chat template.
        reasoning_parser: Name of the engine's parser of reasoning; None reads none.
    """

    stop_ids: tuple[int, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True, eq=False)
class Context:
    """What a response is sampled in.

    Attributes:
        ids: Its tokens.
        script: The chat up to it; None for a text.
        text: The text that it is; None for a chat, and for a prompt of token ids.
        conversation: That it goes on, or begins.
    """

    ids: list[int]
    conversation: Conversation
    script: Transcript | None = None
    text: str | None = None


@dataclass(frozen=True)
class Read:
    """A response, read.

    Attributes:
        choice: As a client is given it.
        parsed: As the policy wrote it, a stop text included.
        num_text_tokens: The tokens that are exactly the text that is shown; None where a stop text begins within one.
    """

    choice: Choice
    parsed: ParsedTurn
    num_text_tokens: int | None


class GrowingChoice:
    """An answer as far as it has come, where its text is all that there will be to show.

    Attributes:
        choice: Its tokens so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Context, *, log_probs: bool) -> None:
        self._tokenizer, self._text, self._with_log_probs = tokenizer, Pieces(tokenizer), log_probs
        self._pieces: list[str] = []
        self._beginnings: list[int] = []
        self._length = 0
        self._can_show = 0
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._tokens: list[tuple[str, list[int] | None]] = []
        self.choice = Choice(
            text="",
            pieces=self._pieces,
            beginnings=self._beginnings,
            message=None,
            prompt_ids=context.ids,
            token_ids=self._ids,
            log_probs=self._log_probs,
            tokens=self._tokens,
            finish_reason="stop",
            version=NO_VERSION,
        )

    def add(self, ids: Sequence[int], log_probs: Sequence[float]) -> int:
        """Take what was sampled; return how many tokens can be shown: those behind them may change the last text."""
        self._ids += ids
        self._log_probs += log_probs
        for token in ids:
            piece = self._text.add(token)
            self._beginnings.append(self._length)
            self._pieces.append(piece)
            self._length += len(piece)
            if piece:
                self._can_show = len(self._pieces)
        if self._with_log_probs:
            self._tokens += [shown_token(self._tokenizer, token) for token in ids]
        return self._can_show

    def ended(self, choice: Choice, shown: int) -> Choice:
        """Return the whole answer, which goes on from what was shown of it.

        Some tokenizers write the beginning of a text in another way when more follows. What was shown can't be taken
        back, so the text stays the one that its pieces make.

        Args:
            choice: As it was read.
            shown: Tokens that were shown.
        """
        if list(choice.pieces[:shown]) == self._pieces[:shown]:
            return choice
        pieces = [*self._pieces[:-1], self._pieces[-1] + self._text.rest()]
        text = "".join(pieces)
        message = None if choice.message is None else {**choice.message, "content": text}
        return replace(choice, text=text, pieces=pieces, beginnings=self._beginnings, message=message)


class PolicyWords:
    """Renders, tokenises and reads, on a thread of its own: what takes long holds up nobody else's answer.

    Args:
        tokenizer: The policy's.
        reading: How its words are read.
        max_model_len: The longest context with its response, in tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reading: Reading, max_model_len: int) -> None:
        self._tokenizer, self._reading, self._max_model_len = tokenizer, reading, max_model_len
        self._not_of_clients = {*inspect.signature(tokenizer.apply_chat_template).parameters} - {_DOCUMENTS}
        self._thread = ThreadPoolExecutor(1, "words")
        self._longest_token = max([_LONGEST_TOKEN_AT_LEAST, *map(len, tokenizer.get_vocab())])
        self._parsers = TurnParsers(tokenizer, reading.tool_parser, reading.reasoning_parser, stop_ids=reading.stop_ids)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def chat(self, session: Session, asked: ChatAsked) -> Context:
        """Return the context of a chat's next answer.

        A chat that goes on from an answer which the session was given keeps the tokens that were sampled.

        Raises:
            RequestRefusedError: The chat template refuses the messages, they are too long, or the request has a
                template of its own: templates are programs, and this one would run here.
        """
        if refused := sorted(self._not_of_clients & asked.chat_template_kwargs.keys()):
            raise bad_request(
                f"chat_template_kwargs has {', '.join(refused)}, which only the server's configuration sets; it takes "
                "what the model's own template reads, such as enable_thinking",
                "chat_template_kwargs",
            )
        self._require_short(sum(len(str(message.get("content") or "")) for message in asked.messages), "messages")
        setting = _setting(asked)
        found = session.chats.longest(asked.messages, setting)
        if found is None:
            return await self.run(self._begun, asked, Conversation())
        count, (script, conversation) = found
        return await self.run(self._gone_on, script, asked.messages[count:], conversation)

    async def completion(self, session: Session, prompt: str | Sequence[int]) -> Context:
        """Return the context of a text's continuation; the beginning that the session was given keeps its tokens.

        Raises:
            RequestRefusedError: It is too long, or has a token that there is none of.
        """
        if not isinstance(prompt, str):
            wrong = next((token for token in prompt if not 0 <= token < len(self._tokenizer)), None)
            if wrong is not None:
                raise bad_request(
                    f"prompt has the token {wrong}, and ids are 0 to {len(self._tokenizer) - 1}", "prompt"
                )
            return Context(list(prompt), Conversation())
        self._require_short(len(prompt), "prompt")
        known = session.texts.longest(prompt)
        if known is None:
            return Context(await self.run(self._tokens, prompt, True), Conversation(), text=prompt)
        new = await self.run(self._tokens, prompt[len(known.text) :], False)
        return Context([*known.ids, *new], known.value, text=prompt)

    async def read(
        self, output: SampleOutput, turn: int, asked: ChatAsked | CompletionAsked, context: Context, *, log_probs: bool
    ) -> Read:
        """Return what a response says.

        Raises:
            RequestRefusedError: There is no parser for the tools of this chat.
        """
        return await self.run(self._read, output, turn, asked, context, log_probs)

    def growing(self, asked: ChatAsked | CompletionAsked, context: Context, *, log_probs: bool) -> GrowingChoice | None:
        """Return what an answer grows in that can be shown as it comes; None where it has to be read as a whole.

        Tool calls and reasoning are found in the whole text, and a stop text takes back what stands before it.
        """
        reads_reasoning = self._reading.reasoning_parser is not None
        is_read = isinstance(asked, ChatAsked) and (asked.wants_tool_calls or reads_reasoning)
        return None if asked.stop or is_read else GrowingChoice(self._tokenizer, context, log_probs=log_probs)

    async def remember(
        self, session: Session, asked: ChatAsked | CompletionAsked, context: Context, read: Read
    ) -> None:
        """Have the session know an answer again, with its tokens."""
        choice = read.choice
        if isinstance(asked, ChatAsked) and context.script is not None:
            script = await self.run(self._with_turn, context.script, read)
            answer = plain_message({"role": "assistant", **(choice.message or {})}, len(asked.messages))
            known, num_tokens = (script, context.conversation), len(context.ids) + len(choice.token_ids)
            session.chats.add(asked.messages, _setting(asked), answer, known, num_tokens)
        elif context.text is not None:
            whole = await self.run(decode, self._tokenizer, choice.token_ids)
            if choice.text != whole and read.num_text_tokens is not None:
                kept = choice.token_ids[: read.num_text_tokens]
                session.texts.add(context.text + choice.text, [*context.ids, *kept], context.conversation)
            session.texts.add(context.text + whole, [*context.ids, *choice.token_ids], context.conversation)

    # ---- on the thread

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function returns that uses the tokenizer, called on the thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def _begun(self, asked: ChatAsked, conversation: Conversation) -> Context:
        kwargs = {**self._reading.template_kwargs, **asked.chat_template_kwargs}
        first = Observation(messages=asked.messages, tools=asked.tools or None)
        try:
            script = Transcript(
                self._tokenizer, self._reading.stop_ids, kwargs, first=first, num_own=_num_own(asked.messages)
            )
        except (ChatTemplateError, EnvironmentReplyError) as error:
            raise bad_request(str(error), "messages") from None
        return Context(script.context, conversation, script)

    def _gone_on(self, known: Transcript, new: Sequence[Mapping[str, Any]], conversation: Conversation) -> Context:
        script = self._copied(known)
        try:
            script.add_observation(Observation(messages=new))
        except (ChatTemplateError, EnvironmentReplyError) as error:
            raise bad_request(str(error), "messages") from None
        return Context(script.context, conversation, script)

    def _copied(self, script: Transcript) -> Transcript:
        return copy.deepcopy(script, {id(self._tokenizer): self._tokenizer})

    def _with_turn(self, script: Transcript, read: Read) -> Transcript:
        script = self._copied(script)  # other choices go on from it, too
        script.add_turn(read.choice.token_ids, read.choice.log_probs, 0, read.parsed.message)
        return script

    def _tokens(self, text: str, is_beginning: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=is_beginning)["input_ids"]
        return ids

    def _read(
        self,
        output: SampleOutput,
        turn: int,
        asked: ChatAsked | CompletionAsked,
        context: Context,
        log_probs: bool,
    ) -> Read:
        stopped = stopped_at(self._tokenizer, output.token_ids, asked.stop) if asked.stop else None
        count = len(output.token_ids) if stopped is None else stopped.num_tokens
        ids = output.token_ids[:count]
        parsed = self._parser(asked).parse(ids, turn=turn)
        shown = parsed if stopped is None else _cut(parsed, asked.stop)
        finish: FinishReason = "length" if output.finish_reason == "length" and stopped is None else "stop"
        if parsed.tool_calls and finish == "stop":
            finish = "tool_calls"
        text_pieces = _shown(pieces(self._tokenizer, ids), stopped)
        choice = Choice(
            text=shown.text,
            pieces=text_pieces,
            beginnings=beginnings(text_pieces),
            message=_message(shown) if context.script is not None else None,
            prompt_ids=context.ids,
            token_ids=ids,
            log_probs=output.log_probs[:count],
            tokens=[shown_token(self._tokenizer, token) for token in ids] if log_probs else (),
            finish_reason=finish,
            version=output.policy_version,
        )
        return Read(choice, parsed, count if stopped is None else stopped.num_text_tokens)

    def _parser(self, asked: ChatAsked | CompletionAsked) -> TurnParser:
        """Return what reads answers to a request; a continued text is read as it is."""
        is_chat = isinstance(asked, ChatAsked)
        tools = asked.tools if isinstance(asked, ChatAsked) and asked.wants_tool_calls else None
        try:
            return self._parsers.of(tools, with_reasoning=is_chat)
        except ParserChoiceError as error:
            raise bad_request(str(error), "tools") from None

    def _require_short(self, characters: int, param: str) -> None:
        most = self._max_model_len * self._longest_token
        if characters > most:
            raise too_long(f"{param} has {characters:,} characters", self._max_model_len, param)


def too_long(what: str, max_model_len: int, param: str) -> RequestRefusedError:
    """Return the refusal of what does not fit into a context."""
    return bad_request(
        f"{what}, and the longest context with its answer is {max_model_len} tokens", param, "context_length_exceeded"
    )


def _num_own(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many messages come before the first answer, which is the policy's or stands for one of it.

    What was answered and what tools said is text, also in a chat that nobody remembers.
    """
    begins = (place for place, message in enumerate(messages) if message["role"] in _ANSWERS)
    return next(begins, len(messages))


def _setting(asked: ChatAsked) -> list[Any]:
    return [asked.tools, asked.chat_template_kwargs]


def _cut(parsed: ParsedTurn, stops: Sequence[str]) -> ParsedTurn:
    """Return a turn as a client is shown it: its text and content end before the first stop text in them."""
    return replace(parsed, text=_before(parsed.text, stops), content=_before(parsed.content, stops))


def _before(text: str, stops: Sequence[str]) -> str:
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)[1]] if found else text


def _shown(whole: Sequence[str], stopped: Stopped | None) -> list[str]:
    """Return the pieces of the text that a client is shown."""
    if stopped is None:
        return list(whole)
    left, shown = len(stopped.text), []
    for piece in whole:
        shown.append(piece[:left])
        left -= len(shown[-1])
    return shown


def _message(parsed: ParsedTurn) -> dict[str, Any]:
    """Return an answer as OpenAI's clients know it."""
    message: dict[str, Any] = {"content": parsed.content if parsed.content or not parsed.tool_calls else None}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in parsed.tool_calls
        ]
    return message
