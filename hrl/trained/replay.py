"""`hrl replay`: a mini-batch that was not applied, computed again, with where its first number that is not finite is.

What a rank keeps of such a mini-batch (`hrl.workers.engine.nonfinite`) says all that the step depended on but the
weights, which come from a checkpoint. Their checksum tells whether they are the ones that the step had; if they are,
every number is to come out the same. The files are data: nothing in them is executed, and code of a model's folder, or
of the file of a loss, runs only if the caller says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, Field, StrictBool, StrictInt, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hrl.algos.preference import PairOptions
from hrl.algos.registry import IN_FILE
from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.cluster.checkpoints import SUPERSEDED, CheckpointStore, require_undamaged
from hrl.columns import object_column
from hrl.config.actor import ActorConfig
from hrl.config.algorithm import RolloutCorrectionConfig
from hrl.config.critic import CriticConfig
from hrl.config.model import OptimConfig
from hrl.errors import RefusedError
from hrl.models.adapter import AdapterSource
from hrl.models.loading import ModelSource
from hrl.processes.plain_data import first_misfit
from hrl.protocol import DataProto
from hrl.report.run_folder import RunFolder
from hrl.routing import ROUTED_EXPERTS
from hrl.workers.engine.engine import Engine
from hrl.workers.engine.nonfinite import FOLDER, ROUTED_LENGTHS, NonFiniteStepError
from hrl.workers.engine.optim import StepReport
from hrl.workers.policy import Policy
from hrl.workers.requests import (
    OldLogProbs,
    PolicyUpdate,
    PreferenceUpdate,
    RewardModelUpdate,
    SupervisedUpdate,
    Training,
    ValueUpdate,
)
from hrl.workers.value_model import ValueModel

_REQUESTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (PolicyUpdate, PreferenceUpdate, RewardModelUpdate, SupervisedUpdate, ValueUpdate)
}
_SCALAR = (ValueUpdate, RewardModelUpdate)
_SECTIONS: dict[str, Callable[[Any], Any]] = {
    "loss": lambda value: (ActorConfig if "policy_loss" in value else CriticConfig).model_validate(value),
    "correction": lambda value: None if value is None else RolloutCorrectionConfig.model_validate(value),
    "options": lambda value: PairOptions(**value),
    "old_log_probs": OldLogProbs,
}
_NUMBER = TypeAdapter(float)
_ALONE = {"fsdp_size": -1, "ulysses_sequence_parallel_size": 1, "tensor_parallel_size": 1, "expert_parallel_size": 1}
#: Columns of a dump that say how the others lie, or that lie in a way of their own.
_OF_DUMPS = ("prompt_lengths", "response_lengths", "micro_batch", ROUTED_LENGTHS, ROUTED_EXPERTS)
#: Columns of response tokens; where every response has one token, their length does not tell.
_PER_TOKEN = {
    "responses",
    "response_mask",
    "advantages",
    "returns",
    "values",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "selected_tokens",
}


class ReplayError(RefusedError, ValueError):
    """A step can't be computed again from these files."""


class _MicroBatchOfRecord(BaseModel):
    loss: float
    uids: list[str]


class _NotFiniteOfRecord(BaseModel):
    columns: list[str]


class _ConfigOfRecord(BaseModel):
    optim: dict[str, Any]
    grad_clip: float
    total_steps: StrictInt
    seed: StrictInt


class _Record(BaseModel):
    """The fields of a record that are read here, to be looked at; numbers that are not finite are texts."""

    update: str
    step: StrictInt
    mini_batch: StrictInt
    rank: StrictInt
    world_size: StrictInt
    grad_norm: float
    micro_batches: list[_MicroBatchOfRecord]
    not_finite: _NotFiniteOfRecord
    is_tree: StrictBool = False
    """Records that were written before there were trees don't say so."""
    counts: dict[str, Any]
    response_width: StrictInt
    asked_for: str
    request: dict[str, Any]
    config: _ConfigOfRecord
    num_threads: Annotated[StrictInt, Field(gt=0)]
    model: dict[str, Any]
    fsdp: dict[str, Any]
    weights_checksum: StrictInt


