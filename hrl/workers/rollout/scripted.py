"""An engine without a model, for tests of everything around an engine: it answers and misbehaves as a script says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hrl.pictures import Picture
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import (
    DROP_WEIGHTS,
    EngineDeadError,
    EngineSetup,
    EngineUnusableError,
    OnTokens,
    RolloutEngine,
    SampleOutput,
)
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError


@dataclass(frozen=True)
class Script:
    """What the engine does. By default it behaves well.

    Attributes:
        responses: Token ids to answer with, chosen by the seed; if empty, random tokens made from the seed.
        start_s: How long a start takes, in seconds.
        delay_s: How long a request takes, in seconds.
        hang_after: Requests from this number on are never answered.
        die_after: From this number on the engine is dead.
        empty_every: Each response whose number is a multiple of this is empty.
        extra_tokens: How much longer than asked for every response is.
        missing_log_probs: Log-probs left out at the end of every response.
        log_prob: Of every token; `None` is uniform over the vocabulary.
        stale_version: Answers carry the version before the served one.
        drop_tensor: Name of a tensor that a sync doesn't write.
        corrupt_tensor: Name of a tensor that a sync writes wrongly.
        sync_hang: A sync stops at its first bucket.
        sync_die: The engine is dead from a sync's first bucket on.
        sleeps: The engine gives memory back, as one on a GPU does.
    """

    responses: Sequence[Sequence[int]] = ()
    start_s: float = 0.0
    delay_s: float = 0.0
    hang_after: int | None = None
    die_after: int | None = None
    empty_every: int | None = None
    extra_tokens: int = 0
    missing_log_probs: int = 0
    log_prob: float | None = None
    stale_version: bool = False
    drop_tensor: str | None = None
    corrupt_tensor: str | None = None
    sync_hang: bool = False
    sync_die: bool = False
    sleeps: bool = False


class DictWriter:
    """Weights in a dictionary; the receiving end of tests."""

    def __init__(self, script: Script) -> None:
        self.weights: dict[str, Tensor] = {}
        self._script = script
        self._expected: set[str] | None = None
        self._written: set[str] = set()

    def begin(self) -> None:
        """Expect a complete set of weights."""
        self._written = set()

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Keep copies of the weights.

        Raises:
            WeightSyncError: The first sync had no such weight.
        """
        for name, tensor in weights:
            if self._expected is not None and name not in self._expected:
                raise WeightSyncError(f"the model has no parameter {name!r}")
            if name == self._script.drop_tensor:
                continue
            self._written.add(name)
            self.weights[name] = tensor + 1 if name == self._script.corrupt_tensor else tensor.clone()

    def finish(self, kept: Collection[str] = ()) -> None:
        """Check that everything was written that the first sync had.

        Raises:
            WeightSyncError: Weights are missing; names them.
        """
        dropped = {self._script.drop_tensor} if self._script.drop_tensor is not None else set()
        missing = sorted((self._expected or self._written | dropped) - self._written - set(kept))
        if missing:
            raise WeightSyncError(f"the trainer sent nothing for {', '.join(missing)}")
        self._expected = set(self._written)

    def cancel(self) -> None:
        """Leave what was written."""

    def read_back(self, name: str) -> Tensor | None:
        """Return a weight as it was written."""
        return self.weights.get(name)

    def drop(self) -> None:
        """Drop all weights, but remember their names."""
        self.weights.clear()


class ScriptedEngine(RolloutEngine):
    """Follows the `Script` that `rollout.engine_kwargs.scripted` describes."""

    name = "scripted engine"
    own_process = False

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._script = Script(**setup.arguments)
        self._stop_token_ids = setup.tokens.stop
        self._vocab_size = setup.tokens.vocab_size
        self._requests = 0
        self._dead = False
        self._asleep: set[str] = set()
        self.supports_sleep = self._script.sleeps
        self.writer = DictWriter(self._script)
        self._receiver = WeightReceiver(self.writer, self.name)

    async def start(self) -> None:
        """Wait for as long as the script says."""
        await asyncio.sleep(self._script.start_s)

    async def shutdown(self) -> None:
        """End; every later request fails."""
        self._dead = True

    async def _generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        on_tokens: OnTokens | None,
        pictures: Sequence[Picture],
    ) -> SampleOutput:
        script = self._script
        self._require_alive()
        self._require_awake("kv_cache")
        self._requests += 1
        number = self._requests
        if script.die_after is not None and number > script.die_after:
            self._die()
        if script.hang_after is not None and number > script.hang_after:
            await asyncio.Event().wait()
        await asyncio.sleep(script.delay_s)
        tokens = self._tokens(sampling)
        if script.empty_every is not None and number % script.empty_every == 0:
            tokens = []
        stopped = bool(tokens) and tokens[-1] in self._stop_token_ids
        tokens += [0] * script.extra_tokens
        log_prob = -math.log(self._vocab_size) if script.log_prob is None else script.log_prob
        log_probs = [log_prob] * (len(tokens) - script.missing_log_probs)
        version = self.policy_version - int(script.stale_version)
        return SampleOutput(tokens, log_probs, "stop" if stopped else "length", version)

    async def _sleep(self, level: int) -> None:
        self._require_alive()
        self._asleep = {"weights", "kv_cache"}
        if level >= DROP_WEIGHTS:
            self.writer.drop()

    async def _wake(self, tags: Sequence[str]) -> None:
        self._require_alive()
        self._asleep -= set(tags)

    async def _begin_weights(self, manifest: Manifest, handle: Mapping[str, object], version: int) -> None:
        self._require_alive()
        self._require_awake("weights")
        self._receiver.begin(manifest, handle, version)

    async def weights_load(self, index: int) -> None:
        """Take one published bucket, unless the script says otherwise."""
        self._require_alive()
        if self._script.sync_die:
            self._die()
        if self._script.sync_hang:
            await asyncio.Event().wait()
        self._receiver.load(index)

    async def _commit_weights(self) -> list[ReceiverReport]:
        return [self._receiver.commit()]

    async def _abort_weights(self) -> bool:
        return self._receiver.abort()

    def _tokens(self, sampling: SamplingParams) -> list[int]:
        if self._script.responses:
            return list(self._script.responses[sampling.seed % len(self._script.responses)])[: sampling.max_tokens]
        rng = np.random.default_rng(sampling.seed)
        length = int(rng.integers(1, sampling.max_tokens + 1))
        tokens = rng.integers(0, self._vocab_size, length).tolist()
        stops = [index for index, token in enumerate(tokens) if token in self._stop_token_ids]
        tokens = tokens[: stops[0] + 1] if stops else tokens
        if length < sampling.max_tokens and self._stop_token_ids and not stops:
            tokens[-1] = self._stop_token_ids[0]
        return tokens

    def _require_alive(self) -> None:
        if self._dead:
            raise EngineDeadError("the scripted engine is dead")

    def _require_awake(self, tag: str) -> None:
        if tag in self._asleep:
            raise EngineUnusableError(f"scripted engine: asleep; wake {tag!r} first")

    def _die(self) -> None:
        self._dead = True
        raise EngineDeadError("the scripted engine has died, as its script says")
