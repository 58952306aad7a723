"""Preflight checks of rows: read and count them, compare them with the batch size, render them with the template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hrl.config.arithmetic import Fact, count, step_sizes
from hrl.config.data import DataConfig
from hrl.config.offline import DPOTrainerConfig, OfflineConfig, SFTTrainerConfig
from hrl.config.outline import RunConfiguration
from hrl.config.ppo import PPOTrainerConfig
from hrl.data.chat import check_chat_template, encode_texts, inspect_chat_template, shortened, with_tools
from hrl.data.dataset import (
    MESSAGES,
    PromptRow,
    RLHFDataset,
    check_prompt,
    columns_handed_on,
    columns_left_out,
    dataset_class,
)
from hrl.data.files import is_repository
from hrl.data.offline.demonstrations import CHOSEN, COMPLETION_KEYS, TEXT, DemonstrationDataset
from hrl.data.offline.labelled import LabelledDataset
from hrl.data.offline.pairs import PairDataset
from hrl.data.order import MixedOrder
from hrl.data.sampler import load_sampler
from hrl.data.sources import DataFiles, Look, Source, has_field, held_out_files, look_into, read_rows, sources_of
from hrl.data.tokenised_dataset import DatasetCounts, Intake, TokenisedDataset
from hrl.models.tokenizer import TokenIds
from hrl.nearest import listing, nearest
from hrl.preflight.findings import Findings
from hrl.preflight.given import Given
from hrl.preflight.machine_look import gpus_here, joins_a_cluster
from hrl.preflight.pictures_look import shows_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAIN, VAL = "data.train_files", "data.val_files"
_BATCH = "data.train_batch_size"
_CPU_BATCH = 8
"""Prompts per step that hints suggest on a CPU, where a step then takes seconds to minutes."""
_PATIENT_ON_CPU = 1024
"""Sequences per step beyond which a CPU takes hours; a default above this is refused on a CPU."""
_LOOP = "agent_name"
_LOOKED_AT = 1000
"""Rows whose agent loops are looked at."""
_SYNONYMS = {
    "prompt": ("question", "problem", "query", "instruction", "input", "text", "messages"),
    "data_source": ("source", "dataset", "origin", "task"),
    "chosen": ("preferred", "better", "winner", "accepted"),
    "rejected": ("dispreferred", "worse", "loser", "refused"),
    "messages": ("conversations", "conversation", "chat", "dialog"),
    "completion": ("answer", "output", "target", "solution"),
    "answer": ("solution", "target", "label", "output", "ground_truth", "final_answer"),
}
"""Name of a column → its names in other data sets."""


@dataclass(frozen=True)
class _Reader:
    """How the rows of a kind of run are read.

    Attributes:
        read: Reads sources, given the maximum number of rows to keep; None if they can't be read here.
        columns: Key that names a column → accepted names, one of which is enough.
        instead: Key that names a column → columns of other shapes, with which it is not needed.
        measured: What the lengths of rows measure, e.g. prompts.
        limit: The maximum length in tokens.
    """

    read: Callable[[DataFiles, int], Any] | None
    columns: Mapping[str, tuple[str, ...]]
    measured: str
    limit: int
    instead: Mapping[str, tuple[str, ...]]


def look_at_rows(
    findings: Findings,
    config: RunConfiguration,
    given: Given,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: TokenIds | None,
) -> tuple[Any, Any]:
    """Read the rows to train and to validate on.

    Args:
        findings: Collects problems.
        config: The validated configuration.
        given: Rows that the caller gave as objects.
        tokenizer: Tokenizer of the trained model, if found.
        ids: Padding and stop tokens.

    Returns:
        The two data sets; None for one that can't be read or is not configured.
    """
    data, found = config.data, []
    if isinstance(config, PPOTrainerConfig):
        reader = _prompts(findings, config.data, tokenizer)
    else:
        reader = _answers(config, tokenizer, ids)
    for key, noun, rows, names, most in (
        (TRAIN, "rows", given.train_rows, data.train_files, data.train_max_samples),
        (VAL, "validation rows", given.val_rows, data.val_files, data.val_max_samples),
    ):
        dataset = None
        sources = _look_at_sources(findings, key, config, names if rows is None else rows, reader) if names else []
        if sources and reader.read is not None:
            with findings.about(key):
                dataset = reader.read(sources, most)
                findings.facts.append(Fact(noun, _in_words(dataset, sources, reader)))
                findings.facts += _of_each_source(noun, dataset, sources)
                _look_at_last_turns(findings, key, dataset)
                _look_at_labels(findings, key, dataset)
                if isinstance(config, PPOTrainerConfig) and not config.environment.is_used:
                    _look_at_loops(findings, key, dataset)
        found.append(dataset)
    if isinstance(config, PPOTrainerConfig) and config.data.sampler is not None and isinstance(found[0], RLHFDataset):
        with findings.about("data.sampler"):
            sampler = load_sampler(config.data.sampler, found[0], config.data.seed, config.data)
            findings.facts.append(Fact("sampler", type(sampler).__name__))
    return found[0], found[1]


def _look_at_last_turns(findings: Findings, key: str, rows: Any) -> None:
    """Add a note if prompts end with an answer, which the model would be shown."""
    if not isinstance(rows, RLHFDataset):
        return
    answered = sum(rows.rows[index].messages[-1]["role"] == "assistant" for index in rows.known)
    if answered:
        findings.notes.append(
            f"{count(answered, 'prompt')} of {key} end with a message of the assistant, which the model is shown and "
            "answers once more. If it is the answer, data.prompt_key=messages data.map={messages: prompt} takes it off"
        )


def _look_at_labels(findings: Findings, key: str, rows: Any) -> None:
    """Add a note if all labels are alike: without answers of the other kind there is nothing to tell apart."""
    if not isinstance(rows, LabelledDataset):
        return
    labels = {rows.rows[index].is_desirable for index in rows.known}
    if len(labels) == 1:
        label, others = ("true", "bad") if labels == {True} else ("false", "good")
        findings.notes.append(
            f"{rows.config.label_key!r} is {label} in every row of {key} that was looked at ({len(rows.known):,}): "
            f"without {others} answers beside them all are pushed one way. Is it the column (data.label_key)? To "
            "imitate good answers there is `hrl train sft`"
        )


def _look_at_loops(findings: Findings, key: str, rows: Any) -> None:
    """Add a note if rows name agent loops of verl's, which would play several turns with them."""
    if not isinstance(rows, RLHFDataset):
        return
    named = {str(rows.rows[index].columns.get(_LOOP)) for index in rows.known[:_LOOKED_AT]}
    if loops := sorted(named - {"None", "single_turn_agent"}):
        findings.notes.append(
            f"rows of {key} name agent loops in a column {_LOOP} ({listing(loops)}), which nothing reads: there is no "
            "environment.path, so every prompt has one answer. docs/coming-from-verl.md says what they become"
        )


