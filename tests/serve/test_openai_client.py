"""An unmodified client of OpenAI's plays against a local server; what it did becomes rows, as the engine has it."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, RateLimitError
from transformers import PreTrainedTokenizerFast

from hrl.episodes.episode import EpisodeRow
from hrl.serve.refusals import not_now
from hrl.serve.rows import rows_of
from hrl.serve.sessions import Limits
from hrl.workers.rollout.base import EngineDeadError, EngineUnusableError, RolloutError
from tests.serve.doors import CHATML, KEY, MODEL, Engine, Opened, opened, tokenizer_with_merges, until

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def use_tool(context: str) -> str:
    """Call the tool, and then say what it returned."""
    if "tool\n" in context:
        return f"It is {context.rpartition('tool' + chr(10))[2].partition('<')[0]}."
    return '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'


def require_sampled(rows: list[EpisodeRow], engine: Engine) -> None:
    """Every token with mask 1 was sampled in exactly its context with its log-prob, and each answer is trained once."""
    answers = [(ids, output) for ids, output, _ in engine.record]
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        start = 0
        while start < len(row.mask):
            if not row.mask[start]:
                assert (row.log_probs[start], row.versions[start]) == (0.0, -1)
                start += 1
                continue
            end = start
            while end < len(row.mask) and row.mask[end] and row.turns[end] == row.turns[start]:
                end += 1
            context = ids[: len(row.prompt_ids) + start]
            found = next(
                (
                    place
                    for place, (asked, output) in enumerate(answers)
                    if asked == context
                    and output.token_ids == list(row.response_ids[start:end])
                    and output.log_probs == list(row.log_probs[start:end])
                ),
                None,
            )
            assert found is not None, "tokens that nobody sampled in this context are trained"
            assert set(row.versions[start:end]) == {engine.version}
            del answers[found]
            start = end
    assert not answers, "an answer is not trained"


def test_a_conversation_is_one_row_of_the_tokens_that_were_sampled():
    """The answer ABC is three tokens as sampled, and one as it would be tokenised."""

    async def play() -> None:
        async with opened() as door:
            messages: list[Any] = [user("abc")]
            for more in ("hello", "abc abc"):
                answer = await door.client.chat.completions.create(model=MODEL, messages=messages)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), user(more)]
            last = await door.client.chat.completions.create(model=MODEL, messages=messages)
            assert last.choices[0].message.content == "ABC ABC"
            (row,) = rows_of(door.calls())
            require_sampled([row], door.engine)
            ids = [*row.prompt_ids, *row.response_ids]
            tokenizer = door.engine.tokenizer
            again = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            said = tokenizer.decode(ids)
            assert said == tokenizer.decode(again) + "ABC ABC<|end|>"
            assert ids[: len(again)] != again
            assert [ids for ids, _, _ in door.engine.record][2] == ids[: -len("ABC ABC") - 1]

    asyncio.run(play())


@pytest.mark.parametrize("form", ["parts", "object", "extra"])
def test_an_answer_is_known_again_in_every_form_in_which_clients_send_it_back(form: str):
    async def play() -> None:
        async with opened() as door:
            first = await door.client.chat.completions.create(model=MODEL, messages=[user("abc")])
            message = first.choices[0].message
            back: Any = {
                "parts": {"role": "assistant", "content": [{"type": "text", "text": message.content}]},
                "object": message,
                "extra": {**message.model_dump(), "annotations": [], "reasoning_content": "hm"},
            }[form]
            await door.client.chat.completions.create(model=MODEL, messages=[user("abc"), back, user("more")])
            (row,) = rows_of(door.calls())
            require_sampled([row], door.engine)

    asyncio.run(play())


def test_a_changed_history_is_a_branch_with_what_it_has_in_common():
    async def play() -> None:
        async with opened() as door:
            await door.client.chat.completions.create(model=MODEL, messages=[user("abc")])
            await door.client.chat.completions.create(
                model=MODEL, messages=[user("abc"), {"role": "assistant", "content": "XYZ"}, user("more")]
            )
            rows = rows_of(door.calls())
            require_sampled(rows, door.engine)
            assert len(rows) == 2 and rows[0].prompt_ids == rows[1].prompt_ids
            assert sum(rows[1].mask) == len("MORE") + 1

    asyncio.run(play())


def test_concurrent_calls_and_several_choices_are_branches():
    async def play() -> None:
        async with opened(delay_s=0.01) as door:
            first = await door.client.chat.completions.create(model=MODEL, messages=[user("abc")])
            history: list[Any] = [user("abc"), first.choices[0].message]
            await asyncio.gather(
                *(
                    door.client.chat.completions.create(model=MODEL, messages=[*history, user(f"u{i}")])
                    for i in range(3)
                )
            )
            several = await door.client.chat.completions.create(model=MODEL, messages=[*history, user("n")], n=2)
            assert [choice.index for choice in several.choices] == [0, 1]
            rows = rows_of(door.calls())
            require_sampled(rows, door.engine)
            assert len(rows) == 5
            assert all(row.prompt_ids == rows[0].prompt_ids for row in rows)

    asyncio.run(play())


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_and_answered(streamed: bool):
    async def play() -> None:
        async with opened(use_tool) as door:
            messages: list[Any] = [user("20 + 22?")]
            message = await said(door, messages, streamed=streamed, tools=TOOLS)
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": 20, "b": 22} and call["function"]["name"] == "add"
            assert message["finish_reason"] == "tool_calls" and not message["content"]
            call["function"]["arguments"] = '{"b":22,   "a":20}'  # equal, and not the text that was sampled
            messages += [
                {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]},
                {"role": "tool", "tool_call_id": call["id"], "content": "42"},
            ]
            message = await said(door, messages, streamed=streamed, tools=TOOLS)
            assert message["content"] == "It is 42." and message["finish_reason"] == "stop"
            (row,) = rows_of(door.calls())
            require_sampled([row], door.engine)
            assert door.session().counts["tool_calls"] == 1

    asyncio.run(play())


def test_no_calls_are_read_where_the_client_wants_none():
    async def play() -> None:
        async with opened(use_tool) as door:
            message = await said(door, [user("20 + 22?")], streamed=False, tools=TOOLS, tool_choice="none")
            assert "tool_calls" not in message and message["content"].startswith("<tool_call>")

    asyncio.run(play())


async def said(door: Opened, messages: list[Any], *, streamed: bool, **more: Any) -> dict[str, Any]:
    """The answer, put together from a stream as clients do."""
    if not streamed:
        answer = await door.client.chat.completions.create(model=MODEL, messages=messages, **more)
        choice = answer.choices[0]
        return {
            **choice.message.model_dump(exclude_none=True),
            "content": choice.message.content,
            "finish_reason": choice.finish_reason,
        }
    async with door.client.chat.completions.stream(model=MODEL, messages=messages, **more) as stream:
        choice = (await stream.get_final_completion()).choices[0]
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in choice.message.tool_calls or ()
    ]
    return {"content": choice.message.content, "tool_calls": calls, "finish_reason": choice.finish_reason}


def test_a_stream_says_what_the_whole_answer_says():
    text = "Grüße 😀 " * 3

    async def play() -> None:
        async with opened(lambda _: text) as door:
            asked: Any = {
                "model": MODEL,
                "messages": [user("x")],
                "logprobs": True,
                "seed": 1,
                "extra_body": {"return_token_ids": True},
            }
            whole = (await door.client.chat.completions.create(**asked)).choices[0]
            assert whole.message.content == text and whole.logprobs and whole.logprobs.content
            events = [
                event
                async for event in await door.client.chat.completions.create(
                    **asked, stream=True, stream_options={"include_usage": True}
                )
            ]
            deltas = [event.choices[0] for event in events if event.choices]
            assert "".join(delta.delta.content or "" for delta in deltas) == text
            log_probs = [entry for delta in deltas if delta.logprobs for entry in delta.logprobs.content or ()]
            assert log_probs == whole.logprobs.content
            ids = [token for delta in deltas for token in getattr(delta, "token_ids", None) or ()]
            assert ids == whole.token_ids == door.engine.record[0][1].token_ids
            assert [entry.logprob for entry in log_probs] == door.engine.record[0][1].log_probs
            assert events[1].prompt_token_ids == door.engine.record[0][0]
            assert events[-1].usage.completion_tokens == len(ids)
            assert deltas[-1].finish_reason == "stop" and len(deltas) >= 4

    asyncio.run(play())


def text_and_two_calls(_: str) -> str:
    """Some text before two calls of the tool."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'
    return f"Let me see. {call}{call}"


