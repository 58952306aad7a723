"""How a vLLM engine is set up, as far as that can be seen without starting one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from hrl.workers.rollout.host import RolloutHost, TokenInfo
from hrl.workers.rollout.vllm_engine import VllmOptions, _environment, default_num_threads
from tests.workers.rollout.settings import rollout_config

GPU = VllmOptions("folder", "cuda", max_model_len=32, stop_token_ids=(1,), num_threads=None)


def options_of(device: str, num_threads: int | None) -> VllmOptions:
    host = RolloutHost(
        rollout_config("vllm"),
        "folder",
        TokenInfo(0, (1,), 128),
        max_prompt_length=8,
        max_response_length=24,
        device=torch.device(device),
        num_threads=num_threads,
    )
    return host.engine._options


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [("cpu", None, default_num_threads()), ("cpu", 3, 3), ("cuda", None, None), ("cuda", 3, 3)],
)
def test_an_engine_on_a_gpu_has_its_own_idea_of_threads_unless_asked(device, asked, expected):
    assert options_of(device, asked).num_threads == expected


def test_threads_are_shared_by_the_ranks_of_an_engine_and_left_out_where_they_are_vllms():
    assert replace(GPU, num_threads=8, tensor_parallel_size=4).environment()["OMP_NUM_THREADS"] == "2"
    assert replace(GPU, num_threads=1, tensor_parallel_size=4).environment()["OMP_NUM_THREADS"] == "1"
    assert GPU.environment()["OMP_NUM_THREADS"] is None


def test_the_number_of_threads_that_ray_sets_for_an_actor_does_not_reach_an_engine_on_a_gpu(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    with _environment(GPU.environment()):
        assert "OMP_NUM_THREADS" not in os.environ

    assert os.environ["OMP_NUM_THREADS"] == "1"
