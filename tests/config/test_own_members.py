"""Estimators and losses that a key names by file."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import pytest

from hrl.algos.advantages import ADVANTAGE_ESTIMATORS
from hrl.algos.policy_losses import POLICY_LOSSES
from hrl.algos.registry import estimator_traits, policy_loss_traits
from hrl.config import load_config
from hrl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_registries")
BOTH = """
from dataclasses import dataclass

from hrl.algos.advantages import register_adv_est
from hrl.algos.policy_losses import register_policy_loss

SCALE = {scale}


@dataclass
class Answer:
    scale: "int"


@register_adv_est("mine", min_group_size=3)
def mine(inp, config):
    return Answer(SCALE)


@register_policy_loss("gentle", zero_at_zero_advantage=True)
def gentle(inp, config):
    return Answer(SCALE)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(BOTH.format(scale=1))
    return path


def given(estimator: str | None = None, loss: str | None = None) -> dict[str, str]:
    values = {"algorithm.adv_estimator": estimator, "actor_rollout_ref.actor.policy_loss.loss_mode": loss}
    return {key: value for key, value in values.items() if value is not None}


def problems_of(values: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load_config(values)
    return [str(problem) for problem in refused.value.problems]


def test_what_a_file_registers_is_found_with_its_traits_and_keeps_its_file_in_the_configuration(file):
    estimator, loss = f"{file}:mine", f"{file}:gentle"
    config = load_config(given(estimator, loss))
    assert config.algorithm.adv_estimator == estimator  # a saved configuration names the file
    assert config.actor_rollout_ref.rollout.n == 8  # as for every estimator of groups
    assert estimator_traits(estimator).min_group_size == 3
    assert policy_loss_traits(loss).zero_at_zero_advantage
    assert loss in POLICY_LOSSES and POLICY_LOSSES.find(loss) is POLICY_LOSSES["gentle"]
    assert ADVANTAGE_ESTIMATORS.find(estimator)(None, None).scale == 1


def test_the_rules_between_keys_know_its_traits(file):
    few = given(f"{file}:mine") | {"actor_rollout_ref.rollout.n": 2}
    (problem,) = problems_of(few)
    assert "actor_rollout_ref.rollout.n" in problem and "3" in problem


def test_a_file_is_run_once_and_again_when_it_has_changed(file):
    load_config(given(loss=f"{file}:gentle"))
    first = POLICY_LOSSES["gentle"]
    load_config(given(f"{file}:mine", f"{file}:gentle"))
    assert POLICY_LOSSES["gentle"] is first
    file.write_text(BOTH.format(scale=20))
    load_config(given(loss=f"{file}:gentle"))
    assert POLICY_LOSSES["gentle"](None, None).scale == 20
    assert ADVANTAGE_ESTIMATORS["mine"](None, None).scale == 20


def test_its_functions_are_sent_whole(file):
    load_config(given(loss=f"{file}:gentle"))
    sent = cloudpickle.dumps(POLICY_LOSSES.added())
    file.unlink()
    assert f"hrl_user_{file.stem}" not in sys.modules
    function, traits = cloudpickle.loads(sent)["gentle"]
    assert function(None, None).scale == 1 and traits.zero_at_zero_advantage


def test_a_wrong_name_is_told_with_what_the_file_has(file):
    assert problems_of(given(loss=f"{file}:gently")) == [
        f"actor_rollout_ref.actor.policy_loss.loss_mode names '{file}:gently', and {file} registers no policy loss of "
        "that name. Did you mean gentle?"
    ]
    (problem,) = problems_of(given(loss=f"{file}:vanilla"))  # built in, and not the file's
    assert problem.endswith("It registers gentle; a decorator @register_policy_loss('vanilla') adds one.")
    (problem,) = problems_of(given(f"{file}:gentle"))
    assert "no advantage estimator of that name. It registers mine" in problem


def test_a_file_that_is_missing_or_fails_is_told_each_time_with_its_own_error(tmp_path):
    (problem,) = problems_of(given(f"{tmp_path}/nope.py:mine"))
    assert f"{tmp_path}/nope.py does not exist" in problem and ".." not in problem
    failing = tmp_path / "failing.py"
    failing.write_text(BOTH.format(scale=1) + "\nraise KeyError('later')\n")
    for _ in range(2):  # what it registered before it failed is gone
        (problem,) = problems_of(given(f"{failing}:mine"))
        assert problem.endswith(f"{failing} raises KeyError: 'later'.")
    assert "mine" not in ADVANTAGE_ESTIMATORS and "gentle" not in POLICY_LOSSES


def test_a_file_that_may_not_be_read_is_told(file, monkeypatch):
    def refused(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    (problem,) = problems_of(given(f"{file}:mine"))
    assert f"{file} can't be read: Permission denied." in problem


def test_two_files_with_one_name_are_told(file, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(BOTH.format(scale=3))
    (problem,) = problems_of(given(f"{other}:mine", f"{file}:gentle"))
    assert "is already registered" in problem
