"""Optimizer steps whose loss or gradient is not finite: how many are too many, and what is kept of their batches.

A rank keeps its part of the mini-batch in two files of `<run folder>/nonfinite`:

    step_N_rank_R.<update>-<k>.safetensors   the rows of the k-th mini-batch of the update, in the order they ran
    step_N_rank_R.<update>-<k>.json          what was not finite, and under which circumstances

Ranks of a sequence group have the same rows: the first keeps them, and R counts groups.

Rows lie without padding: `prompts` and `responses` one after the other, so does every column of response tokens,
and `prompt_lengths` and `response_lengths` say where rows end. `micro_batch` says in which micro-batch a row ran.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic_core import to_json
from safetensors.torch import save
from torch import Tensor, nn

from hrl.batching.plan import MiniBatchPlan
from hrl.errors import NonFiniteError
from hrl.files import write_whole
from hrl.routing import ROUTED_EXPERTS
from hrl.workers.engine.checksum import of_all_ranks
from hrl.workers.engine.host_memory import local
from hrl.workers.engine.optim import Optimizer, StepReport, names_of_nonfinite

if TYPE_CHECKING:
    from hrl.batching.plan import RankPlan
    from hrl.protocol import DataProto
    from hrl.workers.requests import Training, Update

logger = logging.getLogger(__name__)

#: Skipped steps in a row that end a run: what made the first ones not finite will not go away.
MAX_IN_A_ROW = 3
#: Mini-batches of a run that a rank keeps: enough to find the cause, too few to fill a disk.
MAX_DUMPS = 12

FOLDER = "nonfinite"
#: The column that says how many tokens of each row have experts to replay.
ROUTED_LENGTHS = "routed_lengths"
#: They follow from the other columns and would be as wide as the padding.
_IMPLIED = ("attention_mask", "input_ids", "position_ids")


class NonFiniteStepError(NonFiniteError):
    """Several optimizer steps in a row had a loss or gradient that is not a finite number."""


class NonFiniteWeightsError(NonFiniteStepError):
    """Weights or moments are no finite numbers, so nothing that comes after is any good."""


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step that was not applied.

    Attributes:
        update: Its name in metrics: `actor`, `critic`, `train`.
        request: What the rank was asked for.
        index: Place of the mini-batch in the update.
        in_a_row: Skipped steps up to this one, and including it.
        batch: The rank's rows.
        config: How the model is trained.
        report: What the optimizer saw.
        place: Number of the rank, and of all ranks with rows of their own; a sequence group counts as one rank.
        metrics: Names of the update's metrics that are not finite by now.
        weights: Names of parameters that are not finite themselves.
        circumstances: What else `hrl replay` needs: how the model was loaded and sharded, where it ran, and the
            checksum of its weights.
    """

    update: str
    request: Update[RankPlan]
    index: int
    in_a_row: int
    batch: DataProto
    config: Training
    report: StepReport
    place: tuple[int, int]
    metrics: tuple[str, ...]
    weights: tuple[str, ...]
    circumstances: Mapping[str, Any]

    @property
    def plan(self) -> MiniBatchPlan:
        """Which of the rank's rows made up the mini-batch."""
        return self.request.plan.mini_batches[self.index]

    @property
    def name(self) -> str:
        """The name of its files, without the suffix."""
        return f"step_{self.request.step}_rank_{self.place[0]}.{self.update}-{self.index}"


def skip(skipped: SkippedStep, run_folder: Path | None) -> None:
    """Keep the batch of a skipped step, and log that it was skipped.

    Args:
        skipped: The step.
        run_folder: On this rank's machine; `None` for an update outside a run, of which nothing is kept.

    Raises:
        NonFiniteStepError: It is the last of `MAX_IN_A_ROW`.
    """
    kept = None if run_folder is None else dump(skipped, run_folder / FOLDER)
    report, where = skipped.report, "" if kept is None else f". This rank's rows are in {kept}"
    logger.warning(
        "step %d: mini-batch %d of update %s not applied, gradient norm %s, loss of this rank %s (%d in a row)%s",
        skipped.request.step,
        skipped.index,
        skipped.update,
        report.grad_norm,
        sum(report.losses),
        skipped.in_a_row,
        where,
    )
    if skipped.in_a_row >= MAX_IN_A_ROW:
        raise NonFiniteStepError(
            f"{skipped.in_a_row} optimizer steps in a row had a loss or gradient that is not finite (update "
            f"{skipped.update}, gradient norm {report.grad_norm}): lower the learning rate, or look at the batch's "
            f"rewards and log-probs{where}"
        )


def rows_of_nonfinite(columns: Mapping[str, Tensor]) -> set[int]:
    """Return the rows in which a column has a NaN or an infinity, at a trained token if it is one of tokens.

    Args:
        columns: `response_mask (B, R)` and others, `(B, R)` or `(B,)`, on the CPU.
    """
    mask = columns["response_mask"].numpy().astype(bool)
    found: set[int] = set()
    for column in columns.values():
        if column.is_floating_point():
            numbers = column.float().numpy()
            bad = ~np.isfinite(numbers) & (mask if numbers.shape == mask.shape else True)
            found.update(np.flatnonzero(bad.any(axis=tuple(range(1, bad.ndim)))).tolist())
    return found


