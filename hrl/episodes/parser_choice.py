"""Which of the engine's parsers reads what a model writes.

vLLM has a parser for each family's way to write tool calls. A chat template shows the model how to write them, so its
text tells which one fits.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

from hrl.environments.extras import install_line
from hrl.errors import RefusedError
from hrl.nearest import did_you_mean

if TYPE_CHECKING:
    from vllm.parser.abstract_parser import Parser

#: (What stands in a chat template, the parser for models with such a template). The first that fits counts: those of a
#: single family stand before those that several share.
TEMPLATE_MARKS: tuple[tuple[str, str], ...] = (
    ("<minimax:tool_call>", "minimax_m2"),
    ("<longcat_tool_call>", "longcat"),
    ("<seed:tool_call>", "seed_oss"),
    ("<steptml:invoke", "step3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜DSML｜", "deepseek_v32"),
    ("function<｜tool▁sep｜>", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|action_start|>", "internlm"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>", "gemma4"),
    ("<function_calls>", "olmo3"),
    ("<|tool_call|>", "granite"),
    ("<|tools_prefix|>", "apertus"),
    ("<|/tool|>", "phi4_mini_json"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_calls>", "jamba"),
    ("<tool_call>", "hermes"),
    ("<|channel|>", "openai"),
)


class ParserChoiceError(RefusedError, ValueError):
    """What the policy writes can't be parsed: no parser is known, or the one that was named does not fit."""


def parser_by_template(template: str | None) -> tuple[str, str] | None:
    """Return the tool parser for models with a chat template, and the mark in it that tells; None if none does."""
    if template is None:
        return None
    for mark, name in TEMPLATE_MARKS:
        if mark in template:
            return name, mark
    return None


def tool_parser_for(template: str | None, configured: str | None) -> tuple[str, str]:
    """Return the name of a run's tool parser, and why it is that one.

    Args:
        template: Text of the chat template; None for a model without one.
        configured: `environment.tool_parser`.

    Raises:
        ParserChoiceError: There is no vLLM, or it has no parser of that name, or the template does not tell which.
    """
    known = known_parsers()[0]
    if configured is not None:
        if configured not in known:
            hint = did_you_mean(configured, known, f"vLLM has {', '.join(known)}")
            raise ParserChoiceError(
                f"environment.tool_parser is {configured!r}, which is none of vLLM's tool parsers. {hint}"
            )
        return configured, "environment.tool_parser"
    found = parser_by_template(template)
    if found is None or found[0] not in known:
        what = "there is no chat template" if template is None else "the chat template shows no known form of them"
        raise ParserChoiceError(
            "set environment.tool_parser=hermes, the form of Qwen, with calls between <tool_call> and </tool_call>, or "
            "the parser that the model's card names: the environment has tools, and how the model writes calls of them "
            f"is not known: {what}"
        )
    return found[0], f"{found[1]} in the chat template"


def check_reasoning_parser(name: str) -> None:
    """Refuse a name that is none of vLLM's reasoning parsers.

    Raises:
        ParserChoiceError: There is no vLLM, or it has no such parser.
    """
    known = known_parsers()[1]
    if name not in known:
        hint = did_you_mean(name, known, f"vLLM has {', '.join(known)}")
        raise ParserChoiceError(
            f"environment.reasoning_parser is {name!r}, which is none of vLLM's reasoning parsers. {hint}"
        )


@cache
def known_parsers() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of vLLM's tool parsers and of its reasoning parsers.

    Raises:
        ParserChoiceError: There is no vLLM.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ParserChoiceError(
            "tool calls and reasoning are read by vLLM's parsers, and vLLM is not installed here: "
            f"{install_line('cpu')} without a GPU, else {install_line('gpu')}; or give the environment no tools and "
            "leave environment.tool_parser and environment.reasoning_parser unset"
        )
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return (
        tuple(sorted(ToolParserManager.list_registered())),
        tuple(sorted(ReasoningParserManager.list_registered())),
    )


@cache
def parser_class(tool_parser: str | None, reasoning_parser: str | None) -> type[Parser]:
    """Return vLLM's class that reads a turn, made of the two parsers that its server would have."""
    from vllm.parser.parser_manager import ParserManager

    made: Any = ParserManager.get_parser(
        tool_parser_name=tool_parser,
        reasoning_parser_name=reasoning_parser,
        enable_auto_tools=tool_parser is not None,
        is_harmony="openai" in (tool_parser, (reasoning_parser or "").removesuffix("_gptoss")),
    )
    return made
