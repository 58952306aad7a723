"""The judge against a real server on loopback: what it asks, how often, what it makes of the answers."""

import asyncio
import json
import socket
import sqlite3
import threading
import time

import pytest

from hrl.config.compose import compose_cli
from hrl.reward.library.base import ArgumentError
from hrl.reward.library.endpoint import EndpointError, EndpointRefusedError
from hrl.reward.library.judge import Judge
from hrl.reward.library.judge_store import JudgeStore
from hrl.reward.pool import RewardPool, RewardRow
from hrl.reward.spec import RewardSpec
from tests.reward.library.endpoint import Reply, serving


def judged(judge, *samples):
    """What the judge says to samples at once."""

    async def ask():
        try:
            return await asyncio.gather(*(judge(**sample) for sample in samples))
        finally:
            await judge.aclose()

    return asyncio.run(ask())


def sample(response="a sky", **columns):
    return {"response": response, "prompt": "Why is the sky blue?", "ground_truth": "scattering", **columns}


def always(*replies):
    """Answer with these in turn, and with the last one from then on."""
    return lambda number, question: replies[min(number, len(replies) - 1)]


def test_a_question_has_prompt_answer_and_response_and_the_last_score_counts():
    with serving(always(Reply("Score: 2 would be too low.\nScore: 7"))) as endpoint:
        judge = Judge("a-model", endpoint.base_url, system="Be fair.", options={"seed": 3})
        (said,) = judged(judge, sample("{answer} Score: 10", prompt=[{"role": "user", "content": "Why {blue}?"}]))
    assert said == {"score": 0.7, "verdict": "Score: 2 would be too low.\nScore: 7"}
    (request,) = endpoint.requests
    assert request["model"] == "a-model" and request["stream"] is False and request["seed"] == 3
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    (question,) = endpoint.questions
    assert "user: Why {blue}?" in question and "scattering" in question
    assert "{answer} Score: 10" in question, "what a response has in braces is not filled in"
    assert "Authorization" not in endpoint.headers[0]


def test_of_a_prompt_with_pictures_the_words_are_shown():
    parts = [{"type": "image", "image": "data:image/png;base64,AAAA"}, {"type": "text", "text": "How many?"}]
    with serving(always(Reply("Score: 7"))) as endpoint:
        judged(Judge("a-model", endpoint.base_url), sample(prompt=[{"role": "user", "content": parts}]))
    (question,) = endpoint.questions
    assert "user: <image>How many?" in question and "AAAA" not in question


def test_many_samples_are_asked_about_at_once_and_no_more_than_allowed():
    eight = threading.Barrier(8, timeout=20)

    def answer(number, question):
        eight.wait()
        return Reply(after_s=0.05)

    with serving(answer) as endpoint:
        judge = Judge("m", endpoint.base_url, max_concurrency=8)
        said = judged(judge, *(sample(f"answer {n}") for n in range(32)))
    assert [one["score"] for one in said] == [1.0] * 32 and endpoint.most_at_once == 8


def test_requests_keep_their_distance():
    with serving(always(Reply())) as endpoint:
        judged(Judge("m", endpoint.base_url, requests_per_minute=240), *(sample(f"answer {n}") for n in range(6)))
    apart = [later - earlier for earlier, later in zip(endpoint.times_s, endpoint.times_s[1:], strict=False)]
    assert sum(apart) >= 0.75 and sorted(apart)[2] < 1.0  # of 1.25 s, half a second for a late first answer
    # A tenth of a second apart, each gets its turn in time.
    assert Judge("m", endpoint.base_url, requests_per_minute=600).max_concurrency == 16
    assert Judge("m", endpoint.base_url, requests_per_minute=60, deadline_s=8).max_concurrency == 4


def test_a_deadline_that_leaves_no_turn_is_a_failure_and_not_a_wait():
    with serving(always(Reply())) as endpoint:
        judge = Judge("m", endpoint.base_url, requests_per_minute=6, deadline_s=8)
        begun = time.monotonic()
        first, second = judged(judge, sample("a"), sample("b"))
    assert first["score"] == 1.0 and second["score"] is None and "no turn within 8 s" in second["failure"]
    assert time.monotonic() - begun < 7.0 and len(endpoint.requests) == 1


