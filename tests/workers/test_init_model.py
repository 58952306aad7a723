"""What a rank does before it loads anything, and in which order on a GPU that trainer and engine share."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from hrl.models.source import ModelSourceError
from hrl.workers import actor_rollout_ref
from hrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hrl.workers.critic import CriticWorker
from hrl.workers.reward_model import RewardModelWorker, StepModelWorker

RUNTIME = SimpleNamespace(own_losses={})


@pytest.mark.parametrize(
    "worker_cls, arguments",
    [
        (ActorRolloutRefWorker, (None, "actor")),
        (ActorRolloutRefWorker, (None, "rollout")),
        (CriticWorker, (None,)),
        (RewardModelWorker, (None,)),
        (StepModelWorker, (None,)),
    ],
)
def test_a_rank_whose_node_lacks_the_model_says_so_before_it_joins_the_others(worker_cls, arguments, tmp_path):
    worker = worker_cls(*arguments, runtime=RUNTIME, model_path=str(tmp_path / "model"))
    with pytest.raises(ModelSourceError, match=f"node {socket.gethostname()}: model folder {tmp_path}/model"):
        worker.init_model()


def test_a_rank_whose_node_lacks_the_tokenizer_says_so_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    model = SimpleNamespace(tokenizer_path=str(tmp_path / "words"))
    worker = ActorRolloutRefWorker(model, "rollout", runtime=RUNTIME, model_path=str(tmp_path))
    with pytest.raises(ModelSourceError, match=f"node {socket.gethostname()}: .*{tmp_path}/words"):
        worker.init_model()


class Recorder:
    """Stands for policy and engine: says which of their methods were called, in order."""

    def __init__(self, calls: list[str], **attributes) -> None:
        self._calls = calls
        self.__dict__.update(attributes)

    def __getattr__(self, name: str):
        return lambda *args, **options: self._calls.append(name)


def test_the_trainers_state_is_off_the_gpu_before_the_engine_starts_and_before_it_wakes(tmp_path, monkeypatch):
    """vLLM wants gpu_memory_utilization of the whole card free at its start, beside whatever the trainer holds."""
    worker = ActorRolloutRefWorker(
        SimpleNamespace(tokenizer_path=None),
        "actor_rollout",
        rollout=SimpleNamespace(tensor_model_parallel_size=1, dtype="bfloat16"),
        runtime=RUNTIME,
        model_path=str(tmp_path),
    )
    calls: list[str] = []
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(actor_rollout_ref, "find_on_this_node", lambda path: path)
    monkeypatch.setattr(actor_rollout_ref, "find_tokenizer_on_this_node", lambda path: path)
    monkeypatch.setattr(actor_rollout_ref, "join_world", lambda runtime: torch.device("cuda", 0))
    monkeypatch.setattr(actor_rollout_ref, "release_cached_memory", lambda device: calls.append("release"))
    monkeypatch.setattr(actor_rollout_ref, "sync_metrics", lambda report: {})
    engine = Recorder(
        calls,
        engine=SimpleNamespace(own_process=True),
        push_weights=lambda *args: calls.append("push") or 1,
        take_counts=lambda: {"rollout/split_waves": 2.0},
    )
    for name, made in {"_engine_devices": "0", "model_source": None, "_build_host": engine}.items():
        monkeypatch.setattr(worker, name, lambda *args, made=made: made)
    monkeypatch.setattr(
        worker, "_build_policy", lambda: calls.append("load") or SimpleNamespace(engine=Recorder(calls))
    )
    worker.runtime = SimpleNamespace(init_timeout_s=1.0)

    worker.init_model()
    assert calls == ["load", "offload", "release", "start"]
    calls.clear()
    assert worker.sync_weights(1) == {"rollout/split_waves": 2.0}
    wanted = [
        "offload",
        "release",
        "iter_full_params",
        "frozen_names",
        "wake",
        "param_specs",
        "push",
        "release",
        "wake",
    ]
    assert calls == wanted
