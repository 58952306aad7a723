"""The scorers of `hrl.reward.score`, which compare with the row's answer, as functions that a run calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hrl.reward.library.base import ArgumentError
from hrl.reward.score import find_scorer
from hrl.reward.scorers.base import UNSCORABLE, Reward, RowError, Scorer

_LONGEST_REASON = 300


class Answer:
    """Compares a response with the row's answer.

    A response never makes it fail: what breaks a scorer gets the reward of a wrong answer, and says why as
    `UNSCORABLE`. A row that can't be read is an error.

    Args:
        scorer: How; None chooses by the data source of each row.
    """

    def __init__(self, scorer: Scorer | None = None) -> None:
        if scorer is not None:
            scorer.load()
        self._scorer = scorer

    def __call__(
        self,
        response: str,
        ground_truth: Any,
        data_source: str = "",
        extra_info: Mapping[str, Any] | None = None,
        blames_response: Callable[[bool], None] = lambda is_to_blame: None,
    ) -> Mapping[str, Any]:
        """Return the scorer's reward, with what was read as the answer as `pred`.

        Args:
            response: The text.
            ground_truth: Of the row.
            data_source: Of the row.
            extra_info: Of the row.
            blames_response: Called with True while the response is looked at, during which the call may be ended at its
                deadline because of it, and with False behind that.

        Raises:
            ArgumentError: The row has no answer. Other `ValueError`s say what is wrong with it.
        """
        if ground_truth is None:
            raise ArgumentError(
                "the row has no answer to compare with: a column `answer`, or reward_model.ground_truth"
            )
        scorer = self._scorer_of(data_source)
        truth = scorer.read_truth(data_source, ground_truth, extra_info or {})
        blames_response(True)
        try:
            return _with_answer(scorer, scorer.score(response, truth), response, truth)
        except RowError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a response makes the scorer's packages raise
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
            return wrong_answer(scorer, reason)
        finally:
            blames_response(False)

    def _scorer_of(self, data_source: str) -> Scorer:
        return find_scorer(data_source) if self._scorer is None else self._scorer


def wrong_answer(scorer: Scorer, reason: str | None = None) -> dict[str, Any]:
    """Return the reward of a wrong answer, with the reason why a response could not be scored."""
    wrong = _parts_of(scorer.wrong)
    return {**wrong, "pred": wrong.get("pred")} | ({} if reason is None else {UNSCORABLE: reason})


def _with_answer(scorer: Scorer, reward: Reward, response: str, truth: Any) -> Mapping[str, Any]:
    parts = _parts_of(reward)
    return parts if scorer.answer is None else {**parts, "pred": scorer.answer(response, truth)}


def _parts_of(reward: Reward) -> Mapping[str, Any]:
    return reward if isinstance(reward, Mapping) else {"score": reward}
