"""What a rank does before it loads anything."""

from __future__ import annotations

import socket

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
