"""TRL's own rewards become functions of hrl's library, and only TRL's own."""

from __future__ import annotations

import pytest

from hrl.migrate.line import Migrated
from hrl.migrate.migrate import migrate
from tests.migrate.test_migrate import config_of, lost, one

TRAINER = "GRPOTrainer('some/model', reward_funcs={}, args=GRPOConfig({}), train_dataset='rows.jsonl')"


def file(imports: str, rewards: str, settings: str = "") -> Migrated:
    text = f"from trl import GRPOConfig, GRPOTrainer\n{imports}\n{TRAINER.format(rewards, settings)}\n"
    return one(text, "train.py")


def differs(found: Migrated) -> dict[str, str]:
    return {remark.written: remark.why for remark in found.differs}


def entries(found: Migrated) -> list[tuple[str | None, dict[str, object], float]]:
    return [(entry.name, entry.kwargs, entry.weight) for entry in config_of(found).reward.functions or []]


@pytest.mark.parametrize(
    ("imports", "rewards"),
    [
        ("from trl.rewards import accuracy_reward", "accuracy_reward"),
        ("from trl.rewards import accuracy_reward as right", "[right]"),
        ("from trl.rewards.accuracy_rewards import accuracy_reward\nmine = [accuracy_reward]", "mine"),
        ("from trl import rewards", "[rewards.accuracy_reward]"),
        ("import trl.rewards", "trl.rewards.accuracy_reward"),
        ("import trl.rewards as r\nright = r.accuracy_reward", "[right]"),
        ("from trl.rewards import *", "accuracy_reward"),
    ],
)
def test_an_imported_reward_is_the_function_that_means_the_same(imports: str, rewards: str) -> None:
    found = file(imports, rewards)
    assert entries(found) == [("math_verify", {}, 1.0)] and lost(found) == {}
    assert config_of(found).data.answer_key == "solution"
    (why,) = (why for why in differs(found).values() if "math_verify" in why)
    assert "compares with the column `solution` too" in why


@pytest.mark.parametrize(
    "imports",
    [
        "def accuracy_reward(completions, **kwargs): return [0.0]",
        "from trl.rewards import accuracy_reward\ndef accuracy_reward(completions, **kwargs): return [0.0]",
        "from trl.rewards import accuracy_reward\naccuracy_reward = wrapped(accuracy_reward)",
        "from mine import accuracy_reward",
        "from mine import *",
        "from .rewards import accuracy_reward",
    ],
)
def test_a_function_of_ones_own_with_the_name_of_trls_stays_ones_own(imports: str) -> None:
    found = file(imports, "accuracy_reward")
    assert entries(found) == [] and "one response" in lost(found)["reward_funcs=accuracy_reward"]
    assert config_of(found).data.answer_key is None


def test_several_with_their_weights_and_arguments() -> None:
    found = file(
        "from trl.rewards import (get_repetition_penalty_reward, get_soft_overlong_punishment,"
        " reasoning_accuracy_reward, think_format_reward)\n"
        "again = get_repetition_penalty_reward(4, max_penalty=-0.5)\nN = 100",
        "[reasoning_accuracy_reward, think_format_reward, again,"
        " get_soft_overlong_punishment(4 * N, soft_punish_cache=N)]",
        "reward_weights=[1.0, 0.5, 2.0, 0.25], max_completion_length=400",
    )
    assert entries(found) == [
        ("math_verify", {}, 1.0),
        ("tags", {}, 0.5),
        ("repetition", {"size": 4}, 1.0),  # 0.5 × 2
    ]
    buffer = config_of(found).reward.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 100, 0.25)
    assert lost(found) == {}
    said = differs(found)
    assert "TRL pays nothing" in said["reasoning_accuracy_reward"] and "any text behind" in said["think_format_reward"]
    assert "of tokens" in said["again"] and not any("overlong" in word for word in said), "it means the same"


