"""Calls as rows: each token that was sampled is trained once, in exactly the context in which it was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hrl.batching.trie import common_length
from hrl.episodes.episode import EpisodeRow

NO_VERSION = -1


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
    """

    turn: int
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    version: int
    text: str


@dataclass(eq=False)
class _Branch:
    prompt_ids: list[int]
    ids: list[int]
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def add_context(self, ids: Sequence[int], turns: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [NO_VERSION] * len(ids)
        self.turns += turns

    def add_sampled(self, call: Call) -> None:
        count = len(call.token_ids)
        self.ids += call.token_ids
        self.mask += [1] * count
        self.log_probs += call.log_probs
        self.versions += [call.version] * count
        self.turns += [call.turn] * count

    def row(self) -> EpisodeRow:
        response = self.ids[len(self.prompt_ids) :]
        return EpisodeRow(self.prompt_ids, response, self.mask, self.log_probs, self.versions, self.turns)


class Branches:
    """Rows that grow call by call.

    Args:
        max_response_tokens: Longest row after its prompt. A branch that would be longer has its own context as prompt.
    """

    def __init__(self, max_response_tokens: int | None = None) -> None:
        self._branches: list[_Branch] = []
        self._max_response_tokens = max_response_tokens

    @classmethod
    def of(cls, calls: Sequence[Call], max_response_tokens: int | None = None) -> Branches:
        """Return the rows of a session's calls. Their turns decide the order, and not which one ended first."""
        branches = cls(max_response_tokens)
        for call in sorted(calls, key=lambda call: call.turn):
            branches.add(call)
        return branches

    def prompt_length(self, context: Sequence[int]) -> int:
        """Return how many tokens of a context would be the prompt of its row."""
        context = list(context)
        branch = self._continued(context) or self._begun(context, 0, 0)
        return len(branch.prompt_ids)

    def add(self, call: Call) -> None:
        """Append a call; its turn is later than those before it."""
        context = list(call.prompt_ids)
        branch = self._continued(context)
        if branch is None:
            branch = self._begun(context, call.turn, len(call.token_ids))
            self._branches.append(branch)
        else:
            new = context[len(branch.ids) :]
            branch.add_context(new, [branch.turns[-1] if branch.turns else call.turn] * len(new))
        branch.add_sampled(call)

    def rows(self) -> list[EpisodeRow]:
        """Return them."""
        return [branch.row() for branch in self._branches]

    def _continued(self, context: list[int]) -> _Branch | None:
        """Return the longest row that a context continues from its first token to its last."""
        found = [branch for branch in self._branches if context[: len(branch.ids)] == branch.ids]
        return max(found, key=lambda branch: len(branch.ids), default=None)

    def _begun(self, context: list[int], turn: int, num_sampled: int) -> _Branch:
        most, length = self._max_response_tokens, len(context) + num_sampled
        forked = [
            other
            for other in self._branches
            if context[: len(other.prompt_ids)] == other.prompt_ids
            and (most is None or length - len(other.prompt_ids) <= most)
        ]
        if not forked:
            return _Branch(context, list(context))
        ids = np.array(context)
        in_common = [common_length(np.array(other.ids), ids) for other in forked]
        nearest = forked[int(np.argmax(in_common))]
        prompt = nearest.prompt_ids
        branch = _Branch(prompt, list(prompt))
        common = max(in_common) - len(prompt)
        turns = list(nearest.turns[:common])
        rest = len(context) - len(prompt) - common
        branch.add_context(context[len(prompt) :], [*turns, *[turns[-1] if turns else turn] * rest])
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
    return Branches.of(calls, max_response_tokens).rows()
