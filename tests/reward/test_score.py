import pytest

from hrl.reward.score import compute_score, find_scorer


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
        ("#### 71\nno:\n#### 72", "… 48/2\n#### 72", True),
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
    assert compute_score("math", response, gold) == float(right)


@pytest.mark.parametrize("data_source", ["numeric", "gsm8k"])
def test_a_ground_truth_that_cannot_be_one_is_an_error(data_source):
    with pytest.raises(ValueError, match="ground truth 'abc'.*is not a number"):
        compute_score(data_source, "1", "abc")


def test_unknown_data_sources_are_told_apart_from_known_ones():
    with pytest.raises(ValueError, match=r"'bundled/adition'; there are: .*bundled/addition"):
        find_scorer("bundled/adition")