def test_what_is_not_trls_beside_what_is_and_a_model() -> None:
    found = file(
        "from trl.rewards import get_cosine_scaled_reward, get_soft_overlong_punishment",
        "[get_cosine_scaled_reward(max_len=100), mine, 'some/judge', get_soft_overlong_punishment(args.n, args.m),"
        " get_cosine_scaled_reward]",
        "reward_weights=[1, 1, 3, 1, 1]",
    )
    assert entries(found) == [("math_verify", {}, 1.0)]
    model = config_of(found).reward.reward_model
    assert (model.enable, model.model_path, model.weight) == (True, "some/judge", 3.0)
    assert set(lost(found)) == {
        "mine",
        "get_soft_overlong_punishment(args.n, args.m)",
        "get_cosine_scaled_reward",  # which is called to get a reward
        "reward_weights=[1, 1, 3, 1, 1]",
    }


def test_two_that_are_the_same_function_here_have_names_of_their_own() -> None:
    names = "accuracy_reward, reasoning_accuracy_reward"
    found = file(f"from trl.rewards import {names}", f"[{names}, *more]", "reward_weights=[1, 0.5]")
    functions = config_of(found).reward.functions
    assert functions is not None
    assert [(entry.name, entry.part) for entry in functions] == [
        ("math_verify", "math_verify"),
        ("math_verify", "reasoning_accuracy_reward_2"),
    ]
    assert set(lost(found)) == {"*more", "reward_weights=[1, 0.5]"}, "nobody knows whose weights these are"


@pytest.mark.parametrize(
    "change",
    [
        "mine += [think_format_reward]",
        "mine.append(think_format_reward)",
        "if args.strict:\n    mine.extend([think_format_reward])",
        "mine[0] = think_format_reward",
        "del mine[0]",
        "for mine in several: pass",
    ],
)
def test_a_list_that_changes_later_is_not_taken_for_what_it_was_at_first(change: str) -> None:
    imports = f"from trl.rewards import accuracy_reward, think_format_reward\nmine = [accuracy_reward]\n{change}"
    found = file(imports, "mine", "reward_weights=[1.0, 0.5]")
    assert entries(found) == [] and "more than one value" in lost(found)["reward_funcs=mine"]
    assert "are 2, and no more than 1 of the rewards could be read" in lost(found)["reward_weights=[1.0, 0.5]"]
    beside = file(f"{imports}\nright = accuracy_reward", "[right, mine]")
    assert entries(beside) == [("math_verify", {}, 1.0)] and "more than one value" in lost(beside)["mine"]


@pytest.mark.parametrize("rewards", ["[]", "None", "rewards_of(args)"])
def test_rewards_that_cannot_be_read_are_told(rewards: str) -> None:
    assert set(lost(file("from trl.rewards import accuracy_reward", rewards))) == {f"reward_funcs={rewards}"}


def test_rewards_by_place_and_those_of_the_command() -> None:
    trainer = "trl.GRPOTrainer(NAME, trl.rewards.think_format_reward, train_dataset='a.jsonl')"
    text = f"import trl\n{trainer}\nNAME = 'some/model'"
    found = one(text, "train.py")
    assert entries(found) == [("tags", {}, 1.0)] and config_of(found).actor_rollout_ref.model.path == "some/model"
    line = "trl grpo --model_name_or_path some/model --dataset_name a/b --max_completion_length 512 --reward_funcs "
    found = one(f"{line} accuracy_reward my_lib.rewards.mine get_soft_overlong_punishment")
    assert entries(found) == [("math_verify", {}, 1.0)] and set(lost(found)) == {"my_lib.rewards.mine"}
    assert config_of(found).reward.overlong_buffer.len == 256
    assert "ends at data.max_response_length=512 and not at 1280" in differs(found)["get_soft_overlong_punishment"]
    (bare,) = migrate(f"{line} mine", "-")
    assert set(lost(bare)) == {"--reward_funcs mine"}
