"""Tensors as they are now, read by another thread while training goes on to change them.

Nothing is copied at first: a reader takes the bytes from where they lie, a chunk at a time. Before training changes the
tensors it calls `detach`, which copies what has not been read yet. So a save costs neither time nor memory if it is
written before the next optimizer step, and never more than one copy of what it writes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

#: What is read at once; `detach` waits no longer than that takes. Fits into a core's cache; a GPU's bus needs more.
CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
#: What one of the threads of `detach` copies at once.
_PIECE_BYTES = 4 << 20


class Snapshot:
    """The present contents of tensors.

    Args:
        tensors: By name, on one device; only those that are not contiguous are copied.
        kept: Host memory of earlier snapshots by name, which `detach` uses again and adds to: touching fresh pages
            costs several times as much as the copy.
    """

    def __init__(self, tensors: Mapping[str, Tensor], kept: dict[str, Tensor]) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._sources = {
            name: tensor.detach().contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()
        }
        on_device = [source.device for source in self._sources.values() if source.is_cuda]
        self._device = on_device[0] if on_device else torch.device("cpu")
        # A read waits for what was queued on the device before, and so for the last optimizer step.
        self._ready = torch.cuda.current_stream(self._device).record_event() if on_device else None

    @torch.no_grad()
    def detach(self) -> None:
        """Make the tensors free to change: copy to host memory what has not been read yet."""
        with self._lock:
            unread = {name: source for name, source in self._sources.items() if source is not self._kept.get(name)}
            for name, source in unread.items():
                if name not in self._kept or self._kept[name].numel() != source.numel():
                    self._kept[name] = torch.empty(source.numel(), dtype=torch.uint8)
            _copy_all([(source, self._kept[name]) for name, source in unread.items()])
            self._sources |= {name: self._kept[name] for name in unread}

    def read(self) -> Iterator[tuple[str, memoryview]]:
        """Yield the bytes of every tensor, in order, in chunks `(name, bytes)` that are valid until the next one."""
        with self._on_device():
            size = CHUNK_BYTES[self._device.type]
            chunk = torch.empty(size, dtype=torch.uint8, pin_memory=self._ready is not None)
            for name in list(self._sources):
                start, end = 0, self._sources[name].numel()
                while start < end:
                    with self._lock:
                        part = self._sources[name][start : start + size]
                        _copy(part, chunk[: part.numel()])
                    start += part.numel()
                    yield name, memoryview(chunk[: part.numel()].numpy())
                with self._lock:
                    del self._sources[name]  # there is nothing left of it to copy

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context with a stream of its own, which begins where the snapshot was taken."""
        if self._ready is None:
            return nullcontext()
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._ready)
        return torch.cuda.stream(stream)  # and its device, which every thread has its own of


def _copy(source: Tensor, to: Tensor) -> None:
    """Copy bytes to host memory."""
    if source.is_cuda:
        to.copy_(source)
    else:
        # Not torch's copy: its threads would compete with those of training, or wait for the one that writes.
        np.copyto(to.numpy(), source.numpy())


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the first of each pair, bytes, to the second, in host memory."""
    pieces = (piece for pair in pairs for piece in zip(*(whole.split(_PIECE_BYTES) for whole in pair), strict=True))
    taking = threading.Lock()

    def take_and_copy() -> None:
        while True:
            with taking:
                piece = next(pieces, None)
            if piece is None:
                return
            _copy(*piece)

    # One core does not fill the way to memory. Each thread takes the next piece, so none waits for one that is held up.
    on_device = any(source.is_cuda for source, _ in pairs)
    num_threads = 1 if on_device else torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as threads:
        for copied in [threads.submit(take_and_copy) for _ in range(num_threads)]:
            copied.result()
