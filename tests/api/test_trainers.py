"""The face of the trainers: arguments with names and documentation, and an import that costs nothing."""

from __future__ import annotations

import inspect
import pydoc
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hrl
from hrl.api.rows import UsageError
from hrl.api.run import Run
from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS
from hrl.config.section import flatten
from hrl.errors import ConfigError

TRAINERS = [hrl.PPO, hrl.GRPO, hrl.DPO, hrl.KTO, hrl.SFT, hrl.RewardModel]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_argument_has_a_name_and_a_line_of_help(trainer: Any) -> None:
    parameters = inspect.signature(trainer).parameters.values()
    assert not [one for one in parameters if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    documented = inspect.getdoc(trainer.__init__) or ""
    assert [one.name for one in parameters if f"    {one.name}: " not in documented] == []
    assert "Describe a run" in pydoc.plain(pydoc.render_doc(trainer))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_argument_is_a_key_or_an_object_of_the_run(trainer: Any, tmp_path: Path) -> None:
    common = {"steps": 7, "epochs": 3, "batch_size": 4, "lr": 1e-4, "test_freq": 5, "save_freq": 6, "seed": 9}
    given = common | {"folder": tmp_path, "name": "mine"}
    config = trainer("some/model", data=["a.jsonl"], val_data="b.jsonl", **given).resolved()
    run = config.trainer
    assert (run.total_training_steps, run.total_epochs, run.test_freq, run.save_freq, run.seed) == (7, 3, 5, 6, 9)
    assert (run.default_local_dir, run.experiment_name) == (str(tmp_path), "mine")
    assert (config.data.train_files, config.data.val_files, config.data.train_batch_size) == (
        ["a.jsonl"],
        ["b.jsonl"],
        4,
    )
    optim = config.actor_rollout_ref.actor.optim if trainer.kind == "ppo" else config.optim
    model = config.actor_rollout_ref.model if trainer.kind == "ppo" else config.model
    assert (optim.lr, model.path) == (1e-4, "some/model")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_asked_after_training_leaves_the_store_and_the_trackers_of_the_run_alone(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def running(_: str, config: Any, *__: object, **___: object) -> nullcontext[Any]:
        asked.append(config.trainer)
        return nullcontext(SimpleNamespace(evaluate=lambda rows: {}, export=lambda folder: folder))

    monkeypatch.setattr("hrl.trainer.run.running", running)
    keys = {"default_remote_dir": "memory://x", "logger": ["console", "tensorboard"], "dashboard": True}
    made = trainer("some/model", data="a.jsonl", folder=tmp_path, save_freq=2, config={"trainer": keys})
    made._trained = Run(tmp_path, made.kind)
    made.save_hf(tmp_path / "out")
    (one,) = asked
    assert (one.default_remote_dir, one.logger, one.dashboard, one.save_freq) == (None, ["console"], False, -1)
    assert one.default_local_dir != str(tmp_path) and one.resume_mode == "disable"


@pytest.mark.parametrize(("trainer", "section"), [(hrl.GRPO, "actor_rollout_ref.model"), (hrl.SFT, "model")])
@pytest.mark.parametrize("rank", [0, 8])
def test_what_is_asked_after_training_has_the_trained_model_or_the_trained_adapter_on_its_model(
    trainer: Any, section: str, rank: int, tmp_path: Path
) -> None:
    made = trainer("some/model", data="a.jsonl", folder=tmp_path, lora_rank=rank)
    run: Any = SimpleNamespace(model_path=tmp_path / "model")
    with ExitStack() as stack:
        config: Any = made._after_training(stack, run)
        after = dict(flatten(config, type(config)))
    model, adapter = after[f"{section}.path"], after[f"{section}.lora_adapter_path"]
    trained = str(tmp_path / "model")
    assert (model, adapter) == (("some/model", trained) if rank else (trained, None))


@pytest.mark.parametrize(
    ("trainer", "argument", "message"),
    [
        (hrl.GRPO, "reward_funcs", "GRPO takes no reward_funcs. It is reward here."),
        (hrl.PPO, "learning_rate", "PPO takes no learning_rate. It is lr here."),
        (hrl.GRPO, "max_steps", "It is steps here: it counts steps of the trainer"),
        (hrl.GRPO, "stepz", "GRPO takes no stepz. Did you mean steps?"),
        (hrl.GRPO, "gamma", "It is config={'algorithm.gamma': …} here."),
        (hrl.GRPO, "clip_ratio", "Did you mean config={'actor_rollout_ref.actor.clip_ratio': …}?"),
        (hrl.SFT, "reward", "SFT takes no reward. hrl.PPO and hrl.GRPO take it."),
        (hrl.DPO, "max_seq_length", "DPO takes no max_seq_length. It is max_length here."),
        (hrl.RewardModel, "args", "`hrl migrate FILE.py` translates a script of TRL."),
    ],
)
def test_an_argument_that_a_trainer_lacks_is_answered_with_the_one_meant(
    trainer: Any, argument: str, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        trainer(**{argument: 1})


def test_positional_arguments_are_counted_and_given_once() -> None:
    with pytest.raises(UsageError, match=r"GRPO takes 3 arguments without a name \(model, reward, data\), not 4"):
        hrl.GRPO("model", len, [], 5)  # type: ignore[misc, arg-type]
    with pytest.raises(UsageError, match="DPO has two values for model"):
        hrl.DPO("model", model="other")  # type: ignore[misc]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_table_of_arguments_is_what_the_trainers_take(trainer: Any) -> None:
    arguments = KINDS[trainer.kind].spellings.arguments
    objects = {"recipe", "config", "callbacks", "trainer_cls"}
    assert set(inspect.signature(trainer).parameters) - objects == set(arguments)
    for name, other in arguments.items():
        assert other.key in trainer(**{name: "numeric" if name == "reward" else "x"})._values


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GRPOTrainer", "GRPO"),
        ("SFTConfig", "SFT"),
        ("RewardTrainer", "RewardModel"),
        ("grpo", "GRPO"),
        ("TrainerCallback", "Callback"),
        ("RLOOTrainer", 'hrl.GRPO(recipe="rloo")'),
    ],
)
def test_a_name_of_trl_is_answered_with_that_of_hrl(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(meant)):
        getattr(hrl, name)


def test_what_no_trainer_takes_is_told_with_the_name() -> None:
    with pytest.raises(UsageError, match="data is a int"):
        hrl.GRPO(data=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [[{"prompt": "a"}], "rows.jsonl"])
def test_rows_are_given_once(data: Any) -> None:
    for config in ({"data.train_files": "other.jsonl"}, {"data": {"train_files": ["other.jsonl"]}}):
        with pytest.raises(UsageError, match=r"data\.train_files is .*other.jsonl.* given as data too"):
            hrl.GRPO(data=data, config=config)
        hrl.GRPO(config=config)
    with pytest.raises(UsageError, match=r"data\.val_files is .* given as val_data too"):
        hrl.SFT(data=data, val_data=data, config={"data.val_files": ["other.jsonl"]})
    trainer = hrl.GRPO(data=data)
    if isinstance(data, list):
        with pytest.raises(UsageError, match=r"data\.train_files is .* given as data too"):
            trainer.config.data.train_files = "other.jsonl"
    again = hrl.GRPO(data=data, config=trainer.resolved())  # which names the rows of the first one
    assert again.resolved().data.train_files == trainer.resolved().data.train_files


def test_a_run_that_was_refused_before_it_started_has_not_failed() -> None:
    trainer = hrl.GRPO(data="rows.jsonl", config={"data.train_batch_sise": 4})
    for ask in (trainer.train, trainer.evaluate, lambda: trainer.generate("a")):
        with pytest.raises(ConfigError, match="train_batch_sise"):
            ask()


HEAVY = ["torch", "ray", "transformers", "pydantic", "hydra", "datasets", "IPython"]


def test_hrl_is_imported_without_what_is_heavy() -> None:
    code = f"""
import sys, hrl
assert not set({HEAVY}) & sys.modules.keys()
hrl.GRPO
assert not {{"torch", "ray", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_the_command_names_reward_functions_that_are_objects_with_their_weights() -> None:
    def brief(response: str) -> float:
        return float(len(response) < 9)

    words = shlex.split(hrl.GRPO("some/model", ["numeric", (brief, 0.3)], data="bundled:addition/train").command)
    numeric, own = compose_kind(KINDS["ppo"], words[3:]).reward.functions
    assert (numeric.name, own.part, own.weight) == ("numeric", "brief", 0.3)
    assert own.is_object
    assert __file__ in own.path
    assert "reward.functions" not in hrl.GRPO("some/model", data="bundled:addition/train").command


class Hooked:
    """Stands for a subclass of the trainer."""


class Early(hrl.Callback):
    def on_step_end(self, run: hrl.RunState, metrics: Any) -> None:
        """Do nothing."""


def test_what_no_command_line_can_say_stands_behind_the_command_as_a_comment() -> None:
    plain = hrl.GRPO("some/model", data="rows.jsonl")
    assert "#" not in plain.command
    hooked: Any = Hooked
    trainer = hrl.GRPO("some/model", data="rows.jsonl", callbacks=Early(), trainer_cls=hooked)
    comment = "  # with trainer_cls=Hooked and callbacks=[Early], which no command line can say"
    assert trainer.command == plain.command + comment
    assert shlex.split(trainer.command, comments=True) == shlex.split(plain.command)
    assert [fact.text for fact in trainer._facts() if fact.label == "command"] == [trainer.command]  # the first lines


def test_the_command_says_that_a_loss_was_registered_in_this_session_only(tmp_path: Path) -> None:
    from hrl.algos.policy_losses import POLICY_LOSSES

    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    POLICY_LOSSES["inside_only"] = POLICY_LOSSES["vanilla"]
    try:
        command = hrl.GRPO("some/model", data="rows.jsonl", config={key: "inside_only"}).command
    finally:
        del POLICY_LOSSES["inside_only"]
    assert command.endswith(
        f"  # inside_only is registered in this session only: a shell names its file, {key}=FILE.py:inside_only"
    )
    assert "#" not in hrl.GRPO("some/model", data="rows.jsonl", config={key: "gspo"}).command


@pytest.mark.parametrize(
    ("trainer", "name", "value", "hint"),
    [
        (hrl.GRPO, "steps", 5, "Write trainer.config.trainer.total_training_steps = 5, or give steps=…"),
        (hrl.GRPO, "max_response_length", 16, "Write trainer.config.data.max_response_length = 16, or give"),
        (hrl.GRPO, "reward", len, "Give it when the trainer is made: hrl.GRPO(reward=…)."),
        (hrl.SFT, "callbacks", [], "Give it when the trainer is made: hrl.SFT(callbacks=…)."),
        (hrl.DPO, "config", {}, "Set its keys one by one, such as trainer.config.trainer.seed = 1"),
        (hrl.GRPO, "learning_rate", 1.0, "It is lr here."),
        (hrl.GRPO, "command", "ls", "command can't be set on a trainer, where nothing reads it."),
    ],
)
def test_an_attribute_that_nothing_reads_cannot_be_set(trainer: Any, name: str, value: object, hint: str) -> None:
    made = trainer("some/model", data="rows.jsonl")
    before = made.command
    with pytest.raises(UsageError, match=re.escape(hint)):
        setattr(made, name, value)
    assert made.command == before


@pytest.mark.parametrize(
    "given",
    [
        {"n": "2"},
        {"n": 2.0},
        {"n": True},
        {"n": 0},
        {"temperature": None},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": "1"},
        {"top_p": 0},
        {"max_tokens": "8"},
    ],
)
def test_a_setting_of_generate_that_makes_no_sense_is_told_before_anything_starts(given: dict[str, Any]) -> None:
    (name, value) = next(iter(given.items()))
    with pytest.raises(UsageError, match=re.escape(f"generate: {name}={value!r} is no")):
        hrl.GRPO("some/model", data="rows.jsonl").generate("x", **given)


def test_a_number_where_a_text_belongs_is_told_for_python_too() -> None:
    trainer = hrl.GRPO(3, data="rows.jsonl")  # type: ignore[arg-type]
    key = "actor_rollout_ref.model.path"
    with pytest.raises(
        ConfigError, match=re.escape(f"""{key} is 3, expected text. Quote it: "3", in a shell {key}=""")
    ):
        _ = trainer.command


def test_dir_shows_what_hrl_has_and_nothing_that_it_imports() -> None:
    assert [name for name in dir(hrl) if not name.startswith("__")] == sorted(set(hrl.__all__) - {"__version__"})


def test_a_bad_value_is_refused_where_it_is_set_and_leaves_the_command_as_it_was() -> None:
    trainer = hrl.GRPO("some/model", len, data=[{"prompt": "a"}] * 20)
    before = trainer.command
    assert "data.train_batch_size=" in before
    with pytest.raises(ConfigError, match=r"trainer\.save_freq is 'x', expected a whole number"):
        trainer.config.trainer.save_freq = "x"
    with pytest.raises(ConfigError, match=r"data\.train_batch_size is -3, must be more than 0"):
        trainer.config.data.train_batch_size = -3
    assert trainer.command == before
    trainer.config.trainer.save_freq = 5
    assert trainer.resolved().trainer.save_freq == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"trainer.save_freq": "x"}, r"trainer\.save_freq is 'x', expected a whole number"),
        ({"data.train_batch_sise": 4}, r"Did you mean data\.train_batch_size\?"),
        ({"actor_rollout_ref.rollout.n": 1}, r"1 problem in the configuration:"),  # against a rule: GRPO compares
    ],
)
def test_no_command_is_shown_for_what_cannot_be_run(config: dict[str, Any], message: str) -> None:
    trainer = hrl.GRPO("some/model", len, data=[{"prompt": "a"}] * 20, config=config)
    for ask in (lambda: trainer.command, lambda: trainer.arguments, lambda: trainer.chosen, trainer.resolved):
        with pytest.raises(ConfigError, match=message):
            ask()
    assert repr(trainer).endswith("(which can't be run: see `.resolved()`)>")  # it is shown all the same
    sound = hrl.GRPO("some/model", len, data=[{"prompt": "a"}] * 20)
    assert repr(sound) == f"<hrl.GRPO: {sound.command}>"


def test_only_a_command_starts_its_run_again() -> None:
    trainer = hrl.GRPO("some/model", data="rows.jsonl", config={"trainer.max_restarts": 2})
    with pytest.raises(
        ConfigError, match=r"trainer\.max_restarts is 2, and only a command starts its run again\. Leave"
    ):
        trainer.train()