def test_a_client_puts_a_stream_together_to_the_whole_answer_whatever_is_in_it():
    async def play() -> None:
        for say in (use_tool, text_and_two_calls, lambda _: "one two", lambda _: ""):
            async with opened(say) as door:
                for number, asked in enumerate(({"tools": TOOLS}, {"tools": TOOLS, "n": 2}, {"stop": ["two"]})):
                    whole, put_together = await both_ways(door, number, asked | {"logprobs": True, "seed": 1})
                    assert put_together == whole
                await completions_both_ways(door)

    asyncio.run(play())


def test_reasoning_beside_calls_is_the_same_in_a_stream_and_a_history_with_or_without_it_keeps_its_tokens():
    thought = "{% if m['reasoning_content'] %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    tokenizer = tokenizer_with_merges(CHATML.replace("{{ m['content']", thought + "{{ m['content']"))
    tokenizer.add_tokens(["<think>", "</think>"])

    def say(context: str) -> str:
        return "<think>hm</think>Done." if "tool\n" in context else f"<think>a sum</think>Well. {use_tool(context)}"

    async def play() -> None:
        async with opened(say, tokenizer=tokenizer, reading={"reasoning_parser": "deepseek_r1"}) as door:
            whole, put_together = await both_ways(door, 0, {"tools": TOOLS, "logprobs": True, "seed": 1})
            message = whole["choices"][0]["message"]
            assert message["reasoning_content"] == "a sum" and len(message["tool_calls"]) == 1
            assert put_together == whole
            answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
            for name, kept in (("whole-0", message), ("stream-0", {**message, "reasoning_content": None})):
                last = await door.client.chat.completions.create(
                    model=MODEL, messages=[user("x"), kept, answer], tools=TOOLS, extra_headers={"X-Session-Id": name}
                )
                assert last.choices[0].message.content == "Done."
                assert len(rows_of(door.calls(name))) == 1, "no branch"

    asyncio.run(play())


async def both_ways(door: Opened, number: int, asked: dict[str, Any]) -> tuple[Any, Any]:
    """An answer as a whole, and as OpenAI's client puts it together, each from a session that knows nothing."""

    def plain(answer: Any) -> dict[str, Any]:
        found = json.loads(json.dumps(answer.model_dump(exclude_none=True)))
        for choice in found["choices"]:
            choice["content"] = choice["message"].get("content")
            for call in choice["message"].get("tool_calls", []):
                call.pop("index", None)  # the client's helpers leave it
                call["function"].pop("parsed_arguments", None)
        return {"choices": found["choices"], "usage": found["usage"]}

    asked = {"model": MODEL, "messages": [user("x")]} | asked
    whole = await door.client.chat.completions.create(**asked, extra_headers={"X-Session-Id": f"whole-{number}"})
    streamed = asked | {"stream_options": {"include_usage": True}}
    async with door.client.chat.completions.stream(
        **streamed, extra_headers={"X-Session-Id": f"stream-{number}"}
    ) as stream:
        events = [event async for event in stream]
        put_together = await stream.get_final_completion()
    chunks = [event.chunk for event in events if event.type == "chunk"]
    assert all("usage" in chunk.model_fields_set for chunk in chunks) and all(not one.usage for one in chunks[:-1])
    return plain(whole), plain(put_together)


async def completions_both_ways(door: Opened) -> None:
    """Continuations of texts are the same in a stream."""
    for asked in ({"prompt": ["a", "b"], "n": 2}, {"prompt": "a", "stop": "two"}):
        ask = partial(door.client.completions.create, model=MODEL, seed=1, logprobs=0, max_tokens=50, **asked)
        whole, events = await ask(), [event async for event in await ask(stream=True)]
        for choice in whole.choices:
            parts = [event.choices[0] for event in events if event.choices[0].index == choice.index]
            assert "".join(part.text for part in parts) == choice.text
            assert [part.finish_reason for part in parts] == [*[None] * (len(parts) - 1), choice.finish_reason]
            for name in ("tokens", "token_logprobs", "text_offset"):
                listed = [entry for part in parts for entry in getattr(part.logprobs, name)]
                assert listed == getattr(choice.logprobs, name)


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_shows_tokens_while_the_engine_samples_the_next(is_chat: bool):
    """A character of three tokens that come apart, an end that is a part of one, log-probs and ids with their text."""

    async def play() -> None:
        said = "one €, two ABC and so on"
        async with opened(lambda _: said, seats=asyncio.Semaphore(2)) as door:
            assert door.engine.seats is not None
            beside: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "stream": True, "max_tokens": 100}
            if is_chat:
                stream = await door.client.chat.completions.create(
                    model=MODEL, messages=[user("x")], logprobs=True, **beside
                )
            else:
                stream = await door.client.completions.create(model=MODEL, prompt="x", logprobs=0, **beside)
            texts, ids, log_probs = [], [], []
            async for event in stream:
                choice = event.choices[0]
                text = choice.delta.content if is_chat else choice.text
                if text:
                    assert not door.engine.record or len("".join(texts)) > 15, "before it has all of them"
                    texts.append(text)
                ids += getattr(choice, "token_ids", None) or []
                if choice.logprobs is not None:
                    log_probs += (
                        [one.logprob for one in choice.logprobs.content] if is_chat else choice.logprobs.token_logprobs
                    )
                door.engine.seats.release()
                door.engine.seats.release()
            ((_, output, _),) = door.engine.record
            assert "".join(texts) == said and len(texts) > 5
            assert (ids, log_probs) == (output.token_ids, output.log_probs)
            assert choice.finish_reason == "stop" and choice.policy_version == door.engine.version
            require_sampled(rows_of(door.calls()), door.engine)

    asyncio.run(play())


def test_a_stream_that_ends_within_a_character_says_what_the_whole_answer_says():
    async def play() -> None:
        async with opened(lambda _: "A€", seats=asyncio.Semaphore(100)) as door:
            for most in range(1, 6):
                ask = partial(door.client.chat.completions.create, model=MODEL, messages=[user("x")], max_tokens=most)
                whole = (await ask()).choices[0].message.content
                parts = [event.choices[0].delta.content or "" async for event in await ask(stream=True)]
                assert "".join(parts) == whole

    asyncio.run(play())


class _Hyphens(PreTrainedTokenizerFast):
    """Writes `A B` otherwise as soon as all of it is there."""

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super().decode(*args, **kwargs)).replace("A B", "A-B")


def test_a_stream_that_begins_as_its_tokenizer_writes_no_longer_ends_in_order_and_is_known_again():
    async def play() -> None:
        tokenizer = tokenizer_with_merges()
        tokenizer.__class__ = _Hyphens
        async with opened(lambda _: "A B and €", tokenizer=tokenizer, seats=asyncio.Semaphore(1)) as door:
            assert door.engine.seats is not None
            async with door.client.chat.completions.stream(model=MODEL, messages=[user("x")], logprobs=True) as stream:
                async for _ in stream:
                    door.engine.seats.release()
                choice = (await stream.get_final_completion()).choices[0]
            assert (choice.message.content, choice.finish_reason) == ("A B and €", "stop")
            assert [one.logprob for one in choice.logprobs.content] == door.engine.record[0][1].log_probs
            history = [user("x"), {"role": "assistant", "content": choice.message.content}, user("more")]
            door.engine.seats = None
            await door.client.chat.completions.create(model=MODEL, messages=history)
            (row,) = rows_of(door.calls())
            require_sampled([row], door.engine)

    asyncio.run(play())


@pytest.mark.parametrize("asked", [{"stop": ["two"]}, {"tools": TOOLS}])
def test_what_has_to_be_read_as_a_whole_is_streamed_at_its_end(asked: dict[str, Any]):
    async def play() -> None:
        async with opened(lambda _: "one two", seats=asyncio.Semaphore(0)) as door:
            stream = await door.client.chat.completions.create(model=MODEL, messages=[user("x")], stream=True, **asked)
            texts = [event.choices[0].delta.content or "" async for event in stream]
            assert "".join(texts) == ("one " if "stop" in asked else "one two")

    asyncio.run(play())


def test_a_client_that_hangs_up_in_the_middle_of_a_stream_is_not_sampled_for():
    async def play() -> None:
        async with opened(lambda _: "one two three", seats=asyncio.Semaphore(2)) as door:
            stream = await door.client.chat.completions.create(model=MODEL, messages=[user("x")], stream=True)
            async for event in stream:
                if event.choices[0].delta.content:
                    break
            await stream.close()
            await door.idle()
            assert not door.engine.record and door.session().counts["dropped"] == 1 and not door.calls()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("error", "logged"), [(RolloutError("no more"), "no more"), (ValueError("a fault"), "a streamed request failed")]
)
def test_what_fails_as_its_client_goes_away_is_in_the_log_once(
    error: Exception, logged: str, caplog: pytest.LogCaptureFixture
):
    async def play() -> None:
        async with opened(seats=asyncio.Semaphore(0)) as door:
            door.engine.error_when_cancelled = error
            stream = await door.client.chat.completions.create(model=MODEL, messages=[user("x")], stream=True)
            await until(lambda: door.engine.begun == 1)
            await stream.close()
            await door.idle()
        gc.collect(1)

    asyncio.run(play())
    (said,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert logged in said


def test_a_text_that_goes_on_keeps_the_tokens_that_were_sampled():
    async def play() -> None:
        async with opened(lambda _: "ABC") as door:
            complete = door.client.completions.create
            first = await complete(
                model=MODEL, prompt="say ", max_tokens=3, logprobs=0, extra_body={"return_token_ids": True}
            )
            assert first.choices[0].text == "ABC" and first.choices[0].finish_reason == "length"
            assert first.choices[0].logprobs.text_offset == [0, 1, 2]
            await complete(model=MODEL, prompt="say ABC and AB", max_tokens=4)
            (row,) = rows_of(door.calls())
            require_sampled([row], door.engine)
            ids = await complete(model=MODEL, prompt=[1, 2, 3], max_tokens=1, extra_body={"return_token_ids": True})
            assert ids.choices[0].prompt_token_ids == [1, 2, 3]
            several = await complete(model=MODEL, prompt=["a", "b"], n=2)
            assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
            assert several.usage.prompt_tokens == 2
            require_sampled(rows_of(door.calls()), door.engine)

    asyncio.run(play())


def test_a_stop_text_ends_the_answer_where_it_is_complete():
    async def play() -> None:
        async with opened(lambda _: "one\nObservation: two") as door:
            answer = await door.client.chat.completions.create(
                model=MODEL,
                messages=[user("x")],
                stop=["Obs", "two"],
                max_tokens=10,  # which the engine reaches
                extra_body={"return_token_ids": True},
            )
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason) == ("one\n", "stop")
            assert choice.token_ids == door.engine.one_by_one("one\nObs")
            (call,) = door.calls()
            assert call.token_ids == choice.token_ids and call.log_probs == door.engine.record[0][1].log_probs[:7]
            history: list[Any] = [user("x"), choice.message, user("more")]
            await door.client.chat.completions.create(model=MODEL, messages=history)
            (row,) = rows_of(door.calls())
            assert door.engine.tokenizer.decode(row.response_ids).startswith("one\nObs<|end|>\n<|start|>user\nmore")

    asyncio.run(play())


def test_a_text_stopped_before_its_stop_text_goes_on_with_or_without_it():
    async def play() -> None:
        async with opened(lambda _: "ABC!STOP") as door:
            complete = door.client.completions.create
            first = await complete(model=MODEL, prompt="p", max_tokens=20, stop="STOP")
            assert first.choices[0].text == "ABC!"
            sampled = door.engine.one_by_one
            await complete(model=MODEL, prompt="pABC!STOPx")
            assert door.engine.record[1][0] == [*sampled("p"), *sampled("ABC!STOP"), *sampled("x")]
            await complete(model=MODEL, prompt="pABC!y")
            assert door.engine.record[2][0] == [*sampled("p"), *sampled("ABC!"), *sampled("y")]
            rows = rows_of(door.calls())
            assert [len(row.prompt_ids) for row in rows] == [1, 1]

    asyncio.run(play())


def test_parameters_reach_the_engine():
    async def play() -> None:
        async with opened() as door:
            for asked in (
                {"temperature": 0.0, "top_p": 0.5, "seed": 7, "max_tokens": 2},
                {"seed": 2**32 + 7, "max_tokens": 5, "max_completion_tokens": 3, "extra_body": {"top_k": 5}},
                {"seed": 7, "n": 2},
            ):
                await door.client.chat.completions.create(model=MODEL, messages=[user("abcdef")], **asked)
            one, two, three, four = [sampling for _, _, sampling in door.engine.record]
            assert (one.temperature, one.top_p, one.top_k, one.seed, one.max_tokens) == (0.0, 0.5, -1, 7, 2)
            assert (two.temperature, two.top_p, two.top_k, two.seed, two.max_tokens) == (1.0, 1.0, 5, 7, 3)
            assert three.seed == 7 != four.seed

    asyncio.run(play())


def test_sessions_are_told_apart_by_header_and_by_key():
    async def play() -> None:
        async with opened() as door:
            url = door.server.base_url
            async with (
                AsyncOpenAI(base_url=url, api_key=f"{KEY}:agent-1") as one,
                AsyncOpenAI(base_url=url, api_key=KEY, default_headers={"X-Session-Id": "agent-2"}) as two,
            ):
                for client in (one, two, two):
                    await client.chat.completions.create(model=MODEL, messages=[user("x")])
            assert len(door.calls("agent-1")) == 1 and len(door.calls("agent-2")) == 2

    asyncio.run(play())


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (Limits(calls=2), RateLimitError),
        (Limits(tokens=5), RateLimitError),
        (Limits(seconds=0.0), RateLimitError),
    ],
    ids=["calls", "tokens", "seconds"],
)
def test_a_session_over_its_limit_is_refused_and_others_are_not(limits: Limits, error: type[Exception]):
    async def play() -> None:
        async with opened(limits=limits, delay_s=0.01) as door:
            create = door.client.chat.completions.create
            with pytest.raises(error):
                for _ in range(3):
                    await create(model=MODEL, messages=[user("abc")])
            assert door.session().counts["refused"] == 1
            async with AsyncOpenAI(base_url=door.server.base_url, api_key=f"{KEY}:other") as other:
                if limits.seconds is None:
                    await other.chat.completions.create(model=MODEL, messages=[user("abc")])

    asyncio.run(play())


