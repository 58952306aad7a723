"""The sizes of `configs/size`: each composes with every recipe, fits its cards, and its page says what it takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.rules import warnings
from hrl.config.run_kind import PPO, config_folder
from hrl.config.section import flatten
from hrl.preflight import memory_look
from hrl.preflight.findings import Findings
from hrl.preflight.model_look import look_at_heads, look_at_positions
from tests.plan.models import NAMED
from tests.plan.sizes import RECIPE, ROWS, SIZES, capacity_of, configuration, folder_of_model, page, size_of

#: Bytes of the machine that a size is for: a desktop, a cloud's machine with one card; others have eight.
HOSTS = {"7b_adapter_1x24gb": 64e9, "7b_1x80gb": 256e9}
PAGE = Path(__file__).parents[2] / "docs" / "sizes.md"


def keys_of(group):
    files = (config_folder() / group).glob("*.yaml")
    return {key for file in files for key, _ in flatten(OmegaConf.to_container(OmegaConf.load(file)), PPOTrainerConfig)}


def test_every_file_is_a_size_and_has_a_recorded_model():
    assert sorted(path.stem for path in (config_folder() / "size").glob("*.yaml")) == sorted(SIZES)
    assert {configuration(size).actor_rollout_ref.model.path for size in SIZES} == NAMED.keys()


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == "".join(page()), "python -m tests.plan.sizes > docs/sizes.md"


@pytest.mark.parametrize("size", SIZES)
def test_a_size_goes_with_the_recipe_whose_rows_are_longest(size):
    config = compose_kind(PPO, [f"size={size}", "recipe=online_dpo", ROWS])  # a prompt with both its answers
    assert config.trainer.experiment_name == "online_dpo"


def test_no_key_is_set_by_a_size_and_by_a_recipe():
    assert keys_of("size") & keys_of("recipe") == set()


@pytest.mark.parametrize("size", SIZES)
def test_check_says_no_to_nothing(size, monkeypatch):
    monkeypatch.setattr(memory_look, "device_and_capacity", lambda trainer: ("cuda", capacity_of(size)))
    monkeypatch.setattr(memory_look, "memory_here", lambda: HOSTS.get(size, 1e12))
    config = compose_kind(PPO, [f"size={size}", ROWS, RECIPE])
    model = config.actor_rollout_ref.model
    monkeypatch.setattr(memory_look, "footprint", lambda source: size_of(model.path, model.lora_rank))  # takes seconds
    findings, outline = Findings(), outline_of(config)
    folders = {role: folder_of_model(model.path) for role, model in outline.models.items()}
    memory_look.look_at_memory(findings, config, outline, folders)
    look_at_heads(findings, outline, folders)
    look_at_positions(findings, outline, outline.models["actor"], folders["actor"])
    assert findings.problems == [] and findings.notes == [] and findings.unchecked == []
    assert warnings(config) == []
    cards = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert size.split("_")[-1].startswith(f"{cards}x")


@pytest.mark.parametrize(
    ("host", "spread", "key", "is_offered"),
    [
        (2e12, 2, "offload_policy", True),
        (100e9, 2, "offload_policy", False),  # 8 copies of moments and weights are more than that
        (2e12, 2, "tensor_model_parallel_size", True),
        (2e12, 4, "tensor_model_parallel_size", False),  # 28 heads
    ],
)
def test_a_key_that_would_lower_a_peak_is_offered_where_the_run_would_start(monkeypatch, host, spread, key, is_offered):
    monkeypatch.setattr(memory_look, "device_and_capacity", lambda trainer: ("cuda", 80e9))
    monkeypatch.setattr(memory_look, "memory_here", lambda: host)
    model = "Qwen/Qwen2.5-7B-Instruct"
    monkeypatch.setattr(memory_look, "footprint", lambda source: size_of(model, 0))
    engine = f"actor_rollout_ref.rollout.tensor_model_parallel_size={spread}"
    cards = ("trainer.n_gpus_per_node=8", "data.train_batch_size=8", engine)
    config = compose_kind(PPO, [f"actor_rollout_ref.model.path={model}", ROWS, *cards])
    findings = Findings()
    memory_look.look_at_memory(findings, config, outline_of(config), {"actor": folder_of_model(model)})
    offered = {saving["key"].rpartition(".")[2] for table in findings.memory for saving in table["savings"]}
    assert (key in offered) == is_offered, offered


@pytest.mark.parametrize(("used", "fits"), [(3e9, True), (4e9, False)])
def test_a_card_of_which_others_hold_a_part_is_told(monkeypatch, used, fits):
    """Of two cards with 24 GB, one shows a desktop: the size takes 0.85 of each for its engine."""
    size, model = "7b_adapter_1x24gb", "Qwen/Qwen2.5-7B-Instruct"
    monkeypatch.setattr(memory_look, "device_and_capacity", lambda trainer: ("cuda", 24e9))
    monkeypatch.setattr(memory_look, "gpus_here", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=24e9))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: index * used)
    monkeypatch.setattr(memory_look, "footprint", lambda source: size_of(model, 16))
    findings, config = Findings(), compose_kind(PPO, [f"size={size}", ROWS])
    memory_look.look_at_memory(findings, config, outline_of(config), {"actor": folder_of_model(model)})
    told = [problem for problem in findings.problems if "vLLM would not start" in problem.what]
    assert (not told) == fits
    if told:
        assert "of card 1, of which 18.6 of 22.4 are free" in told[0].what
        assert told[0].hint.startswith("Lower it below 0.83,") and told[0].key.endswith("gpu_memory_utilization")


def test_a_smaller_card_does_not_fit(monkeypatch):
    monkeypatch.setattr(memory_look, "device_and_capacity", lambda trainer: ("cuda", 40e9))
    findings, config = Findings(), compose_kind(PPO, ["size=7b_1x80gb", ROWS])
    folders = {"actor": folder_of_model("Qwen/Qwen2.5-7B-Instruct")}
    memory_look.look_at_memory(findings, config, outline_of(config), folders)
    assert "does not fit" in findings.problems[0].what