@torch.no_grad()
def check_state(module: nn.Module, optimizer: Optimizer, after: str) -> None:
    """Refuse weights and moments that are not finite: the steps to come could not mend them.

    Every rank calls it. Moments in host memory are left out: a GPU's host would read them for longer than a step takes.

    Args:
        module: The sharded module.
        optimizer: Of its parameters.
        after: What was done last, for the message.

    Raises:
        NonFiniteWeightsError: Names ranks, weights and moments.
    """
    trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    tensors = {f"weight {name}": local(parameter.detach()) for name, parameter in trained}
    if not optimizer.rule.offload:
        for parameter, name in optimizer.names.items():
            state = {f"{part} of {name}": local(tensor) for part, tensor in optimizer.rule.state[parameter].items()}
            tensors |= {part: tensor for part, tensor in state.items() if tensor.is_floating_point()}
    # A norm is read as fast as memory is. It may overflow where all numbers are finite: then they are looked at.
    norms = torch.stack([norm.double() for norm in torch._foreach_norm([*tensors.values()])])
    if not any(of_all_ranks(norms.isfinite().logical_not().sum())):
        return
    broken = set(names_of_nonfinite(tensors))
    flags = of_all_ranks(torch.tensor([name in broken for name in tensors], dtype=torch.int64, device=norms.device))
    found = [[name for name, flag in zip(tensors, mine, strict=True) if flag] for mine in flags]
    if any(found):
        where = "; ".join(f"rank {rank}: {_some(names)}" for rank, names in enumerate(found) if names)
        raise NonFiniteWeightsError(
            f"after {after} the model's state is not finite ({where}). Nothing of it is saved or sampled from; the "
            "same command continues from the newest checkpoint. If it happens again at the same step, lower the "
            "learning rate; if not, memory of a machine is faulty"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def dump(skipped: SkippedStep, folder: Path) -> Path | None:
    """Write both files, the JSON last, each under its final name only when it is whole.

    Returns:
        The JSON file; `None` where this rank has kept enough already, or the disk refuses, which is logged.
    """
    if len(list(folder.glob(f"step_*_rank_{skipped.place[0]}.*.json"))) >= MAX_DUMPS:
        logger.warning("%s is not kept: this rank has kept %d batches in %s", skipped.name, MAX_DUMPS, folder)
        return None
    columns = unpadded(skipped.batch, skipped.plan.micro_batches)
    return write_dump(folder, skipped.name, columns, _described(skipped, columns))


def write_dump(folder: Path, name: str, columns: Mapping[str, Tensor], described: Mapping[str, Any]) -> Path | None:
    """Write columns and what is known of them, see `dump`.

    Args:
        folder: Made if it is missing.
        name: Of both files, without the suffix.
        columns: See `unpadded`.
        described: Anything.
    """
    # NaN and infinity become text, which JSON has no numbers for; so does whatever else JSON lacks.
    text = to_json(described, indent=1, inf_nan_mode="strings", fallback=_fields_or_text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.safetensors", save(dict(columns)))
        write_whole(folder / f"{name}.json", text + b"\n")
    except OSError as error:
        logger.warning("%s could not be written to %s: %s", name, folder, error)
        return None
    return folder / f"{name}.json"


def _described(skipped: SkippedStep, columns: Mapping[str, Tensor]) -> dict[str, Any]:
    report, uids = skipped.report, skipped.batch.non_tensor_batch["uid"]
    return {
        "update": skipped.update,
        "step": skipped.request.step,
        "mini_batch": skipped.index,
        "skipped_in_a_row": skipped.in_a_row,
        "rank": skipped.place[0],
        "world_size": skipped.place[1],
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "micro_batches": [
            {"loss": loss, "uids": [*uids[list(picked)]]}
            for loss, picked in zip(report.losses, skipped.plan.micro_batches, strict=True)
        ],
        "not_finite": {
            "columns": names_of_nonfinite(columns),
            "metrics": skipped.metrics,
            "gradients": report.nonfinite_gradients,
            "weights": skipped.weights,
        },
        "is_tree": skipped.request.plan.is_tree,
        "counts": {name: value for name, value in vars(skipped.plan).items() if name != "micro_batches"},
        "response_width": skipped.batch.batch["responses"].shape[1],
        "meta_info": skipped.batch.meta_info,
        "asked_for": type(skipped.request).__name__,
        "request": {name: value for name, value in vars(skipped.request).items() if name != "plan"},
        "config": skipped.config,
        **skipped.circumstances,
    }


def unpadded(batch: DataProto, micro_batches: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the columns of the rows that ran, in their order, without padding.

    Args:
        batch: The rank's rows, B of them.
        micro_batches: Local row positions; b altogether.

    Returns:
        Columns of prompt tokens `(ΣP_i,)`, of response tokens `(ΣR_i,)`, of rows `(b, ...)`; `prompt_lengths`,
        `response_lengths` and `micro_batch (b,)`; where the rows have experts to replay, `routed_experts` one row after
        the other, and `routed_lengths (b,)`.
    """
    rows = [row for picked in micro_batches for row in picked]
    width = batch.batch["prompts"].shape[1]
    mask = batch.batch["attention_mask"][rows].bool()
    prompt, response = mask[:, :width], mask[:, width:]
    columns = {
        "prompt_lengths": prompt.sum(1),
        "response_lengths": response.sum(1),
        "micro_batch": torch.tensor([index for index, picked in enumerate(micro_batches) for _ in picked]),
    }
    for name, column in batch.batch.items():
        if name in _IMPLIED:
            continue
        picked = column[rows]
        valid = prompt if name == "prompts" else response
        columns[name] = (picked[valid] if picked.shape[:2] == valid.shape else picked).contiguous()
    if ROUTED_EXPERTS in batch.non_tensor_batch:
        routed = [batch.non_tensor_batch[ROUTED_EXPERTS][row] for row in rows]
        columns[ROUTED_LENGTHS] = torch.tensor([len(one) for one in routed], dtype=torch.int64)
        if known := [one for one in routed if len(one)]:  # of none, their shape is not known
            columns[ROUTED_EXPERTS] = torch.from_numpy(np.concatenate(known))
    return columns


def _fields_or_text(value: Any) -> Any:
    return getattr(value, "__dict__", None) or str(value)
