"""The records of episodes in `rollouts/`: the fields of any sample, and the conversation with its tokens.

An episode is one record, however many rows it trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hrl.pictures import MULTI_MODAL_DATA, with_one_token_each
from hrl.report.conversation import Run, content_text, first_turn
from hrl.report.run_folder import plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.episodes.episode import Episode, EpisodeRow
    from hrl.protocol import DataProto

_ALIKE = ("episode_id", "num_turns", "tool_calls", "tool_errors", "env_metrics", "end", "engine_s", "environment_s")
_OF_EPISODE = {**{name: name for name in _ALIKE}, "episode_error": "error"}
"""Columns that say the same in each row of an episode → field of the record."""
_ROUNDING = 1e-6


def with_conversations(
    records: Sequence[Mapping[str, Any]], batch: DataProto, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Return one record for each episode of a batch, in the order of their first rows.

    Args:
        records: Those of the rows.
        batch: The rows, with the columns of episodes: `turn_index (B, R)`, `rollout_versions (B, R)`, and non-tensor
            `episode_id`, `branch`, `num_turns`, `tool_calls`, `turn_rewards`, `env_metrics`, `messages`, `turn_places`,
            `end`.
        tokenizer: Decodes the tokens.

    Returns:
        The fields of a row's record. The score is the episode's, None for one that trains nothing; `prompt` is that of
        the first row and `response` that of the last. Further `messages` (the conversation), `turns` (a list, see
        `turns_of`), `branches` (the tokens of each row, see `hrl.report.conversation.Run`), `policy_tokens`,
        `environment_tokens`, `episode_id`, `num_turns`, `tool_calls` (how many), `env_metrics`, and `end` (why it
        ended).
    """
    others = batch.non_tensor_batch
    rows: dict[Any, list[int]] = {}
    for row, episode in enumerate(others["episode_id"]):
        rows.setdefault(episode, []).append(row)
    found = []
    for of_episode in rows.values():
        in_order = sorted(of_episode, key=lambda row: int(others["branch"][row]))
        first = in_order[0]
        merged = _merged([records[row] for row in in_order], batch, in_order)
        facts = {field: plain(others[name][first]) for name, field in _OF_EPISODE.items() if name in others}
        facts = {field: fact for field, fact in facts.items() if field != "error" or fact is not None}
        messages, places, rewards = (others[name][first] for name in ("messages", "turn_places", "turn_rewards"))
        talked = conversation_fields(rows_of(batch, in_order), messages, places, rewards, tokenizer)
        asked = _question(talked)
        found.append({**merged, **({} if asked is None else {"question": asked}), **facts, **talked})
    return found


