"""mean@k, pass@k and maj@k of samples, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hrl.reward.library.answer import Answer
from hrl.trained.scores import ALL, Estimate, score_table


def samples(source: str, uid: str, scores: list[float], answers: list[str] | None = None) -> list[dict[str, Any]]:
    return [
        {
            "data_source": source,
            "uid": uid,
            "score": score,
            "reward_parts": {} if answers is None else {"pred": answers[index]},
            "response_length": 10 + index,
            "finish_reason": "length" if index == 0 else "stop",
        }
        for index, score in enumerate(scores)
    ]


def test_means_and_errors_are_over_prompts() -> None:
    rows = [*samples("sums", "a", [1, 1, 0, 0]), *samples("sums", "b", [1, 0, 0, 0])]
    found = score_table(rows, 4, (1, 2, 4))["sums"]
    assert (found.prompts, found.samples) == (2, 8)
    assert found.estimates["mean@4"] == Estimate(0.375, pytest.approx(0.125))  # of 0.5 and 0.25
    # Of 4 samples with c correct ones, pairs without a correct one: C(2,2)/C(4,2) = 1/6 and C(3,2)/C(4,2) = 3/6.
    assert found.estimates["pass@2"].value == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert found.estimates["pass@1"].value == pytest.approx(0.375)
    assert found.estimates["pass@4"].value == 1.0
    assert found.estimates["pass@2"].error == pytest.approx((5 / 6 - 3 / 6) / math.sqrt(2) / math.sqrt(2))
    assert (found.length, found.cut_off) == (11.5, 0.25)
    assert not any(name.startswith("maj") for name in found.estimates)


def test_a_vote_takes_the_score_of_the_most_frequent_answer() -> None:
    rows = [
        *samples("sums", "a", [1, 1, 1, 1], ["7", "7", "7", "7"]),
        *samples("sums", "b", [0, 0, 0, 0], ["1", "1", "1", "2"]),
    ]
    found = score_table(rows, 4, (4,))["sums"]
    assert list(found.estimates) == ["mean@4", "pass@4", "maj@4"]
    assert found.estimates["maj@4"] == Estimate(0.5, pytest.approx(0.5))


def test_several_sources_have_a_row_each_and_one_together() -> None:
    rows = [*samples("sums", "a", [1.0]), *samples("words", "b", [0.0]), *samples("words", "c", [0.0])]
    table = score_table(rows, 1, ())
    assert list(table) == ["sums", "words", ALL]
    assert table["sums"].estimates["mean@1"] == Estimate(1.0, None)  # one prompt has no spread
    assert table[ALL].estimates["mean@1"].value == pytest.approx(1 / 3)


def test_a_prompt_with_too_few_scores_is_left_out_of_a_larger_k() -> None:
    rows = [*samples("sums", "a", [1, 0, 0, 0]), *samples("sums", "b", [1, 1])]
    found = score_table(rows, 4, (2, 4))["sums"]
    assert found.estimates["pass@2"].value == pytest.approx((0.5 + 1) / 2)
    assert found.estimates["pass@4"] == Estimate(1.0, None)


def test_a_number_called_acc_decides_what_is_correct() -> None:
    rows = samples("sums", "a", [0.3, 0.9])
    rows[0]["reward_parts"], rows[1]["reward_parts"] = {"acc": 1.0}, {"acc": 0.0}
    assert score_table(rows, 2, (1,))["sums"].estimates["pass@1"].value == 0.5


def test_a_k_above_n_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@8 needs at least 8 samples of each prompt, and there are 4"):
        score_table(samples("sums", "a", [1, 0, 0, 0]), 4, (8,))


def test_the_quickstarts_own_answers_are_voted_on() -> None:
    said = [Answer()(text, "12", "bundled/addition") for text in ("7 + 5 = 12", "The answer is 12.", "**12**", "11")]
    rows = samples("sums", "a", [one["score"] for one in said], [one["pred"] for one in said])
    found = score_table(rows, 4, (4,))["sums"].estimates
    # 12 wins a vote of four with three or four draws (189 of 256) and in half of the draws with two each (54 of 256).
    assert found["maj@4"].value == pytest.approx((189 + 27) / 256, abs=0.04)
