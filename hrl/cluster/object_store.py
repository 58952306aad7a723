"""Whether the batches of a run fit into Ray's object store, before the run and while it runs."""

from __future__ import annotations

from hrl.cluster.machine import bytes_of_batches
from hrl.single_controller.object_store import StoreUse, store_use

_ADVICE = (
    "give it more with a larger /dev/shm or trainer.ray_kwargs.object_store_memory, or lower data.train_batch_size, "
    "rollout.n or the lengths"
)


def shortage(batch_tokens: int, use: StoreUse | None) -> str | None:
    """Return a warning if the largest batches of a run may not fit into the object store; else None.

    Args:
        batch_tokens: Tokens of the largest batch, with all rows at their full length.
        use: Of the driver's node; None if it is not known.
    """
    wanted = bytes_of_batches(batch_tokens)
    if use is None or wanted <= use.capacity_bytes:
        return None
    return (
        f"warning: batches of up to {batch_tokens:,} tokens may take {_gib(wanted)} of shared memory, and Ray's object "
        f"store has {_gib(use.capacity_bytes)}: what does not fit is written to disk, which is slow. To hold them, "
        f"{_ADVICE}"
    )


class StoreWatch:
    """Watches the object store from step to step."""

    def __init__(self) -> None:
        before = store_use()
        self._spilled_bytes = 0 if before is None else before.spilled_bytes
        self._is_told = False

    def look(self, step: int) -> tuple[dict[str, float], str | None]:
        """Return the metrics of a step that has just ended, and what to say at the first one that wrote to disk.

        Args:
            step: Its number.
        """
        use = store_use()
        if use is None:
            return {}, None
        spilled = use.spilled_bytes - self._spilled_bytes
        self._spilled_bytes = use.spilled_bytes
        metrics = {"perf/object_store_gib": use.used_bytes / 2**30, "perf/object_store_spilled_gib": spilled / 2**30}
        if spilled <= 0 or self._is_told:
            return metrics, None
        self._is_told = True
        return metrics, (
            f"step {step}: the object store of the driver's node, which holds {_gib(use.capacity_bytes)} for all runs "
            f"of this Ray, wrote {_gib(spilled)} to disk, which is slow: {_ADVICE}. "
            "perf/object_store_spilled_gib has the steps to come"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
