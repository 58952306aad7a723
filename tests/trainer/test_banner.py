"""What a run shows of itself before it starts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hrl.config import compose_cli
from hrl.config.arithmetic import Fact
from hrl.config.compose import compose_kind
from hrl.config.outline import RunConfiguration
from hrl.config.run_kind import DPO
from hrl.preflight.findings import Findings
from hrl.trainer.banner import run_facts, title
from hrl.trainer.run import _show

LOOKED = [
    Fact("model", "some/model: llama, 8,192 positions"),
    Fact("rows", "65 rows of rows.jsonl (70 rows read, 0 bad, 5 too long, 0 truncated, 65 kept)"),
    Fact("reward", "compute_score of reward.py"),
    Fact("placement", "global: 1 process with actor_rollout"),
    Fact("devices", "1 process on CPU of this machine"),
    Fact("memory", "135 million parameters; this machine: at most 10.2 of 23.5 GiB (actor update)"),
    Fact("run folder", "/runs/sums, new"),
]


def ready() -> SimpleNamespace:
    return SimpleNamespace(findings=Findings(facts=LOOKED), train_dataset=range(65))


def test_the_banner_has_model_data_step_engine_devices_folder_and_what_to_type_next() -> None:
    config = compose_cli(["trainer.default_local_dir=/runs/sums", "trainer.save_freq=5"])
    shown = dict(run_facts(config, ready()))
    assert list(shown) == [
        "model",
        "rows",
        "reward",
        "one step",
        "actor update",
        "run",
        "engines",
        "devices",
        "run folder",
        "see more",
    ]
    assert shown["model"] == "some/model: llama, 8,192 positions, 135 million parameters"
    assert "5 too long" in shown["rows"]
    assert shown["one step"].startswith("8 prompts × 8 samples = 64 sequences")
    assert "32 steps" in shown["run"] and "1 vllm engine" in shown["engines"]
    assert "hrl rollouts /runs/sums" in shown["see more"]
    assert "the same command continues after the last checkpoint" in shown["see more"]


def test_a_run_that_samples_nothing_names_no_command_for_samples() -> None:
    shown = dict(run_facts(compose_kind(DPO, ["trainer.default_local_dir=/runs/pairs"]), ready()))
    assert "hrl watch /runs/pairs" in shown["see more"] and "hrl rollouts" not in shown["see more"]


def test_a_run_without_checkpoints_does_not_promise_to_continue() -> None:
    shown = dict(run_facts(compose_cli(["trainer.save_freq=-1"]), ready()))
    assert "continues" not in shown["see more"]


@pytest.mark.parametrize(
    ("kind", "config", "method"),
    [
        ("ppo", compose_cli(["trainer.experiment_name=sums"]), "grpo"),
        ("dpo", compose_kind(DPO, ["data.train_files=a.jsonl", "trainer.experiment_name=sums"]), "dpo"),
    ],
)
def test_the_title_has_the_method_and_the_name_of_the_run(kind: str, config: object, method: str) -> None:
    assert title(config, kind).split(" · ")[1:] == [method, "sums"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "compose", "key"),
    [
        ("ppo", compose_cli, "actor_rollout_ref.model.trust_remote_code"),
        ("dpo", lambda given: compose_kind(DPO, ["data.train_files=a.jsonl", *given]), "model.trust_remote_code"),
    ],
)
def test_the_start_tells_that_code_of_a_model_will_run_and_that_is_off_otherwise(
    kind: str, compose: Callable[[list[str]], RunConfiguration], key: str
) -> None:
    shown: list[str] = []
    display: Any = SimpleNamespace(banner=lambda heading, _: shown.append(heading), note=shown.append)
    _show(display, compose([]), cast(Any, ready()), kind)
    assert "trust_remote_code" not in " ".join(shown)
    shown.clear()
    config = compose([f"{key}=true"])
    _show(display, config, cast(Any, ready()), kind)
    assert shown[0] == title(config, kind)
    assert f"warning: {key}=true: code from the model's folder runs with your rights." in shown[1:]
