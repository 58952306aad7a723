"""Pictures for vLLM: prompts with pixels that were made here, so that vLLM's own processor has nothing to do.

vLLM would process a picture again, with a processor that needs torchvision and may place it differently. It also takes
a request in the form that its processor makes: tokens, pixels, where the pictures stand, and what tells one from
another, by which it keeps the tower's results and the cache of a prompt's beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
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
    from vllm.engine.arg_utils import AsyncEngineArgs

    options: dict[str, Any] = {
        "limit_mm_per_prompt": dict.fromkeys(("image", "video"), _MOST_PICTURES if shows_pictures else 0),
        "skip_mm_profiling": True,
        # vLLM makes a processor of its own at the start, and never asks it; it wants a tokenizer.
        "skip_tokenizer_init": not shows_pictures,
        # A cache of what vLLM's processor makes, which makes nothing.
        "mm_processor_cache_gb": 0,
    }
    # Newer versions' towers take raw pixels and scale them, unless told that they were scaled here.
    if "mm_device_do_normalize" in {field.name for field in fields(AsyncEngineArgs)}:
        options["mm_device_do_normalize"] = False
    return options


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

    layout, of_prompt, digests, places = dict[str, Any](), dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for kind, pixel_values, grid_thw in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        shown = [picture for picture in pictures if _kind(picture) == kind]
        if not shown:
            continue
        pixels = [processor.pixels(picture) for picture in shown]
        grids = torch.tensor([each.grid for each in pixels])
        layout |= {
            pixel_values: MultiModalFieldConfig.flat_from_sizes(kind, grids.prod(-1)),
            grid_thw: MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
        }
        of_prompt |= {pixel_values: torch.cat([each.patches for each in pixels]), grid_thw: grids}
        if seconds := [each.clip.seconds for each in shown if kind == "video" and each.clip is not None]:
            layout["second_per_grid_ts"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
            of_prompt["second_per_grid_ts"] = torch.tensor(seconds)
        digests[kind] = [picture.digest for picture in shown]
        places[kind] = [PlaceholderRange(offset=each.start, length=each.length) for each in shown]
    return mm_input(prompt_ids, MultiModalKwargsItems.from_hf_inputs(BatchFeature(of_prompt), layout), digests, places)


def _kind(picture: Picture) -> str:
    """Return what vLLM is told that a picture is: a video's moment in a place of its own has an image's positions."""
    return "image" if picture.clip is None or picture.clip.grid[0] == 1 else "video"
