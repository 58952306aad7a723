"""Try a reward without a model, on responses that are there already: what it pays, and what laziness gets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import IO, TYPE_CHECKING, Any, Literal

from hrl.data.chat import as_messages, text_of
from hrl.data.dataset import PromptRow
from hrl.data.sources import show_value
from hrl.errors import RefusedError
from hrl.files import expanded
from hrl.pictures import PictureSource
from hrl.processes.plain_data import is_huge
from hrl.reward.parts import numeric_parts
from hrl.reward.pool import RewardOutcome, RewardPool, RewardRow
from hrl.reward.spec import RewardSpec

if TYPE_CHECKING:
    from hrl.config.reward import RewardConfig

Kind = Literal["response", "empty", "prompt", "list", "answer"]
PROBED_ROWS = 4
"""How many rows the probes are made of."""
_RESPONSE_KEYS = ("response", "completion", "solution_str", "output", "text")
_LONGEST_TRUTH = 40
_TRIAL_S = 600.0
"""How long all calls together may take beyond their deadlines one after the other."""
_LAZY: dict[Kind, str] = {
    "empty": "an empty response",
    "prompt": "the prompt itself",
    "list": "a list of answers with the right one in its middle",
}
"""What no reward should pay for."""


class TrialError(RefusedError, ValueError):
    """Responses that can't be read, or fit no rows."""


@dataclass(frozen=True)
class Attempt:
    """A text to score.

    Attributes:
        kind: A response of the user's, or a probe: an empty text, the prompt, the answers to several rows with
            this row's in the middle, the answer and nothing else.
        row: Index of its row.
        response: The text.
    """

    kind: Kind
    row: int
    response: str


@dataclass(frozen=True)
class Call:
    """A text and what the reward gave it."""

    attempt: Attempt
    outcome: RewardOutcome

    @property
    def has_failed(self) -> bool:
        """Whether the function raised, returned no reward, or took too long."""
        return self.outcome.error is not None


