"""What is known of a run's rows before it starts: how long they are, and how episodes are spent."""

from __future__ import annotations

from dataclasses import dataclass

from hrl.config.ppo import PPOTrainerConfig

#: Mean length over the longest that the configuration allows, where the caller does not say; of turns likewise.
MEAN_OVER_LONGEST = 0.5
#: Share of an episode's response that the policy samples, where the caller does not say.
SAMPLED_SHARE = 0.5


@dataclass(frozen=True)
class Lengths:
    """What a caller knows of the rows; None where it does not. All are means, as a run's metrics have them.

    Attributes:
        prompt: Tokens of a prompt.
        response: Tokens of a response; of an episode, with what its environment says.
        teaching: Share of the groups whose samples differ in reward.
        turns: Turns of the policy in an episode.
        turn_tokens: Tokens that the policy samples in a turn.
        environment_tokens: Tokens of an episode's response that it does not sample.
        environment_s: Seconds that an episode waits for its environment, in all turns together.
        shared: Share of the tokens of an update that are not computed, as a row before them begins alike.
    """

    prompt: float | None = None
    response: float | None = None
    teaching: float = 1.0
    turns: float | None = None
    turn_tokens: float | None = None
    environment_tokens: float | None = None
    environment_s: float | None = None
    shared: float | None = None


@dataclass(frozen=True)
class Episodes:
    """How the episodes of a run are spent; a single answer is an episode of one turn without an environment.

    Attributes:
        turns: Mean turns of the policy.
        sampled: Share of a response's tokens that the policy samples; the others are the environment's.
        environment_s: Mean seconds that an episode waits for its environment.
        shared: Share of an update's tokens that are not computed; None where only prompts are shared.
    """

    turns: float = 1.0
    sampled: float = 1.0
    environment_s: float = 0.0
    shared: float | None = None


SINGLE_ANSWERS = Episodes()


def response_of(config: PPOTrainerConfig, lengths: Lengths) -> float:
    """Return the mean tokens of a response: as given, as far as its parts tell, or a share of the longest."""
    longest, environment = config.data.max_response_length, lengths.environment_tokens
    if lengths.response is not None:
        return lengths.response
    if config.environment.is_used and lengths.turn_tokens is not None:
        sampled = turns_of(config, lengths) * lengths.turn_tokens
        return min(sampled / SAMPLED_SHARE, longest) if environment is None else sampled + environment
    if environment:
        return min(environment / (1.0 - SAMPLED_SHARE), longest)
    return MEAN_OVER_LONGEST * longest


def turns_of(config: PPOTrainerConfig, lengths: Lengths) -> float:
    """Return the mean turns of an episode: as given, or a share of the most."""
    return lengths.turns or max(1.0, MEAN_OVER_LONGEST * config.environment.max_turns)


def episodes_of(config: PPOTrainerConfig, lengths: Lengths) -> Episodes | None:
    """Return how the episodes of a run are spent; None if it asks for single answers."""
    if not config.environment.is_used:
        return None
    turns, response = turns_of(config, lengths), response_of(config, lengths)
    if lengths.turn_tokens is not None:
        sampled = turns * lengths.turn_tokens / response
    elif lengths.environment_tokens is not None:
        sampled = 1.0 - lengths.environment_tokens / response
    else:
        sampled = 1.0 if turns == 1.0 else SAMPLED_SHARE
    return Episodes(turns, sampled, lengths.environment_s or 0.0, lengths.shared)
