"""The interface of a rollout engine: one request in, tokens out; weights in, a version out."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hrl.errors import HrlError
from hrl.workers.weight_sync.base import ReceiverReport
from hrl.workers.weight_sync.manifest import Manifest

FinishReason = Literal["stop", "length", "abort"]
INITIAL_VERSION = 0
"""Policy version of the weights that an engine loads from the model's folder."""


class RolloutError(HrlError, RuntimeError):
    """Sampling failed. The message names the engine, the row and what to do."""


class EngineDeadError(RolloutError):
    """The engine's process is gone; it has to be started anew."""


class EngineUnusableError(RolloutError):
    """The engine lives, but its weights are not those of one policy version; the next good weight sync heals it."""


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: Nucleus size; 1 is off.
        top_k: Most likely tokens kept; -1 is off.
        max_tokens: Longest response.
        seed: Of this response alone.
        ignore_eos: go on after a stop token (for benchmarks).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    seed: int = 0
    ignore_eos: bool = False


@dataclass
class SampleOutput:
    """One response.

    Attributes:
        token_ids: With the stop token, if there was one.
        log_probs: Of every token under the distribution it was drawn from: log-softmax(logits / temperature), after
            top-k and top-p if they are on. At temperature 0, log-softmax(logits).
        finish_reason: A stop token, the length limit, or an abort.
        policy_version: Of the weights that produced all of it.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int


def sample_seed(run_seed: int, step: int, uid: str, sample_index: int) -> int:
    """Return the seed of one sample: a stable function of what the sample is, not of where or when it is drawn.

    32 bits, which is what torch's CPU generator takes from a seed.
    """
    text = f"{run_seed}/{step}/{uid}/{sample_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class RolloutEngine(ABC):
    """An engine, driven from one event loop.

    All coroutines run on the same loop; requests may be many at once, weight calls one at a time and with no request
    in flight.
    """

    supports_sleep: bool = False
    """Whether `sleep` gives device memory back. Where it doesn't, an idle engine just waits, without using the CPU."""

    own_process: bool = True
    """Whether the model lives in a process of the engine's own. CUDA opens no handle in the process that made it, and
    transformers cannot load two models at once."""

    policy_version: int = INITIAL_VERSION
    """Version of the weights that are served."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model and gets ready to sample."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine and all its processes. Harmless when repeated."""

    @abstractmethod
    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        """Sample one response.

        Raises:
            EngineDeadError: The engine is gone.
            EngineUnusableError: A weight sync was aborted half-way.
        """

    @abstractmethod
    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs of tokens 1, 2, … given those before them, at temperature 1: `len(token_ids)` - 1 numbers."""

    async def sleep(self, level: int) -> None:
        """Give device memory back, where it can: 1 keeps the weights on the host, 2 drops them."""

    async def wake(self, tags: Sequence[str]) -> None:
        """Take memory again: `"weights"` before a weight sync, `"kv_cache"` before sampling."""

    @abstractmethod
    async def weights_begin(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        """Announces a weight sync to `version`, whose buckets are found by `handle`."""

    @abstractmethod
    async def weights_load(self, index: int) -> None:
        """Take one published bucket."""

    @abstractmethod
    async def weights_commit(self) -> list[ReceiverReport]:
        """Serve the new version from here on; forgets everything computed with the old one."""

    @abstractmethod
    async def weights_abort(self, reason: str) -> None:
        """Forgets the sync: serves the old version if its weights are intact, nothing otherwise."""
