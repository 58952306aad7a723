"""Where the pictures and videos of a row are: what a column may hold of them.

A file is looked at with the row, and one that is cut off is found there: without decoding it where its format says how
it ends, which takes a tenth of a millisecond in place of several. A video is its frames: a list of pictures, a folder
of them, an array, or a film: an animated WebP, GIF or PNG, or what `hrl.films` reads.
"""

from __future__ import annotations

import base64
import errno
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hrl.files import expanded
from hrl.films import MOST_PIXELS, FilmError, is_film, look_at_film
from hrl.pictures import FORMATS, NO_LIMITS, ORIENTATION, UNREADABLE, PictureSource, PixelLimits, VideoSource

_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_FILE = "file://"
_DATA = "data:image/"
_STARTS = ("/9j/", "iVBORw0", "R0lGOD", "UklGR")
"""Of a JPEG, PNG, GIF and WebP in base64."""
_BASE64_WAY = "base64 is written as 'data:image/png;base64,…'"
_SHOWN = 60
_FRAMES = ("video", "frames", "bytes", "path")
"""Fields of a mapping that hold a video, the first one with a value."""
_RATES = ("fps", "sample_fps")
_PLACES = frozenset({"type", "image", "video", "path", "url", "base64"})
"""Fields of a part of a message that say where its picture or video is."""
_LIMITS = ("min_pixels", "max_pixels")
_SIZES = frozenset({"resized_height", "resized_width"})
_NOT_HERE = _SIZES.union(
    ("nframes", "min_frames", "max_frames", *_LIMITS, "total_pixels", "video_start", "video_end"),
)
"""Fields of rows for qwen-vl-utils, which change what is seen; of these, pictures may have the limits."""
_NUMBER = re.compile(r"(\d+)")
_FRAMES_WAY = (
    "Its frames can be written into a folder (ffmpeg -i clip.mp4 -vf fps=2 frames/%05d.jpg), which the row names: "
    '{"video": "frames", "fps": 2}'
)
_WAY_OUT = f"hrl reads MP4, MOV, MKV, WebM, AVI, and animated WebP, PNG and GIF. {_FRAMES_WAY}"
_OF_VIDEOS = "the model folder's video_preprocessor_config.json"
_LEAST = 2
_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of a `PIL.Image` that a PNG has too."""
_EXIF_OF_PNG = (b"eXIf", b"Raw profile type exif", b"tiff:Orientation")
"""Where a PNG says how it lies: Pillow decodes it before it looks there."""
_END_OF_JPEG, _HEAD_OF_RIFF = b"\xff\xd9", 8
_LYING = (5, 6, 7, 8)
"""Orientations of pictures that are stored on their side."""


class WrongPictureError(Exception):
    """What is wrong with a picture or a video of a row, in words."""


def picture_source(value: object, where: str) -> PictureSource:
    """Return where a picture is.

    Args:
        value: A path, bytes, a mapping with one of the two and maybe `min_pixels` and `max_pixels`, or a `PIL.Image`.
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
        return limited(picture_source(inner, where), value, where)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return PictureSource(*_size(data, where), data=data)
    if not isinstance(value, str) or not value:
        raise WrongPictureError(f"{where} is {_brief(value)}, expected a path, bytes, or a mapping with one of the two")
    if value.startswith(_DATA):
        return picture_source(_of_base64(value.partition(",")[2], where), where)
    path = _local(value, where, "picture")
    try:
        if not path.is_file():
            hint = f"; {_BASE64_WAY}" if value.startswith(_STARTS) else ""
            raise WrongPictureError(
                f"{where} is {_brief(str(path))}, and there is no such file (seen from {Path.cwd()}){hint}"
            )
        data = path.read_bytes()
    except OSError as error:
        raise WrongPictureError(f"{where} can't be read: {_in_words(error)}") from error
    return PictureSource(*_size(data, where), path=str(path.resolve()))


