"""Which GPU Ray gave to a process."""

from __future__ import annotations

import ray


def assigned_gpu() -> str | None:
    """Return what Ray calls the GPU of this process, as `CUDA_VISIBLE_DEVICES` would.

    None outside Ray or without a GPU.

    It is right also where `RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES` keeps Ray from setting that variable.
    """
    if not ray.is_initialized():
        return None
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(ids[0]) if ids else None


def visible_index(gpu: str, visible: str | None) -> int:
    """Return the number by which this process knows a GPU.

    Args:
        gpu: As `CUDA_VISIBLE_DEVICES` would name it.
        visible: `CUDA_VISIBLE_DEVICES`; None where it is unset, and all GPUs are visible in their own order.

    Raises:
        RuntimeError: The GPU is not visible.
    """
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    if names is None and gpu.isdecimal():
        return int(gpu)
    if names is None or gpu not in names:
        raise RuntimeError(
            f"Ray gave this process GPU {gpu}, but CUDA_VISIBLE_DEVICES is {visible!r}: unset "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, or do not change CUDA_VISIBLE_DEVICES for workers"
        )
    return names.index(gpu)
