from decimal import Decimal

import pytest

from hrl.reward.library.answer import Answer
from hrl.reward.score import PROGRAMS, SCORERS, compute_score, find_scorer, why_no_scorer
from hrl.reward.scorers.base import TruthError
from hrl.reward.scorers.numbers import NUMERIC


@pytest.mark.parametrize(
    "response, right",
    [
        ("12", True),
        ("7 + 5 = 12", True),
        ("The answer is 12.", True),
        ("The final number is: **12**", True),
        ("12.0", True),
        ("=12", True),
        ("$12", True),
        ("012", True),
        ("", False),
        ("twelve", False),
        ("12 or 13", False),  # only the last number counts
        ("12, so 7 + 5", False),
        ("-12", False),
        ("12.5", False),
        ("1.12", False),
        ("1,012", False),
        ("112", False),
        ("x12", False),
        ("12a 3", False),
        ("１２", False),  # digits of another script are no number to us
        ("__import__('os').abort()", False),
        ("9" * 10_000, False),
    ],
)
def test_the_last_number_of_a_sum_decides(response, right):
    assert compute_score("bundled/addition", response, "12") == float(right)


def test_a_minus_belongs_to_a_number_that_stands_free():
    assert compute_score("numeric", "so it is -3", "-3") == 1.0
    assert compute_score("numeric", "5-3", "-3") == 0.0
    assert compute_score("numeric", "in total 1,234.50", "1234.5") == 1.0


@pytest.mark.parametrize(
    "response, gold, right",
    [
        ("so 70 + 2\n#### 72", "72", True),
        ("#### 1,000", "1000", True),
        ("#### $18.00", "18", True),
        ("#### 72", "… 48/2\n#### 72", True),
        ("#### 71\nno:\n#### 72", "… 48/2\n#### 72", False),  # two answers are none
        ("the answer is 72", "72", False),
        ("#### 72.5", "72", False),
    ],
)
def test_gsm8k_wants_the_answer_behind_four_hashes(response, gold, right):
    assert compute_score("openai/gsm8k", response, gold) == float(right)


@pytest.mark.parametrize(
    "response, gold, right",
    [
        (r"Thus \boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        (r"the answer is $\frac{3}{4}$", r"\frac{6}{8}", True),
        (r"\boxed{3}", "4", False),
        ("I don't know", "4", False),
        ("", "4", False),
    ],
)
def test_math_is_right_when_equal_and_not_only_when_spelt_alike(response, gold, right):
    assert compute_score("math_verify", response, gold) == float(right)


@pytest.mark.parametrize("data_source", ["numeric", "gsm8k"])
def test_a_ground_truth_that_cannot_be_one_is_an_error(data_source):
    with pytest.raises(ValueError, match="ground truth 'abc'.*is not a number"):
        compute_score(data_source, "1", "abc")


@pytest.mark.parametrize("truth", ["3,14", "1,2", "1234,567", "1,2345", "#### 3,14"])
def test_a_truth_whose_comma_is_not_before_thousands_is_no_number(truth):
    with pytest.raises(TruthError, match="a comma elsewhere than before thousands"):
        NUMERIC.read_truth("numeric", truth, {})


@pytest.mark.parametrize("truth, number", [("1,234.5", "1234.5"), (" $-12,345,678 ", "-12345678"), (3.14, "3.14")])
def test_a_truth_may_have_commas_before_thousands(truth, number):
    assert NUMERIC.read_truth("numeric", truth, {}) == Decimal(number)


def test_unknown_data_sources_are_told_apart_from_known_ones():
    with pytest.raises(
        ValueError, match=r"'bundled/adition' \(did you mean 'bundled/addition'\?\); there are: .*gsm8k"
    ):
        find_scorer("bundled/adition")


VERLS_DATA_SOURCES = [  # all that verl 0.9.1's `default_compute_score` knows
    *("openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    *("math_dapo", "math", "math_dapo_reasoning", "aime", "aime2024", "aime_2025"),
    *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12"),
    *("numina_olympiads", "codecontests", "apps", "codeforces", "taco", "hiyouga/geometry3k"),
    *("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa", "searchR1_2wikimultihopqa"),
    *("searchR1_musique", "searchR1_bamboogle"),
]


@pytest.mark.parametrize("data_source", VERLS_DATA_SOURCES)
def test_every_data_source_of_verl_has_a_function(data_source):
    assert why_no_scorer(data_source) is None
    assert find_scorer(data_source)


@pytest.mark.parametrize("data_source", sorted({*SCORERS, "aime"} - {"searchR1_nq"}))
def test_an_answer_that_says_nothing_is_worth_what_a_wrong_one_is(data_source):
    truth = (
        {"target": ["x"]}
        if data_source.startswith("searchR1")
        else {"inputs": ["1"], "outputs": ["1"]}
        if data_source in PROGRAMS
        else "B"
        if data_source == "multiple_choice"
        else "12"
    )
    assert compute_score(data_source, "no idea", truth) == find_scorer(data_source).wrong


def test_the_flexible_rule_is_there_for_who_asks_for_it():
    """verl's `method="flexible"`, which pays for any text that happens to end in the number."""
    assert compute_score("gsm8k_flexible", "1 2 3 … 71 72", "72") == 1.0
    assert compute_score("gsm8k_flexible", "72, or 73", "72") == 0.0
    assert compute_score("gsm8k_flexible", "72" + " " * 300, "72") == 0.0


def test_dapo_gives_what_verl_gives():
    assert compute_score("math_dapo", "Answer: $\\frac34$ units", r"\frac{3}{4}") == {
        "score": 1.0,
        "acc": True,
        "pred": r"\frac{3}{4}",
    }
    assert compute_score("aime2024", "I do not know", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


@pytest.mark.parametrize("data_source", ["math_verify", "numina_cn_k12", "hiyouga/geometry3k"])
def test_the_row_is_judged_before_the_response_is_looked_at(data_source):
    read = []
    with pytest.raises(ValueError, match=f"of data source '{data_source}' is not a mathematical expression"):
        Answer()(r"\boxed{10^{10^{10}}}", "", data_source, blames_response=read.append)
    assert not read


def test_a_truth_too_large_to_compute_with_is_compared_as_text():
    truth = "10^{10^{10}}"
    assert compute_score("math_verify", rf"\boxed{{{truth}}}", truth) == 1.0
    assert compute_score("math_verify", r"\boxed{10^{10^{11}}}", truth) == 0.0
