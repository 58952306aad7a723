"""Check, before anything of a run starts, that a model family sees the same packed and alone.

`hrl.models.probe` compares what a family computes of text. Here a small cut of it, its tower cut to two blocks too,
reads rows with pictures: packed, with each picture computed once and positions of three axes, and by the model's own
forward, one row at a time. Log-probs and the gradients of all parameters, the tower's included, have to agree.
"""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hrl.models.head import backbone_of
from hrl.models.hf_config import load_config
from hrl.models.loading import ModelSource, prepare
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.packed_model import PackedCausalLM, TokenRows, pack_micro_batch
from hrl.models.pictures import PictureProcessor, Sight
from hrl.models.probe import (
    FAILURES,
    GRADIENT_TOLERANCE,
    LOG_PROB_TOLERANCE,
    Family,
    ProbeError,
    first_that_runs,
    unnoticed,
)
from hrl.pictures import Picture, digest_of

_CPU = torch.device("cpu")
_BLOCKS, _HEADS, _FEED_FORWARD = 2, 2, 32
_SIDES = ((64, 64), (64, 96))
"""Width and height of the pictures: the second has another number of rows than columns."""
_LONGEST = 4096
"""Tokens of a picture beyond which the comparison would take minutes."""
_TEXT, _ANSWER = (7, 5), (6, 4)


def require_sight(source: ModelSource) -> float:
    """Refuse a model whose pictures packed training would compute wrongly; return the largest difference of a log-prob.

    Args:
        source: The model's folder and its overrides.

    Raises:
        ProbeError: Names family and difference.
        PictureError: The folder's pictures are not understood.
    """
    return _require_sight(
        source.path, json.dumps(dict(source.override_config), sort_keys=True), source.trust_remote_code
    )


@cache
def _require_sight(path: str, overrides: str, trust_remote_code: bool) -> float:
    config = load_config(path, json.loads(overrides), trust_remote_code=trust_remote_code)
    processor = PictureProcessor(path, trust_remote_code=trust_remote_code)
    with unnoticed():
        family = Family(AutoModelForCausalLM, _LONGEST, trust_remote_code)
        try:
            cut, _ = first_that_runs(config, family)
            values, gradients = _differences(_with_small_tower(cut, config), family, processor)
        except FAILURES as error:
            raise ProbeError(
                f"{config.model_type} at {path} cannot be shown pictures: no small cut of it runs with one "
                f"({type(error).__name__}: {error})"
            ) from error
    if values > LOG_PROB_TOLERANCE or gradients > GRADIENT_TOLERANCE:
        raise ProbeError(
            f"{config.model_type} at {path} would be trained wrongly on pictures: its log-probs differ by {values:.2g} "
            f"from its own forward, its gradients by {gradients:.2g}. Take Qwen2.5-VL or Qwen3-VL, see docs/pictures.md"
        )
    return values


def _with_small_tower(cut: PretrainedConfig, whole: PretrainedConfig) -> PretrainedConfig:
    """Return the cut with a tower of two narrow blocks, of which one does whatever only some blocks of it do.

    Args:
        cut: Of the text decoder.
        whole: The model's, whose tower it is: windows and patches keep their sizes.
    """
    fields = cut.to_dict()
    vision: dict[str, Any] = whole.vision_config.to_dict()
    fields["vision_config"] = vision
    width = "embed_dim" if "embed_dim" in vision else "hidden_size"
    out = "out_hidden_size" if "out_hidden_size" in vision else "hidden_size"
    heads = vision["num_heads"]
    vision[width] = vision[width] // heads * _HEADS
    vision["num_heads"], vision["depth"] = _HEADS, _BLOCKS
    if "intermediate_size" in vision:
        vision["intermediate_size"] = _FEED_FORWARD
    vision[out] = cut.get_text_config().hidden_size
    for name, value in vision.items():
        if name.endswith("_indexes") and isinstance(value, list):
            vision[name] = [0] if value else []
    return type(cut).from_dict(fields)


