"""A teacher that somebody else serves, against servers that answer as vLLM's does, or as none should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from hrl.config.distillation import TeacherModelConfig
from hrl.workers.rollout.scoring_server import Scores, look_at_each, opened, read_scores, score_each
from hrl.workers.rollout.server_http import MOST_TRIES, Reply, ServerGoneError, ServerRefusesError
from tests.workers.rollout.test_server_engine import Stub, html, running

WORDS = 8
#: Text and the first of its tokens that is scored.
TEXTS = [([1, 2, 3, 4], 2), ([5, 6], 1), ([7, 1, 2], 1), ([3, 3, 3], 2)]

LogProbs = Callable[[list[int]], torch.Tensor]
"""Of a text `(T,)`, the log-probs of every next token `(T, V)`."""


def by_arithmetic(tokens: list[int]) -> torch.Tensor:
    """A model whose next token depends on the one before it."""
    return (torch.arange(WORDS)[None] * torch.tensor(tokens)[:, None] % 5).double().log_softmax(-1)


@dataclass
class ScoringStub(Stub):
    """`/v1/completions` with `prompt_logprobs`, as vLLM writes them: the asked one and the likeliest, with ranks."""

    log_probs: LogProbs = by_arithmetic
    reach: int = 64

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models" and request.path not in self.instead:
            models = [{"id": name, "root": f"/models/{name}", "max_model_len": self.reach} for name in ("big", "small")]
            return web.json_response({"data": models})
        return await super().handle(request)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        await asyncio.sleep(self.delay_s)
        tokens, num_top = body["prompt"], body["prompt_logprobs"]
        places: list[dict[str, Any] | None] = [None]
        for row, token in zip(self.log_probs(tokens), tokens[1:], strict=False):
            ranked = row.argsort(descending=True).tolist()
            wanted = {**{known: rank for rank, known in enumerate(ranked[:num_top], 1)}, token: ranked.index(token) + 1}
            places.append({str(known): {"logprob": float(row[known]), "rank": rank} for known, rank in wanted.items()})
        return {"choices": [{"prompt_logprobs": places}]}


def ask(
    *urls: str,
    texts: Any = TEXTS,
    num_top: int = 3,
    model: str | None = None,
    words: int = WORDS,
    timeout_s: float = 5.0,
) -> list[Scores]:
    settings = TeacherModelConfig(model_path=model)

    async def scores() -> list[Scores]:
        async with opened(settings, urls, vocabulary=words, timeout_s=timeout_s, most_at_once=2) as servers:
            await look_at_each(servers, 32)
            return await score_each(servers, texts, num_top)

    return asyncio.run(scores())


def require_right(found: list[Scores], num_top: int = 3) -> None:
    for (tokens, first), scores in zip(TEXTS, found, strict=True):
        rows = by_arithmetic(tokens)[first - 1 : -1]
        np.testing.assert_allclose(scores.log_probs, rows.gather(1, torch.tensor(tokens[first:])[:, None])[:, 0], 1e-6)
        np.testing.assert_allclose(scores.top_log_probs, rows.topk(num_top).values, rtol=1e-6)
        np.testing.assert_allclose(rows.gather(1, torch.from_numpy(scores.top_ids).long()), scores.top_log_probs, 1e-6)


def test_scores_are_the_models_own_and_those_of_a_server_that_is_gone_come_from_the_others():
    stubs = ScoringStub(), ScoringStub()
    with running(*stubs) as end:
        require_right(ask(*(stub.url for stub in stubs), model="/models/small"))
        assert {body["model"] for body in stubs[0].bodies} == {"small"} and stubs[1].bodies
        assert all(body["max_tokens"] == 1 for body in stubs[0].bodies)
        (alone,) = ask(stubs[0].url, texts=TEXTS[:1], num_top=0)
        assert alone.top_ids.shape == (2, 0) and len(alone.log_probs) == 2
        end(stubs[0])
        require_right(ask(*(stub.url for stub in stubs)))
        end(stubs[1])
        with pytest.raises(
            ServerGoneError, match=r"no server of .*teacher_model\.server\.urls is left that scores"
        ) as error:
            ask(*(stub.url for stub in stubs))
        assert all(stub.url in str(error.value) for stub in stubs)


def test_a_server_that_stays_broken_is_asked_no_more(monkeypatch):
    monkeypatch.setattr("hrl.workers.rollout.server_http.FIRST_PAUSE_S", 0.01)
    broken, whole = ScoringStub(), ScoringStub()

    async def breaks(request: web.Request) -> web.Response:
        return web.json_response({"error": "no memory"}, status=500)

    broken.instead["/v1/completions"] = breaks
    with running(broken, whole):
        require_right(ask(broken.url, whole.url))
        # Two at once, each as often as one that falters.
        assert broken.calls["/v1/completions"] <= 2 * MOST_TRIES and len(whole.bodies) == len(TEXTS)


def test_a_server_that_hangs_costs_its_deadline_once(monkeypatch):
    """However many texts wait for a turn there."""
    monkeypatch.setattr("hrl.workers.rollout.server_http.FIRST_PAUSE_S", 0.01)
    hangs, whole = ScoringStub(), ScoringStub()

    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    hangs.instead["/v1/completions"] = never
    with running(hangs, whole):
        found = ask(hangs.url, whole.url, texts=TEXTS * 4, timeout_s=0.5)
        require_right(found[: len(TEXTS)])
        assert len(found) == len(whole.bodies) == 4 * len(TEXTS)
        assert hangs.calls["/v1/completions"] == 2, "those that it works on at once, and none behind them"


def test_the_first_scores_may_take_longer_than_a_runs_own(monkeypatch):
    """Before them a server on a CPU compiles."""
    stub, settings = ScoringStub(delay_s=0.3), TeacherModelConfig()

    async def score(**how: Any) -> Scores:
        async with opened(settings, [stub.url], vocabulary=WORDS, timeout_s=0.1, most_at_once=1) as (only,):
            return await only.score([1, 2, 3, 4], 2, 3, **how)

    with running(stub):
        asyncio.run(score(is_look=True))
        with pytest.raises(ServerGoneError, match="within 0.1 s; .* the deadline .trainer.timeouts.call_s. too short"):
            asyncio.run(score())
        monkeypatch.setattr("hrl.workers.rollout.scoring_server._FIRST_SCORES_S", 0.1)
        with pytest.raises(ServerGoneError, match=r"within 0.1 s; is the server overloaded\?$"):
            asyncio.run(score(is_look=True))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": "huge"}, "serves big, small, and not huge: set .*model_path to the name that it has there"),
        ({"words": 6}, "names token [67] among the likeliest, and the policy has 6"),
    ],
)
def test_a_server_of_another_model_is_refused(options, told):
    stub = ScoringStub()
    with running(stub), pytest.raises(ServerRefusesError, match=told):
        ask(stub.url, num_top=8, **options)


def test_a_server_that_reads_too_little_or_is_none_is_refused_by_its_own_key():
    short, page = ScoringStub(reach=32), ScoringStub()
    page.instead["/v1/models"] = html
    with running(short, page):
        with pytest.raises(ServerRefusesError, match="reads 32 tokens, and the run's longest row has 32: .*len 33"):
            ask(short.url)
        with pytest.raises(ServerRefusesError, match=r"does distillation\.teacher_models\.teacher_model\.server\.urls"):
            ask(page.url)


def entry(log_prob: Any) -> dict[str, Any]:
    return {"logprob": log_prob, "rank": 1}


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (None, "without log-probs of the prompt's 3 tokens"),
        ([None, {"2": entry(-1)}], "without log-probs of the prompt's 3 tokens"),
        ([None, {"2": entry(-1)}, {"4": entry(-1)}], "without a log-prob of token 3"),
        ([None, {"2": entry(-1)}, {"3": entry(float("nan"))}], "a log-prob that is not finite"),
        ([None, {"2": entry(-1)}, {"3": -1.0}], "log-probs of another form"),
        ([None, {"2": entry(-1)}, {"three": entry(-1)}], "log-probs of another form"),
        ([None, {"2": entry(-1)}, None], "log-probs of another form"),
        ([None, {"2": entry(-1)}, {"3": entry(-1)}], "with 1 of the 2 likeliest tokens"),
    ],
)
def test_answers_that_are_no_scores_are_refused(places, told):
    reply = Reply("http://here/v1/completions", json.dumps({"choices": [{"prompt_logprobs": places}]}).encode())
    with pytest.raises(ServerRefusesError, match=told):
        read_scores(reply, [1, 2, 3], 1, 2 if "likeliest" in told else 1, WORDS)
