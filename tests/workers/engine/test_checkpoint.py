"""Generators go on after a resume as if there had been none, and a state that no rank has written is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hrl.workers.engine.background import PartError
from hrl.workers.engine.checkpoint import FORMAT, STATE_FILE, _rng_state, _SavedState, _set_rng_state
from hrl.workers.runtime import seed_everything


def draws() -> tuple[list[float], list[float], list[float], list[float]]:
    """Of every global generator; the normal ones are drawn in pairs, of which the second is kept for later."""
    return (
        [random.random(), random.gauss(0.0, 1.0)],
        np.random.random(2).tolist(),
        [np.random.standard_normal()],
        torch.rand(2).tolist(),
    )


def test_every_global_generator_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    seed_everything(7)
    draws()
    save_file(_rng_state(), tmp_path / "rng.safetensors")
    expected = [draws() for _ in range(2)]
    seed_everything(8)
    assert draws() != expected[0]
    _set_rng_state(load_file(tmp_path / "rng.safetensors"))
    assert [draws() for _ in range(2)] == expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"format": 5}, "has format 5, this version of hrl reads 4"),
        ({"format": "4"}, "has format '4', this version of hrl reads 4"),
        ({"contents": "model"}, "is damaged: 'contents' is not what hrl writes there"),
        ({"tensors": {"model.w": [-1]}}, r"is damaged: 'tensors\.model\.w\.0' is not what hrl writes there"),
        ({"world_size": 0}, "is damaged: 'world_size' is not what hrl writes there"),
    ],
)
def test_a_state_that_no_rank_has_written_is_named(tmp_path: Path, change: dict[str, object], told: str | None) -> None:
    written = {"format": FORMAT, "contents": ["model"], "world_size": 2, "schedule_steps": 1, "moment_steps": 3}
    (tmp_path / STATE_FILE).write_text(json.dumps(written | {"tensors": {"model.w": [2, 3]}} | change))
    if told is None:
        assert _SavedState.read(tmp_path).tensors == {"model.w": [2, 3]}
    else:
        with pytest.raises(PartError, match=told):
            _SavedState.read(tmp_path)