def test_more_choices_than_a_session_may_have_at_once_make_no_sense_and_fewer_wait_for_those_that_are_sampled():
    async def play() -> None:
        async with opened(limits=Limits(calls=9, concurrent_calls=2), held=asyncio.Event()) as door:
            ask = partial(door.client.chat.completions.create, model=MODEL, messages=[user("abc")])
            with pytest.raises(BadRequestError, match="3 answers are asked for at once .* at most 2 sampled") as found:
                await ask(n=3)
            assert found.value.param == "n"
            with pytest.raises(BadRequestError, match="4 answers are asked for at once"):
                await door.client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
            first = asyncio.ensure_future(ask())
            await door.busy()
            with pytest.raises(RateLimitError, match="1 answers are being sampled") as found:
                await ask(n=2)
            assert found.value.response.headers["Retry-After"] == "1"
            second = asyncio.ensure_future(ask())
            await until(lambda: door.engine.begun == 2)
            door.engine.held.set()
            await asyncio.gather(first, second)
            assert len((await ask(n=2)).choices) == 2
            assert door.session().counts["refused"] == 3 and door.session().counts["calls"] == 4

    asyncio.run(play())


def test_what_was_sampled_counts_though_its_client_goes_away_with_it():
    async def play() -> None:
        async with opened(lambda _: "one two three", limits=Limits(tokens=12)) as door:
            streams = 0
            with pytest.raises(RateLimitError, match="0 of its 12 sampled tokens are left"):
                while streams <= 12:
                    door.engine.seats = asyncio.Semaphore(2)
                    stream = await door.client.chat.completions.create(model=MODEL, messages=[user("x")], stream=True)
                    async for event in stream:
                        if event.choices[0].delta.content:
                            break
                    await stream.close()
                    streams += 1
                    await door.idle()
            counts = door.session().counts  # the last one may have been whole before its client went
            assert streams >= 3 and counts["dropped"] >= 2 and counts["sampled_tokens"] == 12

    asyncio.run(play())


