"""The trainer's end of a weight sync to engines on other pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hrl.workers.weight_sync.base import SyncReport, WeightSync
from hrl.workers.weight_sync.broadcast import BroadcastSender
from hrl.workers.weight_sync.manifest import Manifest


class WeightBroadcast:
    """Trainer rank 0 in the group of all engine processes.

    Args:
        specs: (name, dtype, shape) of every full parameter, in the order in which they will come.
        num_receivers: processes of all engines together.
        device: of the buffers; decides between gloo and nccl.
        bucket_bytes: size of the two buffers.
        timeout_s: of joining and of every sync.
    """

    def __init__(
        self,
        specs: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        num_receivers: int,
        *,
        device: torch.device,
        bucket_bytes: int,
        timeout_s: float,
        address: str,
    ) -> None:
        self.manifest = Manifest.build(specs, bucket_bytes)
        sender = BroadcastSender(self.manifest, num_receivers, device=device, timeout_s=timeout_s, address=address)
        self.handle: dict[str, Any] = sender.handle()
        self._sync = WeightSync(self.manifest, sender, timeout_s=timeout_s)

    def push(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """One sync. The group forms at the first one, when every engine has joined.

        Raises:
            WeightSyncError: see ``WeightSync.push``.
        """
        return self._sync.push(version, weights)

    def close(self) -> None:
        """Gives the buffers back."""
        self._sync.close()