@dataclass(frozen=True)
class Dump:
    """What a rank kept of a mini-batch.

    Attributes:
        path: The JSON file.
        record: What it says.
        columns: Of the file beside it.
    """

    path: Path
    record: Mapping[str, Any]
    columns: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Dump:
        """Read both files.

        Raises:
            ReplayError: They can't be read, or are no mini-batch of a rank.
        """
        try:
            path = Path(os.path.realpath(path))  # the folder that it lies in tells the run
            text = path.with_suffix(".json").read_text(encoding="utf-8")
            record, columns = json.loads(text), load_file(path.with_suffix(".safetensors"))
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise ReplayError(f"{path} and the .safetensors file beside it can't be read: {error}") from error
        if not isinstance(record, dict):
            raise ReplayError(f"{path} is no JSON object: it was not written by a run of hrl")
        if "phase" in record:
            raise ReplayError(
                f"{path} is a batch that no rank has learnt from: its column {record.get('column')} was not finite "
                f"after phase {record['phase']}. Only a mini-batch of a rank is replayed "
                "(step_N_rank_R.<update>-<k>.json)"
            )
        try:
            _Record.model_validate(record)
        except ValidationError as error:
            part, why = first_misfit(error)
            raise ReplayError(f"{path} was not written by a run of this version of hrl: {part}: {why}") from error
        missing = {"prompts", "responses", "prompt_lengths", "response_lengths", "micro_batch"} - columns.keys()
        if missing:
            raise ReplayError(f"the .safetensors file beside {path} has no column {', '.join(sorted(missing))}")
        return cls(path, record, columns)

    @property
    def rows(self) -> int:
        """How many rows ran on this rank."""
        return len(self.columns["prompt_lengths"])

    @property
    def losses(self) -> list[float]:
        """The share of the loss that each micro-batch had."""
        return [_NUMBER.validate_python(part["loss"]) for part in self.record["micro_batches"]]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.columns["prompt_lengths"].max()) if self.rows else 0

    def batch(self, prompt_width: int) -> DataProto:
        """Return the rows with their padding, prompts in so many columns."""
        prompts, responses = (self.columns[f"{side}_lengths"].tolist() for side in ("prompt", "response"))
        width, tensors = self.record["response_width"], {}
        of_prompts, of_responses = (
            [torch.ones(length, dtype=torch.int64) for length in lengths] for lengths in (prompts, responses)
        )
        masks = _padded(of_prompts, prompt_width, left=True), _padded(of_responses, width)
        for name, column in self.columns.items():
            if name in _OF_DUMPS:
                continue
            if name == "prompts":
                tensors[name] = _padded(column.split(prompts), prompt_width, left=True)
            elif len(column) == sum(responses) and (sum(responses) != self.rows or name in _PER_TOKEN):
                tensors[name] = _padded(column.split(responses), width)
            else:
                tensors[name] = column
        tensors["attention_mask"] = torch.cat(masks, 1)
        uids = [uid for part in self.record["micro_batches"] for uid in part["uids"]]
        others = {"uid": np.array(uids, dtype=object)}
        if ROUTED_LENGTHS in self.columns:
            routed = self.columns.get(ROUTED_EXPERTS, torch.zeros(0, 0, 0, dtype=torch.uint8))
            rows = routed.split(self.columns[ROUTED_LENGTHS].tolist())
            others[ROUTED_EXPERTS] = object_column([row.numpy() for row in rows])
        return DataProto.from_dict(tensors=tensors, non_tensors=others)

    def micro_batches(self, first: int) -> tuple[tuple[int, ...], ...]:
        """Return the places of the rows of each micro-batch, where `first` rows come before."""
        place = self.columns["micro_batch"].tolist()
        count = len(self.record["micro_batches"])
        return tuple(tuple(first + row for row, at in enumerate(place) if at == each) for each in range(count))


def _padded(parts: Sequence[Tensor], width: int, *, left: bool = False) -> Tensor:
    side = "left" if left else "right"
    whole = pad_sequence(list(parts), batch_first=True, padding_side=side)
    missing = width - whole.shape[1]
    return nn.functional.pad(whole, (missing, 0) if left else (0, missing))


