"""What environments give is read as what it means, or refused with a sentence; what is read is plain and bounded."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrl.environments.interface import Action, EnvironmentReplyError, Observation, StepResult, ToolCall
from hrl.environments.replies import (
    action_from_plain,
    action_to_plain,
    clean_text,
    observation_from_plain,
    observation_to_plain,
    read_observation,
    read_step,
    step_from_plain,
    step_to_plain,
    without_middle,
)


def message(content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def nested(depth: int) -> Any:
    return "x" if depth == 0 else [nested(depth - 1)]


def test_a_text_and_messages_are_observations():
    assert read_observation("hi").messages == [message("hi")]
    assert read_observation((message("a"), message([{"type": "text", "text": "b"}]))).messages == [
        message("a"),
        message([{"type": "text", "text": "b"}]),
    ]
    assert read_observation(Observation(token_ids=np.array([1, 2]))).token_ids == (1, 2)
    assert read_observation([message(None)]).messages == [message(None)]


@pytest.mark.parametrize(
    "value, told",
    [
        (None, "returned None, where an observation is expected"),
        (3, "returned 3, where an observation"),
        (b"x", r"returned b'x', where an observation.*; \.decode\(\) makes a text of it"),
        (2.5, r"returned 2\.5, where an observation.*; str\(…\) makes a text of it"),
        ((one for one in "x"), "returned a generator, .*; write `return` in place of `yield`"),
        (("x", {}), "a tuple of an observation and a dict, where the observation alone .*environment.path=gymnasium"),
        ((None, {"a": 1}), r"gymnasium's interface.*\(hrl\.environments\.gymnasium\)"),
        ({"role": "user"}, "returned a dict, where an observation"),
        (Observation(), "neither messages nor token_ids"),
        (Observation(messages=[], token_ids=[1]), "both messages and token_ids"),
        (["x"], "returned 'x' as message 0, where a dict with role and content"),
        ([message(), {"content": "x"}], "returned message 1 without a role"),
        ([{"role": 3, "content": "x"}], "returned message 0 without a role"),
        ([message(3)], "message 0 with 3 as its content, where a text is expected"),
        ([message(image={1, 2})], "returned a set in message 0, which is no plain data"),
        ([message(image={1: 2})], "returned 1 as a key in message 0, where a text"),
        ([message(deep=nested(60))], "message 0 nested more than 50 levels deep"),
        ([message(number=1 << 20_000)], "a number of 20,001 bits in message 0"),
        (Observation(messages="x"), "returned 'x' as messages, where a list"),
        (Observation(token_ids="12"), "returned '12' as token_ids, where a list"),
        (Observation(token_ids=[1, -1]), "returned -1 in token_ids"),
        (Observation(token_ids=[1, True]), "returned True in token_ids"),
        (Observation(token_ids=[1 << 40]), "in token_ids, where numbers of tokens"),
        (Observation(messages=[], tools=[{"name": "x"}]), "returned a dict as a tool"),
        (Observation(messages=[], tools="x"), "returned 'x' as tools, where a list"),
        ("x" * 5_000_000, "returned more than 4,194,304 characters: cut what is longer"),
        (Observation(token_ids=range(5_000_000)), "returned more than 4,194,304 characters"),
        ([message(data=np.zeros(5_000_000))], "returned more than 4,194,304 characters"),
    ],
)
def test_what_is_no_observation_is_refused(value, told):
    with pytest.raises(EnvironmentReplyError, match=told):
        read_observation(value)


def test_numbers_of_libraries_become_plain_ones():
    result = read_step(
        StepResult("x", np.float32(0.5), np.bool_(False), metrics={"a": np.int64(3), "b": Fraction(1, 2), "c": True})
    )
    assert (result.reward, result.done, result.metrics) == (0.5, False, {"a": 3.0, "b": 0.5, "c": 1.0})
    assert read_observation([message(size=np.int64(3), grid=np.eye(2))]).messages == [
        message(size=3, grid=[[1.0, 0.0], [0.0, 1.0]])
    ]


@pytest.mark.parametrize(
    "value, told",
    [
        (None, r"returned None, where hrl\.StepResult.*; is a `return` missing\?"),
        (("x", 1.0, True, False, {}), r"a tuple, where hrl\.StepResult.*environment.path=gymnasium"),
        (("x", 1.0, True, {}), r"a tuple, where hrl\.StepResult.*environment.path=gymnasium"),
        (StepResult(("x", {})), "a tuple of an observation and a dict"),
        ({"done": True}, "returned a dict, where"),
        (StepResult(), "no observation although the episode is not done"),
        (StepResult([]), "an empty observation although the episode is not done"),
        (StepResult("x", reward=math.nan), "returned nan as the reward, which is not finite in float32"),
        (StepResult("x", reward=-1e39), "returned -1e[+]39 as the reward, which is not finite"),
        (StepResult("x", reward=10**400), "returned inf as the reward"),
        (StepResult("x", reward="1"), "returned '1' as the reward, where a number"),
        (StepResult("x", reward={1: 1.0}), "returned a dict as the reward"),
        (StepResult("x", reward=[1.0, math.nan]), "returned nan as the reward of token 1, which is not finite"),
        (StepResult("x", reward=[1.0, "2"]), "returned '2' as the reward of token 1, where a number"),
        (StepResult("x", reward=[3e38, 3e38]), "returned 6e[+]38 as the sum of the tokens' rewards"),
        (StepResult("x", reward=[[1.0]]), "returned a list as the reward of token 0"),
        (StepResult("x", reward=Decimal("1")), "returned a Decimal as the reward"),
        (StepResult("x", done=1), "returned 1 as done, where True or False"),
        (StepResult("x", truncated=None), "returned None as truncated"),
        (StepResult("x", metrics=[1]), "returned a list as metrics"),
        (StepResult("x", metrics={"a": math.inf}), "returned inf as metric a"),
        (StepResult("x", metrics={"a": "b"}), "returned 'b' as metric a, where a number"),
        (StepResult("x", metrics={1: 1.0}), "returned 1 as the name of a metric"),
        (StepResult("x", metrics={"\n": 1.0}), r"returned '\\n' as the name of a metric"),
        (StepResult("x", metrics={str(n): 1.0 for n in range(300)}), "returned 300 metrics"),
        (StepResult(3), "returned 3, where an observation"),
    ],
)
def test_what_is_no_result_is_refused(value, told):
    with pytest.raises(EnvironmentReplyError, match=told):
        read_step(value)


@pytest.mark.parametrize("rewards", [[0.5, -1, 0], (0.5, -1.0, 0.0), np.array([0.5, -1.0, 0.0], np.float32)])
def test_rewards_of_tokens_are_one_for_each_and_the_same_on_the_other_side(rewards):
    read = read_step(StepResult("x", rewards), num_tokens=3)
    assert read.reward == (0.5, -1.0, 0.0)
    assert step_from_plain(json.loads(json.dumps(step_to_plain(read))), num_tokens=3) == read
    with pytest.raises(EnvironmentReplyError, match="returned 3 rewards for a turn of 4 tokens, where a number for"):
        read_step(StepResult("x", rewards), num_tokens=4)


def test_what_is_truncated_is_done_and_needs_no_observation():
    result = read_step(StepResult(truncated=True))
    assert (result.done, result.truncated, result.observation) == (True, True, None)


def test_long_texts_of_messages_lose_their_middle_and_others_nothing():
    text = "a" * 50 + "b" * 900 + "c" * 50
    read = read_step(StepResult([message(text), message([{"type": "text", "text": text}]), message("x" * 100)]), 100)
    cut = "a" * 50 + "\n[… 900 characters left out …]\n" + "c" * 50
    assert [one["content"] for one in read.observation.messages] == [cut, [{"type": "text", "text": cut}], "x" * 100]
    assert read_observation(text).messages[0]["content"] == text


@given(st.text(), st.integers(2, 50))
def test_a_shortened_text_keeps_both_ends_and_says_how_much_it_lost(text, longest):
    short = without_middle(text, longest)
    half = longest // 2
    assert short == text if len(text) <= longest else (short[:half], short[-half:]) == (text[:half], text[-half:])


@given(st.text(st.characters(codec=None)))
def test_clean_texts_can_be_encoded_and_sound_ones_stay_as_they_are(text):
    clean = clean_text(text)
    clean.encode()
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert clean == text


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.text(min_size=1), "content": st.text()}, optional={"extra": PLAIN}), min_size=1
)
FINITE = st.floats(-1e30, 1e30)


@given(MESSAGES, st.none() | FINITE, st.booleans(), st.booleans(), st.dictionaries(st.sampled_from("abc"), FINITE))
def test_a_result_is_the_same_on_the_other_side(messages, reward, done, truncated, metrics):
    read = read_step(StepResult(messages, reward, done, truncated, metrics))
    assert step_from_plain(json.loads(json.dumps(step_to_plain(read)))) == read


@given(PLAIN)
def test_whatever_a_process_sends_is_a_result_or_refused(plain):
    for read in (step_from_plain, observation_from_plain):
        try:
            read(plain)
        except EnvironmentReplyError as error:
            assert str(error).startswith("returned ")


def test_an_observation_is_the_same_on_the_other_side():
    for observation in (
        Observation(messages=[message()], tools=[{"type": "function", "function": {"name": "x"}}]),
        Observation(token_ids=(1, 2)),
    ):
        assert observation_from_plain(json.loads(json.dumps(observation_to_plain(observation)))) == observation


def test_an_action_is_the_same_on_the_other_side():
    calls = (ToolCall("add", {"a": 1}, "7", '{"a": 1}'), ToolCall("x", None, text="{"))
    action = Action("text\ud800", (1, 2), "content", "reasoning", calls, "length", 3)
    assert action_from_plain(json.loads(json.dumps(action_to_plain(action)))) == action