def test_what_was_sampled_counts_though_the_engine_gives_the_answer_up():
    async def play() -> None:
        for streamed in (False, True):
            async with opened(lambda _: "one", ends_with="abort") as door:
                with pytest.raises(Exception, match="gave this request up"):
                    await said(door, [user("x")], streamed=streamed)
                await door.idle()
                assert door.session().counts["sampled_tokens"] == len("one") + 1

    asyncio.run(play())


def test_choices_and_calls_at_the_same_time_share_the_tokens_of_their_session():
    async def play() -> None:
        async with opened(lambda _: "one two three", limits=Limits(tokens=30), held=asyncio.Event()) as door:
            ask = partial(door.client.chat.completions.create, model=MODEL, messages=[user("x")])
            both = asyncio.ensure_future(ask(n=2))
            await door.busy()
            with pytest.raises(RateLimitError, match="kept for answers that are being sampled") as found:
                await ask()
            assert found.value.response.headers["Retry-After"] == "1", "what they do not need comes back"
            door.engine.held.set()
            await both
            assert [sampling.max_tokens for _, _, sampling in door.engine.record] == [15, 15]
            assert (await ask()).choices[0].finish_reason == "length"
            assert door.engine.record[-1][2].max_tokens == 30 - 2 * len("one two three" + "!")
            with pytest.raises(RateLimitError, match="0 of its 30 sampled tokens are left"):
                await ask()
            assert door.session().counts["refused"] == 2 and door.session().counts["sampled_tokens"] == 30

    asyncio.run(play())