def limited(picture: PictureSource, said: Mapping[str, Any], where: str) -> PictureSource:
    """Return a picture with the limits of its size that a mapping says.

    Args:
        picture: The picture.
        said: Its mapping, or the part of a message that shows it: `min_pixels` and `max_pixels`, each if it has it.
        where: What it is called in messages.

    Raises:
        WrongPictureError: They are no limits, or there are sizes in their place.
    """
    sizes = sorted(name for name in _SIZES if said.get(name) is not None)
    if sizes:
        raise WrongPictureError(
            f"{where} has {', '.join(map(repr, sizes))}, which hrl does not read: resize the file, or give "
            "'min_pixels' and 'max_pixels'"
        )
    found = {name: said[name] for name in _LIMITS if said.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise WrongPictureError(f"{name!r} of {where} is {_brief(value)}, expected a number of pixels")
    own = dict(zip(_LIMITS, picture.limits, strict=True))  # what its mapping says holds where the part says nothing
    least, most = (int(found[name]) if name in found else own[name] for name in _LIMITS)
    if least is not None and most is not None and least > most:
        raise WrongPictureError(f"{where} has 'min_pixels' {least}, which is more than its 'max_pixels', {most}")
    return replace(picture, limits=PixelLimits(least, most)) if found else picture


def video_source(value: object, where: str) -> VideoSource:
    """Return where a video is.

    Args:
        value: A list of frames, each as `picture_source` takes it; an array `(T, H, W, 3)` of bytes; the path of a
            folder of frames; the path or the bytes of a film; or a mapping that has one of these as
            `video`, `frames`, `bytes` or `path`, and maybe `fps`: how many frames there are a second, or, of a film,
            how many are to be taken.
        where: What it is called in messages.

    Raises:
        WrongPictureError: It is nowhere, or no video.
    """
    if not isinstance(value, Mapping):
        return _video(value, None, where)
    _refuse_unread(value, where)
    inner = next((value[key] for key in _FRAMES if value.get(key) is not None), None)
    if inner is None or isinstance(inner, Mapping):
        raise WrongPictureError(f"{where} has none of {', '.join(map(repr, _FRAMES))}: {_brief(value)}")
    return _video(inner, _rate(value, where), where)


def video_of_part(part: Mapping[str, Any], own: object, where: str) -> object:
    """Return what `video_source` takes of a message's part that shows a video.

    Args:
        part: The part, which may say `fps`.
        own: What it says of where the video is (`part_source`); None if it is one of a column.
        where: What it is called in messages.

    Raises:
        WrongPictureError: The part says what is not read, or how fast a column's video is.
    """
    rest = {key: value for key, value in part.items() if key not in _PLACES and value is not None}
    _refuse_unread(rest, where)
    if own is None:
        if rates := [key for key in _RATES if key in rest]:
            raise WrongPictureError(
                f"{where} has {rates[0]!r}, and comes from a column: say it there, as {{'video': …, {rates[0]!r}: …}}"
            )
        return None
    return {**rest, **(own if isinstance(own, Mapping) else {"video": own})}


def _refuse_unread(said: Mapping[str, Any], where: str) -> None:
    named = sorted(_NOT_HERE & {key for key, field in said.items() if field is not None})
    if named:
        raise WrongPictureError(
            f"{where} has {', '.join(map(repr, named))}, which hrl does not read: sizes and numbers of frames are in "
            f"{_OF_VIDEOS}"
        )


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
        try:
            if not path.is_dir():
                if not path.is_file():
                    raise WrongPictureError(
                        f"{where} is {_brief(str(path))}, and there is no such file or folder (seen from {Path.cwd()})"
                    )
                return _film(path, rate, where)
            files = sorted((file for file in path.iterdir() if not file.name.startswith(".")), key=_in_counted_order)
        except OSError as error:
            raise WrongPictureError(f"{where} can't be read: {_in_words(error)}") from error
        frames = [picture_source(str(file), f"frame {file.name} of {where}") for file in files]
    elif isinstance(value, bytes | bytearray | memoryview):
        return _film(bytes(value), rate, where)
    elif isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        frames = [picture_source(frame, f"frame {number} of {where}") for number, frame in enumerate(value)]
    else:
        raise WrongPictureError(
            f"{where} is {_brief(value)}, expected its frames: a list of pictures, or a folder of them"
        )
    odd = next((number for number, frame in enumerate(frames) if frame.limits != NO_LIMITS), None)
    if odd is not None:
        raise WrongPictureError(
            f"frame {odd} of {where} has a limit of its own, and frames have the size that {_OF_VIDEOS} says"
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
    if is_film(file):
        try:
            width, height, number, rate = look_at_film(file)
        except FilmError as error:
            raise WrongPictureError(f"{where} is no video that can be read: {error}. {_FRAMES_WAY}") from error
        _require_moderate((width, height), where)
        return _taken_of(file, (width, height), number, rate, wanted_rate, where)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as film:
            number, size, milliseconds = getattr(film, "n_frames", 1), film.size, 0.0
            _require_moderate(size, where)
            for frame in range(number):
                film.seek(frame)
                milliseconds += float(film.info.get("duration") or 0.0)
            film.load()  # the last frame, of which a file that is cut off has a part
    except (Image.DecompressionBombError, *UNREADABLE) as error:
        raise WrongPictureError(f"{where} is no video that can be read ({str(error)[:_SHOWN]}): {_WAY_OUT}") from error
    rate = number / milliseconds * 1000 if milliseconds else None
    return _taken_of(file, size, number, rate, wanted_rate, where)


def _taken_of(
    file: Path | bytes, size: tuple[int, int], number: int, rate: float | None, wanted_rate: float | None, where: str
) -> VideoSource:
    """Return a video of whose frames some are taken."""
    if number < _LEAST:
        raise WrongPictureError(f"{where} is one picture, and a video has at least {_LEAST} frames")
    data = (
        PictureSource(*size, data=file) if isinstance(file, bytes) else PictureSource(*size, path=str(file.resolve()))
    )
    return VideoSource(*size, number, rate, film=data, wanted_rate=wanted_rate)


def _local(value: str, where: str, what: str) -> Path:
    if _URL.match(value):
        raise WrongPictureError(
            f"{where} is at {_brief(value)}: a run fetches nothing from addresses. Save the {what}, and name its path"
        )
    return expanded(value.removeprefix(_FILE))


def _in_words(error: OSError) -> str:
    """Return what kept a path from being looked at, with the way out where it is no path."""
    if error.errno == errno.ENAMETOOLONG:
        return f"it is too long for a path; {_BASE64_WAY}"
    return str(error)


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
    _require_moderate(image.size, where)
    buffer = io.BytesIO()
    try:
        (image if image.mode in _OF_PNG else image.convert("RGB")).save(buffer, "PNG")
    except UNREADABLE as error:  # its file is read only now
        raise WrongPictureError(f"{where} is no picture that can be read: {str(error)[:_SHOWN]}") from error
    return PictureSource(image.width, image.height, data=buffer.getvalue())


def _size(data: bytes, where: str) -> tuple[int, int]:
    """Return width and height of a picture as it is shown, and see that its file is whole."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            _require_moderate(image.size, where)
            if image.format == "PNG" and not any(mark in data for mark in _EXIF_OF_PNG):
                image.verify()  # the checksums of all its parts
                return width, height
            if not _ends_well(data, image.format):
                image.draft("RGB", (1, 1))  # of a JPEG, an eighth of its pixels in each direction
                image.load()
            return (height, width) if image.getexif().get(ORIENTATION, 1) in _LYING else (width, height)
    except (Image.DecompressionBombError, *UNREADABLE) as error:
        raise WrongPictureError(
            f"{where} is no picture that can be read ({', '.join(FORMATS)}): {str(error)[:_SHOWN]}"
        ) from error


def _require_moderate(size: tuple[int, int], where: str) -> None:
    """Refuse a picture whose pixels would fill the memory of every process that draws it; its file may be small."""
    width, height = size
    if width * height > MOST_PIXELS:  # while one that is transparent is drawn it takes up to 18 bytes a pixel
        raise WrongPictureError(
            f"{where} has {width} × {height} pixels, and hrl decodes at most {MOST_PIXELS:,}: a model sees a smaller "
            "picture in any case, so resize the file"
        )


def _ends_well(data: bytes, kind: str | None) -> bool:
    """Return whether a file's end is there, as far as its format says what that is; it may be there all the same."""
    if kind == "JPEG":
        return data.endswith(_END_OF_JPEG)
    return kind == "WEBP" and len(data) >= _HEAD_OF_RIFF + int.from_bytes(data[4:_HEAD_OF_RIFF], "little")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
