"""`hrl serve`: a model behind an engine of its own, for programs that speak OpenAI's protocol."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils.logging import disable_progress_bar

from hrl.cluster.lone_engine import lone_engine
from hrl.config.compose import compose_kind
from hrl.config.override import as_override
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import PPO
from hrl.errors import RefusedError
from hrl.files import expanded
from hrl.masking import remember
from hrl.models.source import resolve_model
from hrl.models.tokenizer import load_tokenizer, resolve_tokenizer, token_ids
from hrl.serve.door import Door, Served
from hrl.serve.policy import PolicyWords, Reading
from hrl.serve.record import Record, recorded
from hrl.serve.server import DoorServer, HttpLimits, open_socket
from hrl.serve.sessions import Limits, Session, Sessions, new_key
from hrl.trained.evaluate import keys_of_the_run
from hrl.trained.folders import Trained, find_trained, require_loadable
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineSetup, OnTokens, SampleOutput, told_on
from hrl.workers.rollout.host import RolloutHost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

KEY_VARIABLE = "HRL_SERVE_KEY"
_SHORTEST_KEY = 16
_RECORD_EVERY_S = 5.0
_BUSY_SHARE = 0.05
"""The share of its time that the server writes records."""
_SHORT = {"rollout.": "actor_rollout_ref.rollout.", "model.": "actor_rollout_ref.model."}
"""How keys may begin on the command line → their section."""
_OF_THE_RUN = (
    "data.apply_chat_template_kwargs",
    "environment.tool_parser",
    "environment.reasoning_parser",
    "actor_rollout_ref.model",
    "actor_rollout_ref.rollout",
)
_NOT_OF_THE_RUN = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.serve",
    "actor_rollout_ref.rollout.server",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.val_kwargs",
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServingError(RefusedError, ValueError):
    """A model can't be served as it was asked for; the message says what to change."""


@dataclass(frozen=True)
class Serving:
    """How a model is served.

    Attributes:
        host, port: Where; port 0 is a free one.
        allow_remote: Whether other machines may reach the address.
        key_file: Holds the key; None takes `HRL_SERVE_KEY`, and makes one where that is not set.
        name: What clients call the model; None for its short name.
        record: Folder for records of what was said; None keeps none.
        limits: Of each session.
        body_bytes: Largest body of a request.
    """

    host: str = "127.0.0.1"
    port: int = 0
    allow_remote: bool = False
    key_file: Path | None = None
    name: str | None = None
    record: Path | None = None
    limits: Limits = field(default_factory=Limits)
    body_bytes: int = HttpLimits.body_bytes


def serving_config(trained: Trained, overrides: Sequence[str]) -> PPOTrainerConfig:
    """Return the configuration whose sections `model` and `rollout` open the engine.

    A model that lies in the folder of a run brings that run's keys for them, and for the chat template.

    Raises:
        ConfigError: A key is wrong.
        ModelSourceError, NoModelError: The model can't be loaded.
    """
    overrides = [_in_full(override) for override in overrides]
    values: dict[str, Any] = keys_of_the_run(trained, _OF_THE_RUN, _NOT_OF_THE_RUN, overrides)
    values |= {
        "actor_rollout_ref.model.path": require_loadable(trained),
        "data.train_files": ["none"],  # a run has some; none is looked at
        "data.train_batch_size": 1,
        "data.max_prompt_length": 1,  # what is asked for decides, up to rollout.max_model_len
        "data.max_response_length": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
        "actor_rollout_ref.rollout.n": 1,
        "algorithm.adv_estimator": "reinforce_plus_plus",  # needs neither a critic nor groups
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
    }
    return compose_kind(PPO, [*(f"{key}={as_override(value)}" for key, value in values.items()), *overrides])


def serve(name: str, serving: Serving, overrides: Sequence[str], say: Callable[[str], None]) -> None:
    """Serve a model until a signal asks for the end.

    Args:
        name: The model; see `find_trained`.
        serving: How it is served.
        overrides: Keys of the engine, such as `rollout.name=hf`.
        say: Writes a line for the user.

    Raises:
        HrlError: The model, a key or the address can't be used, or the engine did not start.
    """
    trained = find_trained(name)
    config = serving_config(trained, overrides)
    key, is_new = _key(serving.key_file)
    remember(key)
    setup, tokenizer = _engine_setup(config)
    sampling = setup.config
    reading = Reading(
        setup.tokens.stop,
        config.data.apply_chat_template_kwargs,
        config.environment.tool_parser,
        config.environment.reasoning_parser,
    )
    served = Served(
        serving.name or trained.label,
        SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k),
        setup.model.max_model_len,
    )
    record = None if serving.record is None else Record(expanded(serving.record), tokenizer)
    # Before the engine: an address that can't be had costs no start.
    opened = open_socket(serving.host, serving.port, allow_remote=serving.allow_remote)
    say(f"starting {sampling.name} with {setup.model.path} ({setup.device.type}, {sampling.dtype})")
    disable_progress_bar()
    with closing(opened), RolloutHost(setup, name="serving") as host:
        words = PolicyWords(tokenizer, reading, served.max_model_len)

        async def generate(
            ids: list[int], params: SamplingParams, request: str, on_tokens: OnTokens | None
        ) -> SampleOutput:
            tell = told_on(asyncio.get_running_loop(), on_tokens)
            return await asyncio.wrap_future(host.generate(ids, params, request, tell))

        ended: list[Session] = []
        sessions = Sessions(key, serving.limits, keep_calls=record is not None, on_end=ended.append)
        door = Door(served, words, generate, sessions)
        try:
            asyncio.run(_serve(door, serving, opened, record, ended, say, key if is_new else None))
        finally:
            words.close()
    if record is not None:
        say(f"what was said is in {record.file}: hrl rollouts {shlex.quote(str(serving.record))}")


