"""What is left of an episode when it is over, as plain data that travels between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hrl.pictures import Picture

if TYPE_CHECKING:
    from hrl.config.environment import EnvironmentConfig

EndReason = Literal["done", "truncated", "max_turns", "max_prompt", "max_tokens", "deadline", "failed"]
"""Why an episode ended: by its nature, by a limit of the environment's, by one of the run's four, or by a failure.
What the environment calls done is done, also if its last turn was cut off."""

NO_VERSION = NO_TURN = -1
"""Of tokens that the policy did not sample, and of padding."""

TRUNCATIONS: frozenset[EndReason] = frozenset({"truncated", "max_turns", "max_prompt", "max_tokens", "deadline"})
"""The ends by a limit."""

LEFT_OUT: frozenset[EndReason] = frozenset({"deadline", "failed"})
"""The ends that say how an environment or a machine was, and not what the policy did: such an episode is worth nothing,
good or bad, and trains nothing."""


def limits_by_end(settings: EnvironmentConfig, longest_prompt: int, longest_response: int) -> dict[EndReason, str]:
    """Return, for each end by a limit of the run's, the key of the limit with its value."""
    return {
        "max_turns": f"environment.max_turns={settings.max_turns}",
        "max_prompt": f"data.max_prompt_length={longest_prompt}",
        "max_tokens": f"data.max_response_length={longest_response}",
        "deadline": f"environment.episode_timeout_s={settings.episode_timeout_s:g}",
    }


@dataclass(frozen=True)
class EpisodeRow:
    """One list of tokens that grew while the episode was played: a row of the batch.

    Attributes:
        prompt_ids: Tokens of the first prompt.
        response_ids: All after them: what the policy sampled and what the environment said.
        mask: 1 where the policy sampled the token in exactly this context, and in no earlier branch; else 0.
        log_probs: Of the sampler where `mask` is 1; else 0.
        versions: Version of the policy that sampled the token where `mask` is 1; else -1.
        turns: Of each token, counted from 0: the turn that sampled it, or that it answers.
        routed: `(tokens, L, K)`, the experts of the row's first tokens, its prompt's and those after it, see
            `hrl.routing`; None unless they were asked for.
        pictures: That the prompt shows.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    turns: Sequence[int]
    routed: np.ndarray | None = field(default=None, compare=False)
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Episode:
    """An episode that is over.

    Attributes:
        key: `(uid, sample_index)`.
        rows: One, or one for each time that the chat template rewrote what was before. The first is branch 0.
        messages: The conversation as the policy and the environment had it, for people and for reward functions.
        turn_rewards: Of each turn, the sum of its tokens' where these have some; None where the environment gave none.
        texts: What the policy wrote in each turn, for reward functions: what it sampled, without special tokens.
        answer: What it wrote last; nothing where it had no turn.
        end: Why it ended.
        error: What failed, if something did.
        num_tool_calls, num_tool_errors: Over all turns; a call that could not be read is one that failed.
        num_unread_calls: Of these, turns in which a call was begun that could not be read.
        num_cut_observations: Texts of the environment that lost their middle, since they were too long.
        engine_s, environment_s: Seconds that the episode waited for the engine and for its environment.
        attempts: How often it was begun; more than 1 where its environment's process had died.
        metrics: The environment's own.
        token_rewards: Of each turn those of the tokens that it sampled; None where the turn has one number or none.
        turn_places: Where in `messages` each turn stands; None for one that is in another conversation.
    """

    key: tuple[str, int]
    rows: Sequence[EpisodeRow]
    messages: Sequence[Mapping[str, Any]]
    turn_rewards: Sequence[float | None]
    end: EndReason
    error: str | None = None
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_unread_calls: int = 0
    num_cut_observations: int = 0
    engine_s: float = 0.0
    environment_s: float = 0.0
    attempts: int = 1
    texts: Sequence[str] = ()
    answer: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    token_rewards: Sequence[Sequence[float] | None] = ()
    turn_places: Sequence[int | None] = ()

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return len(self.turn_rewards)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it."""
        return self.end in TRUNCATIONS
