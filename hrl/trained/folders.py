"""Which model is meant by a name on a command line: a run, one of its checkpoints, a model's folder, or a hub id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hrl.cluster.checkpoints import STATE_FILE, CheckpointStore, require_undamaged
from hrl.errors import RefusedError
from hrl.files import expanded
from hrl.models.adapter import CONFIG_FILE
from hrl.models.source import BUNDLED_PREFIX, ModelSourceError, is_path
from hrl.nearest import way_to
from hrl.report.run_folder import CONFIG, MODEL, RunFolder, read_config, read_object

HF = "hf"
"""The folder of a checkpoint that transformers and vLLM load."""


#: Folders of a checkpoint with the shards of a model that can be put together.
_ROLES = ("actor", "rm")


class NoModelError(RefusedError, ValueError):
    """A name on the command line names no model."""


@dataclass(frozen=True)
class Trained:
    """A model that is there, and where it comes from.

    Attributes:
        name: What a run takes as the path of a model; for a checkpoint without such a folder, the checkpoint.
        label: Short name for a folder of its own.
        checkpoint: The checkpoint that it belongs to.
        run: The folder of the run that made it.
    """

    name: str
    label: str
    checkpoint: Path | None = None
    run: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_reward_model(self) -> bool:
        """Whether it scores, as the folder's own configuration says."""
        file = Path(self.name) / "config.json"
        named = read_object(file).get("architectures") or ()
        return any("ForSequenceClassification" in architecture for architecture in named)

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds an adapter, which is nothing without its model."""
        return (Path(self.name) / CONFIG_FILE).is_file()

    @property
    def is_of_hub(self) -> bool:
        """Whether no folder here has its name, and no package brings it."""
        return self.run is None and not self.name.startswith(BUNDLED_PREFIX) and not Path(self.name).exists()

    @property
    def is_sharded(self) -> bool:
        """Whether the checkpoint has only the shards that training continues from, and no folder `hf`."""
        return self.checkpoint is not None and self.name == str(self.checkpoint)


def find_trained(name: str) -> Trained:
    """Return the model that is meant.

    Args:
        name: A run folder (its best checkpoint by validation, else the newest, else its final model), a checkpoint such
            as `checkpoints/step_20`, a model's folder, or anything else that `model.path` takes.

    Raises:
        NoModelError: The folder is not there, or holds no model; says what there is.
        CheckpointError: The model is of a checkpoint, and is not what was written; names the file.
    """
    trained = _find(name)
    if trained.checkpoint is not None:
        parts = [part for part in (_ROLES if trained.is_sharded else (HF,)) if (trained.checkpoint / part).is_dir()]
        for part in parts:
            require_undamaged(trained.checkpoint, part)
    return trained


def _find(name: str) -> Trained:
    folder = expanded(name)
    if not folder.exists() and is_path(name):
        raise NoModelError(f"there is no folder {name}. {way_to(folder, Path.is_dir)}")
    if not folder.is_dir():
        return Trained(name, name.rpartition("/")[2].rpartition(":")[2] or "model")
    folder = folder.resolve()
    if _is_model(folder):
        checkpoint = folder.parent if (folder.parent / STATE_FILE).is_file() else None
        return _of(folder, checkpoint)
    if (folder / STATE_FILE).is_file():
        return _of_checkpoint(folder)
    store = CheckpointStore(RunFolder.checkpoints_in(folder))
    steps = store.steps()
    if steps:
        best = store.best()
        return _of_checkpoint(store.path(steps[-1] if best is None else best))
    if _is_model(folder / MODEL):
        return _of(folder / MODEL, None)
    if (folder / CONFIG).is_file():
        raise NoModelError(
            f"{folder} is the folder of a run that did not end and has saved no checkpoint. Set trainer.save_freq for "
            "the next run, or name a model"
        )
    raise NoModelError(
        f"{folder} holds no model: neither config.json, nor a checkpoint (state.json), nor a run (checkpoints/)"
    )


def _of_checkpoint(checkpoint: Path) -> Trained:
    model = checkpoint / HF
    return _of(model if _is_model(model) else checkpoint, checkpoint)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / CONFIG_FILE).is_file()


def _of(model: Path, checkpoint: Path | None) -> Trained:
    inner = checkpoint or model
    run = next((parent for parent in (inner.parent, inner.parent.parent) if (parent / CONFIG).is_file()), None)
    parts = [run.name if run is not None else inner.parent.name, inner.name]
    config = {} if run is None else read_config(run)
    return Trained(str(model), "-".join(parts), checkpoint, run, config)


def require_loadable(trained: Trained) -> str:
    """Return the model's path for a run that samples from it.

    Raises:
        ModelSourceError: The checkpoint has only shards.
        NoModelError: It is a reward model.
    """
    if trained.is_reward_model:
        raise NoModelError(
            f"{trained.name} is a reward model: it scores answers and gives none. A run takes it as "
            "reward.reward_model.model_path"
        )
    if trained.is_adapter:
        raise ModelSourceError(
            f"{trained.name} holds an adapter without its model: merge the two with `hrl export {trained.name} OUT`, "
            "and name OUT"
        )
    if trained.is_sharded:
        raise ModelSourceError(
            f"{trained.checkpoint} has no folder hf, which transformers and vLLM load: it was saved without "
            f"hf_model in checkpoint.save_contents. Write one with `hrl export {trained.checkpoint} OUT`, and name OUT"
        )
    return trained.name
