"""Validation metrics: mean, best, worst and majority of k samples.

Each of 200 prompts has 4 or 16 samples with a score of 0 or 1 and an answer; 16 prompts stand for the small end of
the curve. verl's trainer calls `process_validation_metrics` with lists of sources, uids and values; hrl's calls
`validation_metrics` with the batch. verl estimates all of best@k, worst@k and maj@k by a bootstrap of 1,000 draws, a
Python call each; hrl computes best and worst in closed form and draws the votes of all prompts at once. So mean and
std must agree to rounding, the others to the error of the bootstrap. hrl's time has pass@k in it, which verl does not
compute, verl's has the standard deviations of its bootstrap, which hrl does not. verl counts a tied vote for whoever
was drawn first, hrl shares it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench.harness import Case
from bench.peers import VERL
from hrl.protocol import DataProto
from hrl.trainer.ppo.metrics import validation_metrics

AXIS = "samples"
SECONDS = 46
THREADS = 1
_SOURCE = "addition"


def cases() -> Iterator[Case]:
    """Yield growth in the number of samples, first of prompts, then of samples per prompt."""
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    for prompts, samples in ((16, 16), (200, 4), (200, 16)):
        batch, columns = _validation(prompts, samples)

        def ours(batch: DataProto = batch, samples: int = samples) -> dict[str, float]:
            return validation_metrics(batch, samples)

        def verl(columns: tuple[Any, ...] = columns) -> dict[str, float]:
            return process_validation_metrics(*columns)[_SOURCE]["reward"]

        def check(a: dict[str, float], b: dict[str, float], samples: int = samples) -> None:
            for name in (f"mean@{samples}", f"std@{samples}"):
                assert abs(a[f"val/{_SOURCE}/{name}"] - b[name]) < 1e-6, name
            drawn = [name for name in b if name.endswith("/mean")]
            assert len(drawn) >= 3
            for name in drawn:
                # verl seeds before each prompt, so the errors of its draws do not average out over prompts.
                assert abs(a[f"val/{_SOURCE}/{name.removesuffix('/mean')}"] - b[name]) < 0.02, name

        whole = (prompts, samples) == (200, 16)
        # verl takes three seconds a round for 800 samples, and seven for 3,200.
        yield Case(
            f"{prompts} prompts × {samples} samples",
            VERL,
            ours,
            verl,
            check,
            29.0 if whole else None,
            prompts * samples,
            rounds=2 if whole else 7 if prompts < 200 else 5,
        )


def _validation(prompts: int, samples: int) -> tuple[DataProto, tuple[list[str], list[str], dict[str, list[Any]]]]:
    """Return one validation as hrl's batch and as verl's columns. Of five answers to a prompt one is correct."""
    random = np.random.default_rng(prompts)
    rows = prompts * samples
    answers = random.integers(0, 5, rows)
    scores = (answers == 0).astype(np.float32)
    uids = [f"prompt-{row // samples}" for row in range(rows)]
    sources, preds = [_SOURCE] * rows, [str(answer) for answer in answers]
    batch = DataProto.from_dict(
        tensors={"token_level_scores": torch.from_numpy(scores)[:, None]},
        non_tensors={
            "data_source": np.array(sources, dtype=object),
            "uid": np.array(uids, dtype=object),
            "reward_parts": np.array([{"pred": pred} for pred in preds], dtype=object),
        },
    )
    return batch, (sources, uids, {"reward": scores.tolist(), "pred": preds})
