"""Tiny models that see pictures, each with a real tokenizer, chat template and image processor, made here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
#: As Qwen2-VL writes a chat, its system message left out.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Whose rows are packed. Those of "qwen3_5" are padded: its layers carry states."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, after the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *letters))}
    inner = Tokenizer(models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    made.chat_template = TEMPLATE
    return made


def config_of(family: str = "qwen2_5_vl", **text: Any) -> Any:
    """A configuration of two layers and two blocks of the tower."""
    ids = {
        f"{name}_token_id": SPECIAL.index(token)
        for name, token in (
            *(("vision_start", "<|vision_start|>"), ("vision_end", "<|vision_end|>")),
            *(("image", "<|image_pad|>"), ("video", "<|video_pad|>")),
        )
    }
    of_text = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    } | text
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64}
    vision |= {"initializer_range": 0.15}
    if family == "qwen2_vl":  # the width of its tower is `embed_dim`, and what the tower gives is `hidden_size` wide
        of_tower = {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 64, "initializer_range": 0.15}
        return Qwen2VLConfig(text_config=of_text, vision_config=of_tower, tie_word_embeddings=False, **ids)
    if family == "qwen2_5_vl":
        vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=of_text, vision_config=vision, tie_word_embeddings=False, **ids)
    of_text["head_dim"] = 32
    of_text["rope_parameters"] |= {"mrope_interleaved": True}
    if family == "qwen3_5":  # three layers of linear attention and one of full, and a tower that is left at its top
        of_text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        widths = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
        of_text |= {"num_hidden_layers": 4, **heads, **widths}
        vision |= {"patch_size": 14, "num_position_embeddings": 64}
        return Qwen3_5Config(text_config=of_text, vision_config=vision, tie_word_embeddings=False, **ids)
    vision |= {"patch_size": 14, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return Qwen3VLConfig(text_config=of_text, vision_config=vision, tie_word_embeddings=False, **ids)


def save_vl(folder: Path, family: str = "qwen2_5_vl", *, seed: int = 5, dtype: torch.dtype = torch.float32) -> Path:
    """A random model with tokenizer and image processor, which makes 4 to 16 tokens of a picture."""
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config_of(family)).to(dtype).save_pretrained(folder)
    save_processors(folder, family)
    return folder


def save_processors(folder: Path, family: str) -> None:
    """What such a model's folder has beside config and weights."""
    tokenizer().save_pretrained(folder)
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    Qwen2VLImageProcessorPil(size=size, patch_size=14).save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video_settings(family)))


def video_settings(family: str) -> dict[str, Any]:
    """How a video is read: each frame as large as a picture may be; of Qwen3-VL all together as large as six are."""
    settings = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "resample": 3}
    settings |= {"image_std": [0.25] * 3, "rescale_factor": 1 / 255, "fps": 2, "min_frames": 4, "max_frames": 16}
    if family in ("qwen3_vl", "qwen3_5"):
        size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 6 * 112 * 112}
        return settings | {"video_processor_type": "Qwen3VLVideoProcessor", "size": size}
    return settings | {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
    }


def frames(number: int = 5, *, seed: int = 0, width: int = 60, height: int = 56) -> list[Image.Image]:
    """A video of noise."""
    return [picture(seed + 100 * frame, width, height) for frame in range(number)]


def picture(seed: int = 0, width: int = 60, height: int = 56) -> Image.Image:
    """A picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
