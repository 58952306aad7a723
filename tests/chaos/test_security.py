from __future__ import annotations

import pickle
from pathlib import Path

import torch

from tests.chaos.security import CANARY, bomb, torch_bomb


def test_the_bombs_go_off_where_they_are_unpickled(tmp_path: Path) -> None:
    for name, light in (
        ("pickle", lambda folder: pickle.loads(bomb(folder))),  # noqa: S301  (that is the point)
        ("torch", lambda folder: torch.load(torch_bomb(folder, folder / "x.pt"), weights_only=False)),
    ):
        (folder := tmp_path / name).mkdir()
        light(folder)
        assert (folder / CANARY).exists(), name
