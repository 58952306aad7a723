"""A run that begins with the model that an earlier run left in the same folder finds it where it moved to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hrl.config import compose_cli
from hrl.preflight.preflight import Preflight
from hrl.report.run_folder import RunFolder
from hrl.trainer.earlier_models import with_earlier_models


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run from Python that has ended."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    return tmp_path / "run"


def started(run: Path, folders: dict[str, Path], *overrides: str) -> tuple[Any, dict[str, Path]]:
    config = compose_cli([f"trainer.default_local_dir={run}", "data.train_files=rows.jsonl", *overrides])
    ready: Any = Preflight(*[SimpleNamespace()] * 8)
    object.__setattr__(ready, "folders", folders)
    folder = RunFolder(run)
    folder.close()
    moved, found = with_earlier_models(config, ready, folder)
    return moved, dict(found.folders)


@pytest.mark.parametrize("written", ["{run}/model", "{run}/../run/model", "~/run/model", "run/model"])
def test_every_path_into_the_earlier_model_is_followed(
    run: Path, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    monkeypatch.chdir(run.parent)
    path = written.format(run=run)
    config, folders = started(
        run,
        {"actor": run / "model", "critic": run.parent / "other"},
        f"actor_rollout_ref.model.path={path}",
        f"actor_rollout_ref.model.tokenizer_path={path}",
        "critic.model.path=other/model",
    )
    now = run / "earlier" / "1" / "model"
    assert (now / "config.json").is_file() and not (run / "model").exists()
    assert config.actor_rollout_ref.model.path == config.actor_rollout_ref.model.tokenizer_path == str(now)
    assert config.critic.model.path == "other/model"
    assert folders == {"actor": now, "critic": run.parent / "other"}


def test_a_run_that_begins_with_another_model_is_left_as_it_is(run: Path) -> None:
    config, folders = started(run, {"actor": run / "model_2"}, f"actor_rollout_ref.model.path={run}/model_2")
    assert config.actor_rollout_ref.model.path == f"{run}/model_2" and folders == {"actor": run / "model_2"}
