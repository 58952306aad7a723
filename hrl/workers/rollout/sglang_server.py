"""SGLang's server (`python -m sglang.launch_server`), started by somebody else.

Written against its release 0.5.23, whose requests `tests/contracts` has, and run with it on a CPU alone. Tokens go and
come through its own `/generate`, which names the weights of every answer. Weights are saved as a folder, which every
server loads; its checksum then has to be that of the other servers, and another than before if other weights were sent.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hrl.files import expanded
from hrl.models.hf_config import engine_overrides, load_config
from hrl.workers.requests import SamplingParams
from hrl.workers.rollout.base import EngineSetup, FinishReason, SampleOutput
from hrl.workers.rollout.server_engine import (
    HEALTH_TIMEOUT_S,
    OF_SYNC,
    QUESTION,
    QUESTION_TIMEOUT_S,
    ServedEngine,
    Server,
    read_tokens,
)
from hrl.workers.rollout.server_http import ServerGoneError, ServerRefusesError, excerpt
from hrl.workers.weight_sync.receiver import WeightReceiver
from hrl.workers.weight_sync.saved_folder import SavedFolderWriter
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport, WeightSyncError

GENERATE, MODEL_INFO, SERVER_INFO, HEALTH = "/generate", "/model_info", "/server_info", "/health"
UPDATE, FLUSH, CHECK = "/update_weights_from_disk", "/flush_cache", "/weights_checker"
_FINISH_REASONS: dict[Any, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_PREFIX = "hrl"
_MOST_CHECKSUM_BYTES = 1 << 26
_FLUSH_TIMEOUT_S = 10.0


def server_command(setup: EngineSetup) -> str:
    """Return the command by which a server is started that a run can sample from."""
    model = setup.model
    own = engine_overrides(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    overrides = f" --json-model-override-args {shlex.quote(json.dumps(own))}" if own else ""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(model.path)} --dtype {setup.config.dtype} "
        f"--context-length {model.max_model_len} --enable-deterministic-inference --enable-fp32-lm-head "
        f"--sampling-defaults openai{overrides}{' --trust-remote-code' * model.trust_remote_code}"
    )


def generate_request(prompt_ids: Sequence[int], sampling: SamplingParams, stop: Sequence[int]) -> dict[str, Any]:
    """Return the body of `/generate`."""
    greedy = sampling.temperature == 0.0
    settings: dict[str, Any] = {
        "n": 1,
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": -1 if greedy else sampling.top_k,
        # Written out: what is left out comes from the server's own defaults.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(stop),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if not greedy:
        settings["sampling_seed"] = sampling.seed
    return {
        "input_ids": list(prompt_ids),
        "sampling_params": settings,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": False,
    }


def update_request(folder: Path, weight_version: str) -> dict[str, Any]:
    """Return the body of `/update_weights_from_disk`."""
    return {
        "model_path": str(folder),
        "load_format": "safetensors",
        "weight_version": weight_version,
        "abort_all_requests": False,
        "flush_cache": True,
    }


class SglangServer(Server):
    """One server of SGLang."""

    def __init__(self, url: str, setup: EngineSetup) -> None:
        super().__init__(url, setup)
        self.checksum: str | None = None

    async def look(self, timeout_s: float) -> dict[str, str]:
        """Check model, settings and what an answer has; see `Server.look`."""
        model = (await self.address.get(MODEL_INFO, timeout_s=timeout_s)).json()
        server = (await self.address.get(SERVER_INFO, timeout_s=timeout_s, most_bytes=_MOST_CHECKSUM_BYTES)).json()
        self._require_fit(model, server)
        stop = self.setup.tokens.stop
        prompt = [stop[0] if stop else 0]
        body = generate_request(prompt, SamplingParams(max_tokens=1), stop)
        reply = await self.address.post(GENERATE, body, timeout_s=timeout_s)
        read_generated(reply.json(), reply.url, stop, "of the look at the server")
        return {"model": str(model.get("model_path")), "version": f"SGLang {server.get('version')}"}

    async def health(self) -> None:
        """Ask `/health`, for which the server samples a token if it has nothing else to do."""
        await self.address.get(HEALTH, timeout_s=HEALTH_TIMEOUT_S)

    async def sample(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> SampleOutput:
        """Sample one response, which names the weights that it was sampled with."""
        reply = await self.address.post_in_turn(
            GENERATE,
            generate_request(prompt_ids, sampling, self.setup.tokens.stop),
            timeout_s=self.setup.config.server.timeout_s,
            most_bytes=self.most_bytes(prompt_ids, sampling),
        )
        whole = reply.json()
        token_ids, log_probs, reason, weights = read_generated(whole, reply.url, self.setup.tokens.stop, request_id)
        return SampleOutput(token_ids, log_probs, reason, self._version_of(weights))

    async def held_version(self, timeout_s: float = QUESTION_TIMEOUT_S) -> int:
        """Ask which weights the server holds."""
        info = (await self.address.get(MODEL_INFO, timeout_s=timeout_s, patience=QUESTION)).json()
        return self._version_of(info.get("weight_version"))

    async def take(self, folder: Path, version: int, timeout_s: float) -> str:
        """Have the server load a folder and drop what it has computed; return the checksum of what it holds then.

        Raises:
            ServerError: It does not.
        """
        body = update_request(folder, f"{_PREFIX}-{self.setup.run_mark}-{version}")
        answer = (await self.address.post(UPDATE, body, timeout_s=timeout_s, patience=OF_SYNC)).json()
        if answer.get("success") is not True:
            said = excerpt(str(answer.get("message")))
            raise ServerRefusesError(f"{self.url}{UPDATE} did not take the weights: {said}")
        await self.address.post(f"{FLUSH}?timeout={_FLUSH_TIMEOUT_S:g}", timeout_s=timeout_s, patience=OF_SYNC)
        reply = await self.address.post(
            CHECK, {"action": "checksum"}, timeout_s=timeout_s, most_bytes=_MOST_CHECKSUM_BYTES, patience=OF_SYNC
        )
        checksum = reply.json().get("per_engine_checksum")
        if not isinstance(checksum, str):
            raise ServerRefusesError(f"{reply.url} names no checksum of its weights: is the server older than 0.5.23?")
        return checksum

    def _version_of(self, weights: Any) -> int:
        parts = str(weights).split("-")
        is_ours = len(parts) == 3 and parts[0] == _PREFIX and parts[2].isdecimal() and len(parts[2]) < 20
        if is_ours and parts[1] == self.setup.run_mark:
            return int(parts[2])
        raise ServerGoneError(
            f"{self.url} holds weights {excerpt(str(weights))}, which this run has not sent: was it started "
            "anew, or does another run use it?"
        )

    def _require_fit(self, model: Mapping[str, Any], server: Mapping[str, Any]) -> None:
        source, config = self.setup.model, self.setup.config
        own = load_config(source.path, source.override_config, trust_remote_code=source.trust_remote_code)
        wrong = []
        if model.get("is_generation") is not True:
            wrong.append("it does not generate text")
        if model.get("architectures") != own.architectures:
            wrong.append(f"its model is {model.get('architectures')}, and {source.path} is {own.architectures}")
        if model.get("preferred_sampling_params"):
            wrong.append("it has settings of sampling of its own (--preferred-sampling-params)")
        if server.get("dtype") not in (config.dtype, "auto"):
            wrong.append(f"its weights are {server.get('dtype')}, and those that it gets {config.dtype}")
        longest = server.get("context_length")
        if isinstance(longest, int) and longest < source.max_model_len:
            wrong.append(f"its longest sequence is {longest}, and the run's {source.max_model_len}")
        if server.get("enable_deterministic_inference") is not True:
            wrong.append("without --enable-deterministic-inference it does not follow seeds")
        if server.get("enable_fp32_lm_head") is not True:
            wrong.append("it rounds logits, by which log-probs move (--enable-fp32-lm-head)")
        # Beside its architecture all that a server shows of its model's configuration.
        given = server.get("json_model_override_args") or "{}"
        wanted = engine_overrides(source.path, source.override_config, trust_remote_code=source.trust_remote_code)
        if _overrides(given) != wanted:
            wrong.append(f"the overrides of its model are {excerpt(str(given))}, and the run's {json.dumps(wanted)}")
        if wrong:
            raise ServerRefusesError(
                f"{self.url} does not fit this run: {'; '.join(wrong)}. Start it with\n  {server_command(self.setup)}"
            )


class SglangServers(ServedEngine[SglangServer]):
    """SGLang's servers."""

    name = "SGLang servers"
    kind = SglangServer

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        folder = setup.config.server.weights_folder
        if folder is None:
            raise ServerRefusesError(
                "rollout.name=sglang needs rollout.server.weights_folder, which its servers see too"
            )
        self._writer = SavedFolderWriter(Path(setup.model.path), expanded(folder))
        self._receiver = WeightReceiver(self._writer, "folder for SGLang's servers")
        self._thread = ThreadPoolExecutor(1, "sglang-weights")
        self._digest = ""
        self._is_loading = self._is_over = False

    async def shutdown(self) -> None:
        """Close the connections, and remove the folder of the weights."""
        await super().shutdown()
        if not self._is_over:
            self._is_over = True
            await self._in_thread(self._writer.close)
            self._thread.shutdown(wait=False)

    async def _begin_weights(self, manifest: Manifest, handle: Mapping[str, Any], version: int) -> None:
        self._raise_all()
        self._is_loading = False
        await self._in_thread(self._receiver.begin, manifest, handle, version)

    async def weights_load(self, index: int) -> None:
        """Take one published bucket."""
        await self._in_thread(self._receiver.load, index)

    async def _commit_weights(self) -> list[ReceiverReport]:
        version, writer = self._version_under_way(), self._writer
        report = await self._in_thread(self._receiver.commit)
        folder = writer.folder
        if folder is None:
            raise WeightSyncError("the folder of the weights was not written")

        async def take(server: SglangServer) -> tuple[SglangServer, str]:
            checksum = await server.take(folder, version, self._call_s)
            if writer.digest != self._digest and checksum == server.checksum:
                raise WeightSyncError(
                    f"{server.url} has the checksum of the weights before, {checksum[:16]}…, although others were sent"
                )
            await self._require_version(server, version)
            server.checksum = checksum
            return server, checksum

        self._is_loading = True
        taken = await self._on_all(take)
        self._is_loading = False
        sums = {checksum for _, checksum in taken}
        if len(sums) > 1:
            each = ", ".join(f"{server.url}: {checksum[:16]}…" for server, checksum in taken)
            raise WeightSyncError(
                f"servers of the same folder hold different weights ({each}): are their settings equal?"
            )
        self._digest = writer.digest
        await self._in_thread(writer.drop)  # also SGLang's own way back from a failed load reads no earlier folder
        return [report]

    async def _abort_weights(self) -> bool:
        # Nothing was loaded unless the commit had begun, after which nobody knows what each server holds.
        return await self._in_thread(self._receiver.abort) and not self._is_loading

    async def _in_thread(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)


