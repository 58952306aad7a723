"""Videos through a model: which frames it sees, how large, and in which places of the prompt.

What the video processors of transformers compute (`Qwen2VLVideoProcessor`, `Qwen3VLVideoProcessor`), from the settings
in the model's folder and to the last bit, but without torchvision, which they import: its resizing is torch's own
operator. Two frames at a time become one patch in time, in which the tower looks at pictures alone.

Families differ in how a prompt says the time. Qwen2.5-VL's tokens of a video follow on each other, and their positions
grow with the seconds between them. Qwen3-VL's processor writes the seconds before each moment, as text, and each
moment stands in its own place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import interpolate

from hrl.models.source import read_object
from hrl.pictures import PictureError, VideoSource

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig

_SAYS_TIMES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), False),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), True),
}
"""Families, and whether their processor writes the times of a video's moments into the prompt."""
_PER_FRAME, _WHOLE = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"
"""Processors that bound the pixels of a frame, or those of all frames together."""
_LIKE_IMAGES = {"ImageProcessor": "VideoProcessor", "Fast": "", "Pil": ""}
_FPS, _FEWEST, _MOST = 2.0, 4, 768
"""Of both processors, where the folder says nothing else: frames a second that are taken, and how many."""
_FILTERS = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, in which settings name a filter, and torch's names."""
_LARGEST_RATIO = 200
_BUDGET = 0.9
_FLOOR = 1.05
"""Of `cap_pixels_per_frame`: the part of a model's context that a video may take, and by how much the smallest size is
exceeded."""


@dataclass(frozen=True)
class Look:
    """How a model sees a video.

    Attributes:
        chosen: The frames that it sees.
        grid: Patches in time, down and across.
        seconds: From one patch in time to the next.
        times: When each of the chosen frames is shown, in seconds.
    """

    chosen: tuple[int, ...]
    grid: tuple[int, int, int]
    seconds: float
    times: tuple[float, ...]