def _look_at_sources(
    findings: Findings, key: str, config: RunConfiguration, names: DataFiles, reader: _Reader
) -> list[Source]:
    """Check that every source can be read and has the columns that rows need.

    Args:
        findings: Collects problems.
        key: Key of the configuration that names the sources.
        config: The validated configuration.
        names: The sources, or the rows.
        reader: Its `columns` are needed.

    Returns:
        The sources; none if reading their rows makes no sense.
    """
    before, sources = len(findings.problems), []
    with findings.about(key):
        sources = sources_of(names)
    for source in sources:
        with findings.about(key):
            _look_at_options(findings, key, config, source)
            if not source.makes_rows:
                _look_at_columns(findings, source.with_keys_of(config.data), look_into(source), reader)
    return [] if len(findings.problems) > before else sources


def _look_at_options(findings: Findings, key: str, config: RunConfiguration, source: Source) -> None:
    """Check the options of a source that only make sense in some runs."""
    options = source.options
    if options.answer_key is not None and not isinstance(config, PPOTrainerConfig):
        hint = f"Write {{path: {options.path}, map: {{completion: {options.answer_key}}}}}."
        findings.problem(key, "has an answer_key, and this kind of run compares nothing with an answer.", hint)
    if key == TRAIN:
        if options.streaming and isinstance(config, DPOTrainerConfig) and config.needs_reference:
            what = (
                "streams rows, and the reference's log-probs of all rows that come are computed before the first step."
            )
            findings.problem(key, what, "Leave out streaming, or set algorithm.reference_free=true.")
        if held_out := held_out_files(source):
            what = f"names a folder with rows to test on alone, by their names: {listing([str(f) for f in held_out])}."
            hint = f"Name the rows to train on; if these are meant, name the files themselves: {key}={held_out[0]}."
            findings.problem(key, what, hint)
        return
    if options.streaming:
        findings.problem(key, "streams rows, and a validation reads all of them.", "Leave out streaming there.")
    if options.split is None and (source.is_of_the_hub or is_repository(source.path)):
        hint = f"Name the split, e.g. {key}={options.path}:{options.name or ''}:test."
        findings.problem(key, f"names no split of {options.path}, and the default is the one to train on.", hint)


