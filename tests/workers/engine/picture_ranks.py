"""What the ranks of `test_pictures.py` run. Functions only: a spawned process imports this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from hrl.batching.plan import MiniBatchPlan, RankPlan
from hrl.columns import object_column
from hrl.models.pictures import PictureProcessor
from hrl.pictures import MULTI_MODAL_DATA, Picture, digest_of
from hrl.protocol import DataProto
from tests.models.tiny import actor_config, fsdp_config, model_config
from tests.models.tiny_pictures import SPECIAL, picture, png
from tests.workers.asked import Actor
from tests.workers.engine.ranks import CPU, gradients

START, END, PAD = (SPECIAL.index(token) for token in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"))
SHOWS = (0, 0, 1, 2, None, None)
"""The picture of each row's prompt; those of the first two rows are one prompt."""
PROMPT, ANSWER = 24, 5


def batch_of(folder: Path) -> DataProto:
    """Six rows, the last two without a picture, as columns of a batch."""
    processor, rng = PictureProcessor(folder), np.random.default_rng(3)
    files = [png(picture(1)), png(picture(2, 100, 56)), png(picture(3))]
    sizes = [(60, 56), (100, 56), (60, 56)]
    prompts = np.zeros((len(SHOWS), PROMPT), np.int64)
    mask = np.zeros((len(SHOWS), PROMPT + ANSWER), np.int64)
    column: list[tuple[Picture, ...]] = []
    for row, shown in enumerate(SHOWS):
        ids, placed = [20], ()
        if shown is not None:
            length = processor.num_tokens(*sizes[shown])
            placed = (Picture(files[shown], digest_of(files[shown]), 2, length),)
            ids += [START, *[PAD] * length, END]
        ids += [30, 40 + (shown or 0)]
        prompts[row, PROMPT - len(ids) :] = ids
        mask[row, PROMPT - len(ids) :] = 1
        column.append(placed)
    noise = [torch.from_numpy(rng.normal(size=(len(SHOWS), ANSWER))) for _ in range(2)]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.from_numpy(prompts),
            "responses": torch.from_numpy(rng.integers(len(SPECIAL), 272, (len(SHOWS), ANSWER))),
            "attention_mask": torch.from_numpy(mask),
            "response_mask": torch.ones(len(SHOWS), ANSWER, dtype=torch.int64),
            "advantages": noise[0],
            "old_log_probs": -5.0 + 0.3 * noise[1],
        },
        non_tensors={
            "uid": np.array([f"g{shown}" for shown in SHOWS], dtype=object),
            MULTI_MODAL_DATA: object_column(column),
        },
        meta_info={"temperature": 1.0},
    )


def learnt(
    rank: int, folder: Path, world_size: int, *, degree: int = 1, frozen: bool = False, packs_rows: bool = True
) -> dict[str, Any]:
    """The gradients of a mini-batch, by name; where there are several ranks, only the first one has pictures.

    Args:
        rank: Of this process.
        folder: Of the model.
        world_size: Ranks.
        degree: Ranks of a sequence group.
        frozen: The tower is not trained.
        packs_rows: Rows are packed; else padded.
    """
    batch = batch_of(folder)
    batch.batch["attention_mask"][:, PROMPT:] = 1
    sees = {"shows_pictures": True, "freeze_vision_tower": frozen, "packs_rows": packs_rows}
    source = model_config(folder, enable_gradient_checkpointing=True, **sees)
    fsdp = fsdp_config(ulysses_sequence_parallel_size=degree)
    policy = Actor(source, actor_config(entropy_coeff=0.0), fsdp, device=CPU, total_steps=1)
    rows = list(range(len(SHOWS)))
    if world_size // degree > 1:
        rows = rows[:4] if rank == 0 else rows[4:]
    cuts = ((0, 1), (2, 3)) if len(rows) == 4 else ((0, 1), ()) if len(rows) == 2 else ((0, 1, 2), (3, 4, 5))
    trained = batch.batch["response_mask"]
    plan = RankPlan((MiniBatchPlan(cuts, int(trained.sum()), len(SHOWS), 4),))
    return gradients(policy, batch.select_idxs(rows), plan, with_pictures=True)


def on_two_ranks(rank: int, folder: Path, with_states: Path) -> dict[str, Any]:
    """Everything that two ranks are asked for, of a model and of one whose layers carry states."""
    return {
        "apart": learnt(rank, folder, 2),
        "together": learnt(rank, folder, 2, degree=2),
        "frozen": learnt(rank, folder, 2, frozen=True),
        "padded": learnt(rank, with_states, 2, packs_rows=False),
    }
