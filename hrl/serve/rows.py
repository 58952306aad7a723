"""Calls as rows: each token that was sampled is trained once, in exactly the context in which it was sampled."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from hrl.batching.trie import common_length
from hrl.episodes.episode import NO_VERSION, EpisodeRow
from hrl.routing import continued


@dataclass(frozen=True)
class Call:
    """An answer that a client was given.

    Attributes:
        turn: In the order in which the session asked, counted from 0; every choice of a request is a turn of its own.
        prompt_ids: The context.
        token_ids: What was sampled.
        log_probs: Of each sampled token.
        version: Of the policy.
        text: What was sampled, read.
        routed: `(tokens, L, K)`, the experts of the context's tokens and of the sampled ones but the last; None where
            nobody asked.
    """

    turn: int
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    version: int
    text: str
    routed: np.ndarray | None = None


@dataclass(eq=False)
class _Branch:
    num_prompt: int
    ids: array[int]
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    routed: np.ndarray | None = None

    @property
    def view(self) -> np.ndarray:
        """The ids without a copy; they can't grow while somebody has it."""
        return np.frombuffer(self.ids, np.int32)

    def add_context(self, ids: Sequence[int], turns: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [NO_VERSION] * len(ids)
        self.turns += turns

    def add_sampled(self, call: Call) -> None:
        count = len(call.token_ids)
        self.ids.extend(call.token_ids)
        self.mask += [1] * count
        self.log_probs += call.log_probs
        self.versions += [call.version] * count
        self.turns += [call.turn] * count
        if call.routed is not None:
            self.routed = continued(self.routed, call.routed)[: len(self.ids)]

    def row(self) -> EpisodeRow:
        prompt, response = self.ids[: self.num_prompt].tolist(), self.ids[self.num_prompt :].tolist()
        return EpisodeRow(prompt, response, self.mask, self.log_probs, self.versions, self.turns, self.routed)


class Branches:
    """Rows that grow with the calls of a session.

    Args:
        max_response_tokens: Longest row after its prompt. A branch that would be longer has its own context as prompt.
    """

    def __init__(self, max_response_tokens: int | None = None) -> None:
        self._branches: list[_Branch] = []
        self._num_calls, self._last_turn = 0, -1
        self._max_response_tokens = max_response_tokens

    def grow(self, calls: Sequence[Call]) -> Self:
        """Take the calls that came since the last time; their turns decide the order, and not which one ended first.

        Args:
            calls: All of the session so far, those of the last time first.
        """
        new = calls[self._num_calls :]
        if any(call.turn < self._last_turn for call in new):  # asked earlier, and answered later
            self._branches, new = [], calls
        for call in sorted(new, key=lambda call: call.turn):
            self._add(call)
            self._last_turn = call.turn
        self._num_calls = len(calls)
        return self

    def prompt_length(self, context: Sequence[int]) -> int:
        """Return how many tokens of a context would be the prompt of its row."""
        ids = np.array(context, np.int32)
        branch = self._continued(ids) or self._begun(ids, 0, 0)
        return branch.num_prompt

    def _add(self, call: Call) -> None:
        context = np.array(call.prompt_ids, np.int32)
        branch = self._continued(context)
        if branch is None:
            branch = self._begun(context, call.turn, len(call.token_ids))
            self._branches.append(branch)
        else:
            new = context[len(branch.ids) :].tolist()
            branch.add_context(new, [branch.turns[-1] if branch.turns else call.turn] * len(new))
        branch.add_sampled(call)

    def rows(self) -> list[EpisodeRow]:
        """Return them."""
        return [branch.row() for branch in self._branches]

    def _continued(self, context: np.ndarray) -> _Branch | None:
        """Return the longest row that a context continues from its first token to its last."""
        found = [one for one in self._branches if np.array_equal(context[: len(one.ids)], one.view)]
        return max(found, key=lambda branch: len(branch.ids), default=None)

    def _begun(self, context: np.ndarray, turn: int, num_sampled: int) -> _Branch:
        most, length = self._max_response_tokens, len(context) + num_sampled
        forked = [
            other
            for other in self._branches
            if np.array_equal(context[: other.num_prompt], other.view[: other.num_prompt])
            and (most is None or length - other.num_prompt <= most)
        ]
        if not forked:
            return _Branch(len(context), array("i", context.tobytes()))
        in_common = [common_length(other.view, context) for other in forked]
        nearest = forked[int(np.argmax(in_common))]
        prompt = nearest.num_prompt
        branch = _Branch(prompt, nearest.ids[:prompt])
        common = max(in_common) - prompt
        turns = nearest.turns[:common]
        rest = len(context) - prompt - common
        branch.add_context(context[prompt:].tolist(), [*turns, *[turns[-1] if turns else turn] * rest])
        return branch


def rows_of(calls: Sequence[Call], max_response_tokens: int | None = None) -> list[EpisodeRow]:
    """Return the rows that calls make up, the first of them branch 0.

    A call whose context continues a row, from its first token to its last, makes that row longer. Any other call begins
    a new row, a branch. Tokens that it has in common with an earlier row are context there, whoever sampled them: they
    are trained in the earlier row. A branch has the prompt of the row that it forks from, the one that it has most in
    common with; one that begins with no row's prompt has its whole context as prompt.

    Args:
        calls: Of one session.
        max_response_tokens: See `Branches`.
    """
    return Branches(max_response_tokens).grow(calls).rows()
