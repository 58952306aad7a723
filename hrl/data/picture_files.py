"""Where the pictures and videos of a row are: what a column may hold of them.

A file is read with the row, to its end, so that one that is cut off is found there. A video is its frames: a list of
pictures, a folder of them, an array, or a film that Pillow reads (an animated WebP, GIF or PNG).
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hrl.files import expanded
from hrl.pictures import FORMATS, PictureSource, VideoSource

_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_FILE = "file://"
_DATA = "data:image/"
_SHOWN = 60
_FRAMES = ("video", "frames", "bytes", "path")
"""Fields of a mapping that hold a video, the first one with a value."""
_RATES = ("fps", "sample_fps")
_NOT_HERE = frozenset(
    {"nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels", "resized_height"}
    | {"resized_width", "video_start", "video_end"}
)
"""Fields of rows for qwen-vl-utils, which change what is seen."""
_NUMBER = re.compile(r"(\d+)")
_WAY_OUT = (
    "hrl decodes no films such as MP4. Write its frames into a folder (ffmpeg -i clip.mp4 -vf fps=2 frames/%05d.jpg), "
    'and name the folder: {"video": "frames", "fps": 2}'
)
_LEAST = 2
_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of a `PIL.Image` that a PNG has too."""
_ORIENTATION, _LYING = 0x0112, (5, 6, 7, 8)
"""EXIF's field, and its values for pictures that are stored on their side."""


class WrongPictureError(Exception):
    """What is wrong with a picture or a video of a row, in words."""


def picture_source(value: object, where: str) -> PictureSource:
    """Return where a picture is.

    Args:
        value: A path, bytes, a mapping with one of the two, or a `PIL.Image`.
        where: What it is called in messages.

    Raises:
        WrongPictureError: It is nowhere, or no picture.
    """
    from PIL import Image

    if isinstance(value, Image.Image):
        return _as_png(value, where)
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("bytes", "image", "path") if value.get(key) is not None), None)
        if inner is None or isinstance(inner, Mapping):
            raise WrongPictureError(f"{where} has neither 'bytes' nor 'path' nor 'image': {_brief(value)}")
        return picture_source(inner, where)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return PictureSource(*_size(io.BytesIO(data), where), data=data)
    if not isinstance(value, str) or not value:
        raise WrongPictureError(f"{where} is {_brief(value)}, expected a path, bytes, or a mapping with one of the two")
    if value.startswith(_DATA):
        return picture_source(_of_base64(value.partition(",")[2], where), where)
    path = _local(value, where, "picture")
    if not path.is_file():
        raise WrongPictureError(f"{where} is {str(path)!r}, and there is no such file (seen from {Path.cwd()})")
    return PictureSource(*_size(path, where), path=str(path.resolve()))


def video_source(value: object, where: str) -> VideoSource:
    """Return where a video is.

    Args:
        value: A list of frames, each as `picture_source` takes it; an array `(T, H, W, 3)` of bytes; the path of a
            folder of frames; the path or the bytes of a film that Pillow reads; or a mapping that has one of these as
            `video`, `frames`, `bytes` or `path`, and maybe `fps`: how many frames there are a second, or, of a film,
            how many are to be taken.
        where: What it is called in messages.

    Raises:
        WrongPictureError: It is nowhere, or no video.
    """
    if not isinstance(value, Mapping):
        return _video(value, None, where)
    named = sorted(_NOT_HERE & {key for key, field in value.items() if field is not None})
    if named:
        raise WrongPictureError(
            f"{where} has {', '.join(map(repr, named))}, which hrl does not read: sizes and numbers of frames are in "
            "the model folder's video_preprocessor_config.json"
        )
    inner = next((value[key] for key in _FRAMES if value.get(key) is not None), None)
    if inner is None or isinstance(inner, Mapping):
        raise WrongPictureError(f"{where} has none of {', '.join(map(repr, _FRAMES))}: {_brief(value)}")
    return _video(inner, _rate(value, where), where)


def holds_pixels(value: object) -> bool:
    """Return whether a value has arrays of pixels in it, which are large and go nowhere but to the model."""
    if isinstance(value, Mapping):
        return any(map(holds_pixels, value.values()))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.ndim > 1
    return isinstance(value, list | tuple | np.ndarray) and any(map(holds_pixels, value))


def _rate(value: Mapping[str, Any], where: str) -> float | None:
    given = next(((key, value[key]) for key in _RATES if value.get(key) is not None), None)
    if given is None:
        return None
    try:
        rate = float(given[1])
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 < rate < math.inf:
        raise WrongPictureError(f"{given[0]!r} of {where} is {_brief(given[1])}, expected frames per second")
    return rate


