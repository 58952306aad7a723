"""What a worker process needs to know about the machine it runs on, and how it joins the others.

Every role of a process shares one `torch.distributed` world, so joining is idempotent: the first role to initialise
joins, the others find the world there.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from hrl.algos.policy_losses import POLICY_LOSSES, PolicyLoss
from hrl.algos.registry import PolicyLossTraits
from hrl.workers.rendezvous import connect_store, listen_towards, serve_store

if TYPE_CHECKING:
    from hrl.config.outline import Outline
    from hrl.config.trainer import RunConfig
    from hrl.models.tokenizer import TokenIds

#: For `os.umask`: files of this process are for its user alone.
ALL_BUT_THE_USER = 0o077

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """The settings of a worker process that belong to no model.

    Attributes:
        device: `"cpu"` or `"cuda"`, already decided by the driver (never `"auto"`).
        num_threads: torch threads of a CPU rank. Ray sets `OMP_NUM_THREADS=1` in a one-CPU actor, which would leave
            the other cores idle, so the rank sets its own.
        seed: The run's seed; every rank derives its own generator state from it.
        init_timeout_s: How long the start of an engine may take.
        collective_timeout_s: How long a rank waits for the others in one collective before it gives up with an error.
        tokens: Ids of the policy's tokenizer.
        share_prefix: Equal prompts of a micro-batch are computed once, by every model alike: one plan serves them all.
        trust_remote_code: Model folders may run code; one switch for all roles.
        max_model_len: The longest sequence of the run in tokens, for which an engine is opened as well.
        run_folder: Of the run; on another node than the driver's the same path, which need not be shared.
        engine_threads: CPU threads of an engine on a GPU; None leaves them to the engine.
        own_losses: Policy losses that the user has registered with the driver, with their traits.
        private: Nobody but the user may read the files that are written.
        shows_pictures: Prompts of the run have pictures.
        freeze_vision_tower: The part of a model that reads them is not trained.
        packs_rows: Rows of a micro-batch are packed, by every model alike; else they are padded.
        run_mark: Drawn for this start of the run; see `EngineSetup`.
    """

    device: str
    num_threads: int
    seed: int
    init_timeout_s: float
    collective_timeout_s: float
    tokens: TokenIds
    share_prefix: bool
    trust_remote_code: bool
    max_model_len: int
    run_folder: str
    engine_threads: int | None = None
    own_losses: Mapping[str, tuple[PolicyLoss, PolicyLossTraits]] = field(default_factory=dict)
    private: bool = False
    shows_pictures: bool = False
    freeze_vision_tower: bool = False
    packs_rows: bool = True
    run_mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def of(
        cls,
        trainer: RunConfig,
        outline: Outline,
        ids: TokenIds,
        *,
        device: str,
        num_cores: int,
        run_folder: Path,
        shows_pictures: bool = False,
        freeze_vision_tower: bool = False,
        packs_rows: bool = True,
    ) -> Runtime:
        """Return the settings of every process of a run.

        Args:
            trainer: The section `trainer`.
            outline: Of the run.
            ids: Of the policy's tokenizer.
            device: `cpu` or `cuda`.
            num_cores: That the processes of a node share, where `trainer.cpu_threads_per_worker` does not divide them.
            run_folder: Of the run.
            shows_pictures: Prompts have pictures.
            freeze_vision_tower: What reads them is not trained.
            packs_rows: Models run packed rows; else padded ones.
        """
        return cls(
            device=device,
            num_threads=trainer.cpu_threads_per_worker or max(1, num_cores // outline.most_processes_on_a_node),
            seed=trainer.seed,
            init_timeout_s=trainer.timeouts.rank_init_s,
            collective_timeout_s=trainer.timeouts.rank_call_s,
            tokens=ids,
            share_prefix=outline.model.share_prefix,
            trust_remote_code=outline.model.trust_remote_code,
            max_model_len=outline.lengths.model,
            run_folder=str(run_folder),
            engine_threads=trainer.cpu_threads_per_worker,
            own_losses=POLICY_LOSSES.added(),
            private=trainer.private,
            shows_pictures=shows_pictures,
            freeze_vision_tower=freeze_vision_tower,
            packs_rows=packs_rows,
        )


def local_device(runtime: Runtime) -> torch.device:
    """Return the device of this rank.

    Ray narrows `CUDA_VISIBLE_DEVICES` to the devices of one actor, so a rank usually sees its own GPU as number 0.
    Where it does not (`RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`), Ray knows which one it gave to this process:
    `LOCAL_RANK` counts the ranks of one group on this node, and several groups may share it. Outside Ray it decides.

    Raises:
        RuntimeError: No GPU is visible, or not the one that Ray gave.
    """
    if runtime.device == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 0:
        raise RuntimeError("trainer.device=cuda, but this process sees no CUDA device: check CUDA_VISIBLE_DEVICES")
    if visible == 1:
        return torch.device("cuda", 0)
    from hrl.single_controller.ray_cluster import assigned_gpu, visible_index  # needs Ray, which few ranks do

    given = assigned_gpu()
    if given is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", visible_index(given, os.environ.get("CUDA_VISIBLE_DEVICES")))


def join_world(runtime: Runtime) -> torch.device:
    """Set threads, seeds, device and umask of this process and join the `torch.distributed` world of its group.

    Reads `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, which the worker group sets.

    Returns:
        The device of this rank.

    Raises:
        OSError: Rank 0 cannot listen at that address and port.
        torch.distributed.DistNetworkError: Rank 0 did not open the store within `collective_timeout_s`.
        torch.distributed.DistStoreError: The other ranks did not arrive within `collective_timeout_s`.
    """
    device = local_device(runtime)
    torch.set_num_threads(runtime.num_threads)
    if runtime.private:
        os.umask(ALL_BUT_THE_USER)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = _meet(rank, world_size, runtime.collective_timeout_s)
        if world_size > int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):  # on several nodes
            listen_towards(os.environ["MASTER_ADDR"])
        dist.init_process_group(
            backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=runtime.collective_timeout_s),
            device_id=None if device.type == "cpu" else device,
        )
        seed_everything(runtime.seed + dist.get_rank())
        logger.info("rank %d of %d joined on %s", dist.get_rank(), dist.get_world_size(), device)
    return device


def _meet(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return the store where the ranks of a group find each other."""
    if world_size == 1:  # nobody else comes
        return dist.HashStore()
    meet = serve_store if rank == 0 else connect_store
    return meet(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout_s)


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators (dropout and the like; sampling has its own seeds)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def release_cached_memory(device: torch.device) -> None:
    """Give the memory that torch's allocator caches back to the device, and wait until every rank has.

    An engine in another process of the same GPU can only take what the trainer does not keep.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        dist.barrier()