def _overrides(given: Any) -> Any:
    try:
        return json.loads(given)
    except (TypeError, ValueError, RecursionError):
        return None


def read_generated(
    whole: Mapping[str, Any], of: str, stop: Sequence[int], request_id: str
) -> tuple[list[int], list[float], FinishReason, str | None]:
    """Return tokens, log-probs, the reason of the end, and the name of the weights of an answer of `/generate`.

    Args:
        whole: The answer.
        of: Who gave it, for messages.
        stop: Tokens at which a response ends.
        request_id: Of the request, for messages.

    Raises:
        ServerRefusesError: It lacks one of these, has a response of several weights, or ended at another token.
    """
    info = whole.get("meta_info")
    if not isinstance(info, dict):
        raise ServerRefusesError(f"{of} answered request {request_id} without meta_info: is it SGLang's server?")
    entries = info.get("output_token_logprobs")
    if not (isinstance(entries, list) and all(isinstance(entry, list) and len(entry) >= 2 for entry in entries)):
        entries = []
    finish = info.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else None
    kind = kind if isinstance(kind, str) else None
    token_ids, numbers, reason = read_tokens(
        of, request_id, whole.get("output_ids"), [entry[0] for entry in entries], _FINISH_REASONS.get(kind)
    )
    if token_ids != [entry[1] for entry in entries]:
        raise ServerRefusesError(f"{of} answered request {request_id} with log-probs of other tokens")
    if reason == "stop" and token_ids[-1:] and token_ids[-1] not in stop:
        raise ServerRefusesError(
            f"{of} ended request {request_id} at token {token_ids[-1]}, and responses end at {list(stop)}: its "
            "model's folder names another end than the run's"
        )
    weights = info.get("weight_version")
    spans = info.get("weight_versions")
    versions = [span.get("version") for span in spans if isinstance(span, dict)] if isinstance(spans, list) else []
    if any(version != weights for version in versions):
        found = excerpt(", ".join(sorted(set(map(str, versions)))))
        raise ServerRefusesError(f"{of} sampled request {request_id} with weights of {found}")
    return token_ids, numbers, reason, weights if isinstance(weights, str) else None
