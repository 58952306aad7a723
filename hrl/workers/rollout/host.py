"""`RolloutHost`: an engine, its event loop, and the batch methods on top of its request interface."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hrl.metrics import Metric
from hrl.protocol import DataProto
from hrl.workers.rollout.base import RolloutEngine, RolloutError, SampleOutput, SamplingParams, sample_seed
from hrl.workers.rollout.columns import SampleName, check_output, prompt_tokens, response_columns, sample_keys
from hrl.workers.rollout.factory import build_engine
from hrl.workers.rollout.loop_thread import LoopThread
from hrl.workers.rollout.vllm_engine import default_num_threads, engine_process_ids, kill_engine_processes
from hrl.workers.weight_sync.base import ReceiverReport, SenderTransport, SyncReport, WeightSync, WeightSyncError
from hrl.workers.weight_sync.cuda_ipc import CudaIpcSender
from hrl.workers.weight_sync.engine_ranks import Lead
from hrl.workers.weight_sync.manifest import Manifest
from hrl.workers.weight_sync.shared_memory import SharedMemorySender

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
GENERATE_TIMEOUT_S = 1800.0
SHUTDOWN_TIMEOUT_S = 30.0
CONTROL_TIMEOUT_S = 120.0
_KEEP_WEIGHTS = 1  # the sleep level that keeps them, in host memory
RECEIVE_MARGIN_S = 10.0
"""Beyond a sync's deadline: the engine's processes, which know what they wait for, say it first."""

OnSample = Callable[[int, list[int], str], None]
"""Called with (row, token ids, finish reason) as each sample ends, in that order, on a thread of its own."""


@dataclass(frozen=True)
class TokenInfo:
    """What the engine has to know about the tokenizer.

    Attributes:
        pad_token_id: Fills responses up.
        stop_token_ids: End a response and belong to it.
        vocab_size: Token ids are below it.
    """

    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    vocab_size: int


class RolloutHost:
    """Owns a rollout engine. Its methods block, and each has a deadline.

    Args:
        config: `actor_rollout_ref.rollout`.
        model_path: Local folder of the model.
        tokens: Of its tokenizer.
        max_prompt_length: P, in tokens.
        max_response_length: R, in tokens.
        device: Where the engine runs.
        name: For messages and threads, e.g. `"rollout rank 0"`.
        num_threads: CPU threads of the engine; None takes every core, and on a GPU leaves them to the engine.
        trust_remote_code: Allow code from the model's folder.
        override_config: Fields of the model's configuration to replace, as the trainer does.
        visible_devices: The GPUs of a tensor-parallel engine, as CUDA_VISIBLE_DEVICES has them.
        shares_device: A trainer wants the engine's memory from time to time; without one, the engine need not be able
            to give it.
        fellows: The other ranks of a tensor-parallel engine on GPUs, which send weights along with this process.
    """

    def __init__(
        self,
        config: Any,
        model_path: str,
        tokens: TokenInfo,
        *,
        max_prompt_length: int,
        max_response_length: int,
        device: torch.device,
        name: str = "rollout",
        num_threads: int | None = None,
        trust_remote_code: bool = False,
        override_config: Mapping[str, Any] | None = None,
        visible_devices: str | None = None,
        shares_device: bool = True,
        fellows: Lead | None = None,
    ) -> None:
        self.name = name
        self._fellows = fellows
        self._keeps_weights = self._lost_weights = False
        self._config = config
        self._tokens = tokens
        self._max_response_length = max_response_length
        self._device = device
        self._loop: LoopThread | None = None
        self._starting: Future[None] | None = None
        self._others: frozenset[int] = frozenset()
        self._sync: WeightSync | None = None
        self._requests = 0
        self.engine: RolloutEngine = build_engine(
            config,
            model_path=str(model_path),
            stop_token_ids=tokens.stop_token_ids,
            vocab_size=tokens.vocab_size,
            max_model_len=config.max_model_len or max_prompt_length + max_response_length,
            device=device,
            num_threads=num_threads or (default_num_threads() if device.type == "cpu" else None),
            trust_remote_code=trust_remote_code,
            override_config=override_config or {},
            visible_devices=visible_devices,
            sleeps=config.free_cache_engine and shares_device,
        )

    @property
    def policy_version(self) -> int:
        """Version of the weights that are served."""
        return self.engine.policy_version

    @property
    def supports_sleep(self) -> bool:
        """Whether `sleep` gives device memory back; an engine that can't is left idle."""
        return self.engine.supports_sleep

    def begin_start(self) -> None:
        """Start the engine in the background, so that a trainer can load its own model meanwhile."""
        if self._starting is None:
            self._others = engine_process_ids()
            self._loop = LoopThread(f"{self.name} engine")
            self._starting = self._loop.submit(self.engine.start())

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the engine is ready.

        Raises:
            RolloutError: It failed to start, or not in time; nothing of it is left.
        """
        self.begin_start()
        if self._starting is None:
            raise RolloutError(f"{self.name}: the engine was not started")
        try:
            self._starting.result(timeout=timeout_s)
        except TimeoutError:
            kill_engine_processes(self._others)
            self.shutdown()
            raise RolloutError(f"{self.name}: the engine did not start within {timeout_s:g} s") from None
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """End the engine, its processes and its thread. Harmless when repeated."""
        loop, self._loop, self._starting = self._loop, None, None
        try:
            if loop is not None:
                self._shutdown_engine(loop)
        finally:  # after the engine, which reads from its buffers
            sync, self._sync = self._sync, None
            if sync is not None:
                sync.close()
            if self._fellows is not None:
                self._fellows.close()

    def _shutdown_engine(self, loop: LoopThread) -> None:
        try:
            loop.run(self.engine.shutdown(), timeout_s=SHUTDOWN_TIMEOUT_S, what=f"{self.name}: shutdown")
        except TimeoutError as error:
            logger.warning("%s; its processes are killed", error)
            kill_engine_processes(self._others)
        finally:
            loop.stop()

    def __enter__(self) -> RolloutHost:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def generate_sequences(
        self, batch: DataProto, on_sample: OnSample | None = None, *, timeout_s: float = GENERATE_TIMEOUT_S
    ) -> DataProto:
        """Sample one response for every row.

        Args:
            batch: `prompts` (or `input_ids`) `(B, P)` left-padded and `attention_mask` `(B, P)`; non-tensor `uid`
                and `sample_index`, and optionally `greedy`, which marks rows that take the most likely tokens;
                meta_info `step`, `validate` and, optionally, `temperature`.
            on_sample: Hears of every sample as it ends, so that rewards can be computed meanwhile.
            timeout_s: For the whole batch.

        Returns:
            In the order of the rows, the columns of `response_columns`; `uid`, `sample_index` and `finish_reason`;
            meta_info with `temperature`, `policy_version` and `metrics`.

        Raises:
            RolloutError: Names the row, or the engine.
        """
        prompts = batch.batch["prompts"] if "prompts" in batch.batch.keys() else batch.batch["input_ids"]
        width = prompts.shape[1]
        prompt_mask = batch.batch["attention_mask"][:, :width]
        sampling = self._sampling(batch.meta_info)
        names = [SampleName(row, *key) for row, key in enumerate(sample_keys(batch))]
        is_greedy = batch.non_tensor_batch.get("greedy", np.zeros(len(names), dtype=object))
        samplings = [replace(sampling, temperature=0.0) if greedy else sampling for greedy in is_greedy]
        loop, tokens = self._running(), prompt_tokens(prompts, prompt_mask)
        # One thread, so that samples are heard of in order; and not the engine's, which has others to serve meanwhile.
        listener = ThreadPoolExecutor(1, f"{self.name} samples")
        work = self._generate_all(tokens, names, samplings, batch.meta_info, on_sample, listener)
        try:
            outputs = loop.run(work, timeout_s=timeout_s, what=f"{self.name}: sampling {len(names)} rows")
        except TimeoutError as error:
            raise RolloutError(str(error)) from None
        finally:
            listener.shutdown(wait=False, cancel_futures=True)
        columns = response_columns(prompts, prompt_mask, outputs, self._max_response_length, self._tokens.pad_token_id)
        kept = {key: batch.non_tensor_batch[key] for key in ("uid", "sample_index")}
        reasons = np.array([output.finish_reason for output in outputs], dtype=object)
        meta = {
            **batch.meta_info,
            "temperature": sampling.temperature,
            "policy_version": self.policy_version,
            "metrics": sample_metrics(outputs),
        }
        return DataProto.from_dict(tensors=columns, non_tensors={**kept, "finish_reason": reasons}, meta_info=meta)

    def score(self, token_ids: list[int], *, timeout_s: float = CONTROL_TIMEOUT_S) -> list[float]:
        """Log-probs of tokens 1, 2, … given those before them, at temperature 1."""
        return self._control(self.engine.score(token_ids), "scoring", timeout_s)

    def sleep(self) -> None:
        """Give the engine's device memory to the trainer, where the engine can.

        An engine that is not sent all of its weights keeps them in host memory meanwhile: no sync brings them back.
        """
        if self.supports_sleep and self._config.free_cache_engine:
            level = min(self._config.sleep_level, _KEEP_WEIGHTS) if self._keeps_weights else self._config.sleep_level
            self._control(self.engine.sleep(level), "going to sleep", CONTROL_TIMEOUT_S)
            self._lost_weights |= level > _KEEP_WEIGHTS

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take it back: `"weights"` before a weight sync, `"kv_cache"` after it."""
        if self.supports_sleep and self._config.free_cache_engine:
            self._control(self.engine.wake(tags), "waking up", CONTROL_TIMEOUT_S)

    def push_weights(
        self,
        version: int,
        specs: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        weights: Iterable[tuple[str, Tensor]],
        kept: Sequence[str] = (),
    ) -> SyncReport:
        """Weight sync from this process's trainer into this host's engine, over memory handles.

        Args:
            version: Policy version of the weights.
            specs: (name, dtype, shape) of what `weights` will yield; used at the first call.
            weights: (name, full tensor), run to its end whatever happens.
            kept: Names of what the engine keeps from its folder; used at the first call.

        Raises:
            WeightSyncError: See `WeightSync.push`.
        """
        self._running()
        self._keeps_weights = bool(kept)
        if kept and self._lost_weights:
            raise WeightSyncError(
                f"{self.name}: the engine has dropped its weights, and {kept[0]!r} and {len(kept) - 1} others, which "
                "are not trained, are not sent: sync before it first sleeps"
            )
        if self._sync is None:
            manifest, transport = self._transport(specs, kept)
            self._sync = WeightSync(
                manifest, transport, [self], timeout_s=self._config.weight_sync.timeout_s, fellows=self._fellows
            )
        return self._sync.push(version, weights)

    def refuse_weights(self, reason: str) -> None:
        """Tell the ranks that send along that this sync will not begin."""
        if self._fellows is not None:
            self._fellows.refuse(reason, CONTROL_TIMEOUT_S)

    def receive_weights(self, version: int, manifest: Manifest, handle: Mapping[str, Any]) -> list[ReceiverReport]:
        """Return the receiving side of a sync whose sender is elsewhere (`weight_sync.broadcast`).

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
        if self._device.type == "cuda" and self.engine.own_process:
            manifest = Manifest.build(specs, self._config.weight_sync.bucket_mb << 20, kept)
            return manifest, CudaIpcSender(manifest, self._device)
        # Shared memory holds the whole model anyway, and overlapping would make sender and receiver fight for the same
        # cores: one bucket is twice as fast as several.
        manifest = Manifest.build(specs, sys.maxsize, kept)
        return manifest, SharedMemorySender(manifest)

    # The receiving end of `WeightSync`, for a sender in this process.

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        """See `SyncTarget`."""
        return self._running().submit(self.engine.weights_begin(manifest, handle, version))

    def weights_load(self, index: int) -> Future[None]:
        """See `SyncTarget`."""
        return self._running().submit(self.engine.weights_load(index))

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        """See `SyncTarget`."""
        return self._running().submit(self.engine.weights_commit())

    def weights_abort(self, reason: str) -> Future[None]:
        """See `SyncTarget`."""
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

    async def _generate_all(
        self,
        prompts: list[list[int]],
        names: list[SampleName],
        samplings: list[SamplingParams],
        meta: Mapping[str, Any],
        on_sample: OnSample | None,
        listener: Executor,
    ) -> list[SampleOutput]:
        step = int(meta["step"])
        # Validation draws its own samples, also at a step that trains on the same prompts.
        run_seed = -1 - self._config.seed if meta.get("validate") else self._config.seed
        version = self.policy_version
        self._requests += 1
        wave = self._requests
        loop = asyncio.get_running_loop()

        async def one(prompt: list[int], name: SampleName, sampling: SamplingParams) -> SampleOutput:
            params = replace(sampling, seed=sample_seed(run_seed, step, name.uid, name.sample_index))
            output = await self.engine.generate(prompt, params, f"{wave}-{name.row}")
            check_output(
                output, name, max_tokens=params.max_tokens, vocab_size=self._tokens.vocab_size, version=version
            )
            if on_sample is not None:
                heard = loop.run_in_executor(listener, on_sample, name.row, output.token_ids, output.finish_reason)
                await heard
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*row)) for row in zip(prompts, names, samplings, strict=True)]
        except ExceptionGroup as failures:  # the first one is the cause; the others were cancelled or failed of it
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def _sampling(self, meta: Mapping[str, Any]) -> SamplingParams:
        if "step" not in meta:
            raise RolloutError("the batch's meta_info lacks 'step', which the seeds of its samples depend on")
        if not meta.get("validate", False):
            rollout = self._config
            temperature = float(meta.get("temperature", rollout.temperature))
            return SamplingParams(temperature, rollout.top_p, rollout.top_k, self._max_response_length)
        val = self._config.val_kwargs
        if not val.do_sample:
            return SamplingParams(temperature=0.0, max_tokens=self._max_response_length)
        return SamplingParams(val.temperature, val.top_p, val.top_k, self._max_response_length)

    def _control(self, work: Any, what: str, timeout_s: float) -> Any:
        try:
            return self._running().run(work, timeout_s=timeout_s, what=f"{self.name}: {what}")
        except TimeoutError as error:
            raise RolloutError(str(error)) from None

    def _running(self) -> LoopThread:
        if self._loop is None:
            raise RolloutError(f"{self.name}: the engine is not running; call start() first")
        return self._loop


def sample_metrics(outputs: Sequence[SampleOutput]) -> dict[str, Metric]:
    """Return counts that tell a silent failure of sampling from a response."""
    return {
        "rollout/empty_responses": Metric.total(sum(not output.token_ids for output in outputs)),
        "rollout/aborted_responses": Metric.total(sum(output.finish_reason == "abort" for output in outputs)),
        "rollout/truncated_responses": Metric.total(sum(output.finish_reason == "length" for output in outputs)),
    }
