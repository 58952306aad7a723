"""Weights as a folder that any engine loads, for servers that take new weights by the name of a folder."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_64

from hrl.workers.weight_sync.wire import WeightSyncError, tensor_checksums

_NAME = "hrl-model-"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


class SavedFolderWriter:
    """Writes each sync into a folder of its own, beside which that of the sync before stays until it is dropped.

    Args:
        model: Folder of the model, whose configuration and tokenizer are copied.
        root: Where the folders are made. What killed processes have left there is removed.

    Attributes:
        folder: Of the last sync that was finished; None before the first one.
        digest: Of its weights, equal for equal bytes under equal names.
    """

    def __init__(self, model: Path, root: Path) -> None:
        self._model = model
        self._root = root.resolve()
        self._own: Path | None = None
        self._lock: int | None = None
        self._number = 0
        self._next: Path | None = None
        self._files: dict[str, str] = {}
        self._sums = xxh3_64()
        self.folder: Path | None = None
        self.digest = ""

    def begin(self) -> None:
        """Make the next folder.

        Raises:
            WeightSyncError: The place can't be written.
        """
        try:
            if self._own is None:
                _remove_what_was_left(self._root)
                self._own = self._root / f"{_NAME}{secrets.token_hex(8)}"
                self._own.mkdir()
                self._lock = os.open(self._own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with suppress(OSError):  # of a file system without locks, where nobody removes what was left
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._number += 1
            self._next = self._own / str(self._number)
            self._next.mkdir()
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
            WeightSyncError: Something is not sent, so that the folder would not be whole; or the disk refuses.
        """
        folder = self._open()
        if kept:
            raise WeightSyncError(
                f"{len(kept)} tensors that are not trained, such as {next(iter(kept))!r}, are not sent, and a server "
                "that reads a folder needs all: train them too, or use rollout.name=vllm"
            )
        try:
            index = {"metadata": {}, "weight_map": self._files}
            (folder / _INDEX).write_text(json.dumps(index))
            for file in folder.iterdir():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        except OSError as error:
            raise self._refused(error) from error
        self.folder, self._next, self.digest = folder, None, self._sums.hexdigest()

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

    def drop_earlier(self) -> None:
        """Remove the folders of syncs before the last one."""
        if self._own is None:
            return
        for folder in self._own.iterdir():
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all that was written. Harmless when repeated."""
        own, self._own, self.folder = self._own, None, None
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self) -> Path:
        if self._next is None:
            raise WeightSyncError("no folder of weights is being written")
        return self._next

    def _refused(self, error: Exception) -> WeightSyncError:
        return WeightSyncError(
            f"rollout.server.weights_folder={self._root} can't take the weights: {error}; make room there, or name "
            "another folder that this machine can write and the servers can read"
        )


def _remove_what_was_left(root: Path) -> None:
    """Remove folders of processes that no longer live: whoever lives holds a lock on its own."""
    for folder in root.glob(f"{_NAME}*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
