"""Which pictures a row's prompt shows, as a column of a batch: `multi_modal_data`, a tuple of pictures for each row.

A picture travels as the file that it is (PNG, JPEG, WebP), which is a fraction of its pixels, and all samples of a
prompt hold one object, which a pickle writes once. It becomes pixels in the process that needs them
(`hrl.models.pictures`), which keeps them for the next pass.

A video is frames, each a picture's file. Where tokens of a prompt that stand for it follow on each other it is one
entry of that tuple; where a model's prompts say the time between them, each moment is an entry of its own.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hrl.errors import DatasetError, HrlError
from hrl.films import FilmError, Scaled, as_png, frames_of_film, is_film

#: Name of the column, as verl calls it. A row without pictures has an empty tuple.
MULTI_MODAL_DATA = "multi_modal_data"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is read. Of the others that Pillow knows some start programs, such as Ghostscript for EPS."""
UNREADABLE = (OSError, SyntaxError, ValueError, IndexError, KeyError, EOFError, OverflowError, TypeError, struct.error)
"""What Pillow raises for a file that is broken, by format and place."""
ORIENTATION = 0x0112
"""EXIF's field that says which side is up."""
_DIGEST_BYTES = 16


class PictureError(HrlError, ValueError):
    """A model, or its folder, can't do with pictures what a run asks of it; the message says what is missing."""


class PixelLimits(NamedTuple):
    """Between how many pixels a picture is shown with, where its row says so; None is the processor's own limit."""

    least: int | None = None
    most: int | None = None


NO_LIMITS = PixelLimits()


@dataclass(frozen=True)
class Picture:
    """A picture of a prompt, or frames of a video that stand in one place of it.

    Attributes:
        data: The picture's file; of a video, that of its first frame here.
        digest: Of that file and its limits; of a video, of all its frames and how they are shown. Two pictures of one
            digest are the same picture.
        start: The first of the prompt's tokens that stand for it.
        length: How many tokens do.
        clip: What a video has beside its first frame; None of a picture.
        limits: Of a picture's size.
    """

    data: bytes
    digest: str
    start: int
    length: int
    clip: Clip | None = None
    limits: PixelLimits = NO_LIMITS

    @property
    def files(self) -> tuple[bytes, ...]:
        """The picture's file, or those of a video's frames."""
        return (self.data,) if self.clip is None else (self.data, *self.clip.frames)

    def __repr__(self) -> str:
        return f"Picture({self.digest}, tokens {self.start} to {self.start + self.length - 1})"


@dataclass(frozen=True)
class Clip:
    """Frames of a video.

    Attributes:
        frames: The files of those behind the first.
        grid: How many patches the tower makes of them, in time, down and across.
        seconds: From one patch in time to the next.
        moment: Which one of its video it is, where each moment stands in a place of its own.
    """

    frames: tuple[bytes, ...]
    grid: tuple[int, int, int]
    seconds: float
    moment: int = 0


def digest_of(data: bytes) -> str:
    """Return what tells a picture's file from another."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def digest_of_picture(data: bytes, limits: PixelLimits) -> str:
    """Return what tells a picture from another, and from the same one shown larger or smaller."""
    return digest_of(data) if limits == NO_LIMITS else digest_of(repr((digest_of(data), *limits)).encode())


def digest_of_frames(files: Sequence[bytes], grid: tuple[int, int, int], seconds: float) -> str:
    """Return what tells frames of a video from others, and from the same ones shown larger or slower."""
    return digest_of(repr(([digest_of(file) for file in files], grid, seconds)).encode())


@dataclass(frozen=True)
class PictureSource:
    """Where a picture is.

    Attributes:
        width, height: In pixels.
        path: Of its file; None if its bytes are here.
        data: The bytes of its file.
        limits: Of the size in which it is shown.
    """

    width: int
    height: int
    path: str | None = None
    data: bytes | None = None
    limits: PixelLimits = NO_LIMITS

    def read(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            DatasetError: The file can't be read any more.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None, "a picture has one of the two"
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise DatasetError(f"the picture {self.path} can't be read any more: {error}") from error

    @property
    def identity(self) -> list[Any]:
        """What tells it from another picture in a resumed run, as plain data."""
        sized = [] if self.limits == NO_LIMITS else [list(self.limits)]
        return [self.width, self.height, self.path or digest_of(self.data or b""), *sized]


@dataclass(frozen=True)
class VideoSource:
    """Where a video is.

    Attributes:
        width, height: In pixels, of every frame.
        num_frames: How many there are.
        rate: Frames per second; None where nobody has said.
        frames: Where each frame is, in order; none of a film.
        film: A file that has all frames, such as an MP4 or an animated WebP, of which some are taken.
        wanted_rate: Frames per second that are taken of a film; None leaves it to the model's processor.
    """

    width: int
    height: int
    num_frames: int
    rate: float | None = None
    frames: tuple[PictureSource, ...] = ()
    film: PictureSource | None = None
    wanted_rate: float | None = None

    def read(self, chosen: Sequence[int], scaled: Scaled | None = None) -> list[bytes]:
        """Return the files of these frames.

        Args:
            chosen: Their numbers, ascending.
            scaled: Makes a frame of a film, which no file has by itself, as large as it is wanted.

        Raises:
            DatasetError: They can't be read any more.
        """
        if self.film is None:
            return [self.frames[number].read() for number in chosen]
        what = self.film.path or f"of {self.width} × {self.height} pixels that a row has as bytes"
        file = self.film.data if self.film.path is None else Path(self.film.path)
        assert file is not None, "a film has one of the two"
        try:
            if is_film(file):
                return frames_of_film(file, chosen, scaled)
        except (FilmError, OSError) as error:
            raise DatasetError(f"the film {what} can't be read any more: {error}") from error
        from PIL import Image

        found = list[bytes]()
        try:
            with Image.open(io.BytesIO(self.film.read()), formats=FORMATS) as film:
                for number in chosen:
                    film.seek(number)
                    found.append(as_png(film.convert("RGBA" if film.has_transparency_data else "RGB"), scaled))
        except UNREADABLE as error:
            raise DatasetError(f"frame {chosen[len(found)]} of the film {what} can't be read: {error}") from error
        return found

    @property
    def identity(self) -> list[Any]:
        """What tells it from another video in a resumed run, as plain data."""
        parts = self.frames if self.film is None else (self.film,)
        return [self.rate, self.wanted_rate, *(part.identity for part in parts)]


Shown = PictureSource | VideoSource
"""What a prompt shows in one place of its text."""


def files_of(pictures: Sequence[Picture]) -> tuple[bytes, ...]:
    """Return the files of a prompt's pictures, without those of its videos."""
    return tuple(picture.data for picture in pictures if picture.clip is None)


def with_one_token_each(ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Return a prompt's tokens as people read them, with one for each picture or moment of a video."""
    shortened = list(ids)
    for picture in reversed(pictures):
        del shortened[picture.start + 1 : picture.start + picture.length]
    return shortened


def has_pictures(columns: Any) -> bool:
    """Return whether a batch has the column.

    Args:
        columns: Its `non_tensor_batch`.
    """
    return MULTI_MODAL_DATA in columns
