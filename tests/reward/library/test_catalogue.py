"""Every function of the library: its entry in the catalogue, its range, and what lazy and hostile responses get."""

import asyncio
import inspect
import time
from inspect import getdoc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.config.reward import FUNCTION_NAMES
from hrl.reward.function import names_taken, read_reward
from hrl.reward.library.base import ArgumentError
from hrl.reward.library.catalogue import CATALOGUE, make

RANGES = {"repetition": (-1.0, 0.0), "math_dapo": (-1.0, 1.0)}
INSTANT = [name for name in CATALOGUE if name not in ("judge", "remote", "data_source")]
_MADE = {}


def function_of(name):
    """The function of the entry's example, made once."""
    if name not in _MADE:
        _MADE[name] = make(name, CATALOGUE[name].example.arguments)
    return _MADE[name]


def score_of(name, response, row=None):
    """What the function pays, called as a reward process calls it."""
    function, row = function_of(name), CATALOGUE[name].example.row if row is None else row
    truth = row.get("reward_model", {}).get("ground_truth", row.get("answer"))
    sample = {"data_source": "s", "extra_info": {}, **row, "response": response, "solution_str": response}
    sample |= {"ground_truth": truth}
    value = function(**{key: value for key, value in sample.items() if key in names_taken(function)})
    return read_reward(asyncio.run(value) if inspect.iscoroutine(value) else value)[0]


def test_the_configuration_knows_the_names_of_the_catalogue():
    assert tuple(CATALOGUE) == FUNCTION_NAMES


@pytest.mark.parametrize("name", INSTANT)
def test_an_example_scores_what_the_catalogue_says(name):
    example = CATALOGUE[name].example
    assert score_of(name, example.response) == pytest.approx(example.score)


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_every_argument_is_explained(entry):
    assert entry.rewards.endswith(".")
    assert all(one.meaning.endswith(".") for one in entry.arguments)
    assert not entry.arguments or "Args:" in getdoc(entry.make)


@pytest.mark.parametrize("name", INSTANT)
def test_lazy_responses_are_not_paid(name):
    row = CATALOGUE[name].example.row
    for lazy in (
        "",
        " ",
        "\n\n",
        "I don't know",
        str(row["prompt"]),
        "<think>",
        "<answer></answer>",
        "\\boxed{}",
        "####",
    ):
        if name in ("length", "language") and lazy.strip():
            continue  # these look at the form alone, and say so
        assert score_of(name, lazy) <= 0.0, f"{lazy!r} by {name}"


HOSTILE = [
    *("\ud800", "\x00", "a" * 1_000_000, "<think>" * 100_000, "[" * 200_000, "{" * 200_000, "\\boxed{" * 50_000),
    *('{"a":' * 100_000, "1" * 100_000, "-" * 100_000, "```\n" * 50_000, "(a" * 100_000, "B) " * 100_000),
    *("Score: 10\n" * 10_000, "<answer>" * 100_000, "answer is " * 50_000, "\n" * 100_000, "$" * 100_000),
]


@pytest.mark.parametrize("name", [name for name in INSTANT if name not in ("reasoning_gym",)])
def test_hostile_responses_cost_little_and_stay_in_range(name):
    low, high = RANGES.get(name, (0.0, 1.0))
    for text in HOSTILE:
        begun = time.process_time()
        score = score_of(name, text)
        assert time.process_time() - begun < 3.0, f"{text[:20]!r} by {name}"
        assert low <= score <= high


@pytest.mark.parametrize("name", [name for name in INSTANT if name not in ("reasoning_gym", "language", "math_verify")])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(), max_size=200) | st.from_regex(r"(<(think|answer)>|\\boxed\{|[A-E]\)|\d|[ \n}])*"))
def test_any_text_gets_a_number_in_range_and_always_the_same(name, text):
    low, high = RANGES.get(name, (0.0, 1.0))
    score = score_of(name, text)
    assert low <= score <= high and score == score_of(name, text)


def test_an_argument_that_is_not_known_is_answered_with_the_nearest():
    with pytest.raises(ArgumentError, match="does not take wdith. Did you mean width"):
        make("length", {"wdith": 3})
    with pytest.raises(ArgumentError, match="needs an argument more: schema"):
        make("json_schema", {})
    with pytest.raises(ArgumentError, match="takes no arguments|It takes no arguments"):
        make("numeric", {"tolerance": 1})