def test_the_same_question_is_asked_once_and_never_again_with_a_file(tmp_path):
    file = str(tmp_path / "run" / "judge.sqlite")
    with serving(lambda number, question: Reply(f"Score: {number}")) as endpoint:
        said = judged(Judge("m", endpoint.base_url, cache=file), sample("a"), sample("a"), sample("b"))
        a, same, b = (one["score"] for one in said)
        assert a == same and {a, b} == {0.0, 0.1}, "which question comes first is open"
        again = judged(Judge("m", endpoint.base_url, cache=file), sample("b"), sample("a"))
        assert [one["score"] for one in again] == [b, a] and len(endpoint.requests) == 2
        judged(Judge("another", endpoint.base_url, cache=file), sample("a"))
        judged(Judge("m", endpoint.base_url, cache=file, prompt="Grade {response}"), sample("a"))
        assert len(endpoint.requests) == 4, "another model or another prompt is another question"


def test_a_reply_without_a_score_is_not_kept_so_that_the_next_run_asks_again(tmp_path):
    file = str(tmp_path / "judge.sqlite")
    with serving(always(Reply("I can't say."), Reply("Score: 5"), Reply("Grade 9"))) as endpoint:
        first, second, third = (judged(Judge("m", endpoint.base_url, cache=file), sample())[0] for _ in range(3))
        assert first["score"] is None and (second["score"], third["score"]) == (0.5, 0.5)
        assert len(endpoint.requests) == 2
        (read_anew,) = judged(Judge("m", endpoint.base_url, cache=file, pattern=r"Grade (\d)"), sample())
        assert read_anew["score"] == 0.9, "a kept reply in which another pattern finds no score is no answer"


def test_a_cache_that_breaks_on_the_way_is_given_up_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hrl.reward.library.judge_store._WAIT_FOR_LOCK_S", 0.05)
    file = str(tmp_path / "judge.sqlite")
    with serving(always(Reply("Score: 5"))) as endpoint:
        judge = Judge("m", endpoint.base_url, cache=file)
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("begin exclusive")
        assert [one["score"] for one in judged(judge, sample("a"), sample("b"))] == [0.5, 0.5]
        assert [one["score"] for one in judged(judge, sample("a"))] == [0.5] and len(endpoint.requests) == 2
        other.close()
    assert caplog.text.count("can't be used any more") == 1 and "database is locked" in caplog.text


def test_a_process_whose_cache_broke_keeps_its_share_of_the_pace(tmp_path, monkeypatch):
    monkeypatch.setattr("hrl.reward.library.judge_store._WAIT_FOR_LOCK_S", 0.05)
    store = JudgeStore(tmp_path / "judge.sqlite", processes=4)
    other = sqlite3.connect(tmp_path / "judge.sqlite", isolation_level=None)
    other.execute("begin exclusive")
    waits_s = [store.take_turn(10.0) for _ in range(3)]
    other.close()
    assert waits_s == pytest.approx([0.0, 10.0, 50.0], abs=1.0)


def test_of_very_many_replies_the_latest_are_kept(monkeypatch):
    monkeypatch.setattr("hrl.reward.library.judge_store.MOST_REPLIES", 3)
    store = JudgeStore(None)
    for number in range(5):
        store.keep(f"question {number}", f"Score: {number}")
    store.keep("question 3", "Score: 9")  # said again, so it is the latest
    kept = [store.reply(f"question {number}") for number in range(5)]
    assert kept == [None, None, None, "Score: 9", "Score: 4"] and JudgeStore(None).reply("question 3") is None


def test_what_may_work_later_is_tried_again_when_the_endpoint_says():
    busy = Reply("", status=429, headers={"Retry-After": "0.3"})
    with serving(always(busy, Reply("", status=503), Reply(None, body=b"not json"), Reply("Score: 5"))) as endpoint:
        (said,) = judged(Judge("m", endpoint.base_url), sample())
    assert said["score"] == 0.5 and len(endpoint.requests) == 4
    assert endpoint.times_s[1] - endpoint.times_s[0] >= 0.3


