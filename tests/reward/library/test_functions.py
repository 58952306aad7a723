"""What the functions of the library pay, by hand-computed numbers."""

import time

import pytest

from hrl.reward.library.base import ArgumentError
from hrl.reward.library.json_schema import JsonSchema
from hrl.reward.library.language import Language
from hrl.reward.library.length import Length
from hrl.reward.library.pattern import Pattern
from hrl.reward.library.repetition import Repetition
from hrl.reward.library.tags import Tags

# ------------------------------------------------------------------------------------------------------------ pattern


def test_a_pattern_pays_one_match_and_not_a_list_of_them():
    yes = Pattern(r"\b(yes|no)\b", ignore_case=True)
    assert (yes("Yes."), yes("maybe"), yes("yes or no"), yes("yes no yes no")) == (1.0, 0.0, 0.0, 0.0)
    assert Pattern(r"\d", most=2)("1 2") == 1.0 and Pattern(r"\d", most=2)("1 2 3") == 0.0
    assert Pattern("yes", whole=True)(" yes\n") == 1.0 and Pattern("yes", whole=True)("yes it is") == 0.0
    assert yes("<think>yes</think> no idea") == 1.0 and yes("<think>yes") == 0.0


def test_a_pattern_that_backtracks_for_ever_does_not_match():
    begun = time.process_time()
    assert Pattern(r"(a+)+$", whole=True)("a" * 40 + "!") == 0.0
    assert Pattern(r"^(\w+\s?)+$")("a" * 40 + "!") == 0.0
    assert time.process_time() - begun < 4.0


def test_patterns_that_pay_nothing_or_everything_are_refused():
    with pytest.raises(ArgumentError, match="matches an empty text"):
        Pattern("a*")
    with pytest.raises(ArgumentError, match="is not a regular expression: missing"):
        Pattern("(")


# --------------------------------------------------------------------------------------------------------------- tags


@pytest.mark.parametrize(
    "response, whole, partial",
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        (" <think>a</think>\n<answer>b</answer>\n", 1, 1),
        ("<think>a</think><answer>b</answer> and more", 0, 2 / 3),
        ("Sure! <answer>b</answer>", 0, 1 / 3),
        ("<answer>b</answer><think>a</think>", 0, 1 / 3),
        ("<think></think><answer> </answer>", 0, 0),
        ("<think>\u200b</think><answer>\u2060 </answer>", 0, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0, 1 / 3),
        ("<think>a<answer>b</answer></think>", 0, 1 / 3),
        ("<think>a</think>", 0, 1 / 3),
        ("<think>a", 0, 0),
        ("<think><answer></think></answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_tags_stand_once_in_order_and_hold_something(response, whole, partial):
    assert Tags()(response) == whole
    assert Tags(partial=True)(response) == pytest.approx(partial)


def test_what_nobody_sees_has_no_length():
    assert Length(target=3, unit="characters")("\u200b" * 3) == 0.0 == Length(least=1)("\u200b")
    assert Length(target=3, unit="characters")("a\u200bbc") == 1.0


def test_a_tag_that_the_prompt_opens_is_counted():
    assert Tags(opened=True)("a</think><answer>b</answer>") == 1.0
    assert Tags(opened=True)("<think>a</think><answer>b</answer>") == 0.0
    assert Tags(tags=["plan", "code", "test"])("<plan>1</plan><code>2</code><test>3</test>") == 1.0
    with pytest.raises(ArgumentError, match="is not a name"):
        Tags(tags=["<think>"])


# ------------------------------------------------------------------------------------------------------------- length


def test_lengths_outside_of_the_bounds_are_paid_linearly_less():
    brief = Length(most=4)
    assert [brief("a " * n) for n in (0, 1, 4, 5, 6, 9)] == [0.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    target = Length(target=10, width=5, unit="characters")
    assert [target("a" * n) for n in (0, 5, 7, 10, 12)] == pytest.approx([0, 0, 0.4, 1, 0.6])
    assert Length(most=4, penalty=True)("a " * 5) == -0.5 and Length(most=4, penalty=True)("") == -1.0
    with pytest.raises(ArgumentError, match="target takes the place"):
        Length(target=3, most=4)
    with pytest.raises(ArgumentError, match="less than least=9"):
        Length(least=9, most=4)


# --------------------------------------------------------------------------------------------------------- repetition


def test_repetition_takes_away_the_share_of_sequences_that_came_before():
    assert Repetition(2)("a b a b a b") == pytest.approx(2 / 5 - 1)  # ab ba ab ba ab
    assert Repetition(3)("one two three four") == 0.0
    assert Repetition(3)("one two") == 0.0
    assert Repetition(2)("A b a B") == pytest.approx(2 / 3 - 1)
    assert Repetition(3)("好好好好好好") == pytest.approx(1 / 4 - 1)
    assert Repetition(3)("a" * 1000) < -0.9 and Repetition(3)("!" * 1000) < -0.9


# ----------------------------------------------------------------------------------------------------------- language


def test_the_share_of_letters_in_a_language():
    german = Language("de", among=["en"])
    assert german("Das ist eine lange Antwort auf deine Frage.") == 1.0
    assert german("This is a long answer to your question.") == 0.0
    assert 0.3 < german("Das ist eine lange Antwort. This is a long answer.") < 0.7
    assert german("12 + 5 = 17") == 0.0 and german("$x^2$ `print(1)`") == 0.0 and german("\ud800\ud801") == 0.0
    assert Language("zh", among=["ja", "en"])("答案是十二，因为七加五等于十二。") == 1.0
    mixed = german("Die Lösung ist einfach. ```python\nfor letter in answer: print(letter)\n```")
    assert mixed == 1.0
    with pytest.raises(ArgumentError, match="among names no other"):
        Language("de", among=["de"])


# -------------------------------------------------------------------------------------------------------- json_schema

PERSON = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}}


@pytest.mark.parametrize(
    "response, score",
    [
        ('{"name": "Ada"}', 1.0),
        ('<think>{"x": 1}</think> {"name": "Ada"}', 1.0),
        ('Here:\n```json\n{"name": "Ada"}\n```\nas you wished', 1.0),
        ('```\n{"name": "Ada"}\n```', 1.0),
        ('{"name": "Ada"} {"name": "Bob"}', 0.0),
        ('```json\n{"name": "Ada"}\n```\n```json\n{"name": "Bob"}\n```', 0.0),
        ('It is {"name": "Ada"}', 0.0),
        ("{}", 0.0),
        ('{"name": ""}', 0.0),
        ('{"name": NaN}', 0.0),
        ('{"name": "Ada", "age": 1e999}', 0.0),
        ('{"name": 1, "name": "Ada"}', 0.0),
        ('{"name": ' + "[" * 100_000, 0.0),
        ("9" * 50_000, 0.0),
        ('{"name": "Ad\ud800"}', 1.0),
    ],
)
def test_a_schema_pays_for_one_value(response, score):
    assert JsonSchema(PERSON)(response) == score


def test_a_schema_may_be_a_file_and_refers_to_nothing_outside(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}}')
    assert JsonSchema(str(file))("[1, 2]") == 1.0 and JsonSchema(str(file))('["a"]') == 0.0
    with pytest.raises(ArgumentError, match="can't be read"):
        JsonSchema(str(tmp_path / "none.json"))
    with pytest.raises(ArgumentError, match="which is not in it"):
        JsonSchema({"$ref": "http://127.0.0.1:9/schema.json"})("[1]")
    assert JsonSchema(PERSON, fenced=False)('```json\n{"name": "Ada"}\n```') == 0.0