@dataclass(frozen=True)
class Trial:
    """What a trial showed.

    Attributes:
        title: The reward.
        calls: All texts, responses first.
        rows: What they were scored with.
    """

    title: str
    calls: list[Call]
    rows: Sequence[PromptRow]

    @property
    def of_responses(self) -> list[Call]:
        """The calls that are no probes."""
        return [call for call in self.calls if call.attempt.kind == "response"]

    @property
    def failed(self) -> list[Call]:
        """The calls that failed."""
        return [call for call in self.calls if call.has_failed]

    def summary(self) -> dict[str, Any]:
        """Return the numbers: of the responses, or of the probes if there are no others."""
        calls = self.of_responses or self.calls
        scores = [call.outcome.score for call in calls if call.outcome.score is not None]
        seconds = [call.outcome.duration_s for call in calls]
        columns = numeric_parts([call.outcome.parts for call in calls])
        return {
            "samples": len(calls),
            "scored": len(scores),
            "none": sum(call.outcome.status == "skip" for call in calls),
            "failed": sum(call.has_failed for call in calls),
            "unscorable": sum(call.outcome.status == "unscorable" for call in calls),
            **(
                {"mean": fmean(scores), "std": pstdev(scores), "min": min(scores), "max": max(scores)} if scores else {}
            ),
            "parts": {name: fmean(value for value in column if value is not None) for name, column in columns.items()},
            "call_s_mean": fmean(seconds) if seconds else 0.0,
            "call_s_max": max(seconds, default=0.0),
        }

    def warnings(self) -> list[str]:
        """Return what looks wrong, a sentence each."""
        found = []
        scores = [call.outcome.score for call in self.of_responses if call.outcome.score is not None]
        if len(scores) > 1 and len(set(scores)) == 1:
            found.append(f"all {len(scores)} responses got {scores[0]:g}: where all score alike, nothing is learnt.")
        left_out = sum(call.outcome.status == "skip" for call in self.of_responses)
        if left_out and left_out >= len(self.of_responses) / 2:
            found.append(f"{left_out} of {len(self.of_responses)} responses got None, and would not be trained on.")
        best = max(scores, default=None)
        for kind, title in _LAZY.items():
            scores_of_kind = [call.outcome.score or 0.0 for call in self.calls if call.attempt.kind == kind]
            paid = [score for score in scores_of_kind if score > 0]
            if paid:
                what = f"{title} is paid {max(paid):g}"
                beats = " which no response of yours beats" if best is not None and max(paid) >= best else ""
                found.append(f"{what}{',' + beats if beats else ''}: a policy finds that out.")
        answers = [call for call in self.calls if call.attempt.kind == "answer"]
        of_answers = [call.outcome.score for call in answers]
        may_be_paid = [call.outcome.score for call in (*self.of_responses, *answers) if not call.has_failed]
        is_paid = any((score or 0.0) > 0 for score in may_be_paid)
        if may_be_paid and not is_paid and (other := self._truth_that_is_no_text()):
            found.append(other)
        if not all(call.has_failed for call in answers) and all((score or 0.0) <= 0 for score in of_answers):
            found.append(
                "the answer alone is never paid: if responses have to have a form besides, say so in the prompt, or "
                "give a small reward for the form, so that the policy finds it."
            )
        return found

    def _truth_that_is_no_text(self) -> str:
        """Return what to say of the first ground truth of the scored rows that is not a text."""
        for index in sorted({call.attempt.row for call in self.calls}):
            truth = self.rows[index].reward_model.get("ground_truth")
            if truth is not None and not isinstance(truth, str):
                kind = type(truth).__name__
                return (
                    f"nothing is paid, and the answer of row {index} is no text but of type {kind}: {_shortened(truth)}"
                    f". A response is a text, and no text equals a value of type {kind}. Compare with str(answer), or "
                    "write the answers as texts into the data."
                )
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        calls = [
            {
                "kind": call.attempt.kind,
                "row": call.attempt.row,
                "response": call.attempt.response,
                "score": call.outcome.score,
                "parts": dict(call.outcome.parts),
                "status": call.outcome.status,
                "error": call.outcome.error,
                "seconds": call.outcome.duration_s,
            }
            for call in self.calls
        ]
        return {"reward": self.title, "summary": self.summary(), "warnings": self.warnings(), "calls": calls}


def probes(rows: Sequence[PromptRow]) -> list[Attempt]:
    """Return the texts that no reward should pay for, and the bare answers, for the first rows."""
    attempts: list[Attempt] = []
    truths = [_truth(row) for row in rows[:PROBED_ROWS]]
    for index, (row, truth) in enumerate(zip(rows, truths, strict=False)):
        attempts += [Attempt("empty", index, ""), Attempt("prompt", index, text_of(row.messages[-1]))]
        others = [other for other in dict.fromkeys(truths) if other is not None and other != truth]
        # Neither first nor last, where a function may rightly look.
        if truth is not None and len(others) > 1:
            attempts.append(Attempt("list", index, " ".join([*others[:1], truth, *others[1:]])))
        if truth is not None:
            attempts.append(Attempt("answer", index, truth))
    return attempts


def _truth(row: PromptRow) -> str | None:
    truth = _writable(row.reward_model.get("ground_truth"))
    return str(truth) if isinstance(truth, str | int | float) else None


def _writable(value: Any) -> Any:
    """Return a value; an integer of more digits than Python writes in decimal as text."""
    return hex(value) if is_huge(value) else value


def _shortened(value: Any) -> str:
    text = repr(_writable(value))
    return text if len(text) <= _LONGEST_TRUTH else f"{text[:_LONGEST_TRUTH]}…"