def record_of(episode: Episode, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the record of an episode that stands alone, with the score that its environment gave it."""
    rewards = [reward for reward in episode.turn_rewards if reward is not None]
    rows = episode.rows
    prompt, response = (_as_read(rows[0]), rows[-1].response_ids) if rows else ([], [])
    texts = tokenizer.batch_decode([prompt, response])
    talked = conversation_fields(rows, episode.messages, episode.turn_places, episode.turn_rewards, tokenizer)
    return {
        "prompt": texts[0],
        "question": _question(talked),
        "response": texts[1],
        "response_length": len(rows[-1].response_ids) if rows else 0,
        "score": sum(rewards) if rewards else None,
        "num_turns": episode.num_turns,
        "tool_calls": episode.num_tool_calls,
        "env_metrics": plain(episode.metrics),
        "end": episode.end,
        **({} if episode.error is None else {"error": episode.error}),
        **talked,
    }


def conversation_fields(
    rows: Sequence[EpisodeRow],
    messages: Sequence[Mapping[str, Any]],
    turn_places: Sequence[int | None],
    turn_rewards: Sequence[float | None],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return what is said of an episode beyond the fields of any sample.

    Args:
        rows: Its branches in order. A token was sampled in the row if it has a version there.
        messages: The conversation.
        turn_places: Where in it each turn stands; None, or nothing, for one that is not in it.
        turn_rewards: Of each turn.
        tokenizer: Decodes the tokens.
    """
    branches = [_runs(row, tokenizer) for row in rows]
    sampled = [run for branch in branches for run in branch if run.origin == "policy"]
    said = [run for branch in branches for run in branch if run.origin == "environment"]
    chat = [plain(message) for message in messages]
    return {
        "messages": chat,
        "turns": turns_of(chat, turn_places, turn_rewards, sampled),
        "branches": [[run._asdict() for run in branch] for branch in branches],
        "policy_tokens": sum(run.tokens for run in sampled),
        "environment_tokens": sum(run.tokens for run in said),
    }


def turns_of(
    messages: Sequence[Mapping[str, Any]],
    turn_places: Sequence[int | None],
    turn_rewards: Sequence[float | None],
    sampled: Iterable[Run],
) -> list[dict[str, Any]]:
    """Return the policy's turns.

    Args:
        messages: The conversation.
        turn_places: Where in it each turn stands; None, or nothing, for one that is not in it.
        turn_rewards: Of each turn.
        sampled: What the policy sampled, over all branches.

    Returns:
        Per turn: `text` (all that was sampled), `message` (its place in the conversation), `content` (without tool
        calls) and `reasoning` where the conversation has them, `tool_calls`, `observation` (the messages that answered
        it), `reward`, `tokens` (how many it has), and `version` (the latest policy that sampled any of it).
    """
    texts: dict[int | None, list[Run]] = {}
    for run in sampled:
        texts.setdefault(run.turn, []).append(run)
    ends = [*sorted(place for place in turn_places if place is not None), len(messages)]
    turns = []
    for number, reward in enumerate(turn_rewards):
        place = turn_places[number] if number < len(turn_places) else None
        own, observation = (
            ({}, []) if place is None else (messages[place], messages[place + 1 : ends[ends.index(place) + 1]])
        )
        runs = texts.get(number, [])
        versions = [run.version for run in runs if run.version is not None]
        thought = own.get("reasoning_content") or own.get("reasoning")
        turns.append(
            {
                "text": "".join(run.text for run in runs),
                "message": place,
                "content": own.get("content"),
                **({"reasoning": thought} if thought else {}),
                "tool_calls": list(own.get("tool_calls") or ()),
                "observation": list(observation),
                "reward": plain(reward),
                "tokens": sum(run.tokens for run in runs),
                "version": max(versions, default=None),
            }
        )
    return turns


def rows_of(batch: DataProto, rows: Sequence[int]) -> list[EpisodeRow]:
    """Return rows of a batch without their padding."""
    from hrl.episodes.episode import EpisodeRow

    columns, shown = batch.batch, batch.non_tensor_batch.get(MULTI_MODAL_DATA)
    prompt_width, width = columns["prompts"].shape[1], columns["responses"].shape[1]
    found = []
    for row in rows:
        mask = columns["attention_mask"][row].bool()
        kept = mask[-width:]
        found.append(
            EpisodeRow(
                prompt_ids=columns["prompts"][row][mask[:prompt_width]].tolist(),
                response_ids=columns["responses"][row][kept].tolist(),
                mask=columns["response_mask"][row][kept].long().tolist(),
                log_probs=(),
                versions=columns["rollout_versions"][row][kept].long().tolist(),
                turns=columns["turn_index"][row][kept].long().tolist(),
                pictures=() if shown is None else shown[row],
            )
        )
    return found


def _as_read(row: EpisodeRow) -> list[int]:
    """Return the tokens of a row's prompt with one for each picture."""
    return with_one_token_each(row.prompt_ids, row.pictures)


def _runs(row: EpisodeRow, tokenizer: PreTrainedTokenizerBase) -> list[Run]:
    """Return the tokens of a row as runs of one origin, the prompt first."""
    tokens = zip(row.response_ids, row.versions, row.mask, row.turns, strict=True)
    runs = [(("prompt", None, False, None), list(row.prompt_ids))]
    for (version, trained, turn), group in groupby(tokens, key=lambda token: (token[1], bool(token[2]), token[3])):
        is_sampled = version >= 0
        what = (
            "policy" if is_sampled else "environment",
            turn,
            is_sampled and trained,
            version if is_sampled else None,
        )
        runs.append((what, [token[0] for token in group]))
    texts = tokenizer.batch_decode([_as_read(row), *(ids for _, ids in runs[1:])])
    return [
        Run(origin, text, len(ids), turn, trained, version)
        for ((origin, turn, trained, version), ids), text in zip(runs, texts, strict=True)
    ]


def _merged(records: Sequence[Mapping[str, Any]], batch: DataProto, rows: Sequence[int]) -> dict[str, Any]:
    """Return the records of an episode's rows as one."""
    first, last = records[0], records[-1]
    merged = dict(first) | {"response": last["response"], "response_length": last["response_length"]}
    trained = batch.batch["response_mask"][list(rows)].sum(-1).tolist()
    if "score" in first:
        merged.pop("shaped_score", None)
        merged |= _scores(batch, rows) if any(trained) else {"score": None}
    if "advantage" in first:
        summed = sum(record["advantage"] * count for record, count in zip(records, trained, strict=True))
        merged["advantage"] = summed / max(sum(trained), 1)
    return merged


def _scores(batch: DataProto, rows: Sequence[int]) -> dict[str, float]:
    """Return the score of an episode, and what is trained on where that is another."""
    trained_on = float(batch.batch["token_level_scores"][list(rows)].sum())
    plain_scores = batch.batch.get("plain_scores")
    score = trained_on if plain_scores is None else float(plain_scores[rows[0]])  # each row has the episode's
    is_same = math.isclose(score, trained_on, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return {"score": score} if is_same else {"score": score, "shaped_score": trained_on}


def _question(talked: Mapping[str, Any]) -> str | None:
    """Return what the policy was asked: the last message before its first turn; None without a text there."""
    begin = first_turn(talked)
    return (content_text(talked["messages"][begin - 1]) or None) if begin else None
