"""`hrl env-test`: an environment is tried with the model, the rows and the limits of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from hrl.config.arithmetic import count
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.sources import source_title
from hrl.data.chat import RENDERING_ERRORS, encode_texts
from hrl.data.dataset import PromptRow, check_prompt, fitting, render_with_pictures
from hrl.data.pictures import PictureTokens
from hrl.data.sources import BadRow, read_rows, sources_of
from hrl.episodes.pictures import NO_VIDEOS
from hrl.episodes.play import EpisodeTask, Limits
from hrl.episodes.trial import Policy, Trial, TrialSetup, run_trial
from hrl.episodes.trial_policy import Script, engine_of
from hrl.errors import DatasetError
from hrl.models.source import resolve_model
from hrl.models.tokenizer import load_tokenizer, resolve_tokenizer, token_ids
from hrl.pictures import Picture, VideoSource
from hrl.report.live import ShowStage, in_silence
from hrl.serve.agents import AgentDoor
from hrl.workers.requests import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.data import DataConfig
    from hrl.environments.loading import EnvironmentSpec

SCRIPTED = "scripted"
"""The engine that needs no weights."""
_CONTEXT = "trial"


@dataclass(frozen=True)
class Tried:
    """A trial, and with what it was made.

    Attributes:
        trial: What came of it.
        tokenizer: The policy's.
        facts: Label → with what.
    """

    trial: Trial
    tokenizer: PreTrainedTokenizerBase
    facts: dict[str, str]


def try_environment_of(
    config: PPOTrainerConfig,
    spec: EnvironmentSpec,
    *,
    engine: str = SCRIPTED,
    words: Sequence[str] = (),
    episodes: int = 3,
    stage: ShowStage = in_silence,
) -> Tried:
    """Play episodes in the environment of a run, and look at what came of them.

    Args:
        config: The run's configuration; its engine is the one that is named here.
        spec: Its environment.
        engine: `scripted`, or one of `rollout.name`.
        words: What the scripted engine says, turn by turn.
        episodes: How many.
        stage: Shows what goes on.

    Raises:
        EnvironmentLoadError: The environment can't be loaded.
        HrlError: Model, rows or engine can't be used.
    """
    model, data, rollout = config.actor_rollout_ref.model, config.data, config.actor_rollout_ref.rollout
    with stage("looking at the model's tokenizer"):
        folder = resolve_model(model.path)
        tokenizer = load_tokenizer(
            resolve_tokenizer(model.tokenizer_path) if model.tokenizer_path else folder,
            trust_remote_code=model.trust_remote_code,
        )
        ids = token_ids(tokenizer, folder)
    rows = _rows(config, episodes)
    setup = TrialSetup(
        environment=spec,
        settings=config.environment,
        limits=Limits(data.max_prompt_length, data.max_response_length),
        tokenizer=tokenizer,
        stop_ids=ids.stop,
        template_kwargs=dict(data.apply_chat_template_kwargs),
        has_reward=bool(config.reward_entries) or config.needs_reward_model,
    )
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, data.max_response_length)
    prompts = [_prompt_of(tokenizer, data, row) for row in rows]
    tasks = [
        EpisodeTask(
            (f"{_CONTEXT}-{number}", 0),
            _as_read(rows[number % len(rows)]),
            sampling,
            config.trainer.seed,
            0,
            prompt_ids=prompts[number % len(rows)][0],
            pictures=prompts[number % len(rows)][1],
        )
        for number in range(episodes)
    ]

    def policy() -> AbstractAsyncContextManager[Policy]:
        if engine == SCRIPTED:
            return nullcontext(Script(tokenizer, ids.stop, words))
        from hrl.cluster.lone_engine import lone_engine

        named = rollout.model_copy(update={"name": engine})
        longest = data.max_prompt_length + data.max_response_length
        shows = any(row.images for row in rows)
        return engine_of(lone_engine(model, named, folder, ids, longest, shows_pictures=shows))

    async def play() -> Trial:
        async with policy() as playing:
            return await run_trial(setup, tasks, playing, AgentDoor)

    title = "a script" if engine == SCRIPTED else f"{engine} with {model.path}"
    with stage(f"playing {count(episodes, 'episode')} with {title}"):
        trial = asyncio.run(play())
    facts = {
        "environment": f"{setup.environment.source.title}, at most {config.environment.max_turns} turns",
        "policy": title if engine != SCRIPTED else f"a script, in the chat template of {model.path}",
        "rows": ", ".join(map(source_title, data.train_files)),
        "seed": str(config.trainer.seed),
    }
    return Tried(trial, tokenizer, facts)


def _rows(config: PPOTrainerConfig, number: int) -> list[PromptRow]:
    """Return the first rows of the run.

    Raises:
        DatasetError: One can't be used, or there are none.
    """
    data = config.data
    check = partial(
        check_prompt,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        image_key=data.image_key,
        video_key=data.video_key,
    )
    rows: list[PromptRow] = []
    for row in islice(read_rows([one.with_keys_of(data) for one in sources_of(data.train_files)], check), number):
        if isinstance(row, BadRow):
            raise DatasetError(f"{row.origin}: {row.reason}")
        if any(isinstance(each, VideoSource) for each in row.images):
            raise DatasetError(f"{row.origin} shows a video, and {NO_VIDEOS}")
        rows.append(row)
    if not rows:
        raise DatasetError(f"data.train_files: {', '.join(map(source_title, data.train_files))} has no rows")
    return rows


def _prompt_of(
    tokenizer: PreTrainedTokenizerBase, data: DataConfig, row: PromptRow
) -> tuple[list[int] | None, tuple[Picture, ...]]:
    """Return the tokens of a row's prompt and what it shows; None if the template or the limit refuses the prompt.

    An episode then tells what was refused.

    Raises:
        DatasetError: The row can't be shown with its pictures.
    """
    tokens = PictureTokens(tokenizer)
    try:
        (ids,) = encode_texts(tokenizer, [render_with_pictures(tokenizer, data, row, tokens)])
    except RENDERING_ERRORS as error:
        if row.images:
            raise DatasetError(f"{row.origin}: {error}") from error
        return None, ()
    whole = np.array(ids, dtype=np.int32)
    prompt = fitting(data, whole)
    return None if prompt is None else prompt.tolist(), tokens.placed(whole, row.images) if row.images else ()


def _as_read(row: PromptRow) -> dict[str, object]:
    """Return a row as `reset` is given it."""
    return {
        **row.columns,
        "prompt": row.messages,
        "data_source": row.data_source,
        "reward_model": row.reward_model,
        "extra_info": row.extra_info,
    }
