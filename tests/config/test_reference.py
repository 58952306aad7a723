"""The pages of keys are what the schemas say."""

import subprocess
import sys
from pathlib import Path

import pytest

from hrl.config.ppo import PPOTrainerConfig
from hrl.config.reference import type_in_words
from hrl.config.section import leaves
from hrl.config.spellings import PPO_SPELLINGS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "argument"), [("configuration", []), ("configuration-offline", ["offline"])])
def test_the_page_is_up_to_date(page, argument):
    command = [sys.executable, "-m", "hrl.config.reference", *argument]  # a process that has registered no name
    written = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    assert (DOCS / f"{page}.md").read_text() == written, f"{' '.join(command[1:])} > docs/{page}.md"


def test_every_key_is_named_in_full():
    page = (DOCS / "configuration.md").read_text()
    assert [key for key in (*leaves(PPOTrainerConfig), *PPO_SPELLINGS.outside) if f"`{key}`" not in page] == []


def test_types_are_said_in_words():
    said = {
        "data.train_batch_size": "int > 0",
        "trainer.cpu_threads_per_worker": "int > 0 or null",
        "data.truncation": "`error`, `left`, `right`",
        "data.train_files": "list of str or mapping",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "float > 0 ≤ 1",
        "trainer.profile": "list of int > 0",
        "actor_rollout_ref.actor.clip_ratio_c": "float > 1",
        "trainer.resource_pools": "mapping to list of int > 0",
        "trainer.ray_kwargs": "mapping",
    }
    assert {key: type_in_words(leaves(PPOTrainerConfig)[key].field) for key in said} == said
