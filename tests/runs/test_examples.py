"""The examples, run for two steps as their first lines say, on a tiny model in this process."""

from __future__ import annotations

import contextlib
import runpy
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hrl.algos.advantages import ADVANTAGE_ESTIMATORS
from hrl.algos.policy_losses import POLICY_LOSSES
from hrl.algos.reward_placement import place_scores
from hrl.api.trainers import Trainer
from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS as RUN_KINDS
from hrl.config.section import flatten
from hrl.data.tasks import bundled_rows
from hrl.protocol import DataProto
from hrl.report.run_folder import read_jsonl
from hrl.trainer import run as trainer_run
from hrl.trainer.kinds import KINDS
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs.in_process import in_this_process, run_configured
from tests.runs.runner import ROOT, Runner

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("this_process")]
EXAMPLES = ROOT / "examples"
APART = ("own_worker", "shapes", "tiny_vl")
"""Scripts with a test of their own: no run at all, and what trains a model that it has made."""
PYTHON = sorted(path for path in EXAMPLES.glob("*.py") if path.stem not in APART)
YAML = sorted(EXAMPLES.glob("*.yaml"))
KIND_OF = {"judge": "rm"}
"""Kinds of run of the YAML files; the others are of a policy."""
IN_PYTHON_ONLY = {"brevity", "calculator", "maze", "own_worker"}
"""A class of the trainer or a worker, which no key names, and rows that no file holds; docs/examples.md says so."""
OF_OBJECTS = {
    "arithmetic": {"data.train_files", "data.val_files", "reward.functions", "trainer.total_epochs"},
    "reward_parts": {"reward.functions"},
    "ppo_with_reward_model": {"reward.reward_model.model_path"},
    "own_loss": {"actor_rollout_ref.actor.policy_loss.loss_mode"},
    "rank_advantage": {"algorithm.adv_estimator"},
}
"""Keys of what a script has as objects (or, of the reward model, in another folder) and its YAML file names by file;
for rows given as objects, as many epochs are allowed as the steps need."""


def made_small(kind: str, runner: Runner, folder: Path) -> list[str]:
    """Two steps of a tiny model."""
    of_every_kind = ["trainer.device=cpu", "trainer.total_training_steps=2", "data.val_max_samples=2"]
    if kind != "ppo":
        batch = ["data.train_batch_size=4", "trainer.save_freq=-1"]
        return [*of_every_kind, *batch, f"model.path={runner.model}", f"trainer.default_local_dir={folder / kind}"]
    return [
        *of_every_kind,
        f"trainer.default_local_dir={folder}",
        f"actor_rollout_ref.model.path={runner.model}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "data.max_prompt_length=192",
        "data.max_response_length=8",
    ]


@pytest.fixture
def half_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more for every second sample of a prompt: a model with random weights is never right, and learns nothing."""
    compute_reward = RayPPOTrainer.compute_reward

    def scored(self: RayPPOTrainer, batch: DataProto, metrics: Any) -> DataProto:
        batch = compute_reward(self, batch, metrics)
        right = torch.tensor([float(number % 2) for number in batch.non_tensor_batch["sample_index"]])
        added = place_scores(right, batch.batch["response_mask"])
        batch.batch["token_level_scores"] = batch.batch["token_level_scores"] + added
        return batch

    monkeypatch.setattr(RayPPOTrainer, "compute_reward", scored)


@pytest.fixture
def small(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers in Python make two steps of a tiny model, here."""
    arguments, running = Trainer._given_arguments, trainer_run.running
    rows = ["data.train_files=bundled:addition/train", "data.val_files=bundled:addition/val"]

    def here(kind: str, config: Any, *args: Any, trainer_cls: Any = None, **named: Any) -> Any:
        cls = in_this_process(trainer_cls or KINDS[kind].trainer(config))
        return running(kind, config, *args, trainer_cls=cls, **named)

    monkeypatch.setattr(trainer_run, "running", here)
    monkeypatch.setattr(
        Trainer,
        "_given_arguments",
        lambda self: [
            *rows[: 0 if self.kind == "sft" else 2],
            *arguments(self),
            *made_small(self.kind, runner, tmp_path),
        ],
    )


@pytest.mark.usefixtures("own_registries", "small", "half_right")
@pytest.mark.parametrize("example", PYTHON, ids=lambda path: path.stem)
def test_a_script_is_short_and_trains(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(example.read_text().splitlines()) < 40
    runpy.run_path(str(example), run_name="__main__")
    records = read_jsonl(tmp_path / "metrics.jsonl")
    steps = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["actor/grad_norm"] > 0 for record in steps)  # the policy moves
    of_its_own = {
        "brevity": "reward/brevity_discount",
        "reward_parts": "reward/brief/mean",
        "ppo_with_reward_model": "critic/vf_loss",
    }
    assert all(record[of_its_own.get(example.stem, "actor/grad_norm")] > 0 for record in steps)
    assert example.stem != "own_loss" or all(0 <= record["actor/outside"] < 1 for record in steps)
    assert capsys.readouterr().out.splitlines()[-1]  # what the run came to


