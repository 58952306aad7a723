"""Training from Python: rows and functions as objects, the same keys and errors as a command line, callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

import hrl
from hrl.api.arguments import as_override
from hrl.api.rows import UsageError
from hrl.errors import ConfigError
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs.in_process import in_process, in_this_process
from tests.runs.runner import Runner

ROWS = [{"prompt": f"What is {a} plus {a}?", "data_source": "doubles", "reward_model": {}} for a in range(8)]

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), inner),
    max_leaves=8,
)


@given(plain)
def test_any_value_reads_back_from_the_command_line(value: Any) -> None:
    assert OverridesParser.create().parse_override(f"key={as_override(value)}").value() == value


def grpo(runner: Runner, folder: Path, **arguments: Any) -> hrl.GRPO:
    return hrl.GRPO(
        runner.model,
        data=ROWS,
        steps=2,
        batch_size=2,
        lr=1e-3,
        folder=folder,
        config={
            "data": {"max_prompt_length": 64, "max_response_length": 8},
            "actor_rollout_ref.rollout": {"name": "hf", "n": 4},
            "trainer.device": "cpu",
        },
        trainer_cls=in_this_process(RayPPOTrainer),
        **arguments,
    )


def test_arguments_are_those_of_the_command_line(runner: Runner, tmp_path: Path) -> None:
    trainer = grpo(runner, tmp_path)
    assert trainer.command.startswith("python -m hrl.trainer.main_ppo recipe=grpo ")
    assert trainer.config.actor_rollout_ref.actor.use_kl_loss is True  # the recipe's
    trainer.config.data.max_response_length = 5
    trainer.config.trainer.logger = ["console", "tensorboard"]
    assert trainer.resolved().data.max_response_length == trainer.config.data.max_response_length == 5
    assert "trainer.logger=[console,tensorboard]" in trainer.arguments
    with pytest.raises(AttributeError, match=r"data\.max_respons_length .* Did you mean max_response_length"):
        trainer.config.data.max_respons_length = 5


def test_wrong_keys_are_told_together_as_in_a_shell(runner: Runner, tmp_path: Path) -> None:
    trainer = grpo(runner, tmp_path)
    trainer.config.data.train_batch_size = "many"
    trainer.config.algorithm.adv_estimator = "grppo"
    with pytest.raises(ConfigError) as raised:
        trainer.train()
    assert {problem.key for problem in raised.value.problems} == {"data.train_batch_size", "algorithm.adv_estimator"}


@pytest.mark.parametrize("data", [5, {"prompt": "x"}, [1, 2]])
def test_what_is_no_rows_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match="data is a|row 0 of data"):
        hrl.GRPO(data=data)


def test_rows_of_a_data_frame_and_of_any_iterable_are_taken() -> None:
    class Frame:  # what a pandas DataFrame has of this; pandas is no dependency
        def iterrows(self) -> Iterator[Any]:
            return iter(enumerate(ROWS))

        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            return {"records": ROWS}[orient]

        def __iter__(self) -> Iterator[str]:  # as a frame's does: names of columns
            return iter(ROWS[0])

    for data in (ROWS, tuple(ROWS), (row for row in ROWS), Frame()):
        trainer = hrl.GRPO(data=data)
        assert trainer._train_rows == ROWS and "data.train_files=[python:train_rows]" in trainer.arguments
    assert "data.train_files=[rows.jsonl]" in hrl.GRPO(data="rows.jsonl").arguments
    assert "data.train_files=[a.jsonl,b.jsonl]" in hrl.GRPO(data=["a.jsonl", Path("b.jsonl")]).arguments


class Notes(hrl.Callback):
    """Notes the moments of a run, and stops it after a step."""

    def __init__(self, stop_after: int) -> None:
        self.stop_after = stop_after
        self.moments: list[tuple[str, int]] = []

    def on_step_end(self, run: hrl.RunState, metrics: Mapping[str, float]) -> None:
        self.moments.append(("step", run.step))
        with pytest.raises(TypeError):
            metrics["reward/mean"] = 1.0  # type: ignore[index]
        if run.step == self.stop_after:
            run.stop("seen enough")

    def on_validation(self, run: hrl.RunState, metrics: Mapping[str, float]) -> None:
        assert metrics["val/doubles/n"] == 2
        self.moments.append(("validation", run.step))

    def on_rollouts(self, run: hrl.RunState, samples: Sequence[Mapping[str, Any]]) -> None:
        assert len(samples) == 8 and "response" in samples[0]
        self.moments.append(("rollouts", run.step))

    def on_checkpoint(self, run: hrl.RunState, folder: Path) -> None:
        assert (folder / "hf" / "config.json").exists()
        self.moments.append(("checkpoint", run.step))


@pytest.fixture
def this_process() -> Iterator[None]:
    with in_process(reports=True):
        yield


@pytest.mark.timeout(300)
def test_a_trainer_trains_answers_and_is_stopped_by_a_callback(
    runner: Runner, tmp_path: Path, this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = Notes(stop_after=1)
    trainer = grpo(runner, tmp_path / "run", val_data=ROWS[:2], reward=lambda **sample: 1.0, callbacks=[notes])
    trainer.config.trainer.save_freq = 1
    with trainer:
        before = trainer.evaluate()
        run = trainer.train()
        (answer,) = trainer.generate("What is 1 plus 1?", temperature=0.0, max_tokens=4)
        assert answer["response_length"] <= 4 and "What is 1 plus 1?" in answer["prompt"]
        assert [one["question"] for one in trainer.generate(["a", "b"], n=2)] == ["a", "a", "b", "b"]
        exported = trainer.save_hf(tmp_path / "exported")
    assert before["val/doubles/n"] == 2
    assert notes.moments == [
        ("validation", 0),
        ("step", 1),
        ("rollouts", 1),
        ("validation", 1),  # of the step that turned out to be the last
        ("checkpoint", 1),
    ]
    assert [record["step"] for record in run.metrics] == [0, 1]
    assert len(run.samples()) == 8 and len(run.samples(1, validation=True)) == 2
    assert run.report.exists() and "seen enough" in capsys.readouterr().out
    for folder in (run.model_path, exported):
        assert (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == run.config.model_dump(mode="json")