@dataclass(frozen=True)
class MicroBatch:
    """What came of a micro-batch.

    Attributes:
        loss: Its share of the loss.
        recorded: The share that the run had.
        uids: Of its rows.
        lowest, highest: Of the model's results (log-probs or values) that are finite.
        layer: The first module whose output was not finite; None if all were.
    """

    loss: float
    recorded: float
    uids: Sequence[str]
    lowest: float
    highest: float
    layer: str | None

    @property
    def is_same(self) -> bool:
        """Whether the loss is the run's, bit for bit."""
        return _same(self.loss, self.recorded)


@dataclass(frozen=True)
class Replay:
    """What came of a mini-batch.

    Attributes:
        dumps: What it was computed from.
        weights: Where its weights came from.
        has_same_weights: Whether their checksum is that of the step's.
        micro_batches: In the order in which they ran, rank after rank.
        grad_norm: Of all that was computed.
        columns: Columns that are not finite.
        gradients: Parameters whose gradient is not, that nearest to the loss first.
    """

    dumps: Sequence[Dump]
    weights: str
    has_same_weights: bool
    micro_batches: Sequence[MicroBatch]
    grad_norm: float
    columns: Sequence[str]
    gradients: Sequence[str]

    @property
    def has_all_ranks(self) -> bool:
        """Whether the whole mini-batch was there, so that the gradient's norm can be compared."""
        return len(self.dumps) == self.dumps[0].record["world_size"]

    @property
    def recorded_norm(self) -> float:
        """The norm of the gradient that the run had."""
        return _NUMBER.validate_python(self.dumps[0].record["grad_norm"])

    @property
    def has_same_norm(self) -> bool:
        """Whether the norm of the gradient is the run's, bit for bit; only with all ranks."""
        return self.has_all_ranks and _same(self.grad_norm, self.recorded_norm)

    @property
    def is_reproduced(self) -> bool:
        """Whether the weights are the step's, and every number that can be compared is the run's."""
        norms = not self.has_all_ranks or self.has_same_norm
        return self.has_same_weights and norms and all(each.is_same for each in self.micro_batches)

    def lines(self) -> Iterator[str]:
        """Yield what there is to tell."""
        record = self.dumps[0].record
        yield (
            f"step {record['step']}, update {record['update']}, mini-batch {record['mini_batch']}: {len(self.dumps)} "
            f"of {record['world_size']} rank(s), {sum(dump.rows for dump in self.dumps)} rows"
        )
        same = "the checksum is that of the step's"
        if not self.has_same_weights:
            same = "by their checksum not those of the step: numbers will differ, and may show another cause"
        yield f"weights: {self.weights} ({same})"
        yield f"columns that are not finite: {', '.join(self.columns) or 'none'}"
        for index, each in enumerate(self.micro_batches):
            compared = "as recorded" if each.is_same else f"recorded {each.recorded:.9g}"
            where = "" if each.layer is None else f"; first output that is not finite: {each.layer}"
            yield (
                f"micro-batch {index}: loss {each.loss:.9g} ({compared}), results {each.lowest:.4g} to "
                f"{each.highest:.4g}{where}" + ("" if math.isfinite(each.loss) else f"; uids {', '.join(each.uids)}")
            )
        if self.has_all_ranks:
            compared = "as recorded" if self.has_same_norm else f"recorded {self.recorded_norm:.9g}"
            yield f"gradient norm {self.grad_norm:.9g} ({compared})"
        else:
            yield f"gradient norm {self.grad_norm:.9g} of these ranks alone, which is not compared"
        if self.gradients:
            yield f"gradients that are not finite: {len(self.gradients)}, nearest to the loss {self.gradients[0]}"
        yield "reproduced" if self.is_reproduced else "not reproduced"


