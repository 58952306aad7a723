"""A run that begins with the model that an earlier run left in the same folder finds it where it moved to."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hrl.cluster.checkpoints import CheckpointStore, state_text
from hrl.config import compose_cli
from hrl.config.run_kind import PPO
from hrl.preflight.check import check
from hrl.preflight.earlier_models import with_earlier_models, with_models_of_before
from hrl.preflight.folder_plan import check_writable, has_checkpoints
from hrl.preflight.preflight import Preflight
from hrl.report.run_folder import DamagedFileError, RunFolder, RunFolderError
from hrl.trainer import run as module


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
        f"actor_rollout_ref.model.lora_adapter_path={path}",
        "critic.model.path=other/model",
    )
    now = run / "earlier" / "1" / "model"
    assert (now / "config.json").is_file() and not (run / "model").exists()
    model = config.actor_rollout_ref.model
    assert model.path == model.tokenizer_path == model.lora_adapter_path == str(now)
    assert config.critic.model.path == "other/model"
    assert folders == {"actor": now, "critic": run.parent / "other"}


def test_a_folder_of_somebody_else_is_left_to_the_look_at_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, theirs = os.stat, tmp_path / "theirs"

    def refuses(path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        if theirs in Path(os.fsdecode(path)).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **keywords)

    theirs.mkdir()
    monkeypatch.setattr("os.stat", refuses)
    config = compose_cli([f"trainer.default_local_dir={theirs}/run", "data.train_files=rows.jsonl"])
    assert with_models_of_before(config) is config and not has_checkpoints(config.trainer)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open(dir / "run" / "x", "w"))  # noqa: SIM115
    with pytest.raises(RunFolderError, match="can't be written"):
        check_writable(theirs / "run")


def test_a_run_that_begins_with_another_model_is_left_as_it_is(run: Path) -> None:
    config, folders = started(run, {"actor": run / "model_2"}, f"actor_rollout_ref.model.path={run}/model_2")
    assert config.actor_rollout_ref.model.path == f"{run}/model_2" and folders == {"actor": run / "model_2"}


@pytest.fixture
def second(run: Path) -> Path:
    """The folder of a second run, which began with the first one's model."""
    config, _ = started(run, {}, f"actor_rollout_ref.model.path={run}/model")
    folder = RunFolder(run, resume=True)
    folder.write_config(config.model_dump(mode="json"))
    folder.close()
    return run


def same_call(run: Path, *overrides: str) -> Any:
    return compose_cli(
        [
            f"trainer.default_local_dir={run}",
            "data.train_files=rows.jsonl",
            f"actor_rollout_ref.model.path={run}/model",
            *overrides,
        ]
    )


def save(run: Path) -> None:
    store = CheckpointStore(RunFolder.checkpoints_in(run))
    store.begin(1)
    store.commit(1, state_text({"step": 1, "data": {}}))


@pytest.mark.parametrize("has_saved", [True, False], ids=["continues", "begins again"])
def test_an_interrupted_run_that_is_called_again_finds_the_model_it_began_with(second: Path, has_saved: bool) -> None:
    if has_saved:
        save(second)
    config = with_models_of_before(same_call(second, "critic.model.path=other/model"))
    assert config.actor_rollout_ref.model.path == str(second / "earlier" / "1" / "model")
    assert config.critic.model.path == "other/model"


def test_a_finished_run_that_is_continued_does_not_take_its_own_model_for_the_one_it_began_with(second: Path) -> None:
    (second / "model").mkdir()
    save(second)
    config = with_models_of_before(same_call(second))
    assert config.actor_rollout_ref.model.path == str(second / "earlier" / "1" / "model")
    again = with_models_of_before(same_call(second, "trainer.resume_mode=disable"))
    assert again.actor_rollout_ref.model.path == f"{second}/model"


def test_a_third_run_begins_with_the_model_of_the_second(second: Path) -> None:
    (second / "model").mkdir()
    assert with_models_of_before(same_call(second)).actor_rollout_ref.model.path == f"{second}/model"


def test_a_run_looks_for_the_model_it_began_with_before_it_looks_at_its_files(
    second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []

    def look(config: Any, *_: Any) -> None:
        looked_at.append(config.actor_rollout_ref.model.path)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "preflight", look)
    with pytest.raises(KeyboardInterrupt), module.running("ppo", same_call(second)):
        pass
    assert looked_at == [str(second / "earlier" / "1" / "model")]


def test_a_check_names_the_model_that_the_same_call_begins_with(second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def look(config: Any, **_: Any) -> None:
        looked_at.append(config.actor_rollout_ref.model.path)
        raise KeyboardInterrupt

    monkeypatch.setattr("hrl.preflight.preflight.inspect_run", look)
    with pytest.raises(KeyboardInterrupt):
        check(
            PPO,
            [
                f"trainer.default_local_dir={second}",
                "data.train_files=rows.jsonl",
                f"actor_rollout_ref.model.path={second}/model",
            ],
        )
    assert looked_at == [str(second / "earlier" / "1" / "model")]


def test_a_damaged_configuration_hinders_no_run_that_needs_nothing_of_it(second: Path) -> None:
    (second / "config.yaml").write_text("no keys")
    config = compose_cli(
        [
            f"trainer.default_local_dir={second}",
            "data.train_files=rows.jsonl",
            "actor_rollout_ref.model.path=other/model",
        ]
    )
    assert with_models_of_before(config) == config
    with pytest.raises(DamagedFileError, match="it has no keys"):
        with_models_of_before(same_call(second))