def test_a_session_that_runs_out_of_time_ends_its_calls():
    async def play() -> None:
        async with opened(limits=Limits(seconds=0.05), delay_s=30) as door:
            with pytest.raises(RateLimitError, match="seconds are over"):
                await door.client.chat.completions.create(model=MODEL, messages=[user("abc")])
            assert door.engine.cancelled == 1 and door.session().reached == "deadline" and not door.calls()

    asyncio.run(play())


def test_a_client_that_hangs_up_is_not_sampled_for():
    async def play() -> None:
        async with opened(delay_s=30) as door:
            for stream in (False, True):
                asking = asyncio.ensure_future(
                    door.client.chat.completions.create(model=MODEL, messages=[user("abc")], stream=stream)
                )
                if stream:
                    events = await asking
                    await events.close()
                else:
                    await door.busy()
                    asking.cancel()
                await door.idle()
            assert door.engine.cancelled == 2 and door.session().counts["dropped"] == 2 and not door.calls()

    asyncio.run(play())


def test_weights_that_are_synced_and_an_engine_that_died_are_told_apart():
    async def play() -> None:
        async with opened() as door:

            async def status(**more: Any) -> int:
                raw = await door.client.chat.completions.with_raw_response.create(
                    model=MODEL, messages=[user("x")], **more
                )
                return raw.status_code

            door.door.pause("weights are being synced")
            with pytest.raises(Exception, match="weights are being synced") as found:
                await status()
            assert found.value.status_code == 503 and found.value.response.headers["Retry-After"] == "1"
            door.door.resume()
            assert await status() == 200
            for error, code in ((EngineUnusableError("sync"), 503), (EngineDeadError("dead"), 500)):
                door.engine.error = error
                with pytest.raises(Exception, match=str(error)) as found:
                    await status()
                assert found.value.status_code == code
            with pytest.raises(Exception, match="dead"):
                async for _ in await door.client.chat.completions.create(
                    model=MODEL, messages=[user("x")], stream=True
                ):
                    pass
            door.engine.error = None
            assert await status() == 200 and not_now("x").status == 503

    asyncio.run(play())


def test_a_context_that_is_too_long_is_refused_in_openais_words():
    async def play() -> None:
        async with opened(max_model_len=60) as door:
            create = door.client.chat.completions.create
            for asked in ({"messages": [user("x" * 60)]}, {"messages": [user("x")], "max_tokens": 60}):
                with pytest.raises(BadRequestError) as found:
                    await create(model=MODEL, **asked)
                assert found.value.code == "context_length_exceeded"
            with pytest.raises(BadRequestError, match="has 1,000,000 characters"):
                await create(model=MODEL, messages=[user("x" * 1_000_000)])

    asyncio.run(play())
