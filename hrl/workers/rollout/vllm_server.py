"""vLLM's own server (`vllm serve`), started by somebody else with hrl's worker extension.

Tokens go and come through `/v1/completions`, weights through `/collective_rpc`, which the server has in its development
mode (`VLLM_SERVER_DEV_MODE=1`). The extension (`vllm_worker.RolloutWorkerExtension`) is the receiving end of hrl's own
weight sync: it checks every tensor, reads back what it wrote, and knows which version of which run it holds.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from hrl.models.hf_config import engine_overrides, load_config, model_differences
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineSetup, FinishReason, SampleOutput
from hrl.workers.rollout.server_engine import (
    HALF_WRITTEN,
    HEALTH_TIMEOUT_S,
    OF_SYNC,
    QUESTION,
    QUESTION_TIMEOUT_S,
    ServedEngine,
    Server,
    read_tokens,
)
from hrl.workers.rollout.server_http import ONCE, A, Answer, Patience, Reply, ServerGoneError, ServerRefusesError, read
from hrl.workers.weight_sync import shared_memory
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError

EXTENSION = "hrl.workers.rollout.vllm_worker.RolloutWorkerExtension"
_FINISH_REASONS: dict[Any, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_RPC = "/collective_rpc"
_MOST_REPORT_BYTES = 1 << 24
_RESET_PAUSE_S = 0.2
_LONGEST_ERROR = 2000
_SHARE_OF_QUESTIONS = 0.05
_LONGEST_WAIT_S = 1.0
"""For the answers of others, so that one question stands for all of them."""


class _Model(Answer):
    id: str


class _Models(Answer):
    """Of `/v1/models`."""

    data: Annotated[list[_Model], Field(min_length=1)]


class _State(Answer):
    """What `RolloutWorkerExtension.hrl_state` says."""

    mark: str | None
    version: int | None
    half_written: bool = False


class _Look(Answer):
    """What `RolloutWorkerExtension.hrl_look` says."""

    model: str
    config: dict[str, Any]
    dtype: str
    max_model_len: int
    logprobs_mode: str
    generation_config: str
    cuts_seeded_prompts: bool = False
    rounds_logits: bool = False
    data_parallel_size: int = 1
    half_written: bool = False


class _Report(Answer):
    """A `ReceiverReport`."""

    receiver: str
    version: int
    tensors: int
    nbytes: int
    read_back: int


def server_command(setup: EngineSetup, url: str, *, on_cpu: bool = False) -> str:
    """Return the command by which a server is started that a run can sample from.

    Args:
        setup: What the engine is opened with.
        url: Where the server is to be reached. Of a machine's own network it names one address, never all of them.
        on_cpu: The server is known to run on a CPU.
    """
    config, model, place = setup.config, setup.model, urlsplit(url)
    own = engine_overrides(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    overrides = shlex.quote(json.dumps({**own, "head_dtype": "float32"}))
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(model.path)} "
        f"--host {place.hostname} --port {place.port or 80} "
        f"--dtype {config.dtype} --max-model-len {model.max_model_len} --worker-extension-cls {EXTENSION} "
        f"--logprobs-mode processed_logprobs --generation-config vllm --hf-overrides {overrides}"
        f"{' --trust-remote-code' * model.trust_remote_code}{' --no-enable-chunked-prefill' * on_cpu}"
    )


class VllmServer(Server):
    """One `vllm serve`."""

    def __init__(self, url: str, setup: EngineSetup) -> None:
        super().__init__(url, setup)
        self._model: str | None = None
        self._asking = asyncio.Lock()
        self._next_answer: asyncio.Task[int] | None = None
        self._num_waiting = 0
        self._all_wait = asyncio.Event()
        self._ask_not_before = 0.0

    async def look(self, timeout_s: float) -> dict[str, str]:
        """Check health, model, settings and what an answer has; see `Server.look`."""
        await self.address.get("/health", timeout_s=timeout_s)
        models = await self.address.get("/v1/models", timeout_s=timeout_s)
        self._model = read(_Models, models.json(), models.url).data[0].id
        found = await self._looked(timeout_s)
        self._require_fit(found)
        told = {"model": f"{self._model}, {found.dtype}", "longest": f"{found.max_model_len} tokens"}
        if found.half_written:  # which it may not survive to sample from, and which a sync mends
            return told | {HALF_WRITTEN: "half written by a sync that did not end; the first sync of a run mends them"}
        await self._try(timeout_s)
        return told

    async def health(self) -> None:
        """Ask `/health`."""
        await self.address.get("/health", timeout_s=HEALTH_TIMEOUT_S)

    async def sample(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        """Sample one response, and have the server say which weights it holds after it."""
        reply = await self.address.post_in_turn(
            "/v1/completions",
            completion_request(self._model, prompt_ids, sampling, self.setup.tokens.stop),
            timeout_s=self.setup.config.server.timeout_s,
            most_bytes=self.most_bytes(prompt_ids, sampling),
        )
        token_ids, log_probs, reason = read_completion(reply, prompt_ids, request_id)
        return SampleOutput(token_ids, log_probs, reason, await self._held_from_now())

    async def held_version(self, timeout_s: float = QUESTION_TIMEOUT_S) -> int:
        """Ask every process of the server which weights it holds."""
        states = await self._call("hrl_state", kind=_State, timeout_s=timeout_s, patience=QUESTION)
        held = {(state.mark, state.version) for state in states}
        for mark, version in held:
            if len(held) == 1 and mark == self.setup.run_mark and version is not None:
                return version
        raise ServerGoneError(
            f"{self.url} does not hold weights that this run has sent: was it started anew, or does another run use it?"
        )

    async def begin(self, manifest: Manifest, handle: Mapping[str, Any], version: int, timeout_s: float) -> None:
        """Announce a sync to every process of the server."""
        states = await self._call("hrl_state", kind=_State, timeout_s=timeout_s, patience=OF_SYNC)
        if any(state.mark != self.setup.run_mark for state in states):
            await self._do("hrl_join_run", self.setup.run_mark, timeout_s=timeout_s)
        else:
            await self._do("hrl_weights_abort", timeout_s=timeout_s)  # what is left of a sync that failed
        try:
            await self._do("hrl_weights_begin", manifest.to_plain(), dict(handle), version, timeout_s=timeout_s)
        except WeightSyncError as error:
            if handle["kind"] != shared_memory.KIND:
                raise
            raise WeightSyncError(
                f"{error}. A server in a container or on another machine can't read this one's memory: name a folder "
                "that both see with rollout.server.weights_folder"
            ) from error

    async def load(self, index: int, timeout_s: float) -> None:
        """Have a published bucket taken by every process of the server."""
        await self._do("hrl_weights_load", index, timeout_s=timeout_s)

    async def commit(self, timeout_s: float) -> list[ReceiverReport]:
        """Have the weights written, and the prefix cache dropped, which fails while somebody else's requests run."""
        answers = await self._call("hrl_weights_commit", kind=_Report, timeout_s=timeout_s, patience=OF_SYNC)
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not await self._drops_prefix_cache(timeout_s):
            if loop.time() > end:
                raise WeightSyncError(
                    f"{self.url} did not drop its prefix cache within {timeout_s:g} s, so keys and values of old "
                    "weights would be used: does somebody else send it requests? A run needs servers of its own"
                )
            await asyncio.sleep(_RESET_PAUSE_S)
        return [
            ReceiverReport(
                f"{self.url} {answer.receiver}", answer.version, answer.tensors, answer.nbytes, answer.read_back
            )
            for answer in answers
        ]

    async def _drops_prefix_cache(self, timeout_s: float) -> bool:
        reply = await self.address.post("/reset_prefix_cache", timeout_s=timeout_s, patience=OF_SYNC)
        return bool(reply.json().get("success"))

    async def abort(self, timeout_s: float) -> int:
        """Drop a sync in every process of the server, and return the version that it holds then.

        Raises:
            ServerGoneError: None that is whole and of this run.
        """
        await self._do("hrl_weights_abort", timeout_s=timeout_s)
        return await self.held_version(timeout_s)

    async def _held_from_now(self) -> int:
        """Return the version of a question that is asked after this call; those who wait together ask it once."""
        self._num_waiting += 1
        if self._num_waiting >= self.outstanding:
            self._all_wait.set()
        if self._next_answer is None:
            self._next_answer = asyncio.create_task(self._ask_in_turn())
        try:
            return await asyncio.shield(self._next_answer)
        finally:
            self._num_waiting -= 1

    async def _ask_in_turn(self) -> int:
        async with self._asking:
            # The question is asked of every process of the server, between two iterations. So it waits for further
            # answers to stand for, until it takes no more than its share of the time, or no request is under way.
            loop = asyncio.get_running_loop()
            self._all_wait.clear()
            with suppress(TimeoutError):
                if self._num_waiting < self.outstanding:
                    await asyncio.wait_for(self._all_wait.wait(), max(self._ask_not_before - loop.time(), 0.0))
            self._next_answer = None
            began = loop.time()
            try:
                return await self.held_version()
            finally:
                took = loop.time() - began
                self._ask_not_before = loop.time() + min(took / _SHARE_OF_QUESTIONS, _LONGEST_WAIT_S)

    async def _do(self, method: str, *args: Any, timeout_s: float) -> None:
        """Have the extension do a part of a sync whose answers say nothing; see `_call`."""
        await self._call(method, *args, kind=Answer, timeout_s=timeout_s, patience=OF_SYNC)

    async def _call(
        self, method: str, *args: Any, kind: type[A], timeout_s: float, patience: Patience = ONCE
    ) -> list[A]:
        """Call a method of the extension in every process of the server, and return the answers."""
        body = {"method": method, "args": list(args)}
        reply = await self.address.post(
            _RPC, body, timeout_s=timeout_s, most_bytes=_MOST_REPORT_BYTES, patience=patience
        )
        answers = reply.json().get("results")
        if not (isinstance(answers, list) and answers and all(isinstance(answer, dict) for answer in answers)):
            raise ServerRefusesError(f"{reply.url} gave no results of {method}: is it vLLM's server?")
        for answer in answers:
            if "error" in answer:
                raise WeightSyncError(f"{self.url}: {str(answer['error'])[:_LONGEST_ERROR]}")
        return [read(kind, answer, f"{reply.url} answered {method}") for answer in answers]

    async def _looked(self, timeout_s: float) -> _Look:
        how = f"start it with\n  {server_command(self.setup, self.url)}"
        try:
            answers = await self._call("hrl_look", kind=_Look, timeout_s=timeout_s)
        except ServerRefusesError as error:
            raise ServerRefusesError(f"{self.url} takes no weights ({error}): {how}") from error
        except ServerGoneError as error:
            raise ServerRefusesError(f"{self.url} has no worker extension of hrl ({error}): {how}") from error
        any_half = any(answer.half_written for answer in answers)
        return answers[0].model_copy(update={"half_written": any_half})

    def _require_fit(self, found: _Look) -> None:
        """Refuse a server whose model or settings are not this run's; says which, and how it is started."""
        source, config = self.setup.model, self.setup.config
        own = load_config(
            source.path, source.override_config, trust_remote_code=source.trust_remote_code
        ).get_text_config()
        wrong = [
            f"its model {found.model} has {name}={theirs}, and {source.path} has {ours}"
            for name, ours, theirs in model_differences(own, found.config)
        ]
        if found.dtype != config.dtype:
            wrong.append(f"its weights are {found.dtype}, and those that it gets {config.dtype} (rollout.dtype)")
        if found.max_model_len < source.max_model_len:
            wrong.append(f"its longest sequence is {found.max_model_len}, and the run's {source.max_model_len}")
        if found.logprobs_mode != "processed_logprobs":
            wrong.append(
                f"its log-probs are {found.logprobs_mode}, which are not those of the distribution that it samples"
            )
        if found.generation_config != "vllm":
            wrong.append("it takes settings of sampling from the model's folder")
        if found.cuts_seeded_prompts:
            wrong.append("it cuts prompts, which on a CPU fails for requests with a seed (--no-enable-chunked-prefill)")
        if found.rounds_logits:
            wrong.append("it rounds logits, by which log-probs move (--hf-overrides)")
        if found.data_parallel_size > 1:
            wrong.append("it has several engines behind one address (--data-parallel-size): start one server for each")
        if wrong:
            command = server_command(self.setup, self.url, on_cpu=found.cuts_seeded_prompts)
            raise ServerRefusesError(
                f"{self.url} does not fit this run: {'; '.join(wrong)}. Start it with\n  {command}"
            )

    async def _try(self, timeout_s: float) -> None:
        """Have one token sampled, to see what an answer has."""
        stop = self.setup.tokens.stop
        prompt = [stop[0] if stop else 0]
        body = completion_request(self._model, prompt, SamplingParams(max_tokens=1), stop)
        reply = await self.address.post("/v1/completions", body, timeout_s=timeout_s)
        read_completion(reply, prompt, "of the look at the server")