def test_a_request_that_hangs_is_given_up_and_made_again():
    with serving(always(Reply(after_s=3.0), Reply("Score: 5"))) as endpoint:
        (said,) = judged(Judge("m", endpoint.base_url, deadline_s=5, request_s=0.3), sample())
    assert said["score"] == 0.5 and len(endpoint.requests) == 2


@pytest.mark.parametrize(
    "reply, message",
    [
        (Reply("", status=429), r"answered 429: .*the last of \d+ tries in 1.5 s"),
        (Reply("", status=429, headers={"Retry-After": "3600"}), "the last of 1 tries"),
        (Reply("", status=500, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), "answered 500"),
        (Reply(after_s=5.0), "did not answer within"),
        (Reply(None, body=b"<html>"), "sent no chat completion: <html>"),
        (Reply(None, body=b'{"choices": []}'), "sent no chat completion"),
        (Reply(None, body=b'{"choices": [{"message": {"content": null}}]}'), "a reply without text"),
        (Reply(None, body=b"x" * 3_000_000), "sent more than 1048576 bytes"),
        (Reply("", status=400), "answered 400"),
        (Reply("I would rather not."), "no score from 0 to 10 in the judge's reply: 'I would rather not.'"),
        (Reply("Score: 11"), "no score from 0 to 10"),
        (Reply("Score: -3"), "no score from 0 to 10"),
        (Reply(""), "no score from 0 to 10"),
    ],
)
def test_a_sample_without_a_score_is_left_out_or_an_error(reply, message):
    with serving(always(reply)) as endpoint:
        settings = {"deadline_s": 1.5, "request_s": 0.5}
        begun = time.monotonic()
        (said,) = judged(Judge("m", endpoint.base_url, **settings), sample())
        assert said["score"] is None and time.monotonic() - begun < 4.5
        with pytest.raises(EndpointError, match=message):
            judged(Judge("m", endpoint.base_url, on_failure="error", **settings), sample())


def test_failures_that_do_not_end_are_no_longer_skipped():
    with serving(lambda number, question: Reply("Score: 5" if number == 20 else "no")) as endpoint:
        judge = Judge("m", endpoint.base_url, max_concurrency=1)
        said = judged(judge, *(sample(f"answer {n}") for n in range(53)))
        assert sum(one["score"] is None for one in said) == 52, "20 failures, a score, 32 failures"
        with pytest.raises(EndpointError, match="no score from 0 to 10"):
            judged(judge, sample("one more"))


def test_an_endpoint_that_is_not_there_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and doesn't listen
        (said,) = judged(Judge("m", f"http://127.0.0.1:{taken.getsockname()[1]}/v1", deadline_s=1), sample())
    assert said["score"] is None and "can't be reached" in said["failure"]


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_what_will_never_work_is_an_error_whatever_was_asked_for(status):
    with serving(always(Reply("", status=status, headers={"Location": "http://127.0.0.1:1/"}))) as endpoint:
        with pytest.raises(EndpointRefusedError, match=f"answered {status}; check base_url, model and api_key"):
            judged(Judge("m", endpoint.base_url, on_failure="skip"), sample())
        assert len(endpoint.requests) == 1


def test_an_empty_response_gets_nothing_without_a_question():
    with serving(always(Reply())) as endpoint:
        (said,) = judged(Judge("m", endpoint.base_url), sample(" \n"))
    assert said["score"] == 0.0 and not endpoint.requests


def test_hostile_responses_are_asked_about_like_any_other():
    with serving(always(Reply())) as endpoint:
        judge = Judge("m", endpoint.base_url)
        said = judged(judge, sample("\ud800"), sample("\x00 " * 1000), sample("{{prompt}}{0.__class__}"))
    assert [one["score"] for one in said] == [1.0, 1.0, 1.0]
    assert any("{{prompt}}{0.__class__}" in question for question in endpoint.questions)


