"""Calls as rows: each token that was sampled is trained once, in exactly the context in which it was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """

    turn: int
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    version: int


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


def rows_of(calls: Sequence[Call]) -> list[EpisodeRow]:
    """Return the rows that calls make up, the first of them branch 0.

    A call whose context continues a row, from its first token to its last, makes that row longer. Any other call begins
    a new row, a branch. Tokens that it has in common with an earlier row are context there, whoever sampled them: they
    are trained in the earlier row. A branch has the first row's prompt if it begins with it, else its whole context is
    its prompt.

    Args:
        calls: Of one session. Their turns decide the order, and not which one ended first.
    """
    branches: list[_Branch] = []
    for call in sorted(calls, key=lambda call: call.turn):
        context = list(call.prompt_ids)
        continued = [branch for branch in branches if context[: len(branch.ids)] == branch.ids]
        if continued:
            branch = max(continued, key=lambda branch: len(branch.ids))
            new = context[len(branch.ids) :]
            branch.add_context(new, [branch.turns[-1] if branch.turns else call.turn] * len(new))
        else:
            branch = _new_branch(branches, context, call.turn)
            branches.append(branch)
        branch.add_sampled(call)
    return [branch.row() for branch in branches]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two lists have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _new_branch(branches: Sequence[_Branch], context: list[int], turn: int) -> _Branch:
    first = branches[0] if branches else None
    if first is None or context[: len(first.prompt_ids)] != first.prompt_ids:
        return _Branch(context, list(context))
    prompt = first.prompt_ids
    branch = _Branch(prompt, list(prompt))
    siblings = [other for other in branches if other.prompt_ids == prompt]
    nearest = max(siblings, key=lambda other: common_length(other.ids, context))
    common = max(common_length(nearest.ids, context) - len(prompt), 0)
    turns = list(nearest.turns[:common])
    rest = len(context) - len(prompt) - common
    branch.add_context(context[len(prompt) :], [*turns, *[turns[-1] if turns else turn] * rest])
    return branch