class VllmServers(ServedEngine[VllmServer]):
    """vLLM's own servers."""

    name = "vLLM servers"
    kind = VllmServer

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.weights_folder = setup.config.server.weights_folder

    async def _begin_weights(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        self._raise_all()
        await self._on_all(lambda server: server.begin(manifest, handle, version, self._call_s))

    async def weights_load(self, index: int) -> None:
        """Have one published bucket taken by every server."""
        await self._on_all(lambda server: server.load(index, self._call_s))

    async def _commit_weights(self) -> list[ReceiverReport]:
        version = self._version_under_way()

        async def commit(server: VllmServer) -> list[ReceiverReport]:
            reports = await server.commit(self._call_s)
            await self._require_version(server, version)
            return reports

        return [report for reports in await self._on_all(commit) for report in reports]

    async def _abort_weights(self) -> bool:
        up = [server for server in self.servers if server.why_down is None]
        for server, held in await self._each(up, lambda server: server.abort(self._call_s)):
            if isinstance(held, BaseException):
                server.fall(f"a weight sync was aborted, after which {held}")
            elif held != self.policy_version:  # the sync failed elsewhere, when this one had finished
                server.fall(f"it holds version {held} already, whose sync was aborted")
        return any(server.why_down is None for server in up)


def completion_request(
    model: str | None, prompt_ids: Sequence[int], sampling: SamplingParams, stop: Sequence[int]
) -> dict[str, Any]:
    """Return the body of `/v1/completions`.

    Args:
        model: As the server calls it.
        prompt_ids: The context.
        sampling: How the response is sampled.
        stop: Tokens at which it ends, and no others.
    """
    greedy = sampling.temperature == 0.0
    return {
        "model": model,
        "prompt": list(prompt_ids),
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": -1 if greedy else sampling.top_k,
        "seed": None if greedy else sampling.seed,
        # Written out: what is left out comes from the server's own defaults.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "stop_token_ids": list(stop),
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }


def read_completion(
    reply: Reply, prompt_ids: Sequence[int], request_id: str
) -> tuple[list[int], list[float], FinishReason]:
    """Return tokens, log-probs and the reason of the end of a completion.

    Args:
        reply: Of `/v1/completions`.
        prompt_ids: What was sent.
        request_id: Of the request, for messages.

    Raises:
        ServerRefusesError: It has no token ids, no log-probs, another prompt, or numbers that can't be.
    """
    whole = reply.json()
    choices = whole.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(choice, dict):
        raise ServerRefusesError(f"{reply.url} answered request {request_id} without one choice: is it vLLM's server?")
    if choice.get("prompt_token_ids", prompt_ids) != list(prompt_ids):
        raise ServerRefusesError(f"{reply.url} answered request {request_id} to another prompt than it was sent")
    log_probs = choice.get("logprobs")
    log_probs = log_probs.get("token_logprobs") if isinstance(log_probs, dict) else None
    finish = choice.get("finish_reason")
    reason = _FINISH_REASONS.get(finish) if isinstance(finish, str) else None
    return read_tokens(reply.url, request_id, choice.get("token_ids"), log_probs, reason)
