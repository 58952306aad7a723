"""Letters of multiple-choice answers."""

import pytest

from hrl.reward.score import compute_score

CHOICES = "Which is the capital of France?\nA) Rome\nB) Paris\nC) Madrid\nD) Berlin"


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "(B)",
        "(b)",
        "B.",
        "**B**",
        "B) Paris",
        "The answer is B.",
        "The answer is (B) Paris.",
        "The correct answer is **B**, because it is.",
        "Rome is in Italy, so not A.\nAnswer: B",
        "Answer: B) Paris",
        "Final answer: option B",
        r"So it is \boxed{B}.",
        r"\boxed{\text{B}}",
        "<think>A? no</think> <answer>B</answer>",
        "The answer is B. Paris is the capital.\n\nAnswer: B",
    ],
)
def test_the_right_letter_is_paid_however_it_is_written(response):
    assert compute_score("multiple_choice", response, "B") == 1.0
    assert compute_score("multiple_choice", response, 1) == 1.0
    assert compute_score("multiple_choice", response, "b") == 1.0
    assert compute_score("multiple_choice", response, "A") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        CHOICES,
        "A B C D",
        "A, B, C, D",
        "A or B",
        "The answer is A or B.",
        "The answer is B or C",
        "The answer is (B) or (C)",
        "The answer is B, C",
        "The answer is B/C",
        "B) Paris A) Rome",  # the choices again, the right one first
        "(B) Paris (A) Rome (C) Madrid",
        "The answer is B) Paris A) Rome",
        "B (or C)",
        "B is wrong",
        "The wrong answer is B",
        "The incorrect answer: B",
        "The answer is A. The answer is B.",
        r"\boxed{A} \boxed{B}",
        "<answer>B</answer><answer>C</answer>",
        "<think>B</think>",
        "<think>The answer is B",
        "The answer is a bee",
        "The answer is a",
        "Because of this",
        "Bravo",
        "The answer is Berlin",
    ],
)
def test_no_letter_and_several_letters_are_not_paid(response):
    assert compute_score("multiple_choice", response, "B") == 0.0


@pytest.mark.parametrize("truth", ["Paris", "", None, -1, 30, True, "AB"])
def test_a_truth_that_is_no_letter_is_the_rows_fault(truth):
    with pytest.raises(ValueError, match="neither a letter nor the index"):
        compute_score("multiple_choice", "B", truth)
