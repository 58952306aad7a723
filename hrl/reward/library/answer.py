"""The scorers of `hrl.reward.score`, which compare with the row's answer, as functions of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hrl.reward.library.base import ArgumentError
from hrl.reward.scorers.base import Reward, RowError, Scorer

UNSCORABLE = "unscorable"
"""Part with the reason why a response could not be scored, and got the reward of a wrong answer."""
_LONGEST_REASON = 300


class Answer:
    """Compares a response with the row's answer.

    Args:
        scorer: How.
    """

    def __init__(self, scorer: Scorer) -> None:
        scorer.load()
        self._scorer = scorer

    def __call__(
        self,
        response: str,
        ground_truth: Any,
        data_source: str = "",
        extra_info: Mapping[str, Any] | None = None,
        blames_response: Callable[[bool], None] = lambda is_to_blame: None,
    ) -> Reward:
        """Return the scorer's reward.

        Raises:
            ArgumentError: The row has no answer. Other `ValueError`s say what is wrong with it.
        """
        if ground_truth is None:
            raise ArgumentError(
                "the row has no answer to compare with: a column `answer`, or reward_model.ground_truth"
            )
        truth = self._scorer.read_truth(data_source, ground_truth, extra_info or {})
        blames_response(True)  # also if the call is stopped at its deadline
        try:
            return self._scorer.score(response, truth)
        except RowError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a response makes the scorer's packages raise
            wrong = self._scorer.wrong
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
            return {**(wrong if isinstance(wrong, Mapping) else {"score": wrong}), UNSCORABLE: reason}
        finally:
            blames_response(False)