class VideoProcessor:
    """The video processor of a model's folder.

    Args:
        folder: Has its settings: `video_processor` in `processor_config.json`, else `video_preprocessor_config.json`,
            else `preprocessor_config.json`.
        config: Of the model.
        merge: Patches of a token, in each direction.

    Attributes:
        says_times: Prompts have the seconds of each moment as text; else positions grow with time.

    Raises:
        PictureError: There are no settings, or another processor's, or the family's prompts are not understood.
    """

    def __init__(self, folder: str | Path, config: PretrainedConfig, merge: int) -> None:
        self._config, self._merge = config, merge
        if config.model_type not in _SAYS_TIMES:
            raise PictureError(
                f"the rows have videos, and hrl does not know how prompts of {config.model_type} show one: take "
                "Qwen2.5-VL or Qwen3-VL, or show its frames as pictures"
            )
        self.says_times = _SAYS_TIMES[config.model_type]
        settings, file = _settings(Path(folder))
        self._kind = _kind(settings, says_times=self.says_times)
        where = f"{folder}/{file}, which says how a video is read,"
        if self._kind not in (_PER_FRAME, _WHOLE):
            raise PictureError(f"{where} names {self._kind}; hrl knows {_PER_FRAME} and {_WHOLE}")
        size = dict(settings.get("size") or {})
        bounds = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        size |= {edge: settings[name] for edge, name in bounds.items() if settings.get(name) is not None}
        lacking = [name for name in ("patch_size", "image_mean", "image_std") if settings.get(name) is None]
        lacking += [f"size.{edge}" for edge in bounds if not isinstance(size.get(edge), int)]
        if lacking:
            raise PictureError(f"{where} has no {', '.join(lacking)}")
        off = [name for name in ("do_resize", "do_rescale", "do_normalize") if settings.get(name) is False]
        if off or settings.get("resample", 3) not in _FILTERS:
            raise PictureError(f"{where} has {off[0] if off else 'resample'}={settings.get((off or ['resample'])[0])}")
        self._smallest, self._largest = size["shortest_edge"], size["longest_edge"]
        self._patch, self._of_time = settings["patch_size"], settings.get("temporal_patch_size", 2)
        self._filter = _FILTERS[settings.get("resample", 3)]
        scale = settings.get("rescale_factor") or 1 / 255
        self._mean = torch.tensor(settings["image_mean"]) * (1.0 / scale)
        self._std = torch.tensor(settings["image_std"]) * (1.0 / scale)
        self._fps = float(settings.get("fps") or _FPS)
        self._fewest, self._most = settings.get("min_frames") or _FEWEST, settings.get("max_frames") or _MOST
        self._most_tokens = settings.get("max_video_tokens") if settings.get("cap_pixels_per_frame") else None

    # ---- which frames, and how large

    def look(self, video: VideoSource) -> Look:
        """Return how the model sees a video.

        All frames of a list, folder or array are seen; those without a rate count as taken at the processor's `fps`. Of
        a film as many a second as the row or the processor says are taken, evenly, between its `min_frames` and
        `max_frames`.

        Raises:
            ValueError: Its frames are of a shape that the processor does not take.
        """
        rate = video.rate or self._fps
        chosen = np.arange(video.num_frames)
        if video.film is not None:
            wanted = int(video.num_frames / rate * (video.wanted_rate or self._fps))
            wanted = min(max(wanted, self._fewest), self._most, video.num_frames)
            chosen = np.linspace(0, video.num_frames - 1, wanted).round().astype(int)
        height, width = self.size(len(chosen), video.height, video.width)
        grid = math.ceil(len(chosen) / self._of_time), height // self._patch, width // self._patch
        seen_rate = len(chosen) / video.num_frames * rate
        times = tuple((chosen / rate).tolist())
        return Look(tuple(chosen.tolist()), grid, self._of_time / seen_rate, times)

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return height and width in pixels that frames get: as they were, but whole tokens and within the bounds.

        Args:
            num_frames: How many there are.
            height: Of each, in pixels.
            width: Of each, in pixels.

        Raises:
            ValueError: They are too narrow, or too many for the folder's limit.
        """
        factor, least, most = self._patch * self._merge, self._smallest, self._largest
        if self._kind == _WHOLE and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > _LARGEST_RATIO:
            raise ValueError(f"frames of {width} × {height} pixels are longer than {_LARGEST_RATIO} times their width")
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        floor = int(least * _FLOOR)
        if self._kind == _PER_FRAME:
            if self._most_tokens is not None:
                budget = int(self._most_tokens * factor * factor * _BUDGET)
                most = max(min(most, budget * self._of_time // num_frames), floor)
            pixels, counted = height * width, tall * wide
        else:
            if self._most_tokens is not None:
                most = max(min(self._most_tokens * factor * factor, most // num_frames), floor) * num_frames
            of_time = round(num_frames / self._of_time) * self._of_time
            pixels, counted = num_frames * height * width, of_time * tall * wide
        if counted > most:
            beta = math.sqrt(pixels / most)
            return tuple(max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))  # type: ignore[return-value]
        if counted < least:
            beta = math.sqrt(least / pixels)
            return tuple(math.ceil(side * beta / factor) * factor for side in (height, width))  # type: ignore[return-value]
        return tall, wide

    # ---- where in the prompt

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Return how many tokens stand for patches of such a grid."""
        return math.prod(grid) // self._merge**2

    def moments(self, look: Look) -> Iterator[tuple[slice, tuple[int, int, int]]]:
        """Yield for each place in which the video stands which of the chosen frames it shows, and its grid."""
        time, height, width = look.grid
        if not self.says_times:
            yield slice(0, len(look.chosen)), look.grid
            return
        for moment in range(time):
            yield slice(moment * self._of_time, (moment + 1) * self._of_time), (1, height, width)

    def spread(self, video: VideoSource, token: Callable[[int], str]) -> tuple[str, str, str]:
        """Return what stands for a video in the text of a prompt.

        Args:
            video: Where it is.
            token: From a token's number to its text.

        Returns:
            A text that is taken away before the template's token of a video, one in its place, and one that is taken
            away behind it.
        """
        look = self.look(video)
        one = token(self._config.video_token_id)
        if not self.says_times:
            return "", one * self.num_tokens(look.grid), ""
        start, end = token(self._config.vision_start_token_id), token(self._config.vision_end_token_id)
        last = look.times[-1:]
        times = look.times + last * (-len(look.times) % self._of_time)
        shown = []
        for moment, (_, grid) in enumerate(self.moments(look)):
            of_moment = times[moment * self._of_time : (moment + 1) * self._of_time]
            middle = (of_moment[0] + of_moment[-1]) / 2
            shown.append(f"<{middle:.1f} seconds>{start}{one * self.num_tokens(grid)}{end}")
        return ("", "".join(shown), "") if _keeps_marks() else (start, "".join(shown), end)

    # ---- pixels

    def scaled(self, frame: Image, grid: tuple[int, int, int]) -> Image:
        """Return a frame as small as the tower reads it, so that no more of it travels; the pixels are those it reads.

        Args:
            frame: In RGB.
            grid: t, h and w, in patches.
        """
        from PIL.Image import fromarray

        height, width = (side * self._patch for side in grid[1:])
        if height * width >= frame.height * frame.width:
            return frame
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None].contiguous()
        return fromarray(self._of_size(pixels, (height, width))[0].permute(1, 2, 0).contiguous().numpy())

    def _of_size(self, frames: Tensor, pixels: tuple[int, int]) -> Tensor:
        """Return frames `(n, 3, height, width)` uint8 in another size, as the processor scales them."""
        if frames.shape[-2:] == pixels:
            return frames
        return interpolate(frames, pixels, mode=self._filter, antialias=True, align_corners=False)

    def patches(self, frames: Sequence[AbstractContextManager[Image]], grid: tuple[int, int, int]) -> Tensor:
        """Return what the tower reads of frames, `(t * h * w, C)` float32.

        Args:
            frames: Of one size.
            grid: t, h and w, in patches.

        Raises:
            PictureError: The frames are of several sizes, or not as many as the grid has.
        """
        made = []
        for frame in frames:
            with frame as image:
                made.append(torch.from_numpy(np.array(image)))
        time, height, width = grid
        if len({each.shape for each in made}) != 1 or math.ceil(len(made) / self._of_time) != time:
            raise PictureError(
                f"{len(made)} frames of a video can't be {time} patches in time, or are of several sizes"
            )
        video = torch.stack(made).permute(0, 3, 1, 2).contiguous()
        video = self._of_size(video, (height * self._patch, width * self._patch))
        video = (video.float() - self._mean[:, None, None]) / self._std[:, None, None]
        if missing := -len(video) % self._of_time:
            video = torch.cat([video, video[-1:].expand(missing, -1, -1, -1)])
        merge, patch = self._merge, self._patch
        cut = video.view(time, self._of_time, 3, height // merge, merge, patch, width // merge, merge, patch)
        return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * height * width, -1)


def _settings(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return the settings of a folder's video processor and the file that has them, as transformers looks for them."""
    nested = folder / "processor_config.json"
    if nested.is_file() and isinstance(found := read_object(nested).get("video_processor"), Mapping):
        return found, nested.name
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            return read_object(folder / name), name
    raise PictureError(f"{folder} has no video processor (video_preprocessor_config.json), and the rows have videos")


def _kind(settings: Mapping[str, Any], *, says_times: bool) -> str:
    """Return the name of the processor that settings are for."""
    named = settings.get("video_processor_type")
    if named is None:
        named = str(settings.get("image_processor_type") or "")
        for ending, other in _LIKE_IMAGES.items():
            named = named.replace(ending, other)
    return str(named) or (_WHOLE if says_times else _PER_FRAME)


def _keeps_marks() -> bool:
    """Return whether the marks around the template's token of a video stay: transformers took them away before 5.10."""
    return Version(version("transformers")) >= Version("5.10")
