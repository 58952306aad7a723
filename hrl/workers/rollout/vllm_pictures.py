"""Pictures for vLLM: prompts with pixels that were made here, so that vLLM's own processor has nothing to do.

vLLM would process a picture again, with a processor that needs torchvision and may place it differently. It also takes
a request in the form that its processor makes: tokens, pixels, where the pictures stand, and what tells one from
another, by which it keeps the tower's results and the cache of a prompt's beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hrl.models.pictures import PictureProcessor
from hrl.models.source import read_object
from hrl.pictures import Picture

_MOST_PICTURES = 999
"""Of a prompt: what limits them is its length."""


def has_tower(folder: Path) -> bool:
    """Return whether a model is one that hrl can show pictures to, by its folder's `config.json`; false without one."""
    config = folder / "config.json"
    return config.is_file() and {"vision_config", "image_token_id"} <= read_object(config).keys()


def picture_options(shows_pictures: bool) -> dict[str, Any]:
    """Return arguments of `AsyncEngineArgs` for a model that sees.

    Args:
        shows_pictures: Whether prompts have pictures; else the tower is not even run for a measurement.
    """
    return {
        "limit_mm_per_prompt": {"image": _MOST_PICTURES if shows_pictures else 0, "video": 0},
        "skip_mm_profiling": True,
        # vLLM makes a processor of its own at the start, and never asks it; it wants a tokenizer.
        "skip_tokenizer_init": not shows_pictures,
        # A cache of what vLLM's processor makes, which makes nothing.
        "mm_processor_cache_gb": 0,
    }


def input_with_pictures(prompt_ids: list[int], pictures: Sequence[Picture], processor: PictureProcessor) -> Any:
    """Return a prompt that shows pictures, as vLLM's engine takes it.

    Args:
        prompt_ids: With as many tokens for each picture as it takes.
        pictures: In their order.
        processor: Of the model's folder.
    """
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    pixels = [processor.pixels(picture) for picture in pictures]
    grids = torch.tensor([each.grid for each in pixels])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    of_prompt = {"pixel_values": torch.cat([each.patches for each in pixels]), "image_grid_thw": grids}
    return mm_input(
        prompt_ids,
        MultiModalKwargsItems.from_hf_inputs(BatchFeature(of_prompt), fields),
        {"image": [picture.digest for picture in pictures]},
        {"image": [PlaceholderRange(offset=each.start, length=each.length) for each in pictures]},
    )
