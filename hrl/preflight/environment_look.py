"""What is looked at of an environment before a run starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrl.config.arithmetic import Fact, count
from hrl.config.environment import EnvironmentConfig
from hrl.config.ppo import PPOTrainerConfig
from hrl.data.chat import render_prompt, with_tools
from hrl.data.dataset import RLHFDataset
from hrl.environments.loading import EnvironmentLoadError
from hrl.episodes.parser_choice import parser_by_template
from hrl.episodes.parsing import TurnParser, template_of
from hrl.episodes.pool import Choice, environment_of, try_environment
from hrl.preflight.findings import Findings, sentence
from hrl.preflight.given import Given
from hrl.preflight.pictures_look import shows_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ENV, _KWARGS = "env", "env_kwargs"
_TOOLS = "tools"
_LOOKED_AT = 1000
"""Rows of each data set whose choices are looked at."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_it_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
"""Stands for the tools of an environment, which are known when an episode begins."""


def look_at_environment(
    findings: Findings,
    config: PPOTrainerConfig,
    given: Given,
    tokenizer: PreTrainedTokenizerBase | None,
    train: Any,
    val: Any = None,
) -> Sequence[Mapping[str, Any]] | None:
    """Load the environment in a process of its own, as the run will, and see whether its turns can be read and paid.

    Args:
        findings: Collects problems.
        config: The validated configuration.
        given: An environment that the caller gave as an object.
        tokenizer: Tokenizer of the policy, if found.
        train: Rows to train on, if they could be read.
        val: Rows to validate on, likewise.

    Returns:
        Schemas of the tools that the first prompt shows beside the row's messages; None where `reset` makes of the row
        what it likes, or nothing is known.
    """
    settings = config.environment
    rows_choose = _ENV in getattr(train, "columns", ())
    if not settings.is_used:
        _look_at_idle_keys(findings, settings, rows_choose=rows_choose)
        return []
    if settings.is_object and given.environment is None:
        findings.problem(
            "environment.path",
            f"is {settings.path}: an environment that an earlier run was given from Python, and this run is not.",
            "Give it again (hrl.GRPO(environment=…)), or name its file (my_env.py:Class).",
        )
        return None
    try:
        spec = environment_of(settings, given.environment)
        chosen = _choices(train, val)
        traits, refusals = asyncio.run(try_environment(spec, settings, [choice for _, choice in chosen]))
    except EnvironmentLoadError as error:
        said = str(error)
        own = said.removeprefix("environment.path ")  # some name their key
        findings.problem("environment.path", sentence(own if own != said else f"can't be used: {said}"))
        return None
    for (where, _), refusal in zip(chosen, refusals, strict=True):
        if refusal is not None:
            findings.problem("environment.path", f"can't be used with {where}: {sentence(refusal)}")
            break
    findings.facts.append(Fact("environment", f"{spec.source.title}, at most {settings.max_turns} turns"))
    findings.facts.append(Fact("episodes", _limits(config)))
    if traits.lacks_tools and settings.path == _TOOLS and not rows_choose:
        findings.problem(
            "environment.tools",
            f"names no tool, and environment.path={_TOOLS} has none of its own.",
            "Name functions (environment.tools=[my_tools.py:function]) or the sandbox (environment.path=python), or "
            "set environment.path=single_turn for answers without tools.",
        )
    elif traits.lacks_tools and not rows_choose:
        findings.notes.append(
            f"{spec.source.title} has no tools for the policy to call: environment.tools names none, and no method of "
            "its class has the mark @hrl.tool"
        )
    if traits.asks_itself and not rows_choose and shows_pictures(train, val):
        findings.problem(
            "environment.path",
            f"is {spec.source.title}, which asks the policy itself, and the rows have pictures, which the run's server "
            "takes from no program.",
            "Set data.image_key=null to read the words alone.",
        )
    is_scored = bool(config.reward_entries) or config.needs_reward_model or given.reward is not None
    if traits.is_unpaid and not is_scored and not rows_choose:
        findings.problem(
            "environment.path",
            f"is {spec.source.title}, which gives no reward, and no reward function is named, so every reward would "
            "be 0.",
            "Set reward.functions=[data_source], or functions of yours; or give the class a method `answered` that "
            "returns what an answer is worth.",
        )
    if tokenizer is not None:
        kwargs = config.data.apply_chat_template_kwargs
        _look_at_parsers(findings, settings, tokenizer, kwargs, has_tools=traits.has_tools)
    return None if rows_choose else traits.shown_tools


