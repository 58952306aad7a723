"""Training from Python: rows and functions as objects, the same keys and errors as a command line, callbacks."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import math
import pickle
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import hrl
from hrl.api.rows import UsageError
from hrl.config.compose import compose_kind
from hrl.config.run_kind import PPO
from hrl.errors import ConfigError, HrlError
from hrl.report.run_folder import read_jsonl
from hrl.trainer.callbacks import CallbackError
from hrl.trainer.command import run_command
from hrl.trainer.offline.dpo import DPOTrainer
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs.in_process import in_process, in_this_process
from tests.runs.runner import Runner

ROWS = [{"prompt": f"What is {a} plus {a}?", "data_source": "doubles", "reward_model": {}} for a in range(8)]


def grpo(runner: Runner, folder: Path, **arguments: Any) -> hrl.GRPO:
    arguments = {"data": ROWS, "steps": 2} | arguments
    return hrl.GRPO(
        runner.model,
        batch_size=2,
        lr=1e-3,
        folder=folder,
        config={
            "data": {"max_prompt_length": 64, "max_response_length": 8},
            "actor_rollout_ref.rollout": {"name": "hf", "n": 4, "dtype": "float32"},
            "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
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
    wrong = {"data.train_batch_size": "many", "algorithm.adv_estimator": "grppo"}
    trainer = hrl.GRPO(runner.model, data=ROWS, steps=2, folder=tmp_path, config=wrong)
    with pytest.raises(ConfigError) as raised:
        trainer.train()
    assert {problem.key for problem in raised.value.problems} == {"data.train_batch_size", "algorithm.adv_estimator"}


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
def this_process(request: pytest.FixtureRequest) -> Iterator[None]:
    with in_process(reports=getattr(request, "param", False)):
        yield


@pytest.mark.parametrize("this_process", [True], ids=["with a report"], indirect=True)
@pytest.mark.cluster
def test_a_trainer_trains_answers_and_is_stopped_by_a_callback(
    runner: Runner, tmp_path: Path, this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = Notes(stop_after=1)
    trainer = grpo(runner, tmp_path / "run", val_data=ROWS[:2], reward=lambda **sample: 1.0, callbacks=[notes])
    trainer.config.trainer.save_freq = 1
    with trainer:
        before = trainer.evaluate()
        run = trainer.train()
        assert run.report.exists() and "data:image/png" in run._repr_html_()  # while the processes stay
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


# ---------------------------------------------------------------------- the same run from everywhere


letters = lambda response: len(set(response)) / 10  # noqa: E731 (sent by value, so that its process needs no tests)


def learnt(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without what the clock and the machine have to say."""
    clocks = ("timing", "perf/", "reward/call_s", "weight_sync/seconds")
    return [
        {name: value for name, value in record.items() if not name.startswith(clocks)}
        for record in read_jsonl(folder / "metrics.jsonl")
    ]


@pytest.mark.cluster
def test_python_the_printed_command_and_the_saved_configuration_are_one_run(
    runner: Runner, tmp_path: Path, this_process: None
) -> None:
    rows, reward = tmp_path / "rows.jsonl", tmp_path / "spread.py"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    reward.write_text("def letters(response):\n    return len(set(response)) / 10\n")
    trainer = grpo(runner, tmp_path / "python", data=rows, reward=f"{reward}:letters")
    run = trainer.train()
    first = learnt(run.path)
    assert [record["step"] for record in first] == [1, 2] and first[1]["actor/grad_norm"] > 0

    words = shlex.split(trainer.command, comments=True)  # the comment names trainer_cls
    assert words[:3] == ["python", "-m", "hrl.trainer.main_ppo"]
    assert run_command("ppo", [*words[3:], f"trainer.default_local_dir={tmp_path / 'shell'}"]) == 0
    assert learnt(tmp_path / "shell") == first

    inside = in_this_process(RayPPOTrainer)
    for config, name in ((run.path / "config.yaml", "yaml"), (run.config, "object")):
        again = hrl.GRPO(config=config, folder=tmp_path / name, trainer_cls=inside)
        assert again.chosen == {}
        assert learnt(again.train().path) == first

    objects = grpo(runner, tmp_path / "objects", reward=letters)  # the same rows and function, as objects
    assert [record["reward/mean"] for record in learnt(objects.train().path)] == [
        record["reward/mean"] for record in first
    ]