def responses_for(records: Iterable[tuple[str, Any]], num_rows: int, limit: int | None = None) -> list[Attempt]:
    """Return the responses of a file, each with its row.

    A record is a text, or an object with `response` (or `completion`, `solution_str`, `output`, `text`) and, if
    responses are not in the order of the rows, `row`, counted from 0. n responses to every row follow each other. As
    many responses as `limit`, which all rows can't share evenly, are one each to the first rows.

    Args:
        records: Place and record.
        num_rows: Number of rows.
        limit: Number of rows that are tried.

    Raises:
        TrialError: A record has no response, or they fit no rows.
    """
    found = list(records)
    each = len(found) // num_rows if num_rows and len(found) % num_rows == 0 else 0
    if not each and len(found) == limit and limit <= num_rows:
        each = 1
    attempts = []
    for position, (place, record) in enumerate(found):
        row = record.get("row") if isinstance(record, Mapping) else None
        if row is None and not each:
            raise TrialError(
                f"{len(found)} responses can't be shared out evenly among {num_rows} rows; give every "
                'response the index of its row, counted from 0, as "row"'
            )
        index = position // each if row is None else row
        if not isinstance(index, int) or not 0 <= index < num_rows:
            raise TrialError(f"{place} has the row {show_value(index)}; there are {num_rows}, counted from 0")
        attempts.append(Attempt("response", index, response_in(place, record)))
    return attempts


def response_in(place: str, record: Any) -> str:
    """Return the response of a record.

    Raises:
        TrialError: It has none.
    """
    if isinstance(record, str):
        return record
    if isinstance(record, Mapping):
        for key in _RESPONSE_KEYS:
            if isinstance(text := record.get(key), str):
                return text
            if isinstance(text, list) and text:  # a chat
                chat = as_messages(text, key, "assistant")
                if isinstance(chat, str):
                    raise TrialError(f"{place}: {chat}")
                return text_of(chat[-1])
        raise TrialError(f"{place} has none of {', '.join(_RESPONSE_KEYS)}; it has {', '.join(map(str, record))}")
    raise TrialError(f"{place} is a {type(record).__name__}, expected a text or an object with a response")


def records_in(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a JSON or JSON-lines file, with their places.

    Raises:
        TrialError: It can't be read.
    """
    try:
        text = expanded(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # also of a NUL in the name
        raise TrialError(f"responses {path} can't be read: {error}") from error
    text = text.removeprefix("\ufeff")
    if path.suffix == ".json":
        whole = _parsed(text, str(path))
        if not isinstance(whole, list):
            raise TrialError(f"responses {path} hold a {type(whole).__name__}, expected a list")
        yield from ((f"{path} item {number}", item) for number, item in enumerate(whole))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path} line {number}", _parsed(line, f"{path} line {number}")


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrialError(f"{place} is no JSON: {error}") from error


def run_trial(
    spec: RewardSpec,
    reward: RewardConfig,
    rows: Sequence[PromptRow],
    attempts: Sequence[Attempt],
    output: IO[bytes] | None = None,
) -> Trial:
    """Score texts in a supervised process, as a run does.

    Args:
        spec: The reward.
        reward: The section `reward`, for deadlines and limits.
        rows: The rows.
        attempts: The texts.
        output: File that gets what the function prints; standard error if None.

    Raises:
        RewardFunctionError: The function can't be loaded.
    """
    with RewardPool(spec, reward, output) as pool:
        futures = []
        for number, attempt in enumerate(attempts):
            row = rows[attempt.row]
            belongings = RewardRow(
                number,
                row.data_source,
                row.reward_model.get("ground_truth"),
                row.extra_info,
                row.columns,
                row.messages,
                [one.read() for one in row.images if pool.takes_pictures and isinstance(one, PictureSource)],
            )
            futures.append(pool.submit(belongings, attempt.response, f"{attempt.kind} {number} (row {attempt.row})"))
        limit_s = _TRIAL_S + reward.timeout_s * len(futures)
        calls = [Call(attempt, future.result(limit_s)) for attempt, future in zip(attempts, futures, strict=True)]
    return Trial(spec.source.title, calls, rows)