def _look_at_columns(findings: Findings, source: Source, look: Look, reader: _Reader) -> None:
    """Check that a source has the columns that rows need and that are mapped.

    Args:
        findings: Collects problems.
        source: The source, with its mapped columns.
        look: Its beginning.
        reader: Names the columns.
    """
    if look.columns is None:
        return
    for ours, theirs in source.columns.items():
        if not has_field(look, theirs):
            what = f"takes {ours} from {theirs}, a column that {source.title} does not have."
            findings.problem("data.map", what, _columns_hint(f"data.map.{ours}", theirs, look))
    for key, names in reader.columns.items():
        mapped = [source.columns.get(name, name) for name in names]
        instead = [source.columns.get(name, name) for name in reader.instead.get(key, ())]
        if not any(has_field(look, name) for name in (*mapped, *instead)):
            what = f"is {' or '.join(mapped)}, a column that {source.title} does not have."
            findings.problem(key, what, _columns_hint(key, names[0], look))


def require_prompt_columns(data: DataConfig, sources: Sequence[Source]) -> None:
    """Check that sources have the columns of prompts, without reading more than their beginning.

    Raises:
        PreflightError: Columns are missing; lists them all, with the keys to set.
    """
    findings = Findings()
    reader = _prompts(findings, data, None)
    for source in sources:
        _look_at_columns(findings, source.with_keys_of(data), look_into(source), reader)
    findings.raise_problems()


def _columns_hint(key: str, name: str, look: Look) -> str:
    there = look.columns or []
    listed = f"It has: {', '.join(there)}."
    synonyms = [other for other in _SYNONYMS.get(name, ()) if other in there]
    close = synonyms or nearest(name, there)
    hint = f"Set {key}={close[0]}?" if close else f"Add the column, or name yours with {key}."
    if "chosen" in there and "rejected" in there and key == "data.prompt_key":
        hint = "Rows with chosen and rejected answers are for DPO, reward models and SFT."
    return f"{listed} {look.shown}. {hint}" if look.first is not None else f"{listed} {hint}"


