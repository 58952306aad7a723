"""The configuration that vLLM makes of a model's folder and overrides is the trainer's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hrl.models.hf_config import load_config
from hrl.models.tokenizer import TokenIds
from hrl.workers.rollout.vllm_engine import engine_args
from tests.models.tiny import save_qwen2
from tests.models.tiny_pictures import save_vl
from tests.workers.rollout.settings import engine_setup

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_towers_of_vllm_take_pixels_as_they_were_made(tmp_path):
    """They scale raw ones by default, and hrl's are scaled: log-probs were off by 3.6."""
    setup = engine_setup("vllm", save_vl(tmp_path), TokenIds(0, (2,), 272), 64)
    args = engine_args(replace(setup, model=replace(setup.model, shows_pictures=True)))
    assert args["mm_device_do_normalize"] is False


@pytest.mark.parametrize(
    "override",
    [
        {"rope_scaling": YARN, "max_position_embeddings": 128},
        {"rope_scaling": YARN | {"type": "yarn"}, "rope_theta": 5e5, "max_position_embeddings": 128},
        {"rope_theta": 5e5, "sliding_window": 8},
    ],
)
def test_vllm_and_trainer_see_the_same_configuration(tmp_path, override):
    from vllm.engine.arg_utils import AsyncEngineArgs

    folder = save_qwen2(tmp_path)
    setup = engine_setup("vllm", folder, TokenIds(0, (1,), 128), 64, num_threads=1, override_config=override)
    theirs = AsyncEngineArgs(**engine_args(setup)).create_model_config().hf_config.to_dict()
    ours = load_config(folder, override, trust_remote_code=False).to_dict()
    different = {key for key in ours if ours[key] != theirs.get(key)}
    assert different <= {"architectures", "dtype", "transformers_version", "_name_or_path"}
    assert theirs["head_dtype"] == "float32"


@pytest.mark.parametrize("packs_rows", [True, False])
def test_on_a_cpu_no_beginning_is_shared_of_a_model_that_carries_a_state(tmp_path, packs_rows):
    """vLLM keeps states at the ends of pieces of prompts, and on a CPU takes a prompt in one piece."""
    setup = engine_setup("vllm", save_qwen2(tmp_path), TokenIds(0, (1,), 61), 64, enable_prefix_caching=True)
    args = engine_args(replace(setup, model=replace(setup.model, packs_rows=packs_rows)))
    assert args["enable_prefix_caching"] == packs_rows and not args["enable_chunked_prefill"]