def replay(
    paths: Sequence[Path], *, checkpoint: Path | None = None, model: str | None = None, trust_code: bool = False
) -> Replay:
    """Compute a mini-batch again, on this machine's CPU.

    Args:
        paths: What ranks kept of it; the files of all ranks make the whole mini-batch.
        checkpoint: Whose weights to take; by default the run's newest from before the step.
        model: A folder with the weights to take instead.
        trust_code: Run code of the model's folder, and the file of a loss of the user's own.

    Raises:
        ReplayError: The files do not belong together, or can't be used.
        CheckpointError: The checkpoint is damaged.
    """
    dumps = _checked([Dump.read(path) for path in paths])
    record = dumps[0].record
    if IN_FILE in str(record["request"].get("loss", {})) and not trust_code:
        raise ReplayError(
            f"{dumps[0].path} names a loss in a Python file, which would be run: allow it with --trust-code"
        )
    if checkpoint is None and model is None:
        checkpoint = _checkpoint_before(dumps[0])
    torch.set_num_threads(record["num_threads"])
    with _world_of_one():
        width = max(dump.longest_prompt for dump in dumps)
        request, batch = _request(dumps), DataProto.concat([dump.batch(width) for dump in dumps])
        learner = _learner(dumps[0], request, model, trust_code=trust_code)
        engine = learner.engine
        weights = model or engine._source.path
        if checkpoint is not None:
            weights = str(checkpoint)
            part = _part_of(checkpoint, record["update"])
            require_undamaged(checkpoint, part)
            engine.load(checkpoint / part, ("model",))
        same = engine.weights_checksum() == record["weights_checksum"]
        reports, found = _watched(engine, lambda: learner.update(batch, request))
    recorded = [loss for dump in dumps for loss in dump.losses]
    uids = [part["uids"] for dump in dumps for part in dump.record["micro_batches"]]
    return Replay(
        dumps=dumps,
        weights=weights,
        has_same_weights=same,
        micro_batches=[
            MicroBatch(loss, before, names, low, high, layer)
            for (loss, low, high, layer), before, names in zip(found, recorded, uids, strict=True)
        ],
        grad_norm=reports[0].grad_norm,
        columns=sorted({name for dump in dumps for name in dump.record["not_finite"]["columns"]}),
        gradients=list(reversed(reports[0].nonfinite_gradients)),
    )


def _checked(dumps: Sequence[Dump]) -> Sequence[Dump]:
    """Return files of one mini-batch in the order of their ranks."""
    first = dumps[0].record
    for dump in dumps[1:]:
        for name in ("step", "update", "mini_batch", "world_size", "counts"):
            if dump.record[name] != first[name]:
                raise ReplayError(f"{dump.path} has {name} {dump.record[name]}, and {dumps[0].path} {first[name]}")
    ordered = sorted(dumps, key=lambda dump: cast("int", dump.record["rank"]))
    ranks = [dump.record["rank"] for dump in ordered]
    if len(set(ranks)) < len(ranks):
        raise ReplayError(f"the files are of the ranks {ranks}: name each rank's once")
    return ordered


def _checkpoint_before(dump: Dump) -> Path | None:
    """Return the newest checkpoint of the run from before the step; None if it had none, and began with its model."""
    run = dump.path.parent.parent
    if dump.path.parent.name != FOLDER or run.parent.name == SUPERSEDED:
        raise ReplayError(f"{dump.path} is in no folder of a run: name weights with --checkpoint or --model")
    store = CheckpointStore(RunFolder.checkpoints_in(run))
    steps = [step for step in store.steps() if step < dump.record["step"]]
    return store.path(steps[-1]) if steps else None


def _part_of(checkpoint: Path, update: str) -> str:
    parts = {"actor": ["actor"], "critic": ["critic"]}.get(update, ["actor", "rm"])
    for part in parts:
        if (checkpoint / part).is_dir():
            return part
    raise ReplayError(f"{checkpoint} has no folder {' or '.join(parts)}: it is no checkpoint with this model's state")


def _request(dumps: Sequence[Dump]) -> Any:
    """Return what the ranks were asked for, with a plan of all their rows."""
    record, first = dumps[0].record, 0
    micro_batches: list[tuple[int, ...]] = []
    for dump in dumps:
        micro_batches += dump.micro_batches(first)
        first += dump.rows
    kind = _REQUESTS.get(record["asked_for"])
    if kind is None:
        raise ReplayError(f"{dumps[0].path} was asked for by {record['asked_for']}, which is no update of hrl")
    try:
        fields = {name: _SECTIONS.get(name, lambda value: value)(value) for name, value in record["request"].items()}
        mini_batch = MiniBatchPlan(tuple(micro_batches), **record["counts"])
        return kind(plan=RankPlan((mini_batch,), is_tree=record.get("is_tree", False)), **fields)
    except (ValidationError, TypeError, ValueError) as error:
        raise ReplayError(f"the request in {dumps[0].path} is not one of this version of hrl: {error}") from error


