"""docs/configuration.md is what the schema says."""

from pathlib import Path

from hrl.config.ppo import PPOTrainerConfig
from hrl.config.reference import render, type_in_words
from hrl.config.section import leaves

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date():
    command = "python -m hrl.config.reference > docs/configuration.md"
    assert PAGE.read_text() == render(), f"write it again: {command}"


def test_types_are_said_in_words():
    said = {
        "data.train_batch_size": "int > 0",
        "data.val_batch_size": "int > 0 or null",
        "data.truncation": "`error`, `left`, `right`",
        "data.train_files": "list of str",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "float > 0.0 ≤ 1.0",
        "actor_rollout_ref.rollout.enable_chunked_prefill": "bool or null",
        "actor_rollout_ref.actor.clip_ratio_c": "float > 1.0",
        "trainer.resource_pools": "mapping to list of int > 0",
        "trainer.ray_kwargs": "mapping",
    }
    assert {key: type_in_words(leaves(PPOTrainerConfig)[key].field) for key in said} == said
