"""Films as cameras write them, made by FFmpeg here: what they are, and that each frame is the one asked for."""

from __future__ import annotations

import io
import random
import struct
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from hrl.films import Film, FilmError, frames_of_film, is_film, look_at_film

NUMBER, RATE, GREY = 40, 10, 6
"""How many frames, how many a second, and by how much each is brighter than the one before."""


def film(codec: str = "libx264", form: str = "mp4", file: io.BytesIO | str | None = None, **options: str) -> bytes:
    """Frames of 64 × 48 that become brighter, with a white corner."""
    frames = [np.full((48, 64, 3), GREY * number, np.uint8) for number in range(NUMBER)]
    for frame in frames:
        frame[:12, :12] = 255
    return encoded(frames, codec, form, file, **options)


def encoded(
    frames: list[np.ndarray],
    codec: str = "libx264",
    form: str = "mp4",
    file: io.BytesIO | str | None = None,
    **options: str,
) -> bytes:
    """A film of frames, of which one in nine begins anew."""
    file = io.BytesIO() if file is None else file
    with av.open(file, "w", format=form, options=options) as container:
        stream: Any = container.add_stream(codec, rate=RATE)
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = *frames[0].shape[:2], "yuv420p", 9
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return Path(file).read_bytes() if isinstance(file, str) else file.getvalue()


def numbers_of(pictures: list[bytes]) -> list[int]:
    """Which frames pictures are, by how bright they are."""
    found = []
    for data in pictures:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            found.append(round(float(np.asarray(image)[24:, 24:].mean()) / GREY))
    return found


@pytest.mark.parametrize(
    ("codec", "form"),
    [("libx264", "mp4"), ("libx265", "mov"), ("libsvtav1", "mp4"), ("libvpx", "webm"), ("libvpx-vp9", "matroska"),
     ("mpeg4", "avi")],
)  # fmt: skip
@pytest.mark.parametrize("chosen", [[0, 1, 2], [0, 13, 26, 39], [38, 39], [17], list(range(NUMBER))], ids=str)
def test_a_frame_is_the_one_that_was_asked_for(codec: str, form: str, chosen: list[int]) -> None:
    data = film(codec, form)
    assert look_at_film(data) == Film(64, 48, NUMBER, RATE)
    found = numbers_of(frames_of_film(data, chosen))
    assert np.abs(np.subtract(found, chosen)).max() <= (codec == "mpeg4"), "whose greys are coarse"


def test_a_film_that_lies_on_its_side_is_turned(tmp_path: Path) -> None:
    data = bytearray(film())
    matrix = data.index(b"tkhd") + 44
    struct.pack_into(">9i", data, matrix, 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)  # a quarter, clockwise
    path = tmp_path / "film.mov"
    path.write_bytes(data)
    assert is_film(path) and look_at_film(path) == Film(48, 64, NUMBER, RATE)
    with Image.open(io.BytesIO(frames_of_film(path, [0])[0])) as image:
        corners = [image.getpixel(place)[0] > 128 for place in ((2, 2), (45, 2), (45, 61), (2, 61))]  # type: ignore[index]
    assert image.size == (48, 64) and corners == [False, True, False, False]


def test_what_is_no_film_or_none_that_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = film(file=str(tmp_path / "film.mp4"), movflags="faststart")  # what is in it stands first
    with pytest.raises(FilmError, match=rf"it should have {NUMBER} frames, and \d+ are there: is it cut off\?"):
        look_at_film(whole[:-300])
    with pytest.raises(FilmError):
        look_at_film(film()[:-300])
    with pytest.raises(FilmError, match="its pictures are in the codec ffv1, and hrl reads h264, "):
        look_at_film(film("ffv1", "matroska"))
    for other in (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b""):
        assert not is_film(other)
        with pytest.raises(FilmError, match="neither an MP4"):
            look_at_film(other)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(FilmError, match=r"decoded by PyAV, which is not installed: .*uv pip install -e '.\[films\]'"):
        look_at_film(whole)


@pytest.mark.parametrize(("codec", "form"), [("libx264", "mp4"), ("libvpx", "webm"), ("mpeg4", "avi")])
def test_a_broken_film_ends_in_no_other_error(codec: str, form: str) -> None:
    chance, data, refused = random.Random(3), film(codec, form), 0
    for _ in range(40):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 30)):
            broken[chance.randrange(12, len(broken))] = chance.randrange(256)
        try:
            frames_of_film(bytes(broken), [0, look_at_film(bytes(broken)).num_frames - 1])
        except FilmError:
            refused += 1
    assert 0 < refused < 40
