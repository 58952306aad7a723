"""Weights as a folder that any engine loads, for servers that take new weights by the name of a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_64

from hrl.workers.weight_sync.own_place import OwnPlace
from hrl.workers.weight_sync.wire import WeightSyncError, tensor_checksums

_NAME, _KEPT = "hrl-model", "kept"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


class SavedFolderWriter:
    """Writes each sync into a folder of its own, whose weights are there until the servers have read them.

    Args:
        model: Folder of the model, whose configuration, tokenizer and weights that are not trained are copied.
        root: Where the folders are made. What killed processes have left there is removed.

    Attributes:
        folder: Of the last sync that was finished; None before the first one, and when it was dropped.
        digest: Of its weights, equal for equal bytes under equal names.
    """

    def __init__(self, model: Path, root: Path) -> None:
        self._model = model
        self._root = root.resolve()
        self._own: OwnPlace | None = None
        self._number = 0
        self._next: Path | None = None
        self._files: dict[str, str] = {}
        self._kept: dict[str, str] = {}  # of those that are not trained, in a folder of their own
        self._sums = xxh3_64()
        self.folder: Path | None = None
        self.digest = ""

    def begin(self) -> None:
        """Make the next folder, and drop what a sync that failed has left.

        Raises:
            WeightSyncError: The place can't be written.
        """
        try:
            if self._own is None:
                self._own = OwnPlace(self._root, _NAME, is_folder=True)
            self.drop()
            self._number += 1
            self._next = self._own.path / str(self._number)
            self._next.mkdir()
            self._own.touch()
            for file in self._model.iterdir():
                if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
                    shutil.copyfile(file, self._next / file.name)
        except OSError as error:
            raise self._refused(error) from error
        self._files, self._sums = {}, xxh3_64()

    def write(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Write a file of the folder.

        Raises:
            WeightSyncError: The disk refuses.
        """
        folder = self._open()
        file = folder / f"model-{len(set(self._files.values())) + 1:05}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in weights}
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise self._refused(error) from error
        self._files |= dict.fromkeys(tensors, file.name)
        for (name, tensor), checksum in zip(
            tensors.items(), tensor_checksums(list(tensors.values()), next(iter(tensors.values())).device), strict=True
        ):
            self._sums.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {checksum}\n".encode())

    def finish(self, kept: Collection[str] = ()) -> None:
        """Write the list of the files, and have all of it on the disk.

        Raises:
            WeightSyncError: The model's folder lacks something that is not sent, or the disk refuses.
        """
        folder = self._open()
        try:
            self._files |= self._bring_kept(folder, frozenset(kept))
            index = {"metadata": {}, "weight_map": self._files}
            (folder / _INDEX).write_text(json.dumps(index))
            for file in folder.iterdir():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        except (OSError, SafetensorError) as error:
            raise self._refused(error) from error
        self.folder, self._next, self.digest = folder, None, self._sums.hexdigest()

    def _bring_kept(self, folder: Path, kept: frozenset[str]) -> dict[str, str]:
        """Put what is not sent into a folder, and return the file of each name."""
        if self._kept.keys() != kept:
            self._kept = {}  # of a sync that fails here nothing is taken for whole
            self._kept = self._save_kept(kept)
        for file in set(self._kept.values()):
            try:
                os.link(self._kept_place / file, folder / file)
            except OSError:  # of a file system without links
                shutil.copyfile(self._kept_place / file, folder / file)
        return self._kept

    def _save_kept(self, kept: frozenset[str]) -> dict[str, str]:
        """Take what is not sent out of the model's folder, once for all syncs."""
        self._kept_place.mkdir(exist_ok=True)
        files: dict[str, str] = {}
        for source in sorted(self._model.glob("*.safetensors")) if kept else []:
            with safe_open(source, "pt") as opened:
                names = sorted(kept.intersection(opened.keys()) - files.keys())
                if names:
                    file = f"kept-{source.name}"
                    tensors = {name: opened.get_tensor(name) for name in names}
                    save_file(tensors, self._kept_place / file, {"format": "pt"})
                    files |= dict.fromkeys(names, file)
        missing = sorted(kept - files.keys())
        if missing:
            raise WeightSyncError(
                f"{len(missing)} tensors that are not trained, such as {missing[0]!r}, are not sent, and {self._model} "
                "does not have them in *.safetensors under that name: a server that reads a folder needs all. Train "
                "them too, or use rollout.name=vllm"
            )
        return files

    def cancel(self) -> None:
        """Remove the folder that was not finished."""
        unfinished, self._next = self._next, None
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)

    def read_back(self, name: str) -> Tensor | None:
        """Return a tensor as the folder has it."""
        if self.folder is None or name not in self._files:
            return None
        with safe_open(self.folder / self._files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def drop(self) -> None:
        """Remove what was sent, which nobody reads again. What is not trained stays for the next sync."""
        self.folder = None
        if self._own is None:
            return
        for folder in self._own.path.iterdir():
            if folder != self._kept_place:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all that was written. Harmless when repeated."""
        own, self._own, self.folder = self._own, None, None
        if own is not None:
            own.remove()

    @property
    def _kept_place(self) -> Path:
        if self._own is None:
            raise WeightSyncError("no folder of weights is being written")
        return self._own.path / _KEPT

    def _open(self) -> Path:
        if self._next is None:
            raise WeightSyncError("no folder of weights is being written")
        return self._next

    def _refused(self, error: Exception) -> WeightSyncError:
        return WeightSyncError(
            f"rollout.server.weights_folder={self._root} can't take the weights: {error}; make room there, or name "
            "another folder that this machine can write and the servers can read"
        )