def test_errors_have_the_text_of_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"data.train_batch_sise": 4, "algorithm.adv_estimator": "grppo"}
    trainer = hrl.GRPO(data="rows.jsonl", config=wrong)
    with pytest.raises(ConfigError) as raised:
        trainer.train()
    typed = ["recipe=grpo", "data.train_files=rows.jsonl", *(f"{key}={value}" for key, value in wrong.items())]
    assert run_command("ppo", typed) == 2
    assert capsys.readouterr().err.strip() == str(raised.value).strip()


# ---------------------------------------------------------------------- callbacks


class Clumsy(hrl.Callback):
    def on_step_end(self, run: hrl.RunState, metrics: Mapping[str, float]) -> None:
        if run.step == 1:
            raise ZeroDivisionError("no luck")


@pytest.mark.cluster
def test_a_run_that_a_callback_broke_goes_on_where_it_was(runner: Runner, tmp_path: Path, this_process: None) -> None:
    broken = grpo(runner, tmp_path / "run", reward=letters, save_freq=100, callbacks=[Clumsy()])
    with pytest.raises(CallbackError, match="Clumsy raised ZeroDivisionError in on_step_end after step 1: no luck"):
        broken.train()
    with pytest.raises(UsageError, match=r"the run was interrupted or failed: train\(\) again continues"):
        broken.generate("a")
    run = grpo(runner, tmp_path / "run", reward=letters, save_freq=100).train()
    whole = grpo(runner, tmp_path / "whole", reward=letters).train()
    assert [record["step"] for record in run.metrics] == [1, 2]
    assert [record["reward/mean"] for record in run.metrics] == [record["reward/mean"] for record in whole.metrics]


class StopAtOnce(hrl.Callback):
    def on_validation(self, run: hrl.RunState, metrics: Mapping[str, float]) -> None:
        run.stop("good enough already")


@pytest.mark.cluster
def test_a_run_can_be_stopped_before_its_first_step(runner: Runner, tmp_path: Path, this_process: None) -> None:
    run = grpo(runner, tmp_path, reward=letters, val_data=ROWS[:2], callbacks=[StopAtOnce()]).train()
    assert [record["step"] for record in run.metrics] == [0]


# ---------------------------------------------------------------------- what a trainer is asked


@pytest.mark.cluster
def test_a_trainer_is_asked_before_during_and_after(runner: Runner, tmp_path: Path, this_process: None) -> None:
    with grpo(runner, tmp_path / "run", reward=letters, val_data=ROWS[:2]) as trainer:
        before = trainer.evaluate()
        others = trainer.evaluate([{"prompt": "a", "data_source": "others"}])
        assert others["val/others/n"] == 1 and not any("doubles" in name for name in others)
        assert trainer.evaluate() == before
        run = trainer.train()
        assert run.metrics[0]["val/doubles/mean@1"] == before["val/doubles/mean@1"]
        assert len(run.samples(0, validation=True)) == 2  # of its own rows
        texts = trainer.generate(["a", [{"role": "user", "content": "b"}]], temperature=0.0)
        chat = trainer.generate([{"role": "user", "content": "b"}], temperature=0.0)
        rows = trainer.generate([{"prompt": "b", "level": 3}], temperature=0.0, logprobs=True)
        assert [one["question"] for one in texts] == ["a", "b"]
        assert texts[1]["response"] == chat[0]["response"] == rows[0]["response"]
        assert len(rows[0]["logprobs"]) == rows[0]["response_length"] and max(rows[0]["logprobs"]) <= 0.0
        assert "logprobs" not in chat[0]
        for wrong in ({"max_tokens": 9}, {"n": 0}, {"temperature": -1.0}, {"top_p": 0.0}):
            with pytest.raises(UsageError, match=next(iter(wrong))):
                trainer.generate("a", **wrong)
        with pytest.raises(HrlError, match="row 0 has no 'prompt'; it has: question"):
            trainer.generate([{"question": "a"}])
        with pytest.raises(UsageError, match=r"trainer\.seed can't be set while"):
            trainer.config.trainer.seed = 5
        with pytest.raises(UsageError, match="there already"):
            trainer.start()
        assert learnt(trainer.train().path) == learnt(run.path)  # no step is left
        answers = trainer.generate("What is 1 plus 1?", temperature=0.0)
    for use in (
        trainer.train,
        trainer.evaluate,
        lambda: trainer.generate("a"),
        lambda: trainer.save_hf(tmp_path / "x"),
    ):
        with pytest.raises(UsageError, match="a trainer whose `with` block has ended: make a new one"):
            use()
    trainer.close()
    given = grpo(runner, tmp_path / "again", reward=letters)
    given._values["actor_rollout_ref.model.path"] = str(run.model_path)
    assert given.generate("What is 1 plus 1?", temperature=0.0)[0]["response"] == answers[0]["response"]


