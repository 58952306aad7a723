"""Pictures and videos through a model: from files to pixels, from pixels to their places in a row, and positions.

A model that sees has a tower, which makes a few vectors of a picture, and puts each in the place of a token of the
prompt that stands for it. Its positions have three axes (M-RoPE, arXiv:2409.12191): a picture's tokens differ by row
and column, and the text behind it goes on where the larger of the two ends.

Pixels are made by the image processor of the model's folder, in every process in the same way; positions by the model's
own `get_rope_index`. So a family is supported if its model has that method, a tower behind `get_image_features`, and
the number of its tokens follows from a picture's size: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and what is built like them.
Frames of a video go through the same tower, and take their places in the same way (`hrl.models.videos`).

The tower runs once for every picture of a micro-batch, however many samples show it. Where another rank may run it, it
runs on a blank picture if there is none: every rank has to join the collectives of its blocks.
"""

from __future__ import annotations

import functools
import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hrl.models.hf_config import load_config
from hrl.models.videos import VideoProcessor
from hrl.pictures import FORMATS, NO_LIMITS, ORIENTATION, UNREADABLE, Picture, PictureError, PixelLimits

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig

#: Bytes of pixels that a process keeps.
_KEPT_BYTES = 512 * 2**20
_NEEDED = ("get_rope_index", "get_image_features", "get_placeholder_mask")
_TEXT, _IMAGE, _VIDEO = 0, 1, 2
"""Kinds of a token, as `get_rope_index` takes them."""
_AXES = 3
_MOST_TOKENS = 1 << 20
"""That stand for one picture."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""EXIF's orientations → what puts a picture the right way up, as `ImageOps.exif_transpose` has them."""


# ---- from files to pixels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pixels:
    """What the tower reads of one picture, or of a video's frames.

    Attributes:
        patches: `(t * h * w, C)` float32.
        grid: t, h and w: of a video its patches in time, else 1; its rows and columns of patches.
    """

    patches: Tensor
    grid: tuple[int, int, int]


