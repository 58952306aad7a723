"""SGLang as a rollout engine inside a run, for `rollout.name=sglang` without addresses.

Its process (`sglang_process`) is a child of the rank. Written against release 0.5.23, whose calls `tests/contracts`
has, and run with it on a CPU alone. As it is set up here, a sampled token's log-prob is
log-softmax(logits / temperature) in float32, also with top-k or top-p, which are refused for training.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hrl.models.hf_config import engine_overrides
from hrl.pictures import Picture
from hrl.processes.child import stop_child
from hrl.processes.evidence import exit_in_words, printed_last, why_memory_ended_it
from hrl.processes.lifetime import under_guard
from hrl.processes.messages import GarbledError, encode, open_stream, receive
from hrl.processes.watch import NEEDED
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import (
    DROP_WEIGHTS,
    INITIAL_VERSION,
    EngineDeadError,
    EngineSetup,
    OnTokens,
    RolloutEngine,
    RolloutError,
    SampleOutput,
)
from hrl.workers.rollout.sglang_process import PREFIX
from hrl.workers.rollout.sglang_server import generate_request, read_generated
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError

VERSION = "0.5.23"
"""Of whose source this was written."""
_MODULE = "hrl.workers.rollout.sglang_process"
_TITLE = "the SGLang engine"
_EXIT_TIMEOUT_S = 10.0
_WEIGHTS, _CACHE = "weights", "kv_cache"


def engine_args(setup: EngineSetup) -> dict[str, Any]:
    """Return the arguments of SGLang's `Engine`. `rollout.engine_kwargs.sglang` wins over the others."""
    config, model = setup.config, setup.model
    overrides = engine_overrides(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    return {
        "model_path": model.path,
        "dtype": config.dtype,
        "device": setup.device.type,
        "tp_size": 1,
        "context_length": model.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "mem_fraction_static": config.gpu_memory_utilization,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager,
        "enable_memory_saver": _sleeps(setup),
        # Without it SGLang does not look at a request's seed.
        "enable_deterministic_inference": True,
        "enable_fp32_lm_head": True,  # as the trainer's, whose logits are not rounded
        "sampling_defaults": "openai",
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(overrides),
        "log_level": "warning",
    } | setup.arguments


class SglangEngine(RolloutEngine):
    """One `Engine` of SGLang. All methods run on the event loop of the thread that owns the engine."""

    name = "SGLang engine"

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.supports_sleep = _sleeps(setup)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._asleep: list[str] = []

    async def prepare(self) -> None:
        """Look whether SGLang is there, of the release that this was written for.

        Raises:
            RolloutError: It is not.
        """
        require_supported(sglang_folder())

    async def start(self) -> None:
        """Start the engine in a process of its own.

        Raises:
            RolloutError: As `prepare`, or it did not start.
        """
        await self.prepare()
        ours, theirs = socket.socketpair()
        with theirs:
            # Blocks this loop on purpose: the child's life is bound to that of the thread that starts it.
            self._process = subprocess.Popen(
                under_guard([sys.executable, "-m", _MODULE, str(theirs.fileno())]),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only the rank, and SGLang's own ends reach only SGLang
            )
        NEEDED.add(self._process.pid, "the guard of the SGLang engine")
        reader, self._writer = await open_stream(ours)
        ready = self._expect(0)
        self._reading = asyncio.create_task(self._read(reader))
        self._writer.write(encode(engine_args(self.setup)))
        try:
            await ready
        except RolloutError as error:
            raise RolloutError(
                f"the SGLang engine for {self.setup.model.path} did not start: {error}; {printed_last()}"
            ) from error
        self._loaded_from_folder()
        self._asleep = []

    async def shutdown(self) -> None:
        """Hang up, upon which SGLang ends its processes; what is left after some seconds is killed."""
        reading, self._reading = self._reading, None
        writer, self._writer = self._writer, None
        process, self._process = self._process, None
        if reading is not None:
            reading.cancel()
        if writer is not None:
            writer.close()
        self._fail_all(EngineDeadError("the SGLang engine was shut down"))
        if process is not None:
            NEEDED.remove(process.pid)
            await asyncio.get_running_loop().run_in_executor(None, _end, process)

    def kill(self) -> None:
        """Kill the engine and all that it has started."""
        if self._process is not None:
            stop_child(self._process, _TITLE)

    async def _generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        request_id: str,
        on_tokens: OnTokens | None,
        pictures: Sequence[Picture],
    ) -> SampleOutput:
        if pictures:
            raise RolloutError(f"request {request_id} shows pictures, which SGLang is not sent: set rollout.name=hf")
        stop = self.setup.tokens.stop
        rid = f"{request_id}/"  # with an end: SGLang stops every request whose name begins with the one that is stopped
        body = generate_request(prompt_ids, sampling, stop) | {"rid": rid}
        try:
            found = await self._call("generate", body)
        except asyncio.CancelledError:
            with suppress(RolloutError):
                self._send("withdraw", rid)
            raise
        token_ids, log_probs, reason, weights = read_generated(found, self.name, stop, request_id)
        return SampleOutput(token_ids, log_probs, reason, self._version_of(weights))

    def _version_of(self, weights: str | None) -> int:
        number = (weights or "").removeprefix(PREFIX)
        if weights != number and number.isdecimal():
            return int(number)
        return INITIAL_VERSION  # whose weights have the name that SGLang gives to those of the folder

    async def _sleep(self, level: int) -> None:
        tags = [_WEIGHTS, _CACHE] if level >= DROP_WEIGHTS else [_CACHE]
        await self._call("release", tags)
        self._asleep += tags

    async def _wake(self, tags: Sequence[str]) -> None:
        wanted = [tag for tag in tags if tag in self._asleep]  # SGLang resumes nothing that it has not released
        if wanted:
            await self._call("resume", wanted)
            self._asleep = [tag for tag in self._asleep if tag not in wanted]

    async def _begin_weights(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        await self._call("begin", manifest.to_plain(), dict(handle), version)

    async def weights_load(self, index: int) -> None:
        """Take one published bucket."""
        await self._call("load", index)

    async def _commit_weights(self) -> list[ReceiverReport]:
        return [ReceiverReport(**await self._call("commit"))]

    async def _abort_weights(self) -> bool:
        answer = await self._call("abort")
        return bool(answer["intact"] and answer["version"] == self.policy_version)

    # ------------------------------------------------------------------ its process

    async def _call(self, call: str, *args: Any) -> Any:
        """Have something done by the engine's process.

        Raises:
            EngineDeadError: It is gone.
            WeightSyncError: A sync failed there.
            RolloutError: Something else did.
        """
        return await self._send(call, *args)

    def _send(self, call: str, *args: Any) -> asyncio.Future[Any]:
        if self._writer is None or self._reading is None or self._reading.done():
            raise EngineDeadError(self._epitaph())
        self._number += 1
        answer = self._expect(self._number)
        self._writer.write(encode({"id": self._number, "call": call, "args": args}))
        return answer

    def _expect(self, number: int) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer

        def forget(done: asyncio.Future[Any]) -> None:
            self._answers.pop(number, None)
            if not done.cancelled():
                done.exception()  # of a request that nobody waits for any longer

        answer.add_done_callback(forget)
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(GarbledError):  # a process that writes something else is as good as dead
            while (message := await receive(reader)) is not None:
                answer = self._answers.get(message["id"])
                if answer is None or answer.done():
                    continue
                if "sync_error" in message:
                    answer.set_exception(WeightSyncError(message["sync_error"]))
                elif "error" in message:
                    answer.set_exception(RolloutError(f"SGLang failed: {message['error']}"))
                else:
                    answer.set_result(message["result"])
        self._fail_all(EngineDeadError(self._epitaph()))

    def _fail_all(self, error: EngineDeadError) -> None:
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(error)

    def _epitaph(self) -> str:
        if self._process is None:
            return "the SGLang engine is not running"
        code = self._process.poll()
        ended = "is gone" if code is None else exit_in_words(code)
        known = (NEEDED.why_it_ended(self._process.pid), why_memory_ended_it())
        reason = next((f". {reason}" for reason in known if reason is not None), f"; {printed_last()}")
        return f"the SGLang engine (pid {self._process.pid}) {ended}{reason}"


def sglang_folder() -> Path | None:
    """Return the folder of the installed SGLang without importing it; None where there is none."""
    found = importlib.util.find_spec("sglang")
    return None if found is None else Path((found.submodule_search_locations or [""])[0])


def require_supported(package: Path | None) -> None:
    """Refuse an SGLang that this was not written for.

    Args:
        package: Its folder; None where it is not installed.

    Raises:
        RolloutError: It is not there, or of another release.
    """
    install = f"pip install sglang=={VERSION}, name servers of yours with rollout.server.urls, or use rollout.name=vllm"
    if package is None:
        raise RolloutError(f"rollout.name=sglang without addresses needs SGLang, which is not installed: {install}")
    file = package / "_version.py"
    version = str(runpy.run_path(str(file)).get("__version__")) if file.is_file() else "unknown"
    if version != VERSION:
        raise RolloutError(
            f"SGLang {version} is installed, and rollout.name=sglang without addresses is written for {VERSION}: "
            f"{install}"
        )


def _sleeps(setup: EngineSetup) -> bool:
    return setup.sleeps and setup.device.type == "cuda"


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT_S)
    stop_child(process, _TITLE)