@pytest.mark.cluster
def test_after_training_without_a_block_the_trained_weights_answer(
    runner: Runner, tmp_path: Path, this_process: None
) -> None:
    trainer = grpo(runner, tmp_path / "run", reward=letters, val_data=ROWS[:2])
    trainer.config.actor_rollout_ref.actor.optim.lr = 1e-2  # so that two steps are seen
    start = trainer.evaluate()
    run = trainer.train()
    kept = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    assert trainer.evaluate()["val/doubles/mean@1"] == run.metrics[-1]["val/doubles/mean@1"]
    assert start["val/doubles/mean@1"] == run.metrics[0]["val/doubles/mean@1"]
    saved = trainer.save_hf(tmp_path / "saved")
    assert (saved / "model.safetensors").read_bytes() == (run.model_path / "model.safetensors").read_bytes()
    assert kept == {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    second = trainer.train()
    assert learnt(second.path) == learnt(run.path)  # from the beginning, as the same command would


@pytest.mark.cluster
def test_a_second_stage_in_the_same_folder_begins_with_the_model_of_the_first_which_moves_aside(
    runner: Runner, tmp_path: Path, this_process: None
) -> None:
    first = grpo(runner, tmp_path / "run", reward=letters, steps=1).train()
    weights = (first.model_path / "model.safetensors").read_bytes()
    models = []

    class Look(hrl.Callback):
        def on_step_end(self, run: hrl.RunState, metrics: Mapping[str, float]) -> None:
            models.append((run.path / "model").exists())

    second = grpo(runner, tmp_path / "run", reward=letters, steps=1, callbacks=[Look()])
    second.config.actor_rollout_ref.model.path = str(first.model_path)
    run = second.train()
    earlier = tmp_path / "run" / "earlier" / "1" / "model"
    assert (earlier / "model.safetensors").read_bytes() == weights
    assert run.config.actor_rollout_ref.model.path == str(earlier)
    assert models == [False]  # so that an interruption leaves none that looks like this run's
    assert (run.model_path / "model.safetensors").read_bytes() != weights


def test_a_closed_trainer_and_one_that_never_started_can_be_closed(runner: Runner, tmp_path: Path) -> None:
    trainer = grpo(runner, tmp_path)
    trainer.close()
    trainer.close()
    with pytest.raises(UsageError, match="a trainer that is closed"):
        trainer.train()


PAIRS = [{"prompt": f"{a} plus {a}?", "chosen": f"{2 * a}", "rejected": "no"} for a in range(6)]


@pytest.mark.cluster
def test_dpo_is_evaluated_on_other_pairs_until_its_reference_is_gone(
    runner: Runner, tmp_path: Path, this_process: None
) -> None:
    def dpo(name: str) -> hrl.DPO:
        device = {"trainer.device": "cpu"}
        inside = in_this_process(DPOTrainer)
        return hrl.DPO(
            runner.model, PAIRS, val_data=PAIRS[:2], steps=1, batch_size=2, max_length=64, lr=1e-3,
            folder=tmp_path / name, config=device, trainer_cls=inside,
        )  # fmt: skip

    with dpo("block") as trainer:
        others = trainer.evaluate([{**PAIRS[0], "data_source": "others"}])
        assert others["val/others/loss"] == pytest.approx(math.log(2))  # it is its own reference
        run = trainer.train()
        with pytest.raises(HrlError, match="can't be compared with the reference.*val_data"):
            trainer.evaluate(PAIRS)
        assert trainer.evaluate().items() <= run.metrics[-1].items()
    alone = dpo("alone")
    alone.train()
    with pytest.raises(UsageError, match="compares with the model before its first step"):
        alone.evaluate()


# ---------------------------------------------------------------------- rewards


def rewards() -> list[Any]:
    """Anything that can be called, with the reward of every sample; None where it grows."""

    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, response: str) -> dict[str, float]:
            self.calls += 1
            return {"score": float(self.calls), "calls": float(self.calls)}

        def method(self, response: str, answer: str | None) -> float:
            return 1.0

    async def patient(response: str, **columns: Any) -> float:
        await asyncio.sleep(0)
        return 2.0

    def scaled(response: str, by: float) -> float:
        return by

    return [
        pytest.param(patient, 2.0, id="async"),
        pytest.param(Counting().method, 1.0, id="bound method"),
        pytest.param(functools.partial(scaled, by=3.0), 3.0, id="partial"),
        pytest.param([(lambda response: 1.0, 0.5), (patient, 2.0)], 4.5, id="several"),
        pytest.param(Counting(), None, id="object with state"),
        pytest.param("numeric", 0.0, id="of the library"),
    ]


