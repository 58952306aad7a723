"""Check, before anything of a run starts, that a model family sees the same in training and alone.

`hrl.models.probe` compares what a family computes of text. Here a small cut of it, its tower cut to two blocks too,
reads rows with pictures, and with a video where the folder says how one is read: as training will, packed or padded,
with each picture computed once and positions of three axes, and by the model's own forward, one row at a time.
Log-probs and the gradients of all parameters, the tower's included, have to agree.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from hrl.models.cut import with_small_tower
from hrl.models.head import backbone_of
from hrl.models.hf_config import load_config
from hrl.models.loading import OWN_ATTENTION, ModelSource, prepare
from hrl.models.ops.attention import ATTENTION_NAME
from hrl.models.packed_model import TokenRows, pack_micro_batch
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
from hrl.pictures import Clip, Picture, PictureError, PictureSource, VideoSource, digest_of, digest_of_frames

_CPU = torch.device("cpu")
_SIDES = ((64, 64), (64, 96))
"""Width and height of the pictures: the second has another number of rows than columns."""
_LONGEST = 4096
"""Tokens of a picture beyond which the comparison would take minutes."""
_TEXT, _ANSWER = (7, 5, 6), (6, 4)
_FRAMES = 3
"""Of the video: two patches in time, of which the second has one frame twice."""


def require_sight(source: ModelSource, *, scalar: bool = False, packs_rows: bool = True) -> float:
    """Refuse a model whose pictures training would compute wrongly; return the largest difference of a log-prob.

    Args:
        source: The model's folder and its overrides.
        scalar: It is a critic or reward model, of which values are compared.
        packs_rows: Rows are packed; else padded.

    Raises:
        ProbeError: Names family and difference.
        PictureError: The folder's pictures are not understood.
    """
    overrides = json.dumps(dict(source.override_config), sort_keys=True)
    return _require_sight(source.path, overrides, source.trust_remote_code, scalar, packs_rows)


@cache
def _require_sight(path: str, overrides: str, trust_remote_code: bool, scalar: bool, packs_rows: bool) -> float:
    config = load_config(path, json.loads(overrides), trust_remote_code=trust_remote_code)
    processor = PictureProcessor(path, trust_remote_code=trust_remote_code)
    with unnoticed():
        auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
        family = Family(auto, _LONGEST, trust_remote_code)
        try:
            cut, _ = first_that_runs(config, family)
            values, gradients = _differences(with_small_tower(cut, config), family, processor, packs_rows=packs_rows)
        except FAILURES as error:
            raise ProbeError(
                f"{config.model_type} at {path} cannot be shown pictures: no small cut of it runs with one "
                f"({type(error).__name__}: {error})"
            ) from error
    if values > LOG_PROB_TOLERANCE or gradients > GRADIENT_TOLERANCE:
        what = "values" if scalar else "log-probs"
        raise ProbeError(
            f"{config.model_type} at {path} would be trained wrongly on pictures: its {what} differ by {values:.2g} "
            f"from its own forward, its gradients by {gradients:.2g}. Take Qwen2.5-VL or Qwen3-VL, see docs/pictures.md"
        )
    return values


def _differences(
    config: PretrainedConfig, family: Family, processor: PictureProcessor, *, packs_rows: bool
) -> tuple[float, float]:
    """Return the largest difference of a log-prob, and the largest relative difference of a gradient."""
    own = family.build(config)
    for name, parameter in own.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, parameter.flatten(1).shape[-1] ** -0.5)
        elif not name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    model = family.build(config, ATTENTION_NAME if packs_rows else OWN_ATTENTION)
    model.load_state_dict(own.state_dict())
    prepare(model, max_model_len=_LONGEST, recompute=True)
    module = family.wrap(model)
    rows = _rows(config, processor)
    picked = tuple(range(len(rows.prompts)))
    sight = Sight(backbone_of(model), processor)
    packed = pack_micro_batch(
        rows, picked, share_prefix=True, packs_rows=packs_rows, wanted="next", device=_CPU, sight=sight
    )
    found = packed.unpack(module(packed) if family.is_scalar else module(packed, 1.0, False)[0])
    alone = torch.stack([_alone(own, processor, rows, row, found.shape[1], family.is_scalar) for row in picked])
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
    """Return rows of two prompts, the second of which shows the first one's picture and another, and of a video's."""
    rng, tokens = np.random.default_rng(0), config.get_text_config().vocab_size
    # In a small vocabulary the two may be one, which is why no row shows both kinds.
    marks = config.image_token_id, getattr(config, "video_token_id", config.image_token_id)
    others = np.array([token for token in range(tokens) if token not in marks])[4:]
    stills = [
        Picture(data, digest_of(data), 0, processor.num_tokens(*side)) for side in _SIDES for data in (_noise(*side),)
    ]
    shows = [[stills[0]], [stills[1], stills[0]], _video(processor)]
    prompts: list[np.ndarray] = []
    pictures: list[tuple[Picture, ...]] = []
    for shown, length in zip(shows, _TEXT, strict=True):
        if not shown:
            continue
        ids, placed = [*rng.choice(others, 2)], []
        for picture in shown:
            placed.append(replace(picture, start=len(ids)))
            ids += [marks[picture.clip is not None]] * picture.length + [*rng.choice(others, 2)]
        prompts += [np.array([*ids, *rng.choice(others, length)], np.int64)] * len(_ANSWER)
        pictures += [tuple(placed)] * len(_ANSWER)
    lengths = np.array(_ANSWER * (len(prompts) // len(_ANSWER)))
    trained = np.arange(max(_ANSWER))[None] < lengths[:, None]
    return TokenRows(prompts, rng.choice(others, trained.shape), lengths, trained, None, pictures)


def _video(processor: PictureProcessor) -> list[Picture]:
    """Return the places of a video; none where the folder does not say how one is read."""
    try:
        videos = processor.videos
    except PictureError:
        return []
    width, height = _SIDES[1]
    frames = [PictureSource(width, height, data=_noise(width, height, frame)) for frame in range(_FRAMES)]
    video = VideoSource(width, height, _FRAMES, 2.0, tuple(frames))
    look, found = videos.look(video), []
    files = video.read(look.chosen)
    for moment, (at, grid) in enumerate(videos.moments(look)):
        digest = digest_of_frames(files[at], grid, look.seconds)
        clip = Clip(tuple(files[at][1:]), grid, look.seconds, moment)
        found.append(Picture(files[at][0], digest, 0, videos.num_tokens(grid), clip))
    return found


def _noise(width: int, height: int, frame: int = 0) -> bytes:
    from PIL import Image

    noise = np.random.default_rng(width * height + frame).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def own_arguments(processor: PictureProcessor, pictures: Sequence[Picture], length: int) -> dict[str, Tensor]:
    """Return what a model's own forward is told beside its tokens.

    Args:
        processor: Of its folder.
        pictures: Those that a sequence shows; at least one.
        length: Of the sequence, in tokens.
    """
    kinds = torch.zeros(1, length, dtype=torch.int32)
    told: dict[str, list[Any]] = {}
    for picture in pictures:
        pixels = processor.pixels(picture)
        is_video = picture.clip is not None
        kinds[0, picture.start : picture.start + picture.length] = 1 + is_video
        told.setdefault("pixel_values_videos" if is_video else "pixel_values", []).append(pixels.patches)
        told.setdefault("video_grid_thw" if is_video else "image_grid_thw", []).append(torch.tensor([pixels.grid]))
        if picture.clip is not None:
            told.setdefault("second_per_grid_ts", []).append(torch.tensor([picture.clip.seconds]))
    return {"mm_token_type_ids": kinds} | {name: torch.cat(parts) for name, parts in told.items()}


def _alone(
    model: PreTrainedModel, processor: PictureProcessor, rows: TokenRows, row: int, width: int, is_scalar: bool
) -> Tensor:
    """Return the log-probs `(R,)` of a row's answer by the model's own forward, or the values before its tokens."""
    assert rows.pictures is not None, "all rows show pictures"
    prompt, answer = rows.prompts[row], rows.responses[row, : rows.response_lengths[row]]
    tokens = torch.from_numpy(np.concatenate([prompt, answer]))[None]
    told = own_arguments(processor, rows.pictures[row], tokens.shape[1])
    if is_scalar:
        found = model.score(backbone_of(model)(input_ids=tokens, **told).last_hidden_state)[0, len(prompt) - 1 : -1, 0]
    else:
        logits = model(input_ids=tokens, **told).logits[0]
        found = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.from_numpy(answer)[:, None])[:, 0]
    return torch.nn.functional.pad(found, (0, width - len(found)))
