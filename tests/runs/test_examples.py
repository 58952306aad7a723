"""The examples, run for two steps as their first lines say, on a tiny model in this process."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hrl.algos.policy_losses import POLICY_LOSSES
from hrl.api.trainers import Trainer
from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS as RUN_KINDS
from hrl.report.run_folder import read_jsonl
from hrl.trainer import run as trainer_run
from hrl.trainer.kinds import KINDS
from tests.runs.in_process import in_process, in_this_process, run_configured
from tests.runs.runner import ROOT, Runner

pytestmark = [pytest.mark.engine]
EXAMPLES = ROOT / "examples"
PYTHON = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "own_worker")
YAML = sorted(EXAMPLES.glob("*.yaml"))
KIND_OF = {"judge": "rm"}
"""Kinds of run of the YAML files; the others are of a policy."""


@pytest.fixture(scope="module", autouse=True)
def this_process() -> Iterator[None]:
    with in_process():
        yield


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
        "data.max_prompt_length=192",
        "data.max_response_length=8",
    ]


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
        Trainer, "_given_arguments", lambda self: [*rows, *arguments(self), *made_small(self.kind, runner, tmp_path)]
    )


@pytest.mark.usefixtures("own_registries", "small")
@pytest.mark.parametrize("example", PYTHON, ids=lambda path: path.stem)
def test_a_script_is_short_and_trains(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(example.read_text().splitlines()) < 40
    runpy.run_path(str(example), run_name="__main__")
    record = read_jsonl(tmp_path / "metrics.jsonl")[-1]
    assert record["step"] == 2 and record["actor/grad_norm"] >= 0
    expected = {
        "brevity": "reward/brevity_discount",
        "own_loss": "actor/outside",
        "reward_parts": "reward/brief/mean",
        "ppo_with_reward_model": "critic/vf_loss",
    }
    assert expected.get(example.stem, "reward/mean") in record
    assert capsys.readouterr().out.splitlines()[-1]  # what the run came to


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
