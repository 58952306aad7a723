"""Preflight checks of engines that somebody else started: whether a run can sample from them."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hrl.cluster.precision import with_dtypes
from hrl.config.arithmetic import Fact, count
from hrl.config.ppo import PPOTrainerConfig
from hrl.data.dataset import RLHFDataset
from hrl.models.hf_config import vocabulary_of
from hrl.models.loading import ModelSource
from hrl.models.tokenizer import TokenIds
from hrl.preflight.findings import Findings
from hrl.preflight.small_models import runs_on_gpus
from hrl.workers.rollout.base import EngineSetup
from hrl.workers.rollout.host import engine_of
from hrl.workers.rollout.scoring_server import ScoringServer, look_at_each, opened
from hrl.workers.rollout.server_engine import look_at_all
from hrl.workers.rollout.server_http import (
    OF_TEACHER,
    ServerError,
    ServerFaltersError,
    ServerGoneError,
    ServerRefusesError,
    key_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.workers.rollout.server_engine import Server

_LOOK_TIMEOUT_S = 15.0
_KEY = "actor_rollout_ref.rollout.server"


def look_at_servers(findings: Findings, config: PPOTrainerConfig, folder: Path | None, ids: TokenIds | None) -> None:
    """Ask every server of `rollout.server.urls` what a run has to know of it; nothing is changed there.

    One that does not answer is a problem if no other does.

    Args:
        findings: Collects problems, and a fact for each server.
        config: The validated configuration.
        folder: Of the policy's model; None where it was not found.
        ids: Its tokens.
    """
    if not config.actor_rollout_ref.rollout.is_served:
        return
    config = with_dtypes(config, "cuda" if runs_on_gpus(config) else "cpu")
    rollout = config.actor_rollout_ref.rollout
    with findings.about(f"{_KEY}.api_key"):
        key_of(rollout.server.api_key)
    if findings.problems or folder is None or ids is None:
        findings.unchecked.append("the servers of rollout.server.urls, which are compared with the model")
        return
    model = config.actor_rollout_ref.model
    longest = rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length
    source = ModelSource.to_look_at(
        folder, model.override_config, trust_remote_code=model.trust_remote_code, max_model_len=longest
    )
    setup = EngineSetup(rollout, source, ids, torch.device("cpu"))
    module, name = engine_of(rollout)
    kind: type[Server] = getattr(importlib.import_module(module), name).kind

    async def look() -> None:
        servers = [kind(url, setup) for url in rollout.server.urls]
        looked = await look_at_all(servers, _LOOK_TIMEOUT_S)
        some_are_there = any(isinstance(found, dict) for _, found in looked)
        for number, (server, found) in enumerate(looked, 1):
            if isinstance(found, dict):
                said = ", ".join(f"{label} {text}" for label, text in found.items())
                findings.facts.append(Fact(f"server {number}", f"{server.url}: {said}"))
            elif isinstance(found, ServerGoneError) and some_are_there:
                findings.notes.append(f"{found}; the run samples from the others until a weight sync finds it")
            else:
                with findings.about(f"{_KEY}.urls"):
                    raise found

    asyncio.run(look())


_MOST_NAMES = 8
"""Of rows whose teacher is not named, in one message."""
_SENTENCE = "Übung macht den Meister: 1,000 + 2.5 = ? <|im_end|>\n\tfor x in range(10): 你好"
"""Tokenised on both sides: letters beyond ASCII, numbers, spaces, and what may be a special token."""


def look_at_served_teacher(
    findings: Findings, config: PPOTrainerConfig, folder: Path | None, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Ask the servers of a teacher whether they read the policy's tokens, and score some as a run will have it.

    Args:
        findings: Collects problems, and a fact for each server.
        config: The validated configuration.
        folder: Of the policy's model; None where it was not found.
        tokenizer: Of the policy.
    """
    if not config.teacher_is_served:
        return
    with findings.about(f"{OF_TEACHER}.api_key"):
        key_of(config.distillation.teacher_models.teacher_model.server.api_key, OF_TEACHER)
    if findings.problems or folder is None or tokenizer is None:
        findings.unchecked.append(f"the servers of {OF_TEACHER}.urls, whose tokens are compared with the policy's")
        return
    model, num_top = config.actor_rollout_ref.model, config.num_teacher_tokens
    vocabulary = vocabulary_of(folder, model.override_config, trust_remote_code=model.trust_remote_code)
    own = tokenizer.encode(_SENTENCE, add_special_tokens=False)
    teacher = config.distillation.teacher_models.teacher_model

    async def look(urls: Sequence[str]) -> list[str]:
        told = []
        async with opened(
            teacher,
            urls,
            vocabulary=vocabulary,
            timeout_s=_LOOK_TIMEOUT_S,
            most_at_once=1,
        ) as servers:
            found = await look_at_each(servers, config.data.max_prompt_length + config.data.max_response_length)
            if not any(found):
                raise ServerGoneError("; ".join(str(server.why_down) for server in servers))
            for server, text in zip(servers, found, strict=True):
                if text is None:
                    findings.notes.append(f"{server.why_down}; the teacher's others score until it is there")
                    continue
                told.append(f"{server.address.url}: {text}")
                await _compare_tokens(findings, server, own)
                try:
                    await server.score(own[:4], 1, num_top, is_look=True)
                except ServerRefusesError as error:
                    more = f"; it allows as many with --max-logprobs {num_top}" if num_top else ""
                    raise ServerError(f"{error}{more}") from error
                except ServerFaltersError as error:  # of what vLLM compiles before its first text, it keeps the result
                    raise ServerError(
                        f"{error} Have it score a text once (prompt_logprobs), and start again"
                    ) from error
        return told

    async def look_at_all() -> list[list[str] | BaseException]:
        return await asyncio.gather(*map(look, teacher.server.of_each), return_exceptions=True)

    for urls, told in zip(teacher.server.of_each, asyncio.run(look_at_all()), strict=True):
        with findings.about(f"{OF_TEACHER}.urls"):
            if isinstance(told, BaseException):
                raise told
        named = teacher.server.urls
        rows = (
            f" of {', '.join(name for name in named if tuple(named[name]) == urls)}" if isinstance(named, dict) else ""
        )
        findings.facts += [Fact("teacher", f"{text}{rows}") for text in told]


