"""`RolloutHost`: an engine, the event loop that it runs on, and the batch method on top of its request interface."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import threading
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from hrl.columns import object_column
from hrl.files import expanded
from hrl.pictures import MULTI_MODAL_DATA, Picture
from hrl.protocol import DataProto
from hrl.routing import ROUTED_EXPERTS
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import (
    DROP_WEIGHTS,
    KEEP_WEIGHTS,
    EngineSetup,
    OnTokens,
    RolloutEngine,
    RolloutError,
    SampleOutput,
    check_routed,
    sample_keys,
    sample_seed,
)
from hrl.workers.rollout.single_requests import LOG_PROB_TOLERANCE, EngineAnswer, EngineWork, serve_requests
from hrl.workers.weight_sync.cuda_ipc import CudaIpcSender
from hrl.workers.weight_sync.sender import SenderTransport, SyncReport, WeightSync
from hrl.workers.weight_sync.shared_file import SharedFileSender
from hrl.workers.weight_sync.shared_memory import SharedMemorySender
from hrl.workers.weight_sync.tensor_parallel import Lead
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.config.rollout import RolloutConfig
    from hrl.workers.requests import SampleRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: `rollout.name` → module and class of the engine. Only the one that runs is imported.
ENGINES = {
    "vllm": ("hrl.workers.rollout.vllm_engine", "VllmEngine"),
    "hf": ("hrl.workers.rollout.hf_engine", "HfEngine"),
    "scripted": ("hrl.workers.rollout.scripted", "ScriptedEngine"),
    "server": ("hrl.workers.rollout.vllm_server", "VllmServers"),
    "sglang": ("hrl.workers.rollout.sglang_engine", "SglangEngine"),
}
_SGLANGS_SERVERS = ("hrl.workers.rollout.sglang_server", "SglangServers")
START_TIMEOUT_S = 600.0
GENERATE_TIMEOUT_S = 1800.0
SHUTDOWN_TIMEOUT_S = 30.0
CONTROL_TIMEOUT_S = 120.0
RECEIVE_MARGIN_S = 10.0
"""Beyond a sync's deadline, so that the engine's processes, which know what they wait for, report it first."""

OnSample = Callable[[int, list[int], str], None]
"""Called with (row, token ids, finish reason) when a sample ends, one call at a time, on a thread of its own."""


def engine_of(config: RolloutConfig) -> tuple[str, str]:
    """Return module and class of the configured engine."""
    return _SGLANGS_SERVERS if config.name == "sglang" and config.is_served else ENGINES[config.name]


class RolloutHost:
    """Owns a rollout engine. Its methods block, and each has a deadline.

    Args:
        setup: What the engine is opened with.
        name: For messages and threads, e.g. `"rollout rank 0"`.
        lead: The lead of a tensor-parallel engine on GPUs, all of whose ranks send weights.
    """

    def __init__(self, setup: EngineSetup, *, name: str = "rollout", lead: Lead | None = None) -> None:
        self.name = name
        self._setup = setup
        self._config = setup.config
        self._lead = lead
        if lead is not None:
            lead.engine = self
        self._keeps_weights = self._lost_weights = False
        self._loop: LoopThread | None = None
        self._starting: Future[None] | None = None
        self._sync: WeightSync | None = None
        self._num_waves = 0
        self._begun: list[_Wave] = []
        module, kind = engine_of(setup.config)
        self.engine: RolloutEngine = getattr(importlib.import_module(module), kind)(setup)

    @property
    def policy_version(self) -> int:
        """Version of the weights that are served."""
        return self.engine.policy_version

    def take_counts(self) -> dict[str, float]:
        """Return metrics of what happened in the engine since they were last taken; see `RolloutEngine.take_counts`."""
        return self.engine.take_counts()

    def prepare(self) -> None:
        """Do the engine's imports, in this process and in the engine's own at the same time."""
        self._begin_loop().run(self.engine.prepare(), timeout_s=START_TIMEOUT_S, what=f"{self.name}: preparation")

    def begin_start(self) -> Future[None]:
        """Start the engine in the background, so that a trainer can load its own model in the meantime."""
        if self._starting is None:
            self._starting = self._begin_loop().submit(self.engine.start())
        return self._starting

    def _begin_loop(self) -> LoopThread:
        if self._loop is None:
            self._loop = LoopThread(f"{self.name} engine")
        return self._loop

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the engine is ready.

        Raises:
            RolloutError: It failed to start, or did not start in time; nothing of it is left.
        """
        try:
            self.begin_start().result(timeout=timeout_s)
        except TimeoutError:
            self.engine.kill()
            self.shutdown()
            raise RolloutError(f"{self.name}: the engine did not start within {timeout_s:g} s") from None
        except BaseException:  # Ctrl-C included: whatever ends the start, nothing of the engine stays behind
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """End the engine, its processes and its thread. Harmless when repeated."""
        loop, self._loop, self._starting = self._loop, None, None
        self._drop_begun()
        try:
            if loop is not None:
                self._shutdown_engine(loop)
        finally:  # after the engine, which reads from its buffers
            sync, self._sync = self._sync, None
            if sync is not None:
                sync.close()
            if self._lead is not None:
                self._lead.close()

    def _shutdown_engine(self, loop: LoopThread) -> None:
        try:
            loop.run(self.engine.shutdown(), timeout_s=SHUTDOWN_TIMEOUT_S, what=f"{self.name}: shutdown")
        except TimeoutError as error:
            logger.warning("%s; its processes are killed", error)
            self.engine.kill()
        finally:
            loop.stop()

    def __enter__(self) -> RolloutHost:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        name: str,
        on_tokens: OnTokens | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Future[SampleOutput]:
        """Begin one response, beside all that goes on. May be called from any thread; cancelling withdraws it.

        Args:
            prompt_ids: Its context.
            sampling: How it is sampled, with its own seed.
            name: Of this request alone.
            on_tokens: Told of its tokens on the engine's thread, see `RolloutEngine.generate`.
            pictures: That the context shows.
        """

        async def one() -> SampleOutput:
            output = await self.engine.generate(prompt_ids, sampling, name, on_tokens, pictures)
            check_output(output, name, max_tokens=sampling.max_tokens, version=self.policy_version)
            return output

        return self._running().submit(one())

    def begin_sampling(
        self, batch: DataProto, request: SampleRequest[RankPlan], on_sample: OnSample | None = None
    ) -> None:
        """Begin the responses that `generate_sequences` will be asked for, and return at once.

        What is begun together shares the engine's iterations. No weights are synced before all of it was asked for.
        """
        self._begun.append(self._begin(_Asked.of(batch, request), on_sample))

    def generate_sequences(
        self,
        batch: DataProto,
        request: SampleRequest[RankPlan],
        on_sample: OnSample | None = None,
        *,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> DataProto:
        """Sample one response for every row, or wait for those that were begun.

        If these rows were not begun, what was begun is dropped: nobody asked for it when its turn came.

        Args:
            batch: The columns that the request names: `prompts` and `attention_mask` `(B, P)`, left-padded.
            request: How responses are sampled; its longest one is the width R of the response columns.
            on_sample: Called for every sample as it ends, so that rewards can be computed meanwhile.
            timeout_s: For the whole batch, in seconds.

        Returns:
            In the order of the rows, the columns of `response_columns`; `uid`, `sample_index` and `finish_reason`;
            where asked, `routed_experts`; meta_info with `temperature` and
            `policy_version`.

        Raises:
            RolloutError: Names the row, or the engine.
        """
        asked = _Asked.of(batch, request)
        wave = next((begun for begun in self._begun if begun.asked == asked), None)
        if wave is None:
            self._drop_begun()
            wave = self._begin(asked, on_sample)
        else:
            self._begun.remove(wave)
        keys, sampling = asked.keys, request.sampling
        try:
            outputs = self._running().wait(
                wave.outputs, timeout_s=timeout_s, what=f"{self.name}: sampling {len(keys)} rows"
            )
        except TimeoutError as error:
            raise RolloutError(str(error)) from None
        finally:
            wave.end()
        prompts, prompt_mask, objects = batch.batch["prompts"], batch.batch["attention_mask"], batch.non_tensor_batch
        reasons = np.array([output.finish_reason for output in outputs], dtype=object)
        columns = response_columns(prompts, prompt_mask, outputs, sampling.max_tokens, self._setup.tokens.pad)
        check_values(columns, keys, self._setup.tokens.vocab_size)
        others = {"uid": objects["uid"], "sample_index": objects["sample_index"], "finish_reason": reasons}
        if request.with_experts:
            others[ROUTED_EXPERTS] = object_column([output.routed for output in outputs])
        return DataProto.from_dict(
            tensors=columns,
            non_tensors=others,
            meta_info={"temperature": sampling.temperature, "policy_version": self.policy_version},
        )

    def _begin(self, asked: _Asked, on_sample: OnSample | None) -> _Wave:
        # One thread, so that calls come one at a time; not the engine's, which has other requests to serve meanwhile.
        listener = ThreadPoolExecutor(1, f"{self.name} samples")
        return _Wave(asked, self._running().submit(self._generate_all(asked, on_sample, listener)), listener)

    def _drop_begun(self) -> None:
        begun, self._begun = self._begun, []
        for wave in begun:
            wave.outputs.cancel()
            wave.end()

    def serve_requests(
        self,
        take: Callable[[], Awaitable[EngineWork | None]],
        give: Callable[[list[EngineAnswer]], None],
        *,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> int:
        """Run requests that come one by one, until there are no more to come; return how many were answered.

        Args:
            take: Waits for work, on the engine's loop; returns None when there is no more to come.
            give: Hands over what is finished.
            timeout_s: For all of it, in seconds.

        Raises:
            RolloutError: The engine failed, or it took longer.
        """
        self._drop_begun()
        work = serve_requests(self.engine, take, give, self._setup.tokens.vocab_size)
        return int(self._control(work, "answering requests", timeout_s))

    def sleep(self) -> None:
        """Have the engine give its device memory to the trainer, if it can."""
        if self.engine.supports_sleep and self._config.free_cache_engine:
            # What is not sent in a sync must not be dropped: no sync would bring it back.
            level = KEEP_WEIGHTS if self._keeps_weights else DROP_WEIGHTS
            self._control(self.engine.sleep(level), "going to sleep", CONTROL_TIMEOUT_S)
            self._lost_weights |= level == DROP_WEIGHTS

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Have the engine take memory back: for `"weights"` before a weight sync, for `"kv_cache"` after it."""
        if self.engine.supports_sleep and self._config.free_cache_engine:
            self._control(self.engine.wake(tags), "waking up", CONTROL_TIMEOUT_S)

    def start_profile(self) -> None:
        """Profile the engine's own processes."""
        self._control(self.engine.start_profile(), "starting a profile", CONTROL_TIMEOUT_S)

    def stop_profile(self, trace: str, *, timeout_s: float) -> list[dict[str, Any]]:
        """Stop, and return the profile of each process (`Profile.to_plain`); see `RolloutEngine.stop_profile`."""
        profiles: list[dict[str, Any]] = self._control(self.engine.stop_profile(trace), "writing a profile", timeout_s)
        return profiles

    def push_weights(
        self,
        version: int,
        specs: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        weights: Iterable[tuple[str, Tensor]],
        kept: Sequence[str] = (),
    ) -> SyncReport | None:
        """Sync weights from this process's trainer into this host's engine, over memory handles.

        Returns None where another rank sends them for this engine too (`RolloutEngine.takes_weights`).

        Args:
            version: Policy version of the weights.
            specs: (name, dtype, shape) of what `weights` will yield; used in the first call.
            weights: (name, full tensor); always exhausted, also after an error.
            kept: Names of what the engine keeps from its folder; used in the first call.

        Raises:
            WeightSyncError: See `WeightSync.push`.
        """
        self._running()
        if not self.engine.takes_weights:
            deque(weights, maxlen=0)
            self._control(self.engine.weights_pass(version), "passing a weight sync", CONTROL_TIMEOUT_S)
            return None
        self._keeps_weights = bool(kept)
        if kept and self._lost_weights:
            raise WeightSyncError(
                f"{self.name}: the engine has dropped its weights, and {kept[0]!r} and {len(kept) - 1} others, which "
                "are not trained, are not sent: sync before it first sleeps"
            )
        if self._sync is None:
            manifest, transport = self._transport(specs, kept)
            target = self._lead or self
            self._sync = WeightSync(manifest, transport, target, timeout_s=self._config.weight_sync.timeout_s)
        return self._sync.push(version, weights)

    def refuse_weights(self, reason: str) -> None:
        """Tell the other ranks that would send weights that this sync does not begin."""
        if self._lead is not None:
            self._lead.refuse(reason, CONTROL_TIMEOUT_S)

    def receive_weights(self, version: int, manifest: Manifest, handle: Mapping[str, Any]) -> list[ReceiverReport]:
        """Take a sync whose sender is elsewhere (`weight_sync.broadcast`).

        Raises:
            WeightSyncError: What arrived is not what was sent, or not in time.
        """
        timeout_s = self._config.weight_sync.timeout_s + RECEIVE_MARGIN_S
        what = f"{self.name}: receiving weights of version {version}"
        try:
            return self._running().run(self._receive(version, manifest, handle), timeout_s=timeout_s, what=what)
        except TimeoutError as error:
            self.weights_abort(str(error))
            raise WeightSyncError(str(error)) from None

    def _transport(
        self, specs: Iterable[tuple[str, torch.dtype, Sequence[int]]], kept: Sequence[str]
    ) -> tuple[Manifest, SenderTransport]:
        device = self._setup.device
        if device.type == "cuda" and self.engine.own_process:
            manifest = Manifest.build(specs, self._config.weight_sync.bucket_mb << 20, kept)
            return manifest, CudaIpcSender(manifest, device)
        # Shared memory holds the whole model anyway, and with several buckets sender and receiver would fight for the
        # same cores: one bucket is twice as fast.
        manifest = Manifest.build(specs, sys.maxsize, kept)
        if self.engine.weights_folder is not None:
            return manifest, SharedFileSender(manifest, expanded(self.engine.weights_folder))
        return manifest, SharedMemorySender(manifest)

    # The receiving end of `WeightSync`, for a sender in this process.

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """Announce a sync to the engine; see `SyncTarget`."""
        return self._running().submit(self.engine.weights_begin(manifest, handle, version))

    def weights_load(self, index: int) -> Future[None]:
        """Have the engine take a bucket; see `SyncTarget`."""
        return self._running().submit(self.engine.weights_load(index))

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """Have the engine serve what was sent; see `SyncTarget`."""
        return self._running().submit(self.engine.weights_commit())

    def weights_abort(self, reason: str) -> Future[None]:
        """Have the engine drop a sync; see `SyncTarget`."""
        return self._running().submit(self.engine.weights_abort(reason))

    async def _receive(self, version: int, manifest: Manifest, handle: Mapping[str, Any]) -> list[ReceiverReport]:
        try:
            await self.engine.weights_begin(manifest, handle, version)
            for index in range(len(manifest.buckets)):
                await self.engine.weights_load(index)
            return await self.engine.weights_commit()
        except RuntimeError as error:
            await self.engine.weights_abort(str(error))
            raise

    async def _generate_all(self, asked: _Asked, on_sample: OnSample | None, listener: Executor) -> list[SampleOutput]:
        version = self.policy_version
        self._num_waves += 1
        wave = self._num_waves
        loop = asyncio.get_running_loop()

        async def one(
            row: int, prompt: list[int], key: tuple[str, int], sampling: SamplingParams, pictures: tuple[Picture, ...]
        ) -> SampleOutput:
            output = await self.engine.generate(prompt, sampling, f"{wave}-{row}", pictures=pictures)
            check_output(output, sample_name(row, key), max_tokens=sampling.max_tokens, version=version)
            if asked.with_experts:
                output = with_routed(output, sample_name(row, key), len(prompt))
            if on_sample is not None:
                await loop.run_in_executor(listener, on_sample, row, output.token_ids, output.finish_reason)
            return output

        try:
            async with asyncio.TaskGroup() as group:
                rows = zip(asked.prompts, asked.keys, asked.samplings, asked.pictures, strict=True)
                requests = enumerate(rows)
                tasks = [group.create_task(one(row, *request)) for row, request in requests]
        except ExceptionGroup as failures:  # the first is the cause; the others were cancelled or failed because of it
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def _control(self, work: Any, what: str, timeout_s: float) -> Any:
        try:
            return self._running().run(work, timeout_s=timeout_s, what=f"{self.name}: {what}")
        except TimeoutError as error:
            raise RolloutError(str(error)) from None

    def _running(self) -> LoopThread:
        if self._loop is None:
            raise RolloutError(f"{self.name}: the engine is not running; call start() first")
        return self._loop


# ---------------------------------------------------------------------- batches to requests and back


@dataclass(frozen=True)
class _Asked:
    """What a call asks for.

    Attributes:
        prompts: Tokens of each row's prompt.
        keys: Of each row, see `sample_keys`.
        samplings: How each row's response is sampled.
        reward_round: Where finished samples are sent.
        with_experts: Answers have the experts of their tokens.
        pictures: That each prompt shows.
    """

    prompts: list[list[int]]
    keys: list[tuple[str, int]]
    samplings: list[SamplingParams]
    reward_round: int | None
    with_experts: bool
    pictures: list[tuple[Picture, ...]]

    @classmethod
    def of(cls, batch: DataProto, request: SampleRequest[RankPlan]) -> Self:
        keys, sampling = sample_keys(batch), request.sampling
        is_greedy = batch.non_tensor_batch["greedy"] if request.with_greedy else [False] * len(keys)
        samplings = [
            replace(
                sampling,
                temperature=0.0 if greedy else sampling.temperature,
                seed=sample_seed(request.seed, request.step, *key),
            )
            for key, greedy in zip(keys, is_greedy, strict=True)
        ]
        prompts = prompt_tokens(batch.batch["prompts"], batch.batch["attention_mask"])
        shown = list(batch.non_tensor_batch[MULTI_MODAL_DATA]) if request.with_pictures else [()] * len(keys)
        return cls(prompts, keys, samplings, request.reward_round, request.with_experts, shown)


@dataclass(frozen=True, eq=False)
class _Wave:
    """Responses that are being sampled.

    Attributes:
        asked: What they answer.
        outputs: One for each row.
        listener: The thread that hears of each sample as it ends.
    """

    asked: _Asked
    outputs: Future[list[SampleOutput]]
    listener: Executor

    def end(self) -> None:
        """Let the thread go."""
        self.listener.shutdown(wait=False, cancel_futures=True)


def prompt_tokens(prompts: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return each row's prompt tokens from left-padded columns `(B, P)`.

    Raises:
        RolloutError: A prompt without tokens.
    """
    ids = prompts.cpu().numpy()
    mask = attention_mask.cpu().numpy().astype(bool)
    rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    empty = next((index for index, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise RolloutError(f"row {empty} has an empty prompt")
    return rows


def sample_name(row: int, key: tuple[str, int]) -> str:
    """Return what errors call a sample."""
    return f"row {row} (uid {key[0]}, sample {key[1]})"


def check_output(output: SampleOutput, name: str, *, max_tokens: int, version: int) -> None:
    """Refuse an answer that cannot be what was asked for. Its thousands of numbers are `check_values`' to look at.

    Raises:
        RolloutError: Names the sample and what is wrong with it.
    """
    wrong = None
    if len(output.token_ids) != len(output.log_probs):
        wrong = f"{len(output.token_ids)} tokens with {len(output.log_probs)} log-probs"
    elif len(output.token_ids) > max_tokens:
        wrong = f"{len(output.token_ids)} tokens, although at most {max_tokens} were asked for"
    elif output.policy_version != version:
        wrong = f"policy version {output.policy_version}, although version {version} is served"
    if wrong is not None:
        raise RolloutError(f"the engine answered {name} with {wrong}")


def with_routed(output: SampleOutput, name: str, prompt_length: int) -> SampleOutput:
    """Return an answer with the experts that its tokens went to; with none of any token if it was aborted.

    Args:
        output: The answer.
        name: Of the sample.
        prompt_length: Tokens of its prompt.

    Raises:
        RolloutError: See `check_routed`.
    """
    try:
        check_routed(output, name, prompt_length)
    except RolloutError:
        if output.finish_reason != "abort":
            raise
        return replace(output, routed=np.zeros((0, 0, 0), np.uint8))
    return output


def check_values(columns: Mapping[str, Tensor], keys: Sequence[tuple[str, int]], vocab_size: int) -> None:
    """Refuse `responses` and `rollout_log_probs` `(B, R)` that no engine can have sampled.

    Raises:
        RolloutError: Names the first such sample and what is wrong with it.
    """
    if not keys:
        return
    lowest = torch.finfo(torch.float32).min
    for name, low, high, wrong in (
        ("responses", 0, vocab_size - 1, f"a token outside the vocabulary of {vocab_size}"),
        ("rollout_log_probs", lowest, LOG_PROB_TOLERANCE, "a log-prob that is not a finite number below 0"),
    ):
        values = columns[name]
        least, most = torch.aminmax(values)  # not a number if one of them is not
        if not (low <= least and most <= high):
            row = int((~((low <= values) & (values <= high))).any(dim=1).nonzero()[0])
            raise RolloutError(f"the engine answered {sample_name(row, keys[row])} with {wrong}")


def response_columns(
    prompts: Tensor, prompt_mask: Tensor, outputs: Sequence[SampleOutput], max_response_tokens: int, pad_token_id: int
) -> dict[str, Tensor]:
    """Return the batch columns of sampled responses.

    Args:
        prompts: `(B, P)` left-padded.
        prompt_mask: `(B, P)`.
        outputs: One for each row.
        max_response_tokens: R.
        pad_token_id: Fills responses up. It is never read back: lengths come from the mask.

    Returns:
        `prompts (B, P)`, `responses, response_mask (B, R)` and `input_ids, attention_mask, position_ids (B, P+R)`
        int64; `rollout_log_probs (B, R)` float32.
    """
    rows = len(outputs)
    lengths = np.fromiter((len(output.token_ids) for output in outputs), np.int64, rows)
    mask = np.arange(max_response_tokens) < lengths[:, None]
    responses = np.full((rows, max_response_tokens), pad_token_id, np.int64)
    responses[mask] = _flat("q", (output.token_ids for output in outputs))
    log_probs = np.zeros((rows, max_response_tokens), np.float32)
    log_probs[mask] = _flat("f", (output.log_probs for output in outputs))

    response_mask = torch.from_numpy(mask.astype(np.int64))
    prompts, prompt_mask = prompts.to("cpu", torch.int64), prompt_mask.to("cpu", torch.int64)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return {
        "prompts": prompts,
        "responses": torch.from_numpy(responses),
        "input_ids": torch.cat([prompts, torch.from_numpy(responses)], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp_(min=0),
        "response_mask": response_mask,
        "rollout_log_probs": torch.from_numpy(log_probs),
    }


def _flat(typecode: str, lists: Iterable[Sequence[float]]) -> np.ndarray:
    """Return the numbers of all lists one after the other, in the type that `array` calls so."""
    return np.frombuffer(b"".join(array(typecode, numbers) for numbers in lists), typecode)


class LoopThread:
    """Runs coroutines for a caller that has no event loop, or that must not be blocked by one.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. May be called from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Run a coroutine and return its result.

        Raises:
            TimeoutError: It took longer and was cancelled; the message says what it was.
        """
        return self.wait(self.submit(coroutine), timeout_s=timeout_s, what=what)

    @staticmethod
    def wait(future: Future[T], *, timeout_s: float, what: str) -> T:
        """Return the result of what was submitted; see `run`."""
        try:
            return future.result(timeout=timeout_s)
        except FutureTimeoutError:
            if future.done():  # the coroutine itself raised a timeout
                raise
            future.cancel()
            raise TimeoutError(f"{what} took longer than {timeout_s:g} s") from None

    def stop(self, timeout_s: float = 5.0) -> None:
        """Cancel what is running and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
            self._thread.join(timeout_s)
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()
        self._loop.stop()
