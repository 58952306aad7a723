"""What a client asks for: the bodies of its requests, read and checked.

A parameter that hrl's engines do not have is refused by name, unless its value is the one that changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hrl.data.chat import as_messages, as_tools, text_of, wrong_value
from hrl.data.sources import show_value
from hrl.serve.refusals import bad_request

MAX_CHOICES = 128
_LEAST_TEMPERATURE = 0.01
"""Below it vLLM samples at this temperature instead; 0 is the most likely token."""
_SHOWN_PARAMS = 200
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_CHANGE_NOTHING: Mapping[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Parameters that hrl does not have → values with which an answer is the same without them."""
_ABOUT_THE_CLIENT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Parameters that say who asks, and are read by nobody here."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class _StreamOptions(_Body):
    include_usage: bool = False


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


StopTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=500)]], BeforeValidator(_listed)]


class _Asked(_Body):
    """What both kinds of requests have."""

    model: str
    stream: bool = False
    stream_options: _StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    stop: Annotated[StopTexts, Field(max_length=16)] = Field(default_factory=list)
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _temperature_is_not_tiny(self) -> _Asked:
        if self.temperature is not None and 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature:g}; take 0 for the most likely tokens, or at least "
                f"{_LEAST_TEMPERATURE:g}"
            )
        return self


class ChatAsked(_Asked):
    """The body of `/v1/chat/completions`.

    Attributes:
        messages: As `as_messages` returns them, each content one text, and arguments of tool calls read.
        wants_tool_calls: Whether tool calls are looked for in the answer.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def longest(self) -> int | None:
        """The longest answer that is wanted, in tokens; None for as much as there is room for."""
        given = [tokens for tokens in (self.max_tokens, self.max_completion_tokens) if tokens is not None]
        return min(given, default=None)

    @property
    def wants_tool_calls(self) -> bool:
        """Whether the answer is read for tool calls."""
        return bool(self.tools) and self.tool_choice != "none"


class CompletionAsked(_Asked):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None

    @property
    def longest(self) -> int | None:
        """The longest answer that is wanted, in tokens; None for as much as there is room for."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, as text or as token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)


A = TypeVar("A", ChatAsked, CompletionAsked)


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    Raises:
        RequestRefusedError: It is none, or one that can't be read.
    """

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        found = json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits and deep nesting, too
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:_SHOWN_PARAMS]
        raise bad_request(f"the body is not JSON in UTF-8: {what}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise bad_request("the body is JSON, but not an object", code="invalid_json")
    wrong = wrong_value(found, "the body", is_text=False)
    if wrong is None and _ESCAPED_SURROGATE.search(body) and not _is_unicode(found):
        wrong = "the body has a lone surrogate, such as \\ud800, which is half a character"
    if wrong is not None:
        raise bad_request(wrong, code="invalid_json")
    return found


def _is_unicode(found: Any) -> bool:
    """Return whether all texts in a body, names too, are characters."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_chat(body: bytes) -> ChatAsked:
    """Return what a request for a chat's next message asks for.

    Raises:
        RequestRefusedError: It makes no sense, or asks for what hrl does not have; names the parameter.
    """
    found = _known(read_json(body))
    if "messages" in found:
        given = found["messages"]
        messages = (
            as_messages(given, "messages")
            if isinstance(given, list) and given
            else f"'messages' is {show_value(given)}, expected a non-empty list of messages"
        )
        if isinstance(messages, str):
            raise bad_request(messages, "messages")
        found["messages"] = [plain_message(message, place) for place, message in enumerate(messages)]
    if "tools" in found:
        tools = as_tools(found["tools"]) if isinstance(found["tools"], list) else "'tools' is no list"
        if isinstance(tools, str):
            raise bad_request(tools, "tools")
        found["tools"] = [_checked_tool(tool, place) for place, tool in enumerate(tools or [])]
    choice = found.get("tool_choice")
    if choice is not None and choice not in ("auto", "none"):
        raise bad_request(
            f"tool_choice is {show_value(choice)}: hrl forces no call, which would not be what the policy samples: "
            "take auto or none",
            "tool_choice",
            "unsupported_parameter",
        )
    asked = _read(ChatAsked, found)
    if asked.top_logprobs:
        raise bad_request(
            f"top_logprobs is {asked.top_logprobs}: the log-probs here are those of the sampled tokens alone; leave it "
            "out, and take logprobs=true",
            "top_logprobs",
            "unsupported_parameter",
        )
    if asked.tool_choice == "auto" and not asked.tools:
        raise bad_request("tool_choice is auto, but there are no tools", "tool_choice")
    return asked


def read_completion(body: bytes) -> CompletionAsked:
    """Return what a request for the continuation of a text asks for.

    Raises:
        RequestRefusedError: It makes no sense, or asks for what hrl does not have; names the parameter.
    """
    asked = _read(CompletionAsked, _known(read_json(body)))
    if asked.logprobs:
        raise bad_request(
            f"logprobs is {asked.logprobs}: the log-probs here are those of the sampled tokens alone; take 0",
            "logprobs",
            "unsupported_parameter",
        )
    if not asked.prompts or any(not prompt for prompt in asked.prompts):
        raise bad_request("prompt is empty", "prompt")
    if len(asked.prompts) > MAX_CHOICES:
        raise bad_request(f"there are {len(asked.prompts)} prompts, and at most {MAX_CHOICES} are taken", "prompt")
    return asked


def _known(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without what is null and what changes nothing."""
    kept = {}
    for name, value in found.items():
        if value is None or name in _ABOUT_THE_CLIENT:
            continue
        if name in _CHANGE_NOTHING:
            if value in _CHANGE_NOTHING[name]:
                continue
            raise bad_request(
                f"{name} is {show_value(value)}, which hrl does not have: leave it out", name, "unsupported_parameter"
            )
        kept[name] = value
    return kept


def _read(kind: type[A], found: Mapping[str, Any]) -> A:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])[:_SHOWN_PARAMS] if first["loc"] else None
        if first["type"] == "extra_forbidden":
            what = f"hrl does not have the parameter {name!r}: leave it out"
            raise bad_request(what, name, "unsupported_parameter") from None
        if first["type"] == "missing":
            raise bad_request(f"the parameter {name!r} is missing", name) from None
        what = first["msg"].removeprefix("Value error, ")
        shown = f"{name} is {show_value(found.get(str(name)))}: {what[:1].lower()}{what[1:]}" if name else what
        raise bad_request(shown, name) from None


def plain_message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a message as chat templates take it: its content one text, arguments of tool calls as objects.

    Args:
        message: From `as_messages`.
        place: Among the messages.

    Raises:
        RequestRefusedError: Its tool calls are none.
    """
    plain = dict(message)
    if message["content"] is not None:
        plain["content"] = text_of(message)
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            raise bad_request(
                f"'tool_calls' of message {place} of 'messages' is {show_value(calls)}, expected calls such as "
                '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{}"}}',
                "messages",
            )
        if calls:
            plain["tool_calls"] = [_plain_call(call) for call in calls]
        else:
            del plain["tool_calls"]
    if plain["content"] is None:
        plain["content"] = ""
    return plain


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), str | Mapping)
        and isinstance(call.get("id", ""), str)
    )


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = None
        function["arguments"] = read if isinstance(read, dict) else arguments
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _checked_tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(
            f"tool {place} is {show_value(tool)}, expected "
            '{"type": "function", "function": {"name": "…", "parameters": {…}}}',
            "tools",
        )
    return dict(tool)
