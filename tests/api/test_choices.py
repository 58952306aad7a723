"""What is chosen for rows of one's own: what nobody set, by rows and machine; said aloud, and part of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import hrl
from hrl.config.model import ADAPTER_RATE
from hrl.config.run_kind import config_folder
from hrl.errors import ConfigError

ROWS = [{"prompt": f"{a}?", "answer": str(a)} for a in range(100)]
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 5
LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("hrl.preflight.machine_look.gpus_here", lambda: request.param)


def quickstart(kind: str) -> Any:
    return yaml.safe_load((config_folder() / "quickstart" / f"{kind}.yaml").read_text())


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_without_a_gpu_rows_get_what_suits_small_models() -> None:
    trainer = hrl.GRPO(data=ROWS, reward=lambda response: 1.0, steps=1)
    assert trainer.chosen == {
        "data.train_batch_size": 8,
        "data.max_response_length": 128,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
        LR: quickstart("ppo")["actor_rollout_ref"]["actor"]["optim"]["lr"],
    }
    config = trainer.resolved()
    assert config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert "data.train_batch_size=8" in trainer.command


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("model", "lr"), [("some/model", 1e-6), (None, 2e-5)])
def test_with_a_gpu_only_a_bundled_model_is_known_to_be_small(model: str | None, lr: float) -> None:
    trainer = hrl.GRPO(model, data=ROWS, reward=lambda response: 1.0)
    assert trainer.chosen["data.train_batch_size"] == 64
    assert trainer.config.actor_rollout_ref.actor.optim.lr == lr
    assert trainer.config.data.max_response_length == 512


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (3, 2), (7, 4), (8, 8), (9, 8), (100, 8)])
def test_a_batch_is_never_larger_than_the_rows(rows: int, batch: int) -> None:
    assert hrl.GRPO(data=ROWS[:rows]).chosen["data.train_batch_size"] == batch
    some = hrl.GRPO(data=ROWS, config={"data.train_max_samples": rows})
    assert some.chosen["data.train_batch_size"] == batch


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_what_is_set_anywhere_is_not_chosen(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: {train_batch_size: 2}\nactor_rollout_ref: {actor: {optim: {lr: 3.0e-6}}}\n")
    for trainer in (
        hrl.GRPO(data=ROWS, batch_size=2, lr=3e-6),
        hrl.GRPO(data=ROWS, config={"data": {"train_batch_size": 2}, LR: 3e-6}),
        hrl.GRPO(data=ROWS, config=file),
    ):
        assert not {"data.train_batch_size", LR} & trainer.chosen.keys()
        assert (trainer.config.data.train_batch_size, trainer.config.actor_rollout_ref.actor.optim.lr) == (2, 3e-6)
    trainer = hrl.GRPO(data=ROWS)
    trainer.config.data.train_batch_size = 2
    assert "data.train_batch_size" not in trainer.chosen


def test_nothing_is_chosen_for_the_quickstart() -> None:
    assert hrl.GRPO(steps=5).chosen == {}


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_a_budget_holds_the_longest_row() -> None:
    assert hrl.GRPO(data=ROWS, max_prompt_length=6000).config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 6128
    groups = {"trainer.n_gpus_per_node": 2, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 2}
    shared = hrl.GRPO(data=ROWS, max_prompt_length=14001, config=groups)
    # Two processes share a row of 14001 + 128 tokens.
    assert shared.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 7065
    long = hrl.DPO(data=PAIRS, max_length=3000)
    assert long.resolved().data.max_token_len_per_gpu == 6000


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("trainer", [hrl.DPO, hrl.SFT, hrl.RewardModel])
def test_offline_trainers_get_their_own_learning_rate(trainer: Any) -> None:
    made = trainer(data=PAIRS)
    assert made.chosen["optim.lr"] == quickstart(trainer.kind)["optim"]["lr"]
    assert made.chosen["data.train_batch_size"] == 4


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_an_adapter_gets_a_rate_at_which_it_learns() -> None:
    assert hrl.SFT(data=PAIRS, lora_rank=8).chosen["optim.lr"] == ADAPTER_RATE
    made = hrl.GRPO(data=PAIRS, lora_rank=8, config={"algorithm.adv_estimator": "gae"})
    assert made.chosen[LR] == ADAPTER_RATE
    assert made.chosen["critic.optim.lr"] == quickstart("ppo")["actor_rollout_ref"]["actor"]["optim"]["lr"]
    assert LR not in hrl.GRPO(data=PAIRS, lora_rank=8, lr=1e-5).chosen


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_a_critic_learns_as_fast_as_its_policy_and_is_not_asked_for_by_it() -> None:
    assert hrl.PPO(data=ROWS).chosen["critic.optim.lr"] == 2e-5
    assert not hrl.GRPO(data=ROWS).resolved().needs_critic


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_a_configuration_that_is_wrong_is_told_by_its_own_error() -> None:
    trainer = hrl.GRPO(data=ROWS, config={"data.train_batch_sise": 4})
    with pytest.raises(ConfigError, match="train_batch_size"):
        trainer.resolved()
