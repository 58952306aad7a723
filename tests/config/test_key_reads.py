"""What the recorder of the keys that a run reads sees, and what it does not take for a read."""

from __future__ import annotations

import copy

import pytest

from hrl.cluster.precision import with_dtypes
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import WholeConfig, leaves
from tests.config import key_reads
from tests.config.key_reads import KeyReads


@pytest.fixture
def as_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of this file count."""
    monkeypatch.setattr(key_reads, "PACKAGE", key_reads.PACKAGE.parent)


def read_of(config: WholeConfig, *readers) -> set[str]:
    found = KeyReads()
    with found.recording():
        for reader in readers:
            reader(config)
    return leaves(type(config)).keys() - found.unread(type(config))


@pytest.mark.usefixtures("as_the_package")
def test_a_key_is_read_in_its_own_place() -> None:
    config = PPOTrainerConfig()
    assert read_of(config, lambda c: c.critic.optim.lr) == {"critic.optim.lr"}
    assert read_of(config, lambda c: getattr(c.actor_rollout_ref.actor.optim, "lr")) == {  # noqa: B009
        "actor_rollout_ref.actor.optim.lr"
    }
    assert read_of(config, lambda c: c.actor_rollout_ref.actor, lambda c: c.needs_critic) == {
        "critic.enable", "algorithm.adv_estimator",
    }  # fmt: skip


@pytest.mark.usefixtures("as_the_package")
def test_a_copy_of_a_section_stands_where_its_class_stands() -> None:
    config = PPOTrainerConfig()

    def reader(config: PPOTrainerConfig) -> None:
        config.trainer.seed  # noqa: B018
        copy.deepcopy(config.reward).overlong_buffer.penalty_factor  # noqa: B018
        config.critic.optim.model_copy(update={"lr": 1.0}).lr  # noqa: B018  (of two places)

    assert read_of(config, reader) == {"trainer.seed", "reward.overlong_buffer.penalty_factor"}


@pytest.mark.usefixtures("as_the_package")
def test_what_touches_every_key_reads_none() -> None:
    config = PPOTrainerConfig()
    assert read_of(config, lambda c: c.model_dump(), lambda c: with_dtypes(c, "cuda"), lambda c: c == config) == set()