def _learner(dump: Dump, request: Any, model: str | None, *, trust_code: bool) -> Policy | ValueModel:
    record, config = dump.record, dump.record["config"]
    try:
        training = Training(
            optim=OptimConfig.model_validate(config["optim"]),
            grad_clip=_NUMBER.validate_python(config["grad_clip"]),
            total_steps=config["total_steps"],
            seed=config["seed"],
            run_folder=None,
        )
        model_fields = {**record["model"], "adapter": AdapterSource.of_plain(record["model"].get("adapter"))}
        source = replace(ModelSource(**model_fields), trust_remote_code=trust_code)
    except (ValidationError, TypeError) as error:
        raise ReplayError(f"config or model in {dump.path} is not one of this version of hrl: {error}") from error
    if source.shows_pictures:
        raise ReplayError(
            f"the prompts in {dump.path} show pictures, which are not kept with a step: it can't be replayed"
        )
    if model is not None:
        source = replace(source, path=model)
    if not Path(source.path).is_dir():
        raise ReplayError(f"the model's folder {source.path} is not on this machine: name one with --model")
    # One process has all of the model and of the rows, whatever they were cut over.
    fsdp: Any = SimpleNamespace(**record["fsdp"] | _ALONE)
    make = ValueModel if isinstance(request, _SCALAR) else Policy
    return make(source, training, fsdp, device=torch.device("cpu"))


_Found = tuple[float, float, float, str | None]


def _watched(engine: Engine, update: Callable[[], Any]) -> tuple[list[StepReport], list[_Found]]:
    """Make an update, and return the report of its step, and of each micro-batch loss, range and first bad layer."""
    step: Callable[..., StepReport] = engine.step
    reports: list[StepReport] = []
    found: list[_Found] = []

    def watched_step(plan: MiniBatchPlan, loss_of: Callable[[tuple[int, ...]], Tensor]) -> StepReport:
        def watched(picked: tuple[int, ...]) -> Tensor:
            with torch.no_grad(), _watching(engine.module) as seen:  # apart, because hooks disturb recomputation
                loss_of(picked)
            loss = loss_of(picked)
            results = seen.results[torch.isfinite(seen.results)]
            low, high = (float(results.min()), float(results.max())) if len(results) else (math.nan, math.nan)
            found.append((float(loss.detach()), low, high, seen.layer))
            return loss

        reports.append(step(plan, watched))
        return reports[-1]

    vars(engine)["step"] = watched_step
    try:
        update()
    except NonFiniteStepError:
        if not reports:
            raise  # else weights that are not finite, of which the report tells
    return reports, found


class _Seen:
    """What the hooks saw of a micro-batch."""

    def __init__(self) -> None:
        self.layer: str | None = None
        self.results = torch.zeros(0)


@contextmanager
def _watching(module: nn.Module) -> Iterator[_Seen]:
    """Look at the outputs of all modules; those inside another come before it."""
    seen = _Seen()

    def look(name: str, is_whole: bool, output: Any) -> None:
        tensors = [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, Tensor)]
        if is_whole and tensors:
            seen.results = tensors[0].detach().flatten().float()
        floating = [part for part in tensors if part.is_floating_point()]
        if seen.layer is None and not all(torch.isfinite(part).all() for part in floating):
            seen.layer = name or "the model's results"

    with ExitStack() as hooks:
        for name, part in module.named_modules():
            handle = part.register_forward_hook(
                lambda _, __, output, name=name: look(name, name == "", output)  # type: ignore[misc]
            )
            hooks.callback(handle.remove)
        yield seen


@contextmanager
def _world_of_one() -> Iterator[None]:
    if dist.is_initialized():  # a caller that has a world of its own
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
