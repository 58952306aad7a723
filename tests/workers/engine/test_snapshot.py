"""A snapshot keeps what was there when it was taken, whatever happens to the tensors, and copies only what it must."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hrl.workers.engine.snapshot import CHUNK_BYTES, Snapshot

CHUNK = CHUNK_BYTES["cpu"]


def three() -> dict[str, Tensor]:
    """One of two and a half chunks, one of two elements and one of another dtype, transposed."""
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(CHUNK * 5 // 8, generator=generator),
        "small": torch.tensor([1.0, 2.0]),
        "odd": torch.randn(3, 5, generator=generator).bfloat16().t(),
    }


def as_bytes(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("chunks_before", [0, 1, 2, 3, 4, 5])
def test_what_changes_at_any_moment_is_read_as_it_was(chunks_before: int) -> None:
    tensors, kept = three(), dict[str, Tensor]()
    before, found = as_bytes(tensors), dict.fromkeys(tensors, b"")
    snapshot = Snapshot(tensors, kept)
    for number, (name, chunk) in enumerate(snapshot.read()):
        found[name] += chunk.tobytes()
        if number + 1 == chunks_before:
            snapshot.detach()
            for tensor in tensors.values():
                tensor.fill_(7.0)
    if chunks_before == 0:
        assert kept == {}, "nothing changed, so nothing was copied"
    assert found == before


def test_what_is_written_already_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, kept = three(), dict[str, Tensor]()
    snapshot = Snapshot(tensors, kept)
    for name, _ in snapshot.read():
        if name == "odd":
            snapshot.detach()
    assert set(kept) == {"odd"}


def test_the_memory_of_copies_is_used_again() -> None:
    tensors, kept = three(), dict[str, Tensor]()
    Snapshot(tensors, kept).detach()
    places = {name: tensor.data_ptr() for name, tensor in kept.items()}
    for value in (1.0, 2.0):
        tensors["large"].fill_(value)
        snapshot = Snapshot(tensors, kept)
        snapshot.detach()
        tensors["large"].fill_(0.0)
        assert {name: tensor.data_ptr() for name, tensor in kept.items()} == places
        assert next(iter(snapshot.read()))[1][:4] == torch.tensor([value]).numpy().tobytes()


def test_a_second_change_copies_nothing() -> None:
    tensors = three()
    before = as_bytes(tensors)
    snapshot = Snapshot(tensors, {})
    for _ in range(2):
        snapshot.detach()
        tensors["small"].add_(1.0)
    assert {name: bytes(chunk) for name, chunk in snapshot.read() if name == "small"} == {"small": before["small"]}
