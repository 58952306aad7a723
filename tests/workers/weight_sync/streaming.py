"""Two buffers in this process, as GPU transports have them: what was loaded is overwritten."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hrl.workers.weight_sync.receiver import BucketReader, ModelWriter, WeightReceiver
from hrl.workers.weight_sync.sender import SenderTransport
from hrl.workers.weight_sync.wire import Manifest, ReceiverReport

POISON = 0xFF
"""Of every byte: a NaN in every floating point dtype."""


class StreamingSender(SenderTransport):
    """The sender's end.

    Args:
        manifest: what is sent.
        poison: a buffer is spoilt as soon as its receiver says that it has loaded it, see ``StreamingTarget``.
    """

    depth = 2
    senders: ClassVar[dict[int, StreamingSender]] = {}

    def __init__(self, manifest: Manifest, *, poison: bool = False) -> None:
        self.manifest = manifest
        self.poison = poison
        self.buffers: list[Tensor] = []
        self.largest_bytes = 0
        self.senders[id(self)] = self

    def handle(self) -> dict[str, Any]:
        self.buffers = [torch.zeros(self.manifest.largest_bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        self.largest_bytes = max(self.largest_bytes, sum(buffer.numel() for buffer in self.buffers))
        return {"kind": "streaming", "id": id(self)}

    def buffer(self, index: int) -> Tensor:
        return self.buffers[index % 2][: self.manifest.buckets[index].nbytes]

    def publish(self, index: int) -> None:
        pass

    def loaded(self, index: int) -> None:
        """The receiver has said that it loaded a bucket."""
        if self.poison:
            self.buffer(index).fill_(POISON)

    def release(self) -> None:
        self.buffers = []


class StreamingReader(BucketReader):
    """The receiver's end."""

    staged = stays = False

    def __init__(self, handle: dict[str, Any]) -> None:
        self._sender = StreamingSender.senders[handle["id"]]

    def bucket(self, index: int) -> Tensor:
        return self._sender.buffer(index)


def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has receivers read from a ``StreamingSender``."""
    monkeypatch.setattr(
        "hrl.workers.weight_sync.receiver.attach", lambda manifest, handle, rank: StreamingReader(handle)
    )


def done(function: Any, *args: Any) -> Future[Any]:
    """What the function returns or raises."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args))
    except RuntimeError as error:
        future.set_exception(error)
    return future


class StreamingTarget:
    """A receiver in this thread."""

    def __init__(self, writer: ModelWriter, sender: StreamingSender) -> None:
        self.receiver = WeightReceiver(writer, "test")
        self._sender = sender

    def weights_begin(self, manifest: Manifest, handle: dict[str, Any], version: int) -> Future[None]:
        return done(self.receiver.begin, manifest, handle, version)

    def weights_load(self, index: int) -> Future[None]:
        loaded = done(self.receiver.load, index)
        if loaded.exception() is None:
            self._sender.loaded(index)
        return loaded

    def weights_commit(self) -> Future[list[ReceiverReport]]:
        return done(lambda: [self.receiver.commit()])

    def weights_abort(self, reason: str) -> Future[None]:
        return done(self.receiver.abort)
