"""A reward that a server computes: OpenRLHF's reward servers, or a reward model behind vLLM or SGLang."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hrl.reward.library.base import FAILURE, readable, require, text_of_turn
from hrl.reward.library.endpoint import (
    EndpointError,
    Failures,
    NotNowError,
    Pauses,
    post,
    require_address,
    shown_reply,
)

if TYPE_CHECKING:
    import aiohttp

    Chat = Sequence[Mapping[str, Any]]

_PROTOCOLS = ("openrlhf", "vllm", "sglang")
_LARGEST = 3.4028234663852886e38
"""Of float32, in which rewards are computed."""
_MOST_LOGS = 64
_OWN_NAMES = frozenset({"score", "scores", "turn_scores", "acc", "pred", FAILURE})
"""What is read of a reward function's results, which a server's further numbers may not replace."""


class Remote:
    """Posts each sample to a server and takes the number that it answers with.

    - `openrlhf`: `POST url` with `{"query": [text], "prompts": [text], "labels": [answer]}`, answered with
      `{"rewards": [number], "scores": [number], "extra_logs": {…}}`, as OpenRLHF's `--reward.remote_url` has it. The
      reward is trained on; `scores` and `extra_logs` become parts.
    - `vllm`: `POST url/classify` with the chat, which the server renders with the model's own chat template; the score
      is the head's, without an activation. `vllm serve MODEL --runner pooling` serves a sequence classifier so.
    - `sglang`: `POST url/v1/embeddings` with the text, as `--is-embedding` serves a reward model.

    Samples are posted one by one, many at once. Several addresses take turns; a request that fails is sent to the next
    one, until the deadline. A redirect is not followed.

    Args:
        url: Address of the server, or several; of vLLM and SGLang with or without the `/v1` of OpenAI's protocol.
        protocol: How it is asked: `openrlhf`, `vllm` or `sglang`.
        model: The model's name at the server, for `vllm` and `sglang`.
        tokenizer: Folder or hub id of a tokenizer, by whose chat template prompt and answer become the text of
            `openrlhf` and `sglang`; None joins the texts of the chat, one after the other.
        api_key: `env:NAME`, where the environment variable NAME has the key; None sends none.
        on_failure: Whether a sample without a score is left out (`skip`) or stops the run as `reward.on_error` says
            (`error`). An address or key that is refused is an error in any case, and so is a failure after 32 others in
            a row.
        max_concurrency: Most requests at once in a process.
        deadline_s: Seconds that one score may take, with all repetitions. In a run 0.9 of `reward.timeout_s`.
        request_s: Seconds that one request may take; 0.6 of `deadline_s` by default.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        protocol: Literal["openrlhf", "vllm", "sglang"] = "openrlhf",
        model: str | None = None,
        tokenizer: str | None = None,
        api_key: str | None = None,
        on_failure: Literal["skip", "error"] = "error",
        max_concurrency: int = 32,
        deadline_s: float = 27.0,
        request_s: float | None = None,
    ) -> None:
        import aiohttp

        urls = [url] if isinstance(url, str) else list(url)
        require(bool(urls), "url is empty")
        for one in urls:
            require_address("url", one)
        require(protocol in _PROTOCOLS, f"protocol is {protocol!r}, must be one of {', '.join(_PROTOCOLS)}")
        require(protocol == "openrlhf" or model is not None, f"protocol {protocol} needs model, its name at the server")
        require(
            protocol != "vllm" or tokenizer is None, "protocol vllm renders chats at the server: leave out tokenizer"
        )
        require(on_failure in ("skip", "error"), f"on_failure is {on_failure!r}, must be skip or error")
        require(max_concurrency >= 1, f"max_concurrency is {max_concurrency}, must be at least 1")
        require(deadline_s > 0, f"deadline_s is {deadline_s}, must be more than 0")
        if api_key is not None and api_key.startswith("env:"):
            name = api_key.removeprefix("env:")
            require(bool(os.environ.get(name)), f"the environment variable {name} of api_key is not set")
            api_key = os.environ[name]
        end = {"openrlhf": "", "vllm": "/classify", "sglang": "/v1/embeddings"}[protocol]
        self._aiohttp = aiohttp
        self._urls = itertools.cycle([f"{one.rstrip('/').removesuffix('/v1')}{end}" if end else one for one in urls])
        self._protocol, self._model = protocol, model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._failures = Failures(skips=on_failure == "skip")
        self.max_concurrency = max_concurrency
        self._deadline_s = deadline_s
        self._request_s = 0.6 * deadline_s if request_s is None else request_s
        self._tokenizer: Any = None
        if tokenizer is not None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
            require(self._tokenizer.chat_template is not None, f"tokenizer {tokenizer} has no chat template")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, response: str, conversation: Chat, ground_truth: Any = None) -> dict[str, Any]:
        """Return the score, and what else the server says; or no score, and why as `failure`.

        Raises:
            EndpointRefusedError: The server refuses requests like this one.
            EndpointError: There is no score, and `on_failure` is `error`, or there has been none for a while.
        """
        try:
            found = await self._ask(self._body(response, conversation, ground_truth))
        except EndpointError as error:
            return self._failures.outcome(error)
        self._failures.over()
        return found

    # ------------------------------------------------------------------ what is sent

    def _body(self, response: str, conversation: Chat, ground_truth: Any) -> dict[str, Any]:
        if self._protocol == "vllm":
            chat = [{"role": str(turn["role"]), "content": text_of_turn(turn)} for turn in conversation]
            return {
                "model": self._model,
                "messages": chat,
                "add_generation_prompt": False,
                "use_activation": False,
            }
        prompt, query = self._texts(response, conversation)
        if self._protocol == "sglang":
            return {"model": self._model, "input": query}
        return {"query": [query], "prompts": [prompt], "labels": [ground_truth]}

    def _texts(self, response: str, conversation: Chat) -> tuple[str, str]:
        """Return prompt, and prompt with response, as text."""
        before = [dict(turn) for turn in conversation[:-1]]
        if self._tokenizer is None:
            prompt = "".join(map(text_of_turn, before))
            return prompt, readable(prompt + response)
        render = self._tokenizer.apply_chat_template
        prompt = str(render(before, tokenize=False, add_generation_prompt=True))
        return prompt, readable(str(render([*before, dict(conversation[-1])], tokenize=False)))

    # ------------------------------------------------------------------ asking

    async def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask until there is a score or no time is left for another request."""
        self._be_here()
        pauses = Pauses(self._deadline_s)
        async with self._gate:
            while True:
                pauses.tries += 1
                left_s = pauses.end - time.monotonic()
                if left_s <= 0:
                    raise EndpointError(f"no turn within {self._deadline_s:g} s: raise max_concurrency, or add servers")
                url = next(self._urls)
                try:
                    check = "url, model and api_key; a redirect is not followed"
                    content = await post(self._session, url, body, min(self._request_s, left_s), check)
                    return self._read(url, content)
                except NotNowError as error:
                    await pauses.rest(error)

    def _be_here(self) -> None:
        """Open a session on the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._gate = asyncio.Semaphore(self.max_concurrency)
            self._session: aiohttp.ClientSession = self._aiohttp.ClientSession(headers=self._headers)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._loop is not None:
            await self._session.close()
            self._loop = None

    # ------------------------------------------------------------------ what comes back

    def _read(self, url: str, content: bytes) -> dict[str, Any]:
        shown = shown_reply(content)
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise EndpointError(f"{url} sent no JSON: {shown}") from error
        if self._protocol == "openrlhf":
            return self._of_openrlhf(url, reply, shown)
        field, kind = {"vllm": ("probs", "POST /classify"), "sglang": ("embedding", "POST /v1/embeddings")}[
            self._protocol
        ]
        try:
            (found,) = reply["data"]
            numbers = found[field]
        except (LookupError, TypeError, ValueError) as error:
            raise EndpointError(f"{url} sent no answer to {kind} for one text: {shown}") from error
        if not isinstance(numbers, list) or len(numbers) != 1:
            count = len(numbers) if isinstance(numbers, list) else "no list of"
            raise EndpointError(
                f"{url} sent {count} numbers for a text, and a reward model has one: is {self._model} served as a "
                f"sequence classifier with one label? {shown}"
            )
        return {"score": _number(url, numbers[0], field, shown)}

    def _of_openrlhf(self, url: str, reply: Any, shown: str) -> dict[str, Any]:
        if not isinstance(reply, Mapping) or "rewards" not in reply:
            raise EndpointError(f"{url} sent no object with 'rewards': {shown}")
        score = _number(url, _only(url, reply["rewards"], "rewards", shown), "rewards", shown)
        logs = reply.get("extra_logs") or {}
        if not isinstance(logs, Mapping) or len(logs) > _MOST_LOGS:
            raise EndpointError(f"{url} sent 'extra_logs' that are no object of at most {_MOST_LOGS} numbers: {shown}")
        found = {}
        for name, value in logs.items():  # none of which takes the place of what a reward function says itself
            found[f"log_{name}" if name in _OWN_NAMES else str(name)] = _number(
                url, _only(url, value, str(name), shown), str(name), shown
            )
        if reply.get("scores") is not None:
            found["scores"] = _number(url, _only(url, reply["scores"], "scores", shown), "scores", shown)
        return found | {"score": score}


def _only(url: str, value: Any, name: str, shown: str) -> Any:
    """Return the one entry of a list, or a bare number, which OpenRLHF takes too."""
    if isinstance(value, list):
        if len(value) != 1:
            raise EndpointError(f"{url} sent {len(value)} {name} for one sample: {shown}")
        return value[0]
    return value


def _number(url: str, value: Any, name: str, shown: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EndpointError(f"{url} sent {name!r} that is no number: {shown}")
    if not abs(value) <= _LARGEST:  # an integer may be too large for any float, and NaN is larger than nothing
        raise EndpointError(f"{url} sent {name!r} {value}, which is not finite in float32: {shown}")
    return float(value)
