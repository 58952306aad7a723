"""Generators go on after a resume as if there had been none."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hrl.workers.engine.checkpoint import _rng_state, _set_rng_state
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
