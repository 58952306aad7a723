"""A megabyte of whatever a policy may repeat costs every rule milliseconds: no pattern is worse than linear."""

import contextlib
import time

import pytest

from hrl.reward.score import compute_score
from hrl.reward.scorers.math_equal import AnswerTooComplexError, parse_bounded, read_truth
from hrl.reward.scorers.math_graded import GEOMETRY
from hrl.reward.scorers.math_text import MATH

REPEATED = [
    *("<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}\\boxed{1", "\\boxed 1", "#### ", "#### 1\n"),
    *("answer is ", "the answer is 1 ", "Answer: 1\n", "final answer: $", "# answer\n", "answer *", "it is 1 and "),
    *("$", "{", "(", "= ", "1 = ", "1 ", "1,", "9", " ", "\n", "? ", "a. ", "\ud800", "\\", "** ", "sqrt", "frac"),
]
RULES = ["numeric", "gsm8k", "gsm8k_flexible", "lighteval/MATH", "math", "math_verify", "numina_cn_k12", "searchR1_nq"]
MOST_CPU_S = 3.0  # quadratic ones take minutes


@pytest.mark.parametrize("data_source", [*RULES, "hiyouga/geometry3k"])
def test_a_megabyte_costs_milliseconds(data_source):
    truth = {"target": ["x"]} if data_source == "searchR1_nq" else "12"
    compute_score(data_source, "<think>", truth)
    for repeated in REPEATED:
        text = "<think>x</think>" + repeated * (1_000_000 // len(repeated))
        begun = time.process_time()
        with contextlib.suppress(AnswerTooComplexError):
            compute_score(data_source, text, truth)
        assert time.process_time() - begun < MOST_CPU_S, f"{repeated!r} by {data_source}"


@pytest.mark.parametrize(("scorer", "longest"), [(MATH, 2000), (GEOMETRY, 400)])
def test_of_a_long_box_only_the_beginning_is_voted_on(scorer, longest):
    assert scorer.answer(f"\\boxed{{{'x' * 5000}}}", None) == "x" * longest


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "10^{-10^{10}}",
        "9^9^9^9^9",
        "2^{2^{2^{2^{2}}}}",
        "10^{100000}",
        "((9!)!)!",
        "99^{99}!",
        "1234567891011!",
        "(x+1)^{1000}",
        "(x+y+z)^{200}",
        r"\left(\left((x+1)^{9}\right)^{9}\right)^{9}",
        r"\lfloor 10^{10^9} \rfloor",
        r"\sum_{i=1}^{1000000000} i",
        r"\int_0^1 x^{x^x} dx",
        r"\binom{1000000}{500000}",
        "9" * 4000,
        "(" * 60 + "1+2" + ")" * 60 + "(",
        r"\frac{1}{1+" * 30 + "x" + "}" * 30,
        "+".join(f"x^{{{power}}}" for power in range(50)),
    ],
)
def test_what_no_computer_could_compute_is_known_before_it_is_tried(answer):
    begun = time.process_time()
    assert parse_bounded(answer) is None
    assert time.process_time() - begun < MOST_CPU_S


@pytest.mark.parametrize(
    "answer",
    [
        "2^{2005}",
        "1999!",
        "2^{0.5}",
        "(x+1)^{10}",
        r"\sqrt[3]{2+\sqrt{5}}",
        r"e^{i\pi}",
        r"\frac{2^{100}-1}{3}",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\left(-\infty, \frac{1}{2}\right]",
        "x^2+y^2=25",
        "{{{3}}}",
        "((((3))))",
    ],
)
def test_what_data_sets_have_for_answers_lies_within_the_bounds(answer):
    assert parse_bounded(answer)
    assert read_truth("math_verify", answer, {}).parsed