async def _serve(
    door: Door,
    serving: Serving,
    opened: socket.socket,
    record: Record | None,
    ended: list[Session],
    say: Callable[[str], None],
    new_key: str | None,
) -> None:
    limits = HttpLimits(body_bytes=serving.body_bytes)
    asked_to_end = asyncio.Event()
    with _told_of_the_end(asked_to_end):
        async with DoorServer(door, allow_remote=serving.allow_remote, limits=limits, opened=opened) as server:
            for line in _greeting(server.base_url, door.served, new_key):
                say(line)
            if record is None:
                await asked_to_end.wait()
            else:
                await _record_until(asked_to_end, door, record, ended)
        if record is not None:
            await _write(door, record, ended)


async def _record_until(asked_to_end: asyncio.Event, door: Door, record: Record, ended: list[Session]) -> None:
    known, pause_s = -1, _RECORD_EVERY_S
    while not asked_to_end.is_set():
        try:
            async with asyncio.timeout(pause_s):
                await asked_to_end.wait()
        except TimeoutError:
            count = sum(session.counts["calls"] for session in door.sessions) + len(ended)
            if count != known:
                began = time.monotonic()
                await _write(door, record, ended)
                known, pause_s = count, max(_RECORD_EVERY_S, (time.monotonic() - began) / _BUSY_SHARE)


async def _write(door: Door, record: Record, ended: list[Session]) -> None:
    found = [one for session in [*ended, *door.sessions] for one in recorded(session)]
    ended.clear()
    await door.words.run(record.write, found)


@contextmanager
def _told_of_the_end(asked_to_end: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        if handlers[number] is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, asked_to_end.set)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _engine_setup(config: PPOTrainerConfig) -> tuple[EngineSetup, PreTrainedTokenizerBase]:
    """Return what the engine is opened with, and the tokenizer."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    folder = resolve_model(model.path)
    tokenizer = load_tokenizer(
        resolve_tokenizer(model.tokenizer_path) if model.tokenizer_path else folder,
        trust_remote_code=model.trust_remote_code,
    )
    return lone_engine(model, rollout, folder, token_ids(tokenizer, folder), rollout.max_model_len), tokenizer


def _key(file: Path | None) -> tuple[str, bool]:
    """Return the key, and whether it was made here, so that the user has to be told."""
    if file is not None:
        try:
            given, where = expanded(file).read_text(encoding="utf-8").strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ServingError(f"the key can't be read from {file}: {why}") from error
    elif KEY_VARIABLE in os.environ:
        given, where = os.environ[KEY_VARIABLE].strip(), KEY_VARIABLE
    else:
        return new_key(), True
    if len(given) < _SHORTEST_KEY or not given.isascii() or not given.isprintable() or set(given) & set(": "):
        raise ServingError(
            f"the key in {where} can't be used: a key has at least {_SHORTEST_KEY} letters, digits or other characters "
            "of ASCII, and neither blanks nor colons. Leave it out, and one is made"
        )
    return given, False


def _in_full(override: str) -> str:
    prefix = next((short for short in _SHORT if override.lstrip("+~").startswith(short)), None)
    return override if prefix is None else override.replace(prefix, _SHORT[prefix], 1)


def _greeting(base_url: str, served: Served, new_key: str | None) -> Iterator[str]:
    """Return what a user is told: where, with which key, and two ways to try it."""
    yield "# for a shell; OpenAI's clients and most frameworks read these two"
    yield f"export OPENAI_BASE_URL={base_url} OPENAI_API_KEY={new_key or '…  # the key that you gave'}"
    yield ""
    yield 'curl $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" \\'
    yield f"""  --json '{{"model": "{served.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
    yield ""
    yield "# in Python, with these two set"
    yield "from openai import OpenAI"
    yield 'hello = [{"role": "user", "content": "Hello!"}]'
    yield f'print(OpenAI().chat.completions.create(model="{served.model}", messages=hello).choices[0].message.content)'
    yield ""
    yield f"{served.model} answers, with contexts of up to {served.max_model_len} tokens. Ctrl-C ends it."
