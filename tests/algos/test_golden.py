"""verl 0.9.1's numbers reproduced. Where we differ on purpose both numbers stand here."""

import pytest

from tests.algos.golden import (
    CASES,
    PAGE,
    differing,
    gpg_of_negative_scores,
    grpo_group_of_one,
    k3_far_away,
    page,
    token_baseline_of_equal_scores,
    whitening_with_equal_scores,
)


def test_there_are_88_cases() -> None:
    assert len(CASES) == 88


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c['group']}-{c['name']}" for i, c in enumerate(CASES)])
def test_golden_case(case: dict) -> None:
    assert case["outputs"]
    assert differing(case) == []


def test_k3_keeps_the_gradient_that_verl_clamps_away() -> None:
    (verl_value, value), (verl_gradient, gradient) = k3_far_away().values()
    assert (verl_value, verl_gradient) == (10.0, 0.0)
    assert value == pytest.approx(142.4131591025766, rel=1e-12)  # e^5 - 6
    assert gradient == pytest.approx(-147.4131591025766, rel=1e-12)  # 1 - e^5


def test_grpo_group_of_one_teaches_nothing_where_verl_trains_on_the_raw_score() -> None:
    ((verl_advantage, advantage),) = grpo_group_of_one().values()
    assert verl_advantage == pytest.approx(0.7, rel=1e-5)
    assert advantage == 0.0


def test_gpg_does_not_depend_on_where_zero_lies() -> None:
    ((verl_advantage, advantage),) = gpg_of_negative_scores().values()
    assert (verl_advantage, advantage) == (1.5, 0.75)


def test_whitening_leaves_a_group_of_equal_scores_at_zero_where_verl_moves_it() -> None:
    numbers = whitening_with_equal_scores()
    for name in ("reinforce_plus_plus_baseline", "gdpo"):
        # Tokens 1/2, -1/2 (three times), 0, 0: mean -1/6, variance 1/6. Without the zeros: mean -1/4, variance 1/4.
        assert numbers[f"{name}, equal scores"] == (pytest.approx(6**-0.5, rel=1e-5), 0.0)
        assert numbers[f"{name}, best of the other group"] == (
            pytest.approx((1 / 2 + 1 / 6) * 6**0.5, rel=1e-5),
            pytest.approx(1.5, rel=1e-5),
        )


def test_the_token_baseline_of_equal_scores_teaches_nothing_where_verl_trains_on_the_tail() -> None:
    assert token_baseline_of_equal_scores() == {"advantage": (1.0, 0.0)}


def test_the_page_lists_every_case_as_it_is() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.algos.golden"
