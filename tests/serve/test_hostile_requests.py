"""Whatever is sent, it gets an error in OpenAI's form, and the server lives on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hrl.serve.server import DoorError, DoorServer, HttpLimits
from hrl.serve.sessions import Limits
from tests.serve.doors import KEY, MODEL, Opened, opened, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
BEARER = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


async def post(
    http: aiohttp.ClientSession, door: Opened, body: Any, path: str = "chat/completions", **headers: str
) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(f"{door.server.base_url}/{path}", data=data, headers=BEARER | headers) as answer:
        return answer.status, await answer.json()


def play(
    attack: Callable[[aiohttp.ClientSession, Opened], Awaitable[None]], *, still_answers: bool = True, **options: Any
) -> None:
    """Have an attack made, and see that the next one is answered."""

    async def run() -> None:
        async with opened(**options) as door, aiohttp.ClientSession() as http:
            await attack(http, door)
            if still_answers:
                assert (await post(http, door, CHAT))[0] == 200
            await door.idle()

    asyncio.run(run())


def errors_of_the_server(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has of them."""
    ours = ("hrl", "aiohttp")
    return [one.getMessage() for one in caplog.records if one.levelname != "INFO" and one.name.startswith(ours)]


def require_error(answer: tuple[int, dict[str, Any]], status: int, part: str = "", param: str | None = None) -> None:
    found, body = answer
    assert found == status, body
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert part in body["error"]["message"]
    if param is not None:
        assert body["error"]["param"] == param


DEEP = b'{"model": "tiny", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("body", "part", "param"),
    [
        (b"", "not JSON", None),
        (b"\xff\xfe", "not JSON", None),
        (b"[]", "not an object", None),
        (b'{"model": "tiny", "seed": ' + b"9" * 10_000 + b"}", "not JSON", None),
        (b'{"temperature": NaN}', "not JSON", None),
        (DEEP, "nested too deeply", None),
        (b'{"messages": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}", "nested more than", None),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate", None),
        (b'{"\\udc00": 1}', "lone surrogate", None),
        ({"model": MODEL}, "'messages' is missing", "messages"),
        ({}, "'model' is missing", "model"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "", "\\udc00": 1}]}', "lone surrogate", None),
        (CHAT | {"max_tokens": -1}, "max_tokens is -1", "max_tokens"),
        (CHAT | {"max_tokens": 0}, "max_tokens is 0", "max_tokens"),
        (CHAT | {"max_tokens": 10**30}, "max_tokens is 1000", "max_tokens"),
        (CHAT | {"max_completion_tokens": "5"}, "max_completion_tokens is '5'", "max_completion_tokens"),
        (CHAT | {"n": 1000}, "n is 1000", "n"),
        (CHAT | {"n": True}, "n is True", "n"),
        (CHAT | {"temperature": -0.1}, "temperature is -0.1", "temperature"),
        (CHAT | {"temperature": 0.001}, "take 0 for the most likely tokens", None),
        (CHAT | {"top_p": 0}, "top_p is 0", "top_p"),
        (CHAT | {"stop": ["a"] * 17}, "stop is", "stop"),
        (CHAT | {"stop": [""]}, "stop is", "stop"),
        (CHAT | {"seed": 2**70}, "seed is", "seed"),
        (CHAT | {"top_logprobs": 3, "logprobs": True}, "sampled tokens alone", "top_logprobs"),
        (CHAT | {"tool_choice": "required"}, "forces no call", "tool_choice"),
        (CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "forces no call", "tool_choice"),
        (CHAT | {"tools": [{"type": "function"}]}, "tool 0 is", "tools"),
        (CHAT | {"tools": "x"}, "'tools' is no list", "tools"),
        (CHAT | {"presence_penalty": 0.5}, "presence_penalty is 0.5, which hrl does not have", "presence_penalty"),
        (CHAT | {"logit_bias": {"5": 100}}, "hrl does not have", "logit_bias"),
        (CHAT | {"response_format": {"type": "json_object"}}, "hrl does not have", "response_format"),
        (CHAT | {"web_search_options": {}}, "hrl does not have the parameter", "web_search_options"),
        (CHAT | {"stream_options": {"include_usage": True}}, "stream_options is for stream=true", "stream_options"),
        (CHAT | {"messages": []}, "'messages' is [], expected a non-empty list of messages", "messages"),
        (CHAT | {"messages": "x"}, "'messages' is 'x', expected a non-empty list of messages", "messages"),
        (CHAT | {"messages": [{"role": "user"}]}, "'content' of message 0", "messages"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "hrl trains on text", "messages"),
        (
            CHAT | {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": 3}]}]},
            "'tool_calls' of message 0",
            "messages",
        ),
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_with_its_reason(body: Any, part: str, param: str | None):
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        require_error(await post(http, door, body), 400, part, param)
        assert not door.engine.record

    play(attack)


WRONG: dict[str, list[Any]] = {
    "model": [1, [], {}], "messages": [1, "x", {}, [1], ["x"], [[]]], "n": ["1", 1.5, [], {}, 0, -1],
    "stream": ["true", 1, []], "stream_options": [1, "x", [], {"include_usage": 1}], "temperature": ["1", [], {}, 3],
    "top_p": ["1", [], 2], "top_k": ["1", 1.5, [], -2], "seed": ["1", 1.5, []], "max_tokens": ["1", 1.5, [], {}],
    "stop": [1, {}, [1], [["x"]]], "return_token_ids": [1, "x"], "tools": [1, {}, "x", [1]],
    "tool_choice": [1, "any", []], "logprobs": [1, "x", []], "top_logprobs": ["1", 1.5, []],
    "max_completion_tokens": ["1", 1.5, []], "chat_template_kwargs": [1, "x", []], "logit_bias": [1, "x"],
    "prompt": [1, {}, [1.5], [{}], [["x"]]],
}  # fmt: skip


def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_field():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        for field, values in WRONG.items():
            for value in values:
                path, body = "chat/completions", CHAT | {field: value}
                if field == "prompt":
                    path, body = "completions", {"model": MODEL, "prompt": value}
                require_error(await post(http, door, body, path), 400, "", field)
        assert not door.engine.record

    play(attack)


@pytest.mark.parametrize(
    "arguments",
    [
        {"chat_template": "OWN{% for i in range(10 ** 9) %}{% endfor %}"},
        {"chat_template": 5},
        {"tokenize": True},
        {"continue_final_message": True},
        {"tools": []},
        {"return_dict": True, "enable_thinking": False},
    ],
)
def test_a_client_brings_no_template_and_does_not_say_how_it_is_rendered(arguments: dict[str, Any]):
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        body = CHAT | {"chat_template_kwargs": arguments}
        message = f"has {next(iter(arguments))}, which only the server's configuration sets"
        require_error(await post(http, door, body), 400, message, "chat_template_kwargs")
        assert not door.engine.record

    play(attack)


def test_what_changes_nothing_is_taken():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        harmless = {
            "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "parallel_tool_calls": True,
            "store": False,
            "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "temperature": None,
            "tools": [],
            "service_tier": "auto", "top_logprobs": 0, "tool_choice": "none",
            "chat_template_kwargs": {"enable_thinking": False, "documents": []},
        }  # fmt: skip
        assert (await post(http, door, CHAT | harmless))[0] == 200

    play(attack)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["x"] * 1000}, "prompt"),
        ({"prompt": "x", "logprobs": 5}, "logprobs"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "best_of": 4}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)  # fmt: skip
