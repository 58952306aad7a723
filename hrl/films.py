"""Films as cameras write them (MP4, MOV, MKV, WebM, AVI): how many frames one has, and some of them as pictures.

PyAV decodes them, which is FFmpeg as a Python package, and which a run needs for them alone. FFmpeg would read far more
than films, and playlists that name other files: a film is opened by what its first bytes say, from those bytes or one
file, and only with the codecs below.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hrl.errors import HrlError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from PIL.Image import Image

CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg")
MOST_PIXELS = 1 << 26
"""Of a frame, and of any picture that a run decodes, however small its file."""
_HEAD_BYTES = 12
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
"""With which an MP4 or a MOV may begin, behind four bytes of length."""
_UPRIGHT = {90: "ROTATE_90", -90: "ROTATE_270", 180: "ROTATE_180", -180: "ROTATE_180"}
"""How a film says that it lies, in degrees → what Pillow calls turning it upright."""
Scaled = Callable[["Image"], "Image"]
"""What a frame becomes."""


class FilmError(HrlError, ValueError):
    """A film can't be read."""


class Film(NamedTuple):
    """What a film is.

    Attributes:
        width, height: In pixels, of a frame as it is shown.
        num_frames: How many there are.
        rate: Frames per second, on average; None of a film whose frames have no times.
    """

    width: int
    height: int
    num_frames: int
    rate: float | None


class _Times(NamedTuple):
    """When the frames of a film are shown, in units of its stream and ascending; and those that begin anew."""

    frames: list[int]
    keys: list[int]


def demuxer_of(head: bytes) -> str | None:
    """Return what FFmpeg calls a film's format; None of a file that is none.

    Args:
        head: Its first 12 bytes.
    """
    if head[4:8] in _BOXES:
        return "mp4"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    return "avi" if head.startswith(b"RIFF") and head[8:12] == b"AVI " else None


def is_film(file: Path | bytes) -> bool:
    """Return whether a file begins as a film does.

    Raises:
        OSError: It can't be read.
    """
    if isinstance(file, bytes):
        return demuxer_of(file[:_HEAD_BYTES]) is not None
    with file.open("rb") as opened:
        return demuxer_of(opened.read(_HEAD_BYTES)) is not None


def look_at_film(file: Path | bytes) -> Film:
    """Return what a film is. Its packets are counted and its first frame is decoded.

    Raises:
        FilmError: It has no picture, is cut off, has a codec that is not read, or PyAV is not installed.
        OSError: The file can't be read.
    """
    with _opened(file) as (container, stream):
        times = _times(container, stream)
        if len(times.frames) < stream.frames:
            raise FilmError(f"it should have {stream.frames} frames, and {len(times.frames)} are there: is it cut off?")
        first = next(container.decode(stream), None)
        if first is None:
            raise FilmError("none of its frames can be decoded")
        width, height = first.width, first.height
        if abs(first.rotation) == 90:
            width, height = height, width
        length = times.frames[-1] - times.frames[0]
        rate = (len(times.frames) - 1) / float(length * stream.time_base) if length and stream.time_base else None
        return Film(width, height, len(times.frames), rate)


def frames_of_film(file: Path | bytes, chosen: Sequence[int], scaled: Scaled | None = None) -> list[bytes]:
    """Return frames of a film as PNG files, each as it is shown when its turn comes.

    Args:
        file: The film.
        chosen: Their numbers, ascending.
        scaled: Makes each as large as it is wanted; None leaves it.

    Raises:
        FilmError: One can't be decoded, or PyAV is not installed.
        OSError: The file can't be read.
    """
    found = list[bytes]()
    with _opened(file) as (container, stream):
        times = _times(container, stream)
        decoding = _decoded(container, stream)
        shown, following = None, next(decoding, None)
        for wanted in (times.frames[number] for number in chosen):
            key = times.keys[max(0, bisect_right(times.keys, wanted) - 1)] if times.keys else wanted
            if following is not None and following[0] < key <= wanted:  # what lies before it needs no decoding
                container.seek(key, stream=stream)
                decoding = _decoded(container, stream)
                shown, following = None, next(decoding, None)
            while following is not None and (shown is None or following[0] <= wanted):
                shown, following = following, next(decoding, None)
            if shown is None:
                raise FilmError(f"frame {chosen[len(found)]} can't be decoded")
            found.append(as_png(_upright(shown[1]), scaled))
    return found


@contextmanager
def _opened(file: Path | bytes) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a film, and tell FFmpeg's errors as one of ours."""
    try:
        import av
    except ImportError as error:
        raise FilmError(
            "it is decoded by PyAV, which is not installed: in hrl's checkout, uv pip install -e '.[films]'"
        ) from error
    with io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as opened:
        form = demuxer_of(opened.read(_HEAD_BYTES))
        if form is None:
            raise FilmError("it is neither an MP4, a MOV, an MKV, a WebM nor an AVI")
        opened.seek(0)
        try:
            with av.open(opened, mode="r", format=form, metadata_errors="replace") as container:
                if not container.streams.video:
                    raise FilmError("it has no pictures")
                stream = container.streams.video[0]
                codec = "none" if stream.codec_context is None else stream.codec_context.codec.canonical_name
                if codec not in CODECS:
                    raise FilmError(f"its pictures are in the codec {codec}, and hrl reads {', '.join(CODECS)}")
                stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
                yield container, stream
        except av.FFmpegError as error:
            raise FilmError(str(error)) from error


def _times(container: InputContainer, stream: VideoStream) -> _Times:
    """Return when frames are shown, without decoding them, and go back to the first."""
    frames, keys = [], []
    for packet in container.demux(stream):
        if (when := _when(packet)) is not None:
            frames.append(when)
            if packet.is_keyframe:
                keys.append(when)
    if not frames:
        raise FilmError("it has no frames")
    frames.sort()
    container.seek(frames[0], stream=stream)
    return _Times(frames, sorted(keys))


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[tuple[int, VideoFrame]]:
    """Yield frames from where a container stands, each with when it is shown."""
    for frame in container.decode(stream):
        if (when := _when(frame)) is not None:
            yield when, frame


def _when(part: Packet | VideoFrame) -> int | None:
    """Return when a packet's frame is shown, or a frame, in units of the stream; an AVI says when it is decoded."""
    return part.dts if part.pts is None else part.pts


def _upright(frame: VideoFrame) -> Image:
    from PIL.Image import Transpose

    image: Image = frame.to_image()
    turned = _UPRIGHT.get(round(frame.rotation))
    return image if turned is None else image.transpose(Transpose[turned])


def as_png(frame: Image, scaled: Scaled | None) -> bytes:
    """Return a frame of a film as a PNG file.

    Args:
        frame: One with transparency keeps its size.
        scaled: Makes it as large as it is wanted; None leaves it.
    """
    if scaled is not None and frame.mode == "RGB":
        frame = scaled(frame)
    file = io.BytesIO()
    frame.save(file, "PNG", compress_level=1)
    return file.getvalue()