def look_at_teachers_of_rows(findings: Findings, config: PPOTrainerConfig, rows: RLHFDataset | None) -> None:
    """Check that each known row to train on names one of several teachers.

    Args:
        findings: Collects a problem with what rows name instead.
        config: The validated configuration.
        rows: To train on; None where they could not be read.
    """
    distilled = config.distillation
    named = distilled.teacher_models.teacher_model.server.urls
    if not config.teacher_is_served or not isinstance(named, dict) or rows is None:
        return
    lacking: dict[str | None, list[str]] = {}
    for row in (rows.rows[index] for index in rows.known):
        if (name := distilled.named_in(row.data_source, row.columns)) not in named:
            lacking.setdefault(name, []).append(row.origin)
    if without := lacking.pop(None, []):
        what = (
            f"is {distilled.teacher_key}, a column that {count(len(without), 'row')} lack; the first is {without[0]}."
        )
        hint = "Name a column that all have; data.map={subject: extra_info.subject} makes one of a field."
        findings.problem("distillation.teacher_key", what, hint)
    if lacking:
        shown = [f"{str(name)[:60]} ({count(len(where), 'row')}, first {where[0]})" for name, where in lacking.items()]
        more = f", and {len(shown) - _MOST_NAMES} more" if len(shown) > _MOST_NAMES else ""
        what = f"names no servers for {', '.join(shown[:_MOST_NAMES])}{more}, in the column {distilled.teacher_key}."
        findings.problem(f"{OF_TEACHER}.urls", what, "Name some, or leave these rows out.")


async def _compare_tokens(findings: Findings, server: ScoringServer, own: list[int]) -> None:
    """Compare the tokens of a sentence; a server that has no tokenizer can't be asked for them."""
    try:
        theirs = await server.tokens_of(_SENTENCE)
    except ServerError as error:
        findings.unchecked.append(f"whether {server.address.url} has the policy's tokens: {error}")
        return
    if theirs != own:
        raise ServerError(
            f"{server.address.url} has another vocabulary than the policy, whose ids it would read as they are: it "
            f"makes {theirs[:8]} … of a sentence, and the policy {own[:8]} …. Serve a model of the same family"
        )