def test_a_text_that_can_not_be_continued_is_refused(body: dict[str, Any], param: str):
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        require_error(await post(http, door, {"model": MODEL} | body, "completions"), 400, "", param)

    play(attack)


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", "Bearer \udcff", f"Bearer {KEY}x"]
)
def test_without_the_key_nothing_is_read(authorization: str):
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        answer = await raw(
            door,
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {authorization}\r\n"
            "Content-Length: 1000000000\r\n\r\n",
        )
        assert b" 401 " in answer and b"invalid_api_key" in answer and KEY.encode() not in answer

    play(attack)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "192.168.0.7", "[::2]", "[", "", "127.0.0.1.evil.example"]
)
def test_a_name_of_another_machine_is_refused(host: str):
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        answer = await raw(door, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n\r\n")
        assert b" 403 " in answer and b"loopback" in answer

    play(attack)


def test_a_session_has_a_plain_name():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        for name in ("a/b", "../../etc/passwd", "..\\\\x", "a b", "a%0ab", "a;b", "x" * 101, "ä"):
            behind = {"Authorization": f"Bearer {KEY}:{name}"}
            require_error(await post(http, door, CHAT, **behind), 400, "a session's name", "X-Session-Id")
            require_error(
                await post(http, door, CHAT, **{"X-Session-Id": name}), 400, "a session's name", "X-Session-Id"
            )

    play(attack)


def test_paths_and_methods_that_are_not_served_are_named():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        require_error(await post(http, door, {}, "embeddings"), 404, "is not served")
        async with http.get(f"{door.server.base_url}/chat/completions", headers=BEARER) as answer:
            require_error((answer.status, await answer.json()), 405, "is not served")
        async with http.get(f"{door.server.base_url}/models/other", headers=BEARER) as answer:
            require_error((answer.status, await answer.json()), 404, "no such model")
        require_error(await post(http, door, CHAT | {"model": "gpt-5"}), 404, "there is no model 'gpt-5'", "model")
        async with http.get(f"{door.server.base_url}/models", headers=BEARER) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == [MODEL]

    play(attack)


def test_a_large_body_is_refused_before_all_of_it_was_sent():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        body = CHAT | {"user": "x" * 200_000}
        require_error(await post(http, door, body), 413, "more than 100,000 bytes")

    play(attack, http=HttpLimits(body_bytes=100_000))


def test_a_compressed_body_is_not_blown_up():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        require_error(await post(http, door, b"x", **{"Content-Encoding": "gzip"}), 415, "compressed")

    play(attack)


def test_slow_requests_are_ended_and_others_are_answered_meanwhile():
    limits = HttpLimits(head_s=0.3, body_s=0.3)

    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        slow = [
            asyncio.create_task(raw(door, text))
            for text in ("", "POST /v1", head, f"{head}Content-Length: 10\r\n\r\n{{")
        ]
        assert (await post(http, door, CHAT))[0] == 200
        async with asyncio.timeout(10):
            *silent, body = await asyncio.gather(*slow)
        assert silent == [b"", b"", b""] and b" 408 " in body

    play(attack, http=limits)


@pytest.mark.parametrize("stalled", ["opening", "stream", "whole"])
def test_a_client_that_does_not_read_loses_its_connection(stalled: str, caplog: pytest.LogCaptureFixture):
    """Nothing else can be said to it, and it is no fault of the server's."""
    name = "m" * 3000 if stalled == "opening" else MODEL  # each event names the model

    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        asked = {
            **CHAT,
            "model": name,
            "stream": stalled != "whole",
            "n": 64 if stalled == "opening" else 8,
            "logprobs": True,
            "return_token_ids": True,
        }
        door.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        loop, body = asyncio.get_running_loop(), json.dumps(asked)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, address(door))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
            await loop.sock_sendall(client, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            await until(lambda: bool(list(door.door.sessions)) and not door.server._runner.server.connections)
            said = b""
            with contextlib.suppress(ConnectionError):
                while more := await loop.sock_recv(client, 65536):
                    said += more
        assert said.count(b"HTTP/1.1") == 1 and b"200 OK" in said and b"[DONE]" not in said
        await door.idle()

    seats = asyncio.Semaphore(0) if stalled == "opening" else None
    play(attack, say=lambda _: "x" * 800, model=name, seats=seats, http=HttpLimits(read_s=0.2), still_answers=False)
    assert not errors_of_the_server(caplog)


@pytest.mark.parametrize("head", ["nonsense", "GET / HTTP/9.9", "GET /v1/models HTTP/1.1\r\nHost : x", "GET /\x00 x"])
def test_what_is_no_http_is_told_so_in_openais_form(head: str, caplog: pytest.LogCaptureFixture):
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        answer, _, body = (await raw(door, f"{head}\r\n\r\n")).decode().partition("\r\n\r\n")
        require_error((int(answer.split(" ")[1]), json.loads(body)), 400, "the request is no HTTP that can be read")

    play(attack)
    assert not errors_of_the_server(caplog)


def test_connections_have_a_limit():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        ends = [await asyncio.open_connection(*address(door)) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*address(door))
        async with asyncio.timeout(10):
            with pytest.raises(ConnectionError):
                while await reader.read():
                    pass
                raise ConnectionError
        for _, one in [*ends, (reader, writer)]:
            one.close()
        await asyncio.sleep(0.1)

    play(attack, http=HttpLimits(connections=3))


def test_a_line_break_in_a_session_name_makes_no_header_and_no_session():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        for name in ("a\rb", "a\n b", "a\x00b"):
            answer = await raw(
                door,
                f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
                f"X-Session-Id: {name}\r\n\r\n",
            )
            assert answer.split(b" ")[1] == b"400"
        assert not list(door.door.sessions)

    play(attack)


def test_a_thousand_connections_at_the_same_time_are_answered():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many:
            asked = asyncio.gather(*(post(many, door, CHAT | {"max_tokens": 1}) for _ in range(1000)))
            most = Limits().concurrent_calls
            await until(lambda: door.engine.begun == most and door.session().counts["refused"] == 1000 - most)
            door.engine.held.set()
            answers = await asked
        statuses = {status for status, _ in answers}
        assert statuses == {200, 429}, "those that are more than a session may have at the same time are to ask again"
        for answer in answers:
            if answer[0] != 200:
                require_error(answer, 429, "at the same time")
        assert sum(status == 200 for status, _ in answers) == len(door.engine.record) == most

    play(attack, held=asyncio.Event())


def test_guessed_keys_are_refused_alike_and_say_nothing_of_the_key():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        said = set()
        for key in ("", "x", KEY[:-1], f"{KEY[:-1]}x", KEY.upper(), f"x{KEY}", "0" * 500, f":{KEY}"):
            answer = await post(http, door, CHAT, Authorization=f"Bearer {key}")
            require_error(answer, 401)
            said.add(answer[1]["error"]["message"])
            assert KEY not in json.dumps(answer[1])
        assert not list(door.door.sessions) and not door.engine.record

    play(attack)


def test_more_sessions_than_there_may_be_let_the_oldest_go():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        door.door.sessions._most = 2
        for name in ("a", "b", "a", "c"):
            assert (await post(http, door, CHAT, **{"X-Session-Id": name}))[0] == 200
        assert sorted(session.name for session in door.door.sessions) == ["a", "c"]

    play(attack, still_answers=False)


def address(door: Opened) -> tuple[str, int]:
    host, port = door.server._socket.getsockname()[:2]
    return host, port


async def raw(door: Opened, text: str) -> bytes:
    """All that comes back for what is sent, until the server closes or has answered."""
    reader, writer = await asyncio.open_connection(*address(door))
    writer.write(text.encode("utf-8", "surrogateescape"))
    await writer.drain()
    answer = b""
    try:
        async with asyncio.timeout(10):
            while b"}" not in answer and (more := await reader.read(65536)):
                answer += more
    except ConnectionError:
        pass
    writer.close()
    return answer


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "example.com", "::"])
def test_no_address_that_others_reach_is_taken_unless_it_is_said(host: str):
    async def run() -> None:
        async with opened() as door:
            with pytest.raises(DoorError, match="say --allow-remote"):
                DoorServer(door.door, host=host)

    asyncio.run(run())


