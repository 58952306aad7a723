"""The interface of a rollout engine: what it is opened with, sampling of one response, and weight sync."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from hrl.errors import HrlError
from hrl.pictures import Picture
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError

if TYPE_CHECKING:
    from hrl.config.rollout import RolloutConfig
    from hrl.models.loading import ModelSource
    from hrl.models.tokenizer import TokenIds
    from hrl.protocol import DataProto
    from hrl.workers.requests import SamplingParams

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "abort"]
OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Told of a response's tokens, with their log-probs, as they are sampled."""
INITIAL_VERSION = 0
"""Policy version of the weights that an engine loads from the model's folder."""
KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Levels of sleep: weights stay in host memory, or go and are synced anew."""


class RolloutError(HrlError, RuntimeError):
    """Sampling failed. The message names the engine, the row and what to do."""


class EngineDeadError(RolloutError):
    """The engine's process is gone; it has to be started anew."""

    may_pass = True


class EngineUnusableError(RolloutError):
    """The engine runs, but until the next good weight sync its weights are not those of one policy version."""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is opened with.

    Attributes:
        config: `actor_rollout_ref.rollout`.
        model: Folder and overrides of the model, and the run's longest sequence.
        tokens: Ids of the model's tokenizer that have a meaning. `vocab_size` is the model's, which may be larger.
        device: Where the engine runs.
        num_threads: CPU threads of all the engine's processes together. `None` takes every core on a CPU, and on a GPU
            leaves the number to the engine.
        visible_devices: GPUs of an engine over several ranks, as CUDA_VISIBLE_DEVICES names them; Ray shows each rank
            only its own. `None` leaves them as they are.
        shares_device: A trainer needs the engine's memory between rollouts.
        rank: Of the process that opens it, among those that sample.
        run_mark: Tells this run's weights from all others on a server that somebody else started.
    """

    config: RolloutConfig
    model: ModelSource
    tokens: TokenIds
    device: torch.device
    num_threads: int | None = None
    visible_devices: str | None = None
    shares_device: bool = True
    rank: int = 0
    run_mark: str = ""

    @property
    def sleeps(self) -> bool:
        """Whether the engine has to be able to give its memory back."""
        return self.config.free_cache_engine and self.shares_device

    @property
    def arguments(self) -> dict[str, Any]:
        """`rollout.engine_kwargs` of the configured engine."""
        return dict(self.config.engine_kwargs.get(self.config.name) or {})


@dataclass
class SampleOutput:
    """One response.

    Attributes:
        token_ids: Including the stop token, if there was one.
        log_probs: Of each token under the distribution it was drawn from: log-softmax(logits / temperature), after
            top-k and top-p if they are on. At temperature 0, log-softmax(logits).
        finish_reason: A stop token, the length limit, or an abort.
        policy_version: Of the weights that produced the whole response.
        routed: `(tokens, L, K)`, the experts of the prompt's tokens and of the response's but the last, see
            `hrl.routing`; None unless the engine was opened to return them.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int
    routed: np.ndarray | None = None


def check_routed(output: SampleOutput, name: str, context_length: int) -> None:
    """Refuse an answer without the experts that its tokens went to.

    Args:
        output: The answer.
        name: Of the request.
        context_length: Tokens before it.

    Raises:
        RolloutError: Names the request, and what came in their place.
    """
    wanted = context_length + max(len(output.token_ids) - 1, 0)
    found = None if output.routed is None else output.routed.shape
    if found is None or len(found) != 3 or found[0] != wanted:
        raise RolloutError(
            f"the engine answered {name} with experts of shape {found}, and {wanted} tokens have passed through it: "
            "set actor.router_replay.mode=disabled, or R2, which needs nothing of the engine"
        )


def sample_seed(run_seed: int, step: int, uid: str, sample_index: int, *within: int | str) -> int:
    """Return the 32-bit seed of one sample; it does not depend on which engine draws the sample, or when.

    Args:
        run_seed: Of the run.
        step: Of the run.
        uid: The sample's group.
        sample_index: Its number there.
        within: What of the sample it is for, such as the number of a later turn.
    """
    return hashed_seed(run_seed, step, uid, sample_index, *within)


def hashed_seed(*parts: int | str) -> int:
    """Return the 32-bit seed of whatever these parts name."""
    # torch's CPU generator uses no more than 32 bits of a seed.
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def sample_keys(rows: DataProto) -> list[tuple[str, int]]:
    """Return (group, sample index) of each row, which identifies a sample of this batch in all processes."""
    columns = rows.non_tensor_batch
    return [(str(uid), int(index)) for uid, index in zip(columns["uid"], columns["sample_index"], strict=True)]


def told_on(loop: AbstractEventLoop, on_tokens: OnTokens | None) -> OnTokens | None:
    """Return what may be called from any thread, and has `on_tokens` called on a loop."""
    if on_tokens is None:
        return None

    def tell(ids: Sequence[int], log_probs: Sequence[float]) -> None:
        loop.call_soon_threadsafe(on_tokens, ids, log_probs)

    return tell


