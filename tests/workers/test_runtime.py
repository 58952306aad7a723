"""How a rank joins its world."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from hrl.config.load import load_kind
from hrl.config.outline import outline_of
from hrl.config.run_kind import KINDS
from hrl.models.tokenizer import TokenIds
from hrl.single_controller import ray_cluster
from hrl.workers.runtime import Runtime, local_device

SEES_FOUR = Runtime("cuda", 1, 0, 30.0, 30.0, TokenIds(0, (1,), 10), False, False, 8, "unused")

JOIN = """
import json, os, psutil, torch, torch.distributed as dist
from hrl.workers.runtime import Runtime, join_world

runtime = Runtime("cpu", 1, 0, 30.0, 30.0, None, False, False, 8, "unused", private=True)
assert join_world(runtime) == torch.device("cpu") == join_world(runtime)
assert os.umask(0) == 0o077, "files of this rank are for its user alone"
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
dist.barrier()
print(json.dumps([total.item(), sorted(set(listening))]), flush=True)
"""


def join(world_size: int) -> list[tuple[float, list[str]]]:
    """Sum of rank + 1 over the world, and the addresses it listens on, as every rank of a new world has them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        return [tuple(json.loads(rank.communicate(timeout=600)[0])) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_world_on_one_machine_listens_on_loopback_only():
    assert join(1) == [(1.0, ["127.0.0.1"])]


def test_the_ranks_of_a_world_find_each_other():
    assert [total for total, _ in join(2)] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("given", "visible", "index"),
    [("2", None, 2), ("6", "4,5,6,7", 2), ("GPU-b", "GPU-a, GPU-b", 1), (None, None, 1)],
)
def test_a_rank_that_sees_every_gpu_takes_the_one_that_ray_gave_it(given, visible, index, monkeypatch):
    """As with RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES; two groups on a node both have a LOCAL_RANK 1."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(ray_cluster, "assigned_gpu", lambda: given)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert local_device(SEES_FOUR) == torch.device("cuda", index)


def test_a_gpu_that_ray_gave_and_the_process_does_not_see_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ray_cluster, "assigned_gpu", lambda: "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    with pytest.raises(RuntimeError, match="Ray gave this process GPU 3, but CUDA_VISIBLE_DEVICES is '0,1'"):
        local_device(SEES_FOUR)


def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")

    assert local_device(SEES_FOUR) == torch.device("cuda", 0)


def test_the_processes_of_a_node_divide_its_cores_and_every_setting_is_the_runs(tmp_path):
    config = load_kind(
        KINDS["ppo"],
        {
            "data": {"max_prompt_length": 30, "max_response_length": 12},
            "trainer": {"nnodes": 2, "n_gpus_per_node": 3, "seed": 7, "timeouts": {"init_s": 100.0, "call_s": 10.0}},
        },
    )

    def of(config):
        ids = TokenIds(pad=5, stop=(6,), vocab_size=11)
        return Runtime.of(config.trainer, outline_of(config), ids, device="cpu", num_cores=8, run_folder=tmp_path)

    found = of(config)
    assert (found.num_threads, found.engine_threads, found.seed) == (2, None, 7)  # 8 cores, 3 processes
    assert (found.init_timeout_s, found.collective_timeout_s) == (90.0, 9.0)
    assert found.max_model_len == 42
    assert found.tokens == TokenIds(5, (6,), 11)
    own = config.model_copy(update={"trainer": config.trainer.model_copy(update={"cpu_threads_per_worker": 5})})
    assert (of(own).num_threads, of(own).engine_threads) == (5, 5)