def test_other_scales_patterns_and_columns():
    with serving(always(Reply("<b>3</b> of 5"))) as endpoint:
        judge = Judge("m", endpoint.base_url, prompt="{rubric}: {response}", pattern=r"<b>(\d)</b>", low=1, high=5)
        (said,) = judged(judge, sample(rubric="Is it kind?"))
        assert said["score"] == 0.5 and endpoint.questions == ["Is it kind?: a sky"]
        with pytest.raises(ArgumentError, match=r"names \{rubric\}, which is no column; there are answer, prompt"):
            judged(judge, sample())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"base_url": "localhost:8000"}, "is no http address"),
        ({"base_url": "http://me:secret@host/v1"}, "has a login in it"),
        ({"prompt": "Grade it"}, r"has no \{response\}"),
        ({"pattern": "score"}, "has no group"),
        ({"pattern": "("}, "not a regular expression"),
        ({"low": 5, "high": 5}, "must be more than low"),
        ({"on_failure": "ignore"}, "must be skip or error"),
        ({"api_key": "env:NO_SUCH_KEY_OF_A_JUDGE"}, "NO_SUCH_KEY_OF_A_JUDGE of api_key is not set"),
        ({"cache": "/proc/nothing/judge.sqlite"}, "can't be used"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message) as refused:
        Judge(**{"model": "m", "base_url": "http://localhost/v1", **arguments})
    assert "secret" not in str(refused.value)


def test_in_a_run_the_key_comes_from_the_environment_and_is_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "canary-of-a-key")
    with serving(always(Reply("Score: 5"), Reply("Score: 10"))) as endpoint:
        entry = f"{{name: judge, model: m, base_url: '{endpoint.base_url}', api_key: 'env:MY_JUDGE_KEY', weight: 0.5}}"
        config = compose_cli([f"reward.functions=[{{name: length, most: 3}}, {entry}]"])
        spec = RewardSpec.of_config(config.reward, (), folder=tmp_path)
        with RewardPool(spec, config.reward) as pool:
            row = RewardRow(0, "s", "scattering", {}, {"prompt": "Why?"})
            first = pool.submit(row, "a sky", "one").result(30)
            other = pool.submit(row, "another sky", "two").result(30)
    assert (first.score, other.score) == (1.25, 1.5)
    assert dict(first.parts) == {"length": 1.0, "judge": 0.5, "judge/verdict": "Score: 5"}
    assert all(headers["Authorization"] == "Bearer canary-of-a-key" for headers in endpoint.headers)
    assert "canary" not in json.dumps(spec.to_plain()) + config.model_dump_json()
    (cache,) = tmp_path.iterdir()
    assert cache.name == "judge.sqlite" and b"canary" not in cache.read_bytes()


def test_processes_share_the_cache_and_the_pace(tmp_path):
    with serving(always(Reply(after_s=0.05))) as endpoint:
        entry = f"{{name: judge, model: m, base_url: '{endpoint.base_url}', requests_per_minute: 120}}"
        config = compose_cli([f"reward.functions=[{entry}]", "reward.num_workers=2"])
        with RewardPool(RewardSpec.of_config(config.reward, (), folder=tmp_path), config.reward) as pool:
            row = RewardRow(0, "s", None, {}, {"prompt": "Why?"})
            futures = [pool.submit(row, f"sky {n}", str(n)) for n in range(6)]
            assert [future.result(30).score for future in futures] == [1.0] * 6
    # Six turns half a second apart are 2.5 s; each process for itself would be done after one. What is between the two
    # is for a machine that is late to answer the first.
    assert endpoint.times_s[-1] - endpoint.times_s[0] >= 1.5
    assert len(endpoint.requests) == 6


def test_a_slow_judge_gets_no_further_processes_that_would_ask_more_at_once():
    with serving(always(Reply(after_s=0.5))) as endpoint:
        entry = (
            f"{{name: judge, model: m, base_url: '{endpoint.base_url}', max_concurrency: 2, prompt: '{{response}}'}}"
        )
        config = compose_cli([f"reward.functions=[{entry}]", "reward.timeout_s=2"])
        with RewardPool(RewardSpec.of_config(config.reward, ()), config.reward) as pool:
            futures = [pool.submit(RewardRow(0, "s", None), f"sky {n}", str(n)) for n in range(10)]
            assert [future.result(30).score for future in futures] == [1.0] * 10
    assert endpoint.most_at_once == 2
