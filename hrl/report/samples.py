"""The samples of a run: records in `rollouts/`, selection and display.

A model's text is treated as data: markup and escape sequences in it are shown, not interpreted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from hrl.batching.planner import lengths_of
from hrl.data.chat import text_of
from hrl.pictures import MULTI_MODAL_DATA, with_one_token_each
from hrl.report.conversation import is_episode, transcript
from hrl.report.episode_records import with_conversations
from hrl.report.run_folder import (
    LIST,
    NUMBER,
    OBJECT,
    OBJECTS,
    TEXT,
    WHOLE,
    RolloutKind,
    plain,
    read_jsonl,
    require_kinds,
    rollouts_file,
)
from hrl.report.thumbnails import names_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.pictures import Picture
    from hrl.protocol import DataProto

Sample = Mapping[str, Any]
"""A record of `rollouts/`; see `rollout_records`."""
ALL_SOURCES = "(all)"
"""Stands in the place of a source for what a validation counts over all of them."""
_KINDS = {
    **dict.fromkeys(("prompt", "question", "response", "finish_reason", "data_source", "uid"), TEXT),
    **dict.fromkeys(("score", "shaped_score", "advantage", "response_length"), NUMBER),
    "reward_parts": OBJECT,
    "env_metrics": OBJECT,
    "messages": OBJECTS,
    "turns": OBJECTS,
    **dict.fromkeys(("branches", "images"), LIST),
    **dict.fromkeys(("num_turns", "tool_calls", "policy_tokens", "environment_tokens"), WHOLE),
    **dict.fromkeys(("end", "error"), TEXT),
}
"""Field of a sample → its kind."""
_OF_TURN = {
    **dict.fromkeys(("text", "reasoning"), TEXT),
    **dict.fromkeys(("tool_calls", "observation"), OBJECTS),
    "reward": NUMBER,
    "tokens": WHOLE,
}
_OF_RUN = {**dict.fromkeys(("origin", "text"), TEXT), **dict.fromkeys(("tokens", "turn", "version"), WHOLE)}
_NON_TENSOR_COLUMNS = ("uid", "sample_index", "data_source", "finish_reason")


# ---------------------------------------------------------------------------------------------- records


def rollout_records(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the record of every row of a scored batch, or of every episode of one.

    Args:
        batch: B rows with `prompts`, `responses`, `attention_mask`, `response_mask` and further columns of the run.
        tokenizer: Decodes the tokens.

    Returns:
        Per row: `prompt` as the model sees it, `images` (the pictures that it shows, as files of the folder
        `rollouts`), `question` (the chat's last message), `response`, `score` as
        the reward function gave it (None if it left the response out), `shaped_score` (what is trained on, where
        shaping or a penalty made it another), `reward_parts`, `advantage` (mean over trained tokens),
        `response_length`, `finish_reason`, `uid`, `ground_truth`, ...; fields that the run lacks are left out. Of
        rows of episodes there is one record for each episode, with its conversation, see `with_conversations`.
    """
    tensors, others = batch.batch, batch.non_tensor_batch
    trained = tensors["response_mask"].bool()
    lengths = lengths_of(batch)[1]
    shown = others.get(MULTI_MODAL_DATA)
    fields: dict[str, Iterable[Any]] = {"prompt": _texts(batch, "prompts", tokenizer, shown)}
    if MULTI_MODAL_DATA in others:
        fields["images"] = [names_of(pictures) for pictures in others[MULTI_MODAL_DATA]]
    if "raw_prompt" in others:
        fields["question"] = [text_of(chat[-1]) for chat in others["raw_prompt"]]
    fields["response"] = _texts(batch, "responses", tokenizer)
    fields["response_length"] = lengths.tolist()
    if "token_level_scores" in tensors:
        left_out = ~trained.any(-1) & (lengths > 0)
        trained_on = tensors["token_level_scores"].sum(-1)
        # A response without a token has no score to be trained on, whatever the function said of it.
        scores = tensors.get("plain_scores", trained_on).where(trained.any(-1), 0.0)
        fields["score"] = [None if out else score for out, score in zip(left_out, scores.tolist(), strict=True)]
        if scores.tolist() != trained_on.tolist():
            shaped = zip(left_out, trained_on.tolist(), strict=True)
            fields["shaped_score"] = [None if out else score for out, score in shaped]
    if "advantages" in tensors:
        summed = (tensors["advantages"] * trained).sum(-1)
        fields["advantage"] = (summed / trained.sum(-1).clamp(min=1)).tolist()
    if "reward_parts" in others:
        fields["reward_parts"] = [dict(parts) for parts in others["reward_parts"]]
    fields |= {name: others[name] for name in _NON_TENSOR_COLUMNS if name in others}
    if "reward_model" in others:
        fields["ground_truth"] = [plain(reward_model.get("ground_truth")) for reward_model in others["reward_model"]]
    records = [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
    return with_conversations(records, batch, tokenizer) if "episode_id" in others else records


def _texts(
    batch: DataProto,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    shown: Iterable[Sequence[Picture]] | None = None,
) -> list[str]:
    """Decode prompts or responses without their padding; one token stands for each picture that is `shown`."""
    ids, mask = batch.batch[column], batch.batch["attention_mask"].bool()
    width = ids.shape[1]
    kept = mask[:, :width] if column == "prompts" else mask[:, -width:]
    rows = [row[keep].tolist() for row, keep in zip(ids, kept, strict=True)]
    if shown is not None:
        rows = [with_one_token_each(row, pictures) for row, pictures in zip(rows, shown, strict=True)]
    return tokenizer.batch_decode(rows)


# ---------------------------------------------------------------------------------------------- which to show


def best_median_worst(records: Sequence[Sample]) -> list[tuple[str, Sample]]:
    """Return the records with the highest, the middle and the lowest score; fewer if fewer differ.

    Of several with the same score, one is taken whose prompt and response are not among the earlier ones.
    """
    order = sorted((r for r in records if r.get("score") is not None), key=lambda r: -r["score"])
    middle = len(order) // 2
    places = {
        "best": range(len(order)),
        "median": sorted(range(len(order)), key=lambda place: abs(place - middle)),
        "worst": range(len(order) - 1, -1, -1),
    }
    picked: list[tuple[str, Sample]] = []
    for label, candidates in places.items():
        alike = (order[place] for place in candidates if order[place]["score"] == order[candidates[0]]["score"])
        new = next((r for r in alike if not any(_is_same(r, other) for _, other in picked)), None)
        if new is not None:
            picked.append((label, new))
    return picked


def _is_same(one: Sample, other: Sample) -> bool:
    return all(one.get(name) == other.get(name) for name in ("score", "prompt", "response"))


def read_samples(rollouts: Path, step: int, kind: RolloutKind = "train") -> list[dict[str, Any]]:
    """Return the samples of a step, or of the validation after it, in the order of the batch.

    Raises:
        DamagedFileError: A line is no sample; names file and line.
    """
    return read_sample_file(rollouts_file(rollouts, step, kind))


def read_sample_file(file: Path) -> list[dict[str, Any]]:
    """Return the samples of a file, see `read_samples`."""
    records = read_jsonl(file)
    for line, record in enumerate(records, start=1):
        require_sample(f"{file}, line {line},", record)
    return records


def require_sample(place: str, record: Sample) -> None:
    """Refuse a record that is no sample.

    Raises:
        DamagedFileError: A field is missing, or not what a run writes; names the place.
    """
    needed = ("prompt", "response", "turns") if is_episode(record) else ("prompt", "response")
    require_kinds(place, record, _KINDS, needed)
    parts = record.get("reward_parts") or {}
    numbers = {name: NUMBER for name, part in parts.items() if not isinstance(part, str)}
    require_kinds(f"{place} in reward_parts,", parts, numbers)
    if is_episode(record):
        for turn in record["turns"]:
            require_kinds(f"{place} in turns,", turn, _OF_TURN, ["text"])
        for branch in record.get("branches") or ():
            require_kinds(f"{place} in branches,", {"a branch": branch}, {"a branch": OBJECTS})
            for run in branch:
                require_kinds(f"{place} in branches,", run, _OF_RUN, ["origin", "text", "tokens"])


# ---------------------------------------------------------------------------------------------- as text


def question(record: Sample) -> str:
    """Return the readable part of the prompt: the chat's last message, else the whole prompt."""
    return str(record["prompt"] if record.get("question") is None else record["question"])


def answer_text(record: Sample) -> str:
    """Return what was answered: the response, or all of an episode after its prompt, with its roles."""
    return transcript(record) if is_episode(record) else str(record["response"])


def expected(record: Sample) -> Any:
    """Return the right answer of a sample, None if unknown; the ground truth of some tasks is a whole entry."""
    truth = record.get("ground_truth")
    return truth.get("answer", truth) if isinstance(truth, Mapping) else truth


def readable(text: str) -> str:
    """Spell out all control, escape and direction characters of a text, to make it safe to show.

    Line breaks stay, unless there is nothing but space between them.
    """
    kept = "\n" if text.strip() else ""
    return "".join(c if c.isprintable() or c == kept else repr(c)[1:-1] for c in text)


def on_one_line(text: str, width: int) -> str:
    """Return a text, made safe to show, on one line of at most `width` characters."""
    line = " ".join(readable(text[: 4 * max(width, 1)]).split())
    return line if len(line) <= width else f"{line[: max(width, 1) - 1]}…"


def sample_facts(record: Sample) -> list[tuple[str, str]]:
    """Return everything in a sample's record besides its texts, as labels and values."""
    facts = {
        "score": _fact(record.get("score"), ".3f"),
        "shaped score": _fact(record.get("shaped_score"), ".3f"),
        "advantage": _fact(record.get("advantage"), "+.3f"),
        **(_episode_facts(record) if is_episode(record) else _response_facts(record)),
        **{name: _fact(part, ".4g") for name, part in (record.get("reward_parts") or {}).items()},
        **{f"env/{name}": _fact(value, ".4g") for name, value in _env_metrics(record).items()},
        "truth": expected(record),
        "pictures": ", ".join(f"rollouts/{name}" for name in record.get("images") or ()) or None,
    }
    return [(name, str(fact)) for name, fact in facts.items() if fact is not None]


def _response_facts(record: Sample) -> dict[str, Any]:
    return {"tokens": _fact(record.get("response_length"), ".0f"), "ended by": record.get("finish_reason")}


def _episode_facts(record: Sample) -> dict[str, Any]:
    own, others = record.get("policy_tokens"), record.get("environment_tokens")
    both = None if own is None or others is None else f"{own} sampled, {others} not"
    branches = len(record.get("branches") or ())
    versions = {turn["version"] for turn in record["turns"] if turn.get("version") is not None}
    return {
        "turns": len(record["turns"]),
        "tool calls": _tool_calls(record),
        "tokens": record.get("response_length") if both is None else both,
        "branches": branches if branches > 1 else None,
        "versions": ", ".join(map(str, sorted(versions))) if len(versions) > 1 else None,
        "ended by": record.get("end"),
        "error": record.get("error"),
    }


_TOOL_CALLS, _TOOL_ERRORS = "tool_calls", "tool_errors"


def _tool_calls(record: Sample) -> Any:
    """Return how many tools were called, how many of these calls failed, and which where there are several."""
    told = record.get("env_metrics") or {}
    calls, errors = record.get(_TOOL_CALLS), record.get(_TOOL_ERRORS, told.get(_TOOL_ERRORS))
    of_tools = {name.partition("/")[2]: value for name, value in told.items() if name.startswith(f"{_TOOL_CALLS}/")}
    failed = {name: told.get(f"{_TOOL_ERRORS}/{name}") for name in of_tools}
    each = [f"{name} {_with_failed(number, failed[name])}" for name, number in of_tools.items()]
    text = _with_failed(calls, errors)
    return f"{text} ({', '.join(each)})" if len(each) > 1 else text


def _with_failed(calls: Any, errors: Any) -> Any:
    return (
        f"{_fact(calls, '.4g')}, {_fact(errors, '.4g')} failed" if errors and calls is not None else _fact(calls, ".4g")
    )


def _env_metrics(record: Sample) -> dict[str, Any]:
    """Return the numbers of an environment, without those that `tool calls` has said."""
    told = record.get("env_metrics") or {}
    return {name: value for name, value in told.items() if name.partition("/")[0] not in (_TOOL_CALLS, _TOOL_ERRORS)}


def _fact(value: Any, spec: str) -> Any:
    """Format a number; return anything else unchanged."""
    return format(value, spec) if isinstance(value, int | float) and not isinstance(value, bool) else value


def number(value: float | None, spec: str) -> str:
    """Format a number, or None as a dash of the same width."""
    width = int(re.match(r"\d*", spec)[0] or 1)  # type: ignore[index]
    return "-".rjust(width) if value is None else format(value, spec)


def printable(text: str, limit: int = 400) -> Text:
    """Make a text safe to show: no markup, no control or escape sequences, cut in the middle if longer than `limit`."""
    clean = readable(text)
    if len(clean) > limit:
        half = limit // 2
        clean = f"{clean[:half]} [… {len(clean) - 2 * half} characters …] {clean[-half:]}"
    return Text(clean)


def samples_table(samples: Sequence[tuple[str, Sample]], title: str) -> Table:
    """Return labelled samples with score, advantage, length, stop reason and the parts of the reward."""
    table = Table(title=title, title_justify="left", show_lines=True, expand=True)
    for heading, ratio in (("", None), ("prompt", 3), ("response", 4), ("reward", 3)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for label, record in samples:
        facts = [f"{name}: {value}" for name, value in sample_facts(record)]
        table.add_row(
            Text(label), printable(question(record)), printable(record["response"]), printable("\n".join(facts))
        )
    return table
