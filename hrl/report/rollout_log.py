"""The samples of a step as records that a person can read, and the choice of which to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hrl.batching.lengths import lengths_of
from hrl.data.rows import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.protocol import DataProto

Sample = Mapping[str, Any]
_NON_TENSOR_COLUMNS = ("uid", "sample_index", "data_source", "finish_reason")


def rollout_records(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Describe every row of a scored batch, as `rollouts/` holds it.

    Args:
        batch: B rows with `prompts`, `responses`, `attention_mask`, `response_mask`, and whatever else the run has.
        tokenizer: Turns tokens into text.

    Returns:
        Per row: `prompt` as the model sees it, `question` (the chat's last message), `response`, `score` (None
        where the reward function left the response out), `reward_parts`, `advantage` (mean over trained tokens),
        `response_length`, `finish_reason`, `uid`, `ground_truth`, ...; a run leaves out what it does not have.
    """
    prompts, responses = (_texts(batch, name, tokenizer) for name in ("prompts", "responses"))
    reward_parts = batch.non_tensor_batch.get("reward_parts")
    columns = batch.batch
    trained = columns["response_mask"].bool()
    lengths = lengths_of(batch)[1]
    numbers: dict[str, list[float | None]] = {"response_length": lengths.tolist()}
    if "token_level_scores" in columns:
        left_out = ~trained.any(-1) & (lengths > 0)
        scores = columns["token_level_scores"].sum(-1)
        numbers["score"] = [None if out else score for out, score in zip(left_out, scores.tolist(), strict=True)]
    if "advantages" in columns:
        summed = (columns["advantages"] * trained).sum(-1)
        numbers["advantage"] = (summed / trained.sum(-1).clamp(min=1)).tolist()

    records = []
    for row in range(len(batch)):
        record: dict[str, Any] = {"prompt": prompts[row]}
        if "raw_prompt" in batch.non_tensor_batch:
            record["question"] = text_of(batch.non_tensor_batch["raw_prompt"][row][-1])
        record["response"] = responses[row]
        record |= {name: values[row] for name, values in numbers.items()}
        if reward_parts is not None:
            record["reward_parts"] = dict(reward_parts[row])
        record |= {
            name: batch.non_tensor_batch[name][row] for name in _NON_TENSOR_COLUMNS if name in batch.non_tensor_batch
        }
        if "reward_model" in batch.non_tensor_batch:
            record["ground_truth"] = batch.non_tensor_batch["reward_model"][row].get("ground_truth")
        records.append(record)
    return records


def _texts(batch: DataProto, column: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode prompts or responses without their padding."""
    ids, mask = batch.batch[column], batch.batch["attention_mask"].bool()
    width = ids.shape[1]
    kept = mask[:, :width] if column == "prompts" else mask[:, -width:]
    return tokenizer.batch_decode([row[keep].tolist() for row, keep in zip(ids, kept, strict=True)])


def question(record: Sample) -> str:
    """Return what a person wants to read as the prompt.

    The chat's last message, or the whole prompt where that is missing.
    """
    return str(record.get("question", record["prompt"]))


def readable(text: str) -> str:
    """Text of a model with every control, escape and direction character spelled out, so that it can be shown."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def sample_facts(record: Sample) -> list[tuple[str, str]]:
    """Return what is known of a sample apart from its texts, as label and value."""
    facts = {
        "score": _number(record.get("score"), ".3f"),
        "advantage": _number(record.get("advantage"), "+.3f"),
        "tokens": _number(record.get("response_length"), ".0f"),
        "ended by": record.get("finish_reason"),
        **{name: _number(part, ".4g") for name, part in record.get("reward_parts", {}).items()},
        "truth": record.get("ground_truth"),
    }
    return [(name, str(fact)) for name, fact in facts.items() if fact is not None]


def _number(value: Any, spec: str) -> Any:
    """Format a number; anything else stays as it is."""
    return format(value, spec) if isinstance(value, int | float) and not isinstance(value, bool) else value


def best_median_worst(records: Sequence[Sample]) -> list[tuple[str, Sample]]:
    """Pick the records with the highest, the middle and the lowest score; fewer where fewer have one."""
    order = sorted((r for r in records if r.get("score") is not None), key=lambda r: -r["score"])
    if not order:
        return []
    picks = {"best": 0, "median": len(order) // 2, "worst": len(order) - 1}
    labels = {position: label for label, position in reversed(picks.items())}  # where they coincide, the first name
    return [(labels[position], order[position]) for position in sorted(labels)]


def before_and_after(first: Sequence[Sample], last: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Pairs the samples of two validations by prompt; with several samples of a prompt, one by one in their order.

    Args:
        first: Samples of the earlier validation.
        last: Samples of the later one.

    Returns:
        The pairs, the largest change of score first, for better or worse, else in the order of `first`.
    """
    after = dict(_by_prompt(last))
    pairs = [(record, after[key]) for key, record in _by_prompt(first) if key in after]
    return sorted(pairs, key=lambda pair: -abs(change_of_score(pair) or 0.0))


def change_of_score(pair: tuple[Sample, Sample]) -> float | None:
    """Score after less score before; None where one of the two has none."""
    before, after = (record.get("score") for record in pair)
    return None if before is None or after is None else after - before


def describe_changes(pairs: Sequence[tuple[Sample, Sample]], shown: int) -> str:
    """Return how many samples of a validation got better and worse, and which of them are shown."""
    changes = [change_of_score(pair) or 0.0 for pair in pairs]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    counts = f"{better} better, {worse} worse, {len(pairs) - better - worse} as before"
    return counts if shown >= len(pairs) else f"{counts}; the {shown} of {len(pairs)} that changed most"


def _by_prompt(records: Sequence[Sample]) -> Iterator[tuple[Hashable, Sample]]:
    """Keys every record by data source, prompt and how many samples of that prompt came before it."""
    seen: Counter[Hashable] = Counter()
    for record in records:
        prompt = (record.get("data_source"), record["prompt"])
        yield (*prompt, seen[prompt]), record
        seen[prompt] += 1