def test_a_model_that_sees_is_made_taught_and_shown_other_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, running = Trainer._given_arguments, trainer_run.running
    rows = ["data.train_files=bundled:shapes/train?size=8&side=64", "data.train_batch_size=4"]

    def here(kind: str, config: Any, *args: Any, trainer_cls: Any = None, **named: Any) -> Any:
        return running(kind, config, *args, trainer_cls=in_this_process(KINDS[kind].trainer(config)), **named)

    def few(self: Trainer) -> list[str]:
        folder = f"trainer.default_local_dir={tmp_path / self.kind}"
        held_out = ["data.val_files=bundled:shapes/val?size=4&side=64"] if self.kind == "ppo" else []
        return [*arguments(self), *rows, *held_out, folder, "trainer.total_training_steps=2", "trainer.device=cpu"]

    def some_rows(name: str) -> list[Any]:
        return list(islice(bundled_rows(name), 4))

    monkeypatch.setattr(trainer_run, "running", here)
    monkeypatch.setattr(Trainer, "_given_arguments", few)
    monkeypatch.setattr("hrl.data.tasks.bundled_rows", some_rows)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    assert len((EXAMPLES / "shapes.py").read_text().splitlines()) < 40
    script = runpy.run_path(str(EXAMPLES / "shapes.py"), run_name="__main__")
    names = ("own ", "blank ", "of another row ")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(names)]
    assert [line.rstrip("0123456789.") for line in lines] == list(names)
    assert all(0 <= float(line.rpartition(" ")[2]) <= 1 for line in lines)
    assert [record["step"] for record in read_jsonl(tmp_path / "ppo" / "metrics.jsonl")] == [0, 1, 2]
    given = some_rows("shapes/val?side=64")
    (_, own), (_, blank), (_, others) = script["with_other_pictures"](given)
    assert own == given and [row["prompt"] for row in others] == [row["prompt"] for row in given]
    assert [row["images"] for row in others] == [given[number]["images"] for number in (3, 0, 1, 2)]
    assert {extreme for row in blank for extreme in row["images"][0].getextrema()} == {(255, 255)}


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Trainer]:
    """The trainers whose `train()` was called; none trains."""
    trainers: list[Trainer] = []

    def describe(self: Trainer) -> Any:
        trainers.append(self)
        return SimpleNamespace(model_path="model", report="", metrics=[{"val/python/mean@1": 0.0}] * 2)

    monkeypatch.setattr(Trainer, "train", describe)
    return trainers


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize("name", sorted({path.stem for path in PYTHON} - IN_PYTHON_ONLY))
def test_script_and_yaml_are_the_same_run(name: str, described: list[Trainer]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    given: dict[Trainer, dict[str, Any]] = {
        trainer: dict(flatten(trainer.resolved().model_dump(), RUN_KINDS[trainer.kind].schema)) for trainer in described
    }
    for family, own in ((ADVANTAGE_ESTIMATORS, "group_rank"), (POLICY_LOSSES, "inside_only")):
        if own in family:  # the YAML file's own way to it is asked for
            del family[own]
    for trainer, of_the_script in given.items():
        kind = RUN_KINDS[trainer.kind]
        experiment = of_the_script["trainer.experiment_name"]
        composed = compose_kind(kind, ["--config-path", str(EXAMPLES), "--config-name", experiment])
        of_the_file = dict(flatten(composed.model_dump(), kind.schema))
        differ = {key for key in of_the_file if of_the_file[key] != of_the_script.get(key)}
        assert differ == OF_OBJECTS.get(experiment, set())
    if name == "arithmetic":
        (trainer,) = given
        for key, rows in (("sums", trainer._given().train_rows), ("sums_held_out", trainer._given().val_rows)):
            assert read_jsonl(EXAMPLES / f"{key}.jsonl") == list(rows)


def test_every_example_has_both_forms() -> None:
    assert {path.stem for path in PYTHON} - IN_PYTHON_ONLY == {path.stem for path in YAML} - {"judge"}


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize("example", YAML, ids=lambda path: path.stem)
def test_a_yaml_file_is_a_run(runner: Runner, tmp_path: Path, example: Path) -> None:
    kind = KIND_OF.get(example.stem, "ppo")
    first = ["--config-path", str(EXAMPLES), "--config-name", example.stem]
    of_the_example = compose_kind(RUN_KINDS[kind], first)
    assert of_the_example.trainer.experiment_name == example.stem
    small = made_small(kind, runner, tmp_path)
    if example.stem == "ppo_with_reward_model":
        small += [f"reward.reward_model.model_path={runner.reward_model}"]
    run_configured(kind, compose_kind(RUN_KINDS[kind], [*first, *small]))
    folder = tmp_path if kind == "ppo" else tmp_path / kind
    assert read_jsonl(folder / "metrics.jsonl")[-1]["step"] == 2


def test_every_script_says_how_it_is_run() -> None:
    for example in EXAMPLES.glob("*.py"):
        assert f"`python examples/{example.name}`" in example.read_text()
    for example in YAML:
        command = f"hrl train {'rm' if example.stem == 'judge' else '('}".removesuffix(" (")
        assert command in example.read_text() and f"--config-name {example.stem}" in example.read_text()


@pytest.mark.usefixtures("ray_session")
def test_a_worker_of_ones_own_is_called_on_two_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hrl.single_controller.ray_cluster.ray_cluster", contextlib.nullcontext)
    runpy.run_path(str(EXAMPLES / "own_worker.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "π is about 3.14" in said
    assert "distances: [0.0, 5.0, 1.0]" in said


@pytest.mark.usefixtures("own_registries")
def test_a_loss_of_ones_own_goes_to_the_ranks_with_the_runtime() -> None:
    import cloudpickle

    from hrl.algos.policy_losses import register_policy_loss

    def nothing(inp: Any, config: Any) -> Any:
        return inp

    assert POLICY_LOSSES.added() == {}
    register_policy_loss("nothing", zero_at_zero_advantage=True)(nothing)
    sent = cloudpickle.dumps(POLICY_LOSSES.added())
    del POLICY_LOSSES["nothing"]
    POLICY_LOSSES.take(cloudpickle.loads(sent))
    assert POLICY_LOSSES["nothing"]("columns", None) == "columns"
    assert POLICY_LOSSES.table["nothing"].zero_at_zero_advantage