@pytest.mark.parametrize(("reward", "mean"), rewards())
@pytest.mark.cluster
def test_a_reward_is_anything_that_can_be_called(
    reward: Any, mean: float | None, runner: Runner, tmp_path: Path, this_process: None
) -> None:
    rows = [{"prompt": "What is 1 plus 1?", "answer": "2"}] * 2
    run = grpo(runner, tmp_path, reward=reward, data=rows, steps=1).train()
    (record,) = run.metrics
    if mean is None:
        assert record["reward/mean"] > 1.0  # it counted
        assert max(sample["reward_parts"]["calls"] for sample in run.samples()) > 1.0
    else:
        assert record["reward/mean"] == mean


def test_a_reward_that_cannot_travel_is_refused_with_a_way_out(runner: Runner, tmp_path: Path) -> None:
    lock = threading.Lock()

    def guarded(response: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(HrlError, match=r"guarded.*can't be sent to the processes.*inside the function"):
        grpo(runner, tmp_path, reward=guarded).train()
    assert not (tmp_path / "metrics.jsonl").exists()


# ---------------------------------------------------------------------- nothing but the session's own is unpickled


class Bomb:
    """Raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.cluster
def test_rows_and_files_carry_no_pickles(runner: Runner, tmp_path: Path, this_process: None) -> None:
    smuggled = base64.b64encode(pickle.dumps(Bomb())).decode()
    rows = [
        {**row, "pickled": smuggled, "raw": pickle.dumps(Bomb()), "__reduce__": ["os.system", "false"]} for row in ROWS
    ]
    run = grpo(
        runner, tmp_path / "run", data=rows, steps=1, reward=lambda response, pickled, **_: len(pickled) / 1e3
    ).train()
    assert run.metrics[0]["reward/mean"] == pytest.approx(len(smuggled) / 1e3)
    for text in (
        "trainer: {project_name: !!python/object/apply:os.getcwd []}\n",
        f"reward: {{custom_reward_function: {{kind: PickledFunction, pickled: {smuggled}}}}}\n",
    ):
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError):
            hrl.GRPO(data=ROWS, config=file).resolved()
        with pytest.raises(ConfigError):
            compose_kind(PPO, ["--config-path", str(tmp_path), "--config-name", "mine", "data.train_files=[a.jsonl]"])