def _prompts(findings: Findings, data: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> _Reader:
    columns: dict[str, tuple[str, ...]] = {"data.prompt_key": (data.prompt_key,)}
    if data.answer_key is not None:
        columns["data.answer_key"] = (data.answer_key,)
    instead = {"data.prompt_key": (MESSAGES,)}
    reader = partial(_Reader, measured="prompts", limit=data.max_prompt_length, instead=instead)
    cls = None
    with findings.about("data.custom_cls.path"):
        cls = dataset_class(data.custom_cls)
    own = data.custom_cls.path is not None
    if cls is None or (own and tokenizer is None):  # a user's own class may need any columns
        return reader(None, {} if own else columns)
    if tokenizer is None:
        return reader(partial(_unrendered, data), columns)
    return reader(lambda sources, most: cls(sources, tokenizer, data, most), {} if own else columns)


def _answers(config: OfflineConfig, tokenizer: PreTrainedTokenizerBase | None, ids: TokenIds | None) -> _Reader:
    data: Any = config.data
    cls: type[DemonstrationDataset | LabelledDataset | PairDataset]
    instead: dict[str, tuple[str, ...]] = {}
    if isinstance(config, SFTTrainerConfig):
        answers = (data.completion_key,) if data.completion_key else COMPLETION_KEYS
        columns = {
            "data.messages_key": (data.messages_key, data.prompt_key),
            "data.completion_key": (*answers, data.messages_key),
        }
        instead = dict.fromkeys(columns, (CHOSEN, TEXT))
        cls = DemonstrationDataset
    elif isinstance(config, DPOTrainerConfig) and config.learns_from_labels:
        columns = {"data.completion_key": (data.completion_key,), "data.label_key": (data.label_key,)}
        cls = LabelledDataset
    else:
        columns = {"data.chosen_key": (data.chosen_key,), "data.rejected_key": (data.rejected_key,)}
        cls = PairDataset
    if tokenizer is None or ids is None:
        return _Reader(None, columns, "rows", data.max_length, instead)
    return _Reader(
        lambda sources, most: cls(sources, tokenizer, data, most, stop_ids=ids.stop),
        columns,
        "rows",
        data.max_length,
        instead,
    )


@dataclass
class _Unrendered:
    """Rows that were read without a tokenizer, because the model is not on this machine yet."""

    rows: list[PromptRow]
    counts: DatasetCounts

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_handed_on(self.rows)

    @property
    def known(self) -> Sequence[int]:
        return range(len(self.rows))

    @property
    def left_out(self) -> dict[str, str]:
        return columns_left_out(self.rows)

    @property
    def data_sources(self) -> tuple[str, ...]:
        return tuple(sorted({row.data_source for row in self.rows}))


def _unrendered(data: DataConfig, data_files: DataFiles, most: int) -> _Unrendered:
    sources = [source.with_keys_of(data) for source in sources_of(data_files)]
    intake = Intake(source.title for source in sources)
    check = partial(check_prompt, prompt_key=data.prompt_key, answer_key=data.answer_key)
    kept = [row for block in intake.blocks(read_rows(sources, check), most) for row in block]
    counts = intake.close(len(kept), skip_bad=data.bad_rows == "skip", too_long=None)
    return _Unrendered(kept, counts)


def _in_words(rows: Any, sources: Sequence[Source], reader: _Reader) -> str:
    """Describe a data set in one line; a user's own class may lack counts and lengths."""
    text = f"{count(len(rows), 'row')} of {', '.join(source.title for source in sources)}"
    if isinstance(rows, TokenisedDataset):
        text += f": {', '.join(dict.fromkeys(rows.shape(rows.rows[index]) for index in rows.known))}"
    if getattr(rows, "is_streamed", False):
        text += f", read as they are drawn (looked at: {len(rows.known)})"
    counts = getattr(rows, "counts", None)
    if counts is not None and counts.read > counts.kept:
        text += f" ({counts})"
    lengths: np.ndarray | None = getattr(rows, "lengths", None)
    if lengths is not None and len(lengths):
        low, middle, high = int(lengths.min()), int(np.median(lengths)), int(lengths.max())
        span = f"{low:,} to {high:,} tokens, median {middle:,}" if low < high else count(low, "token")
        text += f"; {reader.measured} of {span}; {reader.limit:,} fit"
    columns = getattr(rows, "columns", ())
    return f"{text}; columns for the reward: {', '.join(columns)}" if columns else text


def _of_each_source(noun: str, rows: Any, sources: Sequence[Source]) -> list[Fact]:
    """Return a fact per source where there are several: how many rows, its share, and its first one rendered."""
    if len(sources) < 2 or not isinstance(rows, TokenisedDataset):
        return []
    facts, start = [], 0
    for number, (source, size) in enumerate(zip(sources, rows.sizes, strict=True), start=1):
        share = rows.order.share(number - 1) if isinstance(rows.order, MixedOrder) else size / len(rows)
        text = f"{source.title}: {count(size, 'row')}, {share:.0%} of the prompts"
        first = next((index for index in rows.known if start <= index < start + size), None)
        if first is not None:
            row = rows.rows[first]
            text += f", data source {row.data_source}; first: {shortened(rows.shown(row))}"
        facts.append(Fact(f"{noun} {number}", text))
        start += size
    return facts


def look_at_batch(findings: Findings, config: RunConfiguration, train: Any) -> None:
    """Check that the rows fill a batch, and that a CPU run doesn't use a large batch only by default."""
    if not isinstance(config, PPOTrainerConfig):
        if train is not None:
            _look_at_size(findings, train, config.data.train_batch_size, suggested_at_most=len(train))
        return
    gpus = joins_a_cluster(config.trainer) or (config.trainer.device != "cpu" and gpus_here() > 0)
    sizes = step_sizes(config)
    if train is not None and len(train) < sizes.prompts:
        most = sizes.prompts if gpus else _CPU_BATCH
        if isinstance(train, _Unrendered):
            findings.problem(_BATCH, f"is {sizes.prompts:,}, but there are only {len(train):,} rows.", "Lower it.")
        else:
            _look_at_size(findings, train, sizes.prompts, suggested_at_most=most)
        return
    chosen = config.origins is None or _BATCH in config.origins
    if not chosen and not gpus and sizes.sequences > _PATIENT_ON_CPU:
        what = (
            f"is not set, and one step of its default, {sizes.prompts:,} prompts × {count(sizes.samples, 'sample')}, "
            "takes hours without a GPU."
        )
        findings.problem(_BATCH, what, f"Set it, e.g. {_BATCH}={_CPU_BATCH}.")


def _look_at_size(findings: Findings, rows: Any, wanted: int, *, suggested_at_most: int) -> None:
    """Check that the training rows fill a batch."""
    if len(rows) < wanted:
        found = getattr(rows, "counts", count(len(rows), "row"))  # a user's own class may lack counts
        suggestion = 1 << (max(min(len(rows), suggested_at_most), 1).bit_length() - 1)
        what = f"is {wanted:,}: too few rows for one batch: {found}, {wanted} needed."
        findings.problem(_BATCH, what, f"Set {_BATCH}={suggestion}.")


def _look_at_length(
    findings: Findings, config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, prompt: str, beside: int
) -> None:
    """Check that a prompt fits with the tools of the environment, without which rows were counted.

    Args:
        findings: Collects problems.
        config: The validated configuration.
        tokenizer: Of the policy.
        prompt: As the template writes it.
        beside: Tokens of its pictures beyond the one that the template writes for each.
    """
    (ids,) = encode_texts(tokenizer, [prompt])
    length, limit = len(ids) + beside, config.data.max_prompt_length
    if length > limit:
        findings.problem(
            "data.max_prompt_length",
            f"is {limit}: the first prompt has {length} tokens with its tools, and its episode would fail.",
            f"Set data.max_prompt_length={_rounded_up(length)} or more.",
        )


def _rounded_up(tokens: int) -> int:
    """Return a multiple of 64 with a quarter of room: other prompts are a little longer."""
    return -(-tokens * 5 // 4 // 64) * 64


def look_at_template(
    findings: Findings,
    config: RunConfiguration,
    train: Any,
    tokenizer: PreTrainedTokenizerBase,
    ids: TokenIds,
    shown_tools: Sequence[Mapping[str, Any]] | None = (),
) -> None:
    """Render the first prompt and check the chat template.

    Its faults are warnings for sampled answers and errors for given ones.

    Args:
        findings: Collects what is found.
        config: The validated configuration.
        train: The rows.
        tokenizer: Of the policy.
        ids: Its tokens that matter.
        shown_tools: Of an environment, shown beside the row's messages; None where it makes of the row what it likes.
    """
    kwargs = config.data.apply_chat_template_kwargs
    with findings.about("data.train_files"):
        if isinstance(config, PPOTrainerConfig):
            first = train[train.known[0]]  # a user's own data set may have no `tools`
            tools = shown_tools or first.get("tools")
            report = inspect_chat_template(tokenizer, first["raw_prompt"], ids.stop, with_tools(kwargs, tools))
            if shown_tools:
                shown = train.rows[train.known[0]].images if shows_pictures(train) else ()
                beside = sum(train.picture_tokens(each) - 1 for each in shown)
                _look_at_length(findings, config, tokenizer, report.prompt, beside)
            of_row = (
                "the row's, and what `reset` makes of it is shown by `hrl env-test`: " if shown_tools is None else ""
            )
            findings.facts.append(Fact("first prompt", f"{of_row}{report.shown_prompt}"))
            findings.notes += report.warnings_for_sampling()
            return
        findings.facts.append(Fact("first row", shortened(train.shown(train.rows[train.known[0]]))))
        if (prompt := train.first_prompt()) is not None:
            check_chat_template(tokenizer, prompt.messages, ids.stop, with_tools(kwargs, prompt.tools))
