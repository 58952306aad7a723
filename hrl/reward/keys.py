"""What names a sample within its batch, the same for whoever announces it, samples it and collects its reward."""

from __future__ import annotations

from hrl.protocol import DataProto


def sample_keys(rows: DataProto) -> list[tuple[str, int]]:
    """Group and number in the group of every row, from the columns ``uid`` and ``sample_index``."""
    columns = rows.non_tensor_batch
    return [(str(uid), int(number)) for uid, number in zip(columns["uid"], columns["sample_index"], strict=True)]