class PictureProcessor:
    """The image processor of a model's folder.

    Args:
        folder: Has `config.json` and `preprocessor_config.json`.
        trust_remote_code: The folder may run code.

    Attributes:
        token_id: The token that stands for a part of a picture.
        video_token_id: The token that stands for a part of a video; None if the model has none.
        own_tokens: These two, and those that a prompt has around them.
        merge: Patches of a token, in each direction.

    Raises:
        PictureError: The folder has no image processor, or the family's pictures are not understood here.
    """

    def __init__(self, folder: str | Path, *, trust_remote_code: bool = False) -> None:
        config = sighted_config(folder, trust_remote_code=trust_remote_code)
        self._folder, self._config = folder, config
        self.token_id, self.merge = config.image_token_id, config.vision_config.spatial_merge_size
        self.video_token_id: int | None = getattr(config, "video_token_id", None)
        others = (getattr(config, name, None) for name in ("vision_start_token_id", "vision_end_token_id"))
        self.own_tokens = [token for token in (self.token_id, self.video_token_id, *others) if token is not None]
        # Behind the look at the config: a model of text alone is asked whether it sees, and pays for no import.
        from transformers import AutoImageProcessor

        try:
            self._processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise PictureError(
                f"{folder} has no image processor that loads (preprocessor_config.json), and the rows have pictures: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
        if not hasattr(self._processor, "get_number_of_image_patches"):
            raise PictureError(
                f"{type(self._processor).__name__} of {folder} does not say how many tokens a picture takes; hrl knows "
                "pictures of models such as Qwen2-VL, Qwen2.5-VL and Qwen3-VL"
            )
        self._kept: OrderedDict[str, Pixels] = OrderedDict()
        self._kept_bytes = 0

    @functools.cached_property
    def videos(self) -> VideoProcessor:
        """The video processor of the folder.

        Raises:
            PictureError: There is none, or it is not understood.
        """
        return VideoProcessor(self._folder, self._config, self.merge)

    def num_tokens(self, width: int, height: int, limits: PixelLimits = NO_LIMITS) -> int:
        """Return how many tokens stand for a picture of this size, shown within these limits.

        Raises:
            ValueError: The processor takes no picture of such a shape, or shows it larger than any model reads.
        """
        given = {"min_pixels": limits.least, "max_pixels": limits.most}
        options = {name: number for name, number in given.items() if number is not None}
        tokens = int(self._processor.get_number_of_image_patches(height, width, options)) // self.merge**2
        if tokens > _MOST_TOKENS:
            raise ValueError(
                f"a picture of {width} × {height} pixels would be {tokens:,} tokens long, and no prompt has more than "
                f"{_MOST_TOKENS:,}: look at its 'min_pixels'"
            )
        return tokens

    def _options(self, limits: PixelLimits) -> dict[str, Any]:
        """Return these limits as arguments of the processor, of which a call takes both together."""
        if limits == NO_LIMITS:
            return {}
        least, most = self._processor.size["shortest_edge"], self._processor.size["longest_edge"]
        return {"size": {"shortest_edge": limits.least or least, "longest_edge": limits.most or most}}

    def pixels(self, picture: Picture) -> Pixels:
        """Return what the tower reads of a picture or of a video's frames, which is kept for a while.

        Raises:
            PictureError: Another number of tokens stands for it than its pixels make.
        """
        found = self._kept.get(picture.digest)
        if found is None:
            found = self._made(picture)
            self._keep(picture.digest, found)
        else:
            self._kept.move_to_end(picture.digest)
        return found

    def _made(self, picture: Picture) -> Pixels:
        if picture.clip is not None:
            return Pixels(
                self.videos.patches([decoded(file) for file in picture.files], picture.clip.grid), picture.clip.grid
            )
        try:
            with decoded(picture.data) as image:
                made = self._processor(images=[image], return_tensors="pt", **self._options(picture.limits))
        except UNREADABLE as error:
            raise PictureError(
                f"picture {picture.digest} can't be read ({error}): has its file changed since the run looked at it?"
            ) from error
        grid = tuple(made["image_grid_thw"][0].tolist())
        if int(np.prod(grid)) != picture.length * self.merge**2:
            raise PictureError(
                f"picture {picture.digest} makes a grid of {grid[1]} by {grid[2]} patches here, and "
                f"{picture.length} tokens stand for it: the image processor of {self._folder} is not the one by which "
                "the driver counts. Have the same version of transformers and the same model folder on every node, and "
                "critics, reward models and teachers whose preprocessor_config.json has the policy's sizes"
            )
        return Pixels(made["pixel_values"].float(), grid)

    def _keep(self, digest: str, pixels: Pixels) -> None:
        self._kept[digest] = pixels
        self._kept_bytes += pixels.patches.nbytes
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.patches.nbytes

    @functools.cached_property
    def blank(self) -> Pixels:
        """The smallest picture, of which one token is made; its patches are zero."""
        side = self.merge
        width = 3 * self._processor.temporal_patch_size * self._processor.patch_size**2
        return Pixels(torch.zeros(side * side, width), (1, side, side))


@contextmanager
def decoded(data: bytes) -> Iterator[Image]:
    """Open a picture's file as RGB, the right way up; what is transparent becomes white, as in verl."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=FORMATS) as stored:
        stored.load()  # where a PNG's EXIF stands behind its pixels
        # Not `ImageOps.exif_transpose`, which writes all of the EXIF anew and fails on fields of another type.
        turn = _TURNS.get(stored.getexif().get(ORIENTATION, 1))
        image = stored if turn is None else stored.transpose(Image.Transpose[turn])
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            shown = image.convert("RGBA")
            white = Image.new("RGBA", shown.size, "white")
            white.alpha_composite(shown)
            yield white.convert("RGB")
        elif image.mode.startswith("I;16"):  # Pillow would cut off what is brighter than 255 of 65,535
            yield Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        else:
            yield image.convert("RGB")


def sighted_config(folder: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the config of a model that sees.

    Raises:
        PictureError: There is none, or it describes no such model.
    """
    try:
        config = load_config(folder, {}, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise PictureError(f"{folder} has no config.json, which says how the model's prompts show a picture") from error
    if not sees(config):
        raise PictureError(
            f"the rows have pictures, and {config.model_type} at {folder} is no model that hrl can show them to: take "
            "one such as Qwen2.5-VL or Qwen3-VL"
        )
    return config


def sees(config: PretrainedConfig) -> bool:
    """Return whether a config describes a model whose pictures are understood here."""
    vision = getattr(config, "vision_config", None)
    return isinstance(getattr(config, "image_token_id", None), int) and hasattr(vision, "spatial_merge_size")


# ---- in a packed row -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedPictures:
    """The pictures of a packed row, or of padded ones, on the device.

    Attributes:
        patches: `(P, C)`, of all pictures, each once.
        grids: `(K, 3)` int64, of each picture.
        is_place: `(1, T)` bool, tokens of the row that stand for a part of a picture; of padded rows `(S, L)`.
        index: `(M,)` int64, which of the tower's results goes to each of them, row after row.
    """

    patches: Tensor
    grids: Tensor
    is_place: Tensor
    index: Tensor


class Sight:
    """How a model sees: its processor, and what its backbone does with pictures.

    Args:
        backbone: Of a transformers model, see `hrl.models.head.backbone_of`.
        processor: Of its folder.

    Raises:
        PictureError: The backbone lacks what is needed.
    """

    def __init__(self, backbone: nn.Module, processor: PictureProcessor) -> None:
        lacking = [name for name in _NEEDED if not hasattr(backbone, name)]
        if lacking:
            raise PictureError(
                f"{type(backbone).__name__} has no {', '.join(lacking)}: this version of transformers, or this family, "
                "shows its pictures in another way than hrl knows"
            )
        self._backbone = backbone
        self.processor = processor

    def positions(self, tokens: np.ndarray, pictures: Sequence[Picture]) -> np.ndarray:
        """Return the positions `(L, 3)` int64 of a sequence's tokens.

        Args:
            tokens: `(L,)` int64.
            pictures: Those that the sequence shows, in order, and its videos' moments.
        """
        kinds = np.full(len(tokens), _TEXT, np.int32)
        for picture in pictures:
            kinds[picture.start : picture.start + picture.length] = _IMAGE if picture.clip is None else _VIDEO
        grids = [self.processor.pixels(picture).grid for picture in pictures if picture.clip is None]
        clips = [picture.clip for picture in pictures if picture.clip is not None]
        found, _ = self._backbone.get_rope_index(
            input_ids=torch.from_numpy(tokens)[None],
            mm_token_type_ids=torch.from_numpy(kinds)[None],
            image_grid_thw=torch.tensor(grids) if grids else None,
            video_grid_thw=torch.tensor([clip.grid for clip in clips]) if clips else None,
            **({"second_per_grid_ts": torch.tensor([clip.seconds for clip in clips])} if clips else {}),
        )
        return np.ascontiguousarray(found[:, 0].numpy().T)

    def padded(
        self, rows: Sequence[tuple[Sequence[Picture], int]], width: int, device: torch.device
    ) -> PackedPictures | None:
        """Return the pictures of padded rows, each once; None if there is none.

        Args:
            rows: For each row its pictures, and where its sequence starts.
            width: Tokens of a row, padding included.
            device: Where they are wanted.

        Returns:
            `is_place` is `(B, width)`.
        """
        found, first = dict[str, Picture](), dict[str, int]()
        end = 0
        for pictures, _ in rows:
            for picture in pictures:
                if picture.digest not in found:
                    found[picture.digest], first[picture.digest] = picture, end
                    end += picture.length
        if not found:
            return None
        places = np.full((len(rows), width), -1, np.int64)
        for row, (pictures, start) in enumerate(rows):
            places[row, start:] = places_of(pictures, first, width - start)
        pixels = [self.processor.pixels(picture) for picture in found.values()]
        return PackedPictures(
            torch.cat([each.patches for each in pixels]).to(device),
            torch.tensor([each.grid for each in pixels], device=device),
            torch.from_numpy(places >= 0).to(device),
            torch.from_numpy(places[places >= 0]).to(device),
        )


def places_of(pictures: Sequence[Picture], digests: Mapping[str, int], length: int) -> np.ndarray:
    """Return for each of a sequence's first tokens which of the tower's results it gets; -1 for text.

    Args:
        pictures: Those that the sequence shows.
        digests: Picture → where its results start.
        length: L, tokens of the sequence.

    Returns:
        `(L,)` int64.
    """
    found = np.full(length, -1, np.int64)
    for picture in pictures:
        end = picture.start + picture.length
        found[picture.start : end] = digests[picture.digest] + np.arange(picture.length)
    return found


@contextmanager
def shown(backbone: nn.Module, pictures: PackedPictures) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Run the tower, and let the backbone put its results in their places inside the block.

    Args:
        backbone: The model's.
        pictures: Of the row that it will run.

    Yields:
        Keyword arguments of its forward; and a zero that depends on everything that the tower has computed.
    """
    features = backbone.get_image_features(pictures.patches, pictures.grids, return_dict=True)
    zero = torch.zeros((), dtype=torch.float32, device=pictures.patches.device)

    def taken(results: Sequence[Tensor] | Tensor) -> tuple[Tensor]:
        nonlocal zero
        whole = results if isinstance(results, Tensor) else torch.cat(tuple(results))
        zero = zero + 0.0 * whole.float().sum()
        return (whole.index_select(0, pictures.index),)

    features.pooler_output = taken(features.pooler_output)
    deeper = getattr(features, "deepstack_features", None)
    if deeper is not None:
        features.deepstack_features = [taken(layer) for layer in deeper]

    def placeholder_mask(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Not by token id, as the model's own: a sampled token may be the one that stands for a picture.
        mask = pictures.is_place[..., None]
        return mask, torch.zeros_like(mask)

    # The forward asks for them again. Transformers from 5.19 on takes them as an argument too, earlier ones do not.
    backbone.get_placeholder_mask = placeholder_mask
    backbone.get_image_features = lambda *args, **kwargs: features
    try:
        yield {"pixel_values": pictures.patches, "image_grid_thw": pictures.grids}, zero
    finally:
        del backbone.get_placeholder_mask, backbone.get_image_features
