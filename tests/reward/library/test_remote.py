"""Remote rewards against a real server on loopback: what is sent, what comes back, and what hostile servers do."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Literal

import pytest

from hrl.config.compose import compose_cli
from hrl.reward.library.base import ArgumentError
from hrl.reward.library.endpoint import EndpointError, EndpointRefusedError
from hrl.reward.library.remote import Remote
from hrl.reward.pool import RewardPool, RewardRow
from hrl.reward.spec import RewardSpec
from tests.reward.library.endpoint import Endpoint, Reply, serving

PATH = "/get_reward"
CHAT = [{"role": "user", "content": "7 + 5?"}, {"role": "assistant", "content": "12"}]


def sends(value: Any, **how: Any) -> Reply:
    return Reply(None, body=value if isinstance(value, bytes) else json.dumps(value).encode(), **how)


def address(endpoint: Endpoint, path: str = PATH) -> str:
    return endpoint.base_url.replace("/v1", path)


def scored(remote: Remote, *responses: str) -> list[Any]:
    """What the server says to samples at once."""

    async def ask() -> list[Any]:
        try:
            return await asyncio.gather(
                *(remote(text, [CHAT[0], {"role": "assistant", "content": text}], "12") for text in responses),
                return_exceptions=True,
            )
        finally:
            await remote.aclose()

    return asyncio.run(ask())


def test_a_server_of_openrlhf_is_asked_as_openrlhf_asks_it() -> None:
    reply = {"rewards": [1.5], "scores": [0.5], "extra_logs": {"length": [3]}}
    with serving(lambda number, body: sends(reply), PATH) as endpoint:
        (found,) = scored(Remote(address(endpoint)), "12")
    assert found == {"score": 1.5, "scores": 0.5, "length": 3.0}
    assert endpoint.requests == [{"query": ["7 + 5?12"], "prompts": ["7 + 5?"], "labels": ["12"]}]


def test_further_numbers_of_a_server_replace_no_reward() -> None:
    logs = {"score": [9], "scores": [8], "turn_scores": [7], "failure": [6], "length": [3]}
    with serving(lambda number, body: sends({"rewards": [1.5], "extra_logs": logs}), PATH) as endpoint:
        (found,) = scored(Remote(address(endpoint)), "12")
    assert found.pop("score") == 1.5
    assert found == {"log_score": 9, "log_scores": 8, "log_turn_scores": 7, "log_failure": 6, "length": 3}


def test_a_served_classifier_gets_the_chat_and_gives_its_plain_score() -> None:
    classified = {"data": [{"index": 0, "probs": [-3.25], "num_classes": 1}]}
    with serving(lambda number, _: sends(classified), "/classify") as it:
        (found,) = scored(Remote(address(it, ""), "vllm", "rm"), "12")
    assert found == {"score": -3.25}
    wanted = {"model": "rm", "messages": CHAT, "add_generation_prompt": False, "use_activation": False}
    assert it.requests == [wanted]
    with serving(lambda number, _: sends({"data": [{"embedding": [2]}]}), "/v1/embeddings") as it:
        (found,) = scored(Remote(address(it, ""), "sglang", "rm"), "12")
    assert found == {"score": 2.0} and it.requests == [{"model": "rm", "input": "7 + 5?12"}]


@pytest.mark.parametrize("protocol", ["openrlhf", "vllm"])
def test_the_words_of_a_prompt_with_pictures_are_sent(protocol: Literal["openrlhf", "vllm"]) -> None:
    parts = [{"type": "image", "image": "data:image/png;base64,AAAA"}, {"type": "text", "text": "How many circles?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "3"}]
    body = Remote("http://127.0.0.1:9", protocol, "rm")._body("3", chat, "3")
    said = body["prompts"][0] if protocol == "openrlhf" else body["messages"][0]["content"]
    assert said == "<image>How many circles?"


def test_servers_take_turns_and_one_that_fails_is_stood_in_for() -> None:
    with (
        serving(lambda number, _: sends({"rewards": 1}), PATH) as one,
        serving(lambda number, _: sends(b"down", status=503, headers={"Retry-After": "0"}), PATH) as other,
    ):
        found = scored(Remote([address(one), address(other)]), *"abcdef")
    assert [each["score"] for each in found] == [1.0] * 6
    assert len(one.requests) == 6 and len(other.requests) >= 1


HOSTILE = {
    "NaN": (b'{"rewards": [NaN]}', "'rewards' nan, which is not finite in float32"),
    "infinite": (b'{"rewards": [1e39]}', "'rewards' 1e+39, which is not finite in float32"),
    "a count": (b'{"rewards": [1, 2]}', "sent 2 rewards for one sample"),
    "none": (b'{"rewards": []}', "sent 0 rewards for one sample"),
    "digits": (b'{"rewards": 1' + b"0" * 400 + b"}", "which is not finite in float32"),
    "text": (b'{"rewards": ["1"]}', "'rewards' that is no number"),
    "a truth": (b'{"rewards": [true]}', "'rewards' that is no number"),
    "HTML": (b"<html>welcome</html>", "sent no JSON: <html>welcome</html>"),
    "nesting": (b"[" * 100_000, "sent no JSON"),
    "another object": (b'{"score": 1}', "sent no object with 'rewards'"),
    "huge": (b" " * (2**20 + 1), "sent more than 1048576 bytes"),
    "logs": (b'{"rewards": 1, "extra_logs": [1]}', "'extra_logs' that are no object"),
}


def test_what_a_server_must_not_answer_is_told_in_one_sentence() -> None:
    names = list(HOSTILE)
    with serving(lambda number, body: sends(HOSTILE[json.loads(body)["query"][0].partition("?")[2]][0]), PATH) as it:
        found = scored(Remote(address(it)), *names)
        skipped = scored(Remote(address(it), on_failure="skip"), "NaN")
    for name, error in zip(names, found, strict=True):
        assert type(error) is EndpointError and HOSTILE[name][1] in str(error), (name, error)
    assert skipped[0]["score"] is None and "not finite" in skipped[0]["failure"]
    with serving(lambda number, _: sends({"data": [{"probs": [0.1, 0.9]}]}), "/classify") as it:
        (error,) = scored(Remote(address(it, ""), "vllm", "rm"), "12")
    assert "sent 2 numbers for a text, and a reward model has one: is rm served as a sequence classifier" in str(error)


@pytest.mark.parametrize("status", [302, 404, 401])
def test_a_redirect_and_a_refusal_are_not_followed(status: int) -> None:
    moved = {"Location": "http://127.0.0.1:9/other"}
    with serving(lambda number, _: sends(b"", status=status, headers=moved), PATH) as it:
        (error,) = scored(Remote(address(it), on_failure="skip"), "a")
    assert type(error) is EndpointRefusedError and f"answered {status}; check url" in str(error)
    assert len(it.requests) == 1


def test_a_deadline_holds_whatever_the_server_does() -> None:
    with serving(lambda number, _: sends({"rewards": 1}, after_s=5.0), PATH) as it:
        begun = time.monotonic()
        (error,) = scored(Remote(address(it), deadline_s=0.4), "a")
        assert "did not answer within" in str(error) and time.monotonic() - begun < 4.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "ftp://a"}, "url 'ftp://a' is no http address"),
        ({"url": []}, "url is empty"),
        ({"url": "http://me:secret@a"}, "url has a login in it"),
        ({"url": "http://a", "protocol": "grpc"}, "protocol is 'grpc', must be one of openrlhf, vllm, sglang"),
        ({"url": "http://a", "protocol": "vllm"}, "protocol vllm needs model"),
        ({"url": "http://a", "protocol": "vllm", "model": "m", "tokenizer": "t"}, "leave out tokenizer"),
        ({"url": "http://a", "api_key": "env:NOT_SET_HERE"}, "NOT_SET_HERE of api_key is not set"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Remote(**arguments)


def test_a_run_scores_by_a_server_in_its_reward_processes() -> None:
    with serving(lambda number, body: sends({"rewards": [len(body)]}), PATH) as it:
        config = compose_cli([f"reward.functions=[{{name: remote, url: '{address(it)}'}}]"])
        spec = RewardSpec.of_config(config.reward, ())
        row = RewardRow(("u", 0), "s", "12", {}, {}, [CHAT[0]])
        with RewardPool(spec, config.reward) as pool:
            outcome = pool.submit(row, "12", "uid u, sample 0").result(timeout=20)
    assert outcome.score == len(json.dumps(it.requests[0])) and it.requests[0]["query"] == ["7 + 5?12"]