def _video(value: object, rate: float | None, where: str) -> VideoSource:
    if isinstance(value, np.ndarray) and value.dtype != object:
        frames = _frames_of_array(value, where)
    elif isinstance(value, str) and value:
        path = _local(value, where, "video")
        if not path.is_dir():
            if not path.is_file():
                raise WrongPictureError(
                    f"{where} is {str(path)!r}, and there is no such file or folder (seen from {Path.cwd()})"
                )
            return _film(path, rate, where)
        files = sorted((file for file in path.iterdir() if not file.name.startswith(".")), key=_in_counted_order)
        frames = [picture_source(str(file), f"frame {file.name} of {where}") for file in files]
    elif isinstance(value, bytes | bytearray | memoryview):
        return _film(bytes(value), rate, where)
    elif isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        frames = [picture_source(frame, f"frame {number} of {where}") for number, frame in enumerate(value)]
    else:
        raise WrongPictureError(
            f"{where} is {_brief(value)}, expected its frames: a list of pictures, or a folder of them"
        )
    if len(frames) < _LEAST:
        raise WrongPictureError(f"{where} has {len(frames)} frames, and a video has at least {_LEAST}")
    sizes = {(frame.width, frame.height) for frame in frames}
    if len(sizes) > 1:
        shown = " and ".join(f"{width} × {height}" for width, height in sorted(sizes)[:2])
        raise WrongPictureError(f"{where} has frames of several sizes, such as {shown} pixels")
    return VideoSource(*sizes.pop(), len(frames), rate, tuple(frames))


def _frames_of_array(value: np.ndarray, where: str) -> list[PictureSource]:
    from PIL import Image

    if value.ndim != 4 or value.shape[-1] != 3 or value.dtype != np.uint8:
        raise WrongPictureError(
            f"{where} is an array of {value.dtype} of shape {value.shape}, expected uint8 of (frames, height, width, 3)"
        )
    return [_as_png(Image.fromarray(frame), where) for frame in value]


def _film(file: Path | bytes, wanted_rate: float | None, where: str) -> VideoSource:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as film:
            number, size, milliseconds = getattr(film, "n_frames", 1), film.size, 0.0
            for frame in range(number):
                film.seek(frame)
                milliseconds += float(film.info.get("duration") or 0.0)
    except (UnidentifiedImageError, Image.DecompressionBombError, EOFError, OSError, ValueError) as error:
        raise WrongPictureError(f"{where} is no video that can be read ({str(error)[:_SHOWN]}): {_WAY_OUT}") from error
    if number < _LEAST:
        raise WrongPictureError(f"{where} is one picture, and a video has at least {_LEAST} frames")
    data = (
        PictureSource(*size, data=file) if isinstance(file, bytes) else PictureSource(*size, path=str(file.resolve()))
    )
    rate = number / milliseconds * 1000 if milliseconds else None
    return VideoSource(*size, number, rate, film=data, wanted_rate=wanted_rate)


def _local(value: str, where: str, what: str) -> Path:
    if _URL.match(value):
        raise WrongPictureError(
            f"{where} is at {_brief(value)}: a run fetches nothing from addresses. Save the {what}, and name its path"
        )
    return expanded(value.removeprefix(_FILE))


def _in_counted_order(file: Path) -> list[tuple[int, str]]:
    """Return by what frames of a folder are sorted: `2.png` comes before `10.png`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(file.name)]


def part_source(part: Mapping[str, Any], kind: str) -> object:
    """Return what a part of a message says of where its picture or video is, in whichever form; None if nothing."""
    found = next((part[key] for key in (kind, "path", "url") if part.get(key) is not None), None)
    return f"{_DATA}any;base64,{part['base64']}" if found is None and part.get("base64") is not None else found


def _of_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise WrongPictureError(f"{where} is no base64: {error}") from error


def _as_png(image: Any, where: str) -> PictureSource:
    buffer = io.BytesIO()
    try:
        (image if image.mode in _OF_PNG else image.convert("RGB")).save(buffer, "PNG")
    except (OSError, ValueError) as error:  # its file is read only now
        raise WrongPictureError(f"{where} is no picture that can be read: {str(error)[:_SHOWN]}") from error
    return PictureSource(image.width, image.height, data=buffer.getvalue())


def _size(file: Any, where: str) -> tuple[int, int]:
    """Return width and height of a picture as it is shown, and read its file to the end."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            image.draft("RGB", (1, 1))  # of a JPEG, an eighth of its pixels in each direction
            image.load()
            return (height, width) if image.getexif().get(_ORIENTATION, 1) in _LYING else (width, height)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise WrongPictureError(
            f"{where} is no picture that can be read ({', '.join(FORMATS)}): {str(error)[:_SHOWN]}"
        ) from error


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