def test_a_port_that_is_taken_is_named():
    async def run() -> None:
        async with opened() as door:
            port = address(door)[1]
            with pytest.raises(DoorError, match=f"port {port}"):
                DoorServer(door.door, port=port)
            remote = DoorServer(door.door, host="0.0.0.0", allow_remote=True)
            async with remote, aiohttp.ClientSession() as http:
                port = remote._socket.getsockname()[1]
                url = f"http://127.0.0.1:{port}/v1/models"
                async with http.get(url, headers=BEARER | {"Host": "gpu-box.example"}) as answer:
                    assert answer.status == 200

    asyncio.run(run())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "messages", "model", "n", "stop", "stream", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k",
    "seed", "logprobs", "stream_options", "prompt", "chat_template_kwargs", "return_token_ids", "response_format",
)  # fmt: skip
BODIES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), PLAIN, max_size=4)


def test_any_json_is_answered_or_refused():
    """Of what is no request at all, and of requests with one thing wrong."""

    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        loop = asyncio.get_running_loop()

        @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
        @given(BODIES, st.sampled_from(["chat/completions", "completions"]))
        def fuzz(body: dict[str, Any], path: str) -> None:
            whole = {"prompt": "x"} if path == "completions" else {"messages": CHAT["messages"]}
            asked = {"model": MODEL, "max_tokens": 2, **whole} | body
            status = asyncio.run_coroutine_threadsafe(send(asked, path), loop).result(30)
            assert status < 500

        async def send(body: Any, path: str) -> int:
            async with http.post(f"{door.server.base_url}/{path}", json=body, headers=BEARER) as answer:
                text = await answer.text()
            if answer.status != 200:
                assert json.loads(text)["error"]["message"]
            return answer.status

        await asyncio.to_thread(fuzz)

    play(attack, limits=Limits(concurrent_calls=None))


def test_any_bytes_are_answered_or_refused():
    async def attack(http: aiohttp.ClientSession, door: Opened) -> None:
        loop = asyncio.get_running_loop()

        @settings(max_examples=60)
        @given(st.binary(max_size=60))
        def fuzz(noise: bytes) -> None:
            asyncio.run_coroutine_threadsafe(send(noise), loop).result(30)

        async def send(noise: bytes) -> None:
            with socket.create_connection(address(door)) as one:
                one.sendall(noise)

        await asyncio.to_thread(fuzz)

    play(attack)
