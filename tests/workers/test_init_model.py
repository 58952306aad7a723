"""What a rank does before it loads anything."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from hrl.data.model_source import ModelSourceError
from hrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hrl.workers.critic import CriticWorker
from hrl.workers.reward_model import RewardModelWorker


@pytest.mark.parametrize(
    "worker_cls, arguments",
    [
        (ActorRolloutRefWorker, (None, "actor")),
        (ActorRolloutRefWorker, (None, "rollout")),
        (CriticWorker, (None,)),
        (RewardModelWorker, (None,)),
    ],
)
def test_a_rank_whose_node_lacks_the_model_says_so_before_it_joins_the_others(worker_cls, arguments, tmp_path):
    worker = worker_cls(*arguments, runtime=None, model_path=str(tmp_path / "model"))
    with pytest.raises(ModelSourceError, match=f"node {socket.gethostname()}: model folder {tmp_path}/model"):
        worker.init_model()


def test_a_rank_whose_node_lacks_the_tokenizer_says_so_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = SimpleNamespace(model=SimpleNamespace(tokenizer_path=str(tmp_path / "words")))
    worker = ActorRolloutRefWorker(config, "rollout", runtime=None, model_path=str(tmp_path))
    with pytest.raises(ModelSourceError, match=f"node {socket.gethostname()}: .*{tmp_path}/words"):
        worker.init_model()