class RolloutEngine(ABC):
    """An engine, driven from one event loop.

    All coroutines run on the same loop. There may be many requests at once; weight calls come one at a time and with no
    request in flight. What state the weights are in, and so whether the engine may be sampled from, is decided here;
    subclasses do the work in the methods with an underscore.

    Attributes:
        policy_version: Version of the weights that are served.
        supports_sleep: Whether `sleep` gives device memory back. An engine that can't is left idle.
    """

    name: str
    """In messages."""

    takes_weights: bool = True
    """Whether the weights are sent to this engine; else another rank's engine has them put where this one samples."""
    weights_folder: str | None = None
    """Where the weights pass through a file, because the model does not share this machine's memory."""
    own_process: bool = True
    """Whether the model lives in a process of the engine's own. CUDA opens no handle in the process that made it, and
    transformers cannot load two models at once."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.supports_sleep = False
        self._in_flight = 0
        self._loaded_from_folder()

    def _loaded_from_folder(self) -> None:
        """Note that the weights are those of the model's folder."""
        self.policy_version = INITIAL_VERSION
        self._next_version: int | None = None
        self._unusable: str | None = None
        self._dropped = False

    async def prepare(self) -> None:
        """Do the engine's imports, and begin what can go on beside this process's own."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model and get ready to sample."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine and all its processes. Harmless when repeated."""

    def kill(self) -> None:
        """Kill what is left of an engine that hangs, so that its start or shutdown returns."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        on_tokens: OnTokens | None = None,
        pictures: Sequence[Picture] = (),
    ) -> SampleOutput:
        """Sample one response.

        Args:
            prompt_ids: Its context.
            sampling: How it is sampled.
            request_id: Of this request alone.
            on_tokens: Told on this loop, before this returns, by engines that can tell; others leave it out.
            pictures: That the prompt shows.

        Raises:
            EngineDeadError: The engine is gone.
            EngineUnusableError: A weight sync was aborted half-way.
            RolloutError: The prompt shows pictures, and the engine was opened for text alone.
        """
        self._require_usable()
        if pictures and not self.setup.model.shows_pictures:
            raise RolloutError(
                f"request {request_id} shows {len(pictures)} pictures, and {self.name} was opened for a run without: "
                "put a row with pictures among the first of its source, so that the run is made for them"
            )
        self._in_flight += 1
        try:
            return await self._generate(prompt_ids, sampling, request_id, on_tokens, pictures)
        finally:
            self._in_flight -= 1

    async def sleep(self, level: int) -> None:
        """Give device memory back, where the engine can. `level` is `KEEP_WEIGHTS` or `DROP_WEIGHTS`."""
        if self.supports_sleep:
            await self._sleep(level)
            if level >= DROP_WEIGHTS:
                self._dropped, self._unusable = True, "its weights were dropped by sleep level 2"

    async def wake(self, tags: Sequence[str]) -> None:
        """Take memory again: `"weights"` before a weight sync, `"kv_cache"` before sampling."""
        if self.supports_sleep:
            await self._wake(tags)

    def take_counts(self) -> dict[str, float]:
        """Return metrics of what happened since they were last taken, which add up over engines."""
        return {}

    async def start_profile(self) -> None:
        """Profile the engine's own processes, if it has any: this process is profiled as a whole."""

    async def stop_profile(self, trace: str) -> list[dict[str, Any]]:
        """Write a trace of each process, and return their profiles (`Profile.to_plain`).

        Args:
            trace: The first process's file, `….json.gz`; others put their number in front of the ending.
        """
        return []

    async def weights_pass(self, version: int) -> None:
        """Serve `version` from now on, whose weights another rank's engine is given; see `takes_weights`."""
        raise NotImplementedError(f"{self.name} takes its own weights")

    async def weights_begin(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        """Announce a weight sync to `version`; `handle` says where its buckets are."""
        if self._in_flight:
            raise WeightSyncError(f"{self._in_flight} requests are in flight; a weight sync needs an idle engine")
        self._next_version = version
        await self._begin_weights(manifest, handle, version)

    @abstractmethod
    async def weights_load(self, index: int) -> None:
        """Take one published bucket."""

    async def weights_commit(self) -> list[ReceiverReport]:
        """Serve the new version from now on, and drop what was computed with the old one."""
        if self._next_version is None:
            raise WeightSyncError(f"{self.name}: no weight sync is under way")
        self._unusable = "its last weight sync did not finish"
        reports = await self._commit_weights()
        self.policy_version, self._next_version = self._next_version, None
        self._dropped, self._unusable = False, None
        return reports

    async def weights_abort(self, reason: str) -> None:
        """Drop the sync: serve the old version if its weights are intact, nothing otherwise."""
        version, self._next_version = self._next_version, None
        self._unusable = f"the weight sync to version {version} was aborted ({reason})"
        if await self._abort_weights() and not self._dropped:
            self._unusable = None
            logger.warning("weight sync to version %s aborted; still serving version %s", version, self.policy_version)

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise EngineUnusableError(f"{self.name}: {self._unusable}; sync weights before sampling")

    @abstractmethod
    async def _generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        on_tokens: OnTokens | None,
        pictures: Sequence[Picture],
    ) -> SampleOutput: ...

    async def _sleep(self, level: int) -> None: ...

    async def _wake(self, tags: Sequence[str]) -> None: ...

    @abstractmethod
    async def _begin_weights(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None: ...

    @abstractmethod
    async def _commit_weights(self) -> list[ReceiverReport]: ...

    @abstractmethod
    async def _abort_weights(self) -> bool:
        """Return whether the weights are wholly those of `policy_version`."""