def _choices(*datasets: Any) -> list[tuple[str, Choice]]:
    """Return what rows choose, each choice once, with the first row that makes it."""
    found: dict[str, tuple[str, Choice]] = {}
    for rows in datasets:
        if not isinstance(rows, RLHFDataset):
            continue
        for row in (rows.rows[index] for index in rows.known[:_LOOKED_AT]):
            choice = (row.columns.get(_ENV), row.columns.get(_KWARGS))
            if choice != (None, None):
                found.setdefault(repr(choice), (row.origin, choice))
    return [*found.values()]


def _limits(config: PPOTrainerConfig) -> str:
    """Return what an episode and its calls may use up."""
    settings, data = config.environment, config.data
    tokens = [f"prompt {data.max_prompt_length:,}", f"after it {data.max_response_length:,}"]
    if settings.max_turn_tokens is not None:
        tokens.append(f"a turn {settings.max_turn_tokens:,}")
    if settings.max_observation_tokens is not None:
        tokens.append(f"a message of the environment {settings.max_observation_tokens:,}")
    seconds = {"an episode": settings.episode_timeout_s, "a call": settings.step_timeout_s}
    seconds["a tool"] = settings.tool_timeout_s
    return (
        f"at most {', '.join(tokens)} tokens; {', '.join(f'{what} {limit:g}' for what, limit in seconds.items())} s; "
        f"{count(settings.num_workers, 'environment process', 'environment processes')}"
    )


def _look_at_idle_keys(findings: Findings, settings: EnvironmentConfig, *, rows_choose: bool) -> None:
    """Refuse settings of an environment in a run without one."""
    default = EnvironmentConfig()
    idle = [name for name in type(settings).model_fields if getattr(settings, name) != getattr(default, name)]
    if idle:
        meant = "tools" if settings.tools else "my_env.py:Class"
        findings.problem(
            f"environment.{idle[0] if 'tools' not in idle else 'tools'}",
            "has no effect: there is no environment.path, so every prompt has one answer.",
            f"Set environment.path={meant}, or leave out {', '.join(f'environment.{name}' for name in idle)}.",
        )
    elif rows_choose:
        findings.notes.append(
            f"the rows have a column {_ENV}, and it names no environment: there is no environment.path, so every "
            "prompt has one answer. Set environment.path=single_turn for a run whose rows name their environments"
        )


def _look_at_parsers(
    findings: Findings,
    settings: EnvironmentConfig,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    *,
    has_tools: bool,
) -> None:
    """Choose the parsers as the first episode will, and see whether the policy is shown its tools."""
    tools = [_TOOL] if has_tools or settings.tool_parser is not None else None
    is_named = settings.tool_parser is not None or settings.reasoning_parser is not None
    if is_named or (has_tools and parser_by_template(template_of(tokenizer)) is None):
        with findings.about("environment.tool_parser" if tools else "environment.reasoning_parser"):
            TurnParser(tokenizer, settings.tool_parser, settings.reasoning_parser, tools)
    read = []
    if has_tools and settings.tool_parser is None and (found := parser_by_template(template_of(tokenizer))) is not None:
        read.append(f"{found[0]} reads tool calls ({found[1]} in the chat template)")
    elif settings.tool_parser is not None:
        read.append(f"{settings.tool_parser} reads tool calls (environment.tool_parser)")
    if settings.reasoning_parser is not None:
        read.append(f"{settings.reasoning_parser} reads reasoning (environment.reasoning_parser)")
    findings.facts.append(Fact("parsers", "; ".join(read) or "none: no tools to call, as far as the class tells"))
    if not has_tools or tokenizer.chat_template is None:
        return
    with findings.about("environment.path"):
        messages = [{"role": "user", "content": "?"}]
        plain, shown = (render_prompt(tokenizer, messages, with_tools(template_kwargs, ones)) for ones in ((), [_TOOL]))
        if plain == shown:
            findings.notes.append(
                "the chat template shows no tools, so the policy knows only what the rows' first messages say of them; "
                "`hrl env-test` shows a prompt"
            )
