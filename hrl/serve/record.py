"""What was said through the door, as samples that `hrl rollouts` shows, with the rows that a trainer could take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.files import write_whole
from hrl.report.episode_records import conversation_fields
from hrl.report.run_folder import json_line, rollouts_file, rollouts_steps
from hrl.serve.rows import Call, rows_of
from hrl.serve.sessions import DEFAULT, Conversation, Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLLOUTS = "rollouts"


@dataclass(frozen=True)
class Recorded:
    """What a record is made of, apart from the session, which goes on.

    Attributes:
        name: Of the session, and of its conversation where the session has no name of its own.
        calls: In any order, their turns counted from 0.
        messages: The conversation.
        places: Turn → where in the conversation its answer stands.
        counts: Of the session.
    """

    name: str
    calls: Sequence[Call]
    messages: Sequence[Mapping[str, Any]]
    places: Mapping[int, int]
    counts: Mapping[str, int]


def recorded(session: Session) -> list[Recorded]:
    """Return what a session is recorded as: one record, or without a name of its own one for each conversation."""
    if session.name != DEFAULT:
        return [_of(session.name, session.calls, session.longest_chat, session.counts)]
    return [
        _of(f"{session.name}-{number}", conversation.calls, conversation, {})
        for number, conversation in enumerate(session.conversations)
    ]


def _of(name: str, calls: Sequence[Call], chat: Conversation, counts: Mapping[str, int]) -> Recorded:
    """Return what calls are recorded as; turns are those of the record, and not of all that the session asked."""
    turns = {turn: number for number, turn in enumerate(sorted(call.turn for call in calls))}
    places = {turns[turn]: place for turn, place in chat.places.items() if turn in turns}
    renumbered = [replace(call, turn=turns[call.turn]) for call in calls]
    return Recorded(name, renumbered, list(chat.messages), places, dict(counts))


class Record:
    """A file of records, for the time that a server runs.

    Args:
        folder: Its `rollouts` gets one more file; those of earlier times stay.
        tokenizer: Decodes the tokens.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        rollouts = folder / ROLLOUTS
        rollouts.mkdir(parents=True, exist_ok=True)
        self.file = rollouts_file(rollouts, 1 + max(rollouts_steps(rollouts), default=0))
        self._tokenizer = tokenizer
        self._lines: dict[str, tuple[int, str]] = {}

    def write(self, of_sessions: Iterable[Recorded]) -> None:
        """Write all that is known; what did not change since the last time is not made anew."""
        for found in of_sessions:
            known = self._lines.get(found.name)
            if found.calls and (known is None or known[0] != len(found.calls)):
                self._lines[found.name] = len(found.calls), json_line(self._record(found))
        write_whole(self.file, "".join(line for _, line in self._lines.values()))

    def _record(self, found: Recorded) -> dict[str, Any]:
        rows = rows_of(found.calls)
        decode = self._tokenizer.decode
        turns = range(len(found.calls))
        places = [found.places.get(turn) for turn in turns]
        talked = conversation_fields(rows, found.messages, places, [None for _ in turns], self._tokenizer)
        return {
            "uid": found.name,
            "episode_id": found.name,
            "prompt": decode(list(rows[0].prompt_ids)),
            "response": decode(list(rows[-1].response_ids)),
            "response_length": len(rows[-1].response_ids),
            "num_turns": len(found.calls),
            "tool_calls": found.counts.get("tool_calls", 0),
            "end": "done",
            **talked,
            "rows": [asdict(row) for row in rows],
        }
