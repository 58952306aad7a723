"""From which weights a batch that was kept is computed again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hrl.cluster.checkpoints import CheckpointStore, state_text
from hrl.trained.replay import ReplayError, _checkpoint_before


def dump(path: Path, step: int) -> Any:
    return SimpleNamespace(path=path, record={"step": step})


def test_the_newest_checkpoint_before_the_step_is_that_of_the_same_history(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        store.begin(step)
        store.commit(step, state_text({"step": step}))
    assert _checkpoint_before(dump(tmp_path / "nonfinite" / "step_2_rank_0.actor-0.json", 2)) == store.path(1)
    superseded = store.next_superseded() / "nonfinite" / "step_3_rank_0.actor-0.json"
    with pytest.raises(ReplayError, match="is in no folder of a run: name weights with --checkpoint"):
        _checkpoint_before(dump(superseded, 3))
