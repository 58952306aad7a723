"""The numbers of a step's episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, get_args

from hrl.episodes.episode import EndReason, Episode
from hrl.metrics import Metric

if TYPE_CHECKING:
    from hrl.episodes.pool import PoolCounts


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, Metric]:
    """Return what a step's episodes were like: turns, tokens, tools, seconds, how they ended, and `env/<name>`.

    A token of the policy's counts in the row that trains it; all others of a row are the environment's, those that a
    further branch repeats too. A failed episode counts in how many ended so, and in nothing else.
    """
    whole = [episode for episode in episodes if episode.end != "failed"]
    sampled = [_sampled_by_turn(episode) for episode in whole]
    policy = [sum(turns) for turns in sampled]
    environment = [_other_tokens(episode) for episode in whole]
    calls, errors = [one.num_tool_calls for one in whole], [one.num_tool_errors for one in whole]
    return {
        **_mean_and_max("episode/turns/mean", "episode/turns/max", [episode.num_turns for episode in whole]),
        **_mean_and_max(
            "episode/turn_tokens/mean", "episode/turn_tokens/max", [tokens for turns in sampled for tokens in turns]
        ),
        "episode/policy_tokens/mean": _mean(policy),
        "episode/environment_tokens/mean": _mean(environment),
        "episode/tool_calls/mean": _mean(calls),
        "episode/tool_errors/mean": _mean(errors),
        "episode/unread_calls/mean": _mean([episode.num_unread_calls for episode in whole]),
        "episode/cut_observations/mean": _mean([episode.num_cut_observations for episode in whole]),
        "episode/tool_error_ratio": Metric.mean(sum(errors), sum(calls)),
        "episode/branches/mean": _mean([len(episode.rows) for episode in whole]),
        **_mean_and_max("episode/engine_s/mean", "episode/engine_s/max", [episode.engine_s for episode in whole]),
        **_mean_and_max(
            "episode/environment_s/mean", "episode/environment_s/max", [episode.environment_s for episode in whole]
        ),
        **{f"episode/end/{end}": _mean([one.end == end for one in episodes]) for end in get_args(EndReason)},
        "episode/truncated_ratio": _mean([episode.is_truncated for episode in episodes]),
        "episode/failed_ratio": _mean([episode.end == "failed" for episode in episodes]),
        "episode/num_failed": Metric.total(sum(episode.end == "failed" for episode in episodes)),
        "episode/num_late": Metric.total(sum(episode.end == "deadline" for episode in episodes)),
        "episode/num_replayed": Metric.total(sum(episode.attempts > 1 for episode in episodes)),
        **_own_metrics(whole),
    }


def pool_metrics(counts: PoolCounts) -> dict[str, Metric]:
    """Return what happened to the processes of a step's environments."""
    return {f"episode/pool/{name}": Metric.total(number) for name, number in asdict(counts).items()}


def door_metrics(asked: Counter[str] | None) -> dict[str, Metric]:
    """Return how much the policy was asked over OpenAI's protocol; nothing where no door is open."""
    if asked is None:
        return {}
    return {
        "serve/calls": Metric.total(asked["calls"]),
        "serve/tokens": Metric.total(asked["sampled_tokens"]),
        "serve/refused": Metric.total(asked["refused"]),
        "serve/dropped": Metric.total(asked["dropped"]),
    }


def _sampled_by_turn(episode: Episode) -> list[int]:
    """Return how many tokens the policy sampled in each turn that has any."""
    counts: dict[int, int] = {}
    for row in episode.rows:
        for version, turn in zip(row.versions, row.turns, strict=True):
            if version >= 0:
                counts[turn] = counts.get(turn, 0) + 1
    return list(counts.values())


def _other_tokens(episode: Episode) -> int:
    """Return how many tokens of its rows the policy did not sample there."""
    return sum(sum(version < 0 for version in row.versions) for row in episode.rows)


def _own_metrics(episodes: Iterable[Episode]) -> dict[str, Metric]:
    """Return the means of the environments' own numbers, each over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            values.setdefault(name, []).append(value)
    return {f"env/{name}": _mean(column) for name, column in values.items()}


def _mean_and_max(mean: str, largest: str, values: Sequence[float]) -> dict[str, Metric]:
    return {mean: _mean(values), **({largest: Metric.max(max(values))} if values else {})}


def _mean(values: Sequence[float]) -> Metric:
    return Metric.mean(sum(values), len(values))