def _differences(config: PretrainedConfig, family: Family, processor: PictureProcessor) -> tuple[float, float]:
    """Return the largest difference of a log-prob, and the largest relative difference of a gradient."""
    own = family.build(config)
    for name, parameter in own.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, parameter.flatten(1).shape[-1] ** -0.5)
        elif not name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    model = family.build(config, ATTENTION_NAME)
    model.load_state_dict(own.state_dict())
    prepare(model, max_model_len=_LONGEST, recompute=True)
    module = PackedCausalLM(model)
    rows = _rows(config, processor)
    picked = tuple(range(len(rows.prompts)))
    packed = pack_micro_batch(
        rows, picked, share_prefix=True, wanted="next", device=_CPU, sight=Sight(backbone_of(model), processor)
    )
    found = packed.unpack(module(packed, 1.0, False)[0])
    alone = torch.stack([_alone(own, processor, rows, row, found.shape[1]) for row in picked])
    weights = torch.randn(alone.shape) * (alone != 0)
    (found * weights).sum().backward()
    (alone * weights).sum().backward()
    wanted = {name: parameter.grad for name, parameter in own.named_parameters()}
    floor = 1e-3 * max(float(grad.norm()) for grad in wanted.values() if grad is not None)
    worst = 0.0
    for name, parameter in model.named_parameters():
        one, other = parameter.grad, wanted[name]
        if one is None and other is None:
            continue
        one = torch.zeros_like(parameter) if one is None else one
        other = torch.zeros_like(parameter) if other is None else other
        worst = max(worst, float((one - other).norm()) / max(float(other.norm()), floor))
    return float((found - alone).detach().abs().max()), worst


def _rows(config: PretrainedConfig, processor: PictureProcessor) -> TokenRows:
    """Return four rows of two prompts, the second of which shows the first one's picture and another."""
    rng, tokens = np.random.default_rng(0), config.get_text_config().vocab_size
    shows = ([0], [1, 0])
    prompts: list[np.ndarray] = []
    pictures: list[tuple[Picture, ...]] = []
    for shown, length in zip(shows, _TEXT, strict=True):
        ids, placed = [*rng.integers(4, tokens, 2)], []
        for number in shown:
            data = _noise(*_SIDES[number])
            count = processor.num_tokens(*_SIDES[number])
            placed.append(Picture(data, digest_of(data), len(ids), count))
            ids += [config.image_token_id] * count + [*rng.integers(4, tokens, 2)]
        prompt = np.array([*ids, *rng.integers(4, tokens, length)], np.int64)
        prompt = _without(prompt, config.image_token_id, placed)
        prompts += [prompt] * len(_ANSWER)
        pictures += [tuple(placed)] * len(_ANSWER)
    lengths = np.array(_ANSWER * len(shows))
    trained = np.arange(max(_ANSWER))[None] < lengths[:, None]
    answers = rng.integers(4, tokens, trained.shape)
    answers[answers == config.image_token_id] = 4 if config.image_token_id != 4 else 5
    return TokenRows(prompts, answers, lengths, trained, None, pictures)


def _without(prompt: np.ndarray, token: int, pictures: list[Picture]) -> np.ndarray:
    """Return a prompt in which the token stands for pictures alone."""
    is_place = np.zeros(len(prompt), bool)
    for picture in pictures:
        is_place[picture.start : picture.start + picture.length] = True
    return np.where(~is_place & (prompt == token), 5 if token == 4 else 4, prompt)


def _noise(width: int, height: int) -> bytes:
    from PIL import Image

    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def _alone(model: PreTrainedModel, processor: PictureProcessor, rows: TokenRows, row: int, width: int) -> Tensor:
    """Return the log-probs `(R,)` of a row's answer by the model's own forward."""
    assert rows.pictures is not None, "all rows show pictures"
    prompt, answer = rows.prompts[row], rows.responses[row, : rows.response_lengths[row]]
    tokens = torch.from_numpy(np.concatenate([prompt, answer]))[None]
    kinds = torch.zeros_like(tokens, dtype=torch.int32)
    for picture in rows.pictures[row]:
        kinds[0, picture.start : picture.start + picture.length] = 1
    pixels = [processor.pixels(picture) for picture in rows.pictures[row]]
    logits = model(
        input_ids=tokens,
        pixel_values=torch.cat([each.patches for each in pixels]),
        image_grid_thw=torch.tensor([each.grid for each in pixels]),
        mm_token_type_ids=kinds,
    ).logits[0]
    found = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.from_numpy(answer)[:, None])[:, 0]
    return torch.nn.functional.pad(found, (0, width - len(found)))
