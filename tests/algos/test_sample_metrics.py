"""Metrics of several samples a prompt, against the enumeration of every draw."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.algos.sample_metrics import best_at_k, maj_at_k, pass_at_k, worst_at_k

SCORES = np.array([[0.0, 1.0, 0.25], [2.0, 2.0, -1.0]])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_and_worst_equal_the_enumeration_of_all_draws(k: int) -> None:
    draws = [list(itertools.product(scores, repeat=k)) for scores in SCORES]
    assert best_at_k(SCORES, k) == pytest.approx([np.mean([max(d) for d in one]) for one in draws])
    assert worst_at_k(SCORES, k) == pytest.approx([np.mean([min(d) for d in one]) for one in draws])


@given(st.integers(1, 7), st.data())
@settings(deadline=None, max_examples=30)
def test_pass_at_k_equals_the_enumeration_of_all_subsets(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=3))
    k = data.draw(st.integers(1, n))
    samples = [[1] * c + [0] * (n - c) for c in correct]
    expected = [np.mean([max(subset) for subset in itertools.combinations(s, k)]) for s in samples]
    assert pass_at_k(np.array(correct), n, k) == pytest.approx(expected)


def test_more_samples_than_there_are_cannot_pass() -> None:
    with pytest.raises(ValueError, match="pass@3 cannot be estimated from 2"):
        pass_at_k(np.array([1]), 2, 3)


def majority_by_enumeration(answers: list[int], scores: list[float], k: int) -> float:
    means = {a: np.mean([s for b, s in zip(answers, scores, strict=True) if a == b]) for a in answers}
    won = []
    for draw in itertools.product(answers, repeat=k):
        most = max(map(draw.count, draw))
        won.append(np.mean([means[a] for a in set(draw) if draw.count(a) == most]))
    return float(np.mean(won))


def test_majority_votes_converge_to_the_enumeration_of_all_draws() -> None:
    answers = np.array([[0, 0, 1, 2], [0, 1, 1, 1], [0, 0, 0, 0]])
    scores = np.array([[1.0, 0.5, 0.0, 0.25], [0.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    got = maj_at_k(answers, scores, [5, 2, 3], np.random.default_rng(0), draws=20_000)
    assert set(got) == {2, 3, 5}
    for k, values in got.items():
        expected = [majority_by_enumeration(a, s, k) for a, s in zip(answers.tolist(), scores.tolist(), strict=True)]
        assert values == pytest.approx(expected, abs=0.012)
        assert values[2] == 0.5


def test_many_prompts_are_drawn_in_parts_without_changing_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, scores = np.tile([0, 1, 1], (50, 1)), np.tile([0.0, 1.0, 1.0], (50, 1))
    monkeypatch.setattr("hrl.algos.sample_metrics._MOST_AT_ONCE", 6000)  # two prompts at once
    values = maj_at_k(answers, scores, [3], np.random.default_rng(1))[3]
    assert values.mean() == pytest.approx(20 / 27, abs=0.01)
    assert values.std() > 0  # every prompt has votes of its own


def test_the_vote_uses_its_own_generator_only() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    first, second = (maj_at_k(np.array([[0, 1]]), np.array([[0.0, 1.0]]), [2], np.random.default_rng(7)) for _ in "ab")
    assert first[2] == second[2]
    assert np.array_equal(np.random.get_state()[1], before)
